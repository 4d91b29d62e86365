"""One environment of a vector environment: step it into its row, reset it at the end of an episode, count the episode.

`SerialVectorEnv` and the worker processes of `ProcessVectorEnv` use the same `EnvSlot`, so their results are equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import gymnasium
import numpy as np

from deft.config.validation import shown
from deft.envs.layout import Observation, ObservationLayout, StepArrays
from deft.envs.state import restore_state, save_state, state_obstacle
from deft.envs.vector import LABELS, Episode
from deft.envs.wrappers import close_env, describe_env, env_reward_terms, wrapper_attribute
from deft.errors import InputError, RunError, one_line, user_code


def check_same_spaces(envs: Sequence[gymnasium.Env], first_index: int = 0) -> None:
    """Raise InputError for environments that differ in their spaces or reward terms: one policy acts in all of them."""
    for index, env in enumerate(envs[1:], first_index + 1):
        for kind in ("observation_space", "action_space", "reward_terms"):
            if kind == "reward_terms":
                expected, found = env_reward_terms(envs[0]), env_reward_terms(env)
            else:
                expected, found = getattr(envs[0], kind), getattr(env, kind)
            if expected != found:
                raise InputError(
                    f"environment {index} has {kind} {found}, but environment {first_index} has {expected}"
                )


class EnvSlot:
    """One environment and its row in the arrays."""

    def __init__(self, env: gymnasium.Env, index: int, layout: ObservationLayout) -> None:
        self.env = env
        self.index = index
        self.name = describe_env(env, index)
        self._user_code = user_code(f"{self.name} raised")
        self._layout = layout
        self._is_chunked = wrapper_attribute(env, "chunk_length", 1) > 1
        self._term_names = env_reward_terms(env)
        self._pick_terms = itemgetter(*self._term_names) if self._term_names else None
        self._episode_return = 0.0
        self._length = 0
        self._terms: dict[str, float] = {}
        self.finished: Episode | None = None
        """The episode that ended in a step whose reset failed."""

    def reset(self, seed: int | None, arrays: StepArrays) -> None:
        """Start an episode, and check the observation against the observation space."""
        self._begin(arrays, seed, is_checked=True)

    def step(self, action: Any, arrays: StepArrays, final: Observation) -> Episode | None:
        """Step into this row; at the end of an episode write its last observation to `final` before the reset."""
        with self._user_code:
            observation, reward, terminated, truncated, info = self.env.step(action)
        if not isinstance(info, Mapping):
            raise RunError(f"{self.name} returned the info {shown(info)}; it must be a dict")
        row = self.index
        try:
            if isinstance(reward, str | bytes):
                raise TypeError
            arrays.reward[row] = reward = float(reward)
        except (TypeError, ValueError) as error:
            raise RunError(f"{self.name} returned the reward {shown(reward)}; it must be one number") from error
        arrays.terminated[row] = terminated = self._flag("terminated", terminated)
        arrays.truncated[row] = truncated = self._flag("truncated", truncated)
        if self._is_chunked:
            arrays.num_steps[row] = info["num_steps"]
            self._length += info["num_steps"]
            self._episode_return += info["raw_reward"]
        else:
            self._length += 1
            self._episode_return += reward
        if "reward_terms" in info:
            self._add_terms(info["reward_terms"], arrays)
        elif self._term_names:
            raise RunError(f'{self.name} declares reward_terms, but the info of a step has no "reward_terms"')
        if not (terminated or truncated):
            self._write(observation, arrays.observation)
            return None
        self._write(observation, final)
        success = info.get("success", info.get("is_success"))
        episode = Episode(
            row,
            self._episode_return,
            self._length,
            None if success is None else bool(success),
            self._terms,
            labels={name: info[name] for name in LABELS if isinstance(info.get(name), str)},
        )
        self.finished = episode
        self._begin(arrays)
        self.finished = None
        return episode

    def _flag(self, name: str, value: Any) -> bool:
        if value is True or value is False:
            return value
        types = bool | np.bool_ | np.ndarray | int | np.integer
        if isinstance(value, types) and np.size(value) == 1 and value in (0, 1):
            return bool(value)
        raise RunError(f"{self.name} returned {name} = {shown(value)}; it must be True or False")

    def _add_terms(self, terms: Mapping[str, float], arrays: StepArrays) -> None:
        """Add the terms of a step to the episode's sums, and write the declared ones to this row."""
        sums = self._terms
        for name, value in terms.items():
            sums[name] = sums.get(name, 0.0) + float(value)
        if arrays.reward_terms is None or self._pick_terms is None:
            return
        try:
            arrays.reward_terms[self.index] = self._pick_terms(terms)
        except KeyError as error:
            raise RunError(
                f"{self.name} declares the reward term {error}, but the info of a step has no such term"
            ) from error
        if len(terms) != len(self._term_names):
            other = ", ".join(sorted(terms.keys() - set(self._term_names)))
            raise RunError(f"{self.name} reports reward terms that its attribute reward_terms does not name: {other}")

    def get_state(self, arrays: StepArrays) -> dict[str, Any]:
        """Return the complete state of this environment as plain data."""
        return {
            "env": save_state(self.env),
            "episode_return": self._episode_return,
            "length": self._length,
            "terms": dict(self._terms),
            "observation": self._layout.encode_row(arrays.observation, self.index),
        }

    def set_state(self, state: dict[str, Any], arrays: StepArrays) -> None:
        """Continue from a saved state."""
        restore_state(self.env, state["env"])
        self._episode_return = state["episode_return"]
        self._length = state["length"]
        self._terms = dict(state["terms"])
        self._layout.decode_row(state["observation"], arrays.observation, self.index)

    def state_obstacle(self) -> str | None:
        """Explain why the state cannot be saved; None if it can."""
        obstacle = state_obstacle(self.env)
        return None if obstacle is None else f"{self.name}: {obstacle}"

    def call(self, name: str, *args: Any) -> Any:
        """Call a method of the environment or of one of its wrappers."""
        if not self.env.has_wrapper_attr(name):
            raise InputError(f"{self.name} has no method {name!r}")
        return self.env.get_wrapper_attr(name)(*args)

    def render(self) -> np.ndarray | None:
        """Return an image; None for an environment without a render mode."""
        if self.env.render_mode is None:
            return None
        with user_code(f"{self.name} cannot be rendered:"):
            try:
                frame: Any = self.env.render()
            except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
                raise InputError(f"{self.name} cannot be rendered: {one_line(error)}") from error
        return frame[-1] if isinstance(frame, list) else frame

    def close(self) -> None:
        """Close the environment."""
        close_env(self.env, self.name)

    def _begin(self, arrays: StepArrays, seed: int | None = None, is_checked: bool = False) -> None:
        self._episode_return = 0.0
        self._length = 0
        self._terms = {}
        with user_code(f"{self.name}, reset() raised"):
            observation, _ = self.env.reset(seed=seed)
        if is_checked:
            self._layout.check(observation, self.name)
        self._write(observation, arrays.observation)

    def _write(self, observation: Any, arrays: Observation) -> None:
        try:
            self._layout.write(observation, arrays, self.index)
        except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            difference = self._layout.difference(observation) or f"the observation cannot be used: {one_line(error)}"
            raise RunError(f"{self.name}: {difference}") from error
