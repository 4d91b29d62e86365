"""The base of SAC, TD3 and Cal-QL: an off-policy algorithm that learns in an environment, from a replay buffer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from deft import schema
from deft.algorithms.algorithm import Metrics
from deft.algorithms.experience import Replay
from deft.algorithms.off_policy import OffPolicy
from deft.config.algorithm_settings import ReplaySettings
from deft.data.augmentation import shift_images
from deft.models.policy import Encoded, Policy

REPLAY_SETTINGS = (
    "batch_size", "buffer_size", "train_freq", "updates_per_step", "learning_starts", "random_steps", "n_step", "gamma",
    "prior_data", "prior_fraction", "intervention_weight", "precision", "capture", "takeover",
    "takeover_rate",
)  # fmt: skip


class ReplayLearner(OffPolicy):
    """Learns from batches of a replay buffer, one step each; it may start from the critics of an earlier run.

    Rewards are multiplied by `policy.reward_scale`: loaded critics learned from rewards of that scale.
    """

    takes_chunks = True
    warmup_setting = "critic_warmup"
    settings: Any  # ReplaySettings, and those of the algorithm

    def __init__(self, policy: Policy, settings: ReplaySettings, seed: int = 0) -> None:
        super().__init__(policy, settings, seed)
        self._former_scale = float(policy.reward_scale)  # of the rewards that its critics were trained on
        self._held = self._held_in_warmup() if settings.critic_warmup else []

    @property
    def experience(self) -> Replay:
        """Batches of a replay buffer, as the settings define them."""
        shared = {name: vars(self.settings)[name] for name in REPLAY_SETTINGS}
        return Replay(**shared, captured_warmup=self.settings.critic_warmup)

    def start_from_a_policy(self) -> None:
        """Reset the reward scale: new critics learn from unscaled rewards, loaded ones from rewards of their scale."""
        self.policy.reward_scale.fill_(1.0)

    def load_critics(self, state: dict[str, Any]) -> None:
        """Load the critics from the state of another off-policy algorithm."""
        super().load_critics(state)
        self.policy.reward_scale.fill_(self._former_scale)

    def update(self, batches: Iterator[Mapping[Any, Any]]) -> Metrics:
        """One step on each batch of the replay buffer; none before `learning_starts`."""
        return self._update_all(batches)

    @property
    def _warms_up(self) -> bool:
        """Whether only the critics are trained now."""
        return self.version < self.settings.critic_warmup

    def _held_in_warmup(self) -> list[nn.Parameter]:
        """Parameters that critics share with the policy: the encoder, unless it is the critics' own."""
        free = {id(parameter) for parameter in self.policy.value_only_parameters()}
        return [parameter for parameter in self.policy.encoder_parameters() if id(parameter) not in free]

    def _descend_critics(self, loss: Tensor) -> None:
        """One step of the critics. A warm-up leaves policy and encoder unchanged, bit for bit."""
        held = self._held if self._warms_up else []
        before = [parameter.detach().clone() for parameter in held]
        super()._descend_critics(loss)
        with torch.no_grad():
            for parameter, value in zip(held, before, strict=True):
                parameter.copy_(value)  # weight decay also changes parameters without a gradient

    def _descend_both(self, critic_loss: Tensor, policy_loss: Tensor) -> None:
        """One step of critics and policy; in a warm-up of the critics alone."""
        if self._warms_up:
            self._descend_critics(critic_loss.sum())
        else:
            super()._descend_both(critic_loss, policy_loss)

    def _read(self, batch: Mapping[Any, Any]) -> tuple[Encoded, Tensor, Encoded, Tensor, Tensor]:
        """The batch with scaled rewards, and with the actions that the environment executed.

        A Gaussian policy's samples are stored before clipping. Its actions are clipped in the targets and in the policy
        loss, so the critics must be trained on clipped ones too.
        """
        state, action, next_state, reward, discount = super()._read(batch)
        return state, self.policy.executed(action), next_state, reward * self.policy.reward_scale, discount

    def _shifted(self, batch: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """The batch with every image shifted at random."""
        if not self.settings.random_shift:
            return batch
        shifted = dict(batch)
        for key in (schema.OBSERVATION, schema.NEXT_OBSERVATION):
            shifted[key] = shift_images(batch[key], self.settings.random_shift)
        return shifted
