"""A scripted policy for ALOHA's tasks: poses of the grippers over time, and joint angles for them.

`AlohaEnv.expert_action` calls it. The poses are the waypoints of the scripted policies of ACT (Zhao et al. 2023), which
move the grippers directly; here inverse kinematics turns them into the joint angles that the tasks take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

ARMS = ("left", "right")
ARM_JOINTS = ("waist", "shoulder", "elbow", "forearm_roll", "wrist_angle", "wrist_rotate")
ITERATIONS, DAMPING, MAX_CHANGE = 20, 1e-3, 0.2
OPEN, CLOSED = 1.0, 0.0
FORWARD = ((1.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 1.0))  # orientations of the grippers with all joints at 0
TIP = np.array([0.1347, 0.0, -0.002])  # metres: the point between the fingers, in the frame of a gripper


@dataclass(frozen=True)
class Waypoint:
    """A pose of one gripper at a step; the poses between two of them are interpolated."""

    step: int
    position: np.ndarray
    axis: str
    degrees: float
    """A rotation about the world's `axis`, from the orientation with all joints at 0."""
    gripper: float


class Expert:
    """The scripted policy of one episode."""

    def __init__(self, model: Any, is_insertion: bool, objects: np.ndarray) -> None:
        import mujoco

        self._model, self._data = model, mujoco.MjData(model)
        self._bodies = [model.body(f"vx300s_{arm}/gripper_link").id for arm in ARMS]
        joints = [[model.joint(f"vx300s_{arm}/{name}") for name in ARM_JOINTS] for arm in ARMS]
        self._qpos = [np.array([joint.qposadr[0] for joint in arm]) for arm in joints]
        self._dofs = [np.array([joint.dofadr[0] for joint in arm]) for arm in joints]
        self._limits = [np.array([joint.range for joint in arm]).T for arm in joints]
        self._targets: list[np.ndarray] | None = None
        self._plans: list[list[Waypoint]] = []
        self._plan = plan_insertion(objects) if is_insertion else plan_transfer(objects)

    def action(self, step: int, state: np.ndarray) -> np.ndarray:
        """Return the joint angles and grippers for the next step."""
        import mujoco

        if self._targets is None:
            self._targets = [state[:6].astype(np.float64), state[7:13].astype(np.float64)]
            for arm in range(2):
                self._data.qpos[self._qpos[arm]] = self._targets[arm]
            mujoco.mj_kinematics(self._model, self._data)
            for arm in range(2):
                start = Waypoint(0, self._tip(arm), "y", 0.0, CLOSED)
                self._plans.append([start, *self._plan[arm]])
        found = []
        for arm in range(2):
            position, turn, gripper = pose_at(self._plans[arm], step + 1)
            quaternion = np.zeros(4)
            mujoco.mju_mulQuat(quaternion, turn, np.array(FORWARD[arm]))
            self._targets[arm] = self._solve(arm, self._targets[arm], position, quaternion)
            found.append([*self._targets[arm], gripper])
        return np.concatenate(found)

    def _tip(self, arm: int) -> np.ndarray:
        """Return the point between the fingers."""
        body = self._bodies[arm]
        point: np.ndarray = self._data.xpos[body] + self._data.xmat[body].reshape(3, 3) @ TIP
        return point

    def _solve(self, arm: int, angles: np.ndarray, position: np.ndarray, quaternion: np.ndarray) -> np.ndarray:
        """Return joint angles for a pose: damped least squares, dq = Jᵀ (J Jᵀ + λ I)⁻¹ error."""
        import mujoco

        data, body = self._data, self._bodies[arm]
        jacobian, turn = np.zeros((6, self._model.nv)), np.zeros(3)
        inverse, difference = np.zeros(4), np.zeros(4)
        for _ in range(ITERATIONS):
            data.qpos[self._qpos[arm]] = angles
            mujoco.mj_kinematics(self._model, data)
            mujoco.mj_comPos(self._model, data)
            mujoco.mju_negQuat(inverse, data.xquat[body])
            mujoco.mju_mulQuat(difference, quaternion, inverse)
            mujoco.mju_quat2Vel(turn, difference, 1.0)
            error = np.concatenate([position - self._tip(arm), turn])
            if np.abs(error).max() < 1e-4:
                break
            mujoco.mj_jac(self._model, data, jacobian[:3], jacobian[3:], self._tip(arm), body)
            own = jacobian[:, self._dofs[arm]]
            change = own.T @ np.linalg.solve(own @ own.T + DAMPING * np.eye(6), error)
            angles = np.clip(angles + np.clip(change, -MAX_CHANGE, MAX_CHANGE), *self._limits[arm])
        return angles


def pose_at(plan: list[Waypoint], step: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Return position, quaternion and gripper between the waypoints before and after a step."""
    after = next((i for i, waypoint in enumerate(plan) if waypoint.step >= step), len(plan) - 1)
    one, two = plan[max(0, after - 1)], plan[after]
    share = 1.0 if two.step == one.step else float(np.clip((step - one.step) / (two.step - one.step), 0.0, 1.0))
    quaternion = (1 - share) * rotation(one.axis, one.degrees) + share * rotation(two.axis, two.degrees)
    position = one.position + share * (two.position - one.position)
    return position, quaternion / np.linalg.norm(quaternion), one.gripper + share * (two.gripper - one.gripper)


def rotation(axis: str, degrees: float) -> np.ndarray:
    """Return the quaternion of a rotation about x or y."""
    half = np.radians(degrees) / 2
    return np.array([np.cos(half), np.sin(half) * (axis == "x"), np.sin(half) * (axis == "y"), 0.0])


def plan_transfer(objects: np.ndarray) -> tuple[list[Waypoint], list[Waypoint]]:
    """The right gripper picks the cube up and brings it to the middle, where the left one takes it."""
    cube, meet = objects[:3], np.array([0.0, 0.5, 0.25])
    left = [
        Waypoint(100, meet + [-0.1, 0.0, -0.02], "x", 90.0, OPEN),
        Waypoint(260, meet + [0.02, 0.0, -0.02], "x", 90.0, OPEN),
        Waypoint(310, meet + [0.02, 0.0, -0.02], "x", 90.0, CLOSED),
        Waypoint(360, meet + [-0.1, 0.0, -0.02], "x", 90.0, CLOSED),
    ]
    right = [
        Waypoint(90, cube + [0.0, 0.0, 0.08], "y", -60.0, OPEN),
        Waypoint(130, cube + [0.0, 0.0, -0.015], "y", -60.0, OPEN),
        Waypoint(170, cube + [0.0, 0.0, -0.015], "y", -60.0, CLOSED),
        Waypoint(200, meet + [0.05, 0.0, 0.0], "y", -60.0, CLOSED),
        Waypoint(220, meet, "y", -60.0, CLOSED),
        Waypoint(310, meet, "y", -60.0, CLOSED),
        Waypoint(360, meet + [0.1, 0.0, 0.0], "y", -60.0, OPEN),
    ]
    return left, right


def plan_insertion(objects: np.ndarray) -> tuple[list[Waypoint], list[Waypoint]]:
    """Each gripper picks up its object; the peg meets the socket in the middle."""
    peg, socket, meet, lift = objects[:3], objects[7:10], np.array([0.0, 0.5, 0.15]), 0.00715
    left: list[Waypoint] = []
    right: list[Waypoint] = []
    for plan, found, side, degrees, height in ((left, socket, -1, 60.0, 0.0), (right, peg, 1, -60.0, lift)):
        plan += [
            Waypoint(120, found + [0.0, 0.0, 0.08], "y", degrees, OPEN),
            Waypoint(170, found + [0.0, 0.0, -0.03], "y", degrees, OPEN),
            Waypoint(220, found + [0.0, 0.0, -0.03], "y", degrees, CLOSED),
            Waypoint(285, meet + [side * 0.1, 0.0, height], "y", degrees, CLOSED),
            Waypoint(340, meet + [side * 0.05, 0.0, height], "y", degrees, CLOSED),
        ]
    return left, right
