"""Closed roads of the driving simulator: smooth random loops around the origin, one per environment.

`DrivingSimulator` follows them by arc length; `rendering.py` finds points by their angle. All tables of a road follow
from its 10 `parameters`.
"""

from __future__ import annotations

import numpy as np

NUM_POINTS = 512  # of the centre line, at equal distances
NUM_ANGLES = 4096  # of the table by angle; 0.1 to 0.2 m of road each
HARMONICS = (2, 3, 4, 5)
AMPLITUDES = (0.11, 0.075, 0.045, 0.028)  # of the harmonics at bend 1, in parts of the radius
RADII = (62.0, 76.0)  # metres
MAP_RADIUS = 112.0  # no road reaches further: 76 · (1 + Σ AMPLITUDES) = 95.6, then half the road and some grass
NUM_PARAMETERS = 2 + 2 * len(HARMONICS)

# Angles θ over a full turn from -π/2. They are uniform in p, which is cheaper to compute than θ (`bin_of`): with
# q = y / (|x| + |y|), p is q on the right side of the map (-1 to 1) and 2 - q on the left (1 to 3).
_P = np.arange(NUM_ANGLES) * (4 / NUM_ANGLES) - 1.0
_Q = np.where(_P <= 1.0, _P, 2.0 - _P)
_ANGLES = np.arctan2(_Q, np.where(_P <= 1.0, 1.0, -1.0) * (1.0 - np.abs(_Q)))
_ANGLES += np.where(np.less(_ANGLES, -np.pi / 2 - 1e-9), 2 * np.pi, 0.0)
_HALF_STEPS = 0.5 * np.append(np.diff(_ANGLES), 1.5 * np.pi - _ANGLES[-1])
_WAVES = [wave for k in HARMONICS for wave in (np.cos(k * _ANGLES), np.sin(k * _ANGLES))]
_SLOPES = [slope for k in HARMONICS for slope in (-k * np.sin(k * _ANGLES), k * np.cos(k * _ANGLES))]
_BASIS = np.concatenate([_WAVES, _SLOPES], axis=1)  # [8, 2 · angles]: each wave, then its derivative
_CLOSED_ANGLES = np.append(_ANGLES, 1.5 * np.pi)
_INDICES = np.arange(NUM_ANGLES + 1.0)


def bin_of(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the index, int32, of the nearest angle of the table for points on the map, float32."""
    single = np.float32
    p = y / (np.abs(x) + np.abs(y))
    is_left = x < 0
    p *= single(1.0) - single(2.0) * is_left
    p += single(2.0) * is_left
    p *= single(NUM_ANGLES / 4)
    p += single(NUM_ANGLES / 4 + 0.5)
    return p.astype(np.int32) & (NUM_ANGLES - 1)


def draw_parameters(uniforms: np.ndarray, bend: np.ndarray) -> np.ndarray:
    """Return parameters of roads from numbers in [0, 1), both [R, NUM_PARAMETERS].

    They are radius, direction, then cosine and sine amplitudes. `bend` [R] scales the curves, 0 (circles) to 1.
    """
    parameters = np.empty_like(uniforms)
    parameters[:, 0] = RADII[0] + (RADII[1] - RADII[0]) * uniforms[:, 0]
    parameters[:, 1] = np.where(uniforms[:, 1] < 0.5, 1.0, -1.0)  # 1: counterclockwise; -1: its mirror image
    for number, limit in enumerate(AMPLITUDES):
        amplitude = bend * (limit * (0.4 + 0.6 * uniforms[:, 2 + 2 * number]))
        phase = 2 * np.pi * uniforms[:, 3 + 2 * number]
        parameters[:, 2 + 2 * number] = amplitude * np.cos(phase)
        parameters[:, 3 + 2 * number] = amplitude * np.sin(phase)
    return parameters


class Roads:
    """N roads. The left side of a road is the positive one, in offsets and in curvature."""

    def __init__(self, num_roads: int) -> None:
        self.parameters = np.zeros((num_roads, NUM_PARAMETERS))
        self.length = np.ones(num_roads)
        """[N]: metres."""
        self.direction = np.ones(num_roads)
        """[N]: 1 counterclockwise, -1 clockwise."""
        self.points = np.zeros((num_roads, NUM_POINTS + 1, 4))
        """[N, K + 1, 4]: x, y, heading (not wrapped) and curvature of the centre line; the last point is the first."""
        self.by_angle = np.zeros((num_roads, NUM_ANGLES, 4), np.float32)
        """[N, A, 4]: the point where the ray at an angle crosses the centre line: distance from the origin, arc length,
        and cosine and sine of the angle between the ray and the road's normal."""
        self._first = np.arange(num_roads) * (NUM_POINTS + 1)

    def build(self, index: np.ndarray, parameters: np.ndarray) -> None:
        """Set the roads of the environments `index` [R]. Every row is computed separately, so it does not depend on N.

        r(θ) = R (1 + Σ a_k cos kθ + b_k sin kθ); s(θ) = ∫ √(r² + r'²) dθ;
        heading = θ + π/2 - atan(r'/r); κ = (r² + 2 r'² - r r'') / (r² + r'²)^(3/2).
        """
        self.parameters[index] = parameters
        num_roads = len(index)
        radius, direction = parameters[:, :1], parameters[:, 1:2]
        shape = np.empty((num_roads, 2, NUM_ANGLES + 1))  # r and r' by angle, closed
        arc = np.zeros((num_roads, NUM_ANGLES + 1))
        angle = np.empty((num_roads, NUM_POINTS))  # of the points at equal distances
        position = np.empty((num_roads, NUM_POINTS))  # the same as an index of the angles
        for number, row in enumerate(index.tolist()):
            r, dr = shape[number]
            shape[number, :, :-1] = np.dot(parameters[number, 2:], _BASIS).reshape(2, NUM_ANGLES) * radius[number]
            r[:-1] += radius[number]
            r[-1], dr[-1] = r[0], dr[0]
            pace = np.sqrt(r * r + dr * dr)  # ds/dθ
            np.cumsum((pace[:-1] + pace[1:]) * _HALF_STEPS, out=arc[number, 1:])
            even = np.arange(NUM_POINTS) * (arc[number, -1] / NUM_POINTS)
            angle[number] = np.interp(even, arc[number], _CLOSED_ANGLES)
            position[number] = np.interp(even, arc[number], _INDICES)
            table = self.by_angle[row]
            table[:, 0], table[:, 1] = r[:-1], arc[number, :-1]
            table[:, 2], table[:, 3] = (r / pace)[:-1], (dr / pace)[:-1]
        self.length[index], self.direction[index] = arc[:, -1], direction[:, 0]

        whole = np.minimum(position.astype(np.int64), NUM_ANGLES - 1)
        rows = np.arange(num_roads)[:, None]
        start, step = shape[rows, :, whole], shape[rows, :, whole + 1] - shape[rows, :, whole]  # [R, K, 2]
        r, dr = np.moveaxis(start + step * (position - whole)[:, :, None], 2, 0)
        ddr = 0.5 * step[:, :, 1] / _HALF_STEPS[whole]
        square = r * r + dr * dr
        points = np.empty((num_roads, NUM_POINTS + 1, 4))
        points[:, :-1, 0] = r * np.cos(angle)
        points[:, :-1, 1] = r * np.sin(angle) * direction
        points[:, :-1, 2] = (angle + np.pi / 2 - np.arctan(dr / r)) * direction
        points[:, :-1, 3] = (square + dr * dr - r * ddr) / (square * np.sqrt(square)) * direction
        points[:, -1] = points[:, 0]
        points[:, -1, 2] += 2 * np.pi * direction[:, 0]
        self.points[index] = points

    def at(self, arc: np.ndarray) -> np.ndarray:
        """Interpolate the centre line at arc lengths [N, …] in [0, length): [N, …, 4] as in `points`."""
        shape = (len(self.length),) + (1,) * (arc.ndim - 1)
        position = arc * (NUM_POINTS / self.length).reshape(shape)
        whole = np.minimum(position.astype(np.int64), NUM_POINTS - 1)
        flat = self.points.reshape(-1, 4)
        first = whole + self._first.reshape(shape)
        start = flat.take(first, axis=0)
        return start + (flat.take(first + 1, axis=0) - start) * (position - whole)[..., None]

    def wrap(self, arc: np.ndarray) -> np.ndarray:
        """Wrap arc lengths, at most one lap outside, to [0, length)."""
        length = self.length.reshape((-1,) + (1,) * (arc.ndim - 1))
        arc = np.where(arc < 0, arc + length, arc)
        return np.where(arc >= length, arc - length, arc)

    def locate(self, arc: np.ndarray, offset: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return positions [N, …, 2] at `offset` to the left of the centre line, and the road's heading there."""
        line = self.at(arc)
        heading = np.ascontiguousarray(line[..., 2])
        cosine, sine = np.cos(heading), np.sin(heading)
        position = np.stack([line[..., 0] - offset * sine, line[..., 1] + offset * cosine], axis=-1)
        return position, heading
