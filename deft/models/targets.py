"""Copies of networks that are not trained: references and target networks, older versions, weights to save.

`frozen_copy` makes one, `soft_update` updates it. All copy buffers, such as normalisation statistics, exactly.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

Network = TypeVar("Network", bound=nn.Module)


def frozen_copy(network: Network) -> Network:
    """A copy without gradients."""
    copied = copy.deepcopy(network).requires_grad_(False)
    for module in copied.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # cuDNN needs contiguous weights, which copying splits
    return copied


@torch.no_grad()
def soft_update(target: nn.Module, source: nn.Module, tau: float) -> None:
    """Parameters: target ← (1 − τ) target + τ source. Buffers: target ← source, so τ = 0 copies these alone."""
    if tau:
        torch._foreach_lerp_(list(target.parameters()), list(source.parameters()), tau)
    buffers = list(target.buffers())
    if buffers:
        torch._foreach_copy_(buffers, list(source.buffers()))


def cpu_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy the tensors of a `state_dict` to the CPU; none is a view of a larger tensor, which would be saved whole."""
    return {name: value.detach().cpu().clone() for name, value in weights.items()}


class OlderCopy(Generic[Network]):
    """A copy of a network as it was `lag` to twice as many iterations ago."""

    def __init__(self, network: Network, lag: int) -> None:
        self.network, self.lag = frozen_copy(network).eval(), lag
        self._waiting = cpu_weights(network.state_dict())  # the weights that will be the older ones next

    def update(self, network: Network, iteration: int) -> None:
        """Every `lag` iterations: use the weights of so many iterations before, and keep those of `network`."""
        if iteration % self.lag == 0:
            self.network.load_state_dict(self._waiting)
            self._waiting = cpu_weights(network.state_dict())

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return the older weights, and those that follow them."""
        return {"older": cpu_weights(self.network.state_dict()), "waiting": self._waiting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict`; further keys are ignored."""
        self.network.load_state_dict(state["older"])
        self._waiting = state["waiting"]


NO_OLDER_COPY: dict[str, Any] = {"older": None, "waiting": {}}
"""The `state_dict` of an `OlderCopy` that does not exist."""
