"""A user's own `gymnasium.vector.VectorEnv` as a Deft vector environment; `deft.envs.wrap` makes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from deft.envs.layout import Observation
from deft.envs.vector import BatchedVectorEnv, BatchStep
from deft.envs.wrappers import close_env, reward_term_names
from deft.errors import InputError, RunError, user_code


class GymnasiumVectorEnv(BatchedVectorEnv):
    """Steps a Gymnasium vector environment, and reads the last observations from `info["final_obs"]`."""

    def __init__(self, env: gymnasium.vector.VectorEnv) -> None:
        mode = env.metadata.get("autoreset_mode")
        if mode != AutoresetMode.SAME_STEP:
            raise InputError(
                f"the vector environment resets in mode {getattr(mode, 'name', mode)}, which loses the last "
                "observation of an episode; make it with autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP "
                '(gymnasium.make_vec(..., vector_kwargs={"autoreset_mode": ...})), or pass a list of environments'
            )
        space, actions = env.single_observation_space, env.single_action_space
        super().__init__(env.num_envs, space, actions, reward_terms=_reward_terms(env))
        self._env = env
        self._closed = False
        self._latest: Any = None
        self._final_observations: Any = None
        self._terms: list[dict[str, float]] = [{} for _ in range(env.num_envs)]  # declared or not

    def _begin(self, seeds: list[int] | None) -> None:
        # One seed where possible: some vector environments take only that.
        seed: Any = seeds[0] if seeds and seeds == list(range(seeds[0], seeds[0] + self.num_envs)) else seeds
        with user_code("the vector environment, reset() raised"):
            self._latest, _ = self._env.reset(seed=seed)

    def _advance(self, actions: np.ndarray) -> BatchStep:
        with user_code("the vector environment raised"):
            self._latest, reward, terminated, truncated, infos = self._env.step(actions)
        done = np.asarray(terminated | truncated)
        terms = np.zeros((self.num_envs, len(self.reward_terms)))
        self._add_terms(infos, ~done, terms)  # `infos` of an ended environment is that of its reset
        if not done.any():
            return BatchStep(reward, terminated, truncated, terms=terms)
        if "final_obs" not in infos or not infos["_final_obs"][done].all():
            raise RunError('the vector environment ended an episode without info["final_obs"]')
        final_infos = infos.get("final_info", {})
        self._add_terms(final_infos, done, terms)
        self._final_observations = infos["final_obs"]
        success = [_entry(final_infos, ("success", "is_success"), index) for index in range(self.num_envs)]
        return BatchStep(reward, terminated, truncated, success, terms)

    def _observe(self, rows: np.ndarray | None) -> Any:
        return self._latest if rows is None else take(self._latest, rows)

    def _restart(self, rows: np.ndarray) -> None:
        """Do nothing: the environments were reset in the step."""

    def _write_final(self, observation: Observation, done: np.ndarray) -> None:
        for index in done.tolist():
            self._observation_layout.write(self._final_observations[index], self._final, index)

    def _add_terms(self, infos: dict[str, Any], mask: np.ndarray, rows: np.ndarray) -> None:
        """Add the terms of the environments in `mask` to their episodes' sums, and write them to the step's rows."""
        if "raw_reward" in infos:
            raise InputError("deft.envs.ActionChunk does not work in a gymnasium vector environment; pass a list")
        terms = infos.get("reward_terms", {})
        for name, values in terms.items():
            if not name.startswith("_"):
                for index in np.flatnonzero(mask & terms[f"_{name}"]).tolist():
                    sums = self._terms[index]
                    sums[name] = sums.get(name, 0.0) + float(values[index])
        if not mask.any():
            return
        for column, name in enumerate(self.reward_terms):
            if name not in terms or not terms[f"_{name}"][mask].all():
                raise RunError(f"the vector environment declares the reward term {name!r}, but a step's info lacks it")
            rows[mask, column] = terms[name][mask]

    def _episode_terms(self, index: int) -> dict[str, float]:
        return self._terms[index]

    def _clear(self, rows: Any) -> None:
        super()._clear(rows)
        for index in np.arange(self.num_envs)[rows]:
            self._terms[index] = {}

    def state_obstacle(self) -> str:
        """Explain in one line why the state cannot be saved."""
        return "a gymnasium vector environment does not expose its state; a list of environments can be saved"

    def call(self, name: str, *args: Any) -> list[Any]:
        """Call a method of every environment."""
        try:
            return list(self._env.call(name, *args))  # type: ignore[attr-defined]
        except AttributeError as error:
            raise InputError(f"the vector environment has no method {name!r}") from error

    def render(self, index: int = 0) -> np.ndarray | None:
        """Return an image of one environment; None if it has no render mode."""
        with user_code("the vector environment cannot be rendered:"):
            frames: Any = self._env.render() if self._env.render_mode is not None else None
        return None if frames is None else frames[index]

    def close(self) -> None:
        """Close the environments. Further calls do nothing."""
        if not self._closed:
            self._closed = True
            close_env(self._env, "the vector environment")


def take(observation: Any, rows: np.ndarray) -> Any:
    """Return the selected rows of a batch of observations, nested or not."""
    if isinstance(observation, Mapping):
        return {name: take(value, rows) for name, value in observation.items()}
    return [observation[row] for row in rows] if isinstance(observation, tuple | list) else observation[rows]


def _reward_terms(env: gymnasium.vector.VectorEnv) -> tuple[str, ...]:
    """Return the names that the vector environment declares, or its environments."""
    if hasattr(env, "reward_terms"):
        return reward_term_names(env.reward_terms)
    try:  # check first: a worker of AsyncVectorEnv ends if an attribute is missing
        is_declared = all(env.call("has_wrapper_attr", "reward_terms"))  # type: ignore[attr-defined]
        return reward_term_names(env.get_attr("reward_terms")[0]) if is_declared else ()  # type: ignore[attr-defined]
    except AttributeError:  # no environments to call
        return ()


def _entry(infos: dict[str, Any], names: tuple[str, ...], index: int) -> Any:
    """Return one environment's entry of the first of these names in a vector environment's infos; None without one."""
    return next((infos[name][index] for name in names if name in infos and infos[f"_{name}"][index]), None)
