"""PushT: push a T-shaped block onto its target with a disc, in two dimensions (gym-pusht, the simulator of LeRobot).

`SUITE` describes it; `PushTEnv` runs in the suite's interpreter (`deft suite install pusht`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from deft.envs.checks import check_choice, check_image_size, check_render_mode
from deft.envs.suites import Suite
from deft.envs.suites.pusht_expert import PushPlanner
from deft.envs.suites.pusht_physics import Overlap, block_pose, move_disc
from deft.errors import InputError
from deft.schema import HEAD_RGB, INSTRUCTION, STATE

TASK, TEXT = "push-t", "Push the T-shaped block onto the T-shaped target."
KEYPOINTS = "environment_state"  # the stream's name in LeRobot
LETTERS = "".join(map(chr, range(32, 127)))
HORIZON = 300
SIDE = 512.0  # of the square, in its own units
OBSERVATIONS = ("images", "privileged", "keypoints", "state")
REWARDS = ("coverage", "progress", "success")
DISTANCE_SCALE = 100.0  # a mean distance of the corners that counts as much as the whole coverage
SUITE = Suite(
    name="pusht",
    entry_point="deft.envs.suites.pusht:PushTEnv",
    package="gym-pusht",
    tasks={TASK: TEXT},
    default_task=TASK,
    max_episode_steps=HORIZON,
    protocol="an episode succeeds when the block covers more than 95 % of the target",
    scripted_kwargs={"observation": "state"},
    fingerprint_kwargs={"observation": "privileged"},
    fingerprint_expert=False,  # it chooses among pushes by simulated results, which rounding changes
)


class PushTEnv(gymnasium.Env):
    """The disc is moved to the action, a position [2] in the square of side 512; it starts an episode anywhere.

    `observation`: `"images"` has the streams `head_rgb` (the square from above), `state` [2] (position of the disc) and
    `instruction`. `"privileged"` adds `scene_state` [5], with the position and angle of the block. `"state"` has only
    that, without images. `"keypoints"` has no images and no text either: `state` and `environment_state` [16], the
    corners of the block's two rectangles, as in LeRobot's `pusht_keypoints`.

    `reward`: `"coverage"` is gym-pusht's, the covered share of the target divided by 0.95, at most 1. Success ends the
    episode, so a return of these rewards is larger without success. `"progress"` is for RL: the change of the covered
    share minus the mean distance of the corners / 100, and 1 for success. `"success"` is 1 for success, otherwise 0.

    `measures` of an episode: `max_coverage` and `max_reward`, the largest covered share and gym-pusht's largest reward.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 (declared by Gymnasium)

    def __init__(
        self,
        task: str = TASK,
        observation: str = "images",
        image_size: int = 96,
        render_mode: str | None = None,
        reward: str = REWARDS[0],
    ) -> None:
        check_choice("observation", observation, OBSERVATIONS)
        check_choice("reward", reward, REWARDS)
        check_render_mode(render_mode)
        SUITE.find(f"{SUITE.name}/{task}")
        from gym_pusht.envs.pusht import PushTEnv as Simulator

        size = check_image_size(image_size)
        self._simulator = Simulator("state", "rgb_array", observation_width=size, observation_height=size)
        self.render_mode, self.instruction, self.observes = render_mode, TEXT, True
        self._observation, self._size = observation, size
        self._has_images = observation in ("images", "privileged")
        self._planner = PushPlanner(self._simulator, partial(Simulator, "state"))
        self._reward, self._threshold = reward, self._simulator.success_threshold
        self._overlap: Overlap | None = None
        self._raw, self._corners = np.zeros(5), np.zeros((8, 2))
        self._max_coverage = self._potential = 0.0
        self._began: tuple[int, dict[str, Any] | None] = (0, None)  # seed and options of the episode
        self._actions: list[np.ndarray] = []
        self.action_space = spaces.Box(0.0, SIDE, (2,), np.float32)
        high = np.array([SIDE, SIDE, SIDE, SIDE, 2 * np.pi], np.float32)
        scene = spaces.Box(-high, high)
        streams: dict[str, spaces.Space] = {STATE: scene if observation == "state" else spaces.Box(0.0, SIDE, (2,))}
        if self._has_images:
            streams[HEAD_RGB] = spaces.Box(0, 255, (size, size, 3), np.uint8)
        if observation == "keypoints":
            streams[KEYPOINTS] = spaces.Box(-SIDE, 2 * SIDE, (16,))
        else:
            streams[INSTRUCTION] = spaces.Text(len(TEXT), charset=LETTERS)
        if observation == "privileged":
            streams["scene_state"] = scene
        self.observation_space = spaces.Dict(streams)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed)
        self._start(int(self.np_random.integers(2**31)) if seed is None else seed, options)
        return self.observe(), {"task": TASK, "instruction": TEXT}

    def _start(self, seed: int, options: dict[str, Any] | None) -> None:
        self._began, self._actions = (seed, options), []
        self._raw, _ = self._simulator.reset(seed=seed, options=options)
        if self._overlap is None:
            self._overlap = Overlap(self._simulator)
        self._planner.reset()
        self._corners = self._overlap.corners(block_pose(self._simulator))
        self._max_coverage = self._overlap.coverage(self._corners)
        self._potential = self._max_coverage - self._overlap.distance(self._corners) / DISTANCE_SCALE

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Move the disc towards a position for a tenth of a second."""
        if self._overlap is None:
            raise InputError("step() was called before reset()")
        action = np.asarray(action, np.float64)
        self._actions.append(action)
        move_disc(self._simulator, action)
        self._raw = self._simulator.get_obs()
        self._corners = corners = self._overlap.corners(block_pose(self._simulator))
        coverage = self._overlap.coverage(corners)
        success = coverage > self._threshold
        self._max_coverage = max(self._max_coverage, coverage)
        before, self._potential = self._potential, coverage - self._overlap.distance(corners) / DISTANCE_SCALE
        rewards = {
            "coverage": min(coverage / self._threshold, 1.0),
            "progress": float(success) + self._potential - before,
            "success": float(success),
        }
        measures = {
            "max_coverage": self._max_coverage,
            "max_reward": min(self._max_coverage / self._threshold, 1.0),
        }
        info = {"task": TASK, "instruction": TEXT, "success": success, "coverage": coverage, "measures": measures}
        return self.observe(), rewards[self._reward], success, False, info

    def get_state(self) -> dict[str, Any]:
        """Return the present episode as the actions since its start: contacts have a state of their own."""
        actions = np.array(self._actions).reshape(-1, 2)
        return {"began": self._began, "actions": actions, "generator": self.np_random.bit_generator.state}

    def set_state(self, state: dict[str, Any]) -> None:
        """Play an episode again up to the saved state."""
        self.np_random.bit_generator.state = state["generator"]
        observes, self.observes = self.observes, False
        self._start(*state["began"])
        for action in state["actions"]:
            self.step(action)
        self.observes = observes

    def expert_action(self) -> np.ndarray:
        """Return the next position of a planned push."""
        return self._planner.action().astype(np.float32)

    def observe(self) -> dict[str, Any]:
        """Return the present observation; without an image while `observes` is false."""
        scene = np.asarray(self._raw, np.float32)
        streams: dict[str, Any] = {STATE: scene if self._observation == "state" else scene[:2]}
        if self._has_images:
            blank = np.zeros((self._size, self._size, 3), np.uint8)
            streams[HEAD_RGB] = self._simulator._render() if self.observes else blank
        if self._observation == "keypoints":
            streams[KEYPOINTS] = self._corners.reshape(-1).astype(np.float32)
        else:
            streams[INSTRUCTION] = TEXT
        if self._observation == "privileged":
            streams["scene_state"] = scene
        return streams

    def render(self) -> np.ndarray | None:
        """Return an image of 680 pixels."""
        return None if self.render_mode is None else np.asarray(self._simulator._render(visualize=True))

    def close(self) -> None:
        """Close the simulator."""
        self._simulator.close()
