"""From a name to a waypoint environment; called by the recorder, the trainers and the comparison."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from deft.config.waypoint_settings import WAYPOINT_ENVS
from deft.envs.vector import VectorEnv
from deft.envs.waypoints.mixed import MixedVectorEnv
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
