"""Policies of the off-policy and offline algorithms, built as runs build them, and small VLA models, for tests."""

import dataclasses
import math
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import nn

from deft import schema
from deft.config.settings import DatasetPolicyConfig, PolicyConfig
from deft.models.actor_critic import ActorCritic
from deft.models.vla.gpt import GPTVLAModel
from deft.models.vla.policy import VLAPolicy
from deft.models.vla.tiny import TinyVLAModel

OBSERVATION = spaces.Dict(
    {
        "rgb": spaces.Box(0, 255, (16, 16, 3), np.uint8),
        "proprio": spaces.Box(-np.inf, np.inf, (3,), np.float32),
        "instruction": spaces.Box(0, 255, (8,), np.uint8),
    }
)
UNIT = spaces.Box(-1.0, 1.0, (2,), np.float32)
BOX = spaces.Box(np.array([-2, 0], np.float32), np.array([2, 1], np.float32))  # half widths 2 and ½: Σ log = 0
SMALL = DatasetPolicyConfig(hidden_dim=8, encoder_dim=8)


def actor_policy(
    observation: Space,
    action: Space,
    config: PolicyConfig | None = None,
    distribution: Any = "gaussian",
    num_members: int = 1,
    dtype: torch.dtype = torch.float32,
) -> ActorCritic:
    """A network from scratch with separate actor and value networks."""
    config = dataclasses.replace(config or DatasetPolicyConfig(), distribution=distribution)
    return ActorCritic(observation, action, config, num_members, dtype)


def vla_policy(
    model: torch.nn.Module, observation: Space, action: Space, config: PolicyConfig | None = None
) -> VLAPolicy:
    """A policy around a VLA model whose unit actions span the Box, with V beside it unless the model has features."""
    config = config or DatasetPolicyConfig()
    return VLAPolicy(model, observation_space=observation, action_space=action, config=config)


class Known(nn.Module):
    """A Gaussian with one mean for all states, drawn with gradient; the three methods and `deterministic`."""

    def __init__(self, mean: float = 0.0, std: float = 0.5) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.full((2,), mean))
        self.log_std = nn.Parameter(torch.full((2,), math.log(std)))

    def _distribution(self, observations):
        mean = self.mean.expand(len(observations), 2)
        return torch.distributions.Normal(mean, self.log_std.exp().expand_as(mean))

    def forward(self, observations, deterministic=False):
        distribution = self._distribution(observations)
        return distribution.mean if deterministic else distribution.rsample()

    def get_value(self, observations):
        return self.mean.sum().expand(len(observations), 1)

    def evaluate_actions(self, observations, actions):
        distribution = self._distribution(observations)
        return distribution.log_prob(actions).sum(-1), distribution.entropy().sum(-1)


def gpt(**changes) -> GPTVLAModel:
    return GPTVLAModel(**{"action_dim": 2, "proprio_dim": 3, "image_size": 16, "dropout": 0.2, **changes})


def streams(batch: int = 5) -> dict[str, torch.Tensor]:
    return {
        "rgb": torch.randint(0, 256, (batch, 16, 16, 3), dtype=torch.uint8),
        "proprio": torch.randn(batch, 3),
        "instruction": torch.from_numpy(schema.encode_text("go left", 8)).expand(batch, 8),
    }


def tiny(**changes) -> TinyVLAModel:
    sizes = {"action_dim": 2, "chunk_length": 3, "image_keys": ["rgb"], "image_size": 16, "width": 16}
    return TinyVLAModel(**{**sizes, "proprio_key": "proprio", "proprio_dim": 3, **changes})


def chunked(box: spaces.Box, length: int = 3) -> spaces.Box:
    return spaces.Box(np.tile(box.low, (length, 1)), np.tile(box.high, (length, 1)))
