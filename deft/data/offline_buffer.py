"""`OfflineReplayBuffer`: a dataset in hand, for Python users of `IQLTrainer` and its siblings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tensordict import TensorDict

from deft.data.datasets import load_dataset
from deft.data.datasets.d4rl import from_d4rl_arrays
from deft.data.datasets.dataset import Dataset
from deft.data.replay import ReplayBuffer
from deft.data.streaming import StreamingBuffer
from deft.errors import InputError


class OfflineReplayBuffer:
    """Holds one dataset of `obs_dim` observations and `action_dim` actions, and draws transitions from it."""

    def __init__(self, obs_dim: int, action_dim: int, seed: int = 0) -> None:
        self.obs_dim, self.action_dim, self.seed = obs_dim, action_dim, seed
        self._dataset: Dataset | None = None
        self._sampler: ReplayBuffer | StreamingBuffer | None = None
        self.source: str | Path | None = None
        """The name or path that it was loaded by, where it was and with no options."""

    def load_dataset(self, dataset: Mapping[str, Any] | Dataset | str | Path, **options: Any) -> OfflineReplayBuffer:
        """Take a dataset: D4RL's arrays (`env.get_dataset()`), a `Dataset`, or what `load_dataset` finds."""
        if isinstance(dataset, Dataset):
            found = dataset
        elif isinstance(dataset, Mapping):
            found = from_d4rl_arrays(dict(dataset), **options)
        else:
            found = load_dataset(dataset, **options)
        sizes = [_size(space.shape) for space in (found.observation_space, found.action_space)]
        for what, wanted, size in zip(("obs_dim", "action_dim"), (self.obs_dim, self.action_dim), sizes, strict=True):
            if size is not None and size != wanted:
                raise InputError(f"{what}: {wanted} was given, the dataset {found.name} has {size}")
        self._dataset, self._sampler = found, None
        self.source = dataset if isinstance(dataset, str | Path) and not options else None
        return self

    @property
    def dataset(self) -> Dataset:
        """What was loaded."""
        if self._dataset is None:
            raise InputError("the buffer is empty: load_dataset comes first")
        return self._dataset

    def __len__(self) -> int:
        """Transitions; 0 before anything is loaded."""
        return 0 if self._dataset is None else len(self._dataset)

    def sample(self, batch_size: int) -> TensorDict:
        """A batch of transitions, drawn with replacement, in the schema's keys."""
        if self._sampler is None:
            table = self.dataset.table
            self._sampler = (
                StreamingBuffer(self.dataset, seed=self.seed) if table is None else ReplayBuffer(table, self.seed)
            )
        return TensorDict(
            self._sampler.sample(batch_size), batch_size=[batch_size]
        ).clone()  # the sampler reuses memory


def _size(shape: tuple[int, ...] | None) -> int | None:
    """Numbers in one row; None where the space is not a single array."""
    return None if shape is None else int(np.prod(shape))
