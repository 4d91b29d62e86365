"""DSRL (Wagenmaker et al., 2025): reinforcement learning in the noise space of a frozen policy that denoises."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from gymnasium import Space
from torch import Tensor, nn

from deft import schema
from deft.algorithms.experience import Replay
from deft.algorithms.offline import PRECISIONS
from deft.algorithms.sac import SAC
from deft.config.algorithm_settings import DSRLSettings
from deft.config.settings import PolicyConfig
from deft.errors import InputError
from deft.models.critics import Critics
from deft.models.noise_policy import NoisePolicy
from deft.models.policy import Encoded, Policy
from deft.models.privileged import public_space


class DSRL(SAC):
    """SAC whose action is the noise w that a frozen policy f denoises, a = f(s, w), without further random values.

    `critic: noise` (DSRL-SAC). The critics judge noise; with w' ~ π(s') and the target critics Q̄,
    L_Q = E (r + γ (min Q̄(s', w') − α log π(w' | s')) − Q(s, w))²,   L_π = E [α log π(w | s) − min Q(s, w)].

    `critic: action` (DSRL-NA, noise aliasing). Critics Q^A judge actions, so that transitions whose noise is unknown
    count too, and noise critics Q^W are distilled from them; many w lead to nearly the same action:
    L_A = E (r + γ (min Q̄^A(s', f(s', w')) − α log π(w' | s')) − Q^A(s, a))²,
    L_W = E (Q^W(s, w) − min Q^A(s, f(s, w)))² with w ~ N(0, 1),   L_π = E [α log π(w | s) − min Q^W(s, w)].

    An anchor keeps the noise near p₀, which f was trained on: μ = 0 and σ = 1 before tanh. With critics Q of noise:
    L_π = E [(α log π(w | s) − min Q(s, w)) / E|min Q|] + c · E KL(π ‖ p₀).

    Noise is in units of `noise_bound` here, so that entropies are those of numbers in [-1, 1].
    """

    name = "dsrl"
    distribution = None
    takes_chunks: ClassVar[bool] = True
    cannot_be_trained: ClassVar[str] = "is a frozen policy with a network that selects its noise"
    fixed_settings = ("noise_bound",)
    settings: DSRLSettings
    policy: NoisePolicy

    def __init__(self, policy: Policy, settings: DSRLSettings | None = None, seed: int = 0) -> None:
        if not isinstance(policy, NoisePolicy):
            raise InputError(
                f"policy: dsrl trains a NoisePolicy, not {type(policy).__name__}; wrap it: "
                "deft.models.noise_policy.NoisePolicy(policy)"
            )
        settings = settings or DSRLSettings()
        self.noise_critics: Critics | None = None
        if settings.critic == "action":
            sizes = policy.critic_dim, policy.noise_dim, policy.hidden_sizes
            self.noise_critics = Critics(
                1, settings.num_critics, *sizes, settings.critic_layer_norm, PRECISIONS[settings.precision]
            ).to(policy.center.device)
        super().__init__(policy, settings, seed)

    @classmethod
    def make_policy(
        cls, observation_space: Space, action_space: Space, config: PolicyConfig, settings: Any, **how: Any
    ) -> Policy:
        """Build the policy of the config, frozen, and the network that selects its noise."""
        public = public_space(observation_space, config.critic_observation)
        inside = dataclasses.replace(config, critic_observation=())
        base = super().make_policy(public, action_space, inside, settings, **how)
        policy = NoisePolicy(base, settings.noise_bound, settings.shared_noise)
        return policy.read_privileged(observation_space, config.critic_observation)

    def check_policy(self, fresh: bool) -> None:
        """Raise an error if nothing has trained the policy that is frozen."""
        if fresh:
            raise InputError("model_path: dsrl selects the noise of a trained policy; give one with --model_path")

    def start_from_a_policy(self) -> None:
        """Keep the temperature of a new policy: the network that selects the noise is new."""
        self.policy.reward_scale.fill_(1.0)

    @classmethod
    def judged_by_critics(cls, settings: DSRLSettings) -> str:
        """Noise, or actions with `critic: action`."""
        return "noise" if settings.critic == "noise" else super().judged_by_critics(settings)

    @property
    def experience(self) -> Replay:
        """Batches of a replay buffer that also holds the noise of each action, or the mask of its padded dims."""
        kept = schema.ACTION_MASK if self.noise_critics is not None else (schema.SAMPLE, schema.NOISE)
        return dataclasses.replace(super().experience, kept=(kept,))

    @property
    def critic_action_dim(self) -> int:
        """Numbers of an action, or of its noise."""
        return self.policy.noise_dim if self.noise_critics is None else self.policy.action_dim

    @property
    def target_entropy(self) -> float:
        """The entropy of unit noise that `alpha: auto` aims at."""
        wanted = self.settings.target_entropy
        return 0.0 if wanted == "auto" else float(wanted)

    # -- one step ------------------------------------------------------------------------------------------------------

    def _read(self, batch: Mapping[Any, Any]) -> tuple[Encoded, Tensor, Encoded, Tensor, Tensor]:
        """As in SAC, with what the critics judge as the action: unit noise, or clipped unit actions."""
        state, action, next_state, reward, discount = super()._read(batch)
        mask = batch.get(schema.ACTION_MASK)
        state, next_state = (one._replace(action_mask=mask) for one in (state, next_state))
        if self.noise_critics is None:
            action = self.policy.head.to_unit(batch[(schema.SAMPLE, schema.NOISE)]).unsqueeze(0)
        return state, action.clamp(-1.0, 1.0), next_state, reward, discount

    def _other_loss(self, state: Encoded) -> Tensor | None:
        """L_W."""
        if self.noise_critics is None:
            return None
        rows, bound = state.features.shape[1], self.policy.head.width
        # The policy's noise is bounded, so that of the distillation is too.
        unit = (torch.randn(1, rows, self.policy.noise_dim, device=bound.device) / bound).clamp(-1.0, 1.0)
        with torch.no_grad():
            wanted = self.critics(state.for_critics, self._actions(state, unit)).amin(1, keepdim=True)
        return (self.noise_critics(state.for_critics, unit) - wanted).square().mean(-1).sum(1)

    def _make_anchor(self) -> None:
        """No network: the noise that the frozen policy was trained on is the same in all states."""

    def _divergence(self, state: Encoded, anchored: Encoded | None) -> Tensor:
        """KL(π ‖ p₀)."""
        return self.policy.divergence_from_start(state)

    def _sample(self, state: Encoded) -> tuple[Tensor, Tensor]:
        return self.policy.sample_noise(state)

    def _next_action(self, state: Encoded) -> tuple[Tensor, Tensor]:
        noise, log_prob = super()._next_action(state)
        return noise if self.noise_critics is None else self._actions(state, noise), log_prob

    def _judged(self, state: Encoded, action: Tensor) -> Tensor:
        return (self.noise_critics or self.critics)(state.for_critics, action, frozen=True)

    def _actions(self, state: Encoded, unit_noise: Tensor) -> Tensor:
        """Unit actions [1, B, A] that unit noise [1, B, D] leads to, as the environment clips them."""
        return self.policy.denoise_unit(state, unit_noise[0]).clamp(-1.0, 1.0).unsqueeze(0)

    # -- parameters and checkpoints ------------------------------------------------------------------------------------

    def _critic_trains(self) -> Iterator[nn.Parameter]:
        yield from super()._critic_trains()
        if self.noise_critics is not None:
            yield from self.noise_critics.online.parameters()

    def _parts(self) -> dict[str, Any]:
        own = {} if self.noise_critics is None else {"noise_critics": self.noise_critics}
        return {**super()._parts(), **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state; raise an error if the noise had another bound, which is part of the weights."""
        super().load_state_dict(state)
        bound = float(self.policy.head.width.max())
        if abs(bound - self.settings.noise_bound) > 1e-6:
            raise InputError(
                f"noise_bound: {self.settings.noise_bound:g}, and the checkpoint was trained with {bound:g}; give "
                f"--noise_bound {bound:g}"
            )
