"""A scripted driver for the driving simulator: keeps its lane, follows, and overtakes slower vehicles.

`deft collect --policy expert` records `expert_action`; `expert_waypoints` is the expert's future path. The expert has
no memory from step to step.
"""

from __future__ import annotations

import numpy as np

from deft.envs.driving.simulator import (
    LANE_CENTRES,
    LANE_WIDTH,
    MAX_ACCELERATION,
    MAX_STEERING,
    NUM_LANES,
    STEP_SECONDS,
    VEHICLE_LENGTH,
    WHEELBASE,
    DrivingSimulator,
)

CRUISE_SPEED = 11.0
SIDEWAYS_ACCELERATION = 4.0  # limits the speed in bends
LANE_CHANGE_GAIN = 1.5  # of value (m/s) that another lane must offer
MAX_SIDE_SPEED = 1.8
HEADWAY, STANDING_GAP, COMFORTABLE_BRAKE = 0.9, 2.5, 3.0

_LOOK_AHEAD = np.array([0.0, 4.0, 8.0, 13.0, 18.0, 24.0])


def expert_action(simulator: DrivingSimulator) -> np.ndarray:
    """Return float32 [N, 2] in [-1, 1]: acceleration and steering as fractions of their limits."""
    lane = choose_lane(simulator)
    return (
        np.stack([_acceleration(simulator, lane) / MAX_ACCELERATION, _steering(simulator, lane) / MAX_STEERING], axis=1)
        .clip(-1.0, 1.0)
        .astype(np.float32)
    )


def expert_waypoints(simulator: DrivingSimulator, num: int, dt: float) -> np.ndarray:
    """Return the expert's path in the next `num` intervals of `dt` seconds: [N, num, 2] in the present ego frame.

    The future of the traffic is simulated; positions between two steps are interpolated.
    """
    times = np.arange(1, num + 1) * (dt / STEP_SECONDS)
    future = simulator.fork()
    path = [simulator.position]
    for _ in range(int(np.ceil(times[-1] - 1e-9))):
        action = expert_action(future)
        future.step(action[:, 0] * MAX_ACCELERATION, action[:, 1] * MAX_STEERING)
        path.append(future.position)
    positions = np.stack(path, axis=1)
    before = np.minimum(times.astype(np.int64), len(path) - 2)
    part = (times - before)[:, None]
    return simulator.to_ego(positions[:, before] * (1 - part) + positions[:, before + 1] * part)


def choose_lane(simulator: DrivingSimulator) -> np.ndarray:
    """int [N]: the lane to drive in: the present one, or a free one beside it with a higher value.

    A lane's value is the speed that it allows: v_ahead + (gap - 10) / 4, at most the cruising speed.
    """
    side_speed = simulator.speed * np.sin(simulator.heading_error)
    heading_for = simulator.road_offset + 1.0 * side_speed
    lane = np.clip(np.floor(heading_for / LANE_WIDTH + NUM_LANES / 2).astype(np.int64), 0, NUM_LANES - 1)
    ahead, behind, ahead_speed, behind_speed = _neighbours(simulator)
    value = np.minimum(ahead_speed + (ahead - 10.0) / 4.0, CRUISE_SPEED)
    closing, chasing = simulator.speed[:, None] - ahead_speed, behind_speed - simulator.speed[:, None]
    is_free = (ahead > 4.0 + 1.2 * np.maximum(closing, 0.0)) & (behind > 4.0 + 1.5 * np.maximum(chasing, 0.0))

    rows = np.arange(simulator.num_envs)
    # The lane beyond a neighbouring lane counts with a discount
    beyond = value.copy()
    beyond[:, 1:] = np.maximum(beyond[:, 1:], value[:, :-1] - 2.0)
    beyond[:, :-1] = np.maximum(beyond[:, :-1], value[:, 1:] - 2.0)
    best, best_value = lane.copy(), value[rows, lane] + LANE_CHANGE_GAIN
    for side in (1, -1):
        other = lane + side
        inside = (other >= 0) & (other < NUM_LANES)
        other = np.clip(other, 0, NUM_LANES - 1)
        better = inside & is_free[rows, other] & (beyond[rows, other] > best_value)
        best, best_value = np.where(better, other, best), np.where(better, beyond[rows, other], best_value)
    # Too slow to change lanes: stay in the nearest one
    return np.where(simulator.speed > 2.0, best, simulator.target_lane)


def _neighbours(simulator: DrivingSimulator) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """[N, lanes] each: gaps to the nearest vehicles ahead and behind in each lane, then their speeds."""
    distance = simulator.ahead()
    offset = simulator.other_offset + 1.5 * simulator.other_side_speed  # in 1.5 s
    centres = LANE_CENTRES[None, :, None]
    in_lane = (
        np.minimum(np.abs(offset[:, None] - centres), np.abs(simulator.other_offset[:, None] - centres))
        < 0.5 * LANE_WIDTH + 0.6
    )
    in_lane &= simulator.other_active[:, None]
    found = []
    for sign in (1.0, -1.0):
        gaps = np.where(
            in_lane & (sign * distance[:, None] >= (0.0 if sign > 0 else 1e-9)), sign * distance[:, None], 1e3
        )
        nearest = np.argmin(gaps, axis=2)
        gap = np.take_along_axis(gaps, nearest[:, :, None], axis=2)[:, :, 0] - VEHICLE_LENGTH
        speed = np.take_along_axis(simulator.other_speed, nearest, axis=1)
        found += [gap, np.where(gap < 900.0, speed, CRUISE_SPEED if sign > 0 else 0.0)]
    return found[0], found[2], found[1], found[3]


def _acceleration(simulator: DrivingSimulator, lane: np.ndarray) -> np.ndarray:
    """[N]: follow the vehicles ahead in the present lane and in the chosen one; slow down in bends."""
    rows = np.arange(simulator.num_envs)
    ahead, _, ahead_speed, _ = _neighbours(simulator)
    bend = np.abs(simulator.curvature(_LOOK_AHEAD)).max(axis=1)
    wanted = np.minimum(CRUISE_SPEED, np.sqrt(SIDEWAYS_ACCELERATION / np.maximum(bend, 1e-3)))
    result = np.clip(1.5 * (wanted - simulator.speed), -3.0, 3.0)
    for number, own in enumerate((lane, simulator.target_lane)):
        gap, speed = ahead[rows, own], ahead_speed[rows, own]
        closing = simulator.speed - speed
        # A leader that is being overtaken needs less room: the distance to brake to its speed
        headway = HEADWAY if number == 0 else 0.3
        gap_wanted = STANDING_GAP + headway * simulator.speed
        gap_wanted += np.maximum(closing, 0.0) * np.abs(closing) / (2 * COMFORTABLE_BRAKE)
        follow = 1.2 * (gap - gap_wanted) - 1.2 * closing
        result = np.minimum(result, np.where(gap < 60.0, follow, result))
    return np.clip(result, -MAX_ACCELERATION, MAX_ACCELERATION)


def _steering(simulator: DrivingSimulator, lane: np.ndarray) -> np.ndarray:
    """[N]: the road's curvature, plus a correction of the heading towards the lane's centre."""
    speed = np.maximum(simulator.speed, 2.0)
    error = simulator.road_offset - LANE_CENTRES[lane]
    side_speed = np.clip(-0.7 * error, -MAX_SIDE_SPEED, MAX_SIDE_SPEED)
    heading = np.arcsin(np.clip(side_speed / speed, -0.3, 0.3))
    bend = simulator.curvature(np.array([0.0, 2.0])).mean(axis=1)
    bend = bend / np.maximum(1.0 - bend * simulator.road_offset, 0.3)
    slip = np.arctan(0.5 * np.tan(simulator.steering))  # the direction of motion differs from the heading
    direction = simulator.heading_error + slip
    curvature = bend + 2.0 * (heading - direction) / speed
    return np.arctan(WHEELBASE * curvature)
