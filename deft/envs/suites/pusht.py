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
from deft.schema import HEAD_RGB, INSTRUCTION, STATE

TASK, TEXT = "push-t", "Push the T-shaped block onto the T-shaped target."
LETTERS = "".join(map(chr, range(32, 127)))
HORIZON = 300
SIDE = 512.0  # of the square, in its own units
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
    that, without images.

    The reward of a step is the covered share of the target divided by 0.95, at most 1; success ends the episode.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 (declared by Gymnasium)

    def __init__(
        self, task: str = TASK, observation: str = "images", image_size: int = 96, render_mode: str | None = None
    ) -> None:
        check_choice("observation", observation, ("images", "privileged", "state"))
        check_render_mode(render_mode)
        SUITE.find(f"{SUITE.name}/{task}")
        from gym_pusht.envs.pusht import PushTEnv as Simulator

        size = check_image_size(image_size)
        self._simulator = Simulator("state", "rgb_array", observation_width=size, observation_height=size)
        self.render_mode, self.instruction, self.observes = render_mode, TEXT, True
        self._observation, self._size = observation, size
        self._planner = PushPlanner(self._simulator, partial(Simulator, "state"))
        self._raw = np.zeros(5)
        self.action_space = spaces.Box(0.0, SIDE, (2,), np.float32)
        high = np.array([SIDE, SIDE, SIDE, SIDE, 2 * np.pi], np.float32)
        scene = spaces.Box(-high, high)
        streams: dict[str, spaces.Space] = {STATE: scene if observation == "state" else spaces.Box(0.0, SIDE, (2,))}
        if observation != "state":
            streams[HEAD_RGB] = spaces.Box(0, 255, (size, size, 3), np.uint8)
        streams[INSTRUCTION] = spaces.Text(len(TEXT), charset=LETTERS)
        if observation == "privileged":
            streams["scene_state"] = scene
        self.observation_space = spaces.Dict(streams)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed)
        self._raw, _ = self._simulator.reset(seed=seed, options=options)
        self._planner.reset()
        return self.observe(), {"task": TASK, "instruction": TEXT}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Move the disc towards a position for a tenth of a second."""
        self._raw, reward, terminated, _, found = self._simulator.step(np.asarray(action, np.float64))
        info = {"task": TASK, "instruction": TEXT, "success": bool(found["is_success"]), "coverage": found["coverage"]}
        return self.observe(), float(reward), bool(terminated), False, info

    def expert_action(self) -> np.ndarray:
        """Return the next position of a planned push."""
        return self._planner.action().astype(np.float32)

    def observe(self) -> dict[str, Any]:
        """Return the present observation; without an image while `observes` is false."""
        scene = np.asarray(self._raw, np.float32)
        streams: dict[str, Any] = {STATE: scene if self._observation == "state" else scene[:2]}
        if self._observation != "state":
            blank = np.zeros((self._size, self._size, 3), np.uint8)
            streams[HEAD_RGB] = self._simulator._render() if self.observes else blank
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
