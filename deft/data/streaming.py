"""Batches of transitions, or windows of them, from a dataset on disk: with images and named streams.

`deft.data.replay` has the equivalents for datasets of vectors in memory. `make_windows` and `OfflineReplayBuffer`, the
buffer of the Python API, choose between them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor

from deft import schema
from deft.data.datasets import load_dataset
from deft.data.datasets.d4rl import from_d4rl_arrays
from deft.data.datasets.dataset import Dataset, Episode
from deft.data.replay import (
    EpisodeWindows,
    ReplayBuffer,
    Sampler,
    cumulative_weights,
    no_interventions,
    weighted_draws,
)
from deft.data.tensors import Batch
from deft.errors import InputError

DEFAULT_CACHE_BYTES = 2 * 2**30


class EpisodePool(Sampler):
    """Episodes of a dataset in memory, as many as fit into `cache_bytes`.

    If all episodes fit, the pool is the whole dataset and sampling is uniform over its transitions. Otherwise episodes
    pass through the pool in a random order, which is new in each pass. After an episode was loaded, `reuse` times its
    number of transitions are sampled from the pool; then the next episode is loaded and the oldest ones are removed to
    make room. So each transition is sampled about `reuse` times in a pass, and a batch mixes all episodes of the pool.
    """

    capturable = False  # `sample` reads from disk and cannot be captured in a CUDA graph

    def __init__(
        self,
        dataset: Dataset,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        seed: int = 0,
        reuse: float = 8.0,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(seed, device)
        self.dataset, self.cache_bytes, self.reuse = dataset, cache_bytes, reuse
        self._bytes = episode_bytes(dataset)
        self.fits = int(self._bytes.sum()) <= cache_bytes
        if int(self._bytes.max()) > cache_bytes:
            raise InputError(
                f"cache_gb: {cache_bytes / 2**30:g} is too small: the longest episode of {dataset.name} alone needs "
                f"{self._bytes.max() / 2**30:.3g}"
            )
        self._own = list(range(dataset.num_episodes))  # the episodes that this process samples
        self._order: list[int] = []  # the episodes that are still to be loaded in this pass
        self._pool: dict[int, Episode] = {}  # by episode, oldest first
        self._draws_owed = 0.0  # samples until the next episode is loaded
        self._episodes: list[Episode] = []  # the pool, in the order of `_ends`
        self._ends = np.zeros(0, np.int64)  # cumulative number of transitions of the pool's episodes
        self._gamma: float | None = None
        self._returns: list[np.ndarray] = []
        self._intervention_weight, self._adds_interventions = 1.0, False
        self._weights: Tensor | None = None  # cumulative weights of the pool's transitions, if they differ

    def __len__(self) -> int:
        """Return the number of transitions of the whole dataset."""
        return len(self.dataset)

    @property
    def memory_bytes(self) -> int:
        """The current size of the pool."""
        return sum(episode.nbytes for episode in self._pool.values())

    def shard(self, rank: int, count: int) -> None:
        """Sample only every `count`-th episode, starting at `rank`: the shard of one of several processes."""
        self._own = list(range(rank, self.dataset.num_episodes, count))
        if not self._own:
            raise InputError(
                f"{self.dataset.name} has {self.dataset.num_episodes} episodes, fewer than the {count} processes"
            )
        self.fits = int(self._bytes[self._own].sum()) <= self.cache_bytes
        self._order, self._pool, self._draws_owed = [], {}, 0.0

    def weight_interventions(self, weight: float) -> None:
        """Sample transitions that an expert decided `weight` times as often as others."""
        self._intervention_weight = weight
        self._index_pool()

    def add_interventions(self) -> None:
        """Add `schema.INTERVENTION` to batches, where the recording marks interventions."""
        self._adds_interventions = True

    def add_returns(self, gamma: float) -> None:
        """Add the discounted return to the end of the recorded episode to batches."""
        self._gamma = gamma
        self._index_pool()

    def observations(self) -> Iterator[dict[str, Tensor] | Tensor]:
        """Yield the observations at which transitions start, without images, for observation normalisation.

        This reads the whole dataset once, unless it has only images.
        """
        space = self.dataset.observation_space
        parts = space.spaces if isinstance(space, spaces.Dict) else {"": space}
        names = [name for name, part in parts.items() if part.dtype != np.uint8 or len(part.shape or ()) < 2]
        if names and self.fits:
            self._rotate(0)  # the episodes that are read now stay in the pool
        for index in range(self.dataset.num_episodes if names else 0):
            streams = self._episode(index).streams
            vectors = {name: torch.from_numpy(streams[name][:-1]) for name in names}
            yield vectors.get("", vectors)

    def observation_statistics(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return mean and standard deviation of each stream of float vectors, over the starts of transitions.

        A single array has the name `schema.OBSERVATION`. This reads the whole dataset once.
        """
        totals: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        for index in range(self.dataset.num_episodes):
            episode = self._episode(index)
            for name, rows in episode.streams.items():
                if rows.ndim == 2 and rows.dtype == np.float32:
                    values = rows[: len(episode)].astype(np.float64)
                    # Sums of differences from the first row keep their precision if the mean is large.
                    origin, total, squares = totals.get(name, (values[0], 0.0, 0.0))
                    total = total + (values - origin).sum(0)
                    totals[name] = origin, total, squares + ((values - origin) ** 2).sum(0)
        statistics = {}
        for name, (origin, total, squares) in totals.items():
            mean = total / len(self)
            deviation = np.sqrt(np.maximum(squares / len(self) - mean**2, 0.0))
            statistics[name or schema.OBSERVATION] = (
                torch.from_numpy((origin + mean).astype(np.float32)),
                torch.from_numpy(deviation.astype(np.float32)),
            )
        return statistics

    def state_dict(self) -> dict[str, Any]:
        """Return what determines the next samples; the episodes are read again."""
        return {
            **super().state_dict(),
            "order": list(self._order),
            "pool": list(self._pool),
            "draws_owed": self._draws_owed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned for the same dataset."""
        known = range(self.dataset.num_episodes)
        if not all(index in known for index in (*state["pool"], *state["order"])):
            raise InputError(
                f"the saved buffer names episodes that {self.dataset.name} does not have: is it another dataset?"
            )
        super().load_state_dict(state)
        self._order, self._draws_owed = list(state["order"]), float(state["draws_owed"])
        self._pool = {index: self._episode(index) for index in state["pool"]}
        self._index_pool()

    def _sample_steps(self, batch_size: int, num_draws: int) -> tuple[np.ndarray, np.ndarray]:
        """Sample transitions of the pool: return their episodes (indices of `_episodes`) and steps.

        `num_draws` is the number of samples that count towards loading the next episode.
        """
        self._rotate(num_draws)
        if self._weights is None:
            draws = torch.randint(int(self._ends[-1]), (batch_size,), generator=self.generator).numpy()
        else:
            draws = weighted_draws(self._weights, batch_size, self.generator).numpy()
        episodes = np.searchsorted(self._ends, draws, "right")
        return episodes, draws - np.concatenate([[0], self._ends])[episodes]

    def _stack(self, rows: Any, dtype: Any = None) -> Tensor:
        """Return the rows of a batch as one tensor on the device."""
        return torch.from_numpy(np.stack(rows) if dtype is None else np.array(rows, dtype)).to(self.device)

    def _episode(self, index: int) -> Episode:
        return self._pool.get(index) or self.dataset.episode(index)

    def _rotate(self, num_draws: int) -> None:
        """Fill the pool at first; later load the episodes that are due."""
        if not self._pool:
            while self._fits_next():
                self._draws_owed = self._load_next()
            self._index_pool()
        if self.fits:
            return
        self._draws_owed -= num_draws
        if self._draws_owed >= 0:
            return
        while self._draws_owed < 0:
            self._make_room(self._next())
            self._draws_owed += self._load_next()
        self._index_pool()

    def _make_room(self, incoming: int) -> None:
        """Remove the oldest episodes until the incoming one fits; that one itself stays if it is in the pool."""
        room = self.cache_bytes - int(self._bytes[incoming])
        kept = []
        for index in reversed(self._pool):
            if index != incoming:
                room -= int(self._bytes[index])
                if room < 0:
                    break
            kept.append(index)
        if incoming in self._pool and incoming not in kept:
            kept.append(incoming)
        self._pool = {index: self._pool[index] for index in reversed(kept)}

    def _next(self) -> int:
        """Return the episode to load next; each pass has all episodes in a new order."""
        if not self._order:
            order = torch.randperm(len(self._own), generator=self.generator).tolist()
            self._order = [self._own[position] for position in order]
        return self._order[0]

    def _fits_next(self) -> bool:
        """Return whether there is an episode that is not in the pool, and the next one fits into it."""
        if len(self._pool) == len(self._own):
            return False
        used = sum(int(self._bytes[index]) for index in self._pool)
        return used + int(self._bytes[self._next()]) <= self.cache_bytes

    def _load_next(self) -> float:
        """Load the next episode as the newest of the pool; return the number of samples until the following one.

        The number is proportional to the episode's length, so an episode of any length stays for as many samples as
        the pool has transitions, times `reuse`.
        """
        index = self._next()
        self._order.pop(0)
        episode = self._pool.pop(index) if index in self._pool else self.dataset.episode(index)
        self._pool[index] = episode
        return self.reuse * len(episode)

    def _index_pool(self) -> None:
        """Update the index of the pool's transitions."""
        self._episodes = list(self._pool.values())
        self._ends = np.cumsum([len(episode) for episode in self._episodes])
        if self._gamma is not None:
            self._returns = [discounted_rewards(episode.reward, self._gamma) for episode in self._episodes]
        if self._intervention_weight != 1.0 and self._episodes:
            if all(episode.intervention is None for episode in self._episodes):
                raise no_interventions()
            marks = np.concatenate([episode.marks for episode in self._episodes])
            self._weights = cumulative_weights(torch.from_numpy(marks), self._intervention_weight)


class StreamingBuffer(EpisodePool):
    """Samples transitions, with replacement, from a pool of episodes in memory.

    With `chunk_length` K > 1 a transition is the K steps from a sampled one on, fewer at the end of the episode:
    actions [B, K, …] (the last one repeated after the end, and False in `schema.STEP_MASK` [B, K]), the reward
    Σ_i γ^i r_i, the observation after the steps, and `schema.DISCOUNT` γ^k for the value there, 0 at a terminal. γ is
    `chunk_gamma`. Without `next_observation` batches have no next observation, which halves the copying.
    """

    def __init__(
        self,
        dataset: Dataset,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        seed: int = 0,
        reuse: float = 8.0,
        device: torch.device | str = "cpu",
        chunk_length: int = 1,
        chunk_gamma: float = 1.0,
        next_observation: bool = True,
    ) -> None:
        super().__init__(dataset, cache_bytes, seed, reuse, device)
        self.chunk_length = chunk_length
        self.chunk_gamma = chunk_gamma
        self.next_observation = next_observation
        self._reward_scale = 1.0
        self._next_actions = False

    def scale_rewards(self, scale: float) -> None:
        """Multiply the rewards of every batch by `scale`."""
        self._reward_scale = scale

    def add_next_actions(self) -> None:
        """Add `schema.NEXT_ACTION` and `schema.NEXT_STEP_MASK` to batches."""
        self._next_actions = True

    def sample(self, batch_size: int) -> Batch:
        """Return a batch in the schema's keys: named streams as a dict, images as uint8, `terminated` 0.0 or 1.0."""
        episodes, steps = self._sample_steps(batch_size, batch_size)
        chosen = list(zip(episodes.tolist(), steps.tolist(), strict=True))
        batch = self._batch([(self._episodes[episode], step) for episode, step in chosen])
        if self._gamma is not None:
            returns = [self._returns[episode][step] for episode, step in chosen]
            batch[schema.VALUE_TARGET] = self._stack(returns, np.float32) * self._reward_scale
        if self._adds_interventions:
            batch[schema.INTERVENTION] = self._stack([self._episodes[one].marks[step] for one, step in chosen])
        return batch

    def gather(self, transitions: np.ndarray) -> Batch:
        """Return the batch of given transitions, numbered from 0 through all episodes of the dataset."""
        ends = np.cumsum(self.dataset.lengths)
        which = np.searchsorted(ends, transitions, "right")
        episodes = {number: self.dataset.episode(int(number)) for number in np.unique(which)}
        steps = transitions - (ends - self.dataset.lengths)[which]
        return self._batch([(episodes[number], int(step)) for number, step in zip(which, steps, strict=True)])

    def _batch(self, chosen: list[tuple[Episode, int]]) -> Batch:
        """Return the transitions at these steps of episodes."""
        streams = chosen[0][0].streams
        now = {name: self._rows(name, chosen) for name in streams}
        batch: Batch = {schema.OBSERVATION: now.get("", now)}
        if self.next_observation:
            after = [(episode, min(step + self.chunk_length, len(episode))) for episode, step in chosen]
            following = {name: self._rows(name, after) for name in streams}
            batch[schema.NEXT_OBSERVATION] = following.get("", following)
        if self._next_actions:
            batch |= self._following_actions(chosen)
        return batch | (self._single_steps(chosen) if self.chunk_length == 1 else self._chunks(chosen))

    def _rows(self, name: str, chosen: list[tuple[Episode, int]]) -> Tensor:
        """Return the rows of a stream at these steps of episodes."""
        example = chosen[0][0].streams[name]
        rows = np.empty((len(chosen), *example.shape[1:]), example.dtype)
        for row, (episode, step) in zip(rows, chosen, strict=True):
            row[...] = episode.streams[name][step]
        return torch.from_numpy(rows).to(self.device)

    def _single_steps(self, chosen: list[tuple[Episode, int]]) -> Batch:
        """Return actions, rewards and terminal flags of single transitions."""
        reward = self._stack([episode.reward[step] for episode, step in chosen], np.float32)
        return {
            schema.ACTION: self._stack([episode.action[step] for episode, step in chosen]),
            schema.NEXT_REWARD: reward * self._reward_scale,
            schema.NEXT_TERMINATED: self._stack([episode.terminated[step] for episode, step in chosen], np.float32),
        }

    def _following_actions(self, chosen: list[tuple[Episode, int]]) -> Batch:
        """Return the actions, or chunks, that follow those at these steps, and which of their steps were recorded."""
        steps = [np.arange(step + self.chunk_length, step + 2 * self.chunk_length) for _, step in chosen]
        pairs = [(episode, rows) for (episode, _), rows in zip(chosen, steps, strict=True)]
        actions = [episode.action[np.minimum(rows, len(episode) - 1)] for episode, rows in pairs]
        stacked = self._stack(actions)
        return {
            schema.NEXT_ACTION: stacked if self.chunk_length > 1 else stacked.squeeze(1),
            schema.NEXT_STEP_MASK: self._stack([rows < len(episode) for episode, rows in pairs]),
        }

    def _chunks(self, chosen: list[tuple[Episode, int]]) -> Batch:
        """Return the same for chunks, with the mask of real steps and the discount after them."""
        length, example = self.chunk_length, chosen[0][0].action
        counts = np.array([min(len(episode) - step, length) for episode, step in chosen])
        actions = np.empty((len(chosen), length, *example.shape[1:]), example.dtype)
        rewards, terminated = np.zeros((len(chosen), length)), np.zeros(len(chosen), bool)
        for row, ((episode, step), count) in enumerate(zip(chosen, counts.tolist(), strict=True)):
            actions[row, :count] = episode.action[step : step + count]
            actions[row, count:] = episode.action[-1]
            rewards[row, :count] = episode.reward[step : step + count]
            terminated[row] = episode.terminated[step + count - 1]
        gamma = self.chunk_gamma
        return {
            schema.ACTION: torch.from_numpy(actions).to(self.device),
            schema.STEP_MASK: torch.from_numpy(np.arange(length) < counts[:, None]).to(self.device),
            schema.NEXT_REWARD: self._stack(rewards @ gamma ** np.arange(length), np.float32) * self._reward_scale,
            schema.NEXT_TERMINATED: self._stack(terminated, np.float32),
            schema.DISCOUNT: self._stack(np.where(terminated, 0.0, gamma**counts), np.float32),
        }


class StreamingWindows(EpisodePool):
    """The windows of `EpisodeWindows` for a dataset on disk (images, language), from a pool of episodes in memory."""

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


def episode_bytes(dataset: Dataset) -> np.ndarray:
    """Return the size of each episode in memory, computed from the dataset's spaces, int64 [E]."""
    lengths = dataset.lengths
    observation = dataset.observation_space
    streams = observation.spaces.values() if isinstance(observation, spaces.Dict) else [observation]
    row = sum(_space_bytes(space) for space in streams)
    # In addition to the action, a transition has a float32 reward and two flags.
    return (lengths + 1) * row + lengths * (_space_bytes(dataset.action_space) + 6)


def _space_bytes(space: spaces.Space) -> int:
    """Return the size of one row of a space in bytes."""
    if isinstance(space, spaces.Discrete):
        return 8
    return int(np.prod(space.shape or ())) * np.dtype(space.dtype).itemsize


def discounted_rewards(reward: np.ndarray, gamma: float) -> np.ndarray:
    """Return G_t = r_t + γ G_{t+1} to the end of the episode."""
    returns = np.zeros(len(reward) + 1)
    for step in range(len(reward) - 1, -1, -1):
        returns[step] = reward[step] + gamma * returns[step + 1]
    return returns[:-1]
