"""Environments of several tests: one that can render, and ones whose numbers are all known in advance."""

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from deft.envs.tabletop.rendering import renderer
from deft.errors import InputError


@pytest.fixture(scope="session")
def gl() -> None:
    """Skips where nothing can be rendered."""
    try:
        renderer()
    except InputError as error:
        pytest.skip(str(error))


@pytest.fixture
def make_counting_env() -> Callable[..., gymnasium.Env]:
    """A maker of environments that count; defined in here, so that it travels to worker processes by value."""

    class CountingEnv(gymnasium.Env):
        """Observation [episode, t, offset] in ONE array that is reused; reward t; ends after `length` steps."""

        def __init__(self, length: int = 3, ends: str = "terminated", action_space: spaces.Space | None = None) -> None:
            self.observation_space = spaces.Box(-1e6, 1e6, (3,), np.float64)
            self.action_space = action_space or spaces.Discrete(2)
            self.length, self.ends = length, ends
            self.array = np.zeros(3)
            self.episode, self.t = -1, 0
            self.received: list[Any] = []

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
            super().reset(seed=seed)
            self.episode, self.t = self.episode + 1, 0
            self.array[:] = self.episode, 0, self.np_random.integers(1000)
            return self.array, {}

        def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
            self.received.append(action)
            self.t += 1
            self.array[1] = self.t
            is_done = self.t == self.length
            info: dict[str, Any] = {"reward_terms": {"time": float(self.t), "one": 1.0}}
            if is_done:
                info["success"] = self.episode % 2 == 0
            terminated = is_done and self.ends == "terminated"
            return self.array, float(self.t), terminated, is_done and not terminated, info

        def get_received(self) -> list[Any]:
            return self.received

        def add(self, number: int) -> int:
            return self.t + number

    def make(**kwargs: Any) -> gymnasium.Env:
        return CountingEnv(**kwargs)

    return make
