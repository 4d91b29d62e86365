"""Soft actor-critic (Haarnoja et al., 2018) with a learned temperature; the online off-policy algorithm."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from deft import schema
from deft.algorithms.algorithm import Metrics
from deft.algorithms.experience import Replay
from deft.algorithms.off_policy import LEARNED_ALPHA, SoftPolicy
from deft.algorithms.offline import to_cpu
from deft.algorithms.replay import ReplayLearner
from deft.config.algorithm_settings import SACSettings
from deft.errors import InputError
from deft.models.policy import Encoded, Policy
from deft.models.targets import frozen_copy

log = logging.getLogger(__name__)
SMALLEST_VALUE = 1e-3  # lower bound of mean |Q|, by which losses are divided


class SAC(ReplayLearner, SoftPolicy):
    """With a' ~ π(s') and the target critics Q̄:

    L_Q = E (r + γ (min Q̄(s', a') − α log π(a' | s')) − Q(s, a))²,   L_π = E [α log π(a | s) − min Q(s, a)],
    and α so that the entropy is `target_entropy`. The value of a terminal state is 0; truncated episodes bootstrap.

    A trained policy is kept near an anchor, a frozen copy π₀ of it, until the critics are accurate around it:
    L_π = E [(α log π(a | s) − min Q(s, a)) / E|min Q|] + c · E KL(π ‖ π₀).
    """

    name = "sac"
    distribution: ClassVar[Literal["tanh_gaussian", "gaussian", "flow"] | None] = "tanh_gaussian"
    settings: SACSettings

    def __init__(self, policy: Policy, settings: SACSettings | None = None, seed: int = 0) -> None:
        super().__init__(policy, settings or SACSettings(), seed)
        self._start_alpha(1.0)
        self.period = self.settings.policy_delay
        self.anchor = self._make_anchor() if self.settings.anchor_coef else None
        self.anchor_weight = torch.full((), self.settings.anchor_coef, device=policy.center.device)
        if self.settings.compile:  # samples as in eager mode, so that both give the same results
            options: dict[str, Any] = {"fallback_random": True}
            self._critic_loss = torch.compile(self._critic_loss, options=options)  # type: ignore[method-assign]
            self._policy_losses = torch.compile(self._policy_losses, options=options)  # type: ignore[method-assign]

    @property
    def experience(self) -> Replay:
        """Batches of a replay buffer, as the settings define them."""
        own, shared = self.settings, super().experience
        capture = "off" if own.compile and own.capture == "auto" else own.capture
        return replace(shared, capture=capture)

    def check_policy(self, fresh: bool) -> None:
        """Raise an error if there is an anchor but no trained policy to anchor to."""
        if self.settings.anchor_coef and fresh:
            raise InputError(
                "anchor_coef: keeps a trained policy near its initial weights; give one with model_path, or use 0"
            )

    def start_from_a_policy(self) -> None:
        """Start with a low temperature: that of a new policy would make a trained one forget.

        New critics learn from unscaled rewards; loaded ones from rewards of their former scale.
        """
        super().start_from_a_policy()
        self._start_alpha(LEARNED_ALPHA)

    def load_critics(self, state: dict[str, Any]) -> None:
        """Load the critics, and a temperature where there is one, from the state of another off-policy algorithm."""
        super().load_critics(state)
        self._start_alpha(float(state["scalars"]["0"].exp()) if "scalars" in state else LEARNED_ALPHA)

    def _start_alpha(self, default: float) -> None:
        if self.settings.alpha == "auto":
            start = self.settings.alpha_start
            self.log_alpha.data.fill_(math.log(default if start is None else start))

    def schedule(self) -> None:
        """Update the learning rate and the anchor's weight, in tensors that a captured update reads."""
        super().schedule()
        half_life = self.settings.anchor_half_life
        if self.settings.anchor_coef and half_life is not None:
            # c_t = c · 2^(−t / half-life): the distance that the policy may move is proportional to 1/c.
            halvings = max(0, self.version - self.settings.critic_warmup) / half_life
            self.anchor_weight.fill_(max(self.settings.anchor_coef * 0.5**halvings, self.settings.anchor_floor))

    def _step(self, batch: Mapping[Any, Any]) -> Metrics:
        batch = self._shifted(batch)
        state, action, next_state, reward, discount = self._read(batch)
        still = state._replace(features=state.features.detach())
        features = (still if self._warms_up and self._held else state).for_critics
        q_loss, mean_q = self._critic_loss(features, action, next_state, reward, discount)
        other = self._other_loss(still)
        critic_loss = q_loss if other is None else q_loss + other
        if self._warms_up or self.version % self.settings.policy_delay:
            self._descend_critics(critic_loss.sum())
        else:
            policy_loss, alpha_loss, log_prob, divergence = self._policy_losses(still, self._anchored(batch))
            # One backward pass for all: the critics get no gradient from the policy loss.
            self._descend_both(critic_loss, policy_loss + alpha_loss)
            self._policy_metrics = {
                "policy_loss": policy_loss.detach().mean(),
                "entropy": -log_prob.detach().mean(),
                "alpha": self.log_alpha.detach().exp().mean(),
            }
            if divergence is not None:
                self._policy_metrics["anchor_kl"] = divergence.detach().mean()
        self.critics.move_target(self.settings.tau)
        metrics = {"q_loss": q_loss.detach().mean(), "mean_q": mean_q, **self._policy_metrics}
        return metrics if other is None else metrics | {"distillation_loss": other.detach().mean()}

    def _critic_loss(
        self, features: Tensor, action: Tensor, next_state: Encoded, reward: Tensor, discount: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Squared TD error of all critics per member, and the mean Q."""
        with torch.no_grad():
            action_after, log_prob = self._next_action(next_state)
            values = self.critics.target_values(next_state.for_critics, action_after)
            subset = self.settings.target_critics
            if subset is not None:
                values = values[:, torch.randperm(self.critics.num_critics, device=values.device)[:subset]]
            value = values.amin(1) - self.log_alpha.exp().unsqueeze(-1) * log_prob
            backup = torch.addcmul(reward, discount, value)
        q = self.critics(features, action)
        return (q - backup.unsqueeze(1)).square().mean(-1).sum(1), q.detach().mean()

    def _make_anchor(self) -> Policy | None:
        """The policy that the divergence is measured from."""
        return frozen_copy(self.policy)

    @torch.no_grad()
    def _anchored(self, batch: Mapping[Any, Any]) -> Encoded | None:
        """The state encoded by the anchor; None without an anchor."""
        return None if self.anchor is None else self.anchor.encode(batch[schema.OBSERVATION])

    def _policy_losses(
        self, state: Encoded, anchored: Encoded | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Losses of policy and temperature per member, log π of the sampled actions, and the KL to the anchor."""
        if self.settings.anchor_coef:
            state = self.policy.with_output(state)
        samples, log_probs = self._sample(state)
        q = self._judged(state, samples[0])
        value = q.mean(1) if self.settings.target_critics is not None else q.amin(1)
        loss = self.log_alpha.detach().exp().unsqueeze(-1) * log_probs[0] - value
        divergence = self._divergence(state, anchored) if self.settings.anchor_coef else None
        if divergence is not None:
            size = value.detach().abs().mean(-1, keepdim=True).clamp(min=SMALLEST_VALUE)
            loss = loss / size + self.anchor_weight * divergence
        return loss.mean(-1), self._alpha_loss(log_probs[0]), log_probs[0], divergence

    def _divergence(self, state: Encoded, anchored: Encoded | None) -> Tensor:
        """KL(π ‖ π₀), [members, B]."""
        assert self.anchor is not None
        assert anchored is not None
        return self.policy.divergence(state, self.anchor, anchored)

    def _sample(self, state: Encoded) -> tuple[Tensor, Tensor]:
        """One sample of the policy for each state, [1, members, B, A], and its log-density; differentiable."""
        return self.policy.sample(state)

    def _next_action(self, state: Encoded) -> tuple[Tensor, Tensor]:
        """The next action of the target as the critics take it, [members, B, A], and its log-density."""
        samples, log_probs = self._sample(state)
        return samples[0], log_probs[0]

    def _judged(self, state: Encoded, action: Tensor) -> Tensor:
        """Values of sampled actions that the policy maximises, [members, critics, B]; no gradient of the critics."""
        return self.critics(state.for_critics, action, frozen=True)

    def _other_loss(self, state: Encoded) -> Tensor | None:
        """A further loss of the critics for each member, if there is any."""
        return None

    def _parts(self) -> dict[str, Any]:
        return {**super()._parts(), "scalars": nn.ParameterList([self.log_alpha])}

    def state_dict(self) -> dict[str, Any]:
        """The shared state and the weights of the anchor."""
        anchor = None if self.anchor is None else to_cpu(dict(self.anchor.state_dict()))
        return {**super().state_dict(), "anchor": anchor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state."""
        super().load_state_dict(state)
        if self.anchor is None:
            return
        if state.get("anchor") is None:
            log.warning("anchor_coef was 0 before: the policy of this checkpoint becomes the anchor")
        self.anchor.load_state_dict(state.get("anchor") or self.policy.state_dict())
        self._complete_copies()
