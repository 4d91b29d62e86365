"""The scripted experts: from what is where, the pose that the hand should go to next.

`TabletopEnv.expert_action` calls them and turns the pose into an action of its control mode. They keep no memory: the
phase is read from the world, so that an expert goes on from any state, a restored one or one that a policy led to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from deft.envs.tabletop.scene import TABLE_X, TABLE_Y
from deft.envs.tabletop.tasks import Goal, View, stack_place

OPEN, CLOSED = 1.0, -1.0
HOVER = 0.13  # metres above the table at which the hand travels
PUSH_HEIGHT = 0.022
CARRY = 0.05  # between a carried object's bottom and what it is carried over


@dataclass(slots=True)
class Waypoint:
    """Where the hand should be, pointing down."""

    position: np.ndarray
    yaw: float
    gripper: float


def waypoint(task: str, view: View, goal: Goal, yaws: np.ndarray, hand_yaw: float) -> Waypoint:
    """The next waypoint of a goal task. `yaws` are the objects' angles about the vertical."""
    if task == "push":
        return _push(view, goal)
    is_round = view.scene.objects[goal.index].shape != "box"
    yaw = 0.0 if is_round else _grasp_yaw(float(yaws[goal.index]))
    if task == "reach":
        return _reach(view, goal, yaw)
    if task == "pick":
        return _pick(view, goal, yaw, hand_yaw)
    return _place(view, goal, yaw, hand_yaw)


def exploring_waypoint(seed: int, step: int, top: float) -> Waypoint:
    """A random place over the table, another one every 12 steps."""
    random = np.random.default_rng([seed, 7, step // 12])
    position = random.uniform([TABLE_X[0] + 0.12, TABLE_Y[0] + 0.1, 0.02], [TABLE_X[1] - 0.12, TABLE_Y[1] - 0.1, 0.3])
    position[2] += top
    return Waypoint(position, float(random.uniform(-1, 1)), float(random.choice([OPEN, CLOSED])))


def _grasp_yaw(yaw: float) -> float:
    """A cube looks the same after a quarter turn: the nearest to straight."""
    return (yaw + math.pi / 4) % (math.pi / 2) - math.pi / 4


def _above(place: np.ndarray, height: float) -> np.ndarray:
    return np.array([place[0], place[1], height])


def _approach(view: View, place: np.ndarray, yaw: float, gripper: float) -> Waypoint | None:
    """Travel to above a place and go down to it; None when the hand is there."""
    hover = view.top + HOVER
    tcp = view.tcp
    shift = math.dist(tcp[:2], place[:2])
    height = float(tcp[2] - place[2])
    if shift < 0.012 and height < 0.012:
        return None
    if shift < (0.012 if tcp[2] > hover - 0.02 else 0.025):
        return Waypoint(place, yaw, gripper)
    if shift > 0.04 and tcp[2] < hover - 0.04:  # not through things: up first
        return Waypoint(_above(tcp, hover), yaw, gripper)
    return Waypoint(_above(place, hover), yaw, gripper)


def _reach(view: View, goal: Goal, yaw: float) -> Waypoint:
    place = view.places[goal.index]
    return _approach(view, place, yaw, OPEN) or Waypoint(place, yaw, OPEN)


def _grasp(view: View, goal: Goal, yaw: float) -> Waypoint | None:
    """Get the object between the fingers; None when they hold it."""
    item, place = view.scene.objects[goal.index], view.places[goal.index].copy()
    is_between = math.dist(view.tcp[:2], place[:2]) < 0.02 and abs(view.tcp[2] - place[2]) < 0.025
    # A cube that is held askew keeps the fingers apart by up to its diagonal, √2 times its width.
    widest = item.half_width * (1.42 if item.shape == "box" else 1.0)
    is_touched = item.half_width - 0.003 < view.opening < widest + 0.003
    if is_between and is_touched and view.squeeze > 0.02:
        return None
    place[2] = max(place[2], view.top + 0.018)
    return _approach(view, place, yaw, OPEN) or Waypoint(place, yaw, CLOSED)


def _pick(view: View, goal: Goal, yaw: float, hand_yaw: float) -> Waypoint:
    return _grasp(view, goal, yaw) or Waypoint(view.tcp + [0.0, 0.0, 0.03], hand_yaw, CLOSED)


def _place(view: View, goal: Goal, yaw: float, hand_yaw: float) -> Waypoint:
    place, target = view.places[goal.index], stack_place(view, goal)
    shift = math.dist(place[:2], target[:2])
    height = float(place[2] - target[2])
    if shift < 0.012 and abs(height) < 0.006:  # it stands: let go, then leave
        is_free = view.opening - view.scene.objects[goal.index].half_width > 0.008
        return Waypoint(view.tcp + [0.0, 0.0, 0.05 if is_free else 0.0], hand_yaw, OPEN)
    grasp = _grasp(view, goal, yaw)
    if grasp is not None:
        return grasp
    over = target + (view.tcp - place)  # where the hand is when the object is on the target
    if shift > 0.03 and height < CARRY - 0.02:  # up first, past the base
        return Waypoint(_above(view.tcp, over[2] + CARRY), hand_yaw, CLOSED)
    if shift > 0.008:
        return Waypoint(_above(over, max(over[2] + 0.03, min(view.tcp[2], over[2] + CARRY))), hand_yaw, CLOSED)
    return Waypoint(over - [0.0, 0.0, 0.001], hand_yaw, CLOSED)


def _push(view: View, goal: Goal) -> Waypoint:
    assert view.scene.area is not None
    item, place = view.scene.objects[goal.index], view.places[goal.index]
    way = np.subtract(view.scene.area, place[:2])
    along = way / max(float(np.linalg.norm(way)), 1e-6)
    across = np.array([-along[1], along[0]])
    yaw = _grasp_yaw(math.atan2(along[1], along[0]))
    behind = place[:2] - along * (item.radius + 0.035)
    low = view.top + PUSH_HEIGHT
    offset = view.tcp[:2] - place[:2]
    is_behind = float(offset @ along) < -0.5 * item.half_width and abs(float(offset @ across)) < 0.025
    if view.tcp[2] < low + 0.02 and is_behind and float(-offset @ along) < item.radius + 0.06:
        step = 0.025 * along - 0.8 * float(offset @ across) * across
        return Waypoint(np.append(view.tcp[:2] + step, low), yaw, CLOSED)
    start = np.append(behind, low)
    return _approach(view, start, yaw, CLOSED) or Waypoint(start, yaw, CLOSED)
