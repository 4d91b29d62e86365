"""A scripted driver for the driving world: keeps its lane, follows, and passes slower vehicles where there is room.

`expert_action` is what `deft collect --policy expert` records; `expert_waypoints` is where the expert will drive. Both
read the world alone: the expert remembers nothing from step to step.
"""

from __future__ import annotations

import numpy as np

from deft.envs.driving.world import (
    LANE_CENTRES,
    LANE_WIDTH,
    MAX_ACCELERATION,
    MAX_STEERING,
    NUM_LANES,
    STEP_SECONDS,
    VEHICLE_LENGTH,
    WHEELBASE,
    DrivingWorld,
)

CRUISE_SPEED = 11.0
SIDEWAYS_ACCELERATION = 4.0  # limits the speed in bends
LANE_CHANGE_GAIN = 1.5  # of value (m/s) that another lane must offer
MAX_SIDE_SPEED = 1.8
HEADWAY, STANDING_GAP, COMFORTABLE_BRAKE = 0.9, 2.5, 3.0

_LOOK_AHEAD = np.array([0.0, 4.0, 8.0, 13.0, 18.0, 24.0])


def expert_action(world: DrivingWorld) -> np.ndarray:
    """float32 [N, 2] in [-1, 1]: acceleration and steering in parts of their limits."""
    lane = choose_lane(world)
    return (
        np.stack([_acceleration(world, lane) / MAX_ACCELERATION, _steering(world, lane) / MAX_STEERING], axis=1)
        .clip(-1.0, 1.0)
        .astype(np.float32)
    )


def expert_waypoints(world: DrivingWorld, num: int, dt: float) -> np.ndarray:
    """Where the expert drives in the next `num` times `dt` seconds: [N, num, 2] in the present ego frame.

    The traffic's future is simulated, not guessed; places between two steps lie on the line between theirs.
    """
    times = np.arange(1, num + 1) * (dt / STEP_SECONDS)
    future = world.fork()
    path = [world.position]
    for _ in range(int(np.ceil(times[-1] - 1e-9))):
        action = expert_action(future)
        future.step(action[:, 0] * MAX_ACCELERATION, action[:, 1] * MAX_STEERING)
        path.append(future.position)
    places = np.stack(path, axis=1)
    before = np.minimum(times.astype(np.int64), len(path) - 2)
    part = (times - before)[:, None]
    return world.to_ego(places[:, before] * (1 - part) + places[:, before + 1] * part)


def choose_lane(world: DrivingWorld) -> np.ndarray:
    """int [N]: the lane to be in: the one it is heading for, or one beside it that is worth more and free.

    A lane's value is the speed that it allows: v_ahead + (gap - 10) / 4, at most the cruising speed.
    """
    side_speed = world.speed * np.sin(world.heading_error)
    heading_for = world.road_offset + 1.0 * side_speed
    lane = np.clip(np.floor(heading_for / LANE_WIDTH + NUM_LANES / 2).astype(np.int64), 0, NUM_LANES - 1)
    ahead, behind, ahead_speed, behind_speed = _neighbours(world)
    value = np.minimum(ahead_speed + (ahead - 10.0) / 4.0, CRUISE_SPEED)
    closing, chasing = world.speed[:, None] - ahead_speed, behind_speed - world.speed[:, None]
    is_free = (ahead > 4.0 + 1.2 * np.maximum(closing, 0.0)) & (behind > 4.0 + 1.5 * np.maximum(chasing, 0.0))

    rows = np.arange(world.num_envs)
    # What lies beyond a lane counts a little: a way to it is opened
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
    # Between two lanes with the new one closed by now: back to the nearer one
    return np.where(world.speed > 2.0, best, world.target_lane)


def _neighbours(world: DrivingWorld) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """[N, lanes] each: gaps to the nearest vehicles ahead and behind in each lane, then their speeds."""
    distance = world.ahead()
    offset = world.other_offset + 1.5 * world.other_side_speed  # where they will be in a moment
    centres = LANE_CENTRES[None, :, None]
    in_lane = (
        np.minimum(np.abs(offset[:, None] - centres), np.abs(world.other_offset[:, None] - centres))
        < 0.5 * LANE_WIDTH + 0.6
    )
    in_lane &= world.other_active[:, None]
    found = []
    for sign in (1.0, -1.0):
        gaps = np.where(
            in_lane & (sign * distance[:, None] >= (0.0 if sign > 0 else 1e-9)), sign * distance[:, None], 1e3
        )
        nearest = np.argmin(gaps, axis=2)
        gap = np.take_along_axis(gaps, nearest[:, :, None], axis=2)[:, :, 0] - VEHICLE_LENGTH
        speed = np.take_along_axis(world.other_speed, nearest, axis=1)
        found += [gap, np.where(gap < 900.0, speed, CRUISE_SPEED if sign > 0 else 0.0)]
    return found[0], found[2], found[1], found[3]


def _acceleration(world: DrivingWorld, lane: np.ndarray) -> np.ndarray:
    """[N]: behind what is in the way in the present lane and in the chosen one; slower in bends."""
    rows = np.arange(world.num_envs)
    ahead, _, ahead_speed, _ = _neighbours(world)
    bend = np.abs(world.curvature(_LOOK_AHEAD)).max(axis=1)
    wanted = np.minimum(CRUISE_SPEED, np.sqrt(SIDEWAYS_ACCELERATION / np.maximum(bend, 1e-3)))
    result = np.clip(1.5 * (wanted - world.speed), -3.0, 3.0)
    for number, own in enumerate((lane, world.target_lane)):
        gap, speed = ahead[rows, own], ahead_speed[rows, own]
        closing = world.speed - speed
        # A leader that is being passed needs less room: only what braking down to its speed takes
        headway = HEADWAY if number == 0 else 0.3
        gap_wanted = STANDING_GAP + headway * world.speed
        gap_wanted += np.maximum(closing, 0.0) * np.abs(closing) / (2 * COMFORTABLE_BRAKE)
        follow = 1.2 * (gap - gap_wanted) - 1.2 * closing
        result = np.minimum(result, np.where(gap < 60.0, follow, result))
    return np.clip(result, -MAX_ACCELERATION, MAX_ACCELERATION)


def _steering(world: DrivingWorld, lane: np.ndarray) -> np.ndarray:
    """[N]: the bend's own curvature, and what brings the heading to one that leads to the lane's centre."""
    speed = np.maximum(world.speed, 2.0)
    error = world.road_offset - LANE_CENTRES[lane]
    side_speed = np.clip(-0.7 * error, -MAX_SIDE_SPEED, MAX_SIDE_SPEED)
    heading = np.arcsin(np.clip(side_speed / speed, -0.3, 0.3))
    bend = world.curvature(np.array([0.0, 2.0])).mean(axis=1)
    bend = bend / np.maximum(1.0 - bend * world.road_offset, 0.3)
    direction = world.heading_error + np.arctan(
        0.5 * np.tan(world.steering)
    )  # it moves a little inwards of its heading
    curvature = bend + 2.0 * (heading - direction) / speed
    return np.arctan(WHEELBASE * curvature)
