"""Uniform batches of transitions out of a table in memory; what the off-policy algorithms draw from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from deft import schema
from deft.data.columns import Key
from deft.data.transitions import TransitionTable

Batch: TypeAlias = dict[Key, Any]


BLOCK = 32  # batches drawn ahead on the CPU: one large gather costs a fifth of as many small ones


class ReplayBuffer:
    """Draws transitions of a `TransitionTable`, with replacement, from a generator of its own.

    A transition is one lookup: its row and the row below it, which holds the next observation, lie side by side in
    memory. Batches are views of what was gathered. With `num_members` learners they are [members, B, …], each learner
    with transitions of its own.
    """

    capturable = True  # `sample` may be recorded as part of a CUDA graph

    def __init__(
        self, table: TransitionTable, seed: int = 0, num_members: int = 1, device: torch.device | str = "cpu"
    ) -> None:
        self.table = table
        self.num_members = num_members
        self.device = torch.device(device)
        self.generator = torch.Generator(self.device)
        self.generator.manual_seed(seed)
        self._block = BLOCK if self.device.type == "cpu" else 1  # a GPU's update is recorded with its draw
        self._rows = table.rows.to(self.device)
        count, width = self._rows.shape
        self._pairs = self._rows.as_strided((count - 1, 2 * width), (width, 1))  # row i: rows i and i + 1, no copy
        self._first = table.transition_rows().to(self.device, torch.int32)
        self._reward_scale = 1.0
        self._returns: Tensor | None = None
        self._ahead: list[Batch] = []  # last first
        self._ahead_size = 0
        self._state_before = self.generator.get_state()

    def __len__(self) -> int:
        """Transitions."""
        return len(self._first)

    def shard(self, rank: int, count: int) -> None:
        """Draw from every `count`-th transition alone, from `rank` on: the share of one of several processes."""
        self._first = self._first[rank::count].contiguous()
        self._ahead, self._ahead_size = [], 0

    def scale_rewards(self, scale: float) -> None:
        """Multiply the rewards of every batch by this."""
        self._reward_scale = scale
        self._ahead = []

    def add_returns(self, gamma: float) -> None:
        """Give each transition of a batch its discounted return to the end of the recording (`schema.VALUE_TARGET`)."""
        self._returns = discounted_returns(self.table, gamma).to(self.device)
        self._ahead, self._ahead_size = [], 0

    def sample(self, batch_size: int) -> Batch:
        """A batch in the schema's keys, good until the next is drawn; `terminated` as 0.0 and 1.0."""
        if not self._ahead or self._ahead_size != batch_size:
            self._draw(batch_size)
        return self._ahead.pop()

    def gather(self, transitions: np.ndarray) -> Batch:
        """The observations and actions of given transitions, counted from 0, in a batch of their own."""
        rows = self._rows[self._first[torch.as_tensor(transitions, device=self.device)].long()]
        if self.num_members > 1:
            rows = rows.expand(self.num_members, *rows.shape)
        dim = self.table.observation_dim
        return {schema.OBSERVATION: rows[..., :dim], schema.ACTION: rows[..., dim:-2]}

    def _draw(self, batch_size: int) -> None:
        """Gather the next batches at once, into the memory of the last ones."""
        if self.device.type == "cpu":
            self._state_before = self.generator.get_state()
        if self._ahead_size != batch_size:
            self._cut(batch_size)
        torch.randint(len(self._first), self._draws.shape, generator=self.generator, out=self._draws)
        torch.index_select(self._first, 0, self._draws, out=self._chosen)
        torch.index_select(self._pairs, 0, self._chosen, out=self._gathered)
        if self._reward_scale != 1.0:
            self._reward.mul_(self._reward_scale)
        if self._returns is not None:
            torch.index_select(self._returns, 0, self._chosen, out=self._chosen_returns)
            self._chosen_returns.mul_(self._reward_scale)
        self._ahead = self._views.copy()

    def _cut(self, batch_size: int) -> None:
        """Make the memory that batches of this size are gathered into, and the views of it that are the batches."""
        self._ahead_size = batch_size
        members = () if self.num_members == 1 else (self.num_members,)
        shape = (self._block, *members, batch_size)
        count, width, dim = math.prod(shape), self._rows.shape[1], self.table.observation_dim
        self._draws = torch.empty(count, dtype=torch.int64, device=self.device)
        self._chosen = torch.empty(count, dtype=torch.int32, device=self.device)
        self._gathered = torch.empty(count, 2 * width, device=self.device)
        self._chosen_returns = torch.empty(count, device=self.device)
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
        cut = [column.unbind(0) for column in columns.values()]
        self._views = [dict(zip(columns, parts, strict=True)) for parts in zip(*cut, strict=True)][::-1]

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """Batches without end."""
        while True:
            yield self.sample(batch_size)

    def observations(self, block: int = 65_536) -> Iterator[Tensor]:
        """Every observation that a transition starts from, in blocks; for normalisers."""
        for rows in self._first.split(block):
            yield self._rows.index_select(0, rows)[:, : self.table.observation_dim]

    def state_dict(self) -> dict[str, Any]:
        """Where the generator stands, and how many of the batches drawn ahead are still to come."""
        if self.device.type != "cpu":
            return {"generator": self.generator.get_state(), "ahead": 0, "batch_size": 0}
        ahead = len(self._ahead)
        state = self._state_before if ahead else self.generator.get_state()
        return {"generator": state, "ahead": ahead, "batch_size": self._ahead_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`; the batches drawn ahead are drawn again."""
        self.generator.set_state(state["generator"])
        self._ahead = []
        if state["ahead"]:
            self._draw(state["batch_size"])
            del self._ahead[state["ahead"] :]


def discounted_returns(table: TransitionTable, gamma: float) -> Tensor:
    """G_t = r_t + γ G_{t+1} to the end of each episode, one value a row; 0 in an episode's last row."""
    rewards = table.reward.numpy()
    returns = np.zeros(len(rewards), np.float64)
    # From the ends backwards, all episodes at once: step k is the k-th transition from each episode's end.
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
