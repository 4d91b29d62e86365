"""Implicit Q-learning (Kostrikov et al., 2021): V by expectile regression, Q on V(s'), the policy by weighted cloning.

Critics are evaluated at actions of the dataset only.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from deft import schema
from deft.algorithms.algorithm import Metrics
from deft.algorithms.auxiliary import check_resumed
from deft.algorithms.off_policy import OffPolicy
from deft.algorithms.optimization import are_sharded
from deft.config.algorithm_settings import IQLSettings
from deft.data.datasets.dataset import Dataset
from deft.errors import InputError
from deft.models.policy import Encoded, Policy
from deft.models.targets import frozen_copy

log = logging.getLogger(__name__)


class IQL(OffPolicy):
    """With u = min Q̄(s, a) − V(s), where Q̄ are the target critics:

    L_V = E |τ − 1(u < 0)| u²,   L_Q = E (r + γ V(s') − Q(s, a))²,   L_π = −E min(exp(β u), 100) log π(a | s).

    `advantage: return` uses the discounted return of the episode in place of Q̄. With `position_source: start` a frozen
    copy of the initial policy predicts the object positions that the policy learns to act on.
    """

    name = "iql"
    learns_labels = True
    settings: IQLSettings

    def __init__(self, policy: Policy, settings: IQLSettings | None = None, seed: int = 0) -> None:
        super().__init__(policy, settings or IQLSettings(), seed)
        if self.settings.position_source == "start" and are_sharded(policy.parameters()):
            raise InputError("position_source: 'start' does not support fsdp; disable one of the two")
        self.start = frozen_copy(policy) if self.settings.position_source == "start" else None
        own = self.settings.auxiliary_learning_rate
        self.auxiliary_optimizer = self._optimizer(iter(self._label_parameters()), own) if own else None

    def _label_parameters(self) -> list[nn.Parameter]:
        """Parameters that labels train, with a learning rate of their own."""
        return list(self.policy.auxiliary_parameters()) if self.settings.auxiliary_learning_rate else []

    def _actor_trains(self) -> Iterator[nn.Parameter]:
        excluded = {id(parameter) for parameter in self._label_parameters()}
        yield from (parameter for parameter in super()._actor_trains() if id(parameter) not in excluded)

    def _policy_optimizers(self) -> list[tuple[torch.optim.Optimizer, float]]:
        """The policy's optimizer and that of the labels, with one schedule."""
        own = self.auxiliary_optimizer
        return super()._policy_optimizers() + ([] if own is None else [(own, self.settings.auxiliary_learning_rate)])

    def _parts(self) -> dict[str, Any]:
        own = {"auxiliary": self.auxiliary_optimizer, "start": self.start}
        return {**super()._parts(), **{name: part for name, part in own.items() if part is not None}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state; raise an error where it does not fit."""
        check_resumed("auxiliary_learning_rate", self.auxiliary_optimizer, state.get("auxiliary"))
        was = "start" if "start" in state else "labels"
        if was != self.settings.position_source:
            raise InputError(
                f"position_source was '{was}' in this run and is '{self.settings.position_source}' now: keep it, or "
                "start a new run with --model_path"
            )
        super().load_state_dict(state)

    def check_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Raise an error where the run's rewards were scaled by another factor, which its critics depend on."""
        was, now = float(weights["reward_scale"]), float(self.policy.reward_scale)  # which `prepare` has set
        if not math.isclose(was, now, rel_tol=1e-4):
            raise InputError(
                f"reward_scaling: this run's rewards were multiplied by {was:g}, and would be by {now:g} now: keep "
                "reward_scaling and the dataset, or start a new run with --model_path"
            )

    def _critic_trains(self) -> Iterator[nn.Parameter]:
        yield from super()._critic_trains()
        yield from self.policy.value_parameters()

    def _encode(self, observation: Any) -> Encoded:
        if self.start is None:
            return super()._encode(observation)
        return self.policy.encode(observation, self.start.object_positions(observation))

    def _step(self, batch: Mapping[Any, Any]) -> Metrics:
        settings, policy, critics = self.settings, self.policy, self.critics
        state, action, next_state, reward, discount = self._read(batch)
        with torch.no_grad():
            target_q = critics.target_values(state.for_critics, action).amin(1)
            backup = torch.addcmul(reward, discount, policy.value_of(next_state))
        value = policy.value_of(state)
        advantage = target_q - value
        asymmetry = torch.where(advantage.detach() < 0, 1 - settings.expectile, settings.expectile)
        v_loss = (asymmetry * advantage.square()).mean(-1)
        q_loss = (critics(state.for_critics, action) - backup.unsqueeze(1)).square().mean((1, 2))
        advantage = advantage.detach()
        if settings.advantage == "return":  # G − V(s)
            advantage = batch[schema.VALUE_TARGET].reshape(reward.shape) - value.detach()
        weight = (settings.temperature * advantage).exp().clamp(max=settings.max_weight)
        imitation_loss = policy.imitation_loss(state._replace(features=state.features.detach()), action)
        policy_loss = (weight * imitation_loss).mean(-1)
        auxiliary_loss = state.auxiliary_loss
        total = v_loss + q_loss + (policy_loss if auxiliary_loss is None else policy_loss + auxiliary_loss)
        self.descend(total.sum(), self.critic_optimizer, *(optimizer for optimizer, _ in self._policy_optimizers()))
        critics.move_target(settings.tau)
        return {
            "v_loss": v_loss.detach().mean(),
            "q_loss": q_loss.detach().mean(),
            "policy_loss": policy_loss.detach().mean(),
            **({} if auxiliary_loss is None else {"auxiliary_loss": auxiliary_loss.detach().mean()}),
            "mean_advantage": advantage.mean(),
            "mean_weight": weight.mean(),
            "mean_q": target_q.mean(),
        }

    def prepare(self, dataset: Dataset, sampler: Any, fresh: bool) -> None:
        """Fit the normalisation and scale the rewards by the range of the dataset's returns."""
        if fresh and self.start is not None:
            raise InputError("position_source: 'start' needs a trained model to start from; give one with model_path")
        returns = dataset.episode_returns()
        if not self.settings.allow_constant_reward and (reward := _constant_reward(dataset, returns)) is not None:
            raise InputError(
                f"{dataset.name}: every reward is {reward:g}, so no action is better than another and IQL only clones: "
                "train with sft, record rewards, or pass --allow_constant_reward"
            )
        super().prepare(dataset, sampler, fresh)
        if self.settings.advantage == "return":
            sampler.add_returns(self.settings.gamma)
        if self.settings.reward_scaling == "return_range":
            spread = float(returns.max() - returns.min())
            if spread > 0:
                self.policy.reward_scale.fill_(1000.0 / spread)
                sampler.scale_rewards(1000.0 / spread)
            else:
                log.warning("reward_scaling: every episode has the return %.4g, so rewards are not scaled", returns[0])


def _constant_reward(dataset: Dataset, returns: np.ndarray) -> float | None:
    """The reward of every transition if all are equal and carry no information; None otherwise.

    A constant reward c > 0 still rewards long episodes, if they can terminate.
    """
    reward = float(returns[0] / dataset.lengths[0])
    if not np.allclose(returns, reward * dataset.lengths, rtol=1e-5, atol=1e-6):
        return None  # without reading any episode
    for index in range(dataset.num_episodes):
        episode = dataset.episode(index)
        if not np.allclose(episode.reward, reward, rtol=1e-5, atol=1e-6) or (reward and episode.terminated.any()):
            return None
    return reward
