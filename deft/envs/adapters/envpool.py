"""Environments of the `envpool` package (an extra), which steps them in C++ threads.

Made by `deft.envs.make` for `env.vector: envpool`. envpool resets an environment in the step after the one that ended
its episode; here the ended ones are reset at once, so that the last observation and the first are both the true ones.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from deft.envs.batched import BatchedVectorEnv
from deft.envs.vector import ActionLayout, Observation, ObservationLayout, VectorStep
from deft.errors import InputError, RunError, one_line
from deft.machine import available_cores

_LARGEST_LIMIT = 2**31 - 1


class EnvPoolVectorEnv(BatchedVectorEnv):
    """N environments of one envpool. Environment i draws from `seed + i`, as everywhere."""

    def __init__(
        self,
        env_id: str,
        num_envs: int,
        *,
        num_threads: int | None = None,
        max_episode_steps: int | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        try:
            import envpool
        except ImportError as error:
            raise InputError(
                f"env.vector: envpool is not installed ({one_line(error)}): in Deft's folder run "
                '`pip install -e ".[envpool]"`'
            ) from error
        known = envpool.list_all_envs()
        if env_id not in known:
            nearest = difflib.get_close_matches(env_id, known, n=3)
            hint = f"the nearest are {', '.join(nearest)}; or " if nearest else ""
            raise InputError(f"env.id: envpool has no environment {env_id!r}; {hint}use env.vector: sync or process")
        settings = {**(kwargs or {}), "num_envs": num_envs}
        if num_threads is not None:
            settings["num_threads"] = num_threads
        if max_episode_steps is not None:
            settings["max_episode_steps"] = max_episode_steps
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # on the precision of bounds
                spec = envpool.make_spec(env_id, **settings)
                observation_layout = ObservationLayout(spec.gymnasium_observation_space)
                action_layout = ActionLayout(spec.gymnasium_action_space)
        except (TypeError, ValueError, AssertionError) as error:
            if isinstance(error, InputError):
                raise
            reason = one_line(error).partition(" The following argument types")[0]
            raise InputError(f"env.kwargs {kwargs or {}} do not fit envpool's {env_id}: {reason}") from error
        super().__init__(num_envs, observation_layout, action_layout)
        self._envpool = envpool
        self.num_workers = num_threads or min(num_envs, available_cores())
        self._env_id = env_id
        # envpool calls an episode truncated that terminates in the very step of its time limit. With a limit one step
        # further the two stay apart, and the limit is kept here.
        self._max_episode_steps = int(spec.config.max_episode_steps)
        self._settings = {**settings, "max_episode_steps": min(self._max_episode_steps + 1, _LARGEST_LIMIT)}
        self._pool: Any = None

    def reset(self, seed: int | Sequence[int] | None = None) -> Observation:
        """Start an episode in every environment; a seed needs a new pool, for envpool takes it when it is made."""
        if seed is not None and not isinstance(seed, int | np.integer):
            raise InputError("envpool cannot reset each environment with a seed of its own; use env.vector: sync")
        if self._pool is None or seed is not None:
            self.close()
            first = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else int(seed)
            self._pool = self._envpool.make_gymnasium(self._env_id, seed=first % 2**31, **self._settings)
        arrays = self._next_arrays()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on the precision of bounds, when envpool first makes its spaces
            observation, info = self._pool.reset()
        self._observation_layout.write_batch(observation, arrays.observation, info["env_id"])
        self._forget()
        self._started = True
        return arrays.observation

    def step(self, actions: np.ndarray) -> VectorStep:
        """Step every environment with its row of `actions`."""
        prepared = self._prepare(actions)
        arrays = self._next_arrays()
        try:
            observation, reward, terminated, truncated, info = self._pool.step(prepared)
        except Exception as error:
            raise RunError(f"envpool's {self._env_id} raised {one_line(error)}") from error
        rows = info["env_id"]
        arrays.reward[rows], arrays.terminated[rows], arrays.truncated[rows] = reward, terminated, truncated
        self._count(arrays.reward)
        arrays.truncated |= self._lengths >= self._max_episode_steps
        self._observation_layout.write_batch(observation, arrays.observation, rows)
        done_index = np.flatnonzero(arrays.terminated | arrays.truncated)
        if not len(done_index):
            return self._result(arrays, [])
        self._observation_layout.write_batch(observation, self._final, rows)
        successes = info.get("success", info.get("is_success"))
        position = {int(row): place for place, row in enumerate(rows)}
        episodes = [
            self._end_episode(int(index), None if successes is None else successes[position[int(index)]])
            for index in done_index
        ]
        first_observation, first_info = self._pool.reset(done_index.astype(np.int32))
        self._observation_layout.write_batch(first_observation, arrays.observation, first_info["env_id"])
        return self._result(arrays, episodes)

    def state_obstacle(self) -> str:
        """One line on what keeps the state from being saved."""
        return "envpool keeps the state of its environments to itself; env.vector: sync or process can save it"

    def call(self, name: str, *args: Any) -> list[Any]:
        """Refused: envpool's environments have no methods."""
        raise InputError(f"envpool's environments have no method {name!r}; use env.vector: sync or process")

    def render(self, index: int = 0) -> np.ndarray | None:
        """Nothing: pictures come from the Gymnasium environment of the same id."""
        return None

    def close(self) -> None:
        """End the pool's threads. Calling it again does nothing."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
            self._started = False
