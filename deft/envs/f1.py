"""The environments of F1's three training phases: histories of frames and actions in the 32-dim layout.

`F1RLEnv` adds them to any `RobotEnv`; `TeacherEnv` (head and wrist camera) and `StudentEnv` (wrist camera only) are its
two views, registered as `deft/F1Teacher-v0` and `deft/F1Student-v0`. Images are uint8: the model scales them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import gymnasium
import numpy as np
from gymnasium import spaces

from deft import schema
from deft.config.validation import checked
from deft.envs.checks import check_choice, check_render_mode
from deft.envs.history import History, executed_action, prediction_pair
from deft.envs.padded import PADDED_SIZE
from deft.envs.robot_env import EXPLORATION, RobotEnv, TaskConfig
from deft.envs.spaces import action_space, image_space, vector_space
from deft.envs.state import StateObstacle, restore_state, save_state
from deft.envs.tabletop.control import pad_action
from deft.envs.tabletop.env import TabletopEnv
from deft.envs.wrappers import env_reward_terms
from deft.errors import InputError, RunError, shown

PHASES = ("teacher", "student")
STATE_LIMIT = 2.0  # states are from -1 to 1 within the robot's limits

# Cells of visited poses
CELL = 0.05  # metres
TURNS = 2.0  # cells per unit along each axis of the direction of the hand
STATE_CELLS = 10.0  # for simulators without a pose: cells per unit along each dim of the state


class StepReward(Protocol):
    """The interface of `teacher_policy`, or of the result of its `as_teacher(phase)`."""

    def reset(self) -> None:
        """Start an episode with zero memory."""

    def reward(self, inputs: dict[str, np.ndarray], target: np.ndarray) -> Mapping[str, float]:
        """Return the named terms of the reward for (s_t, a_t, s_{t+1}), from a prediction's inputs and target.

        The inputs are the teacher's: head and wrist frames, also for a student, and the actions up to a_t.
        """


class F1RLEnv(gymnasium.Env[dict[str, Any], np.ndarray]):
    """A robot with a history of the last H steps.

    **Observation**, a Dict: `state` (32), `action_history` (H, 32), `wrist_rgb` (H, 3, h, w) uint8, in the teacher's
    phase also `head_rgb`, and, for tasks with a goal, `instruction`. Oldest first. `wrist_rgb[-1]` is img_t and
    `action_history[-1]` is a_{t-1}. `prediction_pair` adds a_t: [img_{t-3} … img_t] and [a_{t-3} … a_t] predict
    img_{t+1}. An episode starts with its first frame H times, and actions of zeros.

    **Action**: Box(-1, 1, (32,)): left arm 0 to 7 (a Panda has 0 to 6), left gripper 8, right arm 9 to 16, right
    gripper 17, padding 18 to 31. `action_mask` marks the real dims; the others have no effect.

    **Reward**: the simulator's (0 in `random_exploration`), or that of `teacher_policy`: with an `F1Policy`, the
    accuracy of its prediction of img_{t+1} in the teacher's phase, the cross-entropy of it in the student's.
    **Episode**: terminated by the simulator; truncated after `max_steps`.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 25}  # noqa: RUF012 (Gymnasium's own declaration)

    def __init__(
        self,
        task_config: Mapping[str, Any] | None = None,
        phase: Literal["teacher", "student"] = "teacher",
        teacher_policy: Any = None,
        device: str = "cpu",
        render_mode: Literal["rgb_array"] | None = None,
        **overrides: Any,
    ) -> None:
        """`task_config` holds the settings of `TaskConfig`, or a whole config with a section `environment` of them.

        `overrides` are further settings, such as `max_steps`, `action_scale`, `single_arm`; None leaves a setting as it
        is, and `history_length` is another name of `n_obs_img_steps`. `teacher_policy` is an `F1Policy` (with the
        memory of this environment only) or a `StepReward`, which runs on `device`. The simulators run on the CPU.
        """
        check_choice("phase", phase, PHASES)
        check_render_mode(render_mode)
        if "history_length" in overrides:
            overrides["n_obs_img_steps"] = overrides.pop("history_length")
        given = {name: value for name, value in overrides.items() if value is not None}
        config = read_task_config(task_config, given)
        self.config = config
        self.phase = phase
        self.device = device
        self.teacher_policy = _step_reward(teacher_policy, phase, device)
        self.history_length = config.n_obs_img_steps
        self.max_steps = config.max_steps
        self.render_mode = render_mode
        shows_head = phase == "teacher" if config.need_head_camera is None else config.need_head_camera
        self._robot = RobotEnv(config, shows_head or teacher_policy is not None, render_mode)
        self._history = History(config.n_obs_img_steps, config.obs_img_stride, PADDED_SIZE)
        self._shown = (schema.HEAD_RGB, schema.WRIST_RGB) if shows_head else (schema.WRIST_RGB,)
        self._has_goal = config.task_name != EXPLORATION
        self._full: dict[str, Any] = {}  # the observation with all cameras
        self._elapsed_steps = 0
        self.action_mask = self._robot.action_mask
        self.action_normalizer = self._robot.action_normalizer
        self.state_normalizer = self._robot.state_normalizer
        self.action_space = action_space(PADDED_SIZE)
        self.observation_space = self._make_observation_space()

    @property
    def simulator(self) -> gymnasium.Env:
        """The environment without histories."""
        return self._robot.env

    @property
    def reward_terms(self) -> tuple[str, ...]:
        """Names of the reward terms: the simulator's, or the teacher's if it declares them."""
        if self.teacher_policy is not None:
            return tuple(getattr(self.teacher_policy, "reward_terms", ()))
        return env_reward_terms(self.simulator)

    @property
    def instruction(self) -> str:
        """The instruction to the robot."""
        return str(self.simulator.get_wrapper_attr("instruction"))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode, with histories of its first frame and of zero actions."""
        super().reset(seed=seed)
        observation, info = self.simulator.reset(seed=seed, options=options)
        self._elapsed_steps = 0
        self._history.start(self._robot.frames(observation))
        if self.teacher_policy is not None:
            self.teacher_policy.reset()
        self._full = self._with_histories(observation)
        return self._view(), info

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Execute an action; `info["executed_action"]` is the action in the history."""
        action = np.asarray(action, np.float32)
        if action.shape != (PADDED_SIZE,) or not np.isfinite(action).all():
            raise RunError(f"action is {shown(action)}; F1 environments take {PADDED_SIZE} numbers")
        action = executed_action(action, self.action_mask)
        observation, reward, terminated, truncated, info = self.simulator.step(self._robot.native(action))
        self._elapsed_steps += 1
        self._history.add(action, self._robot.frames(observation))
        before, self._full = self._full, self._with_histories(observation)
        info = {**info, "executed_action": action}
        if self.teacher_policy is not None:
            terms = self.teacher_policy.reward(*prediction_pair(before, action, self._full))
            info["reward_terms"] = {name: float(value) for name, value in terms.items()}
            reward = sum(info["reward_terms"].values())
        is_late = self._elapsed_steps >= self.max_steps
        return self._view(), float(reward), bool(terminated), bool(truncated) or is_late, info

    def render(self) -> Any:
        """Return the simulator's image for videos."""
        return None if self.render_mode is None else self.simulator.render()

    def close(self) -> None:
        """Close the simulator."""
        self.simulator.close()

    def expert_action(self) -> np.ndarray:
        """Return the simulator's scripted action in the 32-dim layout."""
        if not self.simulator.has_wrapper_attr("expert_action"):
            raise InputError(f"{self.config.world} has no expert")
        action = np.asarray(self.simulator.get_wrapper_attr("expert_action")())
        return action if action.shape == (PADDED_SIZE,) else pad_action(action, self.config.control_mode)

    def get_state(self) -> dict[str, Any]:
        """Return the complete state, including the histories, as plain data."""
        if self.teacher_policy is not None:
            raise StateObstacle("a teacher_policy, whose memory is not part of the environment")
        return {
            "world": save_state(self.simulator),
            "history": self._history.get_state(),
            "full": dict(self._full),
            "elapsed_steps": self._elapsed_steps,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a saved state: the same actions then give the same observations and rewards."""
        restore_state(self.simulator, state["world"])
        self._history.set_state(state["history"])
        self._full = dict(state["full"])
        self._elapsed_steps = state["elapsed_steps"]

    def _make_observation_space(self) -> spaces.Dict:
        length = self.history_length
        streams: dict[str, spaces.Space] = {
            schema.STATE: vector_space(PADDED_SIZE, STATE_LIMIT),
            schema.ACTION_HISTORY: spaces.Box(-1.0, 1.0, (length, PADDED_SIZE), np.float32),
            **{name: image_space(length, *self._robot.frame_shape) for name in self._shown},
        }
        found = self.simulator.observation_space
        if self._has_goal and isinstance(found, spaces.Dict) and schema.INSTRUCTION in found.spaces:
            streams[schema.INSTRUCTION] = found[schema.INSTRUCTION]
        return spaces.Dict(streams)

    def _with_histories(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        """Return the observation with histories and all cameras."""
        full: dict[str, Any] = {
            schema.STATE: self._robot.state(observation),
            schema.ACTION_HISTORY: self._history.actions(),
            **self._history.frames(),
        }
        if schema.INSTRUCTION in observation:
            full[schema.INSTRUCTION] = observation[schema.INSTRUCTION]
        return full

    def _view(self) -> dict[str, Any]:
        """Return the streams of the policy."""
        return {name: self._full[name] for name in self.observation_space.spaces}  # type: ignore[attr-defined]


class TeacherEnv(F1RLEnv):
    """Phase 1: head and wrist camera."""

    def __init__(self, task_config: Mapping[str, Any] | None = None, **arguments: Any) -> None:
        """The arguments of `F1RLEnv` except `phase`."""
        super().__init__(task_config, "teacher", **arguments)


class StudentEnv(F1RLEnv):
    """Phases 2 and 3: only the wrist camera."""

    def __init__(self, task_config: Mapping[str, Any] | None = None, **arguments: Any) -> None:
        """The arguments of `F1RLEnv` except `phase`."""
        super().__init__(task_config, "student", **arguments)


class ContactEnv(StudentEnv):
    """`StudentEnv` with the head camera (for the world model, not for the student) that counts touched objects.

    A policy does not see the count, and no reward depends on it.
    """

    def __init__(self, task_config: Mapping[str, Any] | None = None, **arguments: Any) -> None:
        """The arguments of `StudentEnv`."""
        super().__init__({**(task_config or {}), "need_head_camera": True}, **arguments)
        self._contacts = 0
        self._taken = 0

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Execute an action, and count a contact."""
        result = super().step(action)
        simulator = self.simulator.unwrapped
        if isinstance(simulator, TabletopEnv):
            self._contacts += simulator.simulation.touches_object()
        return result

    def take_contacts(self) -> int | None:
        """Return the steps since the last call after which the robot touched an object; None if that is not known."""
        if not isinstance(self.simulator.unwrapped, TabletopEnv):
            return None
        found, self._taken = self._contacts - self._taken, self._contacts
        return found


class WatchedEnv(ContactEnv):
    """`ContactEnv` that also counts visited poses of the hand and views of a patch of noise, for evaluation."""

    def __init__(self, task_config: Mapping[str, Any] | None = None, **arguments: Any) -> None:
        """The arguments of `StudentEnv`."""
        super().__init__(task_config, **arguments)
        self._cells: list[tuple[int, ...]] = []
        self._noise_views = 0

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Execute an action, and count the new hand pose and contacts."""
        result = super().step(action)
        simulator = self.simulator.unwrapped
        if isinstance(simulator, TabletopEnv):
            simulation = simulator.simulation
            position, direction = simulation.tcp / CELL, simulation.tcp_rotation[:, 2] * TURNS
            self._cells.append((*map(int, np.floor(position)), *map(int, np.rint(direction))))
            patch = simulation.scene.noise_patch
            if patch is not None:
                self._noise_views += simulation.is_in_view("wrist", np.array([*patch, -simulation.scene.table_drop]))
        else:
            self._cells.append(tuple(map(int, np.floor(result[0][schema.STATE] * STATE_CELLS))))
        return result

    def noise_views(self) -> int:
        """Return the number of steps after which the middle of a patch of noise was in the wrist camera's view."""
        return self._noise_views

    def tally(self) -> tuple[list[tuple[int, ...]], int]:
        """Return the cell of the hand's pose after each step, and the number of steps with a touched object."""
        return self._cells, self._contacts


def read_task_config(task_config: Mapping[str, Any] | None, given: Mapping[str, Any]) -> TaskConfig:
    """Return settings from a config (or the `environment` section of a whole one), overridden by arguments.

    In a whole config's `training` section, `steps_per_episode` is the time limit, and both sizes must be 32.
    """
    values = dict(task_config or {})
    if "environment" in values:
        training = dict(values.get("training") or {})
        for name in ("action_dim", "state_dim"):
            if training.get(name, PADDED_SIZE) != PADDED_SIZE:
                raise InputError(f"training.{name} is {training[name]}; the F1 layout has {PADDED_SIZE}")
        limit = {"max_steps": training["steps_per_episode"]} if "steps_per_episode" in training else {}
        values = {**limit, **dict(values["environment"] or {})}
    names = {name: f"task_config.{name}" for name in values}
    return checked(TaskConfig, {**values, **given}, written={**names, **{name: name for name in given}})


def _step_reward(policy: Any, phase: str, device: str) -> StepReward | None:
    """Return the reward of a `teacher_policy`, on its device."""
    if policy is None:
        return None
    if hasattr(policy, "as_teacher"):
        policy = policy.as_teacher(phase)
    missing = [name for name in ("reset", "reward") if not callable(getattr(policy, name, None))]
    if missing:
        raise InputError(
            f"teacher_policy: {type(policy).__name__} has no {' and no '.join(missing)}(); pass the policy of "
            "deft.load_f1_policy, or an object with reset() and reward(inputs, target)"
        )
    return policy.to(device) if hasattr(policy, "to") else policy
