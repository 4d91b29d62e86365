"""From a policy's action to joint targets: joint deltas, or deltas of the hand by differential inverse kinematics.

`TabletopEnv` owns an `ArmController`. The native action of a mode is its arm dims followed by the gripper:
`delta_qpos` 7 + 1, `delta_ee` 6 + 1, `delta_ee_pos` 3 + 1, each in [-1, 1]. `padded_index` and `action_mask` give their
dims in the 32-dim layout of F1.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import mujoco
import numpy as np

from deft.envs.checks import check_choice
from deft.envs.padded import GRIPPERS, PADDED_SIZE
from deft.envs.tabletop import panda
from deft.envs.tabletop.model import arm_model
from deft.errors import InputError, RunError

CONTROL_MODES = {"delta_qpos": 7, "delta_ee": 6, "delta_ee_pos": 3}  # arm dims
PHYSICS_STEPS = 10  # of 1/250 s, in one env step

MAX_JOINT_STEP = 0.1  # radians in one env step, at action 1 and action_scale 1
MAX_POSITION_STEP = 0.03  # metres
MAX_ROTATION_STEP = 0.1  # radians
MAX_FINGER_STEP = panda.FINGER_SPEED * PHYSICS_STEPS / 250  # metres
# Largest distance of a target from its joint, so that a blocked arm does not wind up. A free one lags by 0.14.
MAX_LAG = 0.18
# Distance of targets from the joint limits, so that the joints never pass them.
LIMIT_MARGIN = 0.04

_DAMPING = 0.03  # of the least-squares solution: joints stay slow near a singular posture
_POSTURE_GAIN = 0.05  # fraction of the motion to the home posture in the null space of the hand
_ITERATIONS = 3


def check_mode(control_mode: str) -> str:
    """Return a control mode; raise InputError for an unknown one."""
    check_choice("control_mode", control_mode, tuple(CONTROL_MODES))
    return control_mode


def action_size(control_mode: str) -> int:
    """Return the number of dims of the native action: arm and gripper."""
    return CONTROL_MODES[check_mode(control_mode)] + 1


def action_names(control_mode: str) -> tuple[str, ...]:
    """Return what each dim of the native action moves."""
    number = CONTROL_MODES[check_mode(control_mode)]
    joints = tuple(f"joint {index + 1}" for index in range(number))
    arm = joints if control_mode == "delta_qpos" else ("x", "y", "z", "roll", "pitch", "yaw")[:number]
    return (*arm, "gripper")


def padded_index(control_mode: str) -> np.ndarray:
    """Return the index of each dim of the native action in the padded one."""
    return np.array([*range(CONTROL_MODES[check_mode(control_mode)]), GRIPPERS["left"]])


def action_mask(control_mode: str) -> np.ndarray:
    """Return which of the 32 padded dims are real, bool [32]."""
    mask = np.zeros(PADDED_SIZE, bool)
    mask[padded_index(control_mode)] = True
    return mask


def pad_action(action: np.ndarray, control_mode: str) -> np.ndarray:
    """Convert a native action [..., A] to the padded layout [..., 32], with zeros elsewhere."""
    action = np.asarray(action)
    padded = np.zeros((*action.shape[:-1], PADDED_SIZE), np.float32)
    padded[..., padded_index(control_mode)] = action
    return padded


def unpad_action(action: np.ndarray, control_mode: str) -> np.ndarray:
    """Convert a padded action [..., 32] to the native one [..., A]."""
    return np.asarray(action, np.float32)[..., padded_index(control_mode)]


# ------------------------------------------------------------------------------------------------------- kinematics


class Kinematics:
    """Forward and inverse kinematics of the arm, on a model of only the robot."""

    def __init__(self) -> None:
        self._model = arm_model()
        self._data = mujoco.MjData(self._model)
        self._tcp = self._model.site("tcp").id
        self._jacobian = np.zeros((6, self._model.nv))

    def pose(self, joints: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return position and rotation matrix of the point between the finger tips."""
        self._data.qpos[: panda.NUM_JOINTS] = joints
        mujoco.mj_kinematics(self._model, self._data)
        return self._data.site_xpos[self._tcp].copy(), self._data.site_xmat[self._tcp].reshape(3, 3).copy()

    def solve(self, joints: np.ndarray, position: np.ndarray, rotation: np.ndarray) -> np.ndarray:
        """Return joints near `joints` for a pose of the hand, by damped least squares, within the limits.

        dq = J⁺ e + (I - J⁺ J) g (home - q),  J⁺ = Jᵀ (J Jᵀ + λ² I)⁻¹
        """
        found = joints.copy()
        for _ in range(_ITERATIONS):
            present, turn = self.pose(found)
            error = np.concatenate([position - present, rotation_vector(rotation @ turn.T)])
            mujoco.mj_comPos(self._model, self._data)
            mujoco.mj_jacSite(self._model, self._data, self._jacobian[:3], self._jacobian[3:], self._tcp)
            jacobian = self._jacobian[:, : panda.NUM_JOINTS]
            posture = _POSTURE_GAIN * (panda.HOME - found)
            square = jacobian @ jacobian.T + _DAMPING**2 * np.eye(6)
            # J⁺ (e - J p) + p is the same with one solution of the linear system
            found = found + jacobian.T @ np.linalg.solve(square, error - jacobian @ posture) + posture
            found = np.clip(found, TARGET_LOWER, TARGET_UPPER)
        return found


TARGET_LOWER = panda.JOINT_LOWER + LIMIT_MARGIN
TARGET_UPPER = panda.JOINT_UPPER - LIMIT_MARGIN


@cache
def kinematics() -> Kinematics:
    """Return the kinematics of all environments of a process: it has no state between calls."""
    return Kinematics()


def rotation_vector(rotation: np.ndarray) -> np.ndarray:
    """Return axis times angle of a rotation matrix."""
    twice = np.array(
        [rotation[2, 1] - rotation[1, 2], rotation[0, 2] - rotation[2, 0], rotation[1, 0] - rotation[0, 1]]
    )
    sine = 0.5 * math.sqrt(float(twice @ twice))
    cosine = 0.5 * (float(np.trace(rotation)) - 1)
    angle = math.atan2(sine, cosine)
    if sine > 1e-6:
        return twice * (0.5 * angle / sine)
    if cosine > 0:
        return 0.5 * twice
    axis = np.sqrt(np.maximum(0.5 * (np.diag(rotation) + 1), 0))  # half a turn: the sign of the axis is arbitrary
    return math.pi * axis


def rotation_matrix(vector: np.ndarray) -> np.ndarray:
    """Return the rotation matrix of axis times angle (Rodrigues' formula)."""
    angle = math.sqrt(float(vector @ vector))
    if angle < 1e-9:
        return np.eye(3)
    x, y, z = (vector / angle).tolist()
    cross = np.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])
    return np.eye(3) + math.sin(angle) * cross + (1 - math.cos(angle)) * cross @ cross


def hand_down(yaw: float) -> np.ndarray:
    """Return the rotation of the hand pointing straight down, turned by `yaw` about the vertical axis."""
    c, s = math.cos(yaw), math.sin(yaw)
    return np.array([[c, s, 0.0], [s, -c, 0.0], [0.0, 0.0, -1.0]])


# ------------------------------------------------------------------------------------------------------- controller


class ArmController:
    """Holds the joint targets. Deltas are added to the last target, so that motions equal commands."""

    def __init__(self, control_mode: str, action_scale: float) -> None:
        self.mode = check_mode(control_mode)
        if not 0 < action_scale <= 1:
            raise InputError(f"action_scale is {action_scale}; choose a number above 0, at most 1")
        self.scale = float(action_scale)
        self.num_arm = CONTROL_MODES[control_mode]
        self.target = panda.HOME.copy()
        self.finger_target = panda.FINGER_TRAVEL

    def reset(self, joints: np.ndarray, finger: float) -> None:
        """Set a posture as the target."""
        self.target = np.array(joints, float)
        self.finger_target = float(finger)

    def command(self, action: Any, joints: np.ndarray) -> np.ndarray:
        """Add an action to the targets; return it clipped to [-1, 1]."""
        action = np.asarray(action, np.float64)
        if action.shape != (self.num_arm + 1,) or not np.isfinite(action).all():
            raise RunError(f"action is {action}; {self.mode} takes {self.num_arm + 1} numbers")
        action = action.clip(-1.0, 1.0)
        arm = action[:-1]
        if self.mode == "delta_qpos":
            target = self.target + (MAX_JOINT_STEP * self.scale) * arm
        else:
            position, turn = kinematics().pose(self.target)
            position += (MAX_POSITION_STEP * self.scale) * arm[:3]
            if self.mode == "delta_ee":
                turn = rotation_matrix((MAX_ROTATION_STEP * self.scale) * arm[3:]) @ turn
            else:
                turn = hand_down(0.0)
            target = kinematics().solve(self.target, position, turn)
        target = np.minimum(np.maximum(target, joints - MAX_LAG), joints + MAX_LAG)
        self.target = np.minimum(np.maximum(target, TARGET_LOWER), TARGET_UPPER)
        # 1 is open; -1 is a centimetre past the middle, so that the fingers press on an object.
        wanted = float(0.5 * (action[-1] + 1) * (panda.FINGER_TRAVEL + 0.01) - 0.01)
        self.finger_target += min(max(wanted - self.finger_target, -MAX_FINGER_STEP), MAX_FINGER_STEP)
        return action

    def action_towards(self, position: np.ndarray, rotation: np.ndarray, gripper: float) -> np.ndarray:
        """Return the action that moves the hand towards a pose, by one step at most, along a straight line."""
        present, turn = kinematics().pose(self.target)
        step = position - present
        turning = rotation_vector(rotation @ turn.T)
        if self.mode == "delta_qpos":
            # Solve for a pose a little ahead; the joint deltas are scaled below.
            length, angle = float(np.linalg.norm(step)), float(np.linalg.norm(turning))
            part = min(
                1.0, 2 * MAX_POSITION_STEP * self.scale / max(length, 1e-9), 4 * self.scale * 0.1 / max(angle, 1e-9)
            )
            goal = kinematics().solve(self.target, present + part * step, rotation_matrix(part * turning) @ turn)
            arm = (goal - self.target) / (MAX_JOINT_STEP * self.scale)
        else:
            arm = step / (MAX_POSITION_STEP * self.scale)
            if self.mode == "delta_ee":
                turning = turning / (MAX_ROTATION_STEP * self.scale)
                turning /= max(1.0, float(np.abs(turning).max()))
                arm = np.concatenate([arm / max(1.0, float(np.abs(arm).max())), turning])
        arm = arm / max(1.0, float(np.abs(arm).max()))
        return np.append(arm, gripper).astype(np.float32)

    def get_state(self) -> dict[str, Any]:
        """Return the targets as plain data."""
        return {"target": self.target.copy(), "finger_target": self.finger_target}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore saved targets."""
        self.target = np.array(state["target"], float)
        self.finger_target = float(state["finger_target"])
