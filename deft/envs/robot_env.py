"""A simulated robot for the F1 environments: padded actions in, frames and the normalized state out.

`F1RLEnv` makes one. The tabletop, RoboTwin and ManiSkill are known here by name. Any other Gymnasium id works if the
environment uses the 32-dim layout itself, as RoboTwin's adapter does: Box actions [32] with an `action_mask`, and Dict
observations with `state` [32] (radians; openings 0 to 1), `wrist_rgb` and, if required, `head_rgb`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import gymnasium
import numpy as np
from gymnasium import spaces
from pydantic import Field

from deft import schema
from deft.config.settings import EnvConfig
from deft.config.validation import Count, Fraction, Switch, settings
from deft.envs.make import SHORT_NAMES, make_env
from deft.envs.normalizers import ActionNormalizer, StateNormalizer
from deft.envs.padded import GRIPPERS, PADDED_SIZE
from deft.envs.state import layers
from deft.envs.tabletop import panda
from deft.envs.tabletop.control import action_mask, hand_down, rotation_vector, unpad_action
from deft.envs.wrappers import wrapper_attribute
from deft.errors import InputError

EXPLORATION = "random_exploration"
_NAMES = {env_id: name for name, env_id in SHORT_NAMES.items()}


@settings
class TaskConfig:
    """The settings of `task_config`: the `environment` section of an `rl_config.yaml`."""

    world: str = "tabletop"
    """`tabletop`, `robotwin`, `maniskill`, or the Gymnasium id of an environment with the 32-dim layout."""
    world_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the simulator."""
    task_name: str = EXPLORATION
    """One of the simulator's tasks."""
    control_mode: str = "delta_qpos"
    """`delta_qpos`; on the tabletop also `delta_ee` and `delta_ee_pos`."""
    single_arm: Switch = True
    """Whether only the left arm acts. The tabletop and ManiSkill have only one."""
    scene_reset_interval: Count = 1
    """Episodes per scene (tabletop)."""
    embodiment: list[Any] = Field(default_factory=lambda: ["franka-panda"], min_length=1)
    """The robot."""
    domain_randomization: dict[str, Any] = Field(default_factory=dict)
    """What varies between scenes."""
    image_size: Count = 64
    """Side of the images in pixels."""
    need_head_camera: Switch | None = None
    """Whether observations include `head_rgb`; by default only in the teacher's phase."""
    n_obs_img_steps: Count = 4
    """H, the length of the histories."""
    obs_img_stride: Count = 1
    """Steps between two entries of the histories."""
    action_scale: Annotated[Fraction, Field(gt=0)] = 1.0
    """The delta of an action of 1, as a fraction of the largest."""
    max_steps: Count = 50
    """Steps of an episode until it is truncated."""


class RobotEnv:
    """A Gymnasium environment with its robot in the 32-dim layout."""

    def __init__(self, config: TaskConfig, needs_head: bool, render_mode: str | None = None) -> None:
        """Make the environment of a config, without its own time limit."""
        name = _NAMES.get(config.world, config.world)
        kwargs, read_state = _plan(name, config, needs_head)
        if render_mode is not None:
            kwargs["render_mode"] = render_mode
        try:
            env = make_env(EnvConfig(id=config.world, kwargs=kwargs | config.world_kwargs))
        except InputError as error:
            message = str(error).replace("env.id", "environment.world", 1).replace("--env ", "--environment world=", 1)
            raise InputError(message) from error
        self.env = next(layer for layer in layers(env) if not isinstance(layer, gymnasium.wrappers.TimeLimit))
        self.cameras = tuple(name for name in (schema.HEAD_RGB, schema.WRIST_RGB) if needs_head or "wrist" in name)
        self._read_state = read_state
        self._mode = config.control_mode
        self._is_native = name in ("tabletop", "maniskill")
        self.action_mask = action_mask(config.control_mode) if self._is_native else self._own_mask()
        self.frame_shape = self._check_spaces()
        self.action_normalizer = ActionNormalizer(config.control_mode, config.action_scale, self.action_mask)
        self.state_normalizer = StateNormalizer(config.control_mode, self.action_mask, str(config.embodiment[0]))
        # The tabletop and RoboTwin scale the arm's deltas themselves.
        self._scale = np.full(PADDED_SIZE, 1.0 if "action_scale" in kwargs else config.action_scale, np.float32)
        self._scale[list(GRIPPERS.values())] = 1.0

    def native(self, action: np.ndarray) -> np.ndarray:
        """Convert a padded action to the environment's own."""
        action = action * self._scale
        return unpad_action(action, self._mode) if self._is_native else action

    def state(self, observation: Mapping[str, Any]) -> np.ndarray:
        """Return the robot's state in the observation, about -1 to 1, in the 32-dim layout."""
        return self.state_normalizer.normalize(
            self._read_state(observation[schema.STATE], self._mode, self.action_mask)
        )

    def frames(self, observation: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return the cameras' images in the observation, uint8 [3, h, w]."""
        return {name: observation[name] for name in self.cameras}

    def _own_mask(self) -> np.ndarray:
        mask = wrapper_attribute(self.env, "action_mask")
        if mask is None or np.shape(mask) != (PADDED_SIZE,) or self.env.action_space.shape != (PADDED_SIZE,):
            raise InputError(
                f"{self.env} has the action space {self.env.action_space} and the action_mask {mask}; F1 needs "
                f"{PADDED_SIZE} action dims and a mask of the real ones: wrap the environment"
            )
        return np.asarray(mask, bool)

    def _check_spaces(self) -> tuple[int, ...]:
        """Raise InputError for an environment without the required streams; return the shape of its images."""
        space = self.env.observation_space
        found = space.spaces if isinstance(space, spaces.Dict) else {}
        for name in (schema.STATE, *self.cameras):
            if not isinstance(found.get(name), spaces.Box):
                raise InputError(f"{self.env} has no {name}: its observation space is {space}")
        shapes = {name: found[name].shape or () for name in self.cameras}
        for name, shape in shapes.items():
            if len(shape) != 3 or shape[0] != 3 or found[name].dtype != np.uint8:
                raise InputError(f"{self.env}: {name} is {found[name]}; it must be uint8 [3, h, w]")
        if len(set(shapes.values())) > 1:
            raise InputError(f"{self.env} has images of different sizes {shapes}; set image_size")
        return shapes[schema.WRIST_RGB]


# ------------------------------------------------------------------------------------------------ known simulators


def _plan(name: str, config: TaskConfig, needs_head: bool) -> tuple[dict[str, Any], Callable[..., np.ndarray]]:
    """Return the constructor's arguments for a simulator, and the function that reads its `state`."""
    if name not in _SIMULATORS:
        return {}, _padded_state
    if name != "robotwin":
        if not config.single_arm:
            raise InputError(f"single_arm is false, but {name} has one arm; set single_arm: true")
        if set(map(str, config.embodiment)) != {"franka-panda"}:
            raise InputError(f"embodiment is {config.embodiment}; {name} has only [franka-panda]")
    if name != "tabletop":
        if config.scene_reset_interval > 1:
            raise InputError(f"scene_reset_interval: {name} draws every scene; set it to 1")
        if config.control_mode != "delta_qpos":
            raise InputError(f"control_mode is {config.control_mode!r}; F1 on {name} has only delta_qpos")
    if name == "maniskill" and any(config.domain_randomization.values()):
        raise InputError("domain_randomization: ManiSkill's tasks have none; remove it")
    names, read_state = _SIMULATORS[name]
    kwargs = {"task": config.task_name, "observation": "images", **{name: getattr(config, name) for name in names}}
    if name == "tabletop":
        kwargs["cameras"] = ["head", "wrist"] if needs_head else ["wrist"]
    return kwargs, read_state


def tabletop_arguments(config: TaskConfig, needs_head: bool) -> dict[str, Any]:
    """Return the arguments of `TabletopEnv` for a config."""
    return _plan("tabletop", config, needs_head)[0] | config.world_kwargs


def _tabletop_state(state: np.ndarray, control_mode: str, mask: np.ndarray) -> np.ndarray:
    """Read the tabletop's proprioception: joints 0 to 6, opening 14, hand 15 to 17, two columns of its rotation."""
    if control_mode == "delta_qpos":
        arm = state[: panda.NUM_JOINTS]
    elif control_mode == "delta_ee_pos":
        arm = state[15:18]
    else:
        first, second = state[18:21].astype(np.float64), state[21:24].astype(np.float64)
        rotation = np.column_stack([first, second, np.cross(first, second)])
        arm = np.concatenate([state[15:18], rotation_vector(rotation @ hand_down(0.0).T)])
    return np.append(arm, state[14])


def _maniskill_state(state: np.ndarray, control_mode: str, mask: np.ndarray) -> np.ndarray:
    """Read ManiSkill's state: seven joint positions of the arm, then two of the fingers (metres)."""
    fingers = state[panda.NUM_JOINTS : panda.NUM_JOINTS + 2]
    return np.append(state[: panda.NUM_JOINTS], fingers.mean() / panda.FINGER_TRAVEL)


def _padded_state(state: np.ndarray, control_mode: str, mask: np.ndarray) -> np.ndarray:
    """Read a state in the 32-dim layout: the dims of the mask."""
    return np.asarray(state)[mask]


_SIMULATORS: dict[str, tuple[tuple[str, ...], Callable[..., np.ndarray]]] = {
    "tabletop": (
        ("control_mode", "image_size", "action_scale", "domain_randomization", "scene_reset_interval"),
        _tabletop_state,
    ),
    "robotwin": (
        ("control_mode", "image_size", "action_scale", "domain_randomization", "single_arm", "embodiment"),
        _padded_state,
    ),
    "maniskill": (("control_mode", "image_size"), _maniskill_state),
}
"""By the name of a simulator: the settings that are arguments of its constructor, and how to read its `state`."""
