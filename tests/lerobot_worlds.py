"""An environment with the streams of the LeRobot test dataset: a 44-d robot, one camera and an instruction.

Registered as `lerobot_worlds:deft-tests/PickAndPlace-v0`.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

JOINTS = 44
CAMERA_SIDE = 256
LIMIT = 3.5  # radians: the robot's joint limits, wider than any recorded action


class PickAndPlace(gymnasium.Env):
    """The state moves half of the way to the commanded joint angles; the reward is minus the mean distance to zero."""

    def __init__(self, camera: str = "ego_view", channels_last: bool = True) -> None:
        self.camera, self.channels_last = camera, channels_last
        shape = (CAMERA_SIDE, CAMERA_SIDE, 3) if channels_last else (3, CAMERA_SIDE, CAMERA_SIDE)
        self.observation_space = spaces.Dict(
            {
                "state": spaces.Box(-np.inf, np.inf, (JOINTS,), np.float32),
                camera: spaces.Box(0, 255, shape, np.uint8),
                "instruction": spaces.Text(max_length=80),
            }
        )
        self.action_space = spaces.Box(-LIMIT, LIMIT, (JOINTS,), np.float32)
        self.state = np.zeros(JOINTS, np.float32)
        self.picture = np.zeros(shape, np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self.state = self.np_random.uniform(-1, 1, JOINTS).astype(np.float32)
        self.picture[...] = self.np_random.integers(0, 256)
        return self._observe(), {}

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        self.state = (0.5 * self.state + 0.5 * action).astype(np.float32)
        return self._observe(), -float(np.abs(self.state).mean()), False, False, {}

    def _observe(self) -> dict[str, Any]:
        words = "pick the squash from the counter and place it in the plate"
        return {"state": self.state.copy(), self.camera: self.picture.copy(), "instruction": words}


ENV_ID = "deft-tests/PickAndPlace-v0"
gymnasium.register(id=ENV_ID, entry_point=PickAndPlace, max_episode_steps=4)
