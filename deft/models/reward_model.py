"""A success classifier: from an observation to the probability that the task is done.

`deft train reward-model` trains it on labelled frames; `--reward_model RUN` uses it as the reward of online training
(`deft.training.reward_model`). It is a `Policy` to trainers and checkpoints alone, and does not act.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from torch import Tensor

from deft import schema
from deft.config.settings import PolicyConfig
from deft.errors import InputError
from deft.models.encoders import make_encoder
from deft.models.mlp import BatchedMLP
from deft.models.policy import Policy


class RewardModel(Policy):
    """p(success | o) = sigmoid(f(encoder(o))), on all streams of the observation."""

    def __init__(self, observation_space: gymnasium.Space, config: PolicyConfig) -> None:
        super().__init__()
        self.policy_config = config
        self.encoder = make_encoder(observation_space, config)
        self.network = BatchedMLP(1, self.encoder.dim, (config.hidden_dim,) * config.num_layers, 1)
        if isinstance(observation_space, spaces.Dict):
            self.streams = frozenset(observation_space)

    def logits(self, observation: Any) -> Tensor:
        """log p / (1 − p) of a batch of observations, [B]."""
        return self.network(self.encoder(observation).unsqueeze(0))[0, :, 0]

    @torch.no_grad()
    def probability(self, observation: Any) -> Tensor:
        """p(success | o), [B]."""
        return self.logits(observation).sigmoid()

    def observe(self, td: TensorDictBase | Mapping[str, Any]) -> None:
        """Update the observation normalisation."""
        self.encoder.observe(td[schema.OBSERVATION])

    def act(self, td: TensorDictBase, deterministic: bool = False) -> TensorDictBase:
        """Raise an error."""
        raise InputError("this run is a reward model, which does not act; give it to --reward_model of a training run")
