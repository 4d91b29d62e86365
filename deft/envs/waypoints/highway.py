"""highway-env's straight highway as a waypoint simulator; needs the extra `highway`.

Vehicles and physics are highway-env's own. The image from above is drawn here, since the package's renderer opens a
pygame window for each environment. Its y axis points to the right; Deft's to the left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np

from deft.envs.checks import import_optional
from deft.envs.waypoints.protocol import MAX_GAP, Outcome, WaypointSimulator
from deft.envs.waypoints.tracking import pursue, to_ego, to_map

STEP_SECONDS = 0.2
LANE_WIDTH, NUM_LANES = 4.0, 3
VEHICLE_LENGTH, VEHICLE_WIDTH = 5.0, 2.0
MAX_ACCELERATION, MAX_STEERING = 5.0, np.pi / 4
CRUISE_SPEED, HEADWAY = 28.0, 1.2
DURATION = 20.0  # seconds; an episode of this length without a collision is a success
VEHICLES = {"easy": 8, "medium": 16, "hard": 30}
DENSITY = {"easy": 0.8, "medium": 1.0, "hard": 1.4}


class HighwaySimulator(WaypointSimulator):
    """N environments `highway-v0` with continuous actions, stepped one after another."""

    view = (-12.0, 60.0, -36.0, 36.0)

    def __init__(self, num_envs: int = 1, difficulty: str = "medium", **settings: Any) -> None:
        """`settings` are the other arguments of `WaypointSimulator`."""
        highway_env = import_optional("highway_env", "env highway", 'pip install "deft[highway]"')
        if "highway-v0" not in gymnasium.registry:
            gymnasium.register_envs(highway_env)
        super().__init__(num_envs, difficulty, **settings)
        self._envs: list[Any] = [gymnasium.make("highway-v0", config=self._config()).unwrapped for _ in range(num_envs)]
        self._command = np.zeros((num_envs, 2))
        self._elapsed = np.zeros(num_envs)

    def _config(self) -> dict[str, Any]:
        return {
            "action": {"type": "ContinuousAction"},
            "lanes_count": NUM_LANES,
            "vehicles_count": VEHICLES[self.difficulty],
            "vehicles_density": DENSITY[self.difficulty],
            "policy_frequency": round(1 / STEP_SECONDS),
            "simulation_frequency": 3 * round(1 / STEP_SECONDS),
            "duration": 10 * DURATION,  # this class decides the end
            "offroad_terminal": False,
        }

    def reset(self, index: np.ndarray, seeds: Sequence[int | None]) -> None:
        """Draw new traffic."""
        for row, seed in zip(index, seeds, strict=True):
            self._envs[row].configure(self._config())
            self._envs[row].reset(seed=seed)
            self._command[row], self._elapsed[row] = 0.0, 0.0

    def _motion(self, rows: np.ndarray) -> list[list[float]]:
        motion = []
        for row in rows.tolist():
            acceleration, steering = self._command[row] * (MAX_ACCELERATION, MAX_STEERING)
            motion.append([self._envs[row].vehicle.speed, acceleration, steering, *self._ahead(row)])
        return motion

    def _track(self, waypoints: np.ndarray) -> Outcome:
        """Track the path for `steps_per_decision` steps in each environment, or until a crash or the road's edge."""
        terms = {name: np.zeros(self.num_envs) for name in self.reward_terms}
        collision, off_road = np.zeros(self.num_envs, bool), np.zeros(self.num_envs, bool)
        for row, env in enumerate(self._envs):
            ego = env.vehicle
            path = to_map(np.concatenate([np.zeros((1, 2)), waypoints[row]]), ego.position, ego.heading)
            for step in range(self.steps_per_decision):
                if collision[row] or off_road[row]:
                    break
                start = env.vehicle.position[0]
                before = self._command[row].copy()
                self._drive(row, path, step * STEP_SECONDS)
                collision[row], off_road[row] = env.vehicle.crashed, not env.vehicle.on_road
                terms["progress"][row] += 0.05 * (env.vehicle.position[0] - start)
                terms["comfort"][row] -= 0.01 * np.abs(self._command[row] - before).sum()
                terms["lane"][row] -= 0.05 * abs(env.vehicle.position[1] - _lane(env.vehicle))
        terms["collision"] -= 10.0 * collision
        terms["off_road"] -= 10.0 * off_road
        self._elapsed += self.steps_per_decision * STEP_SECONDS
        terminated = collision | off_road
        truncated = (self._elapsed >= DURATION) & ~terminated
        return Outcome(terms, terminated, truncated, truncated, collision, off_road)

    def target_waypoints(self) -> np.ndarray:
        """Return the path of a driver that keeps its lane and `HEADWAY` seconds to the vehicle ahead."""
        plans = []
        for row, env in enumerate(self._envs):
            gap, closing = self._ahead(row)
            own, times = env.vehicle.speed, self.waypoint_seconds * np.arange(1, self.num_waypoints + 1)
            wanted = CRUISE_SPEED if gap >= MAX_GAP else min(CRUISE_SPEED, own - closing + (gap - HEADWAY * own) / 3.0)
            change = np.clip(wanted - own, -3.0 * times, 2.0 * times)  # m/s; brakes harder than it accelerates
            x = env.vehicle.position[0] + np.cumsum(np.maximum(own + change, 0.0)) * self.waypoint_seconds
            lane = _lane(env.vehicle)
            y = lane + (env.vehicle.position[1] - lane) * np.exp(-times)
            plans.append(to_ego(np.stack([x, y], 1), env.vehicle.position, env.vehicle.heading))
        return np.asarray(plans, np.float32)

    def close(self) -> None:
        """Close the environments."""
        for env in self._envs:
            env.close()
        self._envs = []

    def _drive(self, row: int, path: np.ndarray, elapsed: float) -> None:
        ego = self._envs[row].vehicle
        seen = to_ego(path, ego.position, ego.heading)[None]
        acceleration, curvature = pursue(seen, np.array([ego.speed]), self.waypoint_seconds, elapsed)
        # A vehicle here turns at v sin(β) / (length / 2) with tan β = tan(steering) / 2; positive is to the right.
        slip = np.arcsin(np.clip(curvature[0] * VEHICLE_LENGTH / 2, -0.6, 0.6))
        steering = -np.arctan(2 * np.tan(slip))
        command = np.array([acceleration[0] / MAX_ACCELERATION, steering / MAX_STEERING])
        self._command[row] = np.clip(command, -1.0, 1.0)
        self._envs[row].step(self._command[row])

    def _ahead(self, row: int) -> tuple[float, float]:
        """Return metres to the vehicle ahead, bumper to bumper, and the closing speed."""
        ego = self._envs[row].vehicle
        gap, closing = MAX_GAP, 0.0
        for other in self._envs[row].road.vehicles:
            distance = other.position[0] - ego.position[0] - VEHICLE_LENGTH
            beside = abs(other.position[1] - ego.position[1]) < VEHICLE_WIDTH + 0.4
            if other is not ego and beside and -VEHICLE_LENGTH < distance < gap:
                gap, closing = max(0.0, distance), ego.speed - other.speed
        return gap, closing

    def _images(self, rows: np.ndarray) -> np.ndarray:
        return np.stack([self._image(row) for row in rows.tolist()])

    def _image(self, row: int) -> np.ndarray:
        """Draw road, lane marks, vehicles and ego from above, uint8 [3, S, S]; forward is up."""
        nearest, farthest, rightmost, leftmost = self.view
        size, ego = self.camera_size, self._envs[row].vehicle
        ahead, left = np.meshgrid(
            np.linspace(farthest, nearest, size), np.linspace(leftmost, rightmost, size), indexing="ij"
        )
        points = to_map(np.stack([ahead.ravel(), left.ravel()], 1), ego.position, ego.heading)
        margin = 0.5 * (farthest - nearest) / size  # half a pixel: no vehicle falls between two
        across = points[:, 1] / LANE_WIDTH + 0.5  # 0 at the left edge of the road, NUM_LANES at the right
        image = np.full((size * size, 3), (96, 136, 78), np.uint8)
        image[(across >= 0) & (across <= NUM_LANES)] = (66, 69, 76)
        image[(np.abs(across - np.round(across)) < 0.12) & (across > -0.1) & (across < NUM_LANES + 0.1)] = 236
        for vehicle in self._envs[row].road.vehicles:
            offset = points - vehicle.position
            cosine, sine = np.cos(vehicle.heading), np.sin(vehicle.heading)
            along, beside = offset[:, 0] * cosine + offset[:, 1] * sine, offset[:, 1] * cosine - offset[:, 0] * sine
            inside = (np.abs(along) < VEHICLE_LENGTH / 2 + margin) & (np.abs(beside) < VEHICLE_WIDTH / 2 + margin)
            image[inside] = (250, 214, 60) if vehicle is ego else (226, 74, 58)
        return image.reshape(size, size, 3).transpose(2, 0, 1)


def _lane(vehicle: Any) -> float:
    """Return the y coordinate of the centre of the nearest lane."""
    return float(np.round(np.clip(vehicle.position[1] / LANE_WIDTH, 0, NUM_LANES - 1)) * LANE_WIDTH)
