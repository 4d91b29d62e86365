"""What the adapters of foreign vector environments share: they step all environments at once and give no state away.

`deft.envs.adapters.envpool` and `deft.envs.adapters.gymnasium_vector` build on it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from deft.envs.vector import ActionLayout, Episode, ObservationLayout, VectorEnv
from deft.errors import InputError


class BatchedVectorEnv(VectorEnv):
    """A vector environment around one that steps in batches; counts its episodes."""

    def __init__(
        self,
        num_envs: int,
        observation_layout: ObservationLayout,
        action_layout: ActionLayout,
        reward_terms: Sequence[str] = (),
    ) -> None:
        super().__init__(num_envs, observation_layout, action_layout, reward_terms=reward_terms)
        self._rows = np.arange(num_envs)
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, np.int64)
        self._terms: list[dict[str, float]] = [{} for _ in range(num_envs)]

    def _count(self, reward: np.ndarray) -> None:
        self._returns += reward
        self._lengths += 1

    def _forget(self) -> None:
        """Start counting anew, in every environment."""
        self._returns[:] = 0.0
        self._lengths[:] = 0
        self._terms = [{} for _ in range(self.num_envs)]

    def _end_episode(self, index: int, success: Any) -> Episode:
        episode = Episode(
            index,
            float(self._returns[index]),
            int(self._lengths[index]),
            None if success is None else bool(success),
            self._terms[index],
        )
        self._returns[index] = 0.0
        self._lengths[index] = 0
        self._terms[index] = {}
        return episode

    def get_state(self) -> None:
        """Nothing: see `state_obstacle`."""
        return None

    def set_state(self, states: list[dict[str, Any]]) -> None:
        """Refused: see `state_obstacle`."""
        raise InputError(f"the environments cannot go on from a saved state: {self.state_obstacle()}")

    @abstractmethod
    def state_obstacle(self) -> str:
        """One line on what keeps the state from being saved."""
