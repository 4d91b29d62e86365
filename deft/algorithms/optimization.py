"""Adam on flat memory: all trainable parameters of a module are views of one tensor, and so are their gradients.

Clipping and stepping then cost a handful of operations instead of several for each parameter; on a CPU with small
networks that is a third of an update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from deft.algorithms.sharded_optimization import ShardedFlatAdam, ShardedFusedAdam, are_sharded
from deft.errors import InputError, RunError

Average: TypeAlias = Callable[[Sequence[Tensor]], None]
"""Replaces gradients by their mean over the processes that train together."""


def flat_adam(parameters: Iterable[nn.Parameter], learning_rate: float, epsilon: float) -> FlatAdam | ShardedFlatAdam:
    """The optimizer of PPO and GRPO, on weights that are whole or shared out among processes."""
    listed = list(parameters)
    if are_sharded(listed):
        return ShardedFlatAdam(listed, learning_rate, epsilon=epsilon)
    return FlatAdam(listed, learning_rate, epsilon)


def fused_adam(
    parameters: Iterable[nn.Parameter], learning_rate: float, weight_decay: float
) -> FusedAdam | ShardedFusedAdam:
    """The optimizer of what learns from single transitions, likewise."""
    listed = list(parameters)
    if are_sharded(listed):
        return ShardedFusedAdam(listed, learning_rate, weight_decay)
    return FusedAdam(listed, learning_rate, weight_decay)


def descend(loss: Tensor, *optimizers: FusedAdam | ShardedFusedAdam) -> None:
    """One step of each optimizer down the gradient of a loss."""
    give_gradients(loss, *optimizers)
    for optimizer in optimizers:
        optimizer.step()


def give_gradients(loss: Tensor, *optimizers: FusedAdam | ShardedFusedAdam, add: bool = False) -> None:
    """Hand the gradients of a loss to the optimizers, and to nothing else; `add`: to those that they have."""
    if len(optimizers) == 1 and isinstance(optimizers[0], ShardedFusedAdam):
        optimizers[0].take_gradients(loss, add)
        return
    parameters = [parameter for optimizer in optimizers for parameter in optimizer.parameters]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    start = 0
    for optimizer in optimizers:
        assert isinstance(optimizer, FusedAdam)
        stop = start + len(optimizer.parameters)
        before = optimizer.gradient.clone() if add else None
        optimizer.set_gradients(gradients[start:stop])
        if before is not None:
            optimizer.gradient += before
        start = stop


class FusedAdam:
    """AdamW on flat memory in one pass over it, with its step count and step size as tensors on the device.

    θ ← (1 − α λ) θ − α m̂ / (√v̂ + ε). Nothing here waits for the device, so that an update can be recorded as a CUDA
    graph: `learning_rate` is a tensor that a schedule writes into.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], learning_rate: float, weight_decay: float = 0.0, epsilon: float = 1e-8
    ) -> None:
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        if not trainable:
            raise InputError("nothing to train: every parameter is frozen")
        self.weight_decay, self.epsilon = weight_decay, epsilon
        self.parameters = trainable
        self._value, self.gradient = _flatten(trainable)
        self._first, self._second = torch.zeros_like(self._value), torch.zeros_like(self._value)
        device = self._value.device
        self._count = torch.zeros((), device=device)
        self.learning_rate = torch.tensor(learning_rate, device=device)
        self.average: Average | None = None

    @torch.no_grad()
    def set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Take one gradient a parameter, zero where there is none; one copy instead of an addition for each."""
        parts = [
            parameter.new_zeros(parameter.numel()) if gradient is None else gradient.reshape(-1)
            for parameter, gradient in zip(self.parameters, gradients, strict=True)
        ]
        torch.cat(parts, out=self.gradient)

    @torch.no_grad()
    def step(self, max_grad_norm: float | None = None) -> None:
        """One step with the gradients that are there, averaged and clipped to the norm that is given."""
        if self.average is not None:
            self.average([self.gradient])
        if max_grad_norm is not None or not self.gradient.is_cuda:
            norm = torch.linalg.vector_norm(self.gradient)
            check_gradient(norm)
        if max_grad_norm is not None:
            self.gradient.div_(torch.clamp(norm / max_grad_norm, min=1.0))
        self._count += 1
        torch._fused_adamw_(
            [self._value],
            [self.gradient],
            [self._first],
            [self._second],
            [],
            [self._count],
            lr=self.learning_rate,
            beta1=FlatAdam.BETA_1,
            beta2=FlatAdam.BETA_2,
            weight_decay=self.weight_decay,
            eps=self.epsilon,
            amsgrad=False,
            maximize=False,
        )

    def state_dict(self) -> dict[str, Any]:
        """Adam's moments and step count. The step size is a setting: a resumed run may have another."""
        parts = {"first": self._first, "second": self._second, "count": self._count}
        return {name: part.detach().cpu().clone() for name, part in parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`; refuses the state of another set of parameters."""
        saved, own = state["first"].numel(), self._first.numel()
        if saved != own:
            raise InputError(f"the optimizer state is for {saved} parameters; these networks have {own}")
        self._first.copy_(state["first"])
        self._second.copy_(state["second"])
        self._count.copy_(state["count"])


class FlatAdam:
    """Adam (Kingma & Ba, 2015) with global-norm gradient clipping, over one flat tensor for each parameter type.

    m ← β₁ m + (1 − β₁) g,  v ← β₂ v + (1 − β₂) g²,  θ ← θ − α m̂ / (√v̂ + ε). The parameters stay where they are in their
    module; their storage moves into the flat tensor. Made after the module is on its device.
    """

    BETA_1, BETA_2 = 0.9, 0.999

    def __init__(self, parameters: Iterable[nn.Parameter], learning_rate: float, epsilon: float = 1e-8) -> None:
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        if not trainable:
            raise InputError("nothing to train: every parameter of the policy is frozen")
        self.learning_rate = learning_rate
        self.epsilon = epsilon
        groups: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for parameter in trainable:
            groups.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        flat = [_flatten(members) for members in groups.values()]
        self._values, self._gradients = [value for value, _ in flat], [gradient for _, gradient in flat]
        self._first = [torch.zeros_like(value) for value in self._values]
        self._second = [torch.zeros_like(value) for value in self._values]
        self._count = 0
        self.average: Average | None = None

    def zero_gradients(self) -> None:
        """Set every gradient to zero in place."""
        for gradient in self._gradients:
            gradient.zero_()

    @torch.no_grad()
    def step(self, max_grad_norm: float | None = None) -> Tensor:
        """Average over the processes, clip to the global norm, step, and return the norm before clipping."""
        if self.average is not None:
            self.average(self._gradients)
        norms = [torch.linalg.vector_norm(gradient) for gradient in self._gradients]
        norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack([part.float() for part in norms]))
        check_gradient(norm)
        if max_grad_norm is not None:
            excess = torch.clamp(norm / max_grad_norm, min=1.0)
            for gradient in self._gradients:
                gradient.div_(excess)
        self._count += 1
        # θ − α/c₁ · m / (√v/√c₂ + ε)  =  θ − α√c₂/c₁ · m / (√v + ε√c₂),  with c = 1 − β^t
        correction_1 = 1 - self.BETA_1**self._count
        root_2 = math.sqrt(1 - self.BETA_2**self._count)
        for value, gradient, first, second in zip(
            self._values, self._gradients, self._first, self._second, strict=True
        ):
            first.lerp_(gradient, 1 - self.BETA_1)
            second.lerp_(gradient.square(), 1 - self.BETA_2)
            denominator = second.sqrt().add_(self.epsilon * root_2)
            value.addcdiv_(first, denominator, value=-self.learning_rate * root_2 / correction_1)
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Adam's moments, step count and step size."""
        return {
            "first": [moment.cpu() for moment in self._first],
            "second": [moment.cpu() for moment in self._second],
            "count": self._count,
            "learning_rate": self.learning_rate,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`; refuses the state of another set of parameters."""
        sizes, own = ([moment.numel() for moment in moments] for moments in (state["first"], self._first))
        if sizes != own:
            raise InputError(f"the optimizer state is for {sum(sizes)} parameters; the policy trains {sum(own)}")
        for moments, stored in ((self._first, state["first"]), (self._second, state["second"])):
            for moment, value in zip(moments, stored, strict=True):
                moment.copy_(value)
        self._count, self.learning_rate = state["count"], state["learning_rate"]


def check_gradient(norm: Tensor) -> None:
    """Raise an error before a gradient that is not finite reaches the weights; on a GPU nothing waits for the norm."""
    if not norm.is_cuda and not math.isfinite(norm):
        raise RunError(
            "the gradient is no longer finite, so the update was not applied: lower learning_rate, or check the "
            "rewards and observations for extreme values"
        )


def _flatten(parameters: list[nn.Parameter]) -> tuple[Tensor, Tensor]:
    """Move parameters into one tensor, as views of it, and make their gradients views of a second one."""
    value = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    gradient = torch.zeros_like(value)
    offset = 0
    for parameter in parameters:
        part = slice(offset, offset + parameter.numel())
        parameter.data = value[part].view(parameter.shape)
        parameter.grad = gradient[part].view(parameter.shape)
        offset += parameter.numel()
    return value, gradient
