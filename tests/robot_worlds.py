"""A robot's world whose frames number themselves, in the 32-dim layout."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

MASK = np.isin(np.arange(32), [0, 1, 2, 3, 4, 5, 6, 8])


class NumberedWorld(gymnasium.Env):
    """Red is the step t, green the episode, and blue says which camera; state[0] is t/100. Never ends by itself.

    One array is filled again for every frame, so that who keeps it sees only the newest.
    """

    instruction = "count"

    def __init__(self, terminates_at: int | None = None, render_mode: str | None = None) -> None:
        picture = spaces.Box(0, 255, (3, 4, 4), np.uint8)
        self.observation_space = spaces.Dict(
            {"state": spaces.Box(-9, 9, (32,), np.float32), "head_rgb": picture, "wrist_rgb": picture}
        )
        self.action_space = spaces.Box(-1, 1, (32,), np.float32)
        self.action_mask = MASK.copy()
        self.render_mode = render_mode
        self.terminates_at = terminates_at
        self.pictures = {"head_rgb": np.zeros((3, 4, 4), np.uint8), "wrist_rgb": np.zeros((3, 4, 4), np.uint8)}
        self.episode, self.t = -1, 0
        self.last_action = np.zeros(32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self._observe(), {}

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        self.t += 1
        self.last_action = np.array(action)
        return self._observe(), float(self.t), self.t == self.terminates_at, False, {}

    def render(self) -> np.ndarray:
        return self.pictures["head_rgb"].transpose(1, 2, 0)

    def _observe(self) -> dict[str, Any]:
        for blue, picture in enumerate(self.pictures.values()):
            picture[0], picture[1], picture[2] = self.t, self.episode, blue
        state = np.zeros(32, np.float32)
        state[0] = self.t / 100
        return {"state": state, **self.pictures}


WORLD_ID = "deft-tests/Numbered-v0"
# A time limit of the world's own, which the F1 environments must not inherit.
gymnasium.register(id=WORLD_ID, entry_point=NumberedWorld, max_episode_steps=3)


def numbers(images: Any) -> list[int]:
    """The steps that a history of frames [H, 3, h, w] shows."""
    return [int(number) for number in images[:, 0, 0, 0]]
