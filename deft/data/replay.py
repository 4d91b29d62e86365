"""Random batches of vector transitions, or windows of them, from a table in memory.

Datasets of vector observations load into a `TransitionTable`; `ReplayBuffer` samples single transitions from it and
`EpisodeWindows` consecutive steps, for sequence models such as the Decision Transformer. `deft.data.streaming` has the
equivalents for datasets on disk.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deft import schema
from deft.data.tensors import Batch, Key, restore_generator
from deft.errors import InputError

BLOCK = 32  # batches gathered at once on the CPU: one large gather costs a fifth of as many small ones


class TransitionTable:
    """Episodes in one float32 tensor of rows observation | action | reward | terminated.

    An episode of T transitions has T + 1 rows; the last one holds only the final observation. The next observation of a
    transition is the row below it, so no observation is stored twice. An episode whose last transition is not
    terminated was truncated.
    """

    def __init__(
        self, lengths: Sequence[int] | np.ndarray, observation_dim: int, action_dim: int, rows: Tensor | None = None
    ) -> None:
        self.lengths = np.asarray(lengths, np.int64)
        if len(self.lengths) == 0 or self.lengths.min() < 1:
            raise InputError("a table of transitions needs at least one episode, and each at least one transition")
        self.observation_dim, self.action_dim = observation_dim, action_dim
        self.starts = np.concatenate([[0], np.cumsum(self.lengths + 1)[:-1]])
        shape = (int(self.lengths.sum()) + len(self.lengths), observation_dim + action_dim + 2)
        self.rows = torch.zeros(shape) if rows is None else rows
        if tuple(self.rows.shape) != shape:
            raise InputError(f"rows have shape {tuple(self.rows.shape)}; these episodes need {shape}")
        self.interventions: Tensor | None = None
        """bool [rows]: transitions that an expert decided, if the recording marks them."""

    def __len__(self) -> int:
        """Return the number of transitions."""
        return int(self.lengths.sum())

    @property
    def observation(self) -> Tensor:
        """[rows, observation_dim]: T + 1 observations for each episode."""
        return self.rows[:, : self.observation_dim]

    @property
    def action(self) -> Tensor:
        """[rows, action_dim]; 0 in the last row of an episode."""
        return self.rows[:, self.observation_dim : -2]

    @property
    def reward(self) -> Tensor:
        """[rows]; 0 in the last row of an episode."""
        return self.rows[:, -2]

    @property
    def terminated(self) -> Tensor:
        """[rows]: 1.0 where the transition ended its episode, other than by a time limit."""
        return self.rows[:, -1]

    def episode_rows(self, episode: int) -> slice:
        """Return the rows of one episode, including its final observation."""
        start = int(self.starts[episode])
        return slice(start, start + int(self.lengths[episode]) + 1)

    def select(self, episodes: Sequence[int] | np.ndarray) -> TransitionTable:
        """Return a table with a copy of some episodes."""
        parts = [self.episode_rows(int(episode)) for episode in episodes]
        rows = torch.cat([self.rows[part] for part in parts])
        table = TransitionTable(self.lengths[episodes], self.observation_dim, self.action_dim, rows)
        if self.interventions is not None:
            table.interventions = torch.cat([self.interventions[part] for part in parts])
        return table

    def mark_interventions(self, episode: int, marks: np.ndarray) -> None:
        """Mark the transitions of an episode that an expert decided, bool [T]."""
        if self.interventions is None:
            self.interventions = torch.zeros(len(self.rows), dtype=torch.bool)
        self.interventions[self.episode_rows(episode)][:-1] = torch.from_numpy(np.asarray(marks, bool))

    def transition_rows(self) -> Tensor:
        """Return the row of each transition, int64 [len(self)]: all rows except the last of each episode."""
        is_last = torch.zeros(len(self.rows), dtype=torch.bool)
        is_last[torch.from_numpy(self.starts + self.lengths)] = True
        return (~is_last).nonzero().squeeze(1)


class Sampler(ABC):
    """Random batches of recorded experience, with a random generator of its own."""

    capturable = True  # `sample` may be captured in a CUDA graph; its generator is on the device

    def __init__(self, seed: int, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.generator = torch.Generator(self.device if self.capturable else "cpu").manual_seed(seed)

    @abstractmethod
    def sample(self, batch_size: int) -> Batch:
        """Return a random batch in the schema's keys."""

    def weight_interventions(self, weight: float) -> None:
        """Sample transitions that an expert decided `weight` times as often as others."""
        raise InputError("intervention_weight: not for windows of consecutive steps (dt); leave it out")

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """Yield batches without end."""
        while True:
            yield self.sample(batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Return what determines the next batches."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        restore_generator(self.generator, state["generator"])


class ReplayBuffer(Sampler):
    """Samples transitions of a `TransitionTable` with replacement, with its own random generator.

    A transition is one lookup: its row and the row below it, which holds the next observation, are adjacent in memory.
    Batches are views of the gathered rows. With `num_members` learners they are [members, B, …], with separate
    transitions for each learner.
    """

    def __init__(
        self, table: TransitionTable, seed: int = 0, num_members: int = 1, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(seed, device)
        self.table, self.num_members = table, num_members
        self._block = BLOCK if self.device.type == "cpu" else 1  # on a GPU, sampling is captured with the update
        self._rows = table.rows.to(self.device)
        count, width = self._rows.shape
        self._pairs = self._rows.as_strided((count - 1, 2 * width), (width, 1))  # row i: rows i and i + 1, no copy
        self._first = table.transition_rows().to(self.device, torch.int32)
        self._reward_scale = 1.0
        self._returns: Tensor | None = None
        self._has_next: Tensor | None = None  # for each row, whether the row below it has an action
        self._intervention_weight = 1.0
        self._weights: Tensor | None = None  # cumulative weights of the transitions, if they differ
        self._marks: Tensor | None = None  # for each row, whether it is an intervention, if batches have that
        self._ahead: list[Batch] = []  # batches gathered and not yet returned, in reverse order
        self._ahead_size = 0
        self._state_before = self.generator.get_state()

    def __len__(self) -> int:
        """Return the number of transitions."""
        return len(self._first)

    def shard(self, rank: int, count: int) -> None:
        """Sample only every `count`-th transition, starting at `rank`: the shard of one of several processes."""
        self._first = self._first[rank::count].contiguous()
        self.weight_interventions(self._intervention_weight)
        self._ahead, self._ahead_size = [], 0

    def weight_interventions(self, weight: float) -> None:
        """Sample transitions that an expert decided `weight` times as often as others."""
        self._intervention_weight = weight
        self._weights = intervention_weights(self.table, self._first.long(), weight)
        self._ahead, self._ahead_size = [], 0

    def scale_rewards(self, scale: float) -> None:
        """Multiply the rewards of every batch by `scale`."""
        self._reward_scale = scale
        self._ahead = []

    def add_returns(self, gamma: float) -> None:
        """Add `schema.VALUE_TARGET` to batches: the discounted return to the end of the recorded episode."""
        self._returns = discounted_returns(self.table, gamma).to(self.device)
        self._ahead, self._ahead_size = [], 0

    def add_next_actions(self) -> None:
        """Add `schema.NEXT_ACTION` and `schema.NEXT_STEP_MASK` to batches."""
        self._has_next = torch.ones(len(self._rows), dtype=torch.bool, device=self.device)
        last = torch.from_numpy(self.table.starts + self.table.lengths - 1).to(self.device)
        self._has_next[last] = False
        self._ahead, self._ahead_size = [], 0

    def add_interventions(self) -> None:
        """Add `schema.INTERVENTION` to batches, where the recording marks interventions."""
        if self.table.interventions is not None:
            self._marks = self.table.interventions.to(self.device)
            self._ahead, self._ahead_size = [], 0

    def sample(self, batch_size: int) -> Batch:
        """Return a batch in the schema's keys, valid until the next call; `terminated` is 0.0 or 1.0."""
        if not self._ahead or self._ahead_size != batch_size:
            self._gather_block(batch_size)
        return self._ahead.pop()

    def gather(self, transitions: np.ndarray) -> Batch:
        """Return the given transitions, numbered from 0."""
        both = self._pairs[self._first[torch.as_tensor(transitions, device=self.device)].long()]
        if self.num_members > 1:
            both = both.expand(self.num_members, *both.shape)
        width, dim = self._rows.shape[1], self.table.observation_dim
        return {
            schema.OBSERVATION: both[..., :dim],
            schema.ACTION: both[..., dim : width - 2],
            schema.NEXT_REWARD: both[..., width - 2],
            schema.NEXT_TERMINATED: both[..., width - 1],
            schema.NEXT_OBSERVATION: both[..., width : width + dim],
        }

    def _gather_block(self, batch_size: int) -> None:
        """Sample and gather the next batches at once, into the memory of the previous ones."""
        if self.device.type == "cpu":
            self._state_before = self.generator.get_state()
        if self._ahead_size != batch_size:
            self._allocate(batch_size)
        if self._weights is None:
            torch.randint(len(self._first), self._draws.shape, generator=self.generator, out=self._draws)
        else:
            self._draws.copy_(weighted_draws(self._weights, len(self._draws), self.generator))
        torch.index_select(self._first, 0, self._draws, out=self._chosen)
        torch.index_select(self._pairs, 0, self._chosen, out=self._gathered)
        if self._reward_scale != 1.0:
            self._reward.mul_(self._reward_scale)
        if self._returns is not None:
            torch.index_select(self._returns, 0, self._chosen, out=self._chosen_returns)
            self._chosen_returns.mul_(self._reward_scale)
        if self._has_next is not None:
            torch.index_select(self._has_next, 0, self._chosen, out=self._chosen_has_next)
        if self._marks is not None:
            torch.index_select(self._marks, 0, self._chosen, out=self._chosen_marks)
        self._ahead = self._views.copy()

    def _allocate(self, batch_size: int) -> None:
        """Allocate the memory for a block of batches of this size, and create the views that are the batches."""
        self._ahead_size = batch_size
        members = () if self.num_members == 1 else (self.num_members,)
        shape = (self._block, *members, batch_size)
        count, width, dim = math.prod(shape), self._rows.shape[1], self.table.observation_dim
        self._draws = torch.empty(count, dtype=torch.int64, device=self.device)
        self._chosen = torch.empty(count, dtype=torch.int32, device=self.device)
        self._gathered = torch.empty(count, 2 * width, device=self.device)
        self._chosen_returns = torch.empty(count, device=self.device)
        self._chosen_has_next = torch.empty(count, dtype=torch.bool, device=self.device)
        self._chosen_marks = torch.empty(count, dtype=torch.bool, device=self.device)
        self._reward = self._gathered[:, width - 2]
        both = self._gathered.view(*shape, 2 * width)
        columns: dict[Key, Tensor] = {
            schema.OBSERVATION: both[..., :dim],
            schema.ACTION: both[..., dim : width - 2],
            schema.NEXT_REWARD: both[..., width - 2],
            schema.NEXT_TERMINATED: both[..., width - 1],
            schema.NEXT_OBSERVATION: both[..., width : width + dim],
        }
        if self._returns is not None:
            columns[schema.VALUE_TARGET] = self._chosen_returns.view(shape)
        if self._marks is not None:
            columns[schema.INTERVENTION] = self._chosen_marks.view(shape)
        if self._has_next is not None:
            columns[schema.NEXT_ACTION] = both[..., width + dim : 2 * width - 2]
            columns[schema.NEXT_STEP_MASK] = self._chosen_has_next.view(*shape, 1)
        batches = zip(*(column.unbind(0) for column in columns.values()), strict=True)
        self._views = [dict(zip(columns, parts, strict=True)) for parts in batches][::-1]

    def observations(self, block: int = 65_536) -> Iterator[Tensor]:
        """Yield the observations at which transitions start, in blocks, for observation normalisation."""
        for rows in self._first.split(block):
            yield self._rows.index_select(0, rows)[:, : self.table.observation_dim]

    def state_dict(self) -> dict[str, Any]:
        """Return the generator's state and the number of gathered batches that are not yet returned."""
        if self.device.type != "cpu":
            return {"generator": self.generator.get_state(), "ahead": 0, "batch_size": 0}
        ahead = len(self._ahead)
        state = self._state_before if ahead else self.generator.get_state()
        return {"generator": state, "ahead": ahead, "batch_size": self._ahead_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned; the batches of the current block are gathered again."""
        restore_generator(self.generator, state["generator"])
        self._ahead = []
        if state["ahead"] and self.device.type == "cpu":  # a GPU gathers no batches ahead
            self._gather_block(state["batch_size"])
            del self._ahead[state["ahead"] :]


class ChunkBuffer(Sampler):
    """Samples chunks of `chunk_length` K steps of a `TransitionTable` with replacement.

    Each transition is the first step of a chunk with the same probability. Batches are those of
    `deft.data.streaming.StreamingBuffer`: actions [B, K, A], with the last one repeated after the end of the episode
    and False in `schema.STEP_MASK` [B, K], the reward Σ_i γ^i r_i, the observation after the steps, and
    `schema.DISCOUNT`, γ^k after k steps and 0 at a terminal. With `num_members` learners they are [members, B, …].
    """

    def __init__(
        self,
        table: TransitionTable,
        chunk_length: int,
        gamma: float,
        seed: int = 0,
        num_members: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(seed, device)
        self.table, self.chunk_length, self.num_members = table, chunk_length, num_members
        self._rows = table.rows.to(self.device)
        self._first = table.transition_rows().to(self.device)
        last = np.repeat(table.starts + table.lengths, table.lengths + 1)  # of each row: the last one of its episode
        self._last = torch.from_numpy(last).to(self.device)
        row = torch.arange(len(self._rows), device=self.device)
        self._following = torch.minimum(row + chunk_length, self._last)
        self._offsets = torch.arange(chunk_length, device=self.device)
        steps = row[:, None] + self._offsets
        real = steps < self._last[:, None]
        rewards = table.reward.to(self.device)[steps.clamp(max=len(row) - 1)] * real
        self._reward = (rewards.double() * gamma ** self._offsets.double()).sum(1).float()
        self._terminated = table.terminated.to(self.device)[(self._following - 1).clamp(min=0)]
        self._discount = (gamma ** real.sum(1).double()).float() * (1 - self._terminated)
        self._reward_scale = 1.0
        self._returns: Tensor | None = None
        self._next_actions = False
        self._intervention_weight = 1.0
        self._weights: Tensor | None = None  # cumulative weights of the chunks, if they differ
        self._marks: Tensor | None = None  # for each row, whether it is an intervention, if batches have that

    def __len__(self) -> int:
        """Return the number of chunks: one for each transition."""
        return len(self._first)

    def shard(self, rank: int, count: int) -> None:
        """Sample only every `count`-th chunk, starting at `rank`: the shard of one of several processes."""
        self._first = self._first[rank::count].contiguous()
        self.weight_interventions(self._intervention_weight)

    def weight_interventions(self, weight: float) -> None:
        """Sample chunks whose first action an expert decided `weight` times as often as others."""
        self._intervention_weight = weight
        self._weights = intervention_weights(self.table, self._first, weight)

    def scale_rewards(self, scale: float) -> None:
        """Multiply the rewards of every batch by `scale`."""
        self._reward_scale = scale

    def add_returns(self, gamma: float) -> None:
        """Add `schema.VALUE_TARGET` to batches: the discounted return to the end of the recorded episode."""
        self._returns = discounted_returns(self.table, gamma).to(self.device)

    def add_interventions(self) -> None:
        """Add `schema.INTERVENTION` to batches, where the recording marks interventions."""
        if self.table.interventions is not None:
            self._marks = self.table.interventions.to(self.device)

    def add_next_actions(self) -> None:
        """Add `schema.NEXT_ACTION` and `schema.NEXT_STEP_MASK` to batches."""
        self._next_actions = True

    def sample(self, batch_size: int) -> Batch:
        """Return a batch in the schema's keys; `terminated` is 0.0 or 1.0."""
        shape = (batch_size,) if self.num_members == 1 else (self.num_members, batch_size)
        if self._weights is None:
            draws = torch.randint(len(self), shape, generator=self.generator, device=self.device)
        else:
            draws = weighted_draws(self._weights, math.prod(shape), self.generator).view(shape)
        rows = self._first[draws]
        after, dim = self._following[rows], self.table.observation_dim
        batch = self._chunks(rows) | {
            schema.NEXT_REWARD: self._reward[rows] * self._reward_scale,
            schema.NEXT_TERMINATED: self._terminated[rows],
            schema.DISCOUNT: self._discount[rows],
            schema.NEXT_OBSERVATION: self._rows[after][..., :dim],
        }
        if self._returns is not None:
            batch[schema.VALUE_TARGET] = self._returns[rows] * self._reward_scale
        if self._marks is not None:
            batch[schema.INTERVENTION] = self._marks[rows]
        if self._next_actions:
            following = self._chunks(after)
            batch[schema.NEXT_ACTION] = following[schema.ACTION]
            batch[schema.NEXT_STEP_MASK] = following[schema.STEP_MASK]
        return batch

    def gather(self, transitions: np.ndarray) -> Batch:
        """Return the observations and chunks that start at the given transitions, numbered from 0."""
        rows = self._first[torch.as_tensor(transitions, device=self.device)]
        return self._chunks(rows if self.num_members == 1 else rows.expand(self.num_members, -1))

    def _chunks(self, rows: Tensor) -> Batch:
        steps = rows[..., None] + self._offsets
        last, dim = self._last[rows][..., None], self.table.observation_dim
        return {
            schema.OBSERVATION: self._rows[rows][..., :dim],
            schema.ACTION: self._rows[torch.minimum(steps, (last - 1).clamp(min=0))][..., dim:-2],
            schema.STEP_MASK: steps < last,
        }

    def observations(self, block: int = 65_536) -> Iterator[Tensor]:
        """Yield the observations at which chunks start, in blocks, for observation normalisation."""
        for rows in self._first.split(block):
            yield self._rows[rows][:, : self.table.observation_dim]


def no_interventions() -> InputError:
    """Return the error for a dataset that marks no interventions."""
    return InputError(
        "intervention_weight: the dataset does not mark interventions (`deft train dagger` records them); leave it out"
    )


def cumulative_weights(marks: Tensor, weight: float) -> Tensor:
    """Return Σ_{j ≤ i} w_j for bool marks [N], with w = `weight` where a mark is true and 1 elsewhere."""
    return torch.where(marks, weight, 1.0).double().cumsum(0)


def intervention_weights(table: TransitionTable, rows: Tensor, weight: float) -> Tensor | None:
    """Return the cumulative weights of rows of a table; None if all have weight 1."""
    if weight == 1.0:
        return None
    if table.interventions is None:
        raise no_interventions()
    return cumulative_weights(table.interventions.to(rows.device)[rows], weight)


def weighted_draws(cumulative: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return `count` indices with replacement, i with a probability proportional to its weight, int64."""
    share = torch.rand(count, generator=generator, device=cumulative.device, dtype=torch.float64)
    return torch.searchsorted(cumulative, share * cumulative[-1], right=True).clamp(max=len(cumulative) - 1)


def discounted_returns(table: TransitionTable, gamma: float) -> Tensor:
    """Return G_t = r_t + γ G_{t+1} to the end of each episode, for each row; 0 in the last row of an episode."""
    rewards = table.reward.numpy()
    returns = np.zeros(len(rewards), np.float64)
    # Backwards from the ends, all episodes at once: step k is the k-th transition from the end of each episode.
    ends, lengths = table.starts + table.lengths, table.lengths
    order = np.argsort(-lengths)
    ends, lengths = ends[order], lengths[order]
    active = len(ends)
    for back in range(1, int(lengths[0]) + 1):
        while active and lengths[active - 1] < back:
            active -= 1
        rows = ends[:active] - back
        returns[rows] = rewards[rows] + gamma * returns[rows + 1]
    return torch.from_numpy(returns.astype(np.float32))


class EpisodeWindows(Sampler):
    """Samples windows of up to `context_length` steps of a `TransitionTable`, with its own random generator.

    Each transition is the first step of a window with the same probability, so an episode is sampled in proportion to
    its length. A window ends with its episode; the rest of it is padding, marked in `schema.STEP_MASK`. Returns-to-go
    sum the rewards to the end of the episode, and timesteps count from its beginning.
    """

    def __init__(
        self, table: TransitionTable, context_length: int, seed: int = 0, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(seed, device)
        self.table, self.context_length = table, context_length
        self._rows = table.rows.to(self.device)
        self._returns = discounted_returns(table, 1.0).to(self.device)
        self._starts, self._lengths = (torch.from_numpy(part).to(self.device) for part in (table.starts, table.lengths))
        self._ends = self._lengths.cumsum(0)  # cumulative number of transitions of the episodes
        self._offsets = torch.arange(context_length, device=self.device)
        self._rank, self._count = 0, 1

    def __len__(self) -> int:
        """Return the number of windows: one for each transition."""
        return len(self.table)

    def shard(self, rank: int, count: int) -> None:
        """Sample only every `count`-th window, starting at `rank`: the shard of one of several processes."""
        self._rank, self._count = rank, count

    def sample(self, batch_size: int) -> Batch:
        """Return windows [batch_size, context_length, …] in the schema's keys."""
        number = (len(self) - self._rank + self._count - 1) // self._count
        draws = torch.randint(number, (batch_size,), generator=self.generator, device=self.device)
        return self.windows(draws * self._count + self._rank)

    def windows(self, transitions: Tensor) -> Batch:
        """Return the windows that begin at the given transitions, numbered from 0 through all episodes."""
        episode = torch.searchsorted(self._ends, transitions, right=True)
        length = self._lengths[episode]
        step = transitions - (self._ends[episode] - length)
        timestep = step[:, None] + self._offsets
        mask = timestep < length[:, None]
        timestep = torch.minimum(timestep, length[:, None] - 1)  # padding repeats the last step
        rows = (self._starts[episode][:, None] + timestep).flatten()
        shape, dim = timestep.shape, self.table.observation_dim
        steps = self._rows.index_select(0, rows).view(*shape, -1)
        return {
            schema.OBSERVATION: steps[..., :dim],
            schema.ACTION: steps[..., dim:-2],
            schema.RETURN_TO_GO: self._returns.index_select(0, rows).view(shape),
            schema.TIMESTEP: timestep,
            schema.STEP_MASK: mask,
        }

    def observations(self, block: int = 65_536) -> Iterator[Any]:
        """Yield the observations at which transitions start, in blocks, for observation normalisation."""
        for rows in self.table.transition_rows().split(block):
            yield self.table.observation[rows]
