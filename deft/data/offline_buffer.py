"""`OfflineReplayBuffer`: samples transitions of a dataset, for the Python API of `IQLTrainer` and similar trainers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensordict import TensorDict

from deft.data.datasets import load_dataset
from deft.data.datasets.d4rl import from_d4rl_arrays
from deft.data.datasets.dataset import Dataset
from deft.data.replay import ReplayBuffer
from deft.data.streaming import StreamingBuffer
from deft.errors import InputError


class OfflineReplayBuffer:
    """Holds one dataset of `obs_dim` observations and `action_dim` actions, and samples transitions from it."""

    def __init__(self, obs_dim: int, action_dim: int, seed: int = 0) -> None:
        self.obs_dim, self.action_dim, self.seed = obs_dim, action_dim, seed
        self._dataset: Dataset | None = None
        self._sampler: ReplayBuffer | StreamingBuffer | None = None
        self.source: str | Path | None = None
        """The name or path of the dataset, if it was loaded by one and without options."""

    def load_dataset(self, dataset: Mapping[str, Any] | Dataset | str | Path, **options: Any) -> OfflineReplayBuffer:
        """Load D4RL's arrays (`env.get_dataset()`), a `Dataset`, or a name or path for `deft.load_dataset`."""
        if isinstance(dataset, Dataset):
            found = dataset
        elif isinstance(dataset, Mapping):
            found = from_d4rl_arrays(dict(dataset), **options)
        else:
            found = load_dataset(dataset, **options)
        expected = {
            "obs_dim": (self.obs_dim, found.observation_space),
            "action_dim": (self.action_dim, found.action_space),
        }
        for name, (size, space) in expected.items():
            if space.shape is not None and math.prod(space.shape) != size:
                raise InputError(f"{name}: {size} was given; the dataset {found.name} has {math.prod(space.shape)}")
        self._dataset, self._sampler = found, None
        self.source = dataset if isinstance(dataset, str | Path) and not options else None
        return self

    @property
    def dataset(self) -> Dataset:
        """The loaded dataset."""
        if self._dataset is None:
            raise InputError("the buffer is empty: call load_dataset first")
        return self._dataset

    def __len__(self) -> int:
        """Return the number of transitions; 0 before a dataset is loaded."""
        return 0 if self._dataset is None else len(self._dataset)

    def sample(self, batch_size: int) -> TensorDict:
        """Return a batch of transitions in the schema's keys, sampled with replacement."""
        if self._sampler is None:
            table, seed = self.dataset.table, self.seed
            self._sampler = StreamingBuffer(self.dataset, seed=seed) if table is None else ReplayBuffer(table, seed)
        return TensorDict(self._sampler.sample(batch_size), batch_size=[batch_size]).clone()  # samplers reuse memory
