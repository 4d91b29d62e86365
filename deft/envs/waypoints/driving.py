"""Closed-loop driving by waypoints: a controller tracks them in the driving simulator until the next decision.

All environments are stepped at once. `deft.envs.waypoints.make` makes it for `--env driving`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from deft.envs.driving.expert import expert_waypoints
from deft.envs.driving.rendering import VIEW_FORWARD, VIEW_LEFT, VIEW_SIZE, images
from deft.envs.driving.simulator import (
    MAX_EPISODE_STEPS,
    REWARD_TERMS,
    SIDE_GAP,
    STEP_SECONDS,
    VEHICLE_LENGTH,
    WHEELBASE,
    DrivingSimulator,
)
from deft.envs.waypoints.protocol import MAX_GAP, Outcome, WaypointEnv, WaypointSimulator
from deft.envs.waypoints.tracking import pursue

REWARD_SCALE = 0.1  # the driving simulator's rewards are metres, and -100 for a collision


class DrivingWaypointSimulator(WaypointSimulator):
    """N driving environments with a decision every `steps_per_decision` steps of 0.2 s."""

    reward_terms = REWARD_TERMS
    view = (VIEW_FORWARD - VIEW_SIZE, VIEW_FORWARD, VIEW_LEFT - VIEW_SIZE, VIEW_LEFT)

    def __init__(
        self, num_envs: int = 1, difficulty: str = "medium", *, max_steps: int = MAX_EPISODE_STEPS, **settings: Any
    ) -> None:
        """`settings` are the other arguments of `WaypointSimulator`."""
        self.simulator = DrivingSimulator(num_envs, difficulty)
        super().__init__(num_envs, difficulty, **settings)
        self.max_steps = max_steps

    def reset(self, index: np.ndarray, seeds: Sequence[int | None]) -> None:
        """Start a route."""
        given = [seed for seed in seeds if seed is not None]
        self.simulator.reset(index, given or None)

    def _images(self, rows: np.ndarray) -> np.ndarray:
        return images(self.simulator, self.camera_size, rows)

    def _motion(self, rows: np.ndarray) -> np.ndarray:
        simulator = self.simulator
        columns = [simulator.speed, simulator.acceleration, simulator.steering, *self._vehicle_ahead()]
        return np.stack(columns, 1)[rows]

    def _track(self, waypoints: np.ndarray) -> Outcome:
        """Track the path for `steps_per_decision` steps; an environment whose episode has ended counts no further."""
        simulator = self.simulator
        path = simulator.to_map(np.concatenate([np.zeros((self.num_envs, 1, 2)), waypoints], 1))
        terms = np.zeros((self.num_envs, len(REWARD_TERMS)))
        collided, off_road, reached, late = (np.zeros(self.num_envs, bool) for _ in range(4))
        for step in range(self.steps_per_decision):
            over = collided | off_road | reached | late
            acceleration, curvature = pursue(
                simulator.to_ego(path), simulator.speed, self.waypoint_seconds, step * STEP_SECONDS
            )
            simulator.step(acceleration, np.arctan(WHEELBASE * curvature))
            terms += np.where(over[:, None], 0.0, simulator.terms)
            collided |= simulator.collided & ~over
            off_road |= simulator.off_road & ~over
            reached |= simulator.reached & ~over
            late |= (simulator.elapsed_steps >= self.max_steps) & ~over
        terminated = collided | off_road | reached
        named = {name: REWARD_SCALE * terms[:, column] for column, name in enumerate(REWARD_TERMS)}
        return Outcome(named, terminated, late & ~terminated, reached, collided, off_road)

    def target_waypoints(self) -> np.ndarray:
        """Return the path of the scripted driver, with the future of the traffic simulated."""
        return expert_waypoints(self.simulator, self.num_waypoints, self.waypoint_seconds).astype(np.float32)

    def set_difficulty(self, level: str) -> None:
        """Set the traffic and the curvature of the road for the next episodes."""
        super().set_difficulty(level)
        self.simulator.set_difficulty(level)

    def get_state(self) -> list[dict[str, Any]]:
        """Return the state of each environment."""
        return self.simulator.get_state()

    def set_state(self, states: list[dict[str, Any]]) -> None:
        """Continue from saved states."""
        self.simulator.set_state(states)

    def _vehicle_ahead(self) -> tuple[np.ndarray, np.ndarray]:
        """Return metres to the nearest vehicle ahead, bumper to bumper, and the closing speed."""
        simulator = self.simulator
        distance = simulator.ahead()
        beside = np.abs(simulator.other_offset - simulator.road_offset[:, None])
        in_way = simulator.other_active & (distance > 0) & (beside < SIDE_GAP)
        gaps = np.where(in_way, distance - VEHICLE_LENGTH, MAX_GAP)
        nearest = gaps.argmin(1)
        gap = np.clip(np.take_along_axis(gaps, nearest[:, None], 1)[:, 0], 0.0, MAX_GAP)
        closing = simulator.speed - np.take_along_axis(simulator.other_speed, nearest[:, None], 1)[:, 0]
        return gap, np.where(gap < MAX_GAP, closing, 0.0)


class DrivingWaypointEnv(WaypointEnv):
    """Closed-loop driving as a single Gymnasium environment, with the arguments of `DrivingWaypointSimulator`."""

    def __init__(self, render_mode: str | None = None, **kwargs: Any) -> None:
        super().__init__(DrivingWaypointSimulator(1, **kwargs), render_mode)
