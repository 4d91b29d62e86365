"""Records updates on a GPU as one CUDA graph and replays it, so that the GPU does not wait for Python."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from deft.algorithms.algorithm import Metrics
from deft.algorithms.captured_step import WARM_UP, run_beside


class Source(Protocol):
    """A source of batches."""

    generator: torch.Generator

    def sample(self, batch_size: int) -> Any:
        """A batch."""


class Sampler(Source, Protocol):
    """Batches of a dataset."""

    capturable: bool
    """Whether `sample` may be recorded: it draws on the device, and without waiting for it."""

    def __len__(self) -> int: ...

    def shard(self, rank: int, count: int) -> None:
        """Draw from the share of one of several processes alone."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to draw the same batches."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse."""


class CapturedUpdate:
    """`algorithm.period` updates, each on a batch drawn inside the recording, as one graph.

    Python branches of a step are evaluated once, while recording: a recording therefore starts at a multiple of the
    period, and schedules write into tensors (`algorithm.schedule`) between replays.
    """

    def __init__(self, algorithm: Any, sampler: Source, batch_size: int) -> None:
        self._algorithm, self._sampler, self._batch_size = algorithm, sampler, batch_size
        self._warmed = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._metrics: Metrics = {}
        self._stream = torch.cuda.Stream()

    def run(self) -> tuple[int, Metrics]:
        """Some updates: how many, and the metrics of the last."""
        algorithm = self._algorithm
        algorithm.schedule()
        aligned = algorithm.version % algorithm.period == 0
        if self._graph is None and (self._warmed < WARM_UP * algorithm.period or not aligned):
            self._warmed += 1
            self._metrics = run_beside(self._stream, self._step)
            return 1, self._metrics
        if self._graph is None:
            self._record()
        assert self._graph is not None
        self._graph.replay()
        algorithm.version += algorithm.period
        return algorithm.period, self._metrics

    def _step(self) -> Metrics:
        return self._algorithm.step(self._sampler.sample(self._batch_size))

    def _record(self) -> None:
        algorithm = self._algorithm
        version = algorithm.version
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self._sampler.generator)
        with torch.cuda.graph(graph):
            for _ in range(algorithm.period):
                self._metrics = self._step()
        algorithm.version = version  # nothing ran
        self._graph = graph
