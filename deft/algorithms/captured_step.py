"""Records a gradient step on a GPU as a CUDA graph and replays it, so that the GPU does not wait for Python."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from deft.config.algorithm_settings import RolloutSettings
from deft.errors import InputError
from deft.models.policy import Policy

WARM_UP = 3  # steps run in the ordinary way first, so that libraries allocate what they need outside the recording
MOST_RECORDINGS = 4  # each keeps the memory of a step; minibatches of further sizes are not recorded


class CapturedStep:
    """A function of minibatches of tensors, replayed where it has a recording for their size.

    Its Python branches are evaluated once, while recording: what they depend on is part of `kind`.
    """

    def __init__(self, step: Callable[[Any], dict[str, Tensor]]) -> None:
        self._step = step
        self._seen: dict[Hashable, int] = {}
        self._recordings: dict[Hashable, _Recording] = {}
        self._stream = torch.cuda.Stream()

    def __call__(self, minibatch: TensorDictBase, kind: Hashable = None) -> dict[str, Tensor]:
        """The results of the step, which later calls do not overwrite."""
        key = kind, tuple(sorted((str(name), value.shape) for name, value in minibatch.items(True, True)))
        if key not in self._recordings:
            count = self._seen.get(key, 0)
            if count < WARM_UP or len(self._recordings) == MOST_RECORDINGS:
                self._seen[key] = count + 1
                return run_beside(self._stream, partial(self._step, minibatch))
            self._recordings[key] = _Recording(self._step, minibatch)
        return self._recordings[key].replay(minibatch)


class _Recording:
    def __init__(self, step: Callable[[Any], dict[str, Tensor]], minibatch: TensorDictBase) -> None:
        self._minibatch = minibatch.clone()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):  # other threads may use the GPU
            self._results = step(self._minibatch)

    def replay(self, minibatch: TensorDictBase) -> dict[str, Tensor]:
        self._minibatch.copy_(minibatch)
        self._graph.replay()
        return {name: value.clone() for name, value in self._results.items()}


def run_beside(stream: Any, step: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The results of a step on a stream of its own, as PyTorch asks for before a recording."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = step()
    torch.cuda.current_stream().wait_stream(stream)
    return found


def can_capture(policy: Policy, settings: RolloutSettings, compiles: bool) -> bool:
    """Whether the steps of a policy are to be captured; an error where `capture` is on and they cannot be."""
    on_gpu = next(policy.parameters()).is_cuda
    obstacles = {
        "needs a GPU": not on_gpu,
        "is for policies without memory": policy.recurrent,
        "needs gradient_accumulation 1": settings.gradient_accumulation > 1,
        "and compile exclude each other": compiles,
    }
    found = [obstacle for obstacle, applies in obstacles.items() if applies]
    if settings.capture == "on" and found:
        raise InputError(f"capture: 'on' {found[0]}; use auto")
    return not found and (settings.capture == "on" or (settings.capture == "auto" and policy.capturable))
