"""A residual policy: a frozen policy of any kind, and a small network that corrects its actions within a bound.

Built from `PolicyConfig` with a section `residual` (`deft.models.building`); every algorithm trains it as it trains any
other policy. The frozen policy is a part of it: one set of weights is saved, loaded and deployed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, Self

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from deft import schema
from deft.config.settings import PolicyConfig
from deft.errors import InputError
from deft.models.action_scale import into_box
from deft.models.distributions import HALF_LOG_2PI, TanhGaussianHead, gaussian_log_prob, log_tanh_slopes
from deft.models.encoders import ObservationEncoder, make_encoder
from deft.models.legacy_weights import keep_reward_normalizer
from deft.models.mlp import BatchedMLP
from deft.models.normalization import RewardNormalizer
from deft.models.policy import SAMPLE, Encoded, Policy
from deft.models.wrapping import WrappingPolicy

log = logging.getLogger(__name__)


class ResidualPolicy(WrappingPolicy):
    """u = clip(b + s · m · r, −1, 1) in unit actions, with r = tanh(x), x ~ N(μ(z, b), σ(z, b)²).

    b is the most likely action of the frozen policy, s the bound of the correction (`residual.scale`), and z the
    features that the frozen policy acts on; where it has none, those of an encoder of the residual's own. μ is 0 at the
    start, so that the most likely action is b. While the policy explores, m is 1 with a probability that grows with the
    env steps of training (`residual.horizon`), and 0 otherwise (Policy Decorator, Yuan et al., 2024).

    Log-probs and entropies are those of r: log π = Σ_i log N(x_i; μ_i, σ_i²) − log(1 − r_i²). They are 0 where m is 0:
    nothing random was chosen there, and PPO's ratio is 1. Critics read z and u.
    """

    has_mean = True
    probability: Tensor
    reward_scale: Tensor

    def __init__(
        self, base: Policy, observation_space: gymnasium.Space, action_space: gymnasium.Space, config: PolicyConfig
    ) -> None:
        super().__init__()
        assert config.residual is not None
        _check(base, action_space)
        self.wrap(base.requires_grad_(False).eval())
        self.policy_config, self.settings = config, config.residual
        self.hidden_sizes = tuple(self.settings.hidden_sizes)
        self.action_dim = base.center.numel()  # K · A of chunks
        public = self._add_critic(observation_space, config)
        assert public is not None
        self.encoder: ObservationEncoder | None = None if base.acts_on_features else make_encoder(public, config)
        self.streams = base.streams if self.encoder is None else _names(public)
        self.feature_dim = base.feature_dim if self.encoder is None else self.encoder.dim
        self.head = TanhGaussianHead(spaces.Box(-1.0, 1.0, (self.action_dim,), np.float32))
        self.residual = BatchedMLP(1, self.feature_dim + self.action_dim, self.hidden_sizes, self.head.num_outputs)
        self.value = BatchedMLP(1, self.feature_dim, self.hidden_sizes, 1)
        with torch.no_grad():
            self.residual.weights[-1].zero_()
            self.residual.biases[-1].zero_()
            self.residual.biases[-1][..., self.action_dim :] = self.settings.log_std_init
        self.reward_normalizer = RewardNormalizer() if config.normalize_reward else None
        self.register_buffer("reward_scale", torch.ones(()))
        self.register_buffer("probability", torch.ones(()))
        self.set_env_steps(0)

    def train(self, mode: bool = True) -> Self:
        """Set the policy's mode; the frozen policy stays in evaluation mode."""
        super().train(mode)
        self.base.eval()
        return self

    def set_env_steps(self, num_env_steps: int) -> None:
        """Set the probability of using the residual: min(1, env steps / horizon)."""
        horizon = self.settings.horizon
        self.probability.fill_(min(1.0, num_env_steps / horizon) if horizon else 1.0)

    # -- for collectors and on-policy algorithms -----------------------------------------------------------------------

    def act(self, td: TensorDictBase, deterministic: bool = False) -> TensorDictBase:
        """Correct the action of the frozen policy, by the most likely residual when deterministic."""
        mask, state = td.get(schema.ACTION_MASK, None), self._encode(td[schema.OBSERVATION], td)
        assert state.base_action is not None
        output = self._output(state)[0]
        mean, log_std = self.head.gaussian(output)
        base = state.base_action[0]
        if deterministic:
            before, is_used = mean, torch.ones(len(base), dtype=torch.bool, device=base.device)
        else:
            before = torch.addcmul(mean, torch.randn_like(mean), log_std.exp())
            is_used = torch.rand(len(base), device=base.device) < self.probability
        unit = self._corrected(base, before.tanh() * is_used.unsqueeze(-1))
        dims = self._dims(mask)
        td.set(schema.ACTION, self.from_unit(unit if dims is None else unit * dims))
        td.set(schema.LOG_PROB, self._log_prob(output, before, dims) * is_used)
        sample = {schema.BASE_ACTION: base, schema.BEFORE_TANH: before, schema.USES_RESIDUAL: is_used}
        td.set(schema.SAMPLE, TensorDict(sample, batch_size=[len(base)]))
        self._set_value(td, self.state_value(state.features)[0])
        return td

    def action_selection(self, deterministic: bool) -> str:
        """A frozen flow policy samples the noise that it starts from."""
        return self.base.action_selection(True) if deterministic else SAMPLE

    def evaluate_actions(self, td: TensorDictBase) -> dict[str, Tensor]:
        """Score the stored residuals, given the stored actions of the frozen policy; the entropy is before tanh."""
        stored = td.get(schema.SAMPLE, None)
        if stored is None:
            raise InputError("a residual policy needs the sample of an action to score it; no `sample` is stored")
        features = self._features(td[schema.OBSERVATION])
        output = self.residual(torch.cat([features, stored[schema.BASE_ACTION].unsqueeze(0)], -1))[0]
        dims, is_used = self._dims(td.get(schema.ACTION_MASK, None)), stored[schema.USES_RESIDUAL]
        entropy = self.head.gaussian(output)[1] + (0.5 + HALF_LOG_2PI)
        return {
            "log_prob": self._log_prob(output, stored[schema.BEFORE_TANH], dims) * is_used,
            "entropy": (entropy if dims is None else entropy * dims).sum(-1) * is_used,
            "value": self._privileged_value(td) if self.critic_streams else self.state_value(features)[0],
        }

    def get_value(self, td: TensorDictBase) -> Tensor:
        """V(observation), [B]."""
        if self.critic_streams:
            return self._privileged_value(td)
        return self.state_value(self._features(td[schema.OBSERVATION]))[0]

    def observe(self, td: TensorDictBase | Mapping[str, Any]) -> None:
        """Update the statistics of the residual's own encoder; those of the frozen policy stay."""
        self.observe_value(td)
        if self.encoder is not None:
            self.encoder.observe(td[schema.OBSERVATION])

    def set_precision(self, dtype: torch.dtype) -> None:
        """Compute most of the forward pass of the frozen policy in `dtype`."""
        self.base.set_precision(dtype)

    # -- for off-policy, offline and supervised algorithms -------------------------------------------------------------

    def encode(self, observation: Any, object_positions: Tensor | None = None) -> Encoded:
        """Features [1, B, F] and the action of the frozen policy [1, B, A]."""
        return self._encode(observation)

    def with_output(self, state: Encoded) -> Encoded:
        """Add the output of the residual network."""
        return state._replace(output=self._output(state))

    def mean(self, state: Encoded) -> Tensor:
        """The action of the frozen policy with the most likely residual."""
        assert state.base_action is not None
        return self._corrected(state.base_action, self.head.mean(self._output(state)))

    def sample(self, state: Encoded, count: int = 1) -> tuple[Tensor, Tensor]:
        """`count` unit actions per state, and the log-densities of their residuals."""
        assert state.base_action is not None
        residual, log_prob = self.head.rsample(self._output(state), count)
        return self._corrected(state.base_action, residual), log_prob

    def log_prob(self, state: Encoded, unit: Tensor) -> Tensor:
        """Log-density of the residual that leads to a unit action, or comes nearest to it."""
        assert state.base_action is not None
        return self.head.log_prob(self._output(state), (unit - state.base_action) / self.settings.scale)

    def divergence(self, state: Encoded, other: Policy, other_state: Encoded) -> Tensor:
        """KL of the residuals, exact."""
        assert isinstance(other, ResidualPolicy)
        return self.head.divergence(self._output(state), other.head, other._output(other_state))

    def state_value(self, features: Tensor) -> Tensor:
        """V by the value network."""
        return self.value(features).squeeze(-1)

    def actor_parameters(self) -> Iterator[nn.Parameter]:
        """The residual network."""
        yield from self.residual.parameters()

    def encoder_parameters(self) -> Iterator[nn.Parameter]:
        """The residual's own encoder, if it has one."""
        yield from () if self.encoder is None else self.encoder.parameters()

    def value_parameters(self) -> Iterator[nn.Parameter]:
        """The value network."""
        yield from self.value.parameters() if self.critic is None else self.critic.parameters()

    def value_only_parameters(self) -> Iterator[nn.Parameter]:
        """The value network."""
        return self.value_parameters()

    # -- weights -------------------------------------------------------------------------------------------------------

    def complete_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights of a residual policy, or those of a policy to freeze with the residual's own."""
        completed, is_alone = self.with_base_weights(weights)
        if not is_alone:
            return keep_reward_normalizer(self, self._keep_critic(completed))
        log.info("the policy is frozen; its residual starts at 0")
        return completed

    # -- networks ------------------------------------------------------------------------------------------------------

    def _features(self, observation: Any) -> Tensor:
        """The features that the residual acts on, [1, B, F]."""
        if self.encoder is not None:
            return self.encoder(observation).unsqueeze(0)
        with torch.no_grad():
            return self.base.encode_to_act(observation).features

    def _encode(self, observation: Any, td: TensorDictBase | None = None) -> Encoded:
        """The features and the action of the frozen policy; `td` has the mask of its padded dims, if there is one."""
        with torch.no_grad():
            state = self.base.encode_to_act(observation)
            if self.base.has_mean:
                unit = self.base.mean(state)
            else:  # a flow or tokens
                row = TensorDict({schema.OBSERVATION: state.observation}, batch_size=[state.features.shape[1]])
                if td is not None and schema.ACTION_MASK in td:
                    row.set(schema.ACTION_MASK, td[schema.ACTION_MASK])
                unit = self.base.to_unit(self.base.act(row, deterministic=True)[schema.ACTION]).unsqueeze(0)
        features = state.features if self.encoder is None else self.encoder(observation).unsqueeze(0)
        privileged = self._privileged_features(observation)
        return Encoded(observation, features, privileged=privileged, base_action=unit.clamp(-1.0, 1.0))

    def _output(self, state: Encoded) -> Tensor:
        if state.output is not None:
            return state.output
        assert state.base_action is not None
        return self.residual(torch.cat([state.features, state.base_action], -1))

    def _corrected(self, base: Tensor, residual: Tensor) -> Tensor:
        return into_box(base + self.settings.scale * residual)

    def _dims(self, mask: Tensor | None) -> Tensor | None:
        """The mask over all dims of a chunk, as numbers."""
        return None if mask is None else mask.tile(self.action_dim // mask.shape[-1]).float()

    def _log_prob(self, output: Tensor, before: Tensor, dims: Tensor | None) -> Tensor:
        """Log-density of residuals tanh(x) over the real dims."""
        mean, log_std = self.head.gaussian(output)
        noise, slopes = (before - mean) * torch.exp(-log_std), log_tanh_slopes(before)
        if dims is None:
            return gaussian_log_prob(noise, log_std) - slopes.sum(-1)
        return ((-0.5 * noise.square() - log_std - HALF_LOG_2PI - slopes) * dims).sum(-1)


def _names(space: gymnasium.Space) -> frozenset[str] | None:
    return frozenset(space.spaces) if isinstance(space, spaces.Dict) else None


def _check(base: Policy, space: gymnasium.Space) -> None:
    """Raise an error if the actions of the frozen policy cannot be corrected."""
    if not base.is_continuous:
        memory = " and has recurrent memory" if base.recurrent else ""
        raise InputError(
            f"residual_scale: corrects continuous actions in a Box; the policy acts in {space}{memory}: leave it out"
        )
    assert isinstance(space, spaces.Box)
    bounded = np.isfinite(space.low) & np.isfinite(space.high)
    if not bounded.all():
        raise InputError(f"residual_scale: is a part of the action range, and {space} has no bounds; rescale it")
    config = base.policy_config
    has_scale = config is None or config.name != "vla" or config.unit_actions
    if not has_scale and not (np.allclose(space.low, -1.0) and np.allclose(space.high, 1.0)):
        raise InputError(
            f"residual_scale: the VLA policy acts in the environment's units ({space}) and has no action scale; start "
            "from a policy of sft, or use gymnasium.wrappers.RescaleAction"
        )
