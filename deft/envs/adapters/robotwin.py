"""RoboTwin 2.0 (on SAPIEN): its two-armed tasks as an environment, registered as `deft/RoboTwin-v0` (`robotwin`).

RoboTwin is a repository, not a package: `root` (or ROBOTWIN_ROOT) is its folder. The adapter reads RoboTwin's config
files, and converts deltas to joint targets and observations to named streams.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
import yaml
from gymnasium import spaces
from PIL import Image

from deft import trust
from deft.config.validation import Count, Positive, Switch, checked, settings
from deft.envs.adapters.sapien_gpu import setup_sapien_gpu
from deft.envs.checks import check_render_mode
from deft.envs.padded import ARM_SIZE, ARM_STARTS, GRIPPERS, PADDED_SIZE
from deft.envs.spaces import action_space, image_space, text_space, vector_space
from deft.envs.suppress_logs import suppress_logs
from deft.errors import InputError, RunError, one_line

ROOT_VARIABLE = "ROBOTWIN_ROOT"
CONFIG_FOLDERS = ("env_cfg/task_config", "task_config")  # of the repository since August 2026, and before
MAX_JOINT_STEP = 0.1  # radians in one step, at action 1 and action_scale 1
MAX_LAG = 0.3  # radians from a joint to its target at most
MAX_SCENE_TRIES = 100
INSTRUCTION_LENGTH = 128
RANDOMIZATION_KEYS = (
    "random_background",
    "cluttered_table",
    "clean_background_rate",
    "random_head_camera_dis",
    "random_table_height",
    "random_light",
    "crazy_random_light_rate",
)


@settings
class RoboTwinSpec:
    """The arguments of `RoboTwinEnv`; those about the scene override `config`."""

    task: str = "beat_block_hammer"
    config: str | dict[str, Any] = "demo_clean"
    """The name of a file in RoboTwin's `task_config`, or its content."""
    root: str | None = None
    """RoboTwin's folder; by default ROBOTWIN_ROOT."""
    embodiment: list[Any] | None = None
    domain_randomization: dict[str, Any] | None = None
    observation: Literal["images", "state"] = "images"
    image_size: Count | None = None
    """Side of the images in pixels; by default the camera's own size."""
    control_mode: Literal["delta_qpos"] = "delta_qpos"
    action_scale: Positive = 1.0
    single_arm: Switch = False
    instruction: str | None = None


class RoboTwinEnv(gymnasium.Env[Any, np.ndarray]):
    """One RoboTwin task.

    **Action**: Box(-1, 1, (32,)) in the 32-dim layout; joints move by ±0.1 rad × action_scale, a gripper dim is its
    target opening (1 open, -1 closed). RoboTwin takes absolute joint positions: the delta is added to the last target.
    `action_mask` marks the real dims; with `single_arm` the right arm does not move.

    **Observation** `"images"`: Dict of `state` (32: joints and grippers), `head_rgb`, `wrist_rgb` (the left arm's),
    with two arms `right_wrist_rgb` (uint8 [3, h, w]), and `instruction`; `"state"`: only the 32, without images.

    **Reward**: 1 for success, which ends the episode.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 (Gymnasium's own declaration)

    def __init__(
        self, task: str = "beat_block_hammer", render_mode: Literal["rgb_array"] | None = None, **arguments: Any
    ) -> None:
        """Choose the task; `arguments` are those of `RoboTwinSpec`."""
        check_render_mode(render_mode)
        spec = checked(RoboTwinSpec, {"task": task, **arguments})
        self._root = _find_root(spec.root)
        self._has_images = spec.observation == "images"
        self._settings = _read_settings(self._root, spec)
        self._settings["data_type"] = {
            **self._settings.get("data_type", {}),
            "rgb": self._has_images or render_mode is not None,
            "qpos": True,
        }
        self._task = _load_task(self._root, task)
        self._random = _OwnRandomState()
        self.task = task
        self.instruction = task.replace("_", " ") if spec.instruction is None else spec.instruction
        self.image_size = spec.image_size
        self.single_arm = spec.single_arm
        self.render_mode = render_mode
        self._joint_step = MAX_JOINT_STEP * spec.action_scale
        self._num_episodes = 0
        self._is_set_up = False
        self._raw: dict[str, Any] = {}
        self._target = np.zeros(PADDED_SIZE)
        self.action_space = action_space(PADDED_SIZE)
        self._draw_scene(0, np.random.default_rng(0))  # its observation gives the sizes of arms and images
        self._joints = _joint_mask(self._raw["joint_action"])
        self.action_mask = self._joints.copy()
        if spec.single_arm:
            self.action_mask[ARM_STARTS["right"] :] = False
        self.observation_space = self._make_observation_space()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Set up a scene; draw another one if its objects do not come to rest, at most 100 times."""
        super().reset(seed=seed)
        self._draw_scene(seed, self.np_random)
        self._target = padded_joints(self._raw["joint_action"])
        return self._observe(), {"instruction": self.instruction}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Move both arms to their next targets."""
        action = np.where(self.action_mask, np.clip(np.asarray(action, np.float64), -1.0, 1.0), 0.0)
        present = padded_joints(self._raw["joint_action"])
        moved = np.clip(self._target + self._joint_step * action, present - MAX_LAG, present + MAX_LAG)
        for gripper in GRIPPERS.values():
            is_moved = self.action_mask[gripper]
            moved[gripper] = (action[gripper] + 1.0) / 2.0 if is_moved else self._target[gripper]
        self._target = np.where(self.action_mask, moved, self._target)
        with self._quietly():
            self._task.take_action(self._target[self._joints], "qpos")
            self._raw = self._task.get_obs()
            success = bool(self._task.check_success() or getattr(self._task, "eval_success", False))
        info = {"success": success, "instruction": self.instruction}
        return self._observe(), float(success), success, False, info

    def render(self) -> np.ndarray | None:
        """Return the head camera's latest image, uint8 [h, w, 3]."""
        return None if self.render_mode is None else self._raw["observation"]["head_camera"]["rgb"]

    def close(self) -> None:
        """Close the simulation."""
        if self._is_set_up:
            self._is_set_up = False
            self._task.close_env()

    def _draw_scene(self, seed: int | None, generator: np.random.Generator) -> None:
        for _ in range(MAX_SCENE_TRIES):
            try:
                return self._set_up(int(generator.integers(2**31)) if seed is None else seed)
            except Exception as error:
                if type(error).__name__ != "UnStableError":
                    raise RunError(f"RoboTwin's {self.task} cannot be set up: {one_line(error)}") from error
                seed = None
        raise RunError(f"RoboTwin's {self.task}: no stable scene in {MAX_SCENE_TRIES} tries")

    def _set_up(self, seed: int) -> None:
        frequency = int(self._settings.get("clear_cache_freq", 5))
        with suppress_logs(), contextlib.chdir(self._root), self._random.swapped():
            if self._is_set_up:
                self._is_set_up = False
                self._task.close_env(clear_cache=self._num_episodes % frequency == 0)
            self._num_episodes += 1
            try:
                self._task.setup_demo(now_ep_num=self._num_episodes, seed=seed, **self._settings)
            except Exception:
                self._task.close_env()
                raise
            self._is_set_up = True
            self._raw = self._task.get_obs()

    @contextlib.contextmanager
    def _quietly(self) -> Iterator[None]:
        """Suppress the line that RoboTwin prints at every action."""
        with contextlib.redirect_stdout(io.StringIO()), contextlib.chdir(self._root), self._random.swapped():
            yield

    def _make_observation_space(self) -> spaces.Space:
        state = vector_space(PADDED_SIZE)
        if not self._has_images:
            return state
        images = {name: image_space(*image.shape) for name, image in self._images().items()}
        return spaces.Dict({"state": state, **images, "instruction": text_space(INSTRUCTION_LENGTH)})

    def _observe(self) -> Any:
        state = padded_joints(self._raw["joint_action"]).astype(np.float32)
        if not self._has_images:
            return state
        return {"state": state, **self._images(), "instruction": self.instruction}

    def _images(self) -> dict[str, np.ndarray]:
        cameras = {"head_rgb": "head_camera", "wrist_rgb": "left_camera"}
        if not self.single_arm:
            cameras["right_wrist_rgb"] = "right_camera"
        found = self._raw["observation"]
        missing = [camera for camera in cameras.values() if "rgb" not in found.get(camera, {})]
        if missing:
            raise InputError(
                f"RoboTwin's {self.task} has no images of {', '.join(missing)}; set collect_head_camera and "
                "collect_wrist_camera in its config"
            )
        return {stream: self._image(found[camera]["rgb"]) for stream, camera in cameras.items()}

    def _image(self, rgb: np.ndarray) -> np.ndarray:
        """Convert [h, w, 3] to [3, h, w], resized to `image_size` if that is given."""
        if self.image_size is not None:
            size = (self.image_size, self.image_size)
            rgb = np.asarray(Image.fromarray(rgb).resize(size, Image.Resampling.BILINEAR))
        return np.ascontiguousarray(rgb.transpose(2, 0, 1))


def padded_joints(joint_action: Mapping[str, Any]) -> np.ndarray:
    """Return RoboTwin's joint positions in the 32-dim layout; zeros in the padding."""
    padded = np.zeros(PADDED_SIZE)
    for side, start in ARM_STARTS.items():
        arm = np.asarray(joint_action[f"{side}_arm"], np.float64)
        padded[start : start + len(arm)] = arm
        padded[GRIPPERS[side]] = joint_action[f"{side}_gripper"]
    return padded


def _joint_mask(joint_action: Mapping[str, Any]) -> np.ndarray:
    """Return which of the 32 dims the robot has; in their order they are RoboTwin's own action vector."""
    mask = np.zeros(PADDED_SIZE, bool)
    for side, start in ARM_STARTS.items():
        size = len(joint_action[f"{side}_arm"])
        if size > ARM_SIZE:
            raise InputError(f"RoboTwin's {side} arm has {size} joints; the layout has {ARM_SIZE} per arm")
        mask[start : start + size] = mask[GRIPPERS[side]] = True
    return mask


# ----------------------------------------------------------------------------------------- RoboTwin's files and modules


def _find_root(root: str | None) -> Path:
    if root:
        trust.check(root, "root", "Deft does not run a RoboTwin that only a file names", f"{ROOT_VARIABLE}={root}")
    given = root or os.environ.get(ROOT_VARIABLE)
    if not given:
        raise InputError(
            f"RoboTwin is a separate repository: install it as its README describes, then set {ROOT_VARIABLE} (or "
            "--env-kwargs root=…) to its folder"
        )
    path = Path(given).expanduser().resolve()
    if not (path / "envs").is_dir() or not _config_folder(path).is_dir():
        raise InputError(f"{path} is not a RoboTwin repository: it lacks envs/ or {' or '.join(CONFIG_FOLDERS)}/")
    return path


def _config_folder(root: Path) -> Path:
    """Return the folder of the configs of tasks, robots and cameras."""
    return next((root / name for name in CONFIG_FOLDERS if (root / name).is_dir()), root / CONFIG_FOLDERS[0])


def _read_settings(root: Path, spec: RoboTwinSpec) -> dict[str, Any]:
    """Return the arguments of `setup_demo`: a config, the files of its robots and the size of its head camera."""
    configs, config = _config_folder(root), spec.config
    settings = dict(_read_yaml(configs / f"{config}.yml")) if isinstance(config, str) else dict(config)
    settings |= {"task_name": spec.task, "render_freq": 0, "save_data": False, "eval_mode": False}
    if spec.embodiment is not None:
        settings["embodiment"] = spec.embodiment
    wanted = dict(spec.domain_randomization or {})
    if wanted.pop("random_appearance", False):
        raise InputError("domain_randomization: RoboTwin has no random_appearance; leave it false")
    unknown = [name for name in wanted if name not in RANDOMIZATION_KEYS]
    if unknown:
        raise InputError(
            f"domain_randomization: RoboTwin has no {unknown[0]!r}; it has {', '.join(RANDOMIZATION_KEYS)}"
        )
    settings["domain_randomization"] = {**settings.get("domain_randomization", {}), **wanted}
    robots = settings.get("embodiment")
    if not isinstance(robots, list) or len(robots) not in (1, 3):
        raise InputError(f"embodiment is {robots!r}; RoboTwin takes [robot], or [left, right, distance]")
    embodiments = _read_yaml(configs / "_embodiment_config.yml")
    for side, name in zip(("left", "right"), (robots * 2)[:2], strict=True):
        if name not in embodiments:
            raise InputError(f"embodiment: RoboTwin has no {name!r}; it has {', '.join(map(str, embodiments))}")
        file = embodiments[name]["file_path"]
        settings[f"{side}_robot_file"] = file
        settings[f"{side}_embodiment_config"] = _read_yaml(root / file / "config.yml")
    settings["dual_arm_embodied"] = len(robots) == 1
    if len(robots) == 3:
        settings["embodiment_dis"] = robots[2]
    kind = settings.get("camera", {}).get("head_camera_type")
    cameras = _read_yaml(configs / "_camera_config.yml")
    if kind not in cameras:
        raise InputError(f"camera.head_camera_type is {kind!r}; RoboTwin has {', '.join(map(str, cameras))}")
    settings["head_camera_h"], settings["head_camera_w"] = cameras[kind]["h"], cameras[kind]["w"]
    return settings


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"RoboTwin's {path} cannot be read: {error.strerror or error}") from error
    except yaml.YAMLError as error:
        raise InputError(f"RoboTwin's {path} is not valid YAML: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise InputError(f"RoboTwin's {path} is not a mapping")
    return content


def _load_task(root: Path, task: str) -> Any:
    """Make a task object; RoboTwin's modules are imported from its folder, after the GPU is set."""
    if not task.isidentifier() or not (root / "envs" / f"{task}.py").is_file():
        names = sorted(file.stem for file in (root / "envs").glob("[!_]*.py"))
        raise InputError(f"task is {task!r}, which RoboTwin does not have; it has {', '.join(names)}")
    setup_sapien_gpu()
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    try:
        with suppress_logs(), contextlib.chdir(root):
            return getattr(importlib.import_module(f"envs.{task}"), task)()
    except ImportError as error:
        raise InputError(
            f"RoboTwin's {task} cannot be imported ({one_line(error)}): install the packages in its README"
        ) from error


class _OwnRandomState:
    """RoboTwin's state of the global random generators.

    RoboTwin seeds them at every scene and draws from them while running; the policy's own draws must not change.
    """

    def __init__(self) -> None:
        self._inside: tuple[Any, Any, Any] | None = None

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Use RoboTwin's generators in the block, and restore the previous ones afterwards."""
        outside = self._get()
        if self._inside is not None:
            self._set(self._inside)
        try:
            yield
        finally:
            self._inside = self._get()
            self._set(outside)

    @staticmethod
    def _get() -> tuple[Any, Any, Any]:
        import torch

        return random.getstate(), np.random.get_state(), torch.get_rng_state()

    @staticmethod
    def _set(state: tuple[Any, Any, Any]) -> None:
        import torch

        random.setstate(state[0])
        np.random.set_state(state[1])
        torch.set_rng_state(state[2])
