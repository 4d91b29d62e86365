"""Target networks: copies that follow the trained ones slowly."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import nn

Network = TypeVar("Network", bound=nn.Module)


def frozen_copy(network: Network) -> Network:
    """A copy that only moves with `soft_update`."""
    return copy.deepcopy(network).requires_grad_(False)


@torch.no_grad()
def soft_update(target: nn.Module, source: nn.Module, tau: float) -> None:
    """target ← (1 − τ) target + τ source."""
    torch._foreach_lerp_(list(target.parameters()), list(source.parameters()), tau)
