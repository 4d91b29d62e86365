"""A ring of robot episodes that is saved with a run: those of an explorer that learns cannot be collected again.

The adversarial phase keeps three: what the explorer found last, what it found before, and random episodes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from deft.data.robot_episode import RobotEpisode


class EpisodeStore:
    """The latest `capacity` episodes, on the CPU."""

    def __init__(self, capacity: int) -> None:
        self.episodes: deque[RobotEpisode] = deque(maxlen=capacity)
        self.num_unseen = 0  # the newest, that `draw_unseen_first` has not drawn yet

    def __len__(self) -> int:
        """Episodes that are there."""
        return len(self.episodes)

    def add(self, episodes: Iterable[RobotEpisode]) -> None:
        """Keep episodes; the oldest make room."""
        new = list(episodes)
        self.episodes.extend(new)
        self.num_unseen = min(self.num_unseen + len(new), len(self.episodes))

    def draw(self, count: int, generator: np.random.Generator) -> list[RobotEpisode]:
        """`count` different episodes at random; all, where there are fewer."""
        places = generator.choice(len(self.episodes), min(count, len(self.episodes)), replace=False)
        return [self.episodes[place] for place in places]

    def draw_unseen_first(self, count: int, generator: np.random.Generator) -> list[RobotEpisode]:
        """As `EpisodeBuffer` does: what was never drawn so, the oldest of it first, then others at random."""
        seen = len(self.episodes) - self.num_unseen
        places = list(range(seen, min(seen + count, len(self.episodes))))
        self.num_unseen -= len(places)
        places += generator.choice(seen, min(count - len(places), seen), replace=False).tolist()
        return [self.episodes[place] for place in places]

    def state_dict(self) -> list[dict[str, Any]]:
        """All of it, as tensors."""
        return [
            {"number": episode.number, **{name: torch.as_tensor(value) for name, value in episode.streams().items()}}
            for episode in self.episodes
        ]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """The inverse of `state_dict`."""
        self.episodes.clear()
        self.add(
            RobotEpisode(**{name: value if name == "number" else value.numpy() for name, value in one.items()})
            for one in state
        )
