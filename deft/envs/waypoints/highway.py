"""highway-env's straight highway behind the waypoint protocol; needs the extra `highway`.

Its vehicles and physics are highway-env's own; the picture from above is drawn here, since the package's renderer opens
a window's worth of pygame for each. Its y axis points to the right; ours to the left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np

from deft import schema
from deft.envs.waypoints.protocol import (
    CAMERA_SIZE,
    MAX_GAP,
    NUM_WAYPOINTS,
    Outcome,
    WaypointWorld,
    check_difficulty,
    displacement_errors,
)
from deft.envs.waypoints.tracking import pursue
from deft.errors import InputError

STEP_SECONDS = 0.2
LANE_WIDTH, NUM_LANES = 4.0, 3
VEHICLE_LENGTH, VEHICLE_WIDTH = 5.0, 2.0
MAX_ACCELERATION, MAX_STEERING = 5.0, np.pi / 4
CRUISE_SPEED, HEADWAY = 28.0, 1.2
DURATION = 20.0  # seconds; an episode that lasts so long unharmed succeeds
VEHICLES = {"easy": 8, "medium": 16, "hard": 30}
DENSITY = {"easy": 0.8, "medium": 1.0, "hard": 1.4}


class HighwayWorld(WaypointWorld):
    """N copies of `highway-v0` with continuous actions, one after another in this process."""

    reward_terms = ("progress", "collision", "off_road", "comfort", "lane")
    view = (-12.0, 60.0, -36.0, 36.0)

    def __init__(
        self,
        num_envs: int = 1,
        difficulty: str = "medium",
        num_waypoints: int = NUM_WAYPOINTS,
        camera_size: int = CAMERA_SIZE,
        steps_per_decision: int = 3,
        waypoint_seconds: float = 0.4,
        measure_ade: bool = False,
    ) -> None:
        try:
            import highway_env
        except ImportError as error:
            raise InputError(
                f'env highway: {error.name or "highway_env"} is not installed: pip install "deft[highway]"'
            ) from error
        if "highway-v0" not in gymnasium.registry:
            gymnasium.register_envs(highway_env)
        self.num_envs, self.num_waypoints, self.camera_size = num_envs, num_waypoints, camera_size
        self.steps_per_decision, self.waypoint_seconds = steps_per_decision, waypoint_seconds
        self.measure_ade = measure_ade
        self.difficulty = check_difficulty(difficulty)
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
            "duration": 10 * DURATION,  # the end is decided here
            "offroad_terminal": False,
        }

    def reset(self, index: np.ndarray, seeds: Sequence[int | None]) -> None:
        """New traffic."""
        for copy, seed in zip(index, seeds, strict=True):
            self._envs[copy].configure(self._config())
            self._envs[copy].reset(seed=seed)
            self._command[copy], self._elapsed[copy] = 0.0, 0.0

    def observe(self, index: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """The picture from above, the vehicle's own motion, and the gap to the vehicle ahead."""
        rows = range(self.num_envs) if index is None else [int(row) for row in index]
        motion = []
        for row in rows:
            gap, closing = self._ahead(row)
            acceleration, steering = self._command[row] * (MAX_ACCELERATION, MAX_STEERING)
            motion.append([self._envs[row].vehicle.speed, acceleration, steering, gap, closing])
        return {
            schema.CAMERA: np.stack([self._picture(row) for row in rows]),
            schema.MOTION: np.asarray(motion, np.float32),
            schema.SFT_OFFSET: np.zeros((len(motion), self.num_waypoints, 2), np.float32),
        }

    def follow(self, waypoints: np.ndarray) -> Outcome:
        """Track the path for `steps_per_decision` steps in each copy; a crash or the road's edge ends its share."""
        ade = fde = None
        if self.measure_ade:
            ade, fde = displacement_errors(waypoints, self.target_waypoints())
        terms = {name: np.zeros(self.num_envs) for name in self.reward_terms}
        collision, off_road = np.zeros(self.num_envs, bool), np.zeros(self.num_envs, bool)
        for row, env in enumerate(self._envs):
            path = self._to_map(row, np.concatenate([np.zeros((1, 2)), waypoints[row]]))
            for step in range(self.steps_per_decision):
                if collision[row] or off_road[row]:
                    break
                start = env.vehicle.position[0]
                before = self._command[row].copy()
                self._drive(row, path, step * STEP_SECONDS)
                collision[row], off_road[row] = env.vehicle.crashed, not env.vehicle.on_road
                lane = np.round(np.clip(env.vehicle.position[1] / LANE_WIDTH, 0, NUM_LANES - 1)) * LANE_WIDTH
                terms["progress"][row] += 0.05 * (env.vehicle.position[0] - start)
                terms["comfort"][row] -= 0.01 * np.abs(self._command[row] - before).sum()
                terms["lane"][row] -= 0.05 * abs(env.vehicle.position[1] - lane)
        terms["collision"] -= 10.0 * collision
        terms["off_road"] -= 10.0 * off_road
        self._elapsed += self.steps_per_decision * STEP_SECONDS
        terminated = collision | off_road
        truncated = (self._elapsed >= DURATION) & ~terminated
        return Outcome(terms, terminated, truncated, truncated, collision, off_road, ade, fde)

    def target_waypoints(self) -> np.ndarray:
        """A driver that keeps its lane, at the speed that leaves `HEADWAY` seconds to the vehicle ahead."""
        plans = []
        for row, env in enumerate(self._envs):
            gap, closing = self._ahead(row)
            own, times = env.vehicle.speed, self.waypoint_seconds * np.arange(1, self.num_waypoints + 1)
            wanted = CRUISE_SPEED if gap >= MAX_GAP else min(CRUISE_SPEED, own - closing + (gap - HEADWAY * own) / 3.0)
            change = np.clip(wanted - own, -3.0 * times, 2.0 * times)  # m/s by then, braking harder than it speeds up
            x = env.vehicle.position[0] + np.cumsum(np.maximum(own + change, 0.0)) * self.waypoint_seconds
            lane = np.round(np.clip(env.vehicle.position[1] / LANE_WIDTH, 0, NUM_LANES - 1)) * LANE_WIDTH
            y = lane + (env.vehicle.position[1] - lane) * np.exp(-times)
            plans.append(self._to_ego(row, np.stack([x, y], 1)))
        return np.asarray(plans, np.float32)

    def set_difficulty(self, level: str) -> None:
        """More traffic, from each copy's next episode on."""
        self.difficulty = check_difficulty(level)

    def close(self) -> None:
        """Close the copies."""
        for env in self._envs:
            env.close()
        self._envs = []

    def _drive(self, row: int, path: np.ndarray, elapsed: float) -> None:
        env = self._envs[row]
        speed = np.array([env.vehicle.speed])
        acceleration, curvature = pursue(self._to_ego(row, path)[None], speed, self.waypoint_seconds, elapsed)
        # A vehicle here turns at v sin(β) / (length / 2) with tan β = tan(steering) / 2, and to the right for +.
        slip = np.arcsin(np.clip(curvature[0] * VEHICLE_LENGTH / 2, -0.6, 0.6))
        steering = -np.arctan(2 * np.tan(slip))
        command = np.array([acceleration[0] / MAX_ACCELERATION, steering / MAX_STEERING])
        self._command[row] = np.clip(command, -1.0, 1.0)
        env.step(self._command[row])

    def _ahead(self, row: int) -> tuple[float, float]:
        """Metres to the vehicle in the way, bumper to bumper, and the speed at which it comes nearer."""
        ego = self._envs[row].vehicle
        gap, closing = MAX_GAP, 0.0
        for other in self._envs[row].road.vehicles:
            distance = other.position[0] - ego.position[0] - VEHICLE_LENGTH
            beside = abs(other.position[1] - ego.position[1]) < VEHICLE_WIDTH + 0.4
            if other is not ego and beside and -VEHICLE_LENGTH < distance < gap:
                gap, closing = max(0.0, distance), ego.speed - other.speed
        return gap, closing

    def _to_ego(self, row: int, points: np.ndarray) -> np.ndarray:
        """Points [P, 2] of the map, y to the right, as the ego sees them, y to the left."""
        ego = self._envs[row].vehicle
        cosine, sine = np.cos(ego.heading), np.sin(ego.heading)
        x, y = (points - ego.position).T
        return np.stack([x * cosine + y * sine, x * sine - y * cosine], 1)

    def _to_map(self, row: int, points: np.ndarray) -> np.ndarray:
        """The inverse of `_to_ego`."""
        ego = self._envs[row].vehicle
        cosine, sine = np.cos(ego.heading), np.sin(ego.heading)
        x, y = points.T
        return np.stack([x * cosine + y * sine, x * sine - y * cosine], 1) + ego.position

    def _picture(self, row: int) -> np.ndarray:
        """Road, lane marks, vehicles and ego from above, uint8 [3, S, S]; ahead is up."""
        nearest, farthest, rightmost, leftmost = self.view
        size = self.camera_size
        ahead, left = np.meshgrid(
            np.linspace(farthest, nearest, size), np.linspace(leftmost, rightmost, size), indexing="ij"
        )
        places = self._to_map(row, np.stack([ahead.ravel(), left.ravel()], 1))
        margin = 0.5 * (farthest - nearest) / size  # half a pixel: no vehicle falls between two
        across = places[:, 1] / LANE_WIDTH + 0.5  # 0 at the left edge of the road, NUM_LANES at the right
        picture = np.full((size * size, 3), (96, 136, 78), np.uint8)
        picture[(across >= 0) & (across <= NUM_LANES)] = (66, 69, 76)
        picture[(np.abs(across - np.round(across)) < 0.12) & (across > -0.1) & (across < NUM_LANES + 0.1)] = 236
        for vehicle in self._envs[row].road.vehicles:
            offset = places - vehicle.position
            cosine, sine = np.cos(vehicle.heading), np.sin(vehicle.heading)
            along, beside = offset[:, 0] * cosine + offset[:, 1] * sine, offset[:, 1] * cosine - offset[:, 0] * sine
            inside = (np.abs(along) < VEHICLE_LENGTH / 2 + margin) & (np.abs(beside) < VEHICLE_WIDTH / 2 + margin)
            picture[inside] = (250, 214, 60) if vehicle is self._envs[row].vehicle else (226, 74, 58)
        return picture.reshape(size, size, 3).transpose(2, 0, 1)
