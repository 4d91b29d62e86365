"""Environments stepped one after another in this process; the default, and the fastest kind for light environments.

`SerialVectorEnv` steps one `EnvSlot` per environment. A worker process of `ProcessVectorEnv` has a `SerialVectorEnv` of
its own environments, so the results of both are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import gymnasium
import numpy as np

from deft.envs.layout import Observation, ObservationLayout, StepArrays, copy_rows
from deft.envs.state import StateObstacle, restore_state, save_state, state_obstacle
from deft.envs.vector import LABELS, ArrayVectorEnv, Episode, VectorStep
from deft.envs.wrappers import close_env, describe_env, env_reward_terms, wrapper_attribute
from deft.errors import InputError, RunError, one_line, shown, user_code


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
    """One environment: step it into its row, reset it at the end of an episode, count the episode."""

    def __init__(self, env: gymnasium.Env, row: int, index: int, layout: ObservationLayout) -> None:
        """`row` is its row of the arrays, `index` its number among all environments."""
        self.env = env
        self.row = row
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
        observation = self._begin(seed)
        if (difference := self._layout.difference(observation)) is not None:
            raise InputError(f"{self.name}: {difference}")
        self._write(observation, arrays.observation)

    def step(self, action: Any, arrays: StepArrays, final: Observation) -> Episode | None:
        """Step into this row; at the end of an episode write its last observation to `final` before the reset."""
        with self._user_code:
            observation, reward, terminated, truncated, info = self.env.step(action)
        if not isinstance(info, Mapping):
            raise RunError(f"{self.name} returned the info {shown(info)}; it must be a dict")
        row = self.row
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
            self.index,
            self._episode_return,
            self._length,
            None if success is None else bool(success),
            self._terms,
            labels={name: info[name] for name in LABELS if isinstance(info.get(name), str)},
            measures={name: float(value) for name, value in info.get("measures", {}).items()},
        )
        self.finished = episode
        self._write(self._begin(), arrays.observation)
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
            arrays.reward_terms[self.row] = self._pick_terms(terms)
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
            "observation": self._layout.encode_row(arrays.observation, self.row),
        }

    def set_state(self, state: dict[str, Any], arrays: StepArrays) -> None:
        """Continue from a saved state."""
        restore_state(self.env, state["env"])
        self._episode_return = state["episode_return"]
        self._length = state["length"]
        self._terms = dict(state["terms"])
        self._layout.decode_row(state["observation"], arrays.observation, self.row)

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

    def _begin(self, seed: int | None = None) -> Any:
        """Reset the environment and the counters; return the observation."""
        self._episode_return = 0.0
        self._length = 0
        self._terms = {}
        with user_code(f"{self.name}, reset() raised"):
            observation, _ = self.env.reset(seed=seed)
        return observation

    def _write(self, observation: Any, arrays: Observation) -> None:
        try:
            self._layout.write(observation, arrays, self.row)
        except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            difference = self._layout.difference(observation) or f"the observation cannot be used: {one_line(error)}"
            raise RunError(f"{self.name}: {difference}") from error


class SerialVectorEnv(ArrayVectorEnv):
    """N environments in a plain loop."""

    def __init__(self, envs: Sequence[gymnasium.Env | Callable[[], gymnasium.Env]], first_index: int = 0) -> None:
        """Make environments that are not made yet; error messages and episodes count from `first_index`."""
        made = [env if isinstance(env, gymnasium.Env) else env() for env in envs]
        if not made:
            raise InputError("a vector environment needs at least one environment")
        if len({id(env) for env in made}) < len(made):
            raise InputError("the same environment object was given twice; make a separate one for each index")
        check_same_spaces(made, first_index)
        super().__init__(
            len(made),
            made[0].observation_space,
            made[0].action_space,
            action_mask=wrapper_attribute(made[0], "action_mask"),
            chunk_length=wrapper_attribute(made[0], "chunk_length", 1),
            reward_terms=env_reward_terms(made[0]),
            has_splits=made[0].has_wrapper_attr("split"),
        )
        self._slots = [EnvSlot(env, row, first_index + row, self._observation_layout) for row, env in enumerate(made)]
        self.first_index = first_index
        self._suspended: set[int] = set()  # rows
        self._closed = False

    @property
    def envs(self) -> list[gymnasium.Env]:
        """The environments themselves."""
        return [slot.env for slot in self._slots]

    def _in_turn(self) -> Iterable[EnvSlot]:
        """Return the environments in the order in which they are reset and stepped."""
        return self._slots

    def reset(self, seed: int | Sequence[int | None] | None = None) -> Observation:
        """Start an episode in every environment; environment i gets `seed + i`, or the i-th of several seeds."""
        seeds = self._env_seeds(seed)
        arrays = self._next_arrays()
        self._suspended.clear()
        for slot, own in zip(self._in_turn(), seeds, strict=True):
            slot.reset(own, arrays)
        self._started = True
        return arrays.observation

    def step(self, actions: np.ndarray) -> VectorStep:
        """Step every environment with its row of `actions`."""
        episodes, error = self._advance(self._prepare(actions))
        result = self._result(self._arrays[self._current], episodes)
        if error is not None:
            self.finished = result
            raise error
        return result

    def suspend(self, indices: Sequence[int]) -> None:
        """Do not step these environments until the next `reset`."""
        self._suspended.update(indices)

    def _advance(self, actions: np.ndarray) -> tuple[list[Episode], BaseException | None]:
        """Step with prepared actions into the next arrays; return the ended episodes and the first exception.

        The environments after a failed one are not stepped.
        """
        arrays, final = self._next_arrays(), self._final
        episodes: list[Episode] = []
        if self._suspended:
            self._repeat(sorted(self._suspended), arrays)
        for slot, action in zip(self._in_turn(), self._action_layout.rows(actions), strict=True):
            if slot.row in self._suspended:
                continue
            try:
                episode = slot.step(action, arrays, final)
            except BaseException as error:
                return episodes + ([slot.finished] if slot.finished else []), error
            if episode is not None:
                episodes.append(episode)
        return episodes, None

    def _repeat(self, rows: list[int], arrays: StepArrays) -> None:
        """Write the results of suspended environments: the last observation, reward 0, no end."""
        copy_rows(self._arrays[self._current ^ 1].observation, arrays.observation, rows)
        arrays.reward[rows], arrays.terminated[rows], arrays.truncated[rows] = 0.0, False, False
        if arrays.reward_terms is not None:
            arrays.reward_terms[rows] = 0.0
        if self.chunk_length > 1:
            arrays.num_steps[rows] = 0

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
        self._suspended.clear()
        for slot, state in zip(self._in_turn(), states, strict=True):
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
