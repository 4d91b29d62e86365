"""The driving simulator: N three-lane roads with traffic, all stepped at once in numpy.

`env.py` has the environments, `expert.py` the scripted driver, `rendering.py` the images. Units are metres, seconds and
radians; x and y of the ego frame point forward and left. An environment depends on its own seed and actions only: no
operation mixes rows, and no sum depends on the number of rows, so its results are bit-equal for any number of
environments.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from deft.envs.checks import DIFFICULTIES, check_difficulty
from deft.envs.driving.road import NUM_PARAMETERS, Roads, draw_parameters
from deft.errors import InputError

STEP_SECONDS = 0.2
MAX_EPISODE_STEPS = 150
ROUTE_LENGTH = 200.0  # metres along the road from start to finish

NUM_LANES = 3
LANE_WIDTH = 3.5
HALF_ROAD = NUM_LANES * LANE_WIDTH / 2
LANE_CENTRES = (np.arange(NUM_LANES) - (NUM_LANES - 1) / 2) * LANE_WIDTH  # right to left, from the road's centre
EDGE = HALF_ROAD - 0.5  # largest distance of the vehicle's centre from the road's centre line

VEHICLE_LENGTH, VEHICLE_WIDTH = 4.5, 2.0
WHEELBASE = 2.7
MAX_SPEED = 15.0
MAX_ACCELERATION = 5.0  # the brake is as strong
MAX_STEERING = 0.25
STEERING_RATE = 0.5  # radians a second

# The intelligent driver model of the other vehicles: a (1 - (v/v0)⁴ - (s*/gap)²), s* = s0 + v T + v Δv / (2 √(a b))
IDM_ACCELERATION, IDM_BRAKE, IDM_HEADWAY, IDM_GAP = 1.5, 2.5, 1.2, 2.0
STRONGEST_BRAKE = 8.0
SIDE_GAP = 2.6  # vehicles closer than this sideways, centre to centre, block each other
LANE_CHANGE_SPEED = 1.2  # sideways, of other vehicles
LANE_CHANGE_PAUSE = 4.0  # seconds between two lane changes of a vehicle

MAX_AHEAD, MAX_BEHIND = 9, 3  # others that start ahead of the ego, and behind it
NUM_OTHERS = MAX_AHEAD + MAX_BEHIND

# One entry per difficulty: easy, medium, hard
_BEND = np.array([0.35, 0.65, 1.0])  # how much the road winds
_NUM_AHEAD = np.array([3, 7, 9])
_NUM_BEHIND = np.array([1, 2, 3])
_SPACING = np.array([45.0, 24.0, 18.0])  # along the road, of the vehicles ahead
_SLOWEST_AHEAD, _FASTEST_AHEAD = np.array([5.0, 4.0, 3.0]), np.array([8.0, 7.0, 7.5])
_SLOWEST_BEHIND, _FASTEST_BEHIND = np.array([6.0, 6.0, 7.0]), np.array([8.0, 9.0, 11.0])
_IS_BLOCKED = np.array([False, True, True])  # the nearest vehicle ahead starts in the ego's lane
_CHANGES_LANES = np.array([False, False, True])
FIRST_AHEAD = 24.0
FIRST_BEHIND = 18.0

REWARD_TERMS = ("progress", "collision", "off_road", "comfort", "lane")
CRASH_REWARD = -100.0
COMFORT_WEIGHT = 0.1
LANE_WEIGHT = 0.5

_NUM_DRAWS = NUM_PARAMETERS + 4 + 3 * NUM_OTHERS


class DrivingSimulator:
    """N environments of a road, an ego vehicle and traffic. Every array attribute has one row per environment.

    Call `reset` before the first `step`. There is no automatic reset: an environment whose episode has ended
    (`terminated`, or `elapsed_steps` at a limit of the caller) continues until it is reset.
    """

    def __init__(self, num_envs: int, difficulty: str = "medium") -> None:
        if num_envs < 1:
            raise InputError(f"num_envs is {num_envs}; choose at least 1")
        self.num_envs = num_envs
        self.set_difficulty(difficulty)
        self.generators = [np.random.default_rng() for _ in range(num_envs)]
        """One per environment; only `reset` draws from it."""
        self.roads = Roads(num_envs)
        vehicles = (num_envs, NUM_OTHERS)

        self.level = np.zeros(num_envs, np.int64)
        """int [N]: the difficulty of the present episode, an index of DIFFICULTIES."""
        self.elapsed_steps = np.zeros(num_envs, np.int64)
        self.position = np.zeros((num_envs, 2))
        """[N, 2]: the ego's centre on the map."""
        self.heading = np.zeros(num_envs)
        """[N], in [-π, π)."""
        self.speed = np.zeros(num_envs)
        self.steering = np.zeros(num_envs)
        """[N]: the angle of the front wheels, left positive."""
        self.acceleration = np.zeros(num_envs)
        """[N]: of the last action, m/s²."""
        self.command = np.zeros((num_envs, 2))
        """[N, 2]: acceleration and steering of the last action as fractions of their limits."""
        self.arc = np.zeros(num_envs)
        """[N]: arc length of the ego along the road, in [0, road length)."""
        self.progress = np.zeros(num_envs)
        """[N]: metres along the road since the start; the route ends at ROUTE_LENGTH."""
        self.road_offset = np.zeros(num_envs)
        """[N]: to the left of the road's centre line."""
        self.road_heading = np.zeros(num_envs)
        """[N]: heading of the road at the ego."""
        self.collided = np.zeros(num_envs, bool)
        self.off_road = np.zeros(num_envs, bool)
        """bool [N]: beyond the road's edge, or turned against its direction."""
        self.reached = np.zeros(num_envs, bool)
        """bool [N]: the end of the route, without a collision."""
        self.terms = np.zeros((num_envs, len(REWARD_TERMS)))
        """[N, 5]: the terms of the last step's reward, as in REWARD_TERMS."""

        self.other_active = np.zeros(vehicles, bool)
        """bool [N, M]: which vehicles exist in this episode; the other attributes of the rest are undefined."""
        self.other_arc = np.zeros(vehicles)
        self.other_offset = np.zeros(vehicles)
        self.other_speed = np.zeros(vehicles)
        self.other_lane = np.zeros(vehicles, np.int64)
        """int [N, M]: the lane that each vehicle keeps or changes to."""
        self.other_desired_speed = np.ones(vehicles)
        self.other_pause = np.zeros(vehicles)
        self.other_acceleration = np.zeros(vehicles)
        self.other_side_speed = np.zeros(vehicles)
        """[N, M]: to the left, m/s."""
        self.other_position = np.zeros((*vehicles, 2))
        self.other_heading = np.zeros(vehicles)
        # With the parameters of the road these are the whole state of an environment.
        self._state_names = [name for name, value in vars(self).items() if isinstance(value, np.ndarray)]

    # -------------------------------------------------------------------------------------------- derived quantities

    @property
    def terminated(self) -> np.ndarray:
        """bool [N]: the episode has ended, by success or failure."""
        return self.collided | self.off_road | self.reached

    @property
    def heading_error(self) -> np.ndarray:
        """[N]: angle of the ego to the left of the road's direction, in [-π, π)."""
        return _wrap_angle(self.heading - self.road_heading)

    @property
    def target_lane(self) -> np.ndarray:
        """int [N]: the lane nearest to the ego; 0 is the rightmost."""
        lane = np.floor((self.road_offset + HALF_ROAD) / LANE_WIDTH).astype(np.int64)
        return np.minimum(np.maximum(lane, 0), NUM_LANES - 1)

    @property
    def lateral_offset(self) -> np.ndarray:
        """[N]: metres to the left of the target lane's centre."""
        return self.road_offset - LANE_CENTRES[self.target_lane]

    @property
    def remaining(self) -> np.ndarray:
        """[N]: metres to the end of the route."""
        return np.maximum(ROUTE_LENGTH - self.progress, 0.0)

    @property
    def num_vehicles(self) -> int:
        """The number of vehicles in all environments, including the egos."""
        return self.num_envs + int(np.count_nonzero(self.other_active))

    def ahead(self) -> np.ndarray:
        """[N, M]: metres along the road from the ego to the others, centre to centre; negative behind it."""
        return self._shortest(self.other_arc - self.arc[:, None])

    def _shortest(self, distance: np.ndarray) -> np.ndarray:
        """Return distances along the road [N, M] the shorter way around the loop."""
        length = self.roads.length[:, None]
        distance = np.where(distance < -0.5 * length, distance + length, distance)
        return np.where(distance >= 0.5 * length, distance - length, distance)

    def _vehicles(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """[N, 1 + M] each: arc length, offset, speed and existence of all vehicles; the ego is vehicle 0."""
        arc = np.concatenate([self.arc[:, None], self.other_arc], axis=1)
        offset = np.concatenate([self.road_offset[:, None], self.other_offset], axis=1)
        speed = np.concatenate([self.speed[:, None], self.other_speed], axis=1)
        return arc, offset, speed, np.concatenate([np.ones((self.num_envs, 1), bool), self.other_active], axis=1)

    def curvature(self, distances: np.ndarray) -> np.ndarray:
        """[N, D]: curvature of the road at distances [D] ahead of the ego; left positive."""
        return self.roads.at(self.roads.wrap(self.arc[:, None] + distances))[..., 3]

    def to_ego(self, points: np.ndarray) -> np.ndarray:
        """Transform points of the map [N, P, 2] to the ego frame: x forward, y left."""
        x, y = (points[..., axis] - self.position[:, None, axis] for axis in (0, 1))
        cosine, sine = np.cos(self.heading)[:, None], np.sin(self.heading)[:, None]
        return np.stack([x * cosine + y * sine, y * cosine - x * sine], axis=-1)

    def to_map(self, points: np.ndarray) -> np.ndarray:
        """Transform points of the ego frame to the map."""
        cosine, sine = np.cos(self.heading)[:, None], np.sin(self.heading)[:, None]
        x, y = points[..., 0] * cosine - points[..., 1] * sine, points[..., 0] * sine + points[..., 1] * cosine
        return np.stack([x, y], axis=-1) + self.position[:, None]

    def lane_points(self, distances: np.ndarray, lane: np.ndarray | None = None) -> np.ndarray:
        """Return points [N, D, 2] of the target lane's centre, or of `lane` [N], at distances [D] ahead; ego frame."""
        arc = self.roads.wrap(self.arc[:, None] + distances)
        offset = LANE_CENTRES[self.target_lane if lane is None else lane]
        return self.to_ego(self.roads.locate(arc, offset[:, None])[0])

    # ------------------------------------------------------------------------------------------------------ episodes

    def set_difficulty(self, difficulty: str) -> None:
        """Set the difficulty (easy, medium, hard) of the next episodes."""
        self.difficulty = check_difficulty(difficulty)

    def reset(self, index: Sequence[int] | np.ndarray | None = None, seeds: Sequence[int] | None = None) -> None:
        """Start an episode in the environments `index` (default: all), with new seeds or their present generators."""
        rows = np.arange(self.num_envs) if index is None else np.asarray(index, np.int64)
        if seeds is not None:
            for row, seed in zip(rows.tolist(), seeds, strict=True):
                self.generators[row] = np.random.default_rng(int(seed))
        if not len(rows):
            return
        draws = np.stack([self.generators[row].random(_NUM_DRAWS) for row in rows.tolist()])
        level = np.full(len(rows), DIFFICULTIES.index(self.difficulty))
        self.level[rows] = level
        self.roads.build(rows, draw_parameters(draws[:, :NUM_PARAMETERS], _BEND[level]))
        draws = draws[:, NUM_PARAMETERS:]

        lane = (draws[:, 0] * NUM_LANES).astype(np.int64)
        offset = LANE_CENTRES[lane] + 0.8 * (draws[:, 1] - 0.5)
        start = np.zeros(self.num_envs)
        start[rows] = offset
        position, road_heading = self.roads.locate(np.zeros(self.num_envs), start)
        self.position[rows], self.road_heading[rows] = position[rows], road_heading[rows]
        self.heading[rows] = _wrap_angle(road_heading[rows] + 0.1 * (draws[:, 2] - 0.5))
        self.speed[rows] = 6.0 + 3.0 * draws[:, 3]
        self.road_offset[rows] = offset
        for name in ("elapsed_steps", "steering", "acceleration", "command", "arc", "progress", "terms"):
            getattr(self, name)[rows] = 0
        for name in ("collided", "off_road", "reached"):
            getattr(self, name)[rows] = False
        self._place_others(rows, level, lane, draws[:, 4:].reshape(len(rows), 3, NUM_OTHERS))

    def _place_others(self, rows: np.ndarray, level: np.ndarray, ego_lane: np.ndarray, draws: np.ndarray) -> None:
        """Draw the traffic. Each vehicle has its own section of the road, so that none overlap."""
        number = np.arange(NUM_OTHERS)
        is_ahead = number < MAX_AHEAD
        spacing = _SPACING[level][:, None]
        ahead = FIRST_AHEAD + number * spacing + (spacing - 10.0) * draws[:, 0]
        behind = -FIRST_BEHIND - (number - MAX_AHEAD) * 20.0 - 8.0 * draws[:, 0]
        lane = (draws[:, 1] * NUM_LANES).astype(np.int64)
        lane[:, 0] = np.where(_IS_BLOCKED[level], ego_lane, lane[:, 0])
        slowest = np.where(is_ahead, _SLOWEST_AHEAD[level][:, None], _SLOWEST_BEHIND[level][:, None])
        fastest = np.where(is_ahead, _FASTEST_AHEAD[level][:, None], _FASTEST_BEHIND[level][:, None])
        speed = slowest + (fastest - slowest) * draws[:, 2]

        self.other_active[rows] = np.where(
            is_ahead, number < _NUM_AHEAD[level][:, None], number - MAX_AHEAD < _NUM_BEHIND[level][:, None]
        )
        distance = np.where(is_ahead, ahead, behind)
        self.other_arc[rows] = np.where(distance < 0, distance + self.roads.length[rows][:, None], distance)
        self.other_lane[rows] = lane
        self.other_offset[rows] = LANE_CENTRES[lane]
        self.other_speed[rows] = self.other_desired_speed[rows] = speed
        self.other_pause[rows] = LANE_CHANGE_PAUSE * draws[:, 0]
        self.other_acceleration[rows] = 0.0
        self.other_side_speed[rows] = 0.0
        self._locate_others()

    def step(self, acceleration: np.ndarray, steering: np.ndarray) -> None:
        """Simulate 0.2 s with accelerations [N] (m/s²) and steering angles [N] (rad) of the egos, clipped to limits.

        The steering angle changes by STEERING_RATE at most. The results are in the attributes.
        """
        acceleration = np.minimum(np.maximum(acceleration, -MAX_ACCELERATION), MAX_ACCELERATION).astype(np.float64)
        steering = np.minimum(np.maximum(steering, -MAX_STEERING), MAX_STEERING).astype(np.float64)
        previous = self.command
        self.command = np.stack([acceleration / MAX_ACCELERATION, steering / MAX_STEERING], axis=1)
        self.acceleration = acceleration
        other_acceleration = self._follow()
        self._change_lanes()
        travelled = self._drive(acceleration, steering)
        self._drive_others(other_acceleration)
        self.elapsed_steps += 1
        self._judge(travelled, previous)

    def _drive(self, acceleration: np.ndarray, steering: np.ndarray) -> np.ndarray:
        """Move the egos as kinematic bicycles, by the midpoint rule; return the metres along the road.

        ẋ = v cos(ψ + β), ẏ = v sin(ψ + β), ψ̇ = v cos β tan δ / wheelbase, tan β = tan δ / 2 (centre between the axles).
        """
        turn = STEERING_RATE * STEP_SECONDS
        self.steering = self.steering + np.minimum(np.maximum(steering - self.steering, -turn), turn)
        speed = np.minimum(np.maximum(self.speed + acceleration * STEP_SECONDS, 0.0), MAX_SPEED)
        distance = 0.5 * (self.speed + speed) * STEP_SECONDS
        tangent = np.tan(self.steering)
        slip = np.arctan(0.5 * tangent)
        turned = distance * np.cos(slip) * tangent / WHEELBASE
        direction = self.heading + slip + 0.5 * turned
        forward_x, forward_y = distance * np.cos(direction), distance * np.sin(direction)
        self.position = self.position + np.stack([forward_x, forward_y], axis=1)
        self.heading = _wrap_angle(self.heading + turned)
        self.speed = speed

        # The nearest point of the centre line, by Newton's method from the last one: (p - c(s)) · tangent(s) = 0
        travelled = np.zeros(self.num_envs)
        for _ in range(3):
            line = self.roads.at(self.roads.wrap(self.arc + travelled))
            cosine, sine = np.cos(line[:, 2].copy()), np.sin(line[:, 2].copy())
            x, y = self.position[:, 0] - line[:, 0], self.position[:, 1] - line[:, 1]
            along, offset = x * cosine + y * sine, y * cosine - x * sine
            travelled += np.minimum(np.maximum(along / np.maximum(1.0 - line[:, 3] * offset, 0.3), -4.0), 4.0)
        self.arc = self.roads.wrap(self.arc + travelled)
        self.road_offset = offset
        self.road_heading = line[:, 2].copy()
        return travelled

    def _follow(self) -> np.ndarray:
        """[N, M]: the acceleration of the others by the intelligent driver model."""
        arc, offset, speed, there = self._vehicles()
        distance = arc[:, None, :] - self.other_arc[:, :, None]  # [N, M, 1 + M]
        distance = np.where(distance < 0, distance + self.roads.length[:, None, None], distance)
        target = LANE_CENTRES[self.other_lane]
        in_way = np.abs(offset[:, None, :] - self.other_offset[:, :, None]) < SIDE_GAP
        in_way |= np.abs(offset[:, None, :] - target[:, :, None]) < SIDE_GAP
        in_way &= there[:, None, :]
        in_way[:, np.arange(NUM_OTHERS), 1 + np.arange(NUM_OTHERS)] = False
        distance = np.where(in_way, distance, 1e4)
        leader = np.argmin(distance, axis=2)
        gap = np.take_along_axis(distance, leader[:, :, None], axis=2)[:, :, 0] - VEHICLE_LENGTH
        self._gap = np.maximum(gap, 0.0)
        own = self.other_speed
        closing = own - np.take_along_axis(speed, leader, axis=1)
        wanted = IDM_GAP + np.maximum(
            own * IDM_HEADWAY + own * closing / (2 * (IDM_ACCELERATION * IDM_BRAKE) ** 0.5), 0
        )
        ratio, pressure = own / self.other_desired_speed, wanted / np.maximum(gap, 0.1)
        ratio *= ratio
        acceleration = IDM_ACCELERATION * (1.0 - ratio * ratio - pressure * pressure)
        return np.minimum(np.maximum(acceleration, -STRONGEST_BRAKE), IDM_ACCELERATION)

    def _change_lanes(self) -> None:
        """Let one vehicle per environment and step change to a free lane (hard), so that no two take the same gap."""
        rows = np.arange(self.num_envs)
        number = self.elapsed_steps % NUM_OTHERS
        self.other_pause = np.maximum(self.other_pause - STEP_SECONDS, 0.0)
        own_speed, lane = self.other_speed[rows, number], self.other_lane[rows, number]
        is_slowed = own_speed < 0.8 * self.other_desired_speed[rows, number]
        may = _CHANGES_LANES[self.level] & self.other_active[rows, number] & is_slowed
        may &= (self.other_pause[rows, number] == 0.0) & (self._gap[rows, number] < 20.0)
        if not may.any():
            return
        arc, offset, speed, there = self._vehicles()
        goal = np.concatenate([self.road_offset[:, None], LANE_CENTRES[self.other_lane]], axis=1)
        there[rows, 1 + number] = False
        distance = self._shortest(arc - self.other_arc[rows, number][:, None])
        # Room for vehicles at other speeds: two seconds on either side, and more than the present gap ahead
        closing = speed - own_speed[:, None]
        is_near = np.where(distance > 0, distance < 14.0 - 2 * closing, -distance < 14.0 + 2 * closing) & there
        for side in (1, -1):  # the left first
            new_lane = lane + side
            centre = LANE_CENTRES[np.minimum(np.maximum(new_lane, 0), NUM_LANES - 1)][:, None]
            beside = (np.abs(offset - centre) < SIDE_GAP) | (np.abs(goal - centre) < SIDE_GAP)
            change = may & (new_lane >= 0) & (new_lane < NUM_LANES) & ~(is_near & beside).any(axis=1)
            chosen = rows[change]
            self.other_lane[chosen, number[change]] = new_lane[change]
            self.other_pause[chosen, number[change]] = LANE_CHANGE_PAUSE
            may &= ~change

    def _drive_others(self, acceleration: np.ndarray) -> None:
        """Move the others along their lanes. The last metre of a gap stays free."""
        room = np.maximum(self._gap - 1.0, 0.0) / STEP_SECONDS
        speed = np.minimum(np.maximum(self.other_speed + acceleration * STEP_SECONDS, 0.0), room)
        self.other_acceleration = acceleration
        self.other_speed = speed
        self.other_arc = self.roads.wrap(self.other_arc + speed * STEP_SECONDS)
        side = LANE_CENTRES[self.other_lane] - self.other_offset
        # A vehicle at rest cannot move sideways: at most a quarter of its speed
        most = np.minimum(LANE_CHANGE_SPEED, 0.25 * speed) * STEP_SECONDS
        side = np.minimum(np.maximum(side, -most), most)
        self.other_offset = self.other_offset + side
        self.other_side_speed = side / STEP_SECONDS
        self._locate_others()

    def _locate_others(self) -> None:
        self.other_position, heading = self.roads.locate(self.other_arc, self.other_offset)
        self.other_heading = heading + np.arctan(self.other_side_speed / np.maximum(self.other_speed, 1.0))

    def _judge(self, travelled: np.ndarray, previous: np.ndarray) -> None:
        """Compute the reward's terms, and whether the episode has ended."""
        self.progress = self.progress + travelled
        self.collided = np.any(self._touches(), axis=1)
        self.off_road = (np.abs(self.road_offset) > EDGE) | (np.abs(self.heading_error) > 0.5 * np.pi)
        self.reached = (self.progress >= ROUTE_LENGTH) & ~self.collided & ~self.off_road
        change = np.abs(self.command - previous)
        self.terms = np.stack(
            [
                travelled,
                CRASH_REWARD * self.collided,
                CRASH_REWARD * self.off_road,
                -COMFORT_WEIGHT * (change[:, 0] + change[:, 1]),
                -LANE_WEIGHT * np.abs(self.lateral_offset),
            ],
            axis=1,
        )

    def _touches(self) -> np.ndarray:
        """bool [N, M]: whose box overlaps the ego's. Boxes do not overlap if an axis of either separates them."""
        x, y = (self.other_position[..., axis] - self.position[:, None, axis] for axis in (0, 1))
        half_length, half_width = VEHICLE_LENGTH / 2, VEHICLE_WIDTH / 2
        turn = self.other_heading - self.heading[:, None]
        cosine, sine = np.abs(np.cos(turn)), np.abs(np.sin(turn))
        # Half extent of the other's box along the ego's axes, plus the ego's, and the reverse:
        reach_along = half_length + half_length * cosine + half_width * sine
        reach_across = half_width + half_length * sine + half_width * cosine
        touches = self.other_active.copy()
        for heading in (self.heading[:, None], self.other_heading):
            forward_x, forward_y = np.cos(heading), np.sin(heading)
            touches &= np.abs(x * forward_x + y * forward_y) < reach_along
            touches &= np.abs(y * forward_x - x * forward_y) < reach_across
        return touches

    # ---------------------------------------------------------------------------------------------------------- state

    def get_state(self, index: Sequence[int] | np.ndarray | None = None) -> list[dict[str, Any]]:
        """Return the complete state as plain data: one dict per environment of `index`, or of all."""
        rows = range(self.num_envs) if index is None else np.asarray(index).tolist()
        return [
            {
                "difficulty": self.difficulty,
                "random": self.generators[row].bit_generator.state,
                "road": self.roads.parameters[row].copy(),
                **{name: getattr(self, name)[row].copy() for name in self._state_names},
            }
            for row in rows
        ]

    def set_state(self, states: Sequence[dict[str, Any]], index: Sequence[int] | np.ndarray | None = None) -> None:
        """Continue from saved states, one for each environment of `index` (default: all)."""
        rows = np.arange(self.num_envs) if index is None else np.asarray(index, np.int64)
        for row, state in zip(rows.tolist(), states, strict=True):
            self.set_difficulty(state["difficulty"])
            self.generators[row].bit_generator.state = state["random"]
            if (self.roads.parameters[row] != state["road"]).any():
                self.roads.build(np.array([row]), np.asarray(state["road"])[None])
            for name in self._state_names:
                getattr(self, name)[row] = state[name]

    def fork(self) -> DrivingSimulator:
        """Return a copy for simulating ahead: stepping it changes nothing here. It shares roads and generators."""
        fork = copy.copy(self)
        for name in self._state_names:
            setattr(fork, name, getattr(self, name).copy())
        return fork


def _wrap_angle(angle: np.ndarray) -> np.ndarray:
    """Wrap angles to [-π, π)."""
    return angle - 2 * np.pi * np.floor((angle + np.pi) / (2 * np.pi))
