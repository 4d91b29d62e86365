"""ManiSkill 3 (on SAPIEN; extra `maniskill`): its tasks for a Panda with head and wrist camera, as Deft has worlds.

`ManiSkillEnv` is one world on the CPU, registered as `deft/ManiSkill-v0` (short name `maniskill`); `ManiSkillVectorEnv`
is many in one simulation on the GPU, made by `deft.envs.make` for `env.vector: gpu`.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

import gymnasium
import numpy as np
from gymnasium import spaces

from deft.envs.adapters.sapien_gpu import get_logical_gpu_id, setup_sapien_gpu
from deft.envs.batched import BatchedVectorEnv
from deft.envs.suppress_logs import suppress_logs
from deft.envs.vector import ActionLayout, Observation, ObservationLayout, VectorStep
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
# Tasks for one Panda that need no download, and what the robot is told in them.
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


class ManiSkillEnv(gymnasium.Env[Any, np.ndarray]):
    """One ManiSkill task in this process, simulated on the CPU.

    **Observation** `"images"`: Dict of `state` (joint positions and velocities, and what the task tells of itself; not
    where the objects are), `head_rgb` and `wrist_rgb` (uint8 [3, h, w]) and `instruction`. `"state"`: Box that
    has the objects' places too; renders nothing. **Action**: Box(-1, 1): `delta_qpos` 7 joint deltas (±0.1 rad),
    `delta_ee` 6, `delta_ee_pos` 3, then the gripper; any other name is ManiSkill's own. **Reward** `"dense"` (at most 1
    a step) or `"sparse"`. An episode ends with success or failure, or at the task's own `time_limit`.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012 (Gymnasium's own declaration)

    def __init__(
        self,
        task: str = "PickCube-v1",
        observation: Literal["images", "state"] = "images",
        image_size: int = 128,
        control_mode: str = "delta_qpos",
        reward: Literal["dense", "sparse"] = "dense",
        robot: str = WRIST_ROBOT,
        instruction: str | None = None,
        time_limit: int | None = None,
        render_device: str = "auto",
        light_wrist_camera: bool = True,
        render_mode: Literal["rgb_array"] | None = None,
    ) -> None:
        """Choose the task, what is seen and how it is controlled; `render_device` is auto, cpu, cuda or cuda:N."""
        if render_mode not in (None, "rgb_array"):
            raise InputError(f"render_mode is {render_mode!r}; choose 'rgb_array' or None")
        self._world = _World(
            task,
            observation=observation,
            image_size=image_size,
            control_mode=control_mode,
            reward=reward,
            robot=robot,
            instruction=instruction,
            time_limit=time_limit,
            render_device=render_device,
            light_wrist_camera=light_wrist_camera,
            render_mode=render_mode,
        )
        self.render_mode = render_mode
        self.observation_space = self._world.observation_space
        self.action_space = self._world.action_space
        self._elapsed_steps = 0

    @property
    def instruction(self) -> str:
        """What the robot is told to do."""
        return self._world.instruction

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode; a seed decides it and those after it."""
        super().reset(seed=seed)
        self._elapsed_steps = 0
        raw, _ = self._world.env.reset(seed=seed, options=options or {})
        return self._first_row(raw), {"instruction": self.instruction}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One control step, 0.05 s."""
        raw, reward, terminated, _, info = self._world.env.step(np.asarray(action, np.float32)[None])
        self._elapsed_steps += 1
        limit = self._world.time_limit
        truncated = limit is not None and self._elapsed_steps >= limit
        told: dict[str, Any] = {"instruction": self.instruction}
        if "success" in info:
            told["success"] = bool(_numpy(info["success"])[0])
        return self._first_row(raw), float(_numpy(reward)[0]), bool(_numpy(terminated)[0]), truncated, told

    def render(self) -> np.ndarray | None:
        """A picture for videos, uint8 [h, w, 3], from ManiSkill's own viewpoint."""
        return None if self.render_mode is None else _numpy(self._world.env.render())[0]

    def close(self) -> None:
        """Free the simulation."""
        self._world.env.close()

    def _first_row(self, raw: Any) -> Any:
        rows = self._world.translate(raw)
        if not isinstance(rows, dict):
            return rows[0]
        return {**{name: stream[0] for name, stream in rows.items()}, "instruction": self.instruction}


class ManiSkillVectorEnv(BatchedVectorEnv):
    """N copies of a ManiSkill task in one simulation on the GPU; `settings` are those of `ManiSkillEnv`.

    Environment i draws its first episode from `seed + i`. Later ones come from torch's generator, as ManiSkill has it.
    """

    def __init__(self, num_envs: int, *, max_episode_steps: int | None = None, **settings: Any) -> None:
        self._world = _World(settings.pop("task", "PickCube-v1"), num_envs=num_envs, **settings)
        if max_episode_steps is not None:
            self._world.time_limit = max_episode_steps
        super().__init__(
            num_envs, ObservationLayout(self._world.observation_space), ActionLayout(self._world.action_space)
        )
        self._closed = False

    def reset(self, seed: int | Sequence[int] | None = None) -> Observation:
        """Start an episode in every environment; environment i gets `seed + i`, or the i-th of several seeds."""
        seeds = None if seed is None else self._env_seeds(seed)
        arrays = self._next_arrays()
        raw, _ = self._world.env.reset(seed=seeds, options={})
        self._write(raw, arrays.observation, self._rows)
        self._forget()
        self._started = True
        return arrays.observation

    def step(self, actions: np.ndarray) -> VectorStep:
        """Step every environment with its row of `actions`."""
        prepared = self._prepare(actions)
        arrays = self._next_arrays()
        try:
            raw, reward, terminated, _, info = self._world.env.step(prepared)
        except Exception as error:
            raise RunError(f"ManiSkill's {self._world.task} raised {one_line(error)}") from error
        arrays.reward[:], arrays.terminated[:] = _numpy(reward), _numpy(terminated)
        self._count(arrays.reward)
        limit = self._world.time_limit
        arrays.truncated[:] = False if limit is None else self._lengths >= limit
        self._write(raw, arrays.observation, self._rows)
        done_index = np.flatnonzero(arrays.terminated | arrays.truncated)
        if not len(done_index):
            return self._result(arrays, [])
        self._write(raw, self._final, done_index)
        success = _numpy(info["success"]) if "success" in info else None
        episodes = [self._end_episode(int(row), None if success is None else success[row]) for row in done_index]
        first, _ = self._world.env.reset(options={"env_idx": self._world.index(done_index)})
        self._write(first, arrays.observation, done_index)
        return self._result(arrays, episodes)

    def _write(self, raw: Any, arrays: Observation, rows: np.ndarray) -> None:
        """Put the given rows of what ManiSkill observed (always all environments) into the arrays."""
        translated = self._world.translate(raw)
        if not isinstance(translated, dict):
            assert isinstance(arrays, np.ndarray)
            arrays[rows] = translated[rows]
            return
        assert isinstance(arrays, dict)
        for name, stream in translated.items():
            arrays[name][rows] = stream[rows]
        arrays["instruction"][rows] = 0
        words = np.frombuffer(self._world.instruction.encode(), np.uint8)
        arrays["instruction"][rows, : len(words)] = words

    def state_obstacle(self) -> str:
        """One line on what keeps the state from being saved."""
        return "ManiSkill's simulation on the GPU cannot be put back exactly"

    def call(self, name: str, *args: Any) -> list[Any]:
        """Refused: the environments are rows of one simulation."""
        raise InputError(f"ManiSkill's environments on the GPU have no method {name!r}; use env.vector: sync")

    def render(self, index: int = 0) -> np.ndarray | None:
        """Nothing: videos are made with a single environment."""
        return None

    def close(self) -> None:
        """Free the simulation. Calling it again does nothing."""
        if not self._closed:
            self._closed = True
            self._world.env.close()


# ----------------------------------------------------------------------------------------------------------- the world


class _World:
    """A ManiSkill environment of one or many copies, and its observations as numpy arrays."""

    def __init__(
        self,
        task: str,
        *,
        num_envs: int = 0,
        observation: str = "images",
        image_size: int = 128,
        control_mode: str = "delta_qpos",
        reward: str = "dense",
        robot: str = WRIST_ROBOT,
        instruction: str | None = None,
        time_limit: int | None = None,
        render_device: str = "auto",
        light_wrist_camera: bool = True,
        render_mode: str | None = None,
    ) -> None:
        """`num_envs` 0: one environment on the CPU."""
        if observation not in ("images", "state"):
            raise InputError(f"observation is {observation!r}; choose 'images' or 'state'")
        if reward not in REWARD_MODES:
            raise InputError(f"reward is {reward!r}; choose {' or '.join(REWARD_MODES)}")
        if not 16 <= image_size <= 1024:
            raise InputError(f"image_size is {image_size}; choose 16 to 1024 pixels")
        text = INSTRUCTIONS.get(task, _words_of(task)) if instruction is None else instruction
        if len(text.encode()) > INSTRUCTION_LENGTH:
            raise InputError(f"instruction has {len(text.encode())} bytes; at most {INSTRUCTION_LENGTH} fit")
        registered = _import_maniskill()
        if task not in registered:
            raise InputError(f"task is {task!r}, which ManiSkill does not have; without a download: {_known_tasks()}")
        if light_wrist_camera and robot == WRIST_ROBOT:
            _drop_heavy_mesh()
        self.task = task
        self.instruction = text
        self.time_limit = registered[task].max_episode_steps if time_limit is None else time_limit
        self._sees = observation == "images"
        renders = self._sees or render_mode is not None
        settings: dict[str, Any] = {
            "num_envs": max(1, num_envs),
            "obs_mode": "rgb" if self._sees else "state_dict",
            "reward_mode": REWARD_MODES[reward],
            "control_mode": CONTROL_MODES.get(control_mode, control_mode),
            "robot_uids": robot,
            "sensor_configs": {"width": image_size, "height": image_size},
            "sim_backend": _gpu("physics") if num_envs else "physx_cpu",
            "render_backend": _render_backend(render_device) if renders else "none",
            "render_mode": render_mode,
            # Unseeded resets of one environment then follow from its seed. With many it must be off: ManiSkill would
            # seed each partial reset by environment 0, and so repeat the same beginnings.
            "enhanced_determinism": not num_envs,
        }
        with _failures_explained(task), _no_questions(task), suppress_logs(loggers=("mani_skill", "sapien")):
            self.env = registered[task].make(**settings)
            raw, _ = self.env.reset(seed=0, options={})
        self.action_space = _action_space(self.env.single_action_space)
        self.observation_space = self._observation_space(self.translate(raw))

    def translate(self, raw: Any) -> Observation:
        """What ManiSkill observed, [N, …] each: the state, or the named streams but for the instruction."""
        state = np.concatenate([*_flat(raw["agent"]), *_flat(raw["extra"])], axis=1, dtype=np.float32)
        if not self._sees:
            return state
        pictures = {name: part["rgb"] for name, part in raw["sensor_data"].items() if "rgb" in part}
        streams = {"state": state}
        head = next((name for name in pictures if name != WRIST_CAMERA), None)
        for stream, camera in (("head_rgb", head), ("wrist_rgb", WRIST_CAMERA)):
            if camera in pictures:
                streams[stream] = np.ascontiguousarray(_numpy(pictures[camera])[..., :3].transpose(0, 3, 1, 2))
        return streams

    def index(self, rows: np.ndarray) -> Any:
        """Rows as ManiSkill takes them."""
        import torch

        return torch.as_tensor(rows, device=self.env.device)

    def _observation_space(self, example: Observation) -> spaces.Space:
        if not isinstance(example, dict):
            return spaces.Box(-np.inf, np.inf, example.shape[1:], np.float32)
        streams: dict[str, spaces.Space] = {}
        for name, stream in example.items():
            low, high = (0, 255) if stream.dtype == np.uint8 else (-np.inf, np.inf)
            streams[name] = spaces.Box(low, high, stream.shape[1:], stream.dtype.type)
        printable = "".join(chr(code) for code in range(32, 127))
        streams["instruction"] = spaces.Text(INSTRUCTION_LENGTH, min_length=0, charset=printable)
        return spaces.Dict(streams)


def _action_space(space: spaces.Space) -> spaces.Space:
    if not isinstance(space, spaces.Box):
        raise InputError(f"ManiSkill's action space is {space}: tasks with several robots are not supported")
    return spaces.Box(space.low.astype(np.float32), space.high.astype(np.float32), dtype=np.float32)


def _numpy(value: Any) -> np.ndarray:
    """A tensor on any device, or an array, as an array."""
    return value.detach().cpu().numpy() if hasattr(value, "detach") else np.asarray(value)


def _flat(part: Any) -> Iterator[np.ndarray]:
    """The leaves of a nested observation, [N, …] → [N, D] each, in ManiSkill's order."""
    if isinstance(part, Mapping):
        for inner in part.values():
            yield from _flat(inner)
    else:
        array = _numpy(part)
        yield array.reshape(len(array), -1).astype(np.float32)


def _words_of(task: str) -> str:
    """A task's name as words: TurnFaucet-v1 → turn faucet."""
    return " ".join(re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", re.sub(r"-v\d+$", "", task))).lower()


def _known_tasks() -> str:
    return ", ".join(INSTRUCTIONS)


# ------------------------------------------------------------------------------------ ManiSkill's import and complaints


def _import_maniskill() -> dict[str, Any]:
    """ManiSkill's table of tasks. The GPU is chosen first: SAPIEN reads the variables when it is imported."""
    setup_sapien_gpu()
    try:
        with suppress_logs(loggers=("mani_skill", "sapien")):
            import mani_skill.envs  # noqa: F401 (registers the tasks)
            from mani_skill.utils.registration import REGISTERED_ENVS
    except ImportError as error:
        raise InputError(
            f'ManiSkill cannot be used ({one_line(error)}): pip install "deft[maniskill]"; its simulator SAPIEN has '
            "builds for Linux on x86-64, Windows and macOS alone"
        ) from error
    return REGISTERED_ENVS


def _gpu(purpose: str) -> str:
    """This process's GPU as ManiSkill names it, by its logical number."""
    import torch

    if not torch.cuda.is_available():
        raise InputError(f"ManiSkill's {purpose} on the GPU needs CUDA, and torch finds none; use env.vector: process")
    return f"cuda:{get_logical_gpu_id() % torch.cuda.device_count()}"


def _render_backend(device: str) -> str:
    import torch

    if device == "auto":
        return _gpu("rendering") if torch.cuda.is_available() else "cpu"
    if re.fullmatch(r"cpu|cuda(:\d+)?", device) is None:
        raise InputError(f"render_device is {device!r}; choose auto, cpu, cuda or cuda:N")
    return device


@contextlib.contextmanager
def _no_questions(task: str) -> Iterator[None]:
    """Tasks whose files are missing ask on stdin whether to fetch them; a run must not wait for an answer."""
    original = builtins.input

    def refuse(prompt: object = "") -> str:
        raise InputError(
            f"ManiSkill's {task} needs files that are not here: python -m mani_skill.utils.download_asset {task}; "
            f"without a download: {_known_tasks()}"
        )

    builtins.input = refuse
    try:
        yield
    except SystemExit as stop:
        raise InputError(f"ManiSkill's {task} gave up while it was made (exit status {stop.code})") from stop
    finally:
        builtins.input = original


@contextlib.contextmanager
def _failures_explained(task: str) -> Iterator[None]:
    """What ManiSkill raises while a world is made, in one line with what to do."""
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
    """Have the robot with the wrist camera look the same but for the camera's own mesh: renders ten times as fast."""
    from mani_skill.agents.registration import REGISTERED_AGENTS, register_agent
    from mani_skill.agents.robots.panda.panda_wristcam import PandaWristCam

    if getattr(REGISTERED_AGENTS[WRIST_ROBOT].agent_cls, "is_light", False):
        return
    folder = Path(tempfile.mkdtemp(prefix="deft-maniskill-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    description = Path(str(PandaWristCam.urdf_path))
    path = folder / description.name
    path.write_text(without_visual(description.read_text(), HEAVY_LINK, description.parent))
    rules = description.with_suffix(".srdf")  # which links never collide; SAPIEN looks for it beside the description
    if rules.is_file():
        shutil.copy(rules, folder / rules.name)

    class LightPandaWristCam(PandaWristCam):
        """The same robot with the same masses and shapes; its camera is not drawn."""

        uid = WRIST_ROBOT
        urdf_path = str(path)
        is_light = True

    with suppress_logs():
        register_agent(override=True)(LightPandaWristCam)


def without_visual(urdf: str, link_name: str, folder: Path) -> str:
    """A robot's description without what one link looks like; its meshes are named by their place in `folder`."""
    robot = ElementTree.fromstring(urdf)
    link = next((link for link in robot.iter("link") if link.get("name") == link_name), None)
    if link is None:
        raise RunError(f"ManiSkill's robot has no link {link_name!r}; use light_wrist_camera: false")
    for visual in link.findall("visual"):
        link.remove(visual)
    for mesh in robot.iter("mesh"):
        mesh.set("filename", str((folder / mesh.get("filename", "")).resolve()))
    return ElementTree.tostring(robot, encoding="unicode")
