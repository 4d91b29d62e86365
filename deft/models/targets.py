"""Copies of networks that are not trained: references and target networks, older versions, weights to save.

`frozen_copy` makes one, `soft_update` updates it. All copy buffers, such as normalisation statistics, exactly.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TypeVar

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
