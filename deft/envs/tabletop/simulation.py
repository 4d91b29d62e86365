"""A simulated scene: MuJoCo's model and data, and their exact state as plain data.

`TabletopEnv` owns one and replaces it when it draws a new scene.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mujoco
import numpy as np

from deft.envs.tabletop import panda
from deft.envs.tabletop.control import PHYSICS_STEPS
from deft.envs.tabletop.model import (
    ARM,
    FINGERS,
    HEAD_CAMERA,
    NUM_ROBOT,
    OBJECT_BIT,
    ROBOT_BIT,
    WRIST_CAMERA,
    compile_scene,
)
from deft.envs.tabletop.rendering import Culling, renderer
from deft.envs.tabletop.scene import Scene
from deft.envs.tabletop.tasks import View

REST_STEPS = 75
REST_SPEED = 0.02  # metres or radians a second, at most, for a scene to count as stable
REST_SHIFT = 0.005

_STATE = mujoco.mjtState.mjSTATE_INTEGRATION
# MuJoCo does not update the arrays of sleeping bodies, so these arrays are part of the state.
_SLEEP_ARRAYS = ("tree_asleep", "tree_awake", "body_awake", "body_awake_ind", "parent_awake_ind", "dof_awake_ind")
_SLEEP_COUNTS = ("nbody_awake", "nparent_awake", "ntree_awake", "nv_awake")
_BODY_ARRAY_NAMES = (
    "xpos xquat xmat xipos ximat xanchor xaxis geom_xpos geom_xmat site_xpos site_xmat cam_xpos cam_xmat light_xpos "
    "light_xdir subtree_com cinert cdof cdof_dot cvel crb M qM qLD qLDiagInv qacc"
)
_BODY_ARRAYS = tuple(_BODY_ARRAY_NAMES.split())


class Simulation:
    """A compiled scene. The robot's and the objects' attributes are views of MuJoCo's arrays."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.model = compile_scene(scene)
        self.data = mujoco.MjData(self.model)
        self.cameras = {"head": self.model.camera(HEAD_CAMERA).id, "wrist": self.model.camera(WRIST_CAMERA).id}
        data = self.data
        self.joints = data.qpos[ARM]
        self.fingers = data.qpos[FINGERS]
        self.joint_velocities = data.qvel[ARM]
        tcp = self.model.site("tcp").id
        self.tcp = data.site_xpos[tcp]
        self.tcp_rotation = data.site_xmat[tcp].reshape(3, 3)
        # Views of all objects, those of the task first: seven numbers each in qpos, six in qvel
        poses, velocities = data.qpos[NUM_ROBOT:].reshape(-1, 7), data.qvel[NUM_ROBOT:].reshape(-1, 6)
        self._poses, self._velocities = poses, velocities
        count = len(scene.objects)
        self.object_positions, self.quaternions = poses[:count, :3], poses[:count, 3:]
        self.velocities = velocities[:count, :3]
        mujoco.mj_forward(self.model, data)
        self._culling = Culling(self.model, data)

    def put_robot(self, joints: np.ndarray, opening: float = panda.FINGER_TRAVEL) -> None:
        """Set the robot's posture, at rest, without moving the objects."""
        data = self.data
        data.qpos[ARM] = joints
        data.qpos[FINGERS] = opening
        data.qvel[:NUM_ROBOT] = 0
        data.ctrl[ARM] = joints
        data.ctrl[FINGERS] = opening
        data.qacc_warmstart[:] = 0
        mujoco.mj_forward(self.model, data)

    def come_to_rest(self) -> bool:
        """Simulate until the objects are at rest; return False if they move or are not at their positions."""
        self.put_robot(panda.HOME)
        mujoco.mj_step(self.model, self.data, nstep=REST_STEPS)
        for index, item in enumerate(self.scene.everything):
            rest = [*item.place, item.half_height - self.scene.table_drop]
            if math.dist(self._poses[index, :3], rest) > REST_SHIFT:
                return False
            if np.abs(self._velocities[index, :3]).max() > REST_SPEED:
                return False
        return True

    def step(self, joint_targets: np.ndarray, finger_target: float) -> None:
        """Simulate one environment step: ten physics steps towards the targets, then update all positions."""
        data = self.data
        data.ctrl[ARM] = joint_targets
        data.ctrl[FINGERS] = finger_target
        mujoco.mj_step(self.model, data, nstep=PHYSICS_STEPS)
        self.locate()

    def locate(self) -> None:
        """Update the positions of bodies, cameras and lights: `mj_step` leaves those of the previous state."""
        mujoco.mj_kinematics(self.model, self.data)
        mujoco.mj_camlight(self.model, self.data)

    def view(self) -> View:
        """Return the input of tasks and experts; its arrays change with the simulation."""
        opening = float(self.fingers[0] + self.fingers[1]) / 2
        squeeze = opening - float(self.data.ctrl[FINGERS][0])
        positions, top = self.object_positions, -self.scene.table_drop
        return View(self.scene, self.tcp, opening, squeeze, positions, self.velocities, top)

    def yaws(self) -> np.ndarray:
        """Return the task objects' angles about the vertical axis."""
        return np.array([math.atan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z)) for w, x, y, z in self.quaternions])

    def touches_object(self) -> bool:
        """Return whether the robot is in contact with an object."""
        bits = self.model.geom_contype[self.data.contact.geom]
        return bool(((bits == ROBOT_BIT).any(1) & (bits == OBJECT_BIT).any(1)).any())

    @property
    def all_poses(self) -> np.ndarray:
        """A copy of the poses of all objects: position and quaternion, [objects, 7]."""
        return self._poses.copy()

    def is_in_view(self, camera: str, point: np.ndarray) -> bool:
        """Return whether a point is within a camera's image; what is in front of it does not matter."""
        number = self.cameras[camera]
        # In the camera's frame x is right, y is up and z is back.
        x, y, z = self.data.cam_xmat[number].reshape(3, 3).T @ (point - self.data.cam_xpos[number])
        return bool(z < 0 and max(abs(x), abs(y)) <= -z * math.tan(math.radians(self.model.cam_fovy[number]) / 2))

    def images(self, cameras: Sequence[str], size: int) -> list[np.ndarray]:
        """Return the cameras' images, uint8 [size, size, 3] each; valid until the next call in this thread."""
        numbers = [self.cameras[name] for name in cameras]
        return renderer().render(self.model, self.data, self._culling, numbers, size)

    def get_state(self) -> dict[str, Any]:
        """Return the complete state of the simulation."""
        data = self.data
        state = np.empty(mujoco.mj_stateSize(self.model, _STATE))
        mujoco.mj_getState(self.model, data, state, _STATE)
        arrays = {name: getattr(data, name).copy() for name in (*_SLEEP_ARRAYS, *_BODY_ARRAYS)}
        return {"state": state, "arrays": arrays, "counts": {name: int(getattr(data, name)) for name in _SLEEP_COUNTS}}

    def set_state(self, saved: dict[str, Any]) -> None:
        """Continue from a state of the same scene, bit for bit."""
        model, data = self.model, self.data
        mujoco.mj_resetData(model, data)
        mujoco.mj_setState(model, data, saved["state"], _STATE)
        mujoco.mj_forward(model, data)
        for name, array in saved["arrays"].items():
            getattr(data, name)[...] = array
        for name, count in saved["counts"].items():
            setattr(data, name, count)
        mujoco.mj_setState(model, data, saved["state"], _STATE)


class StillObjects:
    """Images of a simulation with its robot as it is and its objects as they were at an earlier time.

    The difference from the true image is what changed because objects moved, and not because the robot and its camera
    did. Lights and textures are the simulation's present ones. The simulation is not changed: the images are made from
    a copy of the positions, in which no object sleeps.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._data = mujoco.MjData(simulation.model)
        mujoco.mj_forward(simulation.model, self._data)  # the positions of walls and floor, which never change
        self._culling = Culling(simulation.model, self._data)

    def images(self, poses: np.ndarray, cameras: Sequence[str], size: int) -> list[np.ndarray]:
        """Return images with the objects at `poses` (`Simulation.all_poses`); valid until the next call."""
        simulation, data = self._simulation, self._data
        data.qpos[:NUM_ROBOT] = simulation.data.qpos[:NUM_ROBOT]
        data.qpos[NUM_ROBOT:] = poses.reshape(-1)
        mujoco.mj_kinematics(simulation.model, data)
        mujoco.mj_camlight(simulation.model, data)
        numbers = [simulation.cameras[name] for name in cameras]
        return renderer().render(simulation.model, data, self._culling, numbers, size)
