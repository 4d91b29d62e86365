"""Supervised fine-tuning, or behaviour cloning: the policy imitates the actions of a dataset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from deft import schema
from deft.algorithms.algorithm import Metrics
from deft.algorithms.off_policy import ActorAlgorithm
from deft.algorithms.optimization import backward
from deft.config.algorithm_settings import ImitationSettings, SFTSettings
from deft.data.augmentation import augment, has_images
from deft.data.datasets.dataset import Dataset
from deft.errors import InputError
from deft.models.policy import Policy


class SFT(ActorAlgorithm):
    """L = −E log π(a | s), or the mean squared error of the most likely action; in unit actions."""

    name = "sft"
    can_shard: ClassVar[bool] = True
    learns_labels: ClassVar[bool] = True
    needs_next_observation = False
    settings: Any

    def __init__(self, policy: Policy, settings: ImitationSettings | None = None, seed: int = 0) -> None:
        super().__init__(policy, settings or SFTSettings(), seed)
        if self.settings.loss == "mse":
            policy.check_mean(f"{self.name} with --loss mse")

    def _actor_trains(self) -> Iterator[nn.Parameter]:
        yield from self.policy.actor_parameters()
        yield from self.policy.encoder_parameters()

    @property
    def imitator(self) -> Policy:
        """The policy that a step trains."""
        return self.policy

    def _step(self, batch: Mapping[Any, Any]) -> Metrics:
        action = self._unit_action(batch)
        observation, mask = augment(batch[schema.OBSERVATION], self.settings.augment), batch.get(schema.STEP_MASK)
        count = min(self.settings.gradient_accumulation, action.shape[1])
        # Micro-batches: the loss is a mean over the rows, ∇L = Σ (n_i / n) ∇L_i
        axis = 1 if self.policy.num_members > 1 else 0  # the batch dimension follows the members, if there are several
        metrics: Metrics = {}
        for number in range(count):
            rows = slice(*(action.shape[1] * place // count for place in (number, number + 1)))
            share = (rows.stop - rows.start) / action.shape[1]
            part = None if mask is None else _rows(mask, rows, axis)
            losses = self.imitator.imitation(_rows(observation, rows, axis), action[:, rows], part, self.settings.loss)
            backward(losses["bc_loss"].sum() * share, self.actor_optimizer, accumulate=number > 0)
            for name, value in losses.items():
                metrics[name] = metrics.get(name, 0.0) + value.detach().mean() * share
        self.apply_gradients(self.actor_optimizer)
        return metrics

    @torch.no_grad()
    def _unit_action(self, batch: Mapping[Any, Any]) -> Tensor:
        """The data's actions, [members, B, …]."""
        action = self.policy.to_unit(batch[schema.ACTION])
        return action if action.ndim == 3 else action.unsqueeze(0)

    def prepare(self, dataset: Dataset, sampler: Any, fresh: bool) -> None:
        """Fit the observation normalisation to the dataset."""
        if self.settings.augment and not has_images(dataset.observation_space):
            raise InputError(
                f"augment: {dataset.name} has no images to augment (its observations are {dataset.observation_space}); "
                "remove --augment"
            )
        super().prepare(dataset, sampler, fresh)

    @torch.no_grad()
    def validate(self, batches: Sequence[Mapping[Any, Any]]) -> Metrics:
        """Mean losses over all rows of the batches, without augmentation."""
        was_training = self.policy.training
        self.policy.eval()
        totals: Metrics = {}
        rows = 0
        for batch in batches:
            action, mask = self._unit_action(batch), batch.get(schema.STEP_MASK)
            losses = self.policy.imitation(batch[schema.OBSERVATION], action, mask, self.settings.loss)
            rows += action.shape[1]
            for name, value in losses.items():
                totals[name] = totals.get(name, 0.0) + value.mean() * action.shape[1]
        self.policy.train(was_training)
        return {name: total / rows for name, total in totals.items()}


def _rows(value: Any, rows: slice, axis: int) -> Any:
    """Some rows of a tensor, or of each in a mapping."""
    if isinstance(value, Mapping):
        return {name: _rows(one, rows, axis) for name, one in value.items()}
    return value[:, rows] if axis else value[rows]
