"""A toy: waypoints have to match a lane whose curvature changes; the actions do not affect the environment.

The lane ahead is the polynomial of lane keeping, y(x) = ½ κ x² + ⅙ κ′ x³ in the vehicle's frame. The supervised
policy's waypoints have an error that is drawn at the start of each episode and included in the observation: the policy
can learn to remove it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from deft.envs.waypoints.protocol import (
    CAMERA_SIZE,
    MAX_GAP,
    NUM_WAYPOINTS,
    Outcome,
    WaypointEnv,
    WaypointSimulator,
    displacement_errors,
)

SPEED = 5.0  # metres per second
INTERVAL = 0.5  # seconds between waypoints, and between decisions
LANE_WIDTH = 1.5  # of the line in the camera image, in metres
# Largest curvature of the lane (1/m), and the scale of the supervised policy's error.
LEVELS = {"easy": (0.015, 0.5), "medium": (0.03, 1.0), "hard": (0.045, 2.0)}
# Standard deviations of that error at scale 1: sideways (m), heading (rad) and distance (relative), as of a camera with
# a wrong position, orientation and focal length.
SIDEWAYS, HEADING, DISTANCE = 0.5, 0.05, 0.06
SUCCESS_ADE = 0.5  # an episode with a smaller mean ADE is a success


class ToySimulator(WaypointSimulator):
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
        super().__init__(num_envs, difficulty, num_waypoints, camera_size)
        self.horizon, self.sft_noise = horizon, sft_noise
        self._generators = [np.random.default_rng(index) for index in range(num_envs)]
        self._amplitude, self._wavelength, self._phase, self._ade_sum = (np.zeros(num_envs) for _ in range(4))
        self._step = np.zeros(num_envs, np.int64)
        self._distances = SPEED * INTERVAL * np.arange(1, num_waypoints + 1)
        nearest, farthest, rightmost, leftmost = self.view
        # Images have the road ahead at the top and the left side at the left.
        self._row_x = np.linspace(farthest, nearest, camera_size)
        self._column_y = np.linspace(leftmost, rightmost, camera_size)

    def reset(self, index: np.ndarray, seeds: Sequence[int | None]) -> None:
        """Draw a lane and an error of the supervised policy."""
        amplitude, noise = LEVELS[self.difficulty]
        for row, seed in zip(index, seeds, strict=True):
            if seed is not None:
                self._generators[row] = np.random.default_rng(seed)
            generator = self._generators[row]
            self._amplitude[row] = generator.uniform(0, amplitude)
            self._wavelength[row] = generator.uniform(60, 120)
            self._phase[row] = generator.uniform(0, 2 * np.pi)
            size = noise if self.sft_noise is None else self.sft_noise
            sideways, heading, distance = size * generator.normal(0, (SIDEWAYS, HEADING, DISTANCE))
            self._sft_offset[row, :, 0] = distance * self._distances
            self._sft_offset[row, :, 1] = sideways + heading * self._distances
            self._step[row], self._ade_sum[row] = 0, 0.0

    def _motion(self, rows: np.ndarray) -> np.ndarray:
        return np.tile(np.array([SPEED, 0, 0, MAX_GAP, 0], np.float32), (len(rows), 1))

    def _track(self, waypoints: np.ndarray) -> Outcome:
        """Advance the lane by one decision; the reward is the accuracy of the waypoints."""
        ade, fde = displacement_errors(waypoints, self.target_waypoints())
        self._step += 1
        self._ade_sum += ade
        nothing = np.zeros(self.num_envs, bool)
        truncated = self._step >= self.horizon
        success = truncated & (self._ade_sum / self._step < SUCCESS_ADE)
        return Outcome({"accuracy": -ade}, nothing, truncated, success, nothing, nothing, ade, fde)

    def target_waypoints(self) -> np.ndarray:
        """Return the points of the lane at the distances that are driven in `INTERVAL` each."""
        lateral = self._lateral(np.arange(self.num_envs), self._distances)
        return np.stack([np.broadcast_to(self._distances, lateral.shape), lateral], -1).astype(np.float32)

    def get_state(self) -> list[dict[str, Any]]:
        """Return the state of each environment."""
        return [
            {
                "generator": self._generators[i],
                "lane": [float(a[i]) for a in (self._amplitude, self._wavelength, self._phase, self._ade_sum)],
                "offset": self._sft_offset[i].copy(),
                "step": int(self._step[i]),
                "difficulty": self.difficulty,
            }
            for i in range(self.num_envs)
        ]

    def set_state(self, states: list[dict[str, Any]]) -> None:
        """Continue from saved states."""
        for i, state in enumerate(states):
            self._generators[i], self._sft_offset[i], self._step[i] = state["generator"], state["offset"], state["step"]
            self._amplitude[i], self._wavelength[i], self._phase[i], self._ade_sum[i] = state["lane"]
            self.difficulty = state["difficulty"]

    def _lateral(self, rows: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Return y(x) [R, X] of the lane ahead in the environments `rows`."""
        rate = 2 * np.pi / self._wavelength[rows]
        angle = rate * SPEED * INTERVAL * self._step[rows] + self._phase[rows]
        curvature = self._amplitude[rows] * np.sin(angle)
        change = self._amplitude[rows] * rate * np.cos(angle)
        return curvature[:, None] * x**2 / 2 + change[:, None] * x**3 / 6

    def _images(self, rows: np.ndarray) -> np.ndarray:
        """Draw a white line on black, darker with the distance from its middle, and the vehicle in red."""
        size = self.camera_size
        distance = np.abs(self._column_y - self._lateral(rows, self._row_x)[:, :, None])  # [R, S, S]
        line = np.clip(1.5 - distance / (LANE_WIDTH / 2), 0, 1)
        images = np.repeat((255 * line).astype(np.uint8)[:, None], 3, 1)
        vehicle = (np.abs(self._row_x) < 2.0)[:, None] & (np.abs(self._column_y) < 1.0)
        images[:, :, vehicle] = np.array([[255], [40], [40]], np.uint8)
        return images.reshape(len(rows), 3, size, size)


class ToyWaypointEnv(WaypointEnv):
    """The toy as a single Gymnasium environment, with the arguments of `ToySimulator`."""

    def __init__(self, render_mode: str | None = None, **kwargs: Any) -> None:
        super().__init__(ToySimulator(1, **kwargs), render_mode)
