"""A scripted expert of PushT: plans one straight push after another in a copy of the simulator.

`PushTEnv.expert_action` calls `PushPlanner.action`. A push starts beside the block and moves the disc in a straight
line; of all pushes that are tried, the one that brings the corners of the block nearest to those of the target is made.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from deft.envs.suites.pusht_physics import outline, place

RADIUS = 15.0  # of the disc
GAP = 5.0  # between disc and block at the start of a push
MARGIN = RADIUS + 4.0  # kept from the block on the way to it
LOW, HIGH = 20.0, 492.0  # where the disc may be
AROUND = 102.0  # radius of the circle on which the disc moves around the block, whose corners are within 77
SPEED, PUSH_SPEED = 30.0, 16.0  # largest distance between two actions
ANGLES = np.radians((-35.0, -15.0, 0.0, 15.0, 35.0))  # of a push to the normal of the block's edge
STRIDE = 2.0  # of the disc in a step of the simulator in which pushes are tried; their lengths are multiples of it
LONGEST = 116.0  # push, with the gap
POINTS_PER_EDGE = 4
TRAVEL_WEIGHT = 0.01  # of the way to the start of a push, against the mean distance of the corners
RETREAT = 20.0  # after a push, so that the way to the next one does not move the block
FOLLOWED = 40.0  # largest distance of an executed action, with noise, from the planned one
SETTLE = 3  # actions before and at the end of a push, until the disc has arrived


class PushPlanner:
    """Plans pushes for one simulator; `make` makes another one, in which they are tried."""

    def __init__(self, simulator: Any, make: Any) -> None:
        self._simulator, self._make = simulator, make
        self._copy: Any = None
        self._corners = self._goal = np.zeros((8, 2))  # of the block, in its own frame; of the target
        self._targets: list[np.ndarray] = []
        self._returned: np.ndarray | None = None

    def reset(self) -> None:
        """Forget the push under way."""
        self._targets, self._returned = [], None

    def action(self) -> np.ndarray:
        """Return the position to move the disc to. If another one was executed last, the push is planned again."""
        executed = self._simulator._last_action
        if not self._targets or self._returned is None or np.abs(executed - self._returned).max() > FOLLOWED:
            self._targets = self._plan()
        self._returned = self._targets.pop(0)
        return self._returned

    def _plan(self) -> list[np.ndarray]:
        """The way to the best push, and the push."""
        if self._copy is None:
            self._copy = self._make()
            self._copy.reset(seed=0)
            self._corners = outline(self._copy)
            self._goal = place(self._corners, self._copy.goal_pose[None])[0]
        own = self._simulator
        pose = (*own.block.position, own.block.angle)
        disc, corners = np.array(own.agent.position), place(self._corners, np.array([pose]))[0]
        starts = self._starts(corners)
        tried = [self._try(pose, start, direction) for start, direction in starts]
        owner = np.repeat(np.arange(len(tried)), [len(poses) for poses in tried])
        moved = place(self._corners, np.concatenate([np.zeros((0, 3)), *tried]))
        travel = np.array([np.linalg.norm(start - disc) for start, _ in starts])
        cost = np.linalg.norm(moved - self._goal, axis=2).mean(1) + TRAVEL_WEIGHT * travel[owner]
        ways: dict[int, list[np.ndarray] | None] = {}
        for best in np.argsort(cost, kind="stable"):
            index = int(owner[best])
            start, direction = starts[index]
            if index not in ways:
                ways[index] = approach(disc, start, corners)
            if (way := ways[index]) is not None:
                length = STRIDE * (best - np.searchsorted(owner, index) + 1)
                end = start + direction * length
                push = [*straight([start, end], PUSH_SPEED), *[end] * SETTLE, end - direction * RETREAT]
                return [*straight(way, SPEED), *[start] * SETTLE, *push]
        # The block is in a corner, or between the disc and every start: move towards the middle before the next plan.
        middle = disc + (256.0 - disc) / 2
        return [*straight([disc, middle], SPEED), *[middle] * SETTLE]

    def _starts(self, corners: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Positions beside the edges of the block, and directions of pushes from there."""
        found = []
        for one, two in zip(corners, np.roll(corners, -1, 0), strict=True):
            along = (two - one) / np.linalg.norm(two - one)
            normal = np.array([along[1], -along[0]])
            if inside((one + two) / 2 + normal, corners):
                normal = -normal
            for share in (np.arange(POINTS_PER_EDGE) + 0.5) / POINTS_PER_EDGE:
                start = one + share * (two - one) + normal * (RADIUS + GAP)
                if start.min() < LOW or start.max() > HIGH or distance(start, corners) < RADIUS + GAP - 1:
                    continue
                for angle in ANGLES:
                    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
                    found.append((start, turn @ -normal))
        return found

    def _try(self, pose: tuple[float, float, float], start: np.ndarray, direction: np.ndarray) -> np.ndarray:
        """Poses of the block [N, 3] while the disc moves on from `start`, one after each STRIDE.

        The disc has a constant velocity instead of that of the controller. Velocities are damped to 0 in each step of
        the simulator, so the block's pose depends only on the disc's path.
        """
        copy = self._copy
        block, agent, space = copy.block, copy.agent, copy.space
        block.velocity, block.angular_velocity = (0, 0), 0.0
        block.angle = pose[2]
        block.position = pose[:2]
        agent.position, agent.velocity = start.tolist(), (direction * STRIDE / copy.dt).tolist()
        space.reindex_shapes_for_body(block)
        space.reindex_shapes_for_body(agent)
        room = np.where(direction > 0, HIGH - start, start - LOW) / np.maximum(np.abs(direction), 1e-9)
        poses = []
        for _ in range(int(min(LONGEST, room.min()) / STRIDE)):
            space.step(copy.dt)
            poses.append((*block.position, block.angle))
        return np.array(poses).reshape(-1, 3)


def approach(disc: np.ndarray, start: np.ndarray, corners: np.ndarray) -> list[np.ndarray] | None:
    """Points of a way to `start` that keeps off the block, straight or on a circle around it; None: there is none."""
    if is_free([disc, start], corners):
        return [disc, start]
    centre = corners.mean(0)
    first, last = (np.arctan2(*(point - centre)[::-1]) for point in (disc, start))
    turn = (last - first + np.pi) % (2 * np.pi) - np.pi
    for angle in (turn, turn - np.sign(turn) * 2 * np.pi):
        angles = first + np.linspace(0.0, angle, max(2, int(abs(angle) / 0.25)))
        circle = centre + AROUND * np.stack([np.cos(angles), np.sin(angles)], 1)
        way = [disc, *np.clip(circle, LOW, HIGH), start]
        if is_free(way, corners):
            return way
    return None


def straight(points: list[np.ndarray], speed: float) -> list[np.ndarray]:
    """Positions on the lines between points, at most `speed` from each other."""
    found = []
    for one, two in pairwise(points):
        count = max(1, int(np.ceil(np.linalg.norm(two - one) / speed)))
        found += [one + (two - one) * number / count for number in range(1, count + 1)]
    return found


def is_free(way: list[np.ndarray], corners: np.ndarray) -> bool:
    """Whether the disc touches the block nowhere on a way; a disc that is near at the start may only move off."""
    gaps = np.array([distance(place, corners) for place in straight(way, 6.0)])
    return bool((gaps >= np.minimum(MARGIN, np.maximum.accumulate(gaps)) - 1).all())


def distance(point: np.ndarray, corners: np.ndarray) -> float:
    """Distance of a point from a polygon; 0 inside."""
    if inside(point, corners):
        return 0.0
    one, two = corners, np.roll(corners, -1, 0)
    edge = two - one
    share = np.clip(((point - one) * edge).sum(1) / (edge**2).sum(1), 0.0, 1.0)
    return float(np.linalg.norm(one + share[:, None] * edge - point, axis=1).min())


def inside(point: np.ndarray, corners: np.ndarray) -> bool:
    """Whether a polygon contains a point (the number of edges to one side is odd)."""
    one, two = corners, np.roll(corners, -1, 0)
    crosses = (one[:, 1] > point[1]) != (two[:, 1] > point[1])
    rise = np.where(crosses, two[:, 1] - one[:, 1], 1.0)
    at = one[:, 0] + (point[1] - one[:, 1]) * (two[:, 0] - one[:, 0]) / rise
    return bool((crosses & (point[0] < at)).sum() % 2)
