"""Tiny environments that tests share: each shows one thing."""

from __future__ import annotations

import os
import signal
import time

import gymnasium
import numpy as np
from gymnasium import spaces


class Counting(gymnasium.Env):
    """Observation [episode, step]: numbers itself. Episodes are truncated, or terminated, after `length` steps."""

    def __init__(self, length: int = 3, terminates: bool = False, reward: float = 1.0) -> None:
        self.observation_space = spaces.Box(-1e6, 1e6, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.length, self.terminates, self.reward = length, terminates, reward
        self.episode, self.steps = -1, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.steps = self.episode + 1, 0
        return self._observation(), {}

    def step(self, action):
        self.steps += 1
        over = self.steps >= self.length
        return self._observation(), self.reward, over and self.terminates, over and not self.terminates, {}

    def _observation(self):
        return np.array([self.episode, self.steps], np.float32)


class Identity(gymnasium.Env):
    """Reward 1 for the action that the observation shows: any correct learner solves it in a few thousand steps."""

    def __init__(self, action_space: spaces.Space, length: int = 10) -> None:
        self.action_space = action_space
        low, high = (action_space.low, action_space.high) if isinstance(action_space, spaces.Box) else (0, 10)
        self.observation_space = spaces.Box(np.float32(low), np.float32(high), action_space.shape or (1,), np.float32)
        self.length, self.steps = length, 0
        self.target: np.ndarray = np.zeros(1)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.action_space.seed(seed)
        self.steps = 0
        return self._draw(), {}

    def step(self, action):
        if isinstance(self.action_space, spaces.Box):
            reward = float(
                np.mean(np.abs(action - self.target) < 0.25 * (self.action_space.high - self.action_space.low))
            )
        else:
            reward = float(np.mean(np.atleast_1d(action) == self.target))
        self.steps += 1
        return self._draw(), reward, False, self.steps >= self.length, {"is_success": reward > 0.5}

    def _draw(self):
        self.target = np.atleast_1d(self.action_space.sample())
        return self.target.astype(np.float32)


class Recall(gymnasium.Env):
    """A cue (±1) is shown at the first step only; at the last step the action must name it. Needs memory."""

    def __init__(self, length: int = 4) -> None:
        self.observation_space = spaces.Box(-1, 1, (2,), np.float32)  # the cue, and whether to answer now
        self.action_space = spaces.Discrete(2)
        self.length, self.steps, self.cue = length, 0, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.cue = 0, int(self.np_random.integers(2))
        return np.array([2 * self.cue - 1, 0], np.float32), {}

    def step(self, action):
        self.steps += 1
        over = self.steps == self.length
        reward = float(int(action) == self.cue) if over else 0.0
        answering = self.steps == self.length - 1
        return np.array([0, float(answering)], np.float32), reward, over, False, {}


class Failing(Counting):
    """Raises, gives NaN, or hangs at a given step of its life."""

    def __init__(self, at: int, how: str = "raise", length: int = 1000) -> None:
        super().__init__(length)
        self.at, self.how, self.life = at, how, 0

    def step(self, action):
        self.life += 1
        observation, *rest = super().step(action)
        if self.life == self.at:
            if self.how == "raise":
                raise ValueError("the gripper fell off")
            if self.how == "nan":
                observation = np.array([np.nan, 0], np.float32)
            if self.how == "nan_reward":
                rest[0] = float("nan")
            if self.how == "hang":
                time.sleep(3600)
        return (observation, *rest)


class Signalling(Counting):
    """Sends the process a signal at a given step of its life; `life` counts the steps that were made all the same."""

    def __init__(self, at: int, number: signal.Signals, length: int = 50) -> None:
        super().__init__(length)
        self.at, self.number, self.life = at, number, 0

    def step(self, action):
        self.life += 1
        if self.life == self.at:
            os.kill(os.getpid(), self.number)
        return super().step(action)


class Numbered(gymnasium.Env):
    """Observation [whose, step of its life]: no two steps of any copy look alike, in whatever process they are."""

    def __init__(self, length: int = 20, wait: float = 0.0) -> None:
        self.observation_space = spaces.Box(0, 2**24, (3,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.length, self.wait, self.steps, self.life = length, wait, 0, 0
        self.whose = np.random.SeedSequence().entropy % 2**40  # drawn by the system, also where seeds are equal

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._observation(), {}

    def step(self, action):
        self.steps, self.life = self.steps + 1, self.life + 1
        time.sleep(self.wait)
        return self._observation(), 1.0, False, self.steps >= self.length, {}

    def _observation(self):
        return np.array([self.whose >> 20, self.whose % 2**20, self.life], np.float32)


class Target(gymnasium.Env):
    """Reward −|action − target|, with the target in the observation and actions in [−2, 4]; ten steps, then a cut."""

    def __init__(self, image: bool = False) -> None:
        self.image = image
        self.observation_space = (
            spaces.Box(0, 255, (1, 8, 8), np.uint8) if image else spaces.Box(-2.0, 4.0, (1,), np.float32)
        )
        self.action_space = spaces.Box(-2.0, 4.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._draw(), {}

    def step(self, action):
        reward = -abs(float(action[0]) - self.target)
        self.steps += 1
        return self._draw(), reward, False, self.steps == 10, {}

    def _draw(self):
        self.target = float(self.np_random.uniform(-1.5, 3.5))
        if self.image:
            return np.full((1, 8, 8), int((self.target + 2) / 6 * 255), np.uint8)
        return np.array([self.target], np.float32)


class SecretSign(gymnasium.Env):
    """Every step earns a sign that is drawn for each episode and shown in the stream `secret` alone; `state` is noise.

    With `offers_secret` False the stream is missing, as on a robot.
    """

    def __init__(self, length: int = 4, offers_secret: bool = True) -> None:
        streams: dict[str, spaces.Space] = {
            "state": spaces.Box(-1, 1, (3,)),
            "image": spaces.Box(0, 255, (3, 8, 8), np.uint8),
        }
        if offers_secret:
            streams["secret"] = spaces.Box(-1, 1, (2,))
        self.observation_space = spaces.Dict(streams)
        self.action_space = spaces.Box(-1, 1, (2,))
        self.length, self.steps, self.sign = length, 0, 0.0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.sign = 0, float(self.np_random.choice([-1.0, 1.0]))
        return self._observation(), {}

    def step(self, action):
        self.steps += 1
        return self._observation(), self.sign, self.steps >= self.length, False, {}

    def _observation(self):
        streams = {
            "state": self.np_random.uniform(-1, 1, 3).astype(np.float32),
            "image": self.np_random.integers(0, 256, (3, 8, 8), dtype=np.uint8),
            "secret": np.array([self.sign, self.steps / self.length], np.float32),
        }
        return {name: streams[name] for name in self.observation_space}


gymnasium.register(id="deft-tests/SecretSign-v0", entry_point="worlds:SecretSign")
