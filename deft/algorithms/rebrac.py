"""ReBRAC (Tarasov et al., 2023): TD3+BC with separate behaviour cloning penalties for the policy and the critics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from deft import schema
from deft.algorithms.algorithm import Metrics
from deft.algorithms.off_policy import TwinDelayed
from deft.config.algorithm_settings import ReBRACSettings
from deft.data.datasets.dataset import Dataset
from deft.models.policy import Encoded, Policy, real_steps

SMALLEST_VALUE = 1e-8  # lower bound of mean |Q|, by which the policy's Q is divided


class ReBRAC(TwinDelayed):
    """With ã = clip(π̄(s') + clip(ε, ±c)), the target critics and policy Q̄, π̄, and a' the action of the data at s':

    L_Q = E (r + γ (min Q̄(s', ã) − β_Q ‖ã − a'‖²) − Q(s, a))²,
    L_π = E [β_π ‖π(s) − a‖² − λ min Q(s, π(s))],   λ = 1 / mean |min Q(s, π(s))|.

    The penalty of the critics is 0 where the data ends at s'. The critics have LayerNorm. The policy and all targets
    move every `policy_delay` updates.
    """

    name = "rebrac"
    settings: ReBRACSettings

    def __init__(self, policy: Policy, settings: ReBRACSettings | None = None, seed: int = 0) -> None:
        super().__init__(policy, settings or ReBRACSettings(), seed)

    def prepare(self, dataset: Dataset, sampler: Any, fresh: bool) -> None:
        """Fit the normalisation, and let batches hold the next action of the data."""
        super().prepare(dataset, sampler, fresh)
        sampler.add_next_actions()

    def _next_value(self, next_q: Tensor, next_action: Tensor, batch: Mapping[Any, Any]) -> Tensor:
        """min Q̄(s', ã) − β_Q ‖ã − a'‖²."""
        recorded = self.policy.to_unit(batch[schema.NEXT_ACTION]).reshape(next_action.shape)
        distance = squared_distance(next_action, recorded, batch[schema.NEXT_STEP_MASK])
        return next_q - self.settings.critic_bc_coef * distance

    def _improve(self, state: Encoded, action: Tensor) -> Metrics:
        """One policy step."""
        chosen = self.policy.mean(state)
        q = self.critics(state.for_critics, chosen, frozen=True).amin(1)
        value = q.mean(-1)
        if self.settings.normalize_q:
            value = value / q.detach().abs().mean(-1).clamp(min=SMALLEST_VALUE)
        bc_loss = squared_distance(chosen, action, state.step_mask).mean(-1)
        policy_loss = self.settings.policy_bc_coef * bc_loss - value
        self.descend(policy_loss.sum(), self.actor_optimizer)
        return {"policy_loss": policy_loss.detach().mean(), "bc_loss": bc_loss.detach().mean()}


def squared_distance(chosen: Tensor, recorded: Tensor, step_mask: Tensor | None) -> Tensor:
    """‖chosen − recorded‖², a sum over the numbers of the recorded steps, [members, B]."""
    return (chosen - real_steps(recorded, chosen.detach(), step_mask)).square().sum(-1)
