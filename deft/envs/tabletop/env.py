"""The tabletop environment: tasks with language for a Franka Panda, seen by a head and a wrist camera.

`deft.envs` registers it as `deft/Tabletop-v0`. It draws scenes (`scene.py`), simulates them (`simulation.py`), asks the
task for reward and success (`tasks.py`) and the expert for actions (`expert.py`). Saved states are exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from deft.envs.tabletop import expert, panda
from deft.envs.tabletop.control import ArmController, action_size, hand_down
from deft.envs.tabletop.model import noise_tiles
from deft.envs.tabletop.scene import SPLITS, DomainRandomization, Scene, draw_scene, flicker, noise_colours
from deft.envs.tabletop.simulation import Simulation
from deft.envs.tabletop.tasks import ALL_TASKS, GOAL_TASKS, TASKS, Goal
from deft.errors import InputError, RunError

CAMERAS = ("head", "wrist")
OBSERVATIONS = ("state", "images", "labelled", "both")
WHOLE = ("state", "both")  # of these, those whose `state` holds the objects too
PROPRIOCEPTION_SIZE = 24
OBJECT_SIZE = 7
MAX_OBJECTS = 4
MAX_SCENE_TRIES = 100
INSTRUCTION_LENGTH = 64
RENDER_SIZE = 320
START_NOISE = 0.03  # radians
MAX_VELOCITY = 10.0

CONTROL_WEIGHT = 0.005
SUCCESS_REWARD = 1.0
REWARD_TERMS = {"sparse": ("success",), "dense": ("success", "approach", "goal", "control", "wrong_object")}


class TabletopEnv(gymnasium.Env[Any, np.ndarray]):
    """Do what the instruction says with the object that it names.

    **Action**, each dim in [-1, 1]: `delta_qpos` 7 joint deltas (±0.1 rad × action_scale), `delta_ee` 6 deltas of the
    hand (±0.03 m, ±0.1 rad, along and about the robot's axes), `delta_ee_pos` 3 (the hand keeps pointing down); then
    the gripper: 1 open, -1 closed. A step is 0.04 s.

    **Observation** `"state"`: Box of proprioception (24: joint positions 7, joint velocities 7, opening of the gripper,
    hand position 3, the first two columns of its rotation 6), for each task object 7 (position from the hand,
    quaternion; the named one first, then the one it goes onto), the area from the hand 2, and the task one-hot 5.
    `"images"`: Dict of `state` (the proprioception alone), `head_rgb` and `wrist_rgb` (uint8 [3, h, w]) and
    `instruction`. `"labelled"`: the same and `places`, where the named object, the one it goes onto and the area are,
    from the hand, or zeros: labels of what the pictures show, not for a policy to read. `"both"`: pictures, words and
    the whole state.

    **Episode**: ends when the task is done, `info["success"]`, or done with a wrong object. `random_exploration` has no
    goal, no reward and no success. Dense reward, each part in `info["reward_terms"]`: approach and goal (2 and 4 per
    metre that the hand, the object come closer), control, success (+1), wrong_object (-1). Sparse: 1 for success.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 25}  # noqa: RUF012 (Gymnasium's own declaration)

    def __init__(
        self,
        task: str = "pick",
        control_mode: str = "delta_qpos",
        action_scale: float = 1.0,
        observation: Literal["state", "images", "labelled", "both"] = "state",
        image_size: int = 64,
        cameras: Sequence[str] = CAMERAS,
        reward: Literal["dense", "sparse"] = "dense",
        domain_randomization: dict[str, Any] | None = None,
        scene_reset_interval: int = 1,
        num_objects: int = 2,
        max_episode_steps: int | None = None,
        split: Literal["train", "held-out", "all"] = "train",
        shuffle_instructions: bool = False,
        render_mode: Literal["rgb_array"] | None = None,
    ) -> None:
        """Choose task, control, what the policy sees, how it is rewarded, and what differs from scene to scene."""
        whole = {"image_size": image_size, "scene_reset_interval": scene_reset_interval, "num_objects": num_objects}
        for name, value in whole.items():
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise InputError(f"{name} is {value!r}; choose a whole number")
        if isinstance(action_scale, bool) or not isinstance(action_scale, int | float | np.number):
            raise InputError(f"action_scale is {action_scale!r}; choose a number")
        if domain_randomization is not None and not isinstance(domain_randomization, Mapping):
            raise InputError(f"domain_randomization is {domain_randomization!r}; choose a mapping of its keys, or None")
        if not isinstance(task, str) or (task not in TASKS and task != ALL_TASKS):
            raise InputError(f"task is {task!r}; choose {', '.join([*TASKS, ALL_TASKS])}")
        if observation not in OBSERVATIONS:
            raise InputError(f"observation is {observation!r}; choose {', '.join(OBSERVATIONS)}")
        if reward not in ("dense", "sparse"):
            raise InputError(f"reward is {reward!r}; choose 'dense' or 'sparse'")
        if split not in SPLITS:
            raise InputError(f"split is {split!r}; choose {', '.join(SPLITS)}")
        if not isinstance(shuffle_instructions, bool):
            raise InputError(f"shuffle_instructions is {shuffle_instructions!r}; choose true or false")
        if render_mode not in (None, "rgb_array"):
            raise InputError(f"render_mode is {render_mode!r}; choose 'rgb_array' or None")
        if not 16 <= image_size <= 1024:
            raise InputError(f"image_size is {image_size}; choose 16 to 1024 pixels")
        if not cameras or isinstance(cameras, str) or any(name not in CAMERAS for name in cameras):
            raise InputError(f"cameras is {cameras!r}; choose a list of {', '.join(CAMERAS)}")
        if scene_reset_interval < 1:
            raise InputError(f"scene_reset_interval is {scene_reset_interval}; choose at least 1")
        if max_episode_steps is not None and max_episode_steps < 1:
            raise InputError(f"max_episode_steps is {max_episode_steps}; choose at least 1, or None")
        names = GOAL_TASKS if task == ALL_TASKS else (task,)
        fewest = max(TASKS[name].min_objects for name in names)
        if not fewest <= num_objects <= MAX_OBJECTS:
            raise InputError(f"num_objects is {num_objects}; choose {fewest} to {MAX_OBJECTS} for task {task}")
        self.task = task
        self.control_mode = control_mode
        self.observation = observation
        self.image_size = int(image_size)
        self.cameras = tuple(name for name in CAMERAS if name in cameras)
        self.reward = reward
        self.reward_terms = REWARD_TERMS[reward] if set(names) <= set(GOAL_TASKS) else ()
        self.randomization = DomainRandomization.from_settings(domain_randomization)
        self.scene_reset_interval = int(scene_reset_interval)
        self.num_objects = int(num_objects)
        self.max_episode_steps = max_episode_steps
        self.split = split
        self.shuffle_instructions = shuffle_instructions
        self.render_mode = render_mode

        self._controller = ArmController(control_mode, action_scale)
        self.action_space = spaces.Box(-1.0, 1.0, (action_size(control_mode),), np.float32)
        self.observation_space = self._make_observation_space()

        self._simulation: Simulation | None = None
        self._settled: dict[str, Any] = {}  # the physics of the scene as it was drawn
        self._task_name = names[0]
        self._goal = Goal(0, 0, "")
        self._episodes_in_scene = 0
        self._elapsed_steps = 0
        self._potentials = (0.0, 0.0)
        self._frames_checked = False
        self.observes = True
        """Whether a step looks at the world. Where nobody sees its observation it need not: it then returns None."""

    # ------------------------------------------------------------------------------------------------ what is known

    @property
    def simulation(self) -> Simulation:
        """The scene that is simulated; there is one after the first reset."""
        if self._simulation is None:
            raise RunError("the tabletop was used before reset()")
        return self._simulation

    @property
    def scene(self) -> Scene:
        """What stands on the table and how it looks."""
        return self.simulation.scene

    @property
    def task_name(self) -> str:
        """The present episode's task."""
        return self._task_name

    @property
    def goal(self) -> Goal:
        """Which object the instruction names."""
        return self._goal

    @property
    def instruction(self) -> str:
        """What the robot is told to do."""
        return self._goal.instruction

    @property
    def joint_positions(self) -> np.ndarray:
        """The seven joints, in radians."""
        return self.simulation.joints.copy()

    @property
    def gripper_opening(self) -> float:
        """How far the gripper is open, 0 to 1."""
        return float(self.simulation.fingers.mean()) / panda.FINGER_TRAVEL

    # -------------------------------------------------------------------------------------------------- Gymnasium

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Draw a scene, or keep it for `scene_reset_interval` episodes; put the robot back; name an object.

        In a kept scene of `random_exploration` the objects stay where they lie; those of a goal task are put back. A
        seed always draws a new scene. `options["target"]`, an index, names a certain object.
        """
        super().reset(seed=seed)
        if seed is not None or self._simulation is None or self._episodes_in_scene >= self.scene_reset_interval:
            self._new_scene()
            self._episodes_in_scene = 0
        elif self._task_name in GOAL_TASKS:
            self.simulation.set_state(self._settled)
        self._episodes_in_scene += 1
        self._elapsed_steps = 0
        simulation = self.simulation
        joints = panda.HOME + self.np_random.uniform(-START_NOISE, START_NOISE, panda.NUM_JOINTS)
        simulation.put_robot(joints)
        self._controller.reset(joints, panda.FINGER_TRAVEL)
        target = (options or {}).get("target")
        if target is not None and target not in range(self.num_objects):
            raise InputError(f"options target is {target!r}; choose 0 to {self.num_objects - 1}")
        task = TASKS[self._task_name]
        self._goal = task.draw_goal(self.np_random, simulation.scene, target, self.split)
        if self.shuffle_instructions:
            self._goal.instruction = self._other_words()
        self._potentials = task.potentials(simulation.view(), self._goal)
        self._frames_checked = False
        return self.observe(), self._info()

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Move for 0.04 s, then see what came of it."""
        simulation = self.simulation
        taken = self._controller.command(action, simulation.joints)
        simulation.step(self._controller.target, self._controller.finger_target)
        self._elapsed_steps += 1
        truncated = self.max_episode_steps is not None and self._elapsed_steps >= self.max_episode_steps
        info = self._info()
        observation = self.observe() if self.observes else None
        if self._task_name not in GOAL_TASKS:
            return observation, 0.0, False, truncated, info
        task, view = TASKS[self._task_name], simulation.view()
        success = task.is_met(view, self._goal.index, self._goal.base)
        is_wrong = not success and task.is_met_by_another(view, self._goal)
        terms = {"success": SUCCESS_REWARD if success else 0.0}
        if self.reward == "dense":
            approach, goal = task.potentials(view, self._goal)
            terms["approach"] = approach - self._potentials[0]
            terms["goal"] = goal - self._potentials[1]
            terms["control"] = -CONTROL_WEIGHT * float(taken[:-1] @ taken[:-1])
            terms["wrong_object"] = -SUCCESS_REWARD if is_wrong else 0.0
            self._potentials = (approach, goal)
        info["success"] = success
        info["reward_terms"] = terms
        return observation, sum(terms.values()), success or is_wrong, truncated, info

    def render(self) -> np.ndarray | None:
        """The head camera's picture for videos, uint8 [320, 320, 3]."""
        if self.render_mode is None:
            return None
        return np.ascontiguousarray(self.camera_pictures(("head",), RENDER_SIZE)["head"])

    def camera_pictures(self, cameras: Sequence[str], size: int) -> dict[str, np.ndarray]:
        """Pictures of any size, uint8 [size, size, 3]; valid until the next pictures are taken in this thread."""
        simulation = self.simulation
        if simulation.scene.flickers:
            simulation.model.light_diffuse[:] = flicker(simulation.scene, self._elapsed_steps)
        if simulation.scene.noise_patch is not None:
            colours = noise_colours(simulation.scene, self._elapsed_steps)
            simulation.model.geom_rgba[noise_tiles(simulation.model), :3] = colours
        return dict(zip(cameras, simulation.pictures(cameras, size), strict=True))

    def expert_action(self, target: int | None = None) -> np.ndarray:
        """A scripted action that does the task; for `random_exploration` one towards random places.

        With `target`, an object's index, the action that would be right if the instruction named that one.
        """
        simulation = self.simulation
        view = simulation.view()
        if self._task_name in GOAL_TASKS:
            goal = self._goal
            if target is not None and target != goal.index:
                goal = Goal(target, goal.index if target == goal.base else goal.base, "")
            rotation = simulation.tcp_rotation
            hand_yaw = math.atan2(rotation[1, 0], rotation[0, 0])
            point = expert.waypoint(self._task_name, view, goal, simulation.yaws(), hand_yaw)
        else:
            seed = simulation.scene.seed + self._episodes_in_scene
            point = expert.exploring_waypoint(seed, self._elapsed_steps, view.top)
        return self._controller.action_towards(point.position, hand_down(point.yaw), point.gripper)

    # ------------------------------------------------------------------------------------------------------ state

    def get_state(self) -> dict[str, Any]:
        """All that the future depends on, as plain data: scene, physics, targets, episode, random numbers."""
        simulation = self._simulation
        return {
            "scene": None if simulation is None else simulation.scene.as_data(),
            "physics": None if simulation is None else simulation.get_state(),
            "settled": self._settled,
            "controller": self._controller.get_state(),
            "task": self._task_name,
            "goal": {"index": self._goal.index, "base": self._goal.base, "instruction": self._goal.instruction},
            "episodes_in_scene": self._episodes_in_scene,
            "elapsed_steps": self._elapsed_steps,
            "potentials": list(self._potentials),
            "random": self.np_random.bit_generator.state,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from a saved state: the same actions then give the same pictures and rewards."""
        if state["scene"] is None:  # saved before the first reset
            self._simulation = None
        else:
            scene = Scene.from_data(state["scene"])
            if self._simulation is None or self._simulation.scene != scene:
                self._simulation = Simulation(scene)
            self._simulation.set_state(state["physics"])
        self._settled = state["settled"]
        self._controller.set_state(state["controller"])
        self._task_name = state["task"]
        self._goal = Goal(**state["goal"])
        self._episodes_in_scene = state["episodes_in_scene"]
        self._elapsed_steps = state["elapsed_steps"]
        self._potentials = (state["potentials"][0], state["potentials"][1])
        self.np_random.bit_generator.state = state["random"]

    # ---------------------------------------------------------------------------------------------------- details

    def _make_observation_space(self) -> spaces.Space:
        size = PROPRIOCEPTION_SIZE
        if self.observation in WHOLE:
            size += OBJECT_SIZE * self.num_objects + 2 + len(TASKS)
        state = spaces.Box(-MAX_VELOCITY, MAX_VELOCITY, (size,), np.float32)
        if self.observation == "state":
            return state
        streams: dict[str, spaces.Space] = {"state": state}
        for name in self.cameras:
            streams[f"{name}_rgb"] = spaces.Box(0, 255, (3, self.image_size, self.image_size), np.uint8)
        streams["instruction"] = spaces.Text(INSTRUCTION_LENGTH, charset="abcdefghijklmnopqrstuvwxyz ")
        if self.observation == "labelled":
            streams["places"] = spaces.Box(-MAX_VELOCITY, MAX_VELOCITY, (3 * self.num_objects + 2,), np.float32)
        return spaces.Dict(streams)

    def _new_scene(self) -> None:
        """Draw a task and a scene whose objects find room and stand still."""
        random = self.np_random
        self._task_name = str(random.choice(GOAL_TASKS)) if self.task == ALL_TASKS else self.task
        has_area = TASKS[self._task_name].has_area
        for _ in range(MAX_SCENE_TRIES):
            seed = int(random.integers(2**31))
            scene = draw_scene(seed, self.num_objects, has_area, self.randomization, self.split)
            if scene is None:
                continue
            self._simulation = Simulation(scene)
            if self._simulation.settle():
                self._settled = self._simulation.get_state()
                return
        raise RunError(f"no stable scene in {MAX_SCENE_TRIES} tries; use fewer objects or less randomisation")

    def _other_words(self) -> str:
        """Words for an object of the scene drawn without regard to the goal; scenes and goals stay as they were."""
        random = np.random.default_rng([self.scene.seed, 7, self._episodes_in_scene])
        return TASKS[self._task_name].draw_goal(random, self.scene).instruction

    def _info(self) -> dict[str, Any]:
        info: dict[str, Any] = {"task": self._task_name, "instruction": self._goal.instruction}
        if self._task_name in GOAL_TASKS:
            info["success"] = False
        return info

    def observe(self) -> Any:
        """What the policy sees of the world as it is now."""
        state = self._state()
        if self.observation == "state":
            return state
        observation: dict[str, Any] = {"state": state}
        for name, picture in self.camera_pictures(self.cameras, self.image_size).items():
            observation[f"{name}_rgb"] = np.ascontiguousarray(picture.transpose(2, 0, 1))
            if not self._frames_checked and picture.min() == picture.max():
                raise RunError(
                    f"the {name} camera's picture is of one colour: rendering does not work (check MUJOCO_GL)"
                )
        self._frames_checked = True
        observation["instruction"] = self._goal.instruction
        if self.observation == "labelled":
            observation["places"] = self._labels()
        return observation

    def _labels(self) -> np.ndarray:
        """Where what the words speak of is from the hand: the named object, the one it goes onto, the area; else zeros.

        A picture does not say which object is the other one where the words do not: a label of it would be a riddle.
        """
        tcp, number = self.simulation.tcp, TASKS[self._task_name].num_named
        places = np.zeros((self.num_objects, 3))
        places[:number] = self.simulation.places[self._by_goal()[:number]] - tcp
        return np.concatenate([places.ravel(), self._area_from(tcp)], dtype=np.float32, casting="same_kind")

    def _by_goal(self) -> list[int]:
        """The task's objects: the named one first, then the one it goes onto."""
        return list(dict.fromkeys([self._goal.index, self._goal.base, *range(self.num_objects)]))

    def _area_from(self, tcp: np.ndarray) -> tuple[float, float]:
        """Where the area is from the hand; zeros where there is none."""
        area = self.simulation.scene.area
        return (0.0, 0.0) if area is None else (area[0] - tcp[0], area[1] - tcp[1])

    def _state(self) -> np.ndarray:
        simulation = self.simulation
        tcp, rotation = simulation.tcp, simulation.tcp_rotation
        parts = [
            simulation.joints,
            simulation.joint_velocities.clip(-MAX_VELOCITY, MAX_VELOCITY),
            (self.gripper_opening,),
            tcp,
            rotation[:, 0],
            rotation[:, 1],
        ]
        if self.observation in WHOLE:
            for index in self._by_goal():
                parts += [simulation.places[index] - tcp, simulation.quaternions[index]]
            parts.append(self._area_from(tcp))
            parts.append([float(name == self._task_name) for name in TASKS])
        return np.concatenate(parts, dtype=np.float32, casting="same_kind")
