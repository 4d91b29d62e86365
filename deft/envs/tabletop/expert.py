"""The scripted experts: from the positions of objects, the next pose of the hand.

`TabletopEnv.expert_action` converts the pose to an action of its control mode. The experts have no memory: the phase
follows from the state of the simulation, so that an expert can continue from any state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from deft.envs.tabletop.scene import TABLE_X, TABLE_Y
from deft.envs.tabletop.tasks import Goal, View, stack_position

OPEN, CLOSED = 1.0, -1.0
HOVER = 0.13  # metres above the table for horizontal motion
PUSH_HEIGHT = 0.022
CARRY = 0.05  # metres between a carried object and the objects below


@dataclass(slots=True)
class Waypoint:
    """The target pose of the hand, pointing down."""

    position: np.ndarray
    yaw: float
    gripper: float


def waypoint(task: str, view: View, goal: Goal, yaws: np.ndarray, hand_yaw: float) -> Waypoint:
    """Return the next waypoint of a goal task. `yaws` are the objects' angles about the vertical axis."""
    if task == "push":
        return _push(view, goal)
    is_round = view.scene.objects[goal.index].shape != "box"
    yaw = 0.0 if is_round else _grasp_yaw(float(yaws[goal.index]))
    if task == "reach":
        position = view.positions[goal.index]
        return _approach(view, position, yaw, OPEN) or Waypoint(position, yaw, OPEN)
    if task == "pick":
        return _grasp(view, goal, yaw) or Waypoint(view.tcp + [0.0, 0.0, 0.03], hand_yaw, CLOSED)
    return _place(view, goal, yaw, hand_yaw)


def exploring_waypoint(seed: int, step: int, top: float) -> Waypoint:
    """Return a random pose over the table, a new one every 12 steps."""
    random = np.random.default_rng([seed, 7, step // 12])
    position = random.uniform([TABLE_X[0] + 0.12, TABLE_Y[0] + 0.1, 0.02], [TABLE_X[1] - 0.12, TABLE_Y[1] - 0.1, 0.3])
    position[2] += top
    return Waypoint(position, float(random.uniform(-1, 1)), float(random.choice([OPEN, CLOSED])))


def _grasp_yaw(yaw: float) -> float:
    """Return the equivalent yaw of a cube nearest to zero: a quarter turn does not change it."""
    return (yaw + math.pi / 4) % (math.pi / 2) - math.pi / 4


def _above(position: np.ndarray, height: float) -> np.ndarray:
    return np.array([position[0], position[1], height])


def _approach(view: View, position: np.ndarray, yaw: float, gripper: float) -> Waypoint | None:
    """Move above a position and then down to it; None if the hand is there."""
    hover = view.top + HOVER
    tcp = view.tcp
    shift = math.dist(tcp[:2], position[:2])
    height = float(tcp[2] - position[2])
    if shift < 0.012 and height < 0.012:
        return None
    if shift < (0.012 if tcp[2] > hover - 0.02 else 0.025):
        return Waypoint(position, yaw, gripper)
    if shift > 0.04 and tcp[2] < hover - 0.04:  # first up, to avoid other objects
        return Waypoint(_above(tcp, hover), yaw, gripper)
    return Waypoint(_above(position, hover), yaw, gripper)


def _grasp(view: View, goal: Goal, yaw: float) -> Waypoint | None:
    """Grasp the object; None if the fingers hold it."""
    item, position = view.scene.objects[goal.index], view.positions[goal.index].copy()
    is_between = math.dist(view.tcp[:2], position[:2]) < 0.02 and abs(view.tcp[2] - position[2]) < 0.025
    # A cube that is held diagonally keeps the fingers apart by up to √2 times its width.
    widest = item.half_width * (1.42 if item.shape == "box" else 1.0)
    is_touched = item.half_width - 0.003 < view.opening < widest + 0.003
    if is_between and is_touched and view.squeeze > 0.02:
        return None
    position[2] = max(position[2], view.top + 0.018)
    return _approach(view, position, yaw, OPEN) or Waypoint(position, yaw, CLOSED)


def _place(view: View, goal: Goal, yaw: float, hand_yaw: float) -> Waypoint:
    position, target = view.positions[goal.index], stack_position(view, goal)
    shift = math.dist(position[:2], target[:2])
    height = float(position[2] - target[2])
    if shift < 0.012 and abs(height) < 0.006:  # it is in position: release it, then move up
        is_free = view.opening - view.scene.objects[goal.index].half_width > 0.008
        return Waypoint(view.tcp + [0.0, 0.0, 0.05 if is_free else 0.0], hand_yaw, OPEN)
    grasp = _grasp(view, goal, yaw)
    if grasp is not None:
        return grasp
    over = target + (view.tcp - position)  # the position of the hand with the object on the target
    if shift > 0.03 and height < CARRY - 0.02:  # first up, past the base
        return Waypoint(_above(view.tcp, over[2] + CARRY), hand_yaw, CLOSED)
    if shift > 0.008:
        return Waypoint(_above(over, max(over[2] + 0.03, min(view.tcp[2], over[2] + CARRY))), hand_yaw, CLOSED)
    return Waypoint(over - [0.0, 0.0, 0.001], hand_yaw, CLOSED)


def _push(view: View, goal: Goal) -> Waypoint:
    assert view.scene.area is not None
    item, position = view.scene.objects[goal.index], view.positions[goal.index]
    way = np.subtract(view.scene.area, position[:2])
    along = way / max(float(np.linalg.norm(way)), 1e-6)
    across = np.array([-along[1], along[0]])
    yaw = _grasp_yaw(math.atan2(along[1], along[0]))
    behind = position[:2] - along * (item.radius + 0.035)
    low = view.top + PUSH_HEIGHT
    offset = view.tcp[:2] - position[:2]
    is_behind = float(offset @ along) < -0.5 * item.half_width and abs(float(offset @ across)) < 0.025
    if view.tcp[2] < low + 0.02 and is_behind and float(-offset @ along) < item.radius + 0.06:
        step = 0.025 * along - 0.8 * float(offset @ across) * across
        return Waypoint(np.append(view.tcp[:2] + step, low), yaw, CLOSED)
    start = np.append(behind, low)
    return _approach(view, start, yaw, CLOSED) or Waypoint(start, yaw, CLOSED)
