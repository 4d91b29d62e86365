"""Environments of the `envpool` package (an extra), which steps them in C++ threads; `env.vector: envpool`.

envpool resets an environment in the step after the one that ended its episode. This adapter resets it immediately, so
that the last observation of an episode and the first of the next are both correct.
"""

from __future__ import annotations

import difflib
import warnings
from typing import Any

import numpy as np

from deft.envs.adapters.gymnasium_vector import take
from deft.envs.checks import import_optional
from deft.envs.vector import BatchedVectorEnv, BatchStep
from deft.errors import InputError, RunError, one_line
from deft.machine import available_cores

_LARGEST_LIMIT = 2**31 - 1


class EnvPoolVectorEnv(BatchedVectorEnv):
    """N environments of one envpool. Environment i draws from `seed + i`."""

    def __init__(
        self,
        env_id: str,
        num_envs: int,
        *,
        num_threads: int | None = None,
        max_episode_steps: int | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        remedy = 'run `pip install -e ".[envpool]"` in the folder of Deft'
        envpool = import_optional("envpool", "env.vector: envpool", remedy)
        known = envpool.list_all_envs()
        if env_id not in known:
            nearest = difflib.get_close_matches(env_id, known, n=3)
            hint = f"the nearest are {', '.join(nearest)}; or " if nearest else ""
            raise InputError(f"env.id: envpool has no environment {env_id!r}; {hint}use env.vector: sync or process")
        given = {"num_threads": num_threads, "max_episode_steps": max_episode_steps}
        settings = {**(kwargs or {}), "num_envs": num_envs}
        settings |= {name: value for name, value in given.items() if value is not None}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # on the precision of bounds
                spec = envpool.make_spec(env_id, **settings)
                spaces = (spec.gymnasium_observation_space, spec.gymnasium_action_space)
        except (TypeError, ValueError, AssertionError) as error:
            reason = one_line(error).partition(" The following argument types")[0]
            raise InputError(f"env.kwargs {kwargs or {}} do not fit envpool's {env_id}: {reason}") from error
        # envpool reports an episode as truncated that terminates in the very step of its time limit. With a limit one
        # step later the two are distinct, and this class applies the limit.
        limit = int(spec.config.max_episode_steps)
        super().__init__(num_envs, *spaces, max_episode_steps=limit)
        self._envpool = envpool
        self.num_workers = num_threads or min(num_envs, available_cores())
        self._env_id = env_id
        self._settings = {**settings, "max_episode_steps": min(limit + 1, _LARGEST_LIMIT)}
        self._pool: Any = None
        self._latest: Any = None

    def _begin(self, seeds: list[int] | None) -> None:
        """Reset the pool; a seed needs a new pool, since envpool takes it in the constructor."""
        if seeds is not None and seeds != list(range(seeds[0], seeds[0] + self.num_envs)):
            raise InputError("envpool cannot use a separate seed for each environment; use env.vector: sync")
        if self._pool is None or seeds is not None:
            self.close()
            first = int(np.random.SeedSequence().generate_state(1)[0]) if seeds is None else seeds[0]
            self._pool = self._envpool.make_gymnasium(self._env_id, seed=first % 2**31, **self._settings)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on the precision of bounds, when envpool first makes its spaces
            self._take(*self._pool.reset())

    def _advance(self, actions: np.ndarray) -> BatchStep:
        try:
            observation, reward, terminated, truncated, info = self._pool.step(actions)
        except Exception as error:
            raise RunError(f"envpool's {self._env_id} raised {one_line(error)}") from error
        order = self._take(observation, info)
        success = info.get("success", info.get("is_success"))
        return BatchStep(
            reward[order], terminated[order], truncated[order], None if success is None else success[order]
        )

    def _observe(self, rows: np.ndarray | None) -> Any:
        return self._latest

    def _restart(self, rows: np.ndarray) -> None:
        self._take(*self._pool.reset(rows.astype(np.int32)))

    def _take(self, observation: Any, info: dict[str, Any]) -> np.ndarray:
        """Keep the observations in the order of the environments; return that order as an index."""
        order = np.argsort(info["env_id"])
        self._latest = take(observation, order)
        return order

    def state_obstacle(self) -> str:
        """Explain in one line why the state cannot be saved."""
        return "envpool does not expose the state of its environments; env.vector: sync or process can save it"

    def call(self, name: str, *args: Any) -> list[Any]:
        """Raise InputError: envpool's environments have no methods."""
        raise InputError(f"envpool's environments have no method {name!r}; use env.vector: sync or process")

    def close(self) -> None:
        """End the pool's threads. Further calls do nothing."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
            self._started = False
