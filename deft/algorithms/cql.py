"""Conservative Q-learning, CQL(H) (Kumar et al., 2020): SAC with a penalty on values of actions outside the data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from deft import schema
from deft.algorithms.algorithm import Metrics
from deft.algorithms.off_policy import SoftPolicy
from deft.config.algorithm_settings import CQLSettings
from deft.data.datasets.dataset import Dataset
from deft.models.policy import Encoded, Policy


class CQL(SoftPolicy):
    """L_Q = TD error² + α_c · ( log Σ_i exp(Q(s, a_i) − log p_i) − Q(s, a) ), over critics.

    The a_i are `cql_samples` each of uniform actions (p = 0.5^A), actions of π(s) and actions of π(s'), with their
    densities p_i. L_π = E [α log π(a' | s) − min Q(s, a')], with α learned so that the entropy is `target_entropy`.
    """

    name = "cql"
    distribution = "tanh_gaussian"
    settings: CQLSettings

    def __init__(self, policy: Policy, settings: CQLSettings | None = None, seed: int = 0) -> None:
        settings = settings or CQLSettings()
        device, members = policy.center.device, policy.num_members
        self._is_cloning = torch.zeros((), dtype=torch.bool, device=device)
        self.log_factor = nn.Parameter(torch.zeros(members, device=device))
        super().__init__(policy, settings, seed)

    def _critic_trains(self) -> Iterator[nn.Parameter]:
        yield from super()._critic_trains()
        yield self.log_factor

    def prepare(self, dataset: Dataset, sampler: Any, fresh: bool) -> None:
        """Fit the normalisation; Cal-QL also needs the dataset's returns."""
        super().prepare(dataset, sampler, fresh)
        if self.settings.cal_ql:
            sampler.add_returns(self.settings.gamma)

    def schedule(self) -> None:
        """Update the learning rate, and whether the policy clones the data or maximises Q."""
        super().schedule()
        self._is_cloning.fill_(self.version < self.settings.policy_warmup)

    def _step(self, batch: Mapping[Any, Any]) -> Metrics:
        settings, policy, critics = self.settings, self.policy, self.critics
        state, action, next_state, reward, discount = self._read(batch)
        still = state._replace(features=state.features.detach())
        # The first sampled action is for the policy loss; the others, without gradient, are for the penalty.
        samples, sample_log_probs = policy.sample(still, settings.cql_samples + 1)
        chosen, log_prob = samples[0], sample_log_probs[0]
        with torch.no_grad():
            alpha = self.log_alpha.exp().unsqueeze(-1)
            next_state = policy.with_output(next_state)
            next_samples, next_log_probs = policy.sample(next_state, settings.cql_samples + 1)
            following = policy.mean(next_state) if settings.backup_action == "likeliest" else next_samples[0]
            backup = self._backup(next_state, following, next_log_probs[0], alpha, reward, discount)
        actions, log_densities = self._penalised(
            samples[1:], sample_log_probs[1:], next_samples[1:], next_log_probs[1:]
        )
        q, others = self._values(state.for_critics, action, actions)
        if settings.cal_ql:  # values of the policy's actions are at least the return in the data: Q ← max(Q, G)
            returns = (batch[schema.VALUE_TARGET] * policy.reward_scale).reshape(reward.shape)[:, None, None]
            count = settings.cql_samples
            others = torch.cat([others[:, :, :count], torch.maximum(others[:, :, count:], returns)], 2)
        td_loss = (q - backup.unsqueeze(1)).square().mean(-1).sum(1)
        temperature = settings.cql_temperature
        soft_max = temperature * torch.logsumexp((others - log_densities.unsqueeze(1)) / temperature, 2)
        gap = (soft_max - q).mean(-1)  # [members, critics]
        penalty, factor_loss = self._weighted(gap)
        q_loss = td_loss + penalty
        # The policy and its temperature.
        chosen_q = critics(still.for_critics, chosen, frozen=True).amin(1)
        worth = chosen_q
        if settings.policy_warmup:  # log π(a | s) in place of min Q(s, a')
            worth = torch.where(self._is_cloning, -policy.imitation_loss(still, action), chosen_q)
        policy_loss = (alpha * log_prob - worth).mean(-1)
        self._descend_both(q_loss + factor_loss, policy_loss + self._alpha_loss(log_prob))
        critics.move_target(settings.tau)
        return {
            "q_loss": td_loss.detach().mean(),
            "cql_penalty": penalty.detach().mean(),
            "cql_gap": gap.detach().mean(),
            "policy_loss": policy_loss.detach().mean(),
            "alpha": alpha.mean(),
            "entropy": -log_prob.detach().mean(),
            "mean_q": q.detach().mean(),
        }

    def _backup(
        self, state: Encoded, action: Tensor, log_prob: Tensor, alpha: Tensor, reward: Tensor, discount: Tensor
    ) -> Tensor:
        """r + γ (w · min Q̄ + (1 − w) · max Q̄ [− α log π])."""
        values, weight = self.critics.target_values(state.for_critics, action), self.settings.min_q_weight
        value = values.amin(1)
        if weight < 1.0:
            value = torch.lerp(values.amax(1), value, weight)
        if self.settings.backup_entropy:
            value = value - alpha * log_prob
        return torch.addcmul(reward, discount, value)

    def _penalised(
        self, samples: Tensor, log_probs: Tensor, next_samples: Tensor, next_log_probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Random actions, then the policy's: [3n, members, B, A], and their log-densities as [members, 3n, B]."""
        uniform = torch.rand_like(samples) * 2 - 1
        uniform_density = torch.full_like(log_probs, -self.policy.action_dim * math.log(2.0))  # log 0.5^A
        actions = torch.cat([uniform, samples, next_samples]).detach()
        return actions, torch.cat([uniform_density, log_probs, next_log_probs]).detach().transpose(0, 1)

    def _values(self, features: Tensor, action: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Q of the data's action [members, critics, B] and of the others [members, critics, 3n, B], in one pass."""
        members, batch, _ = action.shape
        every = torch.cat([action.unsqueeze(0), actions]).transpose(0, 1)  # [members, 1 + 3n, B, A]
        count = every.shape[1]
        repeated = features.unsqueeze(1).expand(-1, count, -1, -1).reshape(members, count * batch, -1)
        values = self.critics(repeated, every.reshape(members, count * batch, -1)).unflatten(-1, (count, batch))
        return values[:, :, 0], values[:, :, 1:]

    def _weighted(self, gap: Tensor) -> tuple[Tensor, Tensor]:
        """The penalty on the critics, and the loss of its factor, which grows while the gap is above its target."""
        weight = self.settings.cql_alpha
        if not self.settings.cql_lagrange:
            return weight * gap.sum(1), torch.zeros_like(gap[:, 0])
        factor = self.log_factor.exp().clamp(max=1e6)
        excess = (weight * (gap - self.settings.cql_target_action_gap)).sum(1)
        return factor.detach() * excess, -factor * excess.detach()

    def _parts(self) -> dict[str, Any]:
        return {**super()._parts(), "scalars": nn.ParameterList([self.log_alpha, self.log_factor])}
