"""The arrays that `ProcessVectorEnv` and its worker processes share: an unnamed file in memory, mapped by all of them.

The file disappears with the last process that has it open.
"""

from __future__ import annotations

import mmap
import os
import tempfile

import numpy as np

from deft.envs.layout import ActionLayout, EnvArrays, ObservationLayout


def open_memory() -> int:
    """Open an unnamed file in memory and return its descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("deft-envs")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class SharedArrays:
    """Arrays allocated one after another in a mapped file; without a file they only give the `size` in bytes."""

    def __init__(
        self,
        observation_layout: ObservationLayout,
        action_layout: ActionLayout,
        num_terms: int,
        num_envs: int,
        num_workers: int,
        memory: mmap.mmap | None = None,
    ) -> None:
        self.size = 0
        self._memory = memory
        self.env = EnvArrays.allocate(observation_layout, num_envs, num_terms, self._allocate)
        self.actions = self._allocate((num_envs, *action_layout.shape), action_layout.dtype)
        self.stepping = self._allocate((num_workers,), np.dtype(np.int64))
        """int64 [workers]: the environment that each worker is stepping."""

    def _allocate(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return the next array, aligned to a cache line."""
        offset = self.size
        count = int(np.prod(shape, dtype=np.int64))
        self.size += -(-count * dtype.itemsize // 64) * 64
        if self._memory is None:
            return np.zeros(shape, dtype)
        return np.frombuffer(self._memory, dtype, count, offset).reshape(shape)
