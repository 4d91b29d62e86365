"""Epochs of minibatches that can be stopped between two of them and continued later, in another process too.

PPO and GRPO train with it: a slow model's update may take minutes, and a run must be able to end before it is done.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from deft.algorithms.algorithm import Metrics
from deft.errors import Stopped


@dataclass
class Epochs:
    """One update: what it trains on, and how far it is."""

    data: TensorDictBase | None  # None: this process has nothing, of several that train together
    losses: list[Metrics] = field(default_factory=list)  # of each minibatch so far
    first: int = 0  # of the latest epoch's, among them
    epoch: int = 0  # how many are complete
    order: Tensor | None = None  # of the epoch under way
    done: int = 0  # minibatches of the epoch under way
    ended_early: bool = False
    kept: dict[str, Any] = field(default_factory=dict)  # tensors that the algorithm needs when the epochs are done

    def train(
        self,
        num_epochs: int,
        draw: Callable[[], Tensor],
        parts: Callable[[Tensor], Iterable[Any]],
        step: Callable[[Any], Metrics],
        ends: Callable[[list[Metrics]], bool],
        should_stop: Callable[[], bool],
    ) -> bool:
        """Step on every minibatch of `parts(order)` until all epochs are done, or one `ends` them; False if stopped.

        A `step` that raises `Stopped` has changed nothing: it is repeated when the update is continued.
        """
        while self.epoch < num_epochs and not self.ended_early:
            if self.order is None:
                self.order, self.done, self.first = draw(), 0, len(self.losses)
            for minibatch in itertools.islice(parts(self.order), self.done, None):
                if should_stop():
                    return False
                try:
                    metrics = step(minibatch)
                except Stopped:
                    return False
                if metrics:  # a process may have no part in a minibatch
                    self.losses.append(metrics)
                self.done += 1
            self.order, self.epoch = None, self.epoch + 1
            self.ended_early = ends(self.losses[self.first :])
        return True

    def state_dict(self) -> dict[str, Any]:
        """All of it as tensors and plain data, on the CPU."""
        assert self.data is not None  # with several processes an update is not stopped
        own = {name: getattr(self, name) for name in ("first", "epoch", "done", "ended_early", "order")}
        return own | {
            "data": _plain(self.data),
            "losses": _packed(self.losses),
            "kept": {name: _plain(value) for name, value in self.kept.items()},
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], device: torch.device) -> Epochs:
        """The inverse of `state_dict`; what was measured is on `device` again."""
        losses = _unpacked(state["losses"], device)
        kept = {name: _restored(value) for name, value in state["kept"].items()}
        own = {name: state[name] for name in ("first", "epoch", "done", "ended_early", "order")}
        return cls(_restored(state["data"]), losses, kept=kept, **own)


def _packed(losses: list[Metrics]) -> dict[str, Any]:
    """The metrics of many minibatches as one tensor each, with their shapes: thousands of small ones save slowly."""
    return {
        name: {
            "values": torch.cat([metrics[name].reshape(-1) for metrics in losses]).cpu(),
            "shapes": [list(metrics[name].shape) for metrics in losses],
        }
        for name in (losses[0] if losses else ())
    }


def _unpacked(packed: dict[str, Any], device: torch.device) -> list[Metrics]:
    """The inverse of `_packed`."""
    columns = {}
    for name, column in packed.items():
        parts = column["values"].to(device).split([math.prod(shape) for shape in column["shapes"]])
        columns[name] = [part.reshape(shape) for part, shape in zip(parts, column["shapes"], strict=True)]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _plain(value: Any) -> Any:
    if isinstance(value, TensorDictBase):
        return {"batch_size": list(value.batch_size), "columns": value.cpu().to_dict()}
    return value.cpu() if isinstance(value, Tensor) else value


def _restored(value: Any) -> Any:
    if isinstance(value, dict):
        return TensorDict(value["columns"], batch_size=value["batch_size"])
    return value
