"""What travels between the learner and its workers: orders for steps one way, blocks of transitions the other.

Arrays cross without a copy where Ray can: a block's columns are read-only views of shared memory until they are
written into the buffer.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from deft.data.tensors import Key
from deft.envs.layout import Observation
from deft.envs.vector import Episode


@dataclass
class Order:
    """What a worker must do. Numbers are unique; a block that answers another order than the latest is rejected."""

    number: int
    version: int
    weights: list[Any]
    """The reference to the weights, in a list: the worker fetches them only when the version is new to it."""
    num_steps: int
    seconds: float | None = None
    """After so long the block ends with the steps that there are, at least one."""
    random: dict[str, Any] | None = None
    """The learner's random state, where the result must be that of collecting in its process."""
    state: dict[str, Any] | None = None
    """State of the environments, for a worker that does not have it."""
    seed: int = 0
    actions: list[np.ndarray] = field(default_factory=list)
    """Actions of the first steps, in place of the policy's."""
    keeps_state: bool = False
    """Whether the block brings the environments' state at its end."""
    group_seeds: list[int] | None = None
    """Play one episode in every environment, from a seed for each group, instead of continuing episodes."""
    round: int = 0
    """How often weights had been published when it was given."""


@dataclass
class End:
    """Where V(next observation) is wanted: the learner estimates it, in one batch for all workers."""

    step: int
    rows: np.ndarray
    observation: Observation
    memory: Any


@dataclass
class Block:
    """The steps that a worker made: columns {key: [t, n, …]} of its n environments, and the events in them."""

    number: int
    slot: int
    incarnation: int
    columns: dict[Key, Any]
    num_steps: int
    step_counts: list[int]
    episodes: list[tuple[int, Episode]]
    """(the step within the block, the episode)."""
    num_lost: int
    ends: list[End]
    random: dict[str, Any] | None
    state: dict[str, Any] | None
    seconds: float
    round: int = 0
    """The order's."""
    sequence: int = 0
    """Number of earlier blocks of this incarnation: the next one continues where this one ends."""


def pack_tensor(tensor: Tensor) -> Any:
    """A tensor as an array that crosses without a copy; types that numpy lacks go as bytes with their name."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return ("bfloat16", tensor.view(torch.int16).numpy())
    return tensor.numpy()


def unpack_tensor(packed: Any) -> Tensor:
    """The inverse of `pack_tensor`; it may be read-only memory, to be copied from."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of memory that it may not write
        if isinstance(packed, tuple):
            return torch.from_numpy(packed[1]).view(torch.bfloat16)
        return torch.from_numpy(packed)


def pack_weights(policy: nn.Module) -> dict[str, Any]:
    """A policy's weights and statistics as arrays."""
    return {name: pack_tensor(value) for name, value in policy.state_dict().items()}


def load_packed(policy: nn.Module, packed: dict[str, Any]) -> None:
    """Copy packed weights into a policy."""
    policy.load_state_dict({name: unpack_tensor(value) for name, value in packed.items()})
