"""Top-down images of the driving simulator in numpy, for many environments at once: observations and video frames.

The position of a pixel on the map gives its angle, the road's table by angle gives arc length and offset from the
centre line, and these two give its colour. Vehicles are drawn on top.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from deft.envs.driving.road import NUM_ANGLES, bin_of
from deft.envs.driving.simulator import (
    HALF_ROAD,
    LANE_CENTRES,
    LANE_WIDTH,
    MAX_SPEED,
    NUM_LANES,
    VEHICLE_LENGTH,
    VEHICLE_WIDTH,
    DrivingSimulator,
)

VIEW_SIZE = 48.0  # metres, the side of the visible square
VIEW_FORWARD, VIEW_LEFT = 36.0, 24.0  # of it ahead of the ego, and to its left
RENDER_SIZE = 480

Colour = tuple[int, int, int]
Poses = tuple[np.ndarray, np.ndarray, np.ndarray]  # [V] each, in the ego frame: forward, left, heading
GRASS: Colour = (96, 136, 78)
STRIPE: Colour = (88, 127, 72)
SHOULDER: Colour = (140, 128, 104)
ROAD: Colour = (66, 69, 76)
PAINT: Colour = (236, 236, 228)
ROUTE: Colour = (64, 176, 240)
EGO: Colour = (250, 214, 60)
TRAFFIC: Colour = (226, 74, 58)
TRAFFIC_COLOURS: tuple[Colour, ...] = (
    (214, 69, 57),
    (226, 226, 222),
    (150, 96, 190),
    (58, 160, 140),
    (228, 128, 52),
    (120, 130, 145),
)
GLASS: Colour = (34, 42, 54)
BRAKE_LIGHT: Colour = (255, 40, 40)
SHADOW: Colour = (16, 18, 20)
GAUGE: Colour = (250, 214, 60)

OFFSET_BINS = 1024
MAX_OFFSET = 8.0  # metres from the centre line; beyond it is grass
DASH, DASHES_A_MARK = 3.0, 3  # a lane mark is 3 m long, one every 9 m
ROUTE_WIDTH = 0.7
GOAL_DEPTH = 1.2  # metres of each of the finish line's two rows of squares
# Kinds of road sections: plain, the route in one of the lanes, or a row of the finish line
_PLAIN, _GOAL = 0, 1 + NUM_LANES
_NUM_KINDS = _GOAL + 2


def images(
    simulator: DrivingSimulator, size: int, index: np.ndarray | None = None, detailed: bool = False
) -> np.ndarray:
    """Return uint8 [R, 3, size, size]: the environments `index` [R], or all, each around its ego, heading up.

    `detailed` images are for videos.
    """
    index = np.arange(simulator.num_envs) if index is None else index
    pixels = _ground(simulator, size, index)
    _paint_traffic(simulator, pixels, index, detailed)
    _paint_ego(simulator, pixels, index, detailed)
    return pixels


def render(simulator: DrivingSimulator, row: int, size: int = RENDER_SIZE) -> np.ndarray:
    """Return an image of one environment for videos, uint8 [size, size, 3]."""
    return np.ascontiguousarray(images(simulator, size, np.array([row]), detailed=True)[0].transpose(1, 2, 0))


# ----------------------------------------------------------------------------------------------------------- the ground


def _ground(simulator: DrivingSimulator, size: int, index: np.ndarray) -> np.ndarray:
    """Draw road and grass, [R, 3, size, size]; in float32, whose error on this map is below a centimetre."""
    single = np.float32
    scale = VIEW_SIZE / size
    centres = (np.arange(size) + 0.5) * scale
    forward, left = (VIEW_FORWARD - centres).astype(single), (VIEW_LEFT - centres).astype(single)
    cosine, sine = np.cos(simulator.heading)[index, None], np.sin(simulator.heading)[index, None]
    direction = simulator.roads.direction[index, None]
    position = simulator.position[index]
    # map = position + rotation · (forward, left); a mirrored road uses mirrored coordinates
    x = (position[:, :1] + cosine * forward).astype(single)[:, :, None] - (sine * left).astype(single)[:, None]
    y = (direction * (position[:, 1:] + sine * forward)).astype(single)[:, :, None]
    y = y + (direction * cosine * left).astype(single)[:, None]

    bins = bin_of(x, y)
    bins += (index * NUM_ANGLES).astype(np.int32)[:, None, None]
    table = simulator.roads.by_angle.reshape(-1, 4).take(bins.ravel(), axis=0).reshape(*bins.shape, 4)
    np.multiply(x, x, out=x)
    np.multiply(y, y, out=y)
    x += y
    outward = np.sqrt(x, out=x)
    outward -= table[..., 0]  # beyond the centre line, along the ray
    arc = table[..., 3] * outward
    arc += table[..., 1]  # of the foot on the centre line
    offset = table[..., 2] * outward
    offset *= direction.astype(single)[:, :, None]  # to the right

    bins_a_metre = OFFSET_BINS / (2 * MAX_OFFSET)
    offset *= single(-bins_a_metre)
    offset += single(OFFSET_BINS / 2)
    np.minimum(np.maximum(offset, single(0.0), out=offset), single(OFFSET_BINS - 1), out=offset)
    look = offset.astype(np.int32)
    look += _kinds(simulator, index, arc) * OFFSET_BINS
    colours = _colours(size)
    pixels = np.empty((len(index), 3, size, size), np.uint8)
    flat = look.reshape(len(index), -1)
    for channel in range(3):
        pixels[:, channel] = colours[channel].take(flat).reshape(len(index), size, size)
    return pixels


def _kinds(simulator: DrivingSimulator, index: np.ndarray, arc: np.ndarray) -> np.ndarray:
    """int32 [R, size, size]: the row of the colour table for each arc length."""
    single = np.float32
    phase = arc * single(1 / (DASH * DASHES_A_MARK))
    phase -= np.floor(phase)
    length = simulator.roads.length[index].astype(single)[:, None, None]
    ahead = arc - simulator.arc[index].astype(single)[:, None, None]
    ahead -= length * np.rint(ahead / length)
    remaining = simulator.remaining[index].astype(single)
    on_route = ahead > single(3.0)
    on_route &= ahead < remaining[:, None, None]
    kinds = on_route * (1 + simulator.target_lane[index]).astype(np.int32)[:, None, None]
    for row in np.flatnonzero(remaining < VIEW_SIZE):
        beyond = np.floor((ahead[row] - remaining[row]) * single(1 / GOAL_DEPTH))
        kinds[row][beyond == 0] = _GOAL
        kinds[row][beyond == 1] = _GOAL + 1
    kinds += (phase < single(1 / DASHES_A_MARK)) * np.int32(_NUM_KINDS)
    return kinds


@cache
def _colours(size: int) -> np.ndarray:
    """uint8 [3, 2 · kinds · offsets]: colours by mark or gap, kind of section, and offset to the left; smooth edges."""
    scale = VIEW_SIZE / size
    offset = (np.arange(OFFSET_BINS) + 0.5) * (2 * MAX_OFFSET / OFFSET_BINS) - MAX_OFFSET
    table = np.empty((2, _NUM_KINDS, OFFSET_BINS, 3))
    mark = max(0.25, 0.65 * scale)  # wide enough for small images

    def paint(row: np.ndarray, centre: float, width: float, colour: Colour, opacity: float = 1.0) -> None:
        # The fraction of a pixel around each offset that lies in the stripe
        low, high = offset - 0.5 * scale, offset + 0.5 * scale
        inside = np.minimum(high, centre + width / 2) - np.maximum(low, centre - width / 2)
        row += (np.array(colour) - row) * (opacity * np.clip(inside / scale, 0, 1))[:, None]

    for dash in range(2):
        for kind in range(_NUM_KINDS):
            row = table[dash, kind]
            row[:] = STRIPE if dash else GRASS
            paint(row, 0.0, 2 * HALF_ROAD + 1.2, SHOULDER)
            paint(row, 0.0, 2 * HALF_ROAD, ROAD)
            for side in (-1, 1):
                paint(row, side * (HALF_ROAD - 0.25), mark, PAINT)
            for line in range(1, NUM_LANES):
                if dash:
                    paint(row, line * LANE_WIDTH - HALF_ROAD, mark, PAINT)
            if _PLAIN < kind < _GOAL:
                paint(row, float(LANE_CENTRES[kind - 1]), ROUTE_WIDTH, ROUTE, 0.85)
            if kind >= _GOAL:
                squares = np.floor((offset + HALF_ROAD) / GOAL_DEPTH).astype(int) + kind
                inside = np.abs(offset) < HALF_ROAD
                row[inside] = np.where(squares % 2, 245, 30)[inside, None]
    return np.ascontiguousarray(np.round(table).astype(np.uint8).reshape(-1, 3).T)


# ------------------------------------------------------------------------------------------------------------- vehicles


def _paint_traffic(simulator: DrivingSimulator, pixels: np.ndarray, index: np.ndarray, detailed: bool) -> None:
    x, y = (simulator.other_position[index, :, axis] - simulator.position[index, None, axis] for axis in (0, 1))
    cosine, sine = np.cos(simulator.heading)[index, None], np.sin(simulator.heading)[index, None]
    forward, left = x * cosine + y * sine, y * cosine - x * sine
    margin = VEHICLE_LENGTH
    seen = simulator.other_active[index] & (forward < VIEW_FORWARD + margin) & (np.abs(left) < VIEW_LEFT + margin)
    seen &= forward > VIEW_FORWARD - VIEW_SIZE - margin
    owners, numbers = np.nonzero(seen)
    if not len(owners):
        return
    heading = simulator.other_heading[index] - simulator.heading[index, None]
    colours = np.array(TRAFFIC_COLOURS)[numbers % len(TRAFFIC_COLOURS)] if detailed else np.array([TRAFFIC])
    braking = (simulator.other_acceleration[index] < -0.7)[seen]
    _paint_vehicles(pixels, owners, (forward[seen], left[seen], heading[seen]), colours, braking, detailed)


def _paint_ego(simulator: DrivingSimulator, pixels: np.ndarray, index: np.ndarray, detailed: bool) -> None:
    """Draw the ego, and on the left edge of the image a bar with the height speed / MAX_SPEED."""
    pose = (np.zeros(len(index)),) * 3
    braking = simulator.acceleration[index] < -0.7
    _paint_vehicles(pixels, np.arange(len(index)), pose, np.array([EGO]), braking, detailed)
    size = pixels.shape[2]
    width = max(size // 48, 1)
    filled = np.arange(size, 0, -1) <= (simulator.speed[index] / MAX_SPEED * size)[:, None]  # [R, size]
    for channel in range(3):
        strip = pixels[:, channel, :, :width]
        strip[:] = np.where(filled, GAUGE[channel], 20)[:, :, None]


def _paint_vehicles(
    pixels: np.ndarray, owners: np.ndarray, poses: Poses, colours: np.ndarray, braking: np.ndarray, detailed: bool
) -> None:
    """Draw vehicles, each as a few boxes."""
    forward, left, heading = poses
    cosine, sine = np.cos(heading), np.sin(heading)

    def box(ahead: float, length: float, width: float, colour: np.ndarray | Colour) -> None:
        moved = (forward + ahead * cosine, left + ahead * sine, heading)
        _paint_boxes(pixels, owners, moved, (length, width), np.atleast_2d(colour))

    if detailed:
        shadow = (forward - 0.35, left - 0.35, heading)
        _paint_boxes(pixels, owners, shadow, (VEHICLE_LENGTH, VEHICLE_WIDTH), np.array([SHADOW]), 0.45)
        box(0.0, VEHICLE_LENGTH, VEHICLE_WIDTH, (colours * 0.55).astype(int))
        box(0.0, VEHICLE_LENGTH - 0.25, VEHICLE_WIDTH - 0.25, colours)
        box(-1.35, 0.5, 1.45, GLASS)
    else:
        box(0.0, VEHICLE_LENGTH, VEHICLE_WIDTH, colours)
    box(0.65, 0.8, 1.6, GLASS)  # the windscreen shows the heading
    if detailed and braking.any():
        lights = ((forward - 2.1 * cosine)[braking], (left - 2.1 * sine)[braking], heading[braking])
        _paint_boxes(pixels, owners[braking], lights, (0.3, 1.8), np.array([BRAKE_LIGHT]))


def _paint_boxes(
    pixels: np.ndarray,
    owners: np.ndarray,
    poses: Poses,
    size_metres: tuple[float, float],
    colours: np.ndarray,
    opacity: float = 1.0,
) -> None:
    """Blend V rotated boxes into the images of their environments, each over a square patch of pixels around it."""
    (forward, left, heading), (length, width) = poses, size_metres
    size = pixels.shape[2]
    scale = VIEW_SIZE / size
    patch = 2 * int(np.ceil(0.5 * np.hypot(length, width) / scale)) + 2
    # Pixel coordinates of the centres; the patch's pixels; their positions along and across each box, in pixels
    centre_row, centre_column = (VIEW_FORWARD - forward) / scale, (VIEW_LEFT - left) / scale
    steps = np.arange(patch) - patch // 2
    rows = np.floor(centre_row).astype(np.int64)[:, None] + steps
    columns = np.floor(centre_column).astype(np.int64)[:, None] + steps
    up = (centre_row[:, None] - rows - 0.5).astype(np.float32)[:, :, None]
    to_left = (centre_column[:, None] - columns - 0.5).astype(np.float32)[:, None, :]
    cosine = np.cos(heading).astype(np.float32)[:, None, None]
    sine = np.sin(heading).astype(np.float32)[:, None, None]
    half = np.float32(0.5)
    along = np.float32(length / 2 / scale) + half - np.abs(up * cosine + to_left * sine)
    across = np.float32(width / 2 / scale) + half - np.abs(to_left * cosine - up * sine)
    # A box thinner than a pixel covers a fraction of it
    most_along, most_across = np.float32(min(length / scale, 1.0)), np.float32(min(width / scale, 1.0))
    coverage = np.minimum(np.maximum(along, 0), most_along) * np.minimum(np.maximum(across, 0), most_across)
    coverage *= np.float32(opacity)
    inside_rows, inside_columns = (rows >= 0) & (rows < size), (columns >= 0) & (columns < size)
    vehicle, row, column = np.nonzero((coverage > 0) & inside_rows[:, :, None] & inside_columns[:, None, :])
    weight = coverage[vehicle, row, column]
    pixel = rows[vehicle, row] * size + columns[vehicle, column] + owners[vehicle] * (3 * size * size)
    flat = pixels.reshape(-1)
    which = vehicle if len(colours) > 1 else np.zeros_like(vehicle)
    for channel in range(3):
        before = flat[pixel].astype(np.float32)
        after = before + (colours[which, channel].astype(np.float32) - before) * weight
        flat[pixel] = (after + half).astype(np.uint8)
        pixel = pixel + size * size
