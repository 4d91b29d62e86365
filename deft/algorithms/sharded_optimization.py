"""Adam on weights that are shared out among processes (FSDP): each keeps the moments of its own part of every weight.

Algorithms take it in place of `FlatAdam` and `FusedAdam`, whose flat memory needs whole weights, and whose state it
reads and writes: a checkpoint does not say whether the weights were shared out, nor among how many.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from deft.errors import InputError

MOMENTS = {"first": "exp_avg", "second": "exp_avg_sq"}  # as the flat optimizers call them, and as torch does


def are_sharded(parameters: Iterable[Tensor]) -> bool:
    """Whether any of these is shared out."""
    return any(isinstance(parameter, DTensor) for parameter in parameters)


def whole(tensor: Tensor) -> Tensor:
    """A tensor that may be shared out, whole; all processes call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_of(value: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor, which every process has, shared out as a parameter of its shape is."""
    if not isinstance(parameter, DTensor):
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(value.to(parameter.device), mesh, placements, src_data_rank=None)


class ShardedAdam:
    """AdamW with global-norm gradient clipping: θ ← (1 − α λ) θ − α m̂ / (√v̂ + ε).

    The backward pass has averaged the gradients over the processes. A weight without a gradient has the gradient 0, as
    in flat memory: the moments of all weights are of one age. All processes call all methods.
    """

    learning_rate: Any

    def __init__(
        self, parameters: Iterable[nn.Parameter], learning_rate: float, weight_decay: float = 0.0, epsilon: float = 1e-8
    ) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        if not self.parameters:
            raise InputError("nothing to train: every parameter is frozen")
        self.learning_rate = learning_rate
        fused = all(parameter.device.type == "cuda" for parameter in self.parameters)
        self._adam = torch.optim.AdamW(
            self.parameters, learning_rate, eps=epsilon, weight_decay=weight_decay, fused=fused or None
        )
        for parameter in self.parameters:
            moments: dict[str, Any] = {name: torch.zeros_like(parameter) for name in MOMENTS.values()}
            count = torch.zeros((), device=parameter.device if fused else "cpu")
            self._adam.state[parameter] = {"step": count, **moments}
        self.zero_gradients()

    def zero_gradients(self) -> None:
        """Set every gradient to zero."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.zero_()

    def take_gradients(self, loss: Tensor, add: bool = False) -> None:
        """Those of a loss; `add`: to those that are there."""
        if not add:
            self.zero_gradients()
        loss.backward()

    @torch.no_grad()
    def step(self, max_grad_norm: float | None = None) -> Tensor:
        """Clip to the norm of the whole gradient, step, and return that norm before clipping."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        norm = whole(torch.nn.utils.get_total_norm(gradients))
        if max_grad_norm is not None:
            excess = torch.clamp(norm / max_grad_norm, min=1.0)
            for gradient in gradients:
                _local(gradient).div_(excess)
        for group in self._adam.param_groups:
            group["lr"] = float(self.learning_rate)
        self._adam.step()
        return norm

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _whole_moment(self, name: str) -> Tensor:
        """One tensor of all weights' moments, on the CPU of the first process; nothing in the others."""
        is_first = not distributed.is_initialized() or distributed.get_rank() == 0
        parts = []
        for parameter in self.parameters:  # one at a time: all of them together may not fit a device
            part = whole(self._adam.state[parameter][MOMENTS[name]])
            if is_first:
                parts.append(part.flatten().cpu())
        return torch.cat(parts) if parts else torch.empty(0)

    def _load_moment(self, name: str, value: Tensor) -> None:
        """The inverse; every process has the whole, and keeps its part."""
        sizes = [parameter.numel() for parameter in self.parameters]
        if value.numel() != sum(sizes):
            raise InputError(f"the optimizer state is for {value.numel()} parameters; the policy trains {sum(sizes)}")
        for parameter, part in zip(self.parameters, value.split(sizes), strict=True):
            self._adam.state[parameter][MOMENTS[name]].copy_(part_of(part.view(parameter.shape), parameter))

    @property
    def _count(self) -> float:
        return float(self._adam.state[self.parameters[0]]["step"])

    @_count.setter
    def _count(self, count: float) -> None:
        for parameter in self.parameters:
            self._adam.state[parameter]["step"].fill_(count)


class ShardedFlatAdam(ShardedAdam):
    """With the state of a `FlatAdam`."""

    def state_dict(self) -> dict[str, Any]:
        """Adam's moments, step count and step size."""
        moments = {name: [self._whole_moment(name)] for name in MOMENTS}
        return {**moments, "count": int(self._count), "learning_rate": self.learning_rate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse; refuses the state of another set of parameters."""
        for name in MOMENTS:
            self._load_moment(name, torch.cat(state[name]))
        self._count, self.learning_rate = state["count"], state["learning_rate"]


class ShardedFusedAdam(ShardedAdam):
    """With the state of a `FusedAdam`, and like there a tensor as step size, which schedules write into."""

    def __init__(self, parameters: Iterable[nn.Parameter], learning_rate: float, weight_decay: float = 0.0) -> None:
        super().__init__(parameters, learning_rate, weight_decay)
        self.learning_rate = torch.tensor(learning_rate)

    def state_dict(self) -> dict[str, Any]:
        """Adam's moments and step count. The step size is a setting: a resumed run may have another."""
        return {**{name: self._whole_moment(name) for name in MOMENTS}, "count": torch.tensor(self._count)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse; refuses the state of another set of parameters."""
        for name in MOMENTS:
            self._load_moment(name, state[name])
        self._count = float(state["count"])


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
