"""The tabletop environment: tasks with language for a Franka Panda, with a head and a wrist camera.

`deft.envs` registers it as `deft/Tabletop-v0`. It draws scenes (`scene.py`), simulates them (`simulation.py`), asks the
task for reward and success (`tasks.py`) and the expert for actions (`expert.py`). Saved states are exact.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces
from pydantic import Field

from deft.config.validation import Count, Fraction, NonNegative, Share, Switch, checked, settings
from deft.envs.checks import check_choice, check_render_mode, check_whole
from deft.envs.spaces import LETTERS, image_space, vector_space
from deft.envs.spaces import action_space as unit_action_space
from deft.envs.tabletop import expert, panda
from deft.envs.tabletop.control import ArmController, action_names, action_size, hand_down
from deft.envs.tabletop.model import noise_tiles
from deft.envs.tabletop.scene import DomainRandomization, Scene, draw_scene, flicker, noise_colours
from deft.envs.tabletop.simulation import Simulation
from deft.envs.tabletop.starts import FIRST_RATE, PARTS, WHOLE, draw_part, left, updated
from deft.envs.tabletop.tasks import ALL_TASKS, GOAL_TASKS, TASKS, Goal
from deft.errors import InputError, RunError

CAMERAS: tuple[Literal["head", "wrist"], ...] = ("head", "wrist")
PROPRIOCEPTION_SIZE = 24
OBJECT_SIZE = 7
MAX_OBJECTS = 4
MAX_SCENE_TRIES = 100
MAX_EXPERT_STEPS = 120  # of an expert that begins an episode; it needs about 60
INSTRUCTION_LENGTH = 64
RENDER_SIZE = 320
START_NOISE = 0.03  # radians
MAX_VELOCITY = 10.0

CONTROL_WEIGHT = 0.005
SUCCESS_REWARD = 1.0
REWARD_TERMS = {"sparse": ("success",), "dense": ("success", "approach", "goal", "control", "wrong_object")}


@settings
class TabletopSpec:
    """The arguments of `TabletopEnv`."""

    task: str = "pick"
    """One of `TASKS`, or `all`: a task with a goal, drawn for each scene."""
    task_weights: dict[str, NonNegative] | None = None
    """For `all`: how often a task is drawn in relation to the others; 1 for a task without an entry."""
    control_mode: str = "delta_qpos"
    """`delta_qpos`, `delta_ee` or `delta_ee_pos`."""
    action_scale: Share = 1.0
    """The delta of an action of 1, as a fraction of the largest."""
    observation: Literal["state", "images", "labelled", "privileged", "both"] = "state"
    """The streams of an observation."""
    image_size: Annotated[Count, Field(ge=16, le=1024)] = 64
    """Side of the images in pixels."""
    cameras: Annotated[tuple[Literal["head", "wrist"], ...], Field(min_length=1)] = CAMERAS
    """The cameras whose images are observed."""
    reward: Literal["dense", "sparse"] = "dense"
    """Whether the reward has terms for progress."""
    domain_randomization: DomainRandomization | None = None
    """What varies between scenes; None: nothing."""
    scene_reset_interval: Count = 1
    """Episodes per scene."""
    num_objects: Annotated[Count, Field(le=MAX_OBJECTS)] = 2
    """Objects that an instruction may name."""
    max_episode_steps: Count | None = None
    """Steps until an episode is truncated; None: no limit of its own."""
    split: Literal["train", "held-out", "all"] = "train"
    """Which combinations of colour and kind are named."""
    shuffle_instructions: Switch = False
    """Whether an instruction names an object independently of the goal, to measure the use of language."""
    expert_starts: dict[str, Fraction] | None = None
    """For tasks by name: the share of episodes that begin on the scripted expert's way, mostly in parts of it from
    which they sometimes succeed."""


class TabletopEnv(gymnasium.Env[Any, np.ndarray]):
    """Follow the instruction with the object that it names.

    **Action**, each dim in [-1, 1]: `delta_qpos` 7 joint deltas (±0.1 rad × action_scale), `delta_ee` 6 deltas of the
    hand (±0.03 m, ±0.1 rad, along and about the robot's axes), `delta_ee_pos` 3 (the hand keeps pointing down); then
    the gripper: 1 open, -1 closed. A step is 0.04 s.

    **Observation** `"state"`: Box of proprioception (24: joint positions 7, joint velocities 7, opening of the gripper,
    hand position 3, the first two columns of its rotation 6), for each task object 7 (position from the hand,
    quaternion; the named one first, then its base), the area from the hand 2, and the task one-hot 5.
    `"images"`: Dict of `state` (only the proprioception), `head_rgb` and `wrist_rgb` (uint8 [3, h, w]) and
    `instruction`. `"labelled"`: the same and `places`, the positions of the named object, its base and the area
    relative to the hand, or zeros: labels for training, not inputs of a policy. `"privileged"`: as `"images"` and
    `scene_state`, the whole state, for critics (`critic_observation`). `"both"`: images, instruction and the whole
    state.

    **Episode**: ends when the task is done, `info["success"]`, or done with a wrong object. `random_exploration` has no
    goal, no reward and no success. Dense reward, each part in `info["reward_terms"]`: approach and goal (2 and 4 per
    metre by which the hand, the object come closer), control, success (+1), wrong_object (-1). Sparse: 1 for success.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 25}  # noqa: RUF012 (Gymnasium's own declaration)

    def __init__(
        self,
        task: str = "pick",
        control_mode: str = "delta_qpos",
        render_mode: Literal["rgb_array"] | None = None,
        **arguments: Any,
    ) -> None:
        """Choose task, control, observation, reward, and what varies between scenes: see `TabletopSpec`."""
        check_render_mode(render_mode)
        spec = checked(TabletopSpec, {"task": task, "control_mode": control_mode, **arguments})
        check_choice("task", spec.task, [*TASKS, ALL_TASKS])
        names = GOAL_TASKS if spec.task == ALL_TASKS else (spec.task,)
        self._task_shares = task_shares(spec)
        for name in spec.expert_starts or {}:
            check_choice("expert_starts", name, GOAL_TASKS)
        check_whole("num_objects", spec.num_objects, max(TASKS[name].min_objects for name in names), MAX_OBJECTS)
        self.settings = spec
        self.split = spec.split
        """Evaluations recognise environments with splits by this attribute."""
        self.randomization = spec.domain_randomization or DomainRandomization()
        self.cameras = tuple(name for name in CAMERAS if name in spec.cameras)
        self.reward_terms = REWARD_TERMS[spec.reward] if set(names) <= set(GOAL_TASKS) else ()
        self.render_mode = render_mode

        self._controller = ArmController(spec.control_mode, spec.action_scale)
        self.action_space = unit_action_space(action_size(spec.control_mode))
        self.observation_space = self._make_observation_space()

        self._simulation: Simulation | None = None
        self._at_rest: dict[str, Any] = {}  # the state of the physics after the scene was drawn
        self.task_name = names[0]
        """The present episode's task."""
        self.goal = Goal(0, 0, "")
        """The object that the instruction names."""
        self._episodes_in_scene = 0
        self._elapsed_steps = 0
        self._potentials = (0.0, 0.0)
        self._start_rates = {name: np.full(PARTS, FIRST_RATE) for name in spec.expert_starts or {}}
        self._part, self._has_succeeded = WHOLE, False
        self.start_draw: float | None = None
        """By which the episode's part of the expert's way is chosen; None: it begins at the beginning."""
        self._way: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._frames_checked = False
        self.observes = True
        """Whether a step makes an observation; action chunks turn it off within a chunk. It then returns None."""

    # -------------------------------------------------------------------------------------------- properties -----

    @property
    def simulation(self) -> Simulation:
        """The simulated scene; available after the first reset."""
        if self._simulation is None:
            raise RunError("the tabletop was used before reset()")
        return self._simulation

    @property
    def scene(self) -> Scene:
        """The objects on the table and their appearance."""
        return self.simulation.scene

    @property
    def instruction(self) -> str:
        """The instruction to the robot."""
        return self.goal.instruction

    @property
    def gripper_opening(self) -> float:
        """The opening of the gripper, 0 to 1."""
        return float(self.simulation.fingers.mean()) / panda.FINGER_TRAVEL

    # -------------------------------------------------------------------------------------------------- Gymnasium

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Draw a scene, or keep it for `scene_reset_interval` episodes; reset the robot; choose the named object.

        In a kept scene of `random_exploration` the objects stay; those of a goal task return to their first positions.
        A seed always draws a new scene. `options["target"]`, an index, selects the object.
        """
        super().reset(seed=seed)
        self._note_success()
        if seed is not None:
            self._start_rates = {name: np.full(PARTS, FIRST_RATE) for name in self._start_rates}
        if (
            seed is not None
            or self._simulation is None
            or self._episodes_in_scene >= self.settings.scene_reset_interval
        ):
            self._new_scene()
            self._episodes_in_scene = 0
        elif self.task_name in GOAL_TASKS:
            self.simulation.set_state(self._at_rest)
        self._episodes_in_scene += 1
        self._elapsed_steps = 0
        simulation = self.simulation
        joints = panda.HOME + self.np_random.uniform(-START_NOISE, START_NOISE, panda.NUM_JOINTS)
        simulation.put_robot(joints)
        self._controller.reset(joints, panda.FINGER_TRAVEL)
        target = (options or {}).get("target")
        if target is not None and target not in range(self.settings.num_objects):
            raise InputError(f"options target is {target!r}; choose 0 to {self.settings.num_objects - 1}")
        task = TASKS[self.task_name]
        short = self.randomization.short_name_rate
        self.goal = task.draw_goal(self.np_random, simulation.scene, target, self.split, short)
        if self.settings.shuffle_instructions:
            self.goal.instruction = self._unrelated_instruction()
        self._part, self._has_succeeded, self.start_draw = WHOLE, False, None
        if share := (self.settings.expert_starts or {}).get(self.task_name):
            self._start_on_the_way(share)
        self._potentials = task.potentials(simulation.view(), self.goal)
        self._frames_checked = False
        return self.observe(), self._info()

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Simulate 0.04 s."""
        simulation = self.simulation
        taken = self._controller.command(action, simulation.joints)
        simulation.step(self._controller.target, self._controller.finger_target)
        self._elapsed_steps += 1
        limit = self.settings.max_episode_steps
        truncated = limit is not None and self._elapsed_steps >= limit
        info = self._info()
        observation = self.observe() if self.observes else None
        if self.task_name not in GOAL_TASKS:
            return observation, 0.0, False, truncated, info
        task, view = TASKS[self.task_name], simulation.view()
        success = task.is_achieved(view, self.goal.index, self.goal.base)
        is_wrong = not success and task.is_achieved_by_another(view, self.goal)
        self._has_succeeded |= success
        terms = {"success": SUCCESS_REWARD if success else 0.0}
        if self.settings.reward == "dense":
            approach, goal = task.potentials(view, self.goal)
            terms["approach"] = approach - self._potentials[0]
            terms["goal"] = goal - self._potentials[1]
            terms["control"] = -CONTROL_WEIGHT * float(taken[:-1] @ taken[:-1])
            terms["wrong_object"] = -SUCCESS_REWARD if is_wrong else 0.0
            self._potentials = (approach, goal)
        info["success"] = success
        info["reward_terms"] = terms
        return observation, sum(terms.values()), success or is_wrong, truncated, info

    def render(self) -> np.ndarray | None:
        """Return the head camera's image for videos, uint8 [320, 320, 3]."""
        if self.render_mode is None:
            return None
        return np.ascontiguousarray(self.camera_images(("head",), RENDER_SIZE)["head"])

    def camera_images(self, cameras: Sequence[str], size: int) -> dict[str, np.ndarray]:
        """Return images of any size, uint8 [size, size, 3]; valid until the next call in this thread."""
        simulation = self.simulation
        if simulation.scene.flickers:
            simulation.model.light_diffuse[:] = flicker(simulation.scene, self._elapsed_steps)
        if simulation.scene.noise_patch is not None:
            colours = noise_colours(simulation.scene, self._elapsed_steps)
            simulation.model.geom_rgba[noise_tiles(simulation.model), :3] = colours
        return dict(zip(cameras, simulation.images(cameras, size), strict=True))

    @property
    def targets(self) -> tuple[np.ndarray, float]:
        """The targets of the joints and of the fingers."""
        return self._controller.target, self._controller.finger_target

    def action_names(self) -> tuple[str, ...]:
        """Return what each action dim moves: `x` is away from the robot, `y` to its left, `z` up; or joints."""
        return action_names(self.settings.control_mode)

    def expert_action(self, target: int | None = None) -> np.ndarray:
        """Return a scripted action for the task; for `random_exploration` one towards random positions.

        With `target`, an object's index, the action for an instruction that names this object.
        """
        simulation = self.simulation
        view = simulation.view()
        if self.task_name in GOAL_TASKS:
            goal = self.goal
            if target is not None and target != goal.index:
                goal = Goal(target, goal.index if target == goal.base else goal.base, "")
            rotation = simulation.tcp_rotation
            hand_yaw = math.atan2(rotation[1, 0], rotation[0, 0])
            point = expert.waypoint(self.task_name, view, goal, simulation.yaws(), hand_yaw)
        else:
            seed = simulation.scene.seed + self._episodes_in_scene
            point = expert.exploring_waypoint(seed, self._elapsed_steps, view.top)
        return self._controller.action_towards(point.position, hand_down(point.yaw), point.gripper)

    # ------------------------------------------------------------------------------------------------------ state

    def get_state(self) -> dict[str, Any]:
        """Return the complete state as plain data: scene, physics, targets, episode, random numbers."""
        simulation = self._simulation
        return {
            "scene": None if simulation is None else simulation.scene.as_data(),
            "physics": None if simulation is None else simulation.get_state(),
            "settled": self._at_rest,
            "controller": self._controller.get_state(),
            "task": self.task_name,
            "goal": dataclasses.asdict(self.goal),
            "episodes_in_scene": self._episodes_in_scene,
            "elapsed_steps": self._elapsed_steps,
            "potentials": list(self._potentials),
            "start_rates": {name: rates.tolist() for name, rates in self._start_rates.items()},
            "part": self._part,
            "succeeded": self._has_succeeded,
            "random": self.np_random.bit_generator.state,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a saved state: the same actions then give the same images and rewards."""
        if state["scene"] is None:  # saved before the first reset
            self._simulation = None
        else:
            scene = Scene.from_data(state["scene"])
            if self._simulation is None or self._simulation.scene != scene:
                self._simulation = Simulation(scene)
            self._simulation.set_state(state["physics"])
        self._at_rest = state["settled"]
        self._controller.set_state(state["controller"])
        self.task_name = state["task"]
        self.goal = Goal(**state["goal"])
        self._episodes_in_scene = state["episodes_in_scene"]
        self._elapsed_steps = state["elapsed_steps"]
        self._potentials = (state["potentials"][0], state["potentials"][1])
        for name, rates in state.get("start_rates", {}).items():
            self._start_rates[name] = np.array(rates)
        self._part, self._has_succeeded = state.get("part", WHOLE), state.get("succeeded", False)
        self.np_random.bit_generator.state = state["random"]

    # ---------------------------------------------------------------------------------------------------- details

    def _make_observation_space(self) -> spaces.Space:
        whole = PROPRIOCEPTION_SIZE + OBJECT_SIZE * self.settings.num_objects + 2 + len(TASKS)
        has_whole = self.settings.observation in ("state", "both")
        state = vector_space(whole if has_whole else PROPRIOCEPTION_SIZE, MAX_VELOCITY)
        if self.settings.observation == "state":
            return state
        streams: dict[str, spaces.Space] = {"state": state}
        streams |= {f"{name}_rgb": image_space(self.settings.image_size) for name in self.cameras}
        streams["instruction"] = spaces.Text(INSTRUCTION_LENGTH, charset=LETTERS)
        if self.settings.observation == "labelled":
            streams["places"] = vector_space(3 * self.settings.num_objects + 2, MAX_VELOCITY)
        if self.settings.observation == "privileged":
            streams["scene_state"] = vector_space(whole, MAX_VELOCITY)
        return spaces.Dict(streams)

    def _new_scene(self) -> None:
        """Draw a task and a scene whose objects have room and are at rest."""
        random = self.np_random
        self.task_name = self.settings.task
        if self.task_name == ALL_TASKS:
            self.task_name = str(random.choice(GOAL_TASKS, p=self._task_shares))
        has_area = TASKS[self.task_name].has_area
        for _ in range(MAX_SCENE_TRIES):
            seed = int(random.integers(2**31))
            scene = draw_scene(seed, self.settings.num_objects, has_area, self.randomization, self.split)
            if scene is None:
                continue
            self._simulation = Simulation(scene)
            if self._simulation.come_to_rest():
                self._at_rest = self._simulation.get_state()
                return
        raise RunError(f"no stable scene in {MAX_SCENE_TRIES} tries; use fewer objects or less randomization")

    def _start_on_the_way(self, share: float) -> None:
        """In this share of episodes, let the expert do the task and go back to a step of the part that is drawn."""
        chosen, draw, within = self.np_random.random(3)
        if chosen >= share:
            return
        self.start_draw = float(draw)
        task, simulation = TASKS[self.task_name], self.simulation
        passed = []
        for _ in range(MAX_EXPERT_STEPS):
            passed.append((simulation.get_state(), self._controller.get_state()))
            self._controller.command(self.expert_action(), simulation.joints)
            simulation.step(self._controller.target, self._controller.finger_target)
            view = simulation.view()
            if task.is_achieved(view, self.goal.index, self.goal.base) or task.is_achieved_by_another(view, self.goal):
                break
        self._way = [passed[-1 - int(left(part, within) * len(passed))] for part in range(PARTS)]
        self.begin_on_the_way(int(draw_part(self._start_rates[self.task_name], draw)))

    def begin_on_the_way(self, part: int) -> None:
        """Go to a part of the expert's way, after a reset with a `start_draw`."""
        physics, controller = self._way[part]
        self._part = part
        self.simulation.set_state(physics)
        self._controller.set_state(controller)

    def _note_success(self) -> None:
        """Count the episode that ends if it began on the expert's way."""
        if self._part == WHOLE or self._elapsed_steps == 0:
            return
        episodes = (np.arange(PARTS) == self._part).astype(np.float64)
        rates = self._start_rates[self.task_name]
        self._start_rates[self.task_name] = updated(rates, episodes, episodes * self._has_succeeded)

    def _unrelated_instruction(self) -> str:
        """Draw an instruction for an object of the scene independently of the goal; scenes and goals are unchanged."""
        random = np.random.default_rng([self.scene.seed, 7, self._episodes_in_scene])
        return TASKS[self.task_name].draw_goal(random, self.scene).instruction

    def _info(self) -> dict[str, Any]:
        info: dict[str, Any] = {"task": self.task_name, "instruction": self.goal.instruction}
        if self.task_name in GOAL_TASKS:
            info["success"] = False
        return info

    def observe(self) -> Any:
        """Return the present observation."""
        mode = self.settings.observation
        state = self._state() if mode in ("state", "both") else self._proprioception()
        if mode == "state":
            return state
        observation: dict[str, Any] = {"state": state}
        for name, image in self.camera_images(self.cameras, self.settings.image_size).items():
            observation[f"{name}_rgb"] = np.ascontiguousarray(image.transpose(2, 0, 1))
            if not self._frames_checked and image.min() == image.max():
                raise RunError(f"the {name} camera's image has one colour: rendering does not work (check MUJOCO_GL)")
        self._frames_checked = True
        observation["instruction"] = self.goal.instruction
        if mode == "labelled":
            observation["places"] = self._labels()
        if mode == "privileged":
            observation["scene_state"] = self._state()
        return observation

    def _labels(self) -> np.ndarray:
        """Return the positions, relative to the hand, of the named object, its base and the area; otherwise zeros.

        Objects that the instruction does not name have no label: it could not be learned.
        """
        tcp, number = self.simulation.tcp, TASKS[self.task_name].num_named
        positions = np.zeros((self.settings.num_objects, 3))
        positions[:number] = self.simulation.object_positions[self._by_goal()[:number]] - tcp
        return np.concatenate([positions.ravel(), self._area_from(tcp)], dtype=np.float32, casting="same_kind")

    def _by_goal(self) -> list[int]:
        """Return the task's objects: the named one first, then its base."""
        return list(dict.fromkeys([self.goal.index, self.goal.base, *range(self.settings.num_objects)]))

    def _area_from(self, tcp: np.ndarray) -> tuple[float, float]:
        """Return the position of the area relative to the hand; zeros without an area."""
        area = self.simulation.scene.area
        return (0.0, 0.0) if area is None else (area[0] - tcp[0], area[1] - tcp[1])

    def _proprioception(self) -> np.ndarray:
        simulation = self.simulation
        rotation = simulation.tcp_rotation
        parts = [
            simulation.joints,
            simulation.joint_velocities.clip(-MAX_VELOCITY, MAX_VELOCITY),
            (self.gripper_opening,),
            simulation.tcp,
            rotation[:, 0],
            rotation[:, 1],
        ]
        return np.concatenate(parts, dtype=np.float32, casting="same_kind")

    def _state(self) -> np.ndarray:
        """Return proprioception, the poses of the objects from the hand, the area and the task."""
        simulation, tcp = self.simulation, self.simulation.tcp
        parts: list[Any] = [self._proprioception()]
        for index in self._by_goal():
            parts += [simulation.object_positions[index] - tcp, simulation.quaternions[index]]
        parts.append(self._area_from(tcp))
        parts.append([float(name == self.task_name) for name in TASKS])
        return np.concatenate(parts, dtype=np.float32, casting="same_kind")


def task_shares(spec: TabletopSpec) -> np.ndarray | None:
    """Return the probabilities of `GOAL_TASKS` by `task_weights`; None: all tasks are equally frequent."""
    weights = spec.task_weights
    if weights is None:
        return None
    if spec.task != ALL_TASKS:
        raise InputError(
            f"task_weights: task is {spec.task!r}, and they are for task {ALL_TASKS!r}; give --env-kwargs "
            "task_weights=null where they are those of the run that this one starts from"
        )
    for name in weights:
        check_choice("task_weights", name, GOAL_TASKS)
    given = np.array([weights.get(name, 1.0) for name in GOAL_TASKS])
    if not given.sum() > 0:
        raise InputError("task_weights: all are 0; give at least one task a weight above 0")
    return given / given.sum()
