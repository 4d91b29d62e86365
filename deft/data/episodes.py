"""Whole episodes of robot frames, states and actions, for training world models.

`EpisodeBuffer` is a ring of episodes on the CPU or a GPU, and `EpisodeStore` one that is saved with the run.
`EpisodeBatch` is a padded batch of episodes from which chunks of consecutive steps, or single steps, are taken in the
layout of the F1 model's batches.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
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
    """B episodes, padded to the longest: every tensor is [B, S, …]."""

    streams: dict[str, Tensor]
    lengths: Tensor  # int64 [B], on the CPU: the steps of each episode
    history: int = 4  # number of frames and actions in a history
    stride: int = 1  # steps between them

    @property
    def longest(self) -> int:
        """The number of steps of the longest episode."""
        return int(self.lengths.max())

    def chunk(self, start: int, length: int) -> tuple[dict[str, Tensor], Tensor] | None:
        """Return steps start … start + length − 1 of the episodes that have them, [T, B', …], and their rows.

        If an episode ends within the chunk, `step_mask` marks the real steps. Returns None if no episode reaches
        `start`.
        """
        rows = torch.nonzero(self.lengths > start).flatten()
        if not len(rows):
            return None
        end = min(start + length, int(self.lengths[rows].max()))
        steps = torch.arange(start, end)
        real = steps[:, None] < self.lengths[rows]
        times = torch.minimum(steps[:, None], self.lengths[rows] - 1)
        batch = self.steps(rows.expand(len(steps), -1), times)
        if not bool(real.all()):
            batch[schema.STEP_MASK] = real.to(batch[schema.STATE].device)
        return batch, rows

    def chunks(self, length: int) -> Iterator[tuple[int, dict[str, Tensor], Tensor]]:
        """Yield all chunks of `length` steps in order: the first step, and what `chunk` returns."""
        for start in range(0, self.longest, length):
            chunk = self.chunk(start, length)
            assert chunk is not None  # the longest episode reaches it
            yield start, *chunk

    def all_rows(self, values: Tensor, rows: Tensor) -> Tensor:
        """Return values [T, B', …] of the episodes `rows` as [T, B, …], with zeros for the others."""
        found = values.new_zeros(len(values), len(self.lengths), *values.shape[2:])
        found[:, rows.to(values.device)] = values
        return found

    def parts(self, size: int) -> Iterator[EpisodeBatch]:
        """Yield the episodes in batches of up to `size`."""
        for start in range(0, len(self.lengths), size):
            rows = slice(start, start + size)
            streams = {name: values[rows] for name, values in self.streams.items()}
            yield dataclasses.replace(self, streams=streams, lengths=self.lengths[rows])

    def without_head(self) -> EpisodeBatch:
        """Return the same episodes without the head camera."""
        return dataclasses.replace(self, streams={name: s for name, s in self.streams.items() if name != "head"})

    def all_steps(self) -> tuple[Tensor, Tensor]:
        """Return the rows and times of all steps."""
        mask = torch.arange(self.longest) < self.lengths[:, None]
        rows, times = torch.nonzero(mask, as_tuple=True)
        return rows, times

    def steps(self, rows: Tensor, times: Tensor, motion_only: bool = False) -> dict[str, Tensor]:
        """Return steps `times` of episodes `rows`, two tensors of the same shape.

        Histories are those of the environments: before an episode's beginning they repeat its first frame, with zero
        actions. `motion_only` leaves out what the motion prior does not use.
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
    """A ring of `capacity` episodes of at most `max_steps` steps; new episodes replace the oldest.

    Episodes that were never drawn are drawn first, oldest first; the others are drawn at random.
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
        """Return the number of episodes in the buffer."""
        return min(self.num_added, self.capacity)

    @property
    def num_unseen(self) -> int:
        """The number of episodes that were never drawn."""
        return int((~self._drawn).sum())

    def add(self, episode: RobotEpisode) -> None:
        """Store an episode; a full buffer replaces its oldest one."""
        length, streams = len(episode), episode.streams()
        if length > self.max_steps:
            raise InputError(f"an episode of {length} steps does not fit into a buffer of {self.max_steps} steps")
        if not self._storage:
            self._allocate(streams)
        if streams.keys() != self._storage.keys():
            raise InputError(
                f"an episode with {', '.join(streams)} does not fit into a buffer of {', '.join(self._storage)}"
            )
        row = self.num_added % self.capacity
        for name, values in streams.items():
            storage = self._storage[name]
            tensor = torch.as_tensor(values)
            if tensor.shape[1:] != storage.shape[2:]:
                raise InputError(
                    f"{name} of an episode has shape {list(tensor.shape[1:])}; the buffer has {list(storage.shape[2:])}"
                )
            storage[row, : len(tensor)] = tensor.to(self.device, storage.dtype)
        self.lengths[row], self.numbers[row] = length, episode.number
        self._drawn[row] = False
        self.num_added += 1

    def draw(self, count: int, generator: np.random.Generator) -> np.ndarray:
        """Return the rows of `count` different episodes, or of all if there are fewer."""
        if not len(self):
            raise InputError("the episode buffer is empty: collect episodes before training")
        count = min(count, len(self))
        order = (np.arange(len(self)) + self.num_added) % len(self)  # oldest first
        unseen = order[~self._drawn[order]][:count]
        others = np.setdiff1d(np.arange(len(self)), unseen)
        again = generator.choice(others, count - len(unseen), replace=False)
        chosen = np.concatenate([unseen, again])
        self._drawn[chosen] = True
        return chosen

    def state_dict(self) -> dict[str, Any]:
        """Return which episodes were added and drawn; their source provides the episodes themselves again."""
        return {"num_added": self.num_added, "drawn": self._drawn.tolist()}

    def refill(self, episodes: list[RobotEpisode], state: Mapping[str, Any]) -> None:
        """Restore the buffer as it was when `state` was taken; `episodes` are the latest ones."""
        self.num_added = state["num_added"] - len(episodes)
        for episode in episodes:
            self.add(episode)
        self._drawn = np.array(state["drawn"], bool)

    def batch(self, rows: np.ndarray, history: int = 4, stride: int = 1) -> EpisodeBatch:
        """Return the episodes of these rows as one batch."""
        index = torch.as_tensor(rows)
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
                    f"buffer_capacity: {self.capacity} episodes need {size:.1f} GiB for {name} alone, which cannot be "
                    "allocated; use a smaller buffer_capacity"
                ) from error


def batch_episodes(
    episodes: list[RobotEpisode], history: int = 4, stride: int = 1, device: str | torch.device = "cpu"
) -> EpisodeBatch:
    """Return episodes as one batch."""
    if not episodes:
        raise InputError("a batch needs at least one episode")
    buffer = EpisodeBuffer(len(episodes), max(map(len, episodes)), device)
    for episode in episodes:
        buffer.add(episode)
    return buffer.batch(np.arange(len(episodes)), history, stride)


class EpisodeStore:
    """The latest `capacity` episodes, on the CPU, saved with the run.

    The adversarial phase uses it: the episodes of a learning explorer cannot be collected again.
    """

    def __init__(self, capacity: int) -> None:
        self.episodes: deque[RobotEpisode] = deque(maxlen=capacity)
        self.num_unseen = 0  # the newest episodes, which `draw_unseen_first` has not drawn yet

    def __len__(self) -> int:
        """Return the number of episodes."""
        return len(self.episodes)

    def add(self, episodes: Iterable[RobotEpisode]) -> None:
        """Store episodes; they replace the oldest ones if necessary."""
        new = list(episodes)
        self.episodes.extend(new)
        self.num_unseen = min(self.num_unseen + len(new), len(self.episodes))

    def draw(self, count: int, generator: np.random.Generator) -> list[RobotEpisode]:
        """Return `count` different episodes at random, or all if there are fewer."""
        chosen = generator.choice(len(self.episodes), min(count, len(self.episodes)), replace=False)
        return [self.episodes[index] for index in chosen]

    def draw_unseen_first(self, count: int, generator: np.random.Generator) -> list[RobotEpisode]:
        """Return `count` episodes in the order of `EpisodeBuffer`: unseen ones, oldest first, then random ones."""
        seen = len(self.episodes) - self.num_unseen
        chosen = list(range(seen, min(seen + count, len(self.episodes))))
        self.num_unseen -= len(chosen)
        chosen += generator.choice(seen, min(count - len(chosen), seen), replace=False).tolist()
        return [self.episodes[index] for index in chosen]

    def state_dict(self) -> list[dict[str, Any]]:
        """Return all episodes as tensors."""
        return [
            {
                "number": episode.number,
                **{name: torch.as_tensor(value).cpu() for name, value in episode.streams().items()},
            }
            for episode in self.episodes
        ]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Load what `state_dict` returned."""
        self.episodes.clear()
        self.add(
            RobotEpisode(**{name: value if name == "number" else value.numpy() for name, value in one.items()})
            for one in state
        )
