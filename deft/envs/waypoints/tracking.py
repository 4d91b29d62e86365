"""From waypoints to accelerator and steering: pure pursuit and a speed law, the same in every waypoint world."""

from __future__ import annotations

import numpy as np

SPEED_GAIN = 2.0  # acceleration (m/s²) for each m/s that is missing
LOOK_AHEAD_SECONDS, SHORTEST_LOOK_AHEAD = 0.7, 4.0
SPEED_SECONDS = 1.0  # over which the speed that a path asks for is taken


def pursue(
    path: np.ndarray, speed: np.ndarray, waypoint_seconds: float, elapsed: float
) -> tuple[np.ndarray, np.ndarray]:
    """Acceleration and curvature [N] along paths [N, 1 + K, 2] in the vehicles' present frames.

    The path begins where it was planned, `elapsed` seconds ago; its other points are `waypoint_seconds` apart. The
    speed is that of the second ahead; κ = 2 y / d² leads to the point of the path at the look-ahead distance.
    """
    segments = np.linalg.norm(np.diff(path, axis=1), axis=-1)
    first = min(int(elapsed / waypoint_seconds), segments.shape[1] - 1)
    last = first + max(1, round(SPEED_SECONDS / waypoint_seconds))
    acceleration = SPEED_GAIN * (segments[:, first:last].mean(1) / waypoint_seconds - speed)
    goal = point_at(path, np.maximum(SHORTEST_LOOK_AHEAD, LOOK_AHEAD_SECONDS * speed))
    distance = np.maximum(np.linalg.norm(goal, axis=-1), 0.5)
    # Beside or behind the vehicle there is nothing to steer to: it stands, or nearly.
    return acceleration, np.where(goal[:, 0] > 0.2, 2 * goal[:, 1] / distance**2, 0.0)


def point_at(path: np.ndarray, distance: np.ndarray) -> np.ndarray:
    """The first point [N, 2] of each path [N, P, 2] at this distance [N] from the origin; its last where none is."""
    reach = np.linalg.norm(path, axis=-1)
    reach[:, 0] = np.minimum(reach[:, 0], distance - 1e-6)
    beyond = reach >= distance[:, None]
    after = np.where(beyond.any(1), beyond.argmax(1), path.shape[1] - 1)
    before, rows = after - 1, np.arange(len(path))
    share = (distance - reach[rows, before]) / np.maximum(reach[rows, after] - reach[rows, before], 1e-6)
    share = np.clip(share, 0.0, 1.0)[:, None]
    return path[rows, before] * (1 - share) + path[rows, after] * share
