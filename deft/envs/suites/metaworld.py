"""MetaWorld: 50 manipulation tasks of a Sawyer arm, as multi-task benchmarks from pixels and words (MT10, MT50).

`SUITE` describes it; `MetaWorldEnv` runs in the suite's interpreter (`deft suite install metaworld`). The instructions
are the task descriptions of the Meta-World paper, as published datasets have them, and the groups by difficulty those
that papers report.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from deft.envs.checks import check_choice, check_image_size, check_render_mode, check_whole
from deft.envs.mujoco_backend import check_backend
from deft.envs.suites import Suite
from deft.envs.suites.metaworld_images import CAMERA, DETAIL, POSITION, Camera
from deft.errors import InputError
from deft.schema import HEAD_RGB, INSTRUCTION, STATE

TASKS = {
    "assembly-v3": "Pick up a nut and place it onto a peg",
    "basketball-v3": "Dunk the basketball into the basket",
    "bin-picking-v3": "Grasp the puck from one bin and place it into another bin",
    "box-close-v3": "Grasp the cover and close the box with it",
    "button-press-topdown-v3": "Press a button from the top",
    "button-press-topdown-wall-v3": "Bypass a wall and press a button from the top",
    "button-press-v3": "Press a button",
    "button-press-wall-v3": "Bypass a wall and press a button",
    "coffee-button-v3": "Push a button on the coffee machine",
    "coffee-pull-v3": "Pull a mug from a coffee machine",
    "coffee-push-v3": "Push a mug under a coffee machine",
    "dial-turn-v3": "Rotate a dial 180 degrees",
    "disassemble-v3": "Pick a nut out of a peg",
    "door-close-v3": "Close a door with a revolving joint",
    "door-lock-v3": "Lock the door by rotating the lock clockwise",
    "door-open-v3": "Open a door with a revolving joint",
    "door-unlock-v3": "Unlock the door by rotating the lock counter-clockwise",
    "drawer-close-v3": "Push and close a drawer",
    "drawer-open-v3": "Open a drawer",
    "faucet-close-v3": "Rotate the faucet clockwise",
    "faucet-open-v3": "Rotate the faucet counter-clockwise",
    "hammer-v3": "Hammer a screw on the wall",
    "hand-insert-v3": "Insert the gripper into a hole",
    "handle-press-side-v3": "Press a handle down sideways",
    "handle-press-v3": "Press a handle down",
    "handle-pull-side-v3": "Pull a handle up sideways",
    "handle-pull-v3": "Pull a handle up",
    "lever-pull-v3": "Pull a lever down 90 degrees",
    "peg-insert-side-v3": "Insert a peg sideways",
    "peg-unplug-side-v3": "Unplug a peg sideways",
    "pick-out-of-hole-v3": "Pick up a puck from a hole",
    "pick-place-v3": "Pick and place a puck to a goal",
    "pick-place-wall-v3": "Pick a puck, bypass a wall and place the puck",
    "plate-slide-back-side-v3": "Get a plate from the cabinet sideways",
    "plate-slide-back-v3": "Get a plate from the cabinet",
    "plate-slide-side-v3": "Slide a plate into a cabinet sideways",
    "plate-slide-v3": "Slide a plate into a cabinet",
    "push-back-v3": "Push the puck to a goal",
    "push-v3": "Push the puck to a goal",
    "push-wall-v3": "Bypass a wall and push a puck to a goal",
    "reach-v3": "Reach a goal position",
    "reach-wall-v3": "Bypass a wall and reach a goal",
    "shelf-place-v3": "Pick and place a puck onto a shelf",
    "soccer-v3": "Kick a soccer into the goal",
    "stick-pull-v3": "Grasp a stick and pull a box with the stick",
    "stick-push-v3": "Grasp a stick and push a box using the stick",
    "sweep-into-v3": "Sweep a puck into a hole",
    "sweep-v3": "Sweep a puck off the table",
    "window-close-v3": "Push and close a window",
    "window-open-v3": "Push and open a window",
}
MT10 = (
    "reach push pick-place door-open drawer-open drawer-close button-press-topdown peg-insert-side window-open "
    "window-close"
)
MT25 = (
    f"{MT10} coffee-pull pick-out-of-hole disassemble pick-place-wall basketball stick-pull button-press-wall "
    "faucet-open door-lock lever-pull sweep-into faucet-close coffee-button button-press-topdown-wall dial-turn"
)
MEDIUM = (
    "basketball bin-picking box-close coffee-pull coffee-push hammer peg-insert-side push-wall soccer sweep sweep-into"
)
HARD = "assembly hand-insert pick-out-of-hole pick-place push push-back"
VERY_HARD = "shelf-place disassemble stick-pull stick-push pick-place-wall"


def _names(words: str) -> tuple[str, ...]:
    return tuple(f"{word}-v3" for word in words.split())


_NOT_EASY = _names(f"{MEDIUM} {HARD} {VERY_HARD}")
GROUPS = {
    "MT10": _names(MT10),
    "MT25": _names(MT25),
    "MT50": tuple(TASKS),
    "easy": tuple(task for task in TASKS if task not in _NOT_EASY),
    "medium": _names(MEDIUM),
    "hard": _names(HARD),
    "very-hard": _names(VERY_HARD),
}
HORIZON = 400
REWARDS = ("success", "progress", "dense")
LARGEST_REWARD = 10.0  # of MetaWorld, per step: at success
SUITE = Suite(
    name="metaworld",
    entry_point="deft.envs.suites.metaworld:MetaWorldEnv",
    package="metaworld",
    tasks=TASKS,
    groups=GROUPS,
    max_episode_steps=HORIZON,
    protocol=(
        f"camera {CAMERA}, object and goal positions drawn from the episode's seed; an episode succeeds when "
        "MetaWorld's success criterion holds at any step"
    ),
    scripted_kwargs={"observation": "state"},
    evaluation_kwargs={"task_weights": {}},
    fingerprint_task="MT50",
    fingerprint_kwargs={"observation": "privileged", "reward": "dense"},
)
INSTRUCTION_LENGTH = 64
LETTERS = "".join(map(chr, range(32, 127)))
PROPRIOCEPTION = 4  # position of the hand, and opening of the gripper
STATE_SIZE = 39  # hand, gripper and two objects, now and one step before, and the goal
PLACES = np.r_[4:7, 11:14, 36:39]  # in the state: two objects and the goal
VIDEO_SIZE = 480
GRAVITY = -9.81  # of MuJoCo, and of every task
MAX_SIMULATORS = 10  # of one environment, each of about 60 MB with a camera; others are made again


class MetaWorldEnv(gymnasium.Env):
    """One task of MetaWorld, or several in turn.

    `task`: a task or a group. An episode that is reset with a seed plays task `seed % len(group)`; the next episode
    plays the task `stride` further on. `task_weights` of a group: how many times in a row of turns a task is played; 1
    for tasks that it does not name, and 0 leaves a task out.

    `observation`: `"images"` has the streams `head_rgb` (camera corner2), `state` [4] (position of the hand in metres,
    opening of the gripper) and `instruction`. `"privileged"` adds `scene_state` for critics: MetaWorld's own
    observation with the goal [39], and in a group the task as a one-hot vector, as in MetaWorld's own benchmarks.
    `"labelled"` adds `places` [9] instead, the positions of two objects and of the goal (0: there is none), as labels,
    and `"all"` both. `"state"` has only `state`, which is then that of the scene, and the instruction, without cameras.

    `reward`: `"success"` is 1 at the first step that succeeds, which ends the episode, and otherwise 0. `"progress"`
    adds the change of MetaWorld's own reward / 10 from the second step on. `"dense"` is MetaWorld's own reward, from 0
    to 10 per step; the episode continues to its time limit.

    `rendering`: `"suite"`; `"light"`, without shadows; or `"fast"`, which also has no antialiasing and coarser meshes
    (faster, other images).
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 80}  # noqa: RUF012 (declared by Gymnasium)

    def __init__(
        self,
        task: str = "MT10",
        observation: Literal["images", "privileged", "labelled", "all", "state"] = "images",
        image_size: int = 64,
        reward: Literal["success", "progress", "dense"] = "success",
        rendering: Literal["suite", "light", "fast"] = "suite",
        stride: int = 1,
        task_weights: dict[str, int] | None = None,
        render_mode: str | None = None,
    ) -> None:
        check_choice("observation", observation, ("images", "privileged", "labelled", "all", "state"))
        check_choice("reward", reward, REWARDS)
        check_choice("rendering", rendering, tuple(DETAIL))
        check_render_mode(render_mode)
        check_backend()
        self.tasks = SUITE.tasks_of(f"{SUITE.name}/{task}")
        if task_weights and len(self.tasks) == 1:
            raise InputError(f"task_weights: are for groups of tasks, and {task} is one task; leave them out")
        self._turns = turns(self.tasks, task_weights or {})
        self.render_mode = render_mode
        self.observes = True
        self._observation, self._reward, self._rendering = observation, reward, rendering
        self._size = check_image_size(image_size)
        self._stride = check_whole("stride", stride, 1)
        self._simulators: dict[str, Any] = {}
        self._cameras: dict[tuple[str, int], Camera] = {}
        self._index: int | None = None
        self._seed = 0
        self._actions: list[np.ndarray] = []
        self._succeeded = False
        self._quality: float | None = None  # MetaWorld's reward of the last step
        self._gravity = 1.0
        self._raw = np.zeros(STATE_SIZE)
        self.action_space = spaces.Box(-1.0, 1.0, (4,), np.float32)
        self.observation_space = self._make_space()

    # ------------------------------------------------------------------------------------------------------ episodes

    @property
    def task_name(self) -> str:
        """The task of the present episode."""
        return self._turns[self._index or 0]

    @property
    def instruction(self) -> str:
        """The instruction of the present episode."""
        return TASKS[self.task_name]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode; with a seed it depends on nothing else."""
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(2**31))
        if seed is not None:
            self._index = seed % len(self._turns)
        elif self._index is None:
            self._index = drawn % len(self._turns)
        else:
            self._index = (self._index + self._stride) % len(self._turns)
        self._begin(drawn if seed is None else seed)
        return self.observe(), self._info()

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Move the hand by up to 1 cm along each axis, and open or close the gripper."""
        before = self._quality
        dense = self._advance(np.asarray(action, np.float32))
        if self._reward == "dense":
            return self.observe(), dense, False, False, self._info()
        reward = float(self._succeeded)
        if self._reward == "progress" and before is not None:  # MetaWorld has no reward of the initial state
            reward += (dense - before) / LARGEST_REWARD
        return self.observe(), reward, self._succeeded, False, self._info()

    def _begin(self, seed: int) -> None:
        simulator = self._simulator()
        simulator.model.opt.gravity[2] = GRAVITY * self._gravity
        simulator.seed(seed)
        self._raw, _ = simulator.reset()
        self._place_all(simulator)
        self._seed, self._actions, self._succeeded, self._quality = seed, [], False, None

    @staticmethod
    def _place_all(simulator: Any) -> None:
        """Draw objects and goals where they are from the first image on.

        MetaWorld places some objects after it has computed positions, and moves the marker of the goal in the first
        step: its first image shows them where the last episode had them.
        """
        import mujoco

        model, data = simulator.model, simulator.data
        mujoco.mj_kinematics(model, data)
        fixed = model.site_bodyid == 0
        data.site_xpos[fixed] = model.site_pos[fixed]
        for name, position in simulator._target_site_config:
            simulator._set_pos_site(name, position)

    def _advance(self, action: np.ndarray) -> float:
        self._raw, reward, _, _, info = self._simulator().step(action)
        self._actions.append(action)
        self._succeeded = self._succeeded or bool(info["success"])
        self._quality = float(reward)
        return self._quality

    def _info(self) -> dict[str, Any]:
        return {"success": self._succeeded, "task": self.task_name, "instruction": self.instruction}

    def expert_action(self) -> np.ndarray:
        """Return the action of MetaWorld's scripted policy for this task."""
        from metaworld.policies import ENV_POLICY_MAP

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*too high")  # of actions beyond the bounds, which are clipped here
            action = ENV_POLICY_MAP[self.task_name]().get_action(self._raw)
        clipped: np.ndarray = np.clip(action, -1.0, 1.0).astype(np.float32)
        return clipped

    def get_state(self) -> dict[str, Any]:
        """Return the present episode as the actions since its start."""
        actions = np.array(self._actions, np.float32).reshape(-1, 4)
        return {"index": self._index, "seed": self._seed, "actions": actions}

    def set_state(self, state: dict[str, Any]) -> None:
        """Play an episode again up to the saved state."""
        self._index = state["index"]
        if self._index is not None:
            self._begin(state["seed"])
            for action in state["actions"]:
                self._advance(action)

    # -------------------------------------------------------------------------------------------------- observations

    def observe(self) -> dict[str, Any]:
        """Return the present observation; without an image while `observes` is false."""
        streams: dict[str, Any] = {}
        if self._observation == "state":
            streams[STATE] = self._scene()
        else:
            streams[STATE] = self._raw[:PROPRIOCEPTION].astype(np.float32)
            blank = np.zeros((self._size, self._size, 3), np.uint8)
            streams[HEAD_RGB] = self._image(self._size, self._rendering) if self.observes else blank
        streams[INSTRUCTION] = self.instruction
        if self._observation in ("privileged", "all"):
            streams["scene_state"] = self._scene()
        if self._observation in ("labelled", "all"):
            streams["places"] = self._raw[PLACES].astype(np.float32)
        return streams

    def _scene(self) -> np.ndarray:
        """MetaWorld's observation, and in a group the task as a one-hot vector."""
        task = np.zeros(self._scene_size - STATE_SIZE)
        task[self.tasks.index(self.task_name) if len(task) else slice(0)] = 1.0
        return np.concatenate([self._raw, task]).astype(np.float32)

    @property
    def _scene_size(self) -> int:
        return STATE_SIZE + (len(self.tasks) if len(self.tasks) > 1 else 0)

    def set_observes(self, observes: bool) -> None:
        """Set whether the next observations have images."""
        self.observes = observes

    def scale_gravity(self, scale: float) -> None:
        """Multiply gravity in the next episodes: for fingerprints, which measure what rounding changes."""
        self._gravity = scale

    def render(self) -> np.ndarray | None:
        """Return an image of 480 pixels."""
        return None if self.render_mode is None else self._image(VIDEO_SIZE, "suite")

    def close(self) -> None:
        """Close the simulators."""
        for task in list(self._simulators):
            self._drop(task)

    def _make_space(self) -> spaces.Dict:
        def vector(size: int) -> spaces.Box:
            return spaces.Box(-np.inf, np.inf, (size,), np.float32)

        streams: dict[str, spaces.Space] = {}
        if self._observation == "state":
            streams[STATE] = vector(self._scene_size)
        else:
            streams[STATE] = vector(PROPRIOCEPTION)
            streams[HEAD_RGB] = spaces.Box(0, 255, (self._size, self._size, 3), np.uint8)
        streams[INSTRUCTION] = spaces.Text(INSTRUCTION_LENGTH, charset=LETTERS)
        if self._observation in ("privileged", "all"):
            streams["scene_state"] = vector(self._scene_size)
        if self._observation in ("labelled", "all"):
            streams["places"] = vector(len(PLACES))
        return spaces.Dict(streams)

    # ----------------------------------------------------------------------------------------------------- simulators

    def _simulator(self) -> Any:
        """Return MetaWorld's environment of the present task; each is made when first used."""
        if self._index is None:
            raise InputError("step() was called before reset()")
        if self.task_name not in self._simulators:
            from metaworld.env_dict import ALL_V3_ENVIRONMENTS

            simulator = ALL_V3_ENVIRONMENTS[self.task_name]()
            simulator.max_path_length = np.inf  # Gymnasium's time limit ends episodes
            # The goal is part of the observation, and positions come from the simulator's own generator.
            simulator._set_task_called = True
            simulator._freeze_rand_vec, simulator.seeded_rand_vec = False, True
            simulator._partially_observable = False
            del simulator.sawyer_observation_space  # computed again with the goal
            simulator.model.cam_pos[simulator.model.camera(CAMERA).id] = POSITION
            while len(self._simulators) >= MAX_SIMULATORS:
                self._drop(next(iter(self._simulators)))
            self._simulators[self.task_name] = simulator
        return self._simulators[self.task_name]

    def _drop(self, task: str) -> None:
        for key in [key for key in self._cameras if key[0] == task]:
            self._cameras.pop(key).close()
        self._simulators.pop(task).close()

    def _image(self, size: int, rendering: str) -> np.ndarray:
        simulator, key = self._simulator(), (self.task_name, size)
        if key not in self._cameras:
            self._cameras[key] = Camera(simulator.model, size, rendering)
        return self._cameras[key].render(simulator.data)


def turns(tasks: Sequence[str], weights: Mapping[str, int]) -> tuple[str, ...]:
    """Return the tasks in the order in which episodes play them, each as often as its weight says."""
    if not isinstance(weights, Mapping):
        raise InputError(
            f'task_weights is {weights!r}; give a weight for each of some tasks, as in {{"{tasks[0]}": 2}}'
        )
    for name, weight in weights.items():
        check_choice("task_weights: the task", name, tasks)
        check_whole(f"task_weights: {name}", weight, 0)
    found = tuple(task for task in tasks for _ in range(weights.get(task, 1)))
    if not found:
        raise InputError("task_weights: all are 0; give at least one task a weight above 0")
    return found
