"""The physics of many environments on MuJoCo Warp, with the kernels for control, rewards and observations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import mujoco_warp
import numpy as np
import torch
import warp as wp

from deft.envs.suppress_logs import suppress_logs
from deft.envs.tabletop import control, panda
from deft.envs.tabletop.control import CONTROL_MODES, PHYSICS_STEPS
from deft.envs.tabletop.model import HEAD_CAMERA, OBJECT_BIT, ROBOT_BIT, arm_model
from deft.envs.tabletop.warp import kernels
from deft.envs.tabletop.warp.model import BatchModel

wp.config.quiet = True  # no list of devices and modules on stdout
with suppress_logs():
    wp.init()

MODE_NUMBERS = {name: number for number, name in enumerate(CONTROL_MODES)}


class WarpSimulation:
    """The physics of N environments on one device. Its tensors are views of the simulation's arrays."""

    def __init__(self, batch: BatchModel, num_envs: int, control_mode: str, action_scale: float, device: Any) -> None:
        """`device` is a torch device."""
        self.num_envs = num_envs
        self._num_objects = batch.num_objects
        self._mode, self._scale = MODE_NUMBERS[control_mode], float(action_scale)
        self.torch_device = device
        self.device = wp.device_from_torch(device)
        self._graph: Any = None
        movable = len(batch.shapes)
        with wp.ScopedDevice(self.device):
            self.model = mujoco_warp.put_model(batch.model)
            # more contacts than a full gripper on a table has; a world with more would lose some
            self.data = mujoco_warp.make_data(batch.model, num_envs, nconmax=24 + 8 * movable, njmax=80 + 40 * movable)
        self._contype = torch.tensor(batch.model.geom_contype, device=device)
        contact = self.data.contact
        self._contact_geoms, self._contact_worlds = wp.to_torch(contact.geom), wp.to_torch(contact.worldid)
        self._num_contacts = wp.to_torch(self.data.nacon)
        self._contact_numbers = torch.arange(len(self._contact_worlds), device=device)
        self._site = batch.model.site("tcp").id
        static = sorted([*batch.fixed, *batch.area, *batch.tiles])
        self._static = torch.tensor(static, device=device)
        self.fields = {
            name: self._batched(name)
            for name in ("geom_size", "geom_rbound", "geom_aabb", "body_inertia", "body_iquat", "body_invweight0")
            + ("body_gravcomp", "dof_invweight0", "cam_pos", "cam_quat")
        }
        self._head = batch.model.camera(HEAD_CAMERA).id
        data = self.data
        self.qpos, self.qvel = wp.to_torch(data.qpos), wp.to_torch(data.qvel)
        self.ctrl, self.warmstart = wp.to_torch(data.ctrl), wp.to_torch(data.qacc_warmstart)
        self._geom_xpos = wp.to_torch(data.geom_xpos)
        self._time = wp.to_torch(data.time)
        self.actions = torch.zeros(num_envs, CONTROL_MODES[control_mode] + 1, device=device)
        self._actions = wp.from_torch(self.actions)
        self.targets = torch.zeros(num_envs, panda.NUM_JOINTS, device=device)
        self._targets = wp.from_torch(self.targets, dtype=kernels.vec7)
        self.fingers = torch.zeros(num_envs, device=device)
        self._fingers = wp.from_torch(self.fingers)
        self._arm = _arm(self.device)
        self._state = kernels.State()
        self._state.qpos, self._state.qvel = data.qpos, data.qvel
        self._state.tcp, self._state.tcp_rotation = data.site_xpos, data.site_xmat
        self._episodes = kernels.Episodes()
        self.episodes: dict[str, torch.Tensor] = {}
        self._allocate_episodes()

    def _batched(self, name: str) -> torch.Tensor:
        """Give a field of the model a row for each environment; return them as a tensor."""
        shared = getattr(self.model, name)
        rows = wp.to_torch(shared).expand(self.num_envs, *wp.to_torch(shared).shape[1:]).clone()
        setattr(self.model, name, wp.from_torch(rows, dtype=shared.dtype))
        return rows

    def _allocate_episodes(self) -> None:
        count, objects = self.num_envs, self._num_objects
        numbers, vectors = ("task", "goal", "base"), ("area", "potentials")
        shapes = {"half_height": (objects,), "half_width": (objects,), "area": (2,), "potentials": (2,)}
        for name in (*numbers, "half_height", "half_width", "area", "has_area", "top", "potentials"):
            dtype = torch.int32 if name in numbers else torch.float32
            tensor = torch.zeros(count, *shapes.get(name, ()), dtype=dtype, device=self.torch_device)
            self.episodes[name] = tensor
            setattr(self._episodes, name, wp.from_torch(tensor, dtype=wp.vec2 if name in vectors else None))

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Let Warp's launches follow torch's on the same stream."""
        if self.device.is_cuda:
            with wp.ScopedStream(self._torch_stream(), sync_enter=False):
                yield
        else:
            with wp.ScopedDevice(self.device):
                yield

    def _torch_stream(self) -> Any:
        return wp.stream_from_torch(torch.cuda.current_stream(self.torch_device))

    def place(self, rows: torch.Tensor, numbers: dict[str, torch.Tensor]) -> None:
        """Set the environments `rows` to the beginnings of episodes; see `scene_numbers` and `draw_episodes`."""
        for name, target in self.fields.items():
            if name in numbers:
                target[rows] = numbers[name]
        self.fields["cam_pos"][rows, self._head] = numbers["camera_position"]
        self.fields["cam_quat"][rows, self._head] = numbers["camera_quaternion"]
        self._geom_xpos[rows[:, None], self._static] = numbers["static_position"][:, self._static]
        self.qpos[rows], self.qvel[rows] = numbers["qpos"], numbers["qvel"]
        self.targets[rows], self.fingers[rows] = numbers["targets"], numbers["fingers"]
        self.ctrl[rows, : panda.NUM_JOINTS] = numbers["targets"]
        self.ctrl[rows, panda.NUM_JOINTS :] = numbers["fingers"][:, None]
        self.warmstart[rows] = 0.0
        self._time[rows] = 0.0
        for name, target in self.episodes.items():
            if name in numbers:
                target[rows] = numbers[name]

    def locate(self, rows: torch.Tensor | None) -> None:
        """Update the positions of all bodies and cameras, and the potentials of the episodes that begin in `rows`."""
        with self.stream():
            self._locate()
            if rows is not None:
                wp.launch(kernels.begin, len(rows), [wp.from_torch(rows), self._site, self._episodes, self._state])

    def _locate(self) -> None:
        mujoco_warp.kinematics(self.model, self.data)
        mujoco_warp.camlight(self.model, self.data)

    def prepare(self) -> None:
        """Compile the kernels and, on a GPU, capture a step as a graph. The state is not valid afterwards."""
        if self.device.is_cuda:
            torch.cuda.synchronize(self.torch_device)  # Warp works on a stream of its own here
        with wp.ScopedDevice(self.device):
            self._advance()
            if self.device.is_cuda:
                with wp.ScopedCapture(device=self.device) as capture:
                    self._advance()
                self._graph = capture.graph
                wp.capture_launch(self._graph)
            wp.synchronize_device(self.device)

    def advance(self) -> None:
        """Simulate 0.04 s with `actions`."""
        if self._graph is not None:
            wp.capture_launch(self._graph, stream=self._torch_stream())
        else:
            with self.stream():
                self._advance()

    def _advance(self) -> None:
        inputs = [self._mode, self._scale, self._arm, self._actions, self.data.qpos]
        wp.launch(kernels.command, self.num_envs, inputs, [self._targets, self._fingers, self.data.ctrl])
        for _ in range(PHYSICS_STEPS):
            mujoco_warp.step(self.model, self.data)
        self._locate()

    def touching(self) -> torch.Tensor:
        """Return whether the robot of each environment is in contact with an object: bool [N]."""
        bits = self._contype[self._contact_geoms.long().clamp(min=0)]
        hits = (bits == ROBOT_BIT).any(1) & (bits == OBJECT_BIT).any(1) & (self._contact_numbers < self._num_contacts)
        worlds = torch.where(hits, self._contact_worlds.long(), self.num_envs)  # the last row is for all others
        found = torch.zeros(self.num_envs + 1, dtype=torch.bool, device=self.torch_device)
        return found.index_fill_(0, worlds, True)[: self.num_envs]

    def judge(self, terms: torch.Tensor, success: torch.Tensor, terminated: torch.Tensor) -> None:
        """Write the terms of the reward [N, K], successes and ends of the last step."""
        inputs = [self._site, self._num_objects, self._episodes, self._state, self._actions]
        with self.stream():
            outputs = [wp.from_torch(terms), wp.from_torch(success), wp.from_torch(terminated)]
            wp.launch(kernels.judge, self.num_envs, inputs, outputs)

    def observe(self, rows: torch.Tensor, state: torch.Tensor, labels: torch.Tensor) -> None:
        """Write the rows `rows` (int32) of the state [N, S] and of the labels [N, L]; L is 0 without labels."""
        inputs = [wp.from_torch(rows), self._site, self._num_objects, self._episodes, self._state]
        with self.stream():
            wp.launch(kernels.observe, len(rows), inputs, [wp.from_torch(state), wp.from_torch(labels)])


def _arm(device: Any) -> Any:
    """Return the arm's constants, from the same model as the kinematics on the CPU."""
    model = arm_model()
    bodies = [model.body(name).id for name in (*(f"link{index}" for index in range(1, 8)), "hand")]
    site = model.site("tcp").id
    quaternions = [*model.body_quat[bodies], model.site_quat[site]]  # w, x, y, z
    rotations = [np.array(wp.quat_to_matrix(wp.quat(*q[1:], q[0]))).reshape(3, 3) for q in quaternions]
    arm = kernels.Arm()
    arm.position = wp.array([*model.body_pos[bodies], model.site_pos[site]], dtype=wp.vec3, device=device)
    arm.rotation = wp.array(np.stack(rotations), dtype=wp.mat33, device=device)
    arm.home, arm.lower, arm.upper = (
        kernels.vec7(panda.HOME),
        kernels.vec7(control.TARGET_LOWER),
        kernels.vec7(control.TARGET_UPPER),
    )
    return arm
