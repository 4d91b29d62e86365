"""From waypoints to accelerator and steering: pure pursuit and a speed controller, for every waypoint simulator."""

from __future__ import annotations

import numpy as np

SPEED_GAIN = 2.0  # acceleration (m/s²) per m/s of speed error
LOOK_AHEAD_SECONDS, SHORTEST_LOOK_AHEAD = 0.7, 4.0
SPEED_SECONDS = 1.0  # the part of a path from which its speed is computed


def pursue(
    path: np.ndarray, speed: np.ndarray, waypoint_seconds: float, elapsed: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return acceleration and curvature [N] along paths [N, 1 + K, 2] in the vehicles' present frames.

    The path starts where it was planned, `elapsed` seconds ago; its points are `waypoint_seconds` apart. The speed is
    that of the next second; κ = 2 y / d² leads to the point of the path at the look-ahead distance.
    """
    segments = np.linalg.norm(np.diff(path, axis=1), axis=-1)
    first = min(int(elapsed / waypoint_seconds), segments.shape[1] - 1)
    last = first + max(1, round(SPEED_SECONDS / waypoint_seconds))
    acceleration = SPEED_GAIN * (segments[:, first:last].mean(1) / waypoint_seconds - speed)
    goal = point_at(path, np.maximum(SHORTEST_LOOK_AHEAD, LOOK_AHEAD_SECONDS * speed))
    distance = np.maximum(np.linalg.norm(goal, axis=-1), 0.5)
    # A goal beside or behind the vehicle: it is almost at rest, and does not steer.
    return acceleration, np.where(goal[:, 0] > 0.2, 2 * goal[:, 1] / distance**2, 0.0)


def point_at(path: np.ndarray, distance: np.ndarray) -> np.ndarray:
    """Return the first point [N, 2] of each path [N, P, 2] at this distance [N] from the origin, or its last point."""
    reach = np.linalg.norm(path, axis=-1)
    reach[:, 0] = np.minimum(reach[:, 0], distance - 1e-6)
    beyond = reach >= distance[:, None]
    after = np.where(beyond.any(1), beyond.argmax(1), path.shape[1] - 1)
    before, rows = after - 1, np.arange(len(path))
    share = (distance - reach[rows, before]) / np.maximum(reach[rows, after] - reach[rows, before], 1e-6)
    share = np.clip(share, 0.0, 1.0)[:, None]
    return path[rows, before] * (1 - share) + path[rows, after] * share


def to_ego(points: np.ndarray, position: np.ndarray, heading: float) -> np.ndarray:
    """Transform points [P, 2] of a map with y to the right (highway-env, CARLA) to x forward and y left."""
    cosine, sine = np.cos(heading), np.sin(heading)
    x, y = (points - position).T
    return np.stack([x * cosine + y * sine, x * sine - y * cosine], 1)


def to_map(points: np.ndarray, position: np.ndarray, heading: float) -> np.ndarray:
    """Transform points of the vehicle's frame to the map: the inverse of `to_ego`."""
    cosine, sine = np.cos(heading), np.sin(heading)
    x, y = points.T
    return np.stack([x * cosine + y * sine, x * sine - y * cosine], 1) + position
