"""A user's own `gymnasium.vector.VectorEnv`, behind Deft's contract.

`deft.envs.wrap` makes it when a trainer is given such an environment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from deft.envs.batched import BatchedVectorEnv
from deft.envs.vector import ActionLayout, Observation, ObservationLayout, VectorStep, close_env, reward_term_names
from deft.errors import InputError, RunError, user_code


class GymnasiumVectorEnv(BatchedVectorEnv):
    """Passes steps on, and takes the true last observations from `info["final_obs"]`."""

    def __init__(self, env: gymnasium.vector.VectorEnv) -> None:
        mode = env.metadata.get("autoreset_mode")
        if mode != AutoresetMode.SAME_STEP:
            raise InputError(
                f"the vector environment resets in mode {getattr(mode, 'name', mode)}, which loses the last "
                "observation of an episode; make it with autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP "
                '(gymnasium.make_vec(..., vector_kwargs={"autoreset_mode": ...})), or pass a list of environments'
            )
        super().__init__(
            env.num_envs,
            ObservationLayout(env.single_observation_space),
            ActionLayout(env.single_action_space),
            _reward_terms(env),
        )
        self._env = env
        self._closed = False

    def reset(self, seed: int | Sequence[int] | None = None) -> Observation:
        """Start an episode in every environment; environment i gets `seed + i`, or the i-th of several seeds."""
        arrays = self._next_arrays()
        seeds: Any = seed if seed is None or isinstance(seed, int | np.integer) else self._env_seeds(seed)
        with user_code("the vector environment, reset() raised"):
            observation, _ = self._env.reset(seed=seeds)
        self._observation_layout.write_batch(observation, arrays.observation, self._rows)
        self._forget()
        self._started = True
        return arrays.observation

    def step(self, actions: np.ndarray) -> VectorStep:
        """Step every environment with its row of `actions`."""
        prepared = self._prepare(actions)
        arrays = self._next_arrays()
        with user_code("the vector environment raised"):
            observation, reward, terminated, truncated, infos = self._env.step(prepared)
        arrays.reward[:], arrays.terminated[:], arrays.truncated[:] = reward, terminated, truncated
        self._count(reward)
        self._observation_layout.write_batch(observation, arrays.observation, self._rows)
        done_index = np.flatnonzero(arrays.terminated | arrays.truncated)
        running = ~(arrays.terminated | arrays.truncated)
        self._add_terms(
            infos, running, arrays.reward_terms
        )  # of an environment that ended, `infos` has what its reset said
        if not len(done_index):
            return self._result(arrays, [])
        if "final_obs" not in infos or not infos["_final_obs"][done_index].all():
            raise RunError('the vector environment ended an episode without info["final_obs"]')
        final_infos = infos.get("final_info", {})
        self._add_terms(final_infos, ~running, arrays.reward_terms)
        episodes = []
        for index in done_index.tolist():
            self._observation_layout.write(infos["final_obs"][index], self._final, index)
            success = _entry(final_infos, "success", index)
            episodes.append(
                self._end_episode(index, _entry(final_infos, "is_success", index) if success is None else success)
            )
        return self._result(arrays, episodes)

    def _add_terms(self, infos: dict[str, Any], mask: np.ndarray, rows: np.ndarray | None) -> None:
        """Add the terms of the environments in `mask` to their episodes', and write them into the step's rows."""
        if "raw_reward" in infos:
            raise InputError("deft.envs.ActionChunk does not work inside a gymnasium vector environment; pass a list")
        terms = infos.get("reward_terms", {})
        for name, values in terms.items():
            if not name.startswith("_"):
                for index in np.flatnonzero(mask & terms[f"_{name}"]).tolist():
                    sums = self._terms[index]
                    sums[name] = sums.get(name, 0.0) + float(values[index])
        if rows is None or not mask.any():
            return
        for column, name in enumerate(self.reward_terms):
            if name not in terms or not terms[f"_{name}"][mask].all():
                raise RunError(f"the vector environment names the reward term {name!r}, but a step's info has none")
            rows[mask, column] = terms[name][mask]

    def state_obstacle(self) -> str:
        """One line on what keeps the state from being saved."""
        return "a gymnasium vector environment keeps its state to itself; a list of environments can be saved"

    def call(self, name: str, *args: Any) -> list[Any]:
        """Call a method on every environment."""
        try:
            return list(self._env.call(name, *args))  # type: ignore[attr-defined]
        except AttributeError as error:
            raise InputError(f"the vector environment has no method {name!r}") from error

    def render(self, index: int = 0) -> np.ndarray | None:
        """A picture of one environment; None where it was made without a render mode."""
        with user_code("the vector environment cannot be rendered:"):
            frames: Any = self._env.render() if self._env.render_mode is not None else None
        return None if frames is None else frames[index]

    def close(self) -> None:
        """Close the environments. Calling it again does nothing."""
        if not self._closed:
            self._closed = True
            close_env(self._env, "the vector environment")


def _reward_terms(env: gymnasium.vector.VectorEnv) -> tuple[str, ...]:
    """The names that the vector environment declares, or the environments in it."""
    if hasattr(env, "reward_terms"):
        return reward_term_names(env.reward_terms)
    try:  # asked first: a worker of AsyncVectorEnv ends where an attribute is missing
        is_declared = all(env.call("has_wrapper_attr", "reward_terms"))  # type: ignore[attr-defined]
        return reward_term_names(env.get_attr("reward_terms")[0]) if is_declared else ()  # type: ignore[attr-defined]
    except AttributeError:  # one that has no environments to call
        return ()


def _entry(infos: dict[str, Any], name: str, index: int) -> Any:
    """One environment's entry in a vector environment's infos; None where it made none."""
    return infos[name][index] if name in infos and infos[f"_{name}"][index] else None
