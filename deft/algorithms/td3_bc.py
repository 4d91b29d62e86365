"""TD3+BC (Fujimoto & Gu, 2021): TD3 with a behaviour cloning term in the policy loss."""

from __future__ import annotations

from torch import Tensor

from deft.algorithms.algorithm import Metrics
from deft.algorithms.off_policy import TwinDelayed
from deft.config.algorithm_settings import TD3BCSettings
from deft.models.policy import Encoded, Policy, squared_error


class TD3BC(TwinDelayed):
    """With ã = clip(π̄(s') + clip(ε, ±c)) and the target critics and policy Q̄, π̄:

    L_Q = E (r + γ min Q̄(s', ã) − Q(s, a))²,   L_π = E [−λ Q₁(s, π(s)) + (π(s) − a)²],   λ = α / mean |Q₁(s, π(s))|.
    The policy and all targets move every `policy_delay` updates.
    """

    name = "td3-bc"
    settings: TD3BCSettings

    def __init__(self, policy: Policy, settings: TD3BCSettings | None = None, seed: int = 0) -> None:
        super().__init__(policy, settings or TD3BCSettings(), seed)

    def _improve(self, state: Encoded, action: Tensor) -> Metrics:
        """One policy step."""
        chosen = self.policy.mean(state)
        q = self.critics.first_values(state.for_critics, chosen)
        scale = self.settings.alpha / q.detach().abs().mean(-1).clamp(min=1e-8)
        bc_loss = squared_error(chosen, action, state.step_mask)
        policy_loss = bc_loss - scale * q.mean(-1)
        self.descend(policy_loss.sum(), self.actor_optimizer)
        return {"policy_loss": policy_loss.detach().mean(), "bc_loss": bc_loss.detach().mean()}
