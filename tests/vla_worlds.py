"""Worlds and a model that the tests of the vision-language-action path share; named by dotted path in their configs."""

from __future__ import annotations

from typing import ClassVar

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import nn

COLOURS = {"red": (220, 30, 30), "blue": (30, 30, 220)}
SIDE = 16


class PointToColour(gymnasium.Env):
    """A picture with a red and a blue half, and one word: push left (−1) or right (+1), to the half that it names.

    One step an episode. The reward is the push towards that half, −1 to 1; success is the right direction. Which side
    is right is the exclusive or of picture and word: who ignores one of them is right half of the time and earns 0 on
    average. `hidden` withholds one of the two.
    """

    def __init__(self, hidden: str | None = None) -> None:
        self.hidden = hidden
        self.observation_space = spaces.Dict(
            {
                "camera": spaces.Box(0, 255, (SIDE, SIDE, 3), np.uint8),
                "command": spaces.Text(max_length=4, charset="bdelru"),
            }
        )
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.direction = 1.0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        left, right = self.np_random.permutation(list(COLOURS))
        word = str(self.np_random.choice(list(COLOURS)))
        self.direction = -1.0 if word == left else 1.0
        picture = np.empty((SIDE, SIDE, 3), np.uint8)
        picture[:, : SIDE // 2], picture[:, SIDE // 2 :] = COLOURS[left], COLOURS[right]
        return self._observation(picture, word), {}

    def step(self, action):
        reward = float(np.clip(action[0], -1.0, 1.0)) * self.direction
        blank = np.zeros((SIDE, SIDE, 3), np.uint8)
        return self._observation(blank, ""), reward, True, False, {"success": reward > 0}

    def _observation(self, picture, word):
        if self.hidden == "camera":
            picture = np.zeros_like(picture)
        return {"camera": picture, "command": "" if self.hidden == "command" else word}


class SevenJoints(gymnasium.Env):
    """An arm of seven joints that stands still, with two cameras: it has the spaces of the documents' example."""

    def __init__(self) -> None:
        self.observation_space = spaces.Dict(
            {
                "rgb": spaces.Box(0, 255, (3, SIDE, SIDE), np.uint8),
                "wrist_rgb": spaces.Box(0, 255, (3, SIDE, SIDE), np.uint8),
                "proprio": spaces.Box(-4.0, 4.0, (7,), np.float32),
                "language": spaces.Text(max_length=20),
            }
        )
        self.action_space = spaces.Box(-1.0, 1.0, (7,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observation(), {}

    def step(self, action):
        return self._observation(), -float(np.square(action).sum()), False, False, {}

    def _observation(self):
        picture = np.full((3, SIDE, SIDE), 128, np.uint8)
        return {"rgb": picture, "wrist_rgb": picture, "proprio": np.zeros(7, np.float32), "language": "stand still"}


gymnasium.register(id="PointToColour-v0", entry_point="vla_worlds:PointToColour")
gymnasium.register(id="SevenJoints-v0", entry_point="vla_worlds:SevenJoints", max_episode_steps=5)


class PlainModel(nn.Module):
    """The three methods that the documents ask for, and nothing else: no keywords, no `deterministic`, no chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.value = nn.Linear(8, 2), nn.Linear(8, 1)
        self.log_std = nn.Parameter(torch.zeros(2))

    def forward(self, observations):
        return self._distribution(observations).sample()

    def get_value(self, observations):
        return self.value(observations["proprio"])

    def evaluate_actions(self, observations, actions):
        distribution = self._distribution(observations)
        return distribution.log_prob(actions).sum(-1), distribution.entropy().sum(-1)

    def _distribution(self, observations):
        return torch.distributions.Normal(self.mean(observations["proprio"]), self.log_std.exp())


class ListeningModel(PlainModel):
    """A model that keeps the instructions it was given, as the bytes that it saw."""

    heard: ClassVar[set[bytes]] = set()

    def _distribution(self, observations):
        self.heard.update(bytes(row.tolist()) for row in observations["instruction"])
        return super()._distribution(observations)


class SeeingModel(nn.Module):
    """A user's own model that notes the type and the shape of the images that it is given."""

    seen: ClassVar[set[tuple]] = set()

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.value = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, observations):
        return self._distribution(observations).sample()

    def get_value(self, observations):
        return self.value(self._features(observations))

    def evaluate_actions(self, observations, actions):
        distribution = self._distribution(observations)
        return distribution.log_prob(actions).sum(-1), distribution.entropy().sum(-1)

    def _distribution(self, observations):
        return torch.distributions.Normal(self.mean(self._features(observations)), 0.5)

    def _features(self, observations):
        image = observations["camera"]
        self.seen.add((image.dtype, tuple(image.shape[1:])))
        return image.float().mean((2, 3)) / 255


class TwoCameras(gymnasium.Env):
    """A bright and a dark camera, and two sensors; the reward is the action where the first of each is the brighter.

    `names` are those of the cameras and the sensors: a policy trained under some must not confuse them under others.
    """

    def __init__(self, names: tuple[str, ...] = ("top", "wrist", "arm", "hand")) -> None:
        self.names = tuple(names)
        camera, sensor = spaces.Box(0, 255, (SIDE, SIDE, 3), np.uint8), spaces.Box(-1, 1, (2,), np.float32)
        self.observation_space = spaces.Dict(dict(zip(self.names, (camera, camera, sensor, sensor), strict=True)))
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observation(), {}

    def step(self, action):
        return self._observation(), float(action[0]), False, False, {}

    def _observation(self):
        bright, dark = (self.np_random.integers(low, low + 100, (SIDE, SIDE, 3), np.uint8) for low in (150, 0))
        values = (bright, dark, np.full(2, 0.9, np.float32), np.full(2, -0.9, np.float32))
        return dict(zip(self.names, values, strict=True))


gymnasium.register(id="TwoCameras-v0", entry_point="vla_worlds:TwoCameras", max_episode_steps=4)
