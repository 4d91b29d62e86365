"""Datasets that show another one differently: with renamed streams, or only some of its episodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gymnasium import spaces

from deft.data.datasets.dataset import Dataset, Episode
from deft.schema import renamed_streams


class DatasetView(Dataset):
    """Another dataset, with an observation space and episodes of its own."""

    def __init__(self, dataset: Dataset, observation_space: spaces.Space, lengths: np.ndarray) -> None:
        super().__init__(
            dataset.name, observation_space, dataset.action_space, lengths, dataset.env_id, dataset.reference_returns
        )
        self.env_kwargs = dataset.env_kwargs
        self._dataset = dataset

    def close(self) -> None:
        """Close the files of the dataset."""
        self._dataset.close()


class RenamedDataset(DatasetView):
    """A dataset whose streams have other names (`dataset.rename_streams`): `rename` is {new name: old name}."""

    def __init__(self, dataset: Dataset, rename: Mapping[str, str]) -> None:
        space = dataset.observation_space
        streams = dict(space.spaces) if isinstance(space, spaces.Dict) else {}
        self._names = renamed_streams(streams, rename, f"dataset {dataset.name}")
        renamed = spaces.Dict({new: streams[name] for name, new in self._names.items()})
        super().__init__(dataset, renamed, dataset.lengths)

    def episode(self, index: int) -> Episode:
        """Return one episode, with the new names of its streams."""
        episode = self._dataset.episode(index)
        return dataclasses.replace(episode, observation={self._names[k]: rows for k, rows in episode.streams.items()})

    def episode_returns(self) -> np.ndarray:
        """Return the undiscounted return of each episode, float64 [E]."""
        return self._dataset.episode_returns()

    def fingerprint(self) -> str:
        """Return the fingerprint of the dataset: names are not part of the content."""
        return self._dataset.fingerprint()

    def source_files(self) -> list[Path]:
        """Return the files of the dataset."""
        return self._dataset.source_files()


class EpisodeSubset(DatasetView):
    """Some episodes of a dataset, for example without those held out for validation. Rows of a table are copied."""

    def __init__(self, dataset: Dataset, episodes: np.ndarray) -> None:
        super().__init__(dataset, dataset.observation_space, dataset.lengths[episodes])
        self._episodes = episodes
        self.table = None if dataset.table is None else dataset.table.select(episodes)

    def episode(self, index: int) -> Episode:
        """Return one of the episodes."""
        return self._dataset.episode(int(self._episodes[index]))

    def episode_returns(self) -> np.ndarray:
        """Return the undiscounted return of each episode, float64 [E]."""
        return self._dataset.episode_returns()[self._episodes]


def validation_episodes(num_episodes: int, fraction: float, seed: int) -> np.ndarray:
    """Return the episodes to hold out, sorted: `fraction` of all, rounded, never all; determined by the seed."""
    count = min(int(fraction * num_episodes + 0.5), num_episodes - 1)
    return np.sort(np.random.default_rng(seed).permutation(num_episodes)[:count])
