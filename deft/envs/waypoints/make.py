"""From a name to a waypoint environment; called by the recorder, the trainers and the comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deft.config.waypoint_settings import WAYPOINT_ENVS
from deft.envs.vector import VectorEnv
from deft.envs.waypoints.mixed import MixedVectorEnv
from deft.envs.waypoints.protocol import WaypointVectorEnv, WaypointWorld
from deft.errors import InputError, one_line


def make_waypoint_world(
    name: str, num_envs: int = 1, difficulty: str = "medium", kwargs: Mapping[str, Any] | None = None
) -> WaypointWorld:
    """The world of that name; what it needs is imported when it is made."""
    if name not in WAYPOINT_ENVS:
        raise InputError(f"env: {name!r} is no waypoint environment; one of {', '.join(WAYPOINT_ENVS)}")
    try:
        return _world_class(name)(num_envs, difficulty, **(kwargs or {}))
    except TypeError as error:
        raise InputError(f"env_kwargs {dict(kwargs or {})} do not fit {name}: {one_line(error)}") from error


def _world_class(name: str) -> Callable[..., WaypointWorld]:
    if name == "toy":
        from deft.envs.waypoints.toy import ToyWorld

        return ToyWorld
    if name == "driving":
        from deft.envs.waypoints.driving import DrivingWaypointWorld

        return DrivingWaypointWorld
    if name == "highway":
        from deft.envs.waypoints.highway import HighwayWorld

        return HighwayWorld
    from deft.envs.adapters.carla_client import CarlaWorld

    return CarlaWorld


def make_waypoint_env(
    names: Sequence[str], num_envs: int, difficulty: str = "medium", kwargs: Mapping[str, Any] | None = None
) -> VectorEnv:
    """`num_envs` copies in all, shared out evenly among the environments of these names.

    `kwargs` are for all of them, or {name: {…}} for each where there are several.
    """
    parts: list[VectorEnv] = []
    try:
        for index, name in enumerate(names):
            count = num_envs // len(names) + (index < num_envs % len(names))
            own = env_kwargs_of(name, names, kwargs)
            parts.append(WaypointVectorEnv(make_waypoint_world(name, count, difficulty, own)))
        return parts[0] if len(parts) == 1 else MixedVectorEnv(parts)
    except BaseException:
        for part in parts:
            part.close()
        raise


def env_kwargs_of(name: str, names: Sequence[str], kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """The constructor arguments of one of several environments."""
    given = dict(kwargs or {})
    own = given.pop(name, {}) if len(names) > 1 else {}
    return {key: value for key, value in given.items() if key not in names} | own
