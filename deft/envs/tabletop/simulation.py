"""One scene being simulated: MuJoCo's model and data, and an exact copy of their state as plain data.

`TabletopEnv` owns one and replaces it when a new scene is drawn.
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
    WRIST_CAMERA,
    compile_scene,
    object_position,
    object_quaternion,
    object_velocity,
)
from deft.envs.tabletop.rendering import Culling, renderer
from deft.envs.tabletop.scene import Scene
from deft.envs.tabletop.tasks import View

SETTLING_STEPS = 75
SETTLED_SPEED = 0.02  # metres or radians a second, at most, for a scene to count as stable
SETTLED_SHIFT = 0.005

_STATE = mujoco.mjtState.mjSTATE_INTEGRATION
# Bodies at rest sleep: MuJoCo then leaves what it computed for them as it was, so that these arrays are state too.
_SLEEP_ARRAYS = ("tree_asleep", "tree_awake", "body_awake", "body_awake_ind", "parent_awake_ind", "dof_awake_ind")
_SLEEP_COUNTS = ("nbody_awake", "nparent_awake", "ntree_awake", "nv_awake")
_BODY_ARRAYS = (
    *(
        "xpos",
        "xquat",
        "xmat",
        "xipos",
        "ximat",
        "xanchor",
        "xaxis",
        "geom_xpos",
        "geom_xmat",
        "site_xpos",
        "site_xmat",
    ),
    *("cam_xpos", "cam_xmat", "light_xpos", "light_xdir"),
    *("subtree_com", "cinert", "cdof", "cdof_dot", "cvel", "crb", "M", "qM", "qLD", "qLDiagInv", "qacc"),
)


class Simulation:
    """A compiled scene. The robot's and the objects' numbers are views into MuJoCo's arrays."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.model = compile_scene(scene)
        self.data = mujoco.MjData(self.model)
        self.cameras = {
            name: self.model.camera(camera).id for name, camera in (("head", HEAD_CAMERA), ("wrist", WRIST_CAMERA))
        }
        data = self.data
        self.joints = data.qpos[ARM]
        self.fingers = data.qpos[FINGERS]
        self.joint_velocities = data.qvel[ARM]
        tcp = self.model.site("tcp").id
        self.tcp = data.site_xpos[tcp]
        self.tcp_rotation = data.site_xmat[tcp].reshape(3, 3)
        count = len(scene.objects)
        self.quaternions = [data.qpos[object_quaternion(index)] for index in range(count)]
        # [objects, 3], without a copy: every seventh number of qpos, every sixth of qvel
        end = NUM_ROBOT + 7 * count
        self.places = data.qpos[NUM_ROBOT:end].reshape(count, 7)[:, :3]
        self.velocities = data.qvel[NUM_ROBOT : NUM_ROBOT + 6 * count].reshape(count, 6)[:, :3]
        mujoco.mj_forward(self.model, data)
        self._culling = Culling(self.model, data)

    def put_robot(self, joints: np.ndarray, opening: float = panda.FINGER_TRAVEL) -> None:
        """Put the robot into a posture, at rest; the objects stay as they are."""
        data = self.data
        data.qpos[ARM] = joints
        data.qpos[FINGERS] = opening
        data.qvel[:NUM_ROBOT] = 0
        data.ctrl[ARM] = joints
        data.ctrl[FINGERS] = opening
        data.qacc_warmstart[:] = 0
        mujoco.mj_forward(self.model, data)

    def settle(self) -> bool:
        """Let the objects come to rest; false where they do not, or not where they were put."""
        self.put_robot(panda.HOME)
        mujoco.mj_step(self.model, self.data, nstep=SETTLING_STEPS)
        for index, item in enumerate(self.scene.everything):
            place = self.data.qpos[object_position(index)]
            rest = [*item.place, item.half_height - self.scene.table_drop]
            if math.dist(place, rest) > SETTLED_SHIFT:
                return False
            if np.abs(self.data.qvel[object_velocity(index)]).max() > SETTLED_SPEED:
                return False
        return True

    def step(self, joint_targets: np.ndarray, finger_target: float) -> None:
        """One env step: ten physics steps towards the targets, then where everything is."""
        data = self.data
        data.ctrl[ARM] = joint_targets
        data.ctrl[FINGERS] = finger_target
        mujoco.mj_step(self.model, data, nstep=PHYSICS_STEPS)
        self.locate()

    def locate(self) -> None:
        """Positions of bodies, cameras and lights for the present state: `mj_step` leaves those of the one before."""
        mujoco.mj_kinematics(self.model, self.data)
        mujoco.mj_camlight(self.model, self.data)

    def view(self) -> View:
        """What tasks and experts look at; arrays change with the simulation."""
        opening = float(self.fingers[0] + self.fingers[1]) / 2
        squeeze = opening - float(self.data.ctrl[FINGERS][0])
        return View(self.scene, self.tcp, opening, squeeze, self.places, self.velocities, -self.scene.table_drop)

    def yaws(self) -> np.ndarray:
        """The task objects' angles about the vertical."""
        return np.array([math.atan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z)) for w, x, y, z in self.quaternions])

    def pictures(self, cameras: Sequence[str], size: int) -> list[np.ndarray]:
        """What the cameras see, uint8 [size, size, 3] each; valid until the next pictures of this thread."""
        numbers = [self.cameras[name] for name in cameras]
        return renderer().render(self.model, self.data, self._culling, numbers, size)

    def get_state(self) -> dict[str, Any]:
        """All that the future of the simulation depends on."""
        data = self.data
        state = np.empty(mujoco.mj_stateSize(self.model, _STATE))
        mujoco.mj_getState(self.model, data, state, _STATE)
        arrays = {name: getattr(data, name).copy() for name in (*_SLEEP_ARRAYS, *_BODY_ARRAYS)}
        return {"state": state, "arrays": arrays, "counts": {name: int(getattr(data, name)) for name in _SLEEP_COUNTS}}

    def set_state(self, saved: dict[str, Any]) -> None:
        """Go on from a state of the same scene, bit for bit."""
        model, data = self.model, self.data
        mujoco.mj_resetData(model, data)
        mujoco.mj_setState(model, data, saved["state"], _STATE)
        mujoco.mj_forward(model, data)
        for name, array in saved["arrays"].items():
            getattr(data, name)[...] = array
        for name, count in saved["counts"].items():
            setattr(data, name, count)
        mujoco.mj_setState(model, data, saved["state"], _STATE)
