"""Transitions of vector observations as one table in memory: datasets load into it, replay buffers sample from it.

A row is observation | action | reward | terminated. An episode of T transitions takes T + 1 rows, of which the last
holds its final observation alone: the next observation of a transition is the row below it, so nothing is stored twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from deft.errors import InputError


class TransitionTable:
    """Whole episodes, one after another, in one float32 tensor [rows, observation_dim + action_dim + 2].

    Whether an episode was truncated is not stored: it was, where its last transition is not terminated.
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

    def __len__(self) -> int:
        """Transitions."""
        return int(self.lengths.sum())

    @property
    def observation(self) -> Tensor:
        """[rows, observation_dim]; those of an episode are its T + 1 observations."""
        return self.rows[:, : self.observation_dim]

    @property
    def action(self) -> Tensor:
        """[rows, action_dim]; zeros in an episode's last row."""
        return self.rows[:, self.observation_dim : -2]

    @property
    def reward(self) -> Tensor:
        """[rows]; 0 in an episode's last row."""
        return self.rows[:, -2]

    @property
    def terminated(self) -> Tensor:
        """[rows], 1.0 where the transition ended its episode other than by a time limit."""
        return self.rows[:, -1]

    def episode_rows(self, episode: int) -> slice:
        """The rows of one episode, its final observation included."""
        start = int(self.starts[episode])
        return slice(start, start + int(self.lengths[episode]) + 1)

    def select(self, episodes: Sequence[int] | np.ndarray) -> TransitionTable:
        """A table of some episodes, a copy."""
        rows = torch.cat([self.rows[self.episode_rows(int(episode))] for episode in episodes])
        return TransitionTable(self.lengths[episodes], self.observation_dim, self.action_dim, rows)

    def transition_rows(self) -> Tensor:
        """The row of each transition, int64 [len(self)]: all rows but the last of each episode."""
        is_last = torch.zeros(len(self.rows), dtype=torch.bool)
        is_last[torch.from_numpy(self.starts + self.lengths)] = True
        return (~is_last).nonzero().squeeze(1)
