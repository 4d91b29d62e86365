"""TD3+BC (Fujimoto & Gu, 2021): TD3 with a behaviour cloning term in the policy loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deft.algorithms.algorithm import Metrics
from deft.algorithms.off_policy import OffPolicy
from deft.config.algorithm_settings import TD3BCSettings
from deft.models.policy import Encoded, Policy, squared_error
from deft.models.targets import frozen_copy, soft_update


class TD3BC(OffPolicy):
    """With ã = clip(π̄(s') + clip(ε, ±c)) and the target critics and policy Q̄, π̄:

    L_Q = E (r + γ min Q̄(s', ã) − Q(s, a))²,   L_π = E [−λ Q₁(s, π(s)) + (π(s) − a)²],   λ = α / mean |Q₁(s, π(s))|.
    The policy and all targets move every `policy_delay` updates.
    """

    name = "td3-bc"
    settings: TD3BCSettings

    def __init__(self, policy: Policy, settings: TD3BCSettings | None = None, seed: int = 0) -> None:
        super().__init__(policy, settings or TD3BCSettings(), seed)
        self.target_policy = frozen_copy(policy)
        self.period = self.settings.policy_delay

    def _step(self, batch: Mapping[Any, Any]) -> Metrics:
        settings, policy, critics = self.settings, self.policy, self.critics
        state, action, next_state, reward, discount = self._read(batch)
        with torch.no_grad():
            noise = (torch.randn_like(action) * settings.policy_noise).clamp(-settings.noise_clip, settings.noise_clip)
            next_action = (self.target_policy.mean(next_state) + noise).clamp(-1.0, 1.0)
            next_q = critics.target_values(next_state.for_critics, next_action).amin(1)
            backup = torch.addcmul(reward, discount, next_q)
        q = critics(state.for_critics, action)
        q_loss = (q - backup.unsqueeze(1)).square().mean(-1).sum(1)
        self.descend(q_loss.sum(), self.critic_optimizer)
        if (self.version + 1) % settings.policy_delay == 0:
            self._policy_metrics = self._improve(state._replace(features=state.features.detach()), action)
            critics.move_target(settings.tau)
            soft_update(self.target_policy, policy, settings.tau)
        return {"q_loss": q_loss.detach().mean(), "mean_q": q.detach().mean(), **self._policy_metrics}

    def _improve(self, state: Encoded, action: Tensor) -> Metrics:
        """One policy step."""
        chosen = self.policy.mean(state)
        q = self.critics.first_values(state.for_critics, chosen)
        scale = self.settings.alpha / q.detach().abs().mean(-1).clamp(min=1e-8)
        bc_loss = squared_error(chosen, action, state.step_mask)
        policy_loss = bc_loss - scale * q.mean(-1)
        self.descend(policy_loss.sum(), self.actor_optimizer)
        return {"policy_loss": policy_loss.detach().mean(), "bc_loss": bc_loss.detach().mean()}

    def _parts(self) -> dict[str, Any]:
        return {**super()._parts(), "target_policy": self.target_policy}
