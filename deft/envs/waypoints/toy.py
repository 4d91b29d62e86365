"""A toy: a lane whose curvature changes along the way, to be met by waypoints; nothing that is done has consequences.

The lane ahead is the polynomial that lane keeping uses, y(x) = ½ κ x² + ⅙ κ′ x³ in the vehicle's frame. In each episode
the supervised policy's waypoints carry an error, drawn at its start and visible in the observation: what there is to
learn is to take it out again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from deft import schema
from deft.envs.waypoints.protocol import (
    CAMERA_SIZE,
    MAX_GAP,
    MOTION_NAMES,
    NUM_WAYPOINTS,
    Outcome,
    WaypointEnv,
    WaypointWorld,
    check_difficulty,
    displacement_errors,
)

SPEED = 5.0  # metres a second
INTERVAL = 0.5  # seconds from waypoint to waypoint, and from decision to decision
LANE_WIDTH = 1.5  # of the line that the camera sees, in metres
# Largest curvature of the lane (1/m), and how large the supervised policy's error is.
LEVELS = {"easy": (0.015, 0.5), "medium": (0.03, 1.0), "hard": (0.045, 2.0)}
# Deviations of that error at 1: sideways (m), of the heading (rad), and of the distance (parts), as of a camera that is
# mounted beside its place, turned, and with a wrong focal length.
SIDEWAYS, HEADING, DISTANCE = 0.5, 0.05, 0.06
SUCCESS_ADE = 0.5  # an episode succeeds where its mean ADE is below this


class ToyWorld(WaypointWorld):
    """N lanes. κ(s) = A sin(2π s / λ + φ), with A, λ and φ drawn for each episode."""

    reward_terms = ("accuracy",)
    view = (-2.0, 22.0, -12.0, 12.0)

    def __init__(
        self,
        num_envs: int = 1,
        difficulty: str = "medium",
        num_waypoints: int = NUM_WAYPOINTS,
        camera_size: int = CAMERA_SIZE,
        horizon: int = 5,
        sft_noise: float | None = None,
    ) -> None:
        self.num_envs, self.num_waypoints, self.camera_size = num_envs, num_waypoints, camera_size
        self.horizon, self.sft_noise = horizon, sft_noise
        self.difficulty = check_difficulty(difficulty)
        self._generators = [np.random.default_rng(index) for index in range(num_envs)]
        self._amplitude, self._wavelength, self._phase, self._ade_sum = (np.zeros(num_envs) for _ in range(4))
        self._offset = np.zeros((num_envs, num_waypoints, 2), np.float32)
        self._step = np.zeros(num_envs, np.int64)
        self._distances = SPEED * INTERVAL * np.arange(1, num_waypoints + 1)
        nearest, farthest, rightmost, leftmost = self.view
        # Pictures have the road ahead at the top and the left side at the left.
        self._row_x = np.linspace(farthest, nearest, camera_size)
        self._column_y = np.linspace(leftmost, rightmost, camera_size)

    def reset(self, index: np.ndarray, seeds: Sequence[int | None]) -> None:
        """Draw a lane and an error of the supervised policy."""
        amplitude, noise = LEVELS[self.difficulty]
        for copy, seed in zip(index, seeds, strict=True):
            if seed is not None:
                self._generators[copy] = np.random.default_rng(seed)
            generator = self._generators[copy]
            self._amplitude[copy] = generator.uniform(0, amplitude)
            self._wavelength[copy] = generator.uniform(60, 120)
            self._phase[copy] = generator.uniform(0, 2 * np.pi)
            size = noise if self.sft_noise is None else self.sft_noise
            sideways, heading, distance = size * generator.normal(0, (SIDEWAYS, HEADING, DISTANCE))
            self._offset[copy, :, 0] = distance * self._distances
            self._offset[copy, :, 1] = sideways + heading * self._distances
            self._step[copy], self._ade_sum[copy] = 0, 0.0

    def observe(self, index: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """The lane from above, the (constant) motion, and the error of the supervised policy."""
        rows = np.arange(self.num_envs) if index is None else index
        motion = np.tile(np.array([SPEED, 0, 0, MAX_GAP, 0], np.float32), (len(rows), 1))
        assert motion.shape[1] == len(MOTION_NAMES)
        return {schema.CAMERA: self._pictures(rows), schema.MOTION: motion, schema.SFT_OFFSET: self._offset[rows]}

    def follow(self, waypoints: np.ndarray) -> Outcome:
        """The lane moves on by one decision, whatever the waypoints; the reward is how well they met it."""
        ade, fde = displacement_errors(waypoints, self.target_waypoints())
        self._step += 1
        self._ade_sum += ade
        nothing = np.zeros(self.num_envs, bool)
        truncated = self._step >= self.horizon
        success = truncated & (self._ade_sum / self._step < SUCCESS_ADE)
        return Outcome({"accuracy": -ade}, nothing, truncated, success, nothing, nothing, ade, fde)

    def target_waypoints(self) -> np.ndarray:
        """Points of the lane at the distances that are driven in `INTERVAL` each."""
        lateral = self._lateral(np.arange(self.num_envs), self._distances)
        return np.stack([np.broadcast_to(self._distances, lateral.shape), lateral], -1).astype(np.float32)

    def set_difficulty(self, level: str) -> None:
        """Sharper curves and larger errors, from each copy's next episode on."""
        self.difficulty = check_difficulty(level)

    def get_state(self) -> list[dict[str, Any]]:
        """Of each copy."""
        return [
            {
                "generator": self._generators[i],
                "lane": [float(a[i]) for a in (self._amplitude, self._wavelength, self._phase, self._ade_sum)],
                "offset": self._offset[i].copy(),
                "step": int(self._step[i]),
                "difficulty": self.difficulty,
            }
            for i in range(self.num_envs)
        ]

    def set_state(self, states: list[dict[str, Any]]) -> None:
        """The inverse of `get_state`."""
        for i, state in enumerate(states):
            self._generators[i], self._offset[i], self._step[i] = state["generator"], state["offset"], state["step"]
            self._amplitude[i], self._wavelength[i], self._phase[i], self._ade_sum[i] = state["lane"]
            self.difficulty = state["difficulty"]

    def _lateral(self, rows: np.ndarray, x: np.ndarray) -> np.ndarray:
        """y(x) [R, X] of the lane ahead of the copies of `rows`."""
        rate = 2 * np.pi / self._wavelength[rows]
        angle = rate * SPEED * INTERVAL * self._step[rows] + self._phase[rows]
        curvature = self._amplitude[rows] * np.sin(angle)
        change = self._amplitude[rows] * rate * np.cos(angle)
        return curvature[:, None] * x**2 / 2 + change[:, None] * x**3 / 6

    def _pictures(self, rows: np.ndarray) -> np.ndarray:
        """White line on black, its brightness falling with the distance from its middle, and the vehicle in red."""
        size = self.camera_size
        distance = np.abs(self._column_y - self._lateral(rows, self._row_x)[:, :, None])  # [R, S, S]
        line = np.clip(1.5 - distance / (LANE_WIDTH / 2), 0, 1)
        pictures = np.repeat((255 * line).astype(np.uint8)[:, None], 3, 1)
        vehicle = (np.abs(self._row_x) < 2.0)[:, None] & (np.abs(self._column_y) < 1.0)
        pictures[:, :, vehicle] = np.array([[255], [40], [40]], np.uint8)
        return pictures.reshape(len(rows), 3, size, size)


class ToyWaypointEnv(WaypointEnv):
    """The toy as a Gymnasium environment of one copy; arguments as of `ToyWorld`."""

    def __init__(self, render_mode: str | None = None, **kwargs: Any) -> None:
        super().__init__(ToyWorld(1, **kwargs), render_mode)
