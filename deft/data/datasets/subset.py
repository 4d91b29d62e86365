"""Some episodes of a dataset as a dataset of their own; offline training splits off validation episodes with it."""

from __future__ import annotations

import numpy as np

from deft.data.datasets.dataset import Dataset, Episode


class EpisodeSubset(Dataset):
    """The given episodes of a dataset, in that order. Rows of a table are copied; what streams from disk is not."""

    def __init__(self, dataset: Dataset, episodes: np.ndarray) -> None:
        super().__init__(
            dataset.name,
            dataset.observation_space,
            dataset.action_space,
            dataset.lengths[episodes],
            dataset.env_id,
            dataset.reference_returns,
        )
        self.env_kwargs = dataset.env_kwargs
        self._dataset, self._episodes = dataset, episodes
        self.table = None if dataset.table is None else dataset.table.select(episodes)

    def episode(self, index: int) -> Episode:
        """The episode of the whole dataset."""
        return self._dataset.episode(int(self._episodes[index]))

    def episode_returns(self) -> np.ndarray:
        """The undiscounted return of each episode, float64 [E]."""
        return self._dataset.episode_returns()[self._episodes]

    def close(self) -> None:
        """Close the files of the whole dataset."""
        self._dataset.close()


def validation_episodes(num_episodes: int, fraction: float, seed: int) -> np.ndarray:
    """The episodes to hold out, sorted: `fraction` of all, rounded; never all of them. Drawn by the seed alone."""
    count = min(int(fraction * num_episodes + 0.5), num_episodes - 1)
    return np.sort(np.random.default_rng(seed).permutation(num_episodes)[:count])
