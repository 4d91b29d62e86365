"""Images of the tabletop for training vision models: many scenes, each with an arm that moves randomly.

`deft train tokenizer` steps `TabletopImages` in worker processes. Steps between two images are not rendered, so that
all images differ.
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
PLAIN_SHARE = 0.15  # fraction of the scenes without randomization
MOST_STEPS = 4  # steps of 0.04 s between two images at most
MOST_STEPS_BEFORE = 20  # before the first image of a scene
TURN_RATE = 0.2  # probability that a step changes the direction of the motion
JITTER = 0.5  # largest noise of the direction in a step


class TabletopImages(gymnasium.Env[np.ndarray, Any]):
    """Every step returns an image of each camera, uint8 [cameras, 3, size, size]; its single action has no effect.

    An episode is a scene. The joints move in one direction for about five steps, then in another, with added noise.
    """

    def __init__(self, image_size: int = 64, images_per_scene: int = 4, **arguments: Any) -> None:
        """`arguments` are those of `TabletopEnv`; by default the scenes of all tasks, fully randomized."""
        randomization = arguments.pop("domain_randomization", FULL_RANDOMIZATION)
        self._env = TabletopEnv(**{"task": "all", **arguments}, domain_randomization=randomization, observation="state")
        self._randomization = self._env.randomization
        self._image_size = image_size
        self._images_per_scene = images_per_scene
        self._num_images = 0
        self._direction = np.zeros(0)
        self.observation_space = spaces.Box(0, 255, (len(CAMERAS), 3, image_size, image_size), np.uint8)
        self.action_space = spaces.Discrete(1)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Draw a scene, and move the robot."""
        super().reset(seed=seed)
        is_plain = self.np_random.random() < PLAIN_SHARE
        self._env.randomization = DomainRandomization() if is_plain else self._randomization
        self._env.reset(seed=int(self.np_random.integers(2**31)))
        self._turn()
        self._move(int(self.np_random.integers(MOST_STEPS_BEFORE + 1)))
        self._num_images = 1
        return self._images(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Move for a few steps, and return the images."""
        self._move(int(self.np_random.integers(1, MOST_STEPS + 1)))
        self._num_images += 1
        return self._images(), 0.0, False, self._num_images >= self._images_per_scene, {}

    def close(self) -> None:
        """Close the simulation."""
        self._env.close()

    def _turn(self) -> None:
        self._direction = self.np_random.uniform(-1.0, 1.0, self._env.action_space.shape)

    def _move(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.np_random.random() < TURN_RATE:
                self._turn()
            noise = self.np_random.uniform(-JITTER, JITTER, self._direction.shape)
            self._env.step((self._direction + noise).clip(-1.0, 1.0).astype(np.float32))

    def _images(self) -> np.ndarray:
        found = self._env.camera_images(CAMERAS, self._image_size)
        images = np.stack([found[name] for name in CAMERAS]).transpose(0, 3, 1, 2)
        if self._num_images <= 1 and any(image.min() == image.max() for image in images):
            raise RunError("a camera's image has one colour: rendering does not work (check MUJOCO_GL)")
        return np.ascontiguousarray(images)
