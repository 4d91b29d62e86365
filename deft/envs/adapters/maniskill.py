"""ManiSkill 3 (on SAPIEN; extra `maniskill`): its tasks for a Panda with a head and a wrist camera.

`ManiSkillEnv` is one environment on the CPU, registered as `deft/ManiSkill-v0` (short name `maniskill`);
`ManiSkillVectorEnv` is many in one simulation on the GPU, made by `deft.envs.make` for `env.vector: gpu`.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from xml.etree import ElementTree

import gymnasium
import numpy as np
from gymnasium import spaces
from pydantic import Field

from deft.config.validation import Count, Switch, checked, settings
from deft.envs.adapters.sapien_gpu import get_logical_gpu_id, setup_sapien_gpu
from deft.envs.checks import check_render_mode, import_optional
from deft.envs.spaces import image_space, text_space, vector_space
from deft.envs.suppress_logs import suppress_logs
from deft.envs.vector import BatchedVectorEnv, BatchStep
from deft.errors import DeftError, InputError, RunError, one_line

CONTROL_MODES = {
    "delta_qpos": "pd_joint_delta_pos",
    "delta_ee": "pd_ee_delta_pose",
    "delta_ee_pos": "pd_ee_delta_pos",
}
REWARD_MODES = {"dense": "normalized_dense", "sparse": "sparse"}
WRIST_CAMERA = "hand_camera"
WRIST_ROBOT = "panda_wristcam"
HEAVY_LINK = "camera_link"  # carries a scan of the camera with 425,000 triangles
INSTRUCTION_LENGTH = 64
# Tasks for one Panda that need no download, and their instructions.
INSTRUCTIONS = {
    "LiftPegUpright-v1": "put the peg upright on the table",
    "PegInsertionSide-v1": "insert the peg into the hole in the box",
    "PickCube-v1": "pick up the red cube and hold it at the goal",
    "PlaceSphere-v1": "place the sphere in the bin",
    "PlugCharger-v1": "plug the charger into the receptacle",
    "PokeCube-v1": "poke the cube with the peg",
    "PullCube-v1": "pull the cube to the target",
    "PullCubeTool-v1": "pull the cube closer with the tool",
    "PushCube-v1": "push the cube to the target",
    "RollBall-v1": "roll the ball to the goal",
    "StackCube-v1": "stack the red cube on the green cube",
    "StackPyramid-v1": "build a pyramid of the three cubes",
}


@settings
class ManiSkillSpec:
    """The arguments of `ManiSkillEnv` and `ManiSkillVectorEnv`."""

    task: str = "PickCube-v1"
    observation: Literal["images", "state"] = "images"
    image_size: Annotated[Count, Field(ge=16, le=1024)] = 128
    control_mode: str = "delta_qpos"
    """One of `CONTROL_MODES`, or ManiSkill's own name."""
    reward: Literal["dense", "sparse"] = "dense"
    robot: str = WRIST_ROBOT
    instruction: str | None = None
    """By default that of `INSTRUCTIONS`, or the words of the task's name."""
    time_limit: Count | None = None
    """Steps until an episode is truncated; by default the task's own."""
    render_device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    """auto, cpu, cuda or cuda:N."""
    light_wrist_camera: Switch = True
    """Whether to leave out the detailed mesh of the wrist camera."""

    @property
    def text(self) -> str:
        """The instruction."""
        return INSTRUCTIONS.get(self.task, _words_of(self.task)) if self.instruction is None else self.instruction


class ManiSkillEnv(gymnasium.Env[Any, np.ndarray]):
    """One ManiSkill task in this process, simulated on the CPU.

    **Observation** `"images"`: Dict of `state` (joint positions and velocities, and the task's own values; not the
    positions of objects), `head_rgb` and `wrist_rgb` (uint8 [3, h, w]) and `instruction`. `"state"`: Box that includes
    the positions of objects; nothing is rendered. **Action**: Box(-1, 1): `delta_qpos` 7 joint deltas (±0.1 rad),
    `delta_ee` 6, `delta_ee_pos` 3, then the gripper; any other name is ManiSkill's own. **Reward** `"dense"` (at most 1
    per step) or `"sparse"`. An episode ends with success or failure, or at the task's own `time_limit`.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012 (Gymnasium's own declaration)

    def __init__(
        self, task: str = "PickCube-v1", render_mode: Literal["rgb_array"] | None = None, **settings: Any
    ) -> None:
        """Choose the task; `settings` are those of `ManiSkillSpec`."""
        check_render_mode(render_mode)
        self._simulation = _Simulation(checked(ManiSkillSpec, {"task": task, **settings}), render_mode=render_mode)
        self.render_mode = render_mode
        self.observation_space = self._simulation.observation_space
        self.action_space = self._simulation.action_space
        self._elapsed_steps = 0

    @property
    def instruction(self) -> str:
        """The instruction to the robot."""
        return self._simulation.instruction

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode; a seed determines this episode and the following ones."""
        super().reset(seed=seed)
        self._elapsed_steps = 0
        raw, _ = self._simulation.env.reset(seed=seed, options=options or {})
        return self._first_row(raw), {"instruction": self.instruction}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Simulate one control step, 0.05 s."""
        raw, reward, terminated, _, info = self._simulation.env.step(np.asarray(action, np.float32)[None])
        self._elapsed_steps += 1
        limit = self._simulation.time_limit
        truncated = limit is not None and self._elapsed_steps >= limit
        own_info: dict[str, Any] = {"instruction": self.instruction}
        if "success" in info:
            own_info["success"] = bool(_numpy(info["success"])[0])
        return self._first_row(raw), float(_numpy(reward)[0]), bool(_numpy(terminated)[0]), truncated, own_info

    def render(self) -> np.ndarray | None:
        """Return an image for videos, uint8 [h, w, 3], from ManiSkill's own viewpoint."""
        return None if self.render_mode is None else _numpy(self._simulation.env.render())[0]

    def close(self) -> None:
        """Close the simulation."""
        self._simulation.env.close()

    def _first_row(self, raw: Any) -> Any:
        rows = self._simulation.translate(raw)
        return {name: stream[0] for name, stream in rows.items()} if isinstance(rows, dict) else rows[0]


class ManiSkillVectorEnv(BatchedVectorEnv):
    """N environments of a ManiSkill task in one simulation on the GPU; `settings` are those of `ManiSkillEnv`.

    Environment i draws its first episode from `seed + i`. The following ones come from torch's generator, as in
    ManiSkill.
    """

    def __init__(self, num_envs: int, *, max_episode_steps: int | None = None, **settings: Any) -> None:
        self._simulation = _Simulation(checked(ManiSkillSpec, settings), num_envs)
        space, actions = self._simulation.observation_space, self._simulation.action_space
        super().__init__(num_envs, space, actions, max_episode_steps=max_episode_steps or self._simulation.time_limit)
        self._raw: Any = None
        self._closed = False

    def _begin(self, seeds: list[int] | None) -> None:
        self._raw, _ = self._simulation.env.reset(seed=seeds, options={})

    def _advance(self, actions: np.ndarray) -> BatchStep:
        try:
            self._raw, reward, terminated, _, info = self._simulation.env.step(actions)
        except Exception as error:
            raise RunError(f"ManiSkill's {self._simulation.task} raised {one_line(error)}") from error
        success = _numpy(info["success"]) if "success" in info else None
        return BatchStep(_numpy(reward).astype(np.float32), _numpy(terminated), success=success)

    def _observe(self, rows: np.ndarray | None) -> Any:
        """Return rows of ManiSkill's observation, which always has all environments."""
        observation = self._simulation.translate(self._raw)
        if rows is None:
            return observation
        if not isinstance(observation, dict):
            return observation[rows]
        return {name: [stream[row] for row in rows] for name, stream in observation.items()}

    def _restart(self, rows: np.ndarray) -> None:
        import torch

        index = torch.as_tensor(rows, device=self._simulation.env.device)
        self._raw, _ = self._simulation.env.reset(options={"env_idx": index})

    def state_obstacle(self) -> str:
        """Explain in one line why the state cannot be saved."""
        return "ManiSkill's simulation on the GPU cannot be restored exactly"

    def close(self) -> None:
        """Close the simulation. Further calls do nothing."""
        if not self._closed:
            self._closed = True
            self._simulation.env.close()


# ------------------------------------------------------------------------------------------------------- the simulation


class _Simulation:
    """A ManiSkill simulation of one or many environments, with observations as numpy arrays."""

    def __init__(self, spec: ManiSkillSpec, num_envs: int = 0, render_mode: str | None = None) -> None:
        """`num_envs` 0: one environment on the CPU."""
        if len(spec.text.encode()) > INSTRUCTION_LENGTH:
            raise InputError(f"instruction has {len(spec.text.encode())} bytes; at most {INSTRUCTION_LENGTH} fit")
        task = spec.task
        registered = _import_maniskill()
        if task not in registered:
            raise InputError(f"task is {task!r}, which ManiSkill does not have; without a download: {_known_tasks()}")
        if spec.light_wrist_camera and spec.robot == WRIST_ROBOT:
            _drop_heavy_mesh()
        self.task = task
        self.instruction = spec.text
        self.time_limit = registered[task].max_episode_steps if spec.time_limit is None else spec.time_limit
        self._has_images = spec.observation == "images"
        renders = self._has_images or render_mode is not None
        arguments: dict[str, Any] = {
            "num_envs": max(1, num_envs),
            "obs_mode": "rgb" if self._has_images else "state_dict",
            "reward_mode": REWARD_MODES[spec.reward],
            "control_mode": CONTROL_MODES.get(spec.control_mode, spec.control_mode),
            "robot_uids": spec.robot,
            "sensor_configs": {"width": spec.image_size, "height": spec.image_size},
            "sim_backend": _gpu("physics") if num_envs else "physx_cpu",
            "render_backend": _render_backend(spec.render_device) if renders else "none",
            "render_mode": render_mode,
            # Unseeded resets of one environment then follow from its seed. With many it must be off: ManiSkill would
            # seed each partial reset by environment 0, and so repeat the same initial states.
            "enhanced_determinism": not num_envs,
        }
        with _failures_explained(task), _no_questions(task), suppress_logs(loggers=("mani_skill", "sapien")):
            self.env = registered[task].make(**arguments)
            raw, _ = self.env.reset(seed=0, options={})
        self.action_space = _action_space(self.env.single_action_space)
        self.observation_space = self._observation_space(self.translate(raw))

    def translate(self, raw: Any) -> Any:
        """Convert ManiSkill's observation, [N, …] each: to the state, or to named streams."""
        state = np.concatenate([*_flat(raw["agent"]), *_flat(raw["extra"])], axis=1, dtype=np.float32)
        if not self._has_images:
            return state
        images = {name: part["rgb"] for name, part in raw["sensor_data"].items() if "rgb" in part}
        streams: dict[str, Any] = {"state": state}
        head = next((name for name in images if name != WRIST_CAMERA), None)
        for stream, camera in (("head_rgb", head), ("wrist_rgb", WRIST_CAMERA)):
            if camera in images:
                streams[stream] = np.ascontiguousarray(_numpy(images[camera])[..., :3].transpose(0, 3, 1, 2))
        return {**streams, "instruction": [self.instruction] * len(state)}

    def _observation_space(self, example: Any) -> spaces.Space:
        if not isinstance(example, dict):
            return vector_space(example.shape[1])
        streams: dict[str, spaces.Space] = {"state": vector_space(example["state"].shape[1])}
        for name in ("head_rgb", "wrist_rgb"):
            if name in example:
                streams[name] = image_space(*example[name].shape[1:])
        return spaces.Dict({**streams, "instruction": text_space(INSTRUCTION_LENGTH)})


def _action_space(space: spaces.Space) -> spaces.Space:
    if not isinstance(space, spaces.Box):
        raise InputError(f"ManiSkill's action space is {space}: tasks with several robots are not supported")
    return spaces.Box(space.low.astype(np.float32), space.high.astype(np.float32), dtype=np.float32)


def _numpy(value: Any) -> np.ndarray:
    """Convert a tensor on any device, or an array, to an array."""
    return value.detach().cpu().numpy() if hasattr(value, "detach") else np.asarray(value)


def _flat(part: Any) -> Iterator[np.ndarray]:
    """Yield the leaves of a nested observation, [N, …] → [N, D] each, in ManiSkill's order."""
    if isinstance(part, Mapping):
        for inner in part.values():
            yield from _flat(inner)
    else:
        array = _numpy(part)
        yield array.reshape(len(array), -1).astype(np.float32)


def _words_of(task: str) -> str:
    """Convert a task's name to words: TurnFaucet-v1 → turn faucet."""
    return " ".join(re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", re.sub(r"-v\d+$", "", task))).lower()


def _known_tasks() -> str:
    return ", ".join(INSTRUCTIONS)


# ------------------------------------------------------------------------------------ ManiSkill's import and errors --


def _import_maniskill() -> dict[str, Any]:
    """Return ManiSkill's table of tasks. The GPU is set first: SAPIEN reads the variables when it is imported."""
    setup_sapien_gpu()
    remedy = (
        'pip install "deft[maniskill]"; its simulator SAPIEN has builds for Linux on x86-64, Windows and macOS only'
    )
    with suppress_logs(loggers=("mani_skill", "sapien")):
        import_optional("mani_skill.envs", "ManiSkill", remedy)  # registers the tasks
        return import_optional("mani_skill.utils.registration", "ManiSkill", remedy).REGISTERED_ENVS


def _gpu(purpose: str) -> str:
    """Return this process's GPU by its logical number, as ManiSkill names it."""
    import torch

    if not torch.cuda.is_available():
        raise InputError(f"ManiSkill's {purpose} on the GPU needs CUDA, and torch finds none; use env.vector: process")
    return f"cuda:{get_logical_gpu_id() % torch.cuda.device_count()}"


def _render_backend(device: str) -> str:
    import torch

    is_gpu = device == "auto" and torch.cuda.is_available()
    return _gpu("rendering") if is_gpu else device.replace("auto", "cpu")


@contextlib.contextmanager
def _no_questions(task: str) -> Iterator[None]:
    """Raise InputError instead of asking on stdin whether to download missing files of a task."""
    original = builtins.input

    def reject(prompt: object = "") -> str:
        raise InputError(
            f"ManiSkill's {task} needs files that are missing: python -m mani_skill.utils.download_asset {task}; "
            f"without a download: {_known_tasks()}"
        )

    builtins.input = reject
    try:
        yield
    except SystemExit as stop:
        raise InputError(f"ManiSkill's {task} exited while it was made (exit status {stop.code})") from stop
    finally:
        builtins.input = original


@contextlib.contextmanager
def _failures_explained(task: str) -> Iterator[None]:
    """Convert exceptions of ManiSkill's constructors to InputError with a remedy."""
    try:
        yield
    except DeftError:
        raise
    except Exception as error:
        reason = one_line(error)
        remedy = ""
        if re.search(r"render|vulkan|vk::|device", reason, re.IGNORECASE):
            remedy = (
                "; SAPIEN needs Vulkan, with observation: state too (materials of objects are made with it): a GPU "
                "driver, or mesa-vulkan-drivers 25 or newer (Debian 12: from bookworm-backports)"
            )
        raise InputError(f"ManiSkill's {task} cannot be made: {reason}{remedy}") from error


# ------------------------------------------------------------------------------------------------ a light wrist camera


def _drop_heavy_mesh() -> None:
    """Remove the mesh of the wrist camera from the robot's description: rendering is ten times as fast."""
    from mani_skill.agents.registration import REGISTERED_AGENTS, register_agent
    from mani_skill.agents.robots.panda.panda_wristcam import PandaWristCam

    if getattr(REGISTERED_AGENTS[WRIST_ROBOT].agent_cls, "is_light", False):
        return
    folder = Path(tempfile.mkdtemp(prefix="deft-maniskill-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    description = Path(str(PandaWristCam.urdf_path))
    path = folder / description.name
    path.write_text(without_visual(description.read_text(), HEAVY_LINK, description.parent))
    rules = description.with_suffix(".srdf")  # which links never collide; SAPIEN expects it beside the description
    if rules.is_file():
        shutil.copy(rules, folder / rules.name)

    class LightPandaWristCam(PandaWristCam):
        """The same robot with the same masses and shapes, without the mesh of its camera."""

        uid = WRIST_ROBOT
        urdf_path = str(path)
        is_light = True

    with suppress_logs():
        register_agent(override=True)(LightPandaWristCam)


def without_visual(urdf: str, link_name: str, folder: Path) -> str:
    """Remove the visual shapes of one link from a robot's description; make the paths of its meshes absolute."""
    robot = ElementTree.fromstring(urdf)
    link = next((link for link in robot.iter("link") if link.get("name") == link_name), None)
    if link is None:
        raise RunError(f"ManiSkill's robot has no link {link_name!r}; use light_wrist_camera: false")
    for visual in link.findall("visual"):
        link.remove(visual)
    for mesh in robot.iter("mesh"):
        mesh.set("filename", str((folder / mesh.get("filename", "")).resolve()))
    return ElementTree.tostring(robot, encoding="unicode")
