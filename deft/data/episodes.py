"""Whole episodes of a robot's frames, states and actions, kept to train world models on.

`EpisodeBuffer` is a ring of them, on the CPU or a GPU; `EpisodeBatch` is some of them side by side, and cuts chunks of
consecutive steps or single steps out of them in the layout of the F1 model's batches. The trainers of
`deft.training.phases` and the evaluation of world models use both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deft import schema
from deft.data.robot_episode import RobotEpisode
from deft.errors import InputError


@dataclass
class EpisodeBatch:
    """B episodes side by side, padded to the longest: every tensor is [B, S, …]."""

    streams: dict[str, Tensor]
    lengths: Tensor  # int64 [B], on the CPU: steps of each
    history: int = 4  # frames and actions of a history
    stride: int = 1  # steps between them

    @property
    def longest(self) -> int:
        """Steps of the longest episode."""
        return int(self.lengths.max())

    def chunk(self, start: int, length: int) -> tuple[dict[str, Tensor], Tensor] | None:
        """Steps start … start + length − 1 of the episodes that reach there, [T, B', …], and which rows these are.

        Where one ends within the chunk, `step_mask` says which steps are real; None where none reaches the start.
        """
        rows = torch.nonzero(self.lengths > start).flatten()
        if not len(rows):
            return None
        end = min(start + length, int(self.lengths[rows].max()))
        steps = torch.arange(start, end)
        real = steps[:, None] < self.lengths[rows]
        times = torch.minimum(steps[:, None], self.lengths[rows] - 1)
        batch = self._at(times, rows.expand(len(steps), -1))
        if not bool(real.all()):
            batch[schema.STEP_MASK] = real.to(batch[schema.STATE].device)
        return batch, rows

    def without_head(self) -> EpisodeBatch:
        """The same episodes as a robot sees them that has its wrist camera alone."""
        return dataclasses.replace(self, streams={name: s for name, s in self.streams.items() if name != "head"})

    def steps(self, rows: Tensor, times: Tensor, motion_only: bool = False) -> dict[str, Tensor]:
        """Single steps, [N, …]; `motion_only`: without what the motion prior does not look at."""
        return self._at(times, rows, motion_only)

    def all_steps(self) -> tuple[Tensor, Tensor]:
        """Rows and times of every step there is."""
        mask = torch.arange(self.longest) < self.lengths[:, None]
        rows, times = torch.nonzero(mask, as_tuple=True)
        return rows, times

    def _at(self, times: Tensor, rows: Tensor, motion_only: bool = False) -> dict[str, Tensor]:
        """A batch of the steps `times` of the episodes `rows`, both of one shape.

        As the environments' histories: before an episode's beginning there is its first frame, and no action.
        """
        device = self.streams["wrist"].device
        back = torch.arange(self.history - 1, -1, -1) * self.stride
        past = times[..., None] - back  # [..., H]
        frames = torch.cat([past.clamp(min=0), times[..., None] + 1], -1).to(device)
        rows, past, times = rows.to(device), past.to(device), times.to(device)
        actions = self.streams["action"][rows[..., None], past.clamp(min=0)]
        batch = {
            schema.IMAGE0_HISTORY: self.streams["wrist"][rows[..., None], frames],
            schema.ACTION_HISTORY: actions.masked_fill((past < 0)[..., None], 0.0),
            schema.STATE: self.streams["state"][rows, times],
        }
        if motion_only:
            return batch
        wrist = self.streams["wrist"][rows, times]
        if "head" in self.streams:
            batch |= {schema.IMAGE0: self.streams["head"][rows, times], schema.IMAGE1: wrist}
        else:
            batch[schema.IMAGE0] = wrist
        if "codes" in self.streams:
            batch[schema.FRAME_TOKENS] = self.streams["codes"][rows[..., None], frames].long()
        return batch


class EpisodeBuffer:
    """A ring of `capacity` episodes of at most `max_steps` steps. New ones replace the oldest.

    What was never drawn is drawn first, the oldest of it before the newer; then at random.
    """

    def __init__(self, capacity: int, max_steps: int, device: str | torch.device = "cpu") -> None:
        self.capacity, self.max_steps = capacity, max_steps
        self.device = torch.device(device)
        self.num_added = 0
        self.lengths = torch.zeros(capacity, dtype=torch.int64)
        self.numbers = torch.full((capacity,), -1)
        self._drawn = np.ones(capacity, bool)
        self._storage: dict[str, Tensor] = {}

    def __len__(self) -> int:
        """Episodes that are there."""
        return min(self.num_added, self.capacity)

    @property
    def num_unseen(self) -> int:
        """Episodes that were never drawn."""
        return int((~self._drawn).sum())

    def add(self, episode: RobotEpisode) -> None:
        """Keep an episode, in the place of the oldest where the ring is full."""
        length, streams = len(episode), episode.streams()
        if length > self.max_steps:
            raise InputError(f"an episode of {length} steps does not fit a buffer of {self.max_steps}")
        if not self._storage:
            self._allocate(streams)
        if streams.keys() != self._storage.keys():
            raise InputError(
                f"an episode with {', '.join(streams)} does not fit a buffer of {', '.join(self._storage)}"
            )
        place = self.num_added % self.capacity
        for name, values in streams.items():
            storage = self._storage[name]
            tensor = torch.as_tensor(values)
            if tensor.shape[1:] != storage.shape[2:]:
                raise InputError(
                    f"{name} of an episode is {list(tensor.shape[1:])} a step; the buffer has {list(storage.shape[2:])}"
                )
            storage[place, : len(tensor)] = tensor.to(self.device, storage.dtype)
        self.lengths[place], self.numbers[place] = length, episode.number
        self._drawn[place] = False
        self.num_added += 1

    def draw(self, count: int, generator: np.random.Generator) -> np.ndarray:
        """Places of `count` different episodes (of all, where there are fewer)."""
        if not len(self):
            raise InputError("the episode buffer is empty: collect before training")
        count = min(count, len(self))
        order = (np.arange(len(self)) + self.num_added) % len(self)  # the oldest first
        unseen = order[~self._drawn[order]][:count]
        others = np.setdiff1d(np.arange(len(self)), unseen)
        again = generator.choice(others, count - len(unseen), replace=False)
        chosen = np.concatenate([unseen, again])
        self._drawn[chosen] = True
        return chosen

    def state_dict(self) -> dict[str, Any]:
        """How many were added and which were drawn; the episodes themselves come from their source again."""
        return {"num_added": self.num_added, "drawn": self._drawn.tolist()}

    def refill(self, episodes: list[RobotEpisode], state: Mapping[str, Any]) -> None:
        """Put back the latest episodes, as the buffer was when `state` was taken: each in its place."""
        self.num_added = state["num_added"] - len(episodes)
        for episode in episodes:
            self.add(episode)
        self._drawn = np.array(state["drawn"], bool)

    def batch(self, places: np.ndarray, history: int = 4, stride: int = 1) -> EpisodeBatch:
        """Episodes side by side."""
        index = torch.as_tensor(places)
        lengths = self.lengths[index]
        longest = int(lengths.max())
        streams = {
            name: storage[index.to(self.device), : longest + (name != "action")]
            for name, storage in self._storage.items()
        }
        return EpisodeBatch(streams, lengths, history, stride)

    def _allocate(self, streams: Mapping[str, Any]) -> None:
        for name, values in streams.items():
            first = torch.as_tensor(values)
            shape = (self.capacity, self.max_steps + (name != "action"), *first.shape[1:])
            dtype = torch.int16 if name == "codes" else first.dtype
            try:
                self._storage[name] = torch.zeros(shape, dtype=dtype, device=self.device)
            except RuntimeError as error:
                size = np.prod(shape, dtype=np.float64) * dtype.itemsize / 2**30
                raise InputError(
                    f"buffer_capacity: {self.capacity} episodes take {size:.1f} GiB of {name} alone, which is not "
                    "there; set it lower"
                ) from error


def side_by_side(
    episodes: list[RobotEpisode], history: int = 4, stride: int = 1, device: str | torch.device = "cpu"
) -> EpisodeBatch:
    """Episodes as one batch, without a buffer."""
    if not episodes:
        raise InputError("a batch of no episodes")
    buffer = EpisodeBuffer(len(episodes), max(map(len, episodes)), device)
    for episode in episodes:
        buffer.add(episode)
    return buffer.batch(np.arange(len(episodes)), history, stride)
