"""From names to a waypoint environment, or several side by side; called by the recorder, the trainers and `compare`."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from deft.config.waypoint_settings import WAYPOINT_ENVS
from deft.envs.layout import Observation
from deft.envs.vector import ArrayVectorEnv, Episode, VectorEnv, VectorStep
from deft.envs.waypoints.protocol import WaypointSimulator, WaypointVectorEnv
from deft.errors import InputError, one_line

_CLASSES = {
    "toy": ("deft.envs.waypoints.toy", "ToySimulator"),
    "driving": ("deft.envs.waypoints.driving", "DrivingWaypointSimulator"),
    "highway": ("deft.envs.waypoints.highway", "HighwaySimulator"),
    "carla": ("deft.envs.adapters.carla_client", "CarlaClient"),
}


def make_waypoint_simulator(
    name: str, num_envs: int = 1, difficulty: str = "medium", kwargs: Mapping[str, Any] | None = None
) -> WaypointSimulator:
    """Make the simulator of that name; import its module only then."""
    if name not in WAYPOINT_ENVS:
        raise InputError(f"env: {name!r} is not a waypoint environment; choose one of {', '.join(WAYPOINT_ENVS)}")
    module, class_name = _CLASSES[name]
    try:
        return getattr(importlib.import_module(module), class_name)(num_envs, difficulty, **(kwargs or {}))
    except TypeError as error:
        raise InputError(f"env_kwargs {dict(kwargs or {})} do not fit {name}: {one_line(error)}") from error


def make_waypoint_env(
    names: Sequence[str], num_envs: int, difficulty: str = "medium", kwargs: Mapping[str, Any] | None = None
) -> VectorEnv:
    """Make `num_envs` environments, distributed evenly over these names.

    `kwargs` are for all of them, or {name: {…}} for each of several.
    """
    parts: list[VectorEnv] = []
    try:
        for index, name in enumerate(names):
            count = num_envs // len(names) + (index < num_envs % len(names))
            own = env_kwargs_of(name, names, kwargs)
            parts.append(WaypointVectorEnv(make_waypoint_simulator(name, count, difficulty, own)))
        return parts[0] if len(parts) == 1 else MixedVectorEnv(parts)
    except BaseException:
        for part in parts:
            part.close()
        raise


def env_kwargs_of(name: str, names: Sequence[str], kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the constructor arguments of one of several environments."""
    given = dict(kwargs or {})
    own = given.pop(name, {}) if len(names) > 1 else {}
    return {key: value for key, value in given.items() if key not in names} | own


class MixedVectorEnv(ArrayVectorEnv):
    """The environments of several vector environments with the same spaces."""

    def __init__(self, parts: Sequence[VectorEnv]) -> None:
        first = parts[0]
        for part in parts[1:]:
            for kind in ("observation_space", "action_space"):
                if getattr(part, kind) != getattr(first, kind):
                    raise InputError(
                        f"several environments need the same {kind}: {getattr(first, kind)} and "
                        f"{getattr(part, kind)} differ; use the same camera_size and num_waypoints"
                    )
        count = sum(part.num_envs for part in parts)
        super().__init__(count, first.observation_space, first.action_space)
        self.parts = list(parts)
        ends = np.cumsum([part.num_envs for part in parts]).tolist()
        self._spans = [slice(end - part.num_envs, end) for part, end in zip(parts, ends, strict=True)]

    def reset(self, seed: int | Sequence[int] | None = None) -> Observation:
        """Start an episode in every environment; environment i gets `seed + i`, or the i-th of several seeds."""
        seeds = self._env_seeds(seed)
        arrays = self._next_arrays()
        for part, span in zip(self.parts, self._spans, strict=True):
            chosen = [one for one in seeds[span] if one is not None]
            _write(part.reset(chosen or None), arrays.observation, span)
        self._started = True
        return arrays.observation

    def step(self, actions: np.ndarray) -> VectorStep:
        """Step every environment with its row of `actions`."""
        prepared = self._prepare(actions)
        arrays = self._next_arrays()
        episodes: list[Episode] = []
        for part, span in zip(self.parts, self._spans, strict=True):
            step = part.step(prepared[span])
            _write(step.observation, arrays.observation, span)
            arrays.reward[span], arrays.terminated[span] = step.reward, step.terminated
            arrays.truncated[span] = step.truncated
            if step.final_observation is not None:
                _write(step.final_observation, self._final, step.done_index + span.start)
            episodes += [dataclasses.replace(one, env_index=one.env_index + span.start) for one in step.episodes]
        return self._result(arrays, episodes)

    def get_state(self) -> list[dict[str, Any]] | None:
        """Return the states of the parts; None if one cannot be saved."""
        states = [part.get_state() for part in self.parts]
        return None if None in states else [state for part in states if part is not None for state in part]

    def set_state(self, states: list[dict[str, Any]]) -> None:
        """Continue from saved states."""
        self._check_states(states)
        arrays = self._next_arrays()
        for part, span in zip(self.parts, self._spans, strict=True):
            part.set_state(states[span])
            _write(part.observation, arrays.observation, span)
        self._started = True

    def state_obstacle(self) -> str | None:
        """Return the first obstacle of the parts."""
        return next((obstacle for part in self.parts if (obstacle := part.state_obstacle()) is not None), None)

    def call(self, name: str, *args: Any) -> list[Any]:
        """Call a method of every environment."""
        return [result for part in self.parts for result in part.call(name, *args)]

    def render(self, index: int = 0) -> np.ndarray | None:
        """Return an image of one environment."""
        for part, span in zip(self.parts, self._spans, strict=True):
            if index < span.stop:
                return part.render(index - span.start)
        raise InputError(f"there is no environment {index} of {self.num_envs}")

    def close(self) -> None:
        """Close the parts."""
        for part in self.parts:
            part.close()


def _write(source: Observation, target: Observation, rows: slice | np.ndarray) -> None:
    assert isinstance(source, dict)
    assert isinstance(target, dict)
    for name, stream in source.items():
        target[name][rows] = stream
