"""Vector environments that step all environments in one call: the counting of episodes and the automatic reset.

The driving environment, the waypoint environments, ManiSkill on the GPU, envpool and Gymnasium's vector environments
derive from `BatchedVectorEnv`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deft.envs.layout import ActionLayout, Observation, ObservationLayout, copy_rows
from deft.envs.vector import ArrayVectorEnv, Episode, VectorStep


@dataclass(slots=True)
class BatchStep:
    """The result of one step of all environments before any reset, [N] each."""

    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray | None = None
    """None: never, except at `max_episode_steps`."""
    success: Sequence[Any] | np.ndarray | None = None
    """For environments whose episode ended in this step; None, or an entry None, if it is not known."""
    terms: np.ndarray | None = None
    """[N, K]: the terms of the reward, with columns as in `reward_terms`."""


class BatchedVectorEnv(ArrayVectorEnv):
    """A vector environment whose subclass implements `_begin`, `_advance`, `_observe` and `_restart`."""

    def __init__(
        self,
        num_envs: int,
        observation_layout: ObservationLayout,
        action_layout: ActionLayout,
        *,
        max_episode_steps: int | None = None,
        reward_terms: Sequence[str] = (),
    ) -> None:
        super().__init__(num_envs, observation_layout, action_layout, reward_terms=reward_terms)
        self._max_episode_steps = max_episode_steps
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, np.int64)
        self._term_sums = np.zeros((num_envs, len(self.reward_terms)))

    @abstractmethod
    def _begin(self, seeds: list[int] | None) -> None:
        """Start an episode in every environment, each with its own seed."""

    @abstractmethod
    def _advance(self, actions: np.ndarray) -> BatchStep:
        """Step every environment, without a reset."""

    @abstractmethod
    def _observe(self, rows: np.ndarray | None) -> Any:
        """Return the present observations of the environments `rows`, or of all."""

    @abstractmethod
    def _restart(self, rows: np.ndarray) -> None:
        """Start the next episode in the environments `rows`."""

    def reset(self, seed: int | Sequence[int] | None = None) -> Observation:
        """Start an episode in every environment; environment i gets `seed + i`, or the i-th of several seeds."""
        seeds = [one for one in self._env_seeds(seed) if one is not None]
        self._begin(seeds or None)
        arrays = self._next_arrays()
        self._observation_layout.write_batch(self._observe(None), arrays.observation)
        self._clear(slice(None))
        self._started = True
        return arrays.observation

    def step(self, actions: np.ndarray) -> VectorStep:
        """Step every environment with its row of `actions`."""
        result = self._advance(self._prepare(actions))
        arrays = self._next_arrays()
        arrays.reward[:], arrays.terminated[:] = result.reward, result.terminated
        arrays.truncated[:] = False if result.truncated is None else result.truncated
        self._returns += result.reward
        self._lengths += 1
        if arrays.reward_terms is not None:
            assert result.terms is not None
            arrays.reward_terms[:] = result.terms
            self._term_sums += result.terms
        if self._max_episode_steps is not None:
            arrays.truncated |= self._lengths >= self._max_episode_steps
        self._observation_layout.write_batch(self._observe(None), arrays.observation)
        done = np.flatnonzero(arrays.terminated | arrays.truncated)
        if not len(done):
            return self._result(arrays, [])
        self._write_final(arrays.observation, done)
        episodes = [self._end_episode(index, result) for index in done.tolist()]
        self._clear(done)
        self._restart(done)
        self._observation_layout.write_batch(self._observe(done), arrays.observation, done)
        return self._result(arrays, episodes)

    def _write_final(self, observation: Observation, done: np.ndarray) -> None:
        """Keep the last observations of the ended episodes."""
        copy_rows(observation, self._final, done)

    def _end_episode(self, index: int, result: BatchStep) -> Episode:
        success = None if result.success is None else result.success[index]
        success = None if success is None else bool(success)
        terms = self._episode_terms(index)
        return Episode(index, float(self._returns[index]), int(self._lengths[index]), success, terms)

    def _episode_terms(self, index: int) -> dict[str, float]:
        return dict(zip(self.reward_terms, self._term_sums[index].tolist(), strict=True))

    def _clear(self, rows: Any) -> None:
        """Reset the counters of the environments `rows`."""
        self._returns[rows] = self._lengths[rows] = self._term_sums[rows] = 0
