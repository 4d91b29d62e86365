"""The beginnings of episodes, drawn on the host by `TabletopEnv` itself, so that a seed gives the scenes of the CPU.

Environment i plays the episodes that a `TabletopEnv` with its seed plays: the first is that of `reset(seed)`, the
following those of `reset()`. They do not depend on actions, so they are drawn ahead of time: in worker processes, while
the simulation runs. After `num_episodes` of an environment, its first one follows again.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch

from deft.envs.tabletop.warp.model import Numbers, draw_block
from deft.machine import available_cores

MIN_PARALLEL = 256  # episodes for which worker processes are started
MAX_WORKERS = 32


class EpisodeSource:
    """The episodes of N environments on a device, drawn in blocks of one scene for each environment."""

    def __init__(self, arguments: dict[str, Any], num_envs: int, num_episodes: int, device: Any) -> None:
        """`arguments` are those of `TabletopEnv`; `num_episodes` is rounded up to whole scenes."""
        self._arguments = arguments
        self._block = int(arguments.get("scene_reset_interval", 1))
        self._num_blocks = max(1, -(-num_episodes // self._block))
        self._device = device
        self.groups = np.zeros(num_envs, np.int64)
        """For each environment, the number of its seed among the different ones."""
        self._tensors: dict[str, torch.Tensor] = {}
        self._starts: Sequence[Any] = []
        self._ready = 0  # blocks on the device
        self._next: Future[tuple[list[Numbers], list[Any]]] | None = None
        self._thread = ThreadPoolExecutor(1, "tabletop-episodes")
        self._pool: ProcessPoolExecutor | None = None
        cores = available_cores()
        self._workers = min(max(cores - 2, min(cores, 2)), MAX_WORKERS)
        if num_envs * self._block >= MIN_PARALLEL and self._workers > 1:
            self._pool = ProcessPoolExecutor(self._workers, multiprocessing.get_context("spawn"))

    @property
    def num_episodes(self) -> int:
        """The number of different episodes of an environment."""
        return self._num_blocks * self._block

    def start(self, seeds: Sequence[int]) -> None:
        """Draw the first episodes of all environments, from new seeds; those of equal seeds are drawn once."""
        if self._next is not None:
            self._next.result()
        different, self.groups = np.unique(np.asarray(seeds, object), return_inverse=True)
        self._starts, self._ready = different.tolist(), 0
        self._request()
        self._receive()

    def take(self, rows: torch.Tensor, episodes: torch.Tensor, latest: int) -> dict[str, torch.Tensor]:
        """Return the numbers of one episode for each of the environments `rows`; `latest` is the largest of them."""
        while self._ready < self._num_blocks and latest >= self._ready * self._block:
            self._receive()
        slots = episodes % self.num_episodes
        return {name: tensor[slots, rows] for name, tensor in self._tensors.items()}

    def close(self) -> None:
        """Stop the worker processes."""
        self._thread.shutdown(cancel_futures=True)
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _request(self) -> None:
        self._next = self._thread.submit(self._draw) if self._ready < self._num_blocks else None

    def _draw(self) -> tuple[list[Numbers], list[Any]]:
        """Draw the next block of all environments; return the numbers and where the following block starts."""
        if self._pool is None:
            numbers, states = draw_block(self._arguments, self._block, self._starts)
            return [numbers], states
        size = max(1, -(-len(self._starts) // (4 * self._workers)))
        parts = [self._starts[first : first + size] for first in range(0, len(self._starts), size)]
        drawn = list(self._pool.map(partial(draw_block, self._arguments, self._block), parts))
        return [numbers for numbers, _ in drawn], [state for _, states in drawn for state in states]

    def _receive(self) -> None:
        """Upload the block that was requested, and request the next one."""
        assert self._next is not None
        parts, self._starts = self._next.result()
        first = self._ready * self._block
        self._ready += 1
        self._request()
        for name in parts[0]:
            values = np.concatenate([part[name] for part in parts])[self.groups]  # [N, block, …]
            if name not in self._tensors:
                shape = (self.num_episodes, len(values), *values.shape[2:])
                dtype = torch.from_numpy(values[:0]).dtype
                self._tensors[name] = torch.zeros(shape, dtype=dtype, device=self._device)
            self._tensors[name][first : first + self._block] = torch.from_numpy(values).transpose(0, 1)
