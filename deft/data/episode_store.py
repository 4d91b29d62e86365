"""A ring of robot episodes that is saved with a run: those of an explorer that learns cannot be collected again.

The adversarial phase keeps two: what the explorer found last, and older episodes.
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

    def __len__(self) -> int:
        """Episodes that are there."""
        return len(self.episodes)

    def add(self, episodes: Iterable[RobotEpisode]) -> None:
        """Keep episodes; the oldest make room."""
        self.episodes.extend(episodes)

    def draw(self, count: int, generator: np.random.Generator) -> list[RobotEpisode]:
        """`count` different episodes at random; all, where there are fewer."""
        places = generator.choice(len(self.episodes), min(count, len(self.episodes)), replace=False)
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
