"""A dataset under other names of its streams (`dataset.rename_streams`): policies know their streams by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gymnasium import spaces

from deft.data.datasets.dataset import Dataset, Episode
from deft.schema import renamed_streams


class RenamedDataset(Dataset):
    """The episodes of a dataset of named streams; `rename` is {new name: the dataset's name}."""

    def __init__(self, dataset: Dataset, rename: Mapping[str, str]) -> None:
        space = dataset.observation_space
        streams = dict(space.spaces) if isinstance(space, spaces.Dict) else {}
        self._names = renamed_streams(streams, rename, f"dataset {dataset.name}")
        renamed = spaces.Dict({new: streams[name] for name, new in self._names.items()})
        references = dataset.reference_returns
        super().__init__(dataset.name, renamed, dataset.action_space, dataset.lengths, dataset.env_id, references)
        self.env_kwargs = dataset.env_kwargs
        self._dataset = dataset

    def episode(self, index: int) -> Episode:
        """One episode, its streams by their new names."""
        episode = self._dataset.episode(index)
        return dataclasses.replace(episode, observation={self._names[k]: rows for k, rows in episode.streams.items()})

    def episode_returns(self) -> np.ndarray:
        """The undiscounted return of each episode, float64 [E]."""
        return self._dataset.episode_returns()

    def fingerprint(self) -> str:
        """That of the dataset: names are no part of its content."""
        return self._dataset.fingerprint()

    def source_files(self) -> list[Path]:
        """Those of the dataset."""
        return self._dataset.source_files()

    def close(self) -> None:
        """Close the dataset."""
        self._dataset.close()
