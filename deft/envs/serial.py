"""Environments stepped one after another in this process; the default, and the fastest kind for light environments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np

from deft.envs.layout import ActionLayout, Observation, ObservationLayout
from deft.envs.slot import EnvSlot, check_same_spaces
from deft.envs.state import StateObstacle
from deft.envs.vector import ArrayVectorEnv, Episode, VectorStep
from deft.envs.wrappers import env_reward_terms, wrapper_attribute
from deft.errors import InputError


class SerialVectorEnv(ArrayVectorEnv):
    """N environments in a plain loop."""

    def __init__(self, envs: Sequence[gymnasium.Env | Callable[[], gymnasium.Env]]) -> None:
        made = [env if isinstance(env, gymnasium.Env) else env() for env in envs]
        if not made:
            raise InputError("a vector environment needs at least one environment")
        if len({id(env) for env in made}) < len(made):
            raise InputError("the same environment object was given twice; make a separate one for each index")
        check_same_spaces(made)
        super().__init__(
            len(made),
            ObservationLayout(made[0].observation_space),
            ActionLayout(made[0].action_space),
            action_mask=wrapper_attribute(made[0], "action_mask"),
            chunk_length=wrapper_attribute(made[0], "chunk_length", 1),
            reward_terms=env_reward_terms(made[0]),
        )
        self._slots = [EnvSlot(env, index, self._observation_layout) for index, env in enumerate(made)]
        self._closed = False

    @property
    def envs(self) -> list[gymnasium.Env]:
        """The environments themselves."""
        return [slot.env for slot in self._slots]

    def reset(self, seed: int | Sequence[int] | None = None) -> Observation:
        """Start an episode in every environment; environment i gets `seed + i`, or the i-th of several seeds."""
        seeds = self._env_seeds(seed)
        arrays = self._next_arrays()
        for slot, own in zip(self._slots, seeds, strict=True):
            slot.reset(own, arrays)
        self._started = True
        return arrays.observation

    def step(self, actions: np.ndarray) -> VectorStep:
        """Step every environment with its row of `actions`."""
        rows = self._action_layout.rows(self._prepare(actions))
        arrays, final = self._next_arrays(), self._final
        episodes: list[Episode] = []
        for slot, action in zip(self._slots, rows, strict=True):
            try:
                episode = slot.step(action, arrays, final)
            except BaseException:
                self.finished = self._result(arrays, episodes + ([slot.finished] if slot.finished else []))
                raise
            if episode is not None:
                episodes.append(episode)
        return self._result(arrays, episodes)

    def get_state(self) -> list[dict[str, Any]] | None:
        """Return plain data for `set_state`; None if `state_obstacle` gives a reason."""
        try:
            return [slot.get_state(self._arrays[self._current]) for slot in self._slots]
        except StateObstacle:
            return None

    def set_state(self, states: list[dict[str, Any]]) -> None:
        """Continue from saved states."""
        self._check_states(states)
        arrays = self._next_arrays()
        for slot, state in zip(self._slots, states, strict=True):
            slot.set_state(state, arrays)
        self._started = True

    def state_obstacle(self) -> str | None:
        """Explain in one line why the state cannot be saved; None if it can."""
        return next((obstacle for slot in self._slots if (obstacle := slot.state_obstacle()) is not None), None)

    def call(self, name: str, *args: Any) -> list[Any]:
        """Call a method of every environment."""
        return [slot.call(name, *args) for slot in self._slots]

    def render(self, index: int = 0) -> np.ndarray | None:
        """Return an image of one environment; None if it has no render mode."""
        return self._slots[index].render()

    def close(self) -> None:
        """Close the environments. Further calls do nothing."""
        if not self._closed:
            self._closed = True
            for slot in self._slots:
                slot.close()
