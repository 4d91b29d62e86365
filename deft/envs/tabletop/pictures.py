"""Pictures of the tabletop for models that learn to see: many scenes, and in each an arm that wanders.

`deft train tokenizer` steps copies of `TabletopPictures` in worker processes. The world is stepped without rendering in
between, so that only pictures which differ are paid for.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from deft.envs.tabletop.env import CAMERAS, TabletopEnv
from deft.envs.tabletop.scene import DomainRandomization
from deft.errors import RunError

FULL_RANDOMIZATION = {
    "random_appearance": True,
    "random_background": True,
    "random_light": True,
    "cluttered_table": True,
    "random_head_camera_dis": 0.05,
    "random_table_height": 0.03,
}
PLAIN_SHARE = 0.15  # of the scenes look as they do without randomisation
MOST_STEPS = 4  # steps of 0.04 s between two pictures at most
MOST_STEPS_BEFORE = 20  # before the first picture of a scene
TURN_RATE = 0.2  # how often a step changes the direction of the motion
JITTER = 0.5  # what is added to the direction in every step, at most


class TabletopPictures(gymnasium.Env[np.ndarray, Any]):
    """Every step gives a picture of each camera, uint8 [cameras, 3, size, size]; its one action means nothing.

    An episode is a scene. The joints drift in one direction for about five steps, then in another, with noise on top.
    """

    def __init__(self, image_size: int = 64, pictures_per_scene: int = 4, **arguments: Any) -> None:
        """`arguments` are those of `TabletopEnv`; by default the scenes of all tasks, with everything randomised."""
        randomization = arguments.pop("domain_randomization", FULL_RANDOMIZATION)
        self._env = TabletopEnv(**{"task": "all", **arguments}, domain_randomization=randomization, observation="state")
        self._randomization = self._env.randomization
        self._image_size = image_size
        self._pictures_per_scene = pictures_per_scene
        self._num_pictures = 0
        self._direction = np.zeros(0)
        self.observation_space = spaces.Box(0, 255, (len(CAMERAS), 3, image_size, image_size), np.uint8)
        self.action_space = spaces.Discrete(1)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Draw a scene, and move into it."""
        super().reset(seed=seed)
        is_plain = self.np_random.random() < PLAIN_SHARE
        self._env.randomization = DomainRandomization() if is_plain else self._randomization
        self._env.reset(seed=int(self.np_random.integers(2**31)))
        self._turn()
        self._move(int(self.np_random.integers(MOST_STEPS_BEFORE + 1)))
        self._num_pictures = 1
        return self._pictures(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Move a little, and look."""
        self._move(int(self.np_random.integers(1, MOST_STEPS + 1)))
        self._num_pictures += 1
        return self._pictures(), 0.0, False, self._num_pictures >= self._pictures_per_scene, {}

    def close(self) -> None:
        """Free the simulation."""
        self._env.close()

    def _turn(self) -> None:
        self._direction = self.np_random.uniform(-1.0, 1.0, self._env.action_space.shape)

    def _move(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.np_random.random() < TURN_RATE:
                self._turn()
            noise = self.np_random.uniform(-JITTER, JITTER, self._direction.shape)
            self._env.step((self._direction + noise).clip(-1.0, 1.0).astype(np.float32))

    def _pictures(self) -> np.ndarray:
        found = self._env.camera_pictures(CAMERAS, self._image_size)
        pictures = np.stack([found[name] for name in CAMERAS]).transpose(0, 3, 1, 2)
        if self._num_pictures <= 1 and any(picture.min() == picture.max() for picture in pictures):
            raise RunError("a camera's picture is of one colour: rendering does not work (check MUJOCO_GL)")
        return np.ascontiguousarray(pictures)
