"""What travels between the learner and its workers: orders for steps one way, blocks of transitions the other.

Arrays cross without a copy where Ray can: a block's columns are read-only views of shared memory until they are
written into the buffer.

Blocks of many workers make one rollout [T, N]: whose steps they are does not matter, only what follows what. A segment
is one environment's part of a block. Segments are concatenated, those of one environment after each other, and cut into
rows of T steps. If a row continues with another step than the segment's own next one, the segment ends: the step counts
as truncated, with V(next observation).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from deft import schema
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


def pack_leaves(td: TensorDictBase) -> dict[Any, Any]:
    """A TensorDict's leaves as arrays."""
    return {key: pack_tensor(value) for key, value in td.items(include_nested=True, leaves_only=True)}


def pack_weights(policy: nn.Module) -> dict[str, Any]:
    """A policy's weights and statistics as arrays."""
    return {name: pack_tensor(value) for name, value in policy.state_dict().items()}


def load_packed(policy: nn.Module, packed: dict[str, Any]) -> None:
    """Copy packed weights into a policy."""
    policy.load_state_dict({name: unpack_tensor(value) for name, value in packed.items()})


@dataclass(slots=True)
class Segment:
    """Steps `start` … `stop` − 1 of one environment of a block; `round` is how fresh the weights were that acted."""

    block: Block
    env: int
    start: int
    stop: int
    round: int

    def __len__(self) -> int:
        """Steps."""
        return self.stop - self.start

    @property
    def order(self) -> tuple[int, int, int, int, int]:
        """Sort key: consecutive segments of an environment follow each other."""
        return self.block.slot, self.env, self.block.incarnation, self.block.sequence, self.start

    def goes_on_with(self, other: Segment) -> bool:
        """Whether `other` starts with the step after this one's last."""
        if self.order[:3] != other.order[:3]:
            return False
        if self.block.sequence == other.block.sequence:
            return other.start == self.stop
        follows = other.block.sequence == self.block.sequence + 1
        return follows and other.start == 0 and self.stop == self.block.num_steps


def segments_of(block: Block, num_envs: int, round_: int) -> list[Segment]:
    """A block's environments apart."""
    return [Segment(block, env, 0, block.num_steps, round_) for env in range(num_envs)]


def take_steps(segments: list[Segment], num_steps: int) -> tuple[list[Segment], list[Segment]]:
    """The segments with the oldest `num_steps`, the last of them cut to fit, and the rest."""
    ordered = sorted(segments, key=lambda segment: (segment.round, segment.block.sequence, *segment.order))
    taken: list[Segment] = []
    missing = num_steps
    for position, segment in enumerate(ordered):
        if len(segment) > missing:
            if missing:
                middle = segment.start + missing
                taken.append(Segment(segment.block, segment.env, segment.start, middle, segment.round))
                segment = Segment(segment.block, segment.env, middle, segment.stop, segment.round)
            return taken, [segment, *ordered[position + 1 :]]
        taken.append(segment)
        missing -= len(segment)
    return taken, []


def assemble(segments: list[Segment], num_steps: int, num_envs: int) -> dict[Key, Any]:
    """The rollout, {key: [T, N, …]}, of segments with T·N steps together; packed as the blocks' columns are."""
    ordered = sorted(segments, key=lambda segment: segment.order)
    columns: dict[Key, np.ndarray] = {}
    for key, example in ordered[0].block.columns.items():
        rows = np.empty((num_envs * num_steps, *plain(example).shape[2:]), plain(example).dtype)
        position = 0
        for segment in ordered:
            rows[position : position + len(segment)] = plain(segment.block.columns[key])[
                segment.start : segment.stop, segment.env
            ]
            position += len(segment)
        columns[key] = rows
    _end_segments(columns, ordered, num_steps)
    rollout: dict[Key, Any] = {
        key: rows.reshape(num_envs, num_steps, *rows.shape[1:]).swapaxes(0, 1) for key, rows in columns.items()
    }
    return {key: like(ordered[0].block.columns[key], rows) for key, rows in rollout.items()}


def _end_segments(columns: dict[Key, np.ndarray], ordered: list[Segment], num_steps: int) -> None:
    """Mark where a row does not continue its segment, and set the value of the next step where a block is cut."""
    truncated, terminated = columns[schema.NEXT_TRUNCATED], columns[schema.NEXT_TERMINATED]
    bootstrap, values = columns[schema.NEXT_VALUE], columns[schema.VALUE]
    position = 0
    for index, segment in enumerate(ordered):
        first, last = position, position + len(segment) - 1
        position = last + 1
        row_ends = range(first - first % num_steps + num_steps - 1, last, num_steps)
        inside = [end for end in row_ends if end >= first and not (terminated[end] or truncated[end])]
        for end in inside:  # the row ends, the segment continues in the next
            bootstrap[end] = values[end + 1]
        if segment.stop < segment.block.num_steps and not (terminated[last] or truncated[last]):
            bootstrap[last] = plain(segment.block.columns[schema.VALUE])[segment.stop, segment.env]
        at_row_end = last % num_steps == num_steps - 1
        goes_on = index + 1 < len(ordered) and segment.goes_on_with(ordered[index + 1])
        if not at_row_end and not goes_on and not terminated[last]:
            truncated[last] = True


def side_by_side(blocks: list[Block], num_steps: int) -> dict[Key, Any]:
    """Concatenate blocks in the order of their environments; shorter ones get rows of zeros up to `num_steps`.

    Those rows are outside `schema.STEP_MASK`.
    """

    def lengthened(rows: np.ndarray) -> np.ndarray:
        missing = num_steps - len(rows)
        return np.concatenate([rows, np.zeros((missing, *rows.shape[1:]), rows.dtype)]) if missing else rows

    return {
        key: like(example, np.concatenate([lengthened(plain(block.columns[key])) for block in blocks], axis=1))
        for key, example in blocks[0].columns.items()
    }


def row_of(columns: dict[Key, Any], step: int) -> dict[Key, Any]:
    """One step of all environments, as a buffer takes it."""
    return {
        key: unpack_tensor((column[0], column[1][step])) if isinstance(column, tuple) else column[step]
        for key, column in columns.items()
    }


def plain(column: Any) -> np.ndarray:
    """A column's numbers; those of a type that numpy lacks as the bytes they are packed in."""
    return column[1] if isinstance(column, tuple) else column


def like(example: Any, rows: np.ndarray) -> Any:
    """Rows packed as the example is."""
    return (example[0], rows) if isinstance(example, tuple) else rows
