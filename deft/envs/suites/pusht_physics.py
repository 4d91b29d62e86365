"""PushT's simulator step by step: what gym-pusht's `step` computes, in less than half the time.

`PushTEnv` moves the disc and measures coverage with it, and the scripted expert places the block's corners. The
simulator is an argument: this module imports neither gym-pusht nor pymunk.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def move_disc(simulator: Any, action: np.ndarray) -> None:
    """Move the disc towards a position [2] for the time of one action, by gym-pusht's PD controller.

    The operations are those of its `step` in the same order, on Python numbers instead of small arrays.
    """
    agent, space, dt = simulator.agent, simulator.space, simulator.dt
    k_p, k_v = simulator.k_p, simulator.k_v
    x, y = action.tolist()
    simulator._last_action = action
    for _ in range(int(1 / (dt * simulator.control_hz))):
        (place_x, place_y), (speed_x, speed_y) = agent.position, agent.velocity
        # v ← v + (k_p (a − x) − k_v v) dt
        agent.velocity = (
            speed_x + (k_p * (x - place_x) + k_v * (0 - speed_x)) * dt,
            speed_y + (k_p * (y - place_y) + k_v * (0 - speed_y)) * dt,
        )
        space.step(dt)


class Overlap:
    """The corners of the block, the covered share of the target, and the distance of the block from it."""

    def __init__(self, simulator: Any) -> None:
        shapes = [shape.get_vertices() for shape in simulator._block_shapes]  # of the bar and the stem, 4 points each
        self._points = np.array(shapes, float).reshape(-1, 2)
        self._goal_corners = self.corners(simulator.goal_pose)
        self._goal = self._polygons(self._goal_corners)

    def corners(self, pose: np.ndarray) -> np.ndarray:
        """The corners [8, 2] of the bar and of the stem at a pose [3], in the order of gym-pusht's keypoints."""
        return place(self._points, pose[None])[0]

    def _polygons(self, corners: np.ndarray) -> Any:
        import shapely

        return shapely.multipolygons(shapely.polygons(corners.reshape(2, 4, 2)))

    def coverage(self, corners: np.ndarray) -> float:
        """Share of the target that the block covers with its corners there."""
        return float(self._goal.intersection(self._polygons(corners)).area / self._goal.area)

    def distance(self, corners: np.ndarray) -> float:
        """Mean distance of the block's corners from those of the target."""
        gaps = corners - self._goal_corners
        return float(np.sqrt((gaps * gaps).sum(1)).mean())


def block_pose(simulator: Any) -> np.ndarray:
    """Position and angle of the block [3]."""
    return np.array([*simulator.block.position, simulator.block.angle])


def outline(simulator: Any) -> np.ndarray:
    """The corners of the block [8, 2] in its own frame, in order around it.

    The list of its shapes is used: `block.shapes` is a set, whose order differs from process to process.
    """
    bar, stem = (np.array(shape.get_vertices()) for shape in simulator._block_shapes)
    low, high = bar[:, 1].min(), bar[:, 1].max()
    wide, narrow, end = bar[:, 0].max(), stem[:, 0].max(), stem[:, 1].max()
    points = [(-wide, low), (wide, low), (wide, high), (narrow, high), (narrow, end), (-narrow, end), (-narrow, high)]
    return np.array([*points, (-wide, high)])


def place(points: np.ndarray, poses: np.ndarray) -> np.ndarray:
    """Points [K, 2] of a body's frame at its poses [N, 3] of x, y and angle: [N, K, 2]."""
    cosine, sine = np.cos(poses[:, 2:]), np.sin(poses[:, 2:])
    found = np.empty((len(poses), len(points), 2))
    found[..., 0] = cosine * points[:, 0] - sine * points[:, 1] + poses[:, :1]
    found[..., 1] = sine * points[:, 0] + cosine * points[:, 1] + poses[:, 1:2]
    return found
