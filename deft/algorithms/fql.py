"""Flow Q-learning (Park et al., 2025) and Q-chunking (Li et al., 2025): a flow policy of the data, improved by critics.

`FQL` learns from a dataset, `FQLOnline` continues in an environment. With `chunk_length` K > 1 both are Q-chunking.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from gymnasium import Space
from torch import Tensor

from deft.algorithms.algorithm import Metrics
from deft.algorithms.off_policy import OffPolicy, new_critics
from deft.algorithms.replay import ReplayLearner
from deft.config.algorithm_settings import FQLOnlineSettings, FQLSettings, OffPolicySettings
from deft.config.settings import PolicyConfig
from deft.errors import InputError
from deft.models.action_scale import into_box
from deft.models.critics import Critics
from deft.models.policy import Encoded, Policy
from deft.models.privileged import public_space
from deft.models.q_flow import QFlowPolicy

SMALLEST_VALUE = 1e-8  # lower bound of mean |Q|, by which the policy's Q is divided


class FQL(OffPolicy):
    """With chunks a of K actions (K = 1: single ones), R = Σ_i γ^i r_i, and Q the mean (or the minimum) of the critics:

    L_Q = E (R + γ^K Q̄(s', a') − Q(s, a))²,   L_f = E ‖v(s, x_t, t) − (ε − a)‖²  (flow matching on the data).

    `policy_extraction: distill` (FQL, QC-FQL): a' = μ(s', z') with z' ~ N(0, 1), and
    L_μ = E [−Q(s, μ(s, z)) + α ‖μ(s, z) − f(s, z)‖²], where f(s, z) denoises z by the flow.
    `best_of_n` (QC): Q̄(s', a') is the largest of n samples a' of the flow, and the best of n samples acts.
    """

    name = "fql"
    distribution = "flow"
    cannot_be_trained = "is a flow that acts by critics"
    learns_labels = True
    continues: ClassVar[tuple[str, ...]] = ("fql-online",)
    settings: FQLSettings
    policy: QFlowPolicy

    def __init__(self, policy: Policy, settings: FQLSettings | None = None, seed: int = 0) -> None:
        if not isinstance(policy, QFlowPolicy):
            raise InputError(
                f"policy: {self.name} trains a QFlowPolicy, not {type(policy).__name__}; wrap a flow policy: "
                "deft.models.q_flow.QFlowPolicy(policy)"
            )
        super().__init__(policy, settings or FQLSettings(), seed)

    @classmethod
    def make_policy(
        cls, observation_space: Space, action_space: Space, config: PolicyConfig, settings: Any, **how: Any
    ) -> Policy:
        """Build the flow policy of the config, and the networks by which it acts."""
        acts_by_critics = settings.policy_extraction == "best_of_n"
        if acts_by_critics and config.critic_observation:
            raise InputError(
                f"critic_observation {' '.join(config.critic_observation)}: with policy_extraction best_of_n critics "
                "select the actions, so that they can read no more than the policy; use distill"
            )
        public = public_space(observation_space, config.critic_observation)
        inside = dataclasses.replace(config, critic_observation=())
        base = super().make_policy(public, action_space, inside, settings, **how)
        if not acts_by_critics:
            return QFlowPolicy(base).read_privileged(observation_space, config.critic_observation)
        policy = QFlowPolicy(base, settings.num_candidates)
        policy.critics = new_critics(policy, settings, policy.action_dim)
        return policy

    def _make_critics(self, policy: Policy, settings: OffPolicySettings) -> Critics:
        """Critics; those of the policy where it acts by them."""
        assert isinstance(policy, QFlowPolicy)
        if not policy.num_candidates:
            return super()._make_critics(policy, settings)
        if policy.critics is None:
            policy.critics = super()._make_critics(policy, settings)
        return policy.critics

    def _step(self, batch: Mapping[Any, Any]) -> Metrics:
        state, action, next_state, reward, discount = self._read(batch)
        with torch.no_grad():
            backup = torch.addcmul(reward, discount, self._next_value(next_state))
        q = self.critics(state.for_critics, action)
        q_loss = (q - backup.unsqueeze(1)).square().mean(-1).sum(1)
        still = state._replace(features=state.features.detach())
        flow_loss = self.policy.imitation_loss(still, action).mean(-1)
        policy_loss, metrics = flow_loss, {"flow_loss": flow_loss.detach().mean()}
        if self.settings.policy_extraction == "distill":
            distill_loss, value = self._distillation(still)
            policy_loss = flow_loss + self.settings.alpha * distill_loss - value
            metrics |= {"distill_loss": distill_loss.detach().mean(), "policy_q": value.detach().mean()}
        if state.auxiliary_loss is not None:
            policy_loss = policy_loss + state.auxiliary_loss
        self._descend_both(q_loss, policy_loss)
        self.critics.move_target(self.settings.tau)
        return {"q_loss": q_loss.detach().mean(), "mean_q": q.detach().mean(), **metrics}

    def _next_value(self, state: Encoded) -> Tensor:
        """Q̄(s', a') of the policy's action, or the largest of its n candidates, [1, B]."""
        policy = self.policy
        if not policy.num_candidates:
            chosen = policy.distilled(state, policy.sample_noise(state)).clamp(-1.0, 1.0)
            return self._aggregated(self.critics.target_values(state.for_critics, chosen))
        values = self._aggregated(self.critics.target_values(*policy.candidates(state)))
        return values.view(1, policy.num_candidates, -1).amax(1)

    def _distillation(self, state: Encoded) -> tuple[Tensor, Tensor]:
        """‖μ(s, z) − f(s, z)‖², a mean over the batch and the numbers of an action, and the mean Q(s, μ(s, z))."""
        noise = self.policy.sample_noise(state)
        chosen = self.policy.distilled(state, noise)
        distance = (chosen - self.policy.denoised(state, noise)).square().mean((-1, -2))
        q = self.critics(state.for_critics, into_box(chosen), frozen=True).mean(1)
        value = q.mean(-1)
        if self.settings.normalize_q:
            value = value / q.detach().abs().mean(-1).clamp(min=SMALLEST_VALUE)
        return distance, value

    def _aggregated(self, values: Tensor) -> Tensor:
        """The mean or the minimum over the critics: [1, critics, B] → [1, B]."""
        return values.mean(1) if self.settings.value_aggregation == "mean" else values.amin(1)


class FQLOnline(ReplayLearner, FQL):
    """The losses of `FQL` on batches of a replay buffer, mixed with a dataset where `prior_data` names one."""

    name = "fql-online"
    continues: ClassVar[tuple[str, ...]] = ("fql",)
    settings: FQLOnlineSettings

    def __init__(self, policy: Policy, settings: FQLOnlineSettings | None = None, seed: int = 0) -> None:
        super().__init__(policy, settings or FQLOnlineSettings(), seed)

    def _step(self, batch: Mapping[Any, Any]) -> Metrics:
        return super()._step(self._shifted(batch))
