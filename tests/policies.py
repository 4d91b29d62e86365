"""Policies of the off-policy and offline algorithms, built as runs build them, for tests."""

import dataclasses
from typing import Any

import torch
from gymnasium import Space

from deft.config.settings import DatasetPolicyConfig, PolicyConfig
from deft.models.actor_critic import ActorCritic
from deft.models.vla.policy import VLAPolicy


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
