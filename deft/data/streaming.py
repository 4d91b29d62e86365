"""Batches of transitions out of a dataset that stays on disk (images, named streams); `ReplayBuffer` for what does not
fit in one table. Offline training draws from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from deft import schema
from deft.data.datasets.dataset import Dataset, Episode
from deft.data.tensors import Batch
from deft.errors import InputError

DEFAULT_CACHE_BYTES = 2 * 2**30


class StreamingBuffer:
    """Draws transitions, with replacement, from a pool of whole episodes in memory.

    Where every episode fits into `cache_bytes` the pool is the dataset and a draw is uniform over its transitions. Else
    episodes pass through it in a random order, a new one every pass: once one has come in, as many draws are made
    as `reuse` times its transitions; then the next one comes in and the oldest go out to make room. So every transition
    is drawn about `reuse` times a pass, and a batch mixes all episodes of the pool.

    With `chunk_length` K > 1 a transition is the K steps from a drawn one on, fewer where the episode ends: actions
    [B, K, …] (after the end the last one again, and False in `schema.STEP_MASK` [B, K]), the reward Σ_i γ^i r_i, the
    observation after them, and `schema.DISCOUNT` γ^k for the value there, 0 at a terminal. γ is `chunk_gamma`.
    Without `next_observation` a batch has none, which saves half of the copying.
    """

    capturable = False  # it reads from disk

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
        self.dataset = dataset
        self.chunk_length = chunk_length
        self.chunk_gamma = chunk_gamma
        self.next_observation = next_observation
        self.cache_bytes = cache_bytes
        self.reuse = reuse
        self.device = torch.device(device)
        self.generator = torch.Generator()
        self.generator.manual_seed(seed)
        self._bytes = episode_bytes(dataset)
        self.fits = int(self._bytes.sum()) <= cache_bytes
        if int(self._bytes.max()) > cache_bytes:
            raise InputError(
                f"cache_gb: {cache_bytes / 2**30:g} is too small: the longest episode of {dataset.name} alone takes "
                f"{self._bytes.max() / 2**30:.3g}"
            )
        self._own = list(range(dataset.num_episodes))  # episodes to draw from
        self._order: list[int] = []  # episodes still to come in this pass
        self._pool: dict[int, Episode] = {}  # by episode, the oldest first
        self._draws_owed = 0.0  # draws until the next episode comes in
        self._episodes: list[Episode] = []  # the pool, in the order of `_ends`
        self._ends = np.zeros(0, np.int64)  # transitions of the pool up to and with each episode
        self._reward_scale = 1.0
        self._gamma: float | None = None
        self._returns: list[np.ndarray] = []

    def __len__(self) -> int:
        """Transitions of the whole dataset."""
        return len(self.dataset)

    @property
    def num_transitions(self) -> int:
        """Transitions of the whole dataset."""
        return len(self.dataset)

    @property
    def memory_bytes(self) -> int:
        """What the pool takes now."""
        return sum(episode.nbytes for episode in self._pool.values())

    def shard(self, rank: int, count: int) -> None:
        """Draw from every `count`-th episode alone, from `rank` on: the share of one of several processes."""
        self._own = list(range(rank, self.dataset.num_episodes, count))
        if not self._own:
            raise InputError(f"{self.dataset.name} has {self.dataset.num_episodes} episodes, fewer than processes")
        self.fits = int(self._bytes[self._own].sum()) <= self.cache_bytes
        self._order, self._pool, self._draws_owed = [], {}, 0.0

    def scale_rewards(self, scale: float) -> None:
        """Multiply the rewards of every batch by this."""
        self._reward_scale = scale

    def add_returns(self, gamma: float) -> None:
        """Give each transition of a batch its discounted return to the end of the recording (`schema.VALUE_TARGET`)."""
        self._gamma = gamma
        self._index_pool()

    def sample(self, batch_size: int) -> Batch:
        """A batch in the schema's keys: named streams as a dict of tensors, images uint8, `terminated` 0.0 or 1.0."""
        self._rotate(batch_size)
        draws = torch.randint(int(self._ends[-1]), (batch_size,), generator=self.generator).numpy()
        which = np.searchsorted(self._ends, draws, "right")
        steps = draws - np.concatenate([[0], self._ends])[which]
        chosen = [(self._episodes[number], step) for number, step in zip(which.tolist(), steps.tolist(), strict=True)]
        batch = self._batch(chosen)
        if self._gamma is not None:
            returns = [self._returns[number][step] for number, step in zip(which, steps, strict=True)]
            batch[schema.VALUE_TARGET] = self._gather(returns, np.float32) * self._reward_scale
        return batch

    def gather(self, transitions: np.ndarray) -> Batch:
        """The batch of given transitions, counted from 0 through all episodes of the dataset, which are read."""
        ends = np.cumsum(self.dataset.lengths)
        which = np.searchsorted(ends, transitions, "right")
        read = {number: self.dataset.episode(int(number)) for number in np.unique(which)}
        steps = transitions - (ends - self.dataset.lengths)[which]
        return self._batch([(read[number], int(step)) for number, step in zip(which, steps, strict=True)])

    def _batch(self, chosen: list[tuple[Episode, int]]) -> Batch:
        """The transitions at these steps of episodes."""
        batch_size = len(chosen)
        now: dict[str, Tensor] = {}
        following: dict[str, Tensor] = {}
        for name, example in chosen[0][0].streams.items():
            rows = np.empty((batch_size, *example.shape[1:]), example.dtype)
            for place, (episode, step) in zip(rows, chosen, strict=True):
                place[...] = episode.streams[name][step]
            now[name] = torch.from_numpy(rows).to(self.device)
            if self.next_observation:
                rows = np.empty_like(rows)
                for place, (episode, step) in zip(rows, chosen, strict=True):
                    place[...] = episode.streams[name][min(step + self.chunk_length, len(episode))]
                following[name] = torch.from_numpy(rows).to(self.device)
        batch: Batch = {schema.OBSERVATION: now.get("", now)}
        if self.next_observation:
            batch[schema.NEXT_OBSERVATION] = following.get("", following)
        return batch | (self._single_steps(chosen) if self.chunk_length == 1 else self._chunks(chosen))

    def _single_steps(self, chosen: list[tuple[Episode, int]]) -> Batch:
        """Actions, rewards and ends of single transitions."""
        reward = self._gather([episode.reward[step] for episode, step in chosen], np.float32)
        action = np.stack([episode.action[step] for episode, step in chosen])
        return {
            schema.ACTION: torch.from_numpy(action).to(self.device),
            schema.NEXT_REWARD: reward * self._reward_scale,
            schema.NEXT_TERMINATED: self._gather([episode.terminated[step] for episode, step in chosen], np.float32),
        }

    def _chunks(self, chosen: list[tuple[Episode, int]]) -> Batch:
        """The same of chunks, with what is real in them and the discount after them."""
        length, gamma = self.chunk_length, self.chunk_gamma
        weights = gamma ** np.arange(length)
        actions, masks, rewards, terminated, discounts = [], [], [], [], []
        for episode, step in chosen:
            steps = np.arange(step, step + length)
            real = steps < len(episode)
            last = int(real.sum())
            actions.append(episode.action[np.minimum(steps, len(episode) - 1)])
            masks.append(real)
            rewards.append(episode.reward[step : step + last] @ weights[:last])
            terminated.append(episode.terminated[step + last - 1])
            discounts.append(0.0 if terminated[-1] else gamma**last)
        return {
            schema.ACTION: torch.from_numpy(np.stack(actions)).to(self.device),
            schema.STEP_MASK: torch.from_numpy(np.stack(masks)).to(self.device),
            schema.NEXT_REWARD: self._gather(rewards, np.float32) * self._reward_scale,
            schema.NEXT_TERMINATED: self._gather(terminated, np.float32),
            schema.DISCOUNT: self._gather(discounts, np.float32),
        }

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """Batches without end."""
        while True:
            yield self.sample(batch_size)

    def observations(self) -> Iterator[dict[str, Tensor] | Tensor]:
        """Every observation that a transition starts from, without its images, an episode at a time; for normalisers.

        Reads the whole dataset once, unless it has images alone.
        """
        space = self.dataset.observation_space
        parts = space.spaces if isinstance(space, spaces.Dict) else {"": space}
        names = [name for name, part in parts.items() if part.dtype != np.uint8 or len(part.shape or ()) < 2]
        if names and self.fits:
            self._rotate(0)  # what is read now need not be read again
        for index in range(self.dataset.num_episodes if names else 0):
            streams = (self._pool.get(index) or self.dataset.episode(index)).streams
            vectors = {name: torch.from_numpy(streams[name][:-1]) for name in names}
            yield vectors.get("", vectors)

    def observation_statistics(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Mean and deviation of each stream of float vectors, over the observations that transitions start from.

        A plain observation goes by the name `schema.OBSERVATION`. Reads the whole dataset once.
        """
        totals: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        for index in range(self.dataset.num_episodes):
            episode = self._pool.get(index) or self.dataset.episode(index)
            for name, rows in episode.streams.items():
                if rows.ndim == 2 and rows.dtype == np.float32:
                    values = rows[: len(episode)].astype(np.float64)
                    # Sums around the first row keep the digits that a large mean would take.
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
        """All that decides which transitions come next; the episodes themselves are read again."""
        return {
            "generator": self.generator.get_state(),
            "order": list(self._order),
            "pool": list(self._pool),
            "draws_owed": self._draws_owed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`, for the same dataset."""
        known = range(self.dataset.num_episodes)
        if not all(index in known for index in (*state["pool"], *state["order"])):
            raise InputError(
                f"the saved buffer names episodes that {self.dataset.name} does not have: another dataset?"
            )
        self.generator.set_state(state["generator"])
        self._order, self._draws_owed = list(state["order"]), float(state["draws_owed"])
        self._pool = {index: self._pool.get(index) or self.dataset.episode(index) for index in state["pool"]}
        self._index_pool()

    def _rotate(self, num_draws: int) -> None:
        """Fill the pool at first; later bring in the episodes that are due."""
        if not self._pool:
            while self._room_for_next():
                self._draws_owed = self._bring_in()
            self._index_pool()
        if self.fits:
            return
        self._draws_owed -= num_draws
        if self._draws_owed >= 0:
            return
        while self._draws_owed < 0:
            incoming = self._next()
            self._pool = {index: self._pool[index] for index in self._pool_without_oldest(incoming)}
            self._draws_owed += self._bring_in()
        self._index_pool()

    def _pool_without_oldest(self, incoming: int) -> list[int]:
        """The pool's episodes less the oldest that must go to make room for one more; that one stays if it is there."""
        room = self.cache_bytes - int(self._bytes[incoming])
        stay = []
        for index in reversed(self._pool):
            if index != incoming:
                room -= int(self._bytes[index])
                if room < 0:
                    break
            stay.append(index)
        return stay[::-1] if incoming in stay or incoming not in self._pool else [incoming, *stay[::-1]]

    def _next(self) -> int:
        """The episode that comes in next; a pass goes through all of them in a new order."""
        if not self._order:
            order = torch.randperm(len(self._own), generator=self.generator).tolist()
            self._order = [self._own[place] for place in order]
        return self._order[0]

    def _room_for_next(self) -> bool:
        """Whether another episode fits beside those of the pool, and there is one that is not in it."""
        if len(self._pool) == len(self._own):
            return False
        taken = sum(int(self._bytes[index]) for index in self._pool)
        return taken + int(self._bytes[self._next()]) <= self.cache_bytes

    def _bring_in(self) -> float:
        """Read the next episode into the pool, as its newest, and say how many draws go by before another one comes.

        By its own length, an episode stays for as many draws as the pool has transitions, times `reuse`, however long
        it is: its own share of them included.
        """
        index = self._next()
        self._order.pop(0)
        episode = self._pool.pop(index) if index in self._pool else self.dataset.episode(index)
        self._pool[index] = episode
        return self.reuse * len(episode)

    def _index_pool(self) -> None:
        """Where the episodes of the pool stand when its transitions are counted through."""
        self._episodes = list(self._pool.values())
        self._ends = np.cumsum([len(episode) for episode in self._episodes])
        if self._gamma is not None:
            self._returns = [_discounted(episode.reward, self._gamma) for episode in self._episodes]

    def _gather(self, values: list[Any], dtype: type) -> Tensor:
        """Scalars of a batch as a tensor [B]."""
        return torch.from_numpy(np.array(values, dtype)).to(self.device)


def episode_bytes(dataset: Dataset) -> np.ndarray:
    """What each episode takes in memory, by the dataset's spaces, int64 [E]."""
    lengths = dataset.lengths
    observation = dataset.observation_space
    streams = observation.spaces.values() if isinstance(observation, spaces.Dict) else [observation]
    row = sum(_space_bytes(space) for space in streams)
    # Beside each action there are a float32 reward and two flags.
    return (lengths + 1) * row + lengths * (_space_bytes(dataset.action_space) + 6)


def _space_bytes(space: spaces.Space) -> int:
    """Bytes of one row of a space."""
    if isinstance(space, spaces.Discrete):
        return 8
    return int(np.prod(space.shape or ())) * np.dtype(space.dtype).itemsize


def _discounted(reward: np.ndarray, gamma: float) -> np.ndarray:
    """G_t = r_t + γ G_{t+1} to the episode's end."""
    returns = np.zeros(len(reward) + 1)
    for step in range(len(reward) - 1, -1, -1):
        returns[step] = reward[step] + gamma * returns[step + 1]
    return returns[:-1]
