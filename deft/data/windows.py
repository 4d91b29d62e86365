"""Windows of consecutive steps inside one episode, for sequence models; the Decision Transformer trains on them.

From a table in memory, on the table's device or another, or from a dataset that streams its episodes from disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deft import schema
from deft.data.datasets.dataset import Dataset
from deft.data.replay import TransitionTable, discounted_returns
from deft.data.streaming import DEFAULT_CACHE_BYTES, StreamingBuffer
from deft.data.tensors import Batch


class EpisodeWindows:
    """Draws windows of up to `context_length` steps of a `TransitionTable`, from a generator of its own.

    Every transition is as likely as any other to be a window's first step, so an episode is drawn in proportion to its
    length. A window ends with its episode; what is missing then is padding at its end, marked in `schema.STEP_MASK`.
    Returns-to-go sum the rewards to the true end of the episode, and timesteps count from its beginning.
    """

    capturable = True  # `sample` may be recorded as part of a CUDA graph

    def __init__(
        self, table: TransitionTable, context_length: int, seed: int = 0, device: torch.device | str = "cpu"
    ) -> None:
        self.table, self.context_length = table, context_length
        self.device = torch.device(device)
        self.generator = torch.Generator(self.device)
        self.generator.manual_seed(seed)
        self._rows = table.rows.to(self.device)
        self._returns = discounted_returns(table, 1.0).to(self.device)
        self._starts, self._lengths = (torch.from_numpy(part).to(self.device) for part in (table.starts, table.lengths))
        self._ends = self._lengths.cumsum(0)  # transitions up to and with each episode
        self._offsets = torch.arange(context_length, device=self.device)
        self._rank, self._count = 0, 1

    def __len__(self) -> int:
        """Windows: one for each transition."""
        return len(self.table)

    def shard(self, rank: int, count: int) -> None:
        """Draw every `count`-th window alone, from `rank` on: the share of one of several processes."""
        self._rank, self._count = rank, count

    def sample(self, batch_size: int) -> Batch:
        """Windows [batch_size, context_length, …] in the schema's keys."""
        number = (len(self) - self._rank + self._count - 1) // self._count
        draws = torch.randint(number, (batch_size,), generator=self.generator, device=self.device)
        return self.windows(draws * self._count + self._rank)

    def windows(self, transitions: Tensor) -> Batch:
        """The windows that begin at the given transitions, which count from 0 through all episodes."""
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

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """Batches without end."""
        while True:
            yield self.sample(batch_size)

    def observations(self, block: int = 65_536) -> Iterator[Any]:
        """Every observation that a transition starts from, in blocks; for normalisers."""
        for rows in self.table.transition_rows().split(block):
            yield self.table.observation[rows]

    def state_dict(self) -> dict[str, Any]:
        """Where the generator stands."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.generator.set_state(state["generator"])


class StreamingWindows(StreamingBuffer):
    """The same windows out of a dataset that stays on disk (images, language), from a pool of episodes in memory.

    How episodes pass through the pool is `StreamingBuffer`'s; where all of them fit, every transition is as likely as
    any other to be a window's first step.
    """

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
        """Windows [batch_size, context_length, …] in the schema's keys; named streams as a dict of tensors."""
        self._rotate(batch_size * self.context_length)
        draws = torch.randint(int(self._ends[-1]), (batch_size,), generator=self.generator).numpy()
        which = np.searchsorted(self._ends, draws, "right")
        episodes = [self._episodes[number] for number in which]
        lengths = np.array([len(episode) for episode in episodes])
        steps = draws - (self._ends[which] - lengths)
        timestep = steps[:, None] + np.arange(self.context_length)
        mask = timestep < lengths[:, None]
        timestep = np.minimum(timestep, lengths[:, None] - 1)  # padding repeats the last step
        streams = {
            name: self._stack([episode.streams[name][rows] for episode, rows in zip(episodes, timestep, strict=True)])
            for name in episodes[0].streams
        }
        returns = [self._returns[number][rows] for number, rows in zip(which, timestep, strict=True)]
        return {
            schema.OBSERVATION: streams.get("", streams),
            schema.ACTION: self._stack([e.action[rows] for e, rows in zip(episodes, timestep, strict=True)]),
            schema.RETURN_TO_GO: self._stack(returns).float(),
            schema.TIMESTEP: self._stack(list(timestep)),
            schema.STEP_MASK: self._stack(list(mask)),
        }

    def _stack(self, rows: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.stack(rows)).to(self.device)


def make_windows(
    dataset: Dataset,
    context_length: int,
    seed: int = 0,
    device: torch.device | str = "cpu",
    cache_bytes: int = DEFAULT_CACHE_BYTES,
) -> EpisodeWindows | StreamingWindows:
    """The windows of a dataset: out of its table where it has one, else streamed from disk."""
    if dataset.table is not None:
        return EpisodeWindows(dataset.table, context_length, seed, device)
    return StreamingWindows(dataset, context_length, seed, device, cache_bytes)
