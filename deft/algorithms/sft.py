"""Supervised fine-tuning, or behaviour cloning: the policy learns to do what the dataset did."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from deft import schema
from deft.algorithms.algorithm import Metrics
from deft.algorithms.off_policy import ActorAlgorithm
from deft.algorithms.optimization import descend
from deft.config.algorithm_settings import SFTSettings
from deft.models.actor import ContinuousActor


class SFT(ActorAlgorithm):
    """L = −E log π(a | s), or the mean squared error of the most likely action; in unit actions."""

    name = "sft"
    needs_next_observation = False
    settings: SFTSettings

    def __init__(self, policy: ContinuousActor, settings: SFTSettings | None = None, seed: int = 0) -> None:
        super().__init__(policy, settings or SFTSettings(), seed)

    def _actor_trains(self) -> Iterator[nn.Parameter]:
        yield from self.policy.actor_parameters()
        yield from self.policy.encoder_parameters()

    def _step(self, batch: Mapping[Any, Any]) -> Metrics:
        with torch.no_grad():
            action = self.policy.to_unit(batch[schema.ACTION])
            action = action if action.ndim == 3 else action.unsqueeze(0)
        observation, mask = batch[schema.OBSERVATION], batch.get(schema.STEP_MASK)
        losses = self.policy.imitation(observation, action, mask, self.settings.loss)
        descend(losses["bc_loss"].sum(), self.actor_optimizer)
        return {name: value.detach().mean() for name, value in losses.items()}
