"""Closed-loop driving by waypoints: a controller tracks them in the driving world until the next decision.

All copies are stepped at once. `deft.envs.waypoints.make` makes it for `--env driving`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from deft import schema
from deft.envs.driving.expert import expert_waypoints
from deft.envs.driving.rendering import VIEW_FORWARD, VIEW_LEFT, VIEW_SIZE
from deft.envs.driving.world import (
    MAX_EPISODE_STEPS,
    REWARD_TERMS,
    SIDE_GAP,
    STEP_SECONDS,
    VEHICLE_LENGTH,
    WHEELBASE,
    DrivingWorld,
)
from deft.envs.waypoints.protocol import (
    CAMERA_SIZE,
    MAX_GAP,
    NUM_WAYPOINTS,
    Outcome,
    WaypointEnv,
    WaypointWorld,
    displacement_errors,
)
from deft.envs.waypoints.tracking import pursue

REWARD_SCALE = 0.1  # the driving world counts metres, and a hundred for a crash


class DrivingWaypointWorld(WaypointWorld):
    """N copies of the driving world, decided for every `steps_per_decision` of its steps (0.2 s each)."""

    reward_terms = REWARD_TERMS
    view = (VIEW_FORWARD - VIEW_SIZE, VIEW_FORWARD, VIEW_LEFT - VIEW_SIZE, VIEW_LEFT)

    def __init__(
        self,
        num_envs: int = 1,
        difficulty: str = "medium",
        num_waypoints: int = NUM_WAYPOINTS,
        camera_size: int = CAMERA_SIZE,
        steps_per_decision: int = 3,
        waypoint_seconds: float = 0.4,
        max_steps: int = MAX_EPISODE_STEPS,
        measure_ade: bool = False,
    ) -> None:
        self.num_envs, self.num_waypoints, self.camera_size = num_envs, num_waypoints, camera_size
        self.steps_per_decision, self.waypoint_seconds, self.max_steps = steps_per_decision, waypoint_seconds, max_steps
        self.measure_ade = measure_ade
        self.world = DrivingWorld(num_envs, difficulty)

    def reset(self, index: np.ndarray, seeds: Sequence[int | None]) -> None:
        """Begin a route."""
        given = [seed for seed in seeds if seed is not None]
        self.world.reset(index, given or None)

    def observe(self, index: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """The picture from above, the vehicle's own motion, and what its distance sensor reads."""
        world = self.world
        rows = np.arange(self.num_envs) if index is None else index
        gap, closing = self._vehicle_ahead()
        motion = np.stack([world.speed, world.acceleration, world.steering, gap, closing], 1)[rows]
        offset = np.zeros((len(rows), self.num_waypoints, 2), np.float32)
        picture = world.images(self.camera_size, rows)
        return {schema.CAMERA: picture, schema.MOTION: motion.astype(np.float32), schema.SFT_OFFSET: offset}

    def follow(self, waypoints: np.ndarray) -> Outcome:
        """Track the path for `steps_per_decision` steps; a copy whose episode ends in between counts no further."""
        world = self.world
        ade = fde = None
        if self.measure_ade:
            ade, fde = displacement_errors(waypoints, self.target_waypoints())
        path = world.to_map(np.concatenate([np.zeros((self.num_envs, 1, 2)), waypoints], 1))
        terms = np.zeros((self.num_envs, len(REWARD_TERMS)))
        collided, off_road, reached, late = (np.zeros(self.num_envs, bool) for _ in range(4))
        for step in range(self.steps_per_decision):
            over = collided | off_road | reached | late
            acceleration, curvature = pursue(
                world.to_ego(path), world.speed, self.waypoint_seconds, step * STEP_SECONDS
            )
            world.step(acceleration, np.arctan(WHEELBASE * curvature))
            terms += np.where(over[:, None], 0.0, world.terms)
            collided |= world.collided & ~over
            off_road |= world.off_road & ~over
            reached |= world.reached & ~over
            late |= (world.elapsed_steps >= self.max_steps) & ~over
        terminated = collided | off_road | reached
        named = {name: REWARD_SCALE * terms[:, column] for column, name in enumerate(REWARD_TERMS)}
        return Outcome(named, terminated, late & ~terminated, reached, collided, off_road, ade, fde)

    def target_waypoints(self) -> np.ndarray:
        """Where the scripted driver goes from here, with the traffic's future simulated."""
        return expert_waypoints(self.world, self.num_waypoints, self.waypoint_seconds).astype(np.float32)

    def set_difficulty(self, level: str) -> None:
        """More and slower traffic and sharper bends, from each copy's next episode on."""
        self.world.set_difficulty(level)

    def get_state(self) -> list[dict[str, Any]]:
        """Of each copy."""
        return self.world.get_state()

    def set_state(self, states: list[dict[str, Any]]) -> None:
        """The inverse of `get_state`."""
        self.world.set_state(states)

    def _vehicle_ahead(self) -> tuple[np.ndarray, np.ndarray]:
        """Metres to the nearest vehicle in the way, bumper to bumper, and the speed at which it comes nearer."""
        world = self.world
        distance = world.ahead()
        in_way = (
            world.other_active & (distance > 0) & (np.abs(world.other_offset - world.road_offset[:, None]) < SIDE_GAP)
        )
        gaps = np.where(in_way, distance - VEHICLE_LENGTH, MAX_GAP)
        nearest = gaps.argmin(1)
        gap = np.clip(np.take_along_axis(gaps, nearest[:, None], 1)[:, 0], 0.0, MAX_GAP)
        closing = world.speed - np.take_along_axis(world.other_speed, nearest[:, None], 1)[:, 0]
        return gap, np.where(gap < MAX_GAP, closing, 0.0)


class DrivingWaypointEnv(WaypointEnv):
    """Closed-loop driving as a Gymnasium environment of one copy; arguments as of `DrivingWaypointWorld`."""

    def __init__(self, render_mode: str | None = None, **kwargs: Any) -> None:
        super().__init__(DrivingWaypointWorld(1, **kwargs), render_mode)
