"""Windows of consecutive steps of one episode, for sequence models such as the Decision Transformer.

They come from a table in memory (`EpisodeWindows`), or from a dataset on disk (`StreamingWindows`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deft import schema
from deft.data.datasets.dataset import Dataset
from deft.data.replay import Sampler, TransitionTable, discounted_returns
from deft.data.streaming import DEFAULT_CACHE_BYTES, EpisodePool
from deft.data.tensors import Batch


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


class StreamingWindows(EpisodePool):
    """The same windows for a dataset on disk (images, language), from a pool of episodes in memory."""

    def __init__(
        self,
        dataset: Dataset,
        context_length: int,
        seed: int = 0,
        device: torch.device | str = "cpu",
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> None:
        super().__init__(dataset, cache_bytes, seed, device=device)
        self.context_length = context_length
        self.add_returns(1.0)

    def sample(self, batch_size: int) -> Batch:
        """Return windows [batch_size, context_length, …] in the schema's keys; named streams as a dict of tensors."""
        which, steps = self._sample_steps(batch_size, batch_size * self.context_length)
        episodes = [self._episodes[number] for number in which]
        lengths = np.array([len(episode) for episode in episodes])[:, None]
        timestep = steps[:, None] + np.arange(self.context_length)
        mask = timestep < lengths
        timestep = np.minimum(timestep, lengths - 1)  # padding repeats the last step
        windows = list(zip(episodes, timestep, strict=True))
        streams = {
            name: self._stack([episode.streams[name][rows] for episode, rows in windows])
            for name in episodes[0].streams
        }
        returns = [self._returns[number][rows] for number, rows in zip(which, timestep, strict=True)]
        return {
            schema.OBSERVATION: streams.get("", streams),
            schema.ACTION: self._stack([episode.action[rows] for episode, rows in windows]),
            schema.RETURN_TO_GO: self._stack(returns).float(),
            schema.TIMESTEP: self._stack(list(timestep)),
            schema.STEP_MASK: self._stack(list(mask)),
        }


def make_windows(
    dataset: Dataset,
    context_length: int,
    seed: int = 0,
    device: torch.device | str = "cpu",
    cache_bytes: int = DEFAULT_CACHE_BYTES,
) -> EpisodeWindows | StreamingWindows:
    """Return the windows of a dataset: from its table if it has one, otherwise from disk."""
    if dataset.table is not None:
        return EpisodeWindows(dataset.table, context_length, seed, device)
    return StreamingWindows(dataset, context_length, seed, device, cache_bytes)
