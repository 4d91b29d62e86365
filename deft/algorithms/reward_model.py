"""Training of a success classifier on labelled frames, as the reward of online training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import Space
from torch import Tensor
from torch.nn import functional

from deft import schema
from deft.algorithms import optimization
from deft.algorithms.algorithm import Metrics
from deft.algorithms.offline import OfflineAlgorithm, to_cpu
from deft.config.algorithm_settings import RewardModelSettings
from deft.config.settings import PolicyConfig
from deft.data.augmentation import augment, has_images
from deft.data.datasets.dataset import Dataset
from deft.data.replay import ReplayBuffer
from deft.data.streaming import StreamingBuffer
from deft.errors import InputError
from deft.models.policy import Policy
from deft.models.reward_model import RewardModel


class RewardModelTraining(OfflineAlgorithm):
    """L = −E[ w y log p(o') + (1 − y) log(1 − p(o')) ],  w = negatives / positives of the dataset.

    o' is the frame that a transition leads to. y = 1 where the transition terminates its episode, or where its reward
    is above a threshold. The weight makes both classes count alike, so that p > ½ is a decision without a prior.
    """

    name = "reward-model"
    acts: ClassVar[bool] = False
    use: ClassVar[str] = "give it to --reward_model of a training run"
    exchanges_policies: ClassVar[bool] = False
    settings: RewardModelSettings
    policy: RewardModel

    def __init__(self, policy: RewardModel, settings: RewardModelSettings | None = None, seed: int = 0) -> None:
        self.policy, self.settings = policy, settings or RewardModelSettings()
        self.optimizer = optimization.make_optimizer(
            policy.parameters(), self.settings.learning_rate, weight_decay=self.settings.weight_decay, capturable=True
        )
        self.positive_weight = 1.0

    @classmethod
    def make_policy(
        cls, observation_space: Space, action_space: Space, config: PolicyConfig, settings: Any, **how: Any
    ) -> Policy:
        """Build the classifier for all streams of the dataset's observations."""
        if how.get("num_members", 1) > 1:
            raise InputError("num_seeds: a reward model is trained one seed at a time; use num_seeds 1")
        return RewardModel(observation_space, config)

    def make_sampler(self, dataset: Dataset, seed: int, device: torch.device, cache_bytes: int) -> Any:
        """Sample single transitions, from memory or from disk."""
        if dataset.table is not None:
            return ReplayBuffer(dataset.table, seed, device=device)
        return StreamingBuffer(dataset, cache_bytes, seed, device=device)

    def prepare(self, dataset: Dataset, sampler: Any, fresh: bool) -> None:
        """Count the labels, and fit the observation normalisation to the dataset."""
        if self.settings.augment and not has_images(dataset.observation_space):
            raise InputError(f"augment: {dataset.name} has no images to augment; remove --augment")
        positives = sum(int(labels.sum()) for labels in self._all_labels(dataset))
        negatives = len(dataset) - positives
        if not positives or not negatives:
            missing, rule = ("positive" if not positives else "negative"), self.settings.label
            raise InputError(
                f"label: {dataset.name} has no {missing} frame by the rule {rule!r} among its {len(dataset)} "
                "transitions; record successes and failures, or choose another label or reward_threshold"
            )
        self.positive_weight = negatives / positives
        if fresh:
            self.observe({schema.OBSERVATION: block} for block in sampler.observations())

    def _all_labels(self, dataset: Dataset) -> Iterator[np.ndarray]:
        """The labels of each episode's transitions, bool [T]."""
        for index in range(dataset.num_episodes):
            episode = dataset.episode(index)
            by_reward = self.settings.label == "reward"
            yield episode.reward > self.settings.reward_threshold if by_reward else episode.terminated

    def _labels(self, batch: Mapping[Any, Any]) -> Tensor:
        """1.0 where the frame after a transition shows success, [B]."""
        if self.settings.label == "reward":
            return (batch[schema.NEXT_REWARD] > self.settings.reward_threshold).float()
        return batch[schema.NEXT_TERMINATED].float()

    def _losses(self, batch: Mapping[Any, Any], augments: tuple[str, ...] = ()) -> tuple[Tensor, Tensor, Tensor]:
        """The loss of each frame, its label and its logit, [B]."""
        labels = self._labels(batch)
        logits = self.policy.logits(augment(batch[schema.NEXT_OBSERVATION], augments))
        weight = logits.new_tensor(self.positive_weight)
        losses = functional.binary_cross_entropy_with_logits(logits, labels, reduction="none", pos_weight=weight)
        return losses, labels, logits

    def _step(self, batch: Mapping[Any, Any]) -> Metrics:
        losses, labels, logits = self._losses(batch, self.settings.augment)
        self.descend(losses.mean(), self.optimizer)
        return {"reward_loss": losses.detach().mean(), **_accuracy(labels, logits.detach())}

    @torch.no_grad()
    def validate(self, batches: Sequence[Mapping[Any, Any]]) -> Metrics:
        """The mean loss, and the accuracy on positive and negative frames."""
        parts = [self._losses(batch) for batch in batches]
        losses, labels, logits = (torch.cat(column) for column in zip(*parts, strict=True))
        return {"bc_loss": losses.mean(), **_accuracy(labels, logits)}

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state and the number of updates."""
        return {"optimizer": to_cpu(optimization.optimizer_state(self.optimizer)), "version": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        optimization.load_optimizer_state(self.optimizer, state["optimizer"])
        self.version = state["version"]


def _accuracy(labels: Tensor, logits: Tensor) -> Metrics:
    """Fraction of the positive and of the negative frames that are classified right; 1 where there are none."""
    right = ((logits > 0) == (labels > 0.5)).float()
    found = {}
    for name, mask in (("positive_accuracy", labels), ("negative_accuracy", 1 - labels)):
        found[name] = torch.where(mask.sum() > 0, (right * mask).sum() / mask.sum().clamp(min=1), 1.0)
    return found
