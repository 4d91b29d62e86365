"""A vision-language-action model as the actor of IQL, CQL and TD3+BC, with V on an encoder of its own beside it.

`OffPolicy.make_policy` builds it for `policy.name: vla`. It is a whole policy: it acts, and PPO can train it further.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from deft import schema
from deft.config.settings import ActorConfig
from deft.errors import InputError
from deft.models.actor import ContinuousActor, Encoded, make_encoder, real_steps
from deft.models.mlp import BatchedMLP
from deft.models.vla.interface import check_outputs, overrides
from deft.models.vla.loading import load_vla_model_for
from deft.models.vla.policy import VLAPolicy

logger = logging.getLogger(__name__)


class VLAActor(VLAPolicy, ContinuousActor):
    """The model gives unit actions: [-1, 1] in each dim is the range of the action Box, in training and in acting.

    Weights bring the Box that they were trained with (`ActionScale`).

    The critics and V stand on an `ObservationEncoder` over all streams, which their losses train: in a shared trunk
    those losses, which go with the scale of the rewards, would drown the policy's gradient. So `get_value` here is that
    V, which IQL trains, and the model's own `get_value` stays as it was. A model that offers its trunk (`features`,
    `feature_dim`, `value_of`, `value_parameters`) is that encoder itself: critics and V read its features, V is the
    model's own, and the trunk learns from the policy's loss alone.

    A chunk of K actions is one unit action of K · A dims to the algorithms.

    The environment clips what the model draws, and so do `mean` and `sample`: what is trained is what is executed.
    """

    action_dim: int

    def __init__(
        self,
        model: nn.Module,
        observation_space: gymnasium.Space,
        action_space: gymnasium.Space,
        config: ActorConfig | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        config = config or ActorConfig()
        shape = action_space.shape or ()
        super().__init__(model, int(shape[-1]) if shape else None, shape[0] if len(shape) == 2 else 1)
        self.set_box(action_space)
        self.hidden_sizes = (config.hidden_dim,) * config.num_layers
        self.shares_trunk = self.model.shares_features
        if self.shares_trunk:
            self.feature_dim = int(self.model.feature_dim)
        else:
            self.encoder = make_encoder(observation_space, config)
            self.feature_dim = self.encoder.dim
            self.value = BatchedMLP(1, self.feature_dim, self.hidden_sizes, 1, dtype=dtype)
            self.streams = None  # the encoder reads all of them
        self._imitates = overrides(model, "imitation_loss")
        self._padded_batches = 0
        self.has_mean = self.model.has_mean

    # -- for the algorithms --------------------------------------------------------------------------------------------

    def encode(self, observation: Mapping[str, Tensor] | TensorDictBase, sight: Tensor | None = None) -> Encoded:
        """The named streams, and the critics' features of them, [1, B, F]."""
        streams = _streams(observation)
        if not self.shares_trunk:
            return Encoded(streams, self.encoder(streams).unsqueeze(0))
        known = () if sight is None else (sight,)
        trunk, besides = self.model.training_features(streams, *known)
        return Encoded(streams, trunk.detach().unsqueeze(0), trunk, besides)

    @torch.no_grad()
    def sight(self, observation: Mapping[str, Tensor] | TensorDictBase) -> Tensor:
        """What the model sees, for a later self that sees better."""
        return self.model.object_positions(_streams(observation))

    def imitation(self, observation: Any, unit: Tensor, step_mask: Tensor | None, loss: str) -> dict[str, Tensor]:
        """By the model's own loss where it has one: in one pass, and the steps after an episode's end do not count."""
        if loss == "mse" or not self._imitates:
            return super().imitation(observation, unit, step_mask, loss)
        losses = self.model.imitation_loss(_streams(observation), self._as_chunks(unit[0]), step_mask=step_mask)
        return {"bc_loss": self._scalar("imitation_loss", "loss", losses, unit.shape[1]).mean().unsqueeze(0)}

    def mean(self, state: Encoded) -> Tensor:
        """The model's most likely action, clipped as by the environment; an error for heads without a mean."""
        if not self.has_mean and self.model.takes_deterministic:
            raise InputError(
                f"{self.model_name} has no mean action (flow and token heads and switches have none), which td3-bc and "
                "sft with --loss mse train: use iql, or sft with --loss log_prob, or a Gaussian head without switches"
            )
        if not self.has_mean:
            raise InputError(
                f"{self.model_name}.forward takes no `deterministic`, and td3-bc and sft with --loss mse train the "
                "most likely action: add that keyword, or train with iql or sft"
            )
        unit = self.model(state.observation, deterministic=True)
        self._check_action(f"the action of {self.model_name}.forward", unit, len(state.observation))
        self._check_gradient("its most likely action", unit)
        return into_box(unit.flatten(1)).unsqueeze(0)

    def log_prob(self, state: Encoded, unit: Tensor) -> Tensor:
        """Log-density of unit actions by the model's `evaluate_actions`."""
        return self._score(state.observation, unit[0]).unsqueeze(0)

    def imitation_loss(self, state: Encoded, unit: Tensor) -> Tensor:
        """The model's own loss where it has one, else −log π of the real steps."""
        if not self._imitates:
            if state.step_mask is None:
                return -self.log_prob(state, unit)
            if self.model.takes_step_mask:
                return -self._score(state.observation, unit[0], step_mask=state.step_mask).unsqueeze(0)
            if not self._is_gaussian(state):
                self._check_steps(state)
            return super().imitation_loss(state, unit)
        known = {} if state.trunk is None else {"features": state.trunk}
        losses = self.model.imitation_loss(
            state.observation, self._as_chunks(unit[0]), step_mask=state.step_mask, **known
        )
        return self._scalar("imitation_loss", "loss", losses, unit.shape[1]).unsqueeze(0)

    @torch.no_grad()
    def _check_steps(self, state: Encoded) -> None:
        """Raise an error where the padded steps of a chunk depend on the real ones.

        Independent: log π(a, b) + log π(a', b') = log π(a, b') + log π(a', b) for real steps a, a' and padding b, b'.
        Checked in batches 1, 2, 4, 8, … with padding, since a model may learn the dependence.
        """
        assert state.step_mask is not None
        self._padded_batches += 1
        if self._padded_batches & (self._padded_batches - 1):
            return
        one = self._own_action(state)
        other = one.roll(1, -2)  # those of other rows: nothing more is drawn
        mixed = [real_steps(one, other, state.step_mask), real_steps(other, one, state.step_mask)]
        scores = [self.log_prob(state, unit) for unit in (one, other, *mixed)]
        difference = (scores[0] + scores[1] - scores[2] - scores[3]).abs()
        if bool((difference > 1e-3 * (1.0 + torch.stack(scores).abs().amax(0))).any()):
            raise InputError(
                f"{self.model_name}: the steps of a chunk depend on each other, and the steps after an episode's end "
                "would be trained on; give evaluate_actions the keyword `step_mask` (bool [B, K]) and return the "
                "log-prob of those steps, or give the model an `imitation_loss`"
            )

    @torch.no_grad()
    def _own_action(self, state: Encoded) -> Tensor:
        """As the model draws it, before clipping."""
        return self.model(state.observation).flatten(1).unsqueeze(0)

    def besides(self, state: Encoded) -> Tensor | None:
        """What the model is `taught` beside the actions, where there are labels (`vla-tiny`: where things are)."""
        if state.besides is None:
            return None
        return self._scalar("training_features", "loss", state.besides, len(state.observation)).mean().unsqueeze(0)

    def sample(self, state: Encoded, count: int = 1) -> tuple[Tensor, Tensor]:
        """Draws as the environment would clip them, with the model's log-density of them before that.

        The density of the clipped action would make it pay for an entropy bonus to draw far outside, where it is
        small.
        """
        drawn, log_prob = self._draw(state, count)
        return into_box(drawn).unsqueeze(1), log_prob.unsqueeze(1)

    def divergence(self, state: Encoded, other: ContinuousActor, other_state: Encoded) -> Tensor:
        """log π − log π_other of one draw each, before clipping."""
        drawn, log_prob = self._draw(state, 1)
        return log_prob - other.log_prob(other_state, drawn)

    def _draw(self, state: Encoded, count: int) -> tuple[Tensor, Tensor]:
        """`count` unit actions a state before clipping, [count, B, K · A], and the model's log-density of them."""
        drawn, log_prob = check_outputs(self.model, "sample_many", 2, self.model.sample_many(state.observation, count))
        self._check_action(f"the action of {self.model_name}", drawn.flatten(0, 1), count * len(state.observation))
        self._check_gradient("what it draws (`sample` in place of `rsample`?)", drawn)
        return drawn.flatten(2), log_prob

    def _is_gaussian(self, state: Encoded) -> bool:
        """Whether the steps of a chunk are independent because the model samples a Gaussian."""
        return overrides(self.model, "gaussian")

    def state_value(self, features: Tensor) -> Tensor:
        """V on the critics' features, by the value network or the model that shares its trunk."""
        value = self.model.value_of(features) if self.shares_trunk else self.value(features)
        return value.squeeze(-1)

    def actor_parameters(self) -> Iterator[nn.Parameter]:
        """The model, less a value that is its own; what is frozen in it is left alone by the optimizer."""
        values = {id(parameter) for parameter in self.value_parameters()}
        yield from (parameter for parameter in self.model.parameters() if id(parameter) not in values)

    def encoder_parameters(self) -> Iterator[nn.Parameter]:
        """The critics' encoder; none where they read the model's trunk."""
        yield from () if self.shares_trunk else self.encoder.parameters()

    def value_parameters(self) -> Iterator[nn.Parameter]:
        """The value network, or the value of the model."""
        yield from self.model.value_parameters() if self.shares_trunk else self.value.parameters()

    def value_only_parameters(self) -> Iterator[nn.Parameter]:
        """The value, and the encoder that it shares with the critics alone."""
        yield from self.encoder_parameters()
        yield from self.value_parameters()

    # -- for the collector and the trainer -----------------------------------------------------------------------------

    def act(self, td: TensorDictBase, deterministic: bool = False) -> TensorDictBase:
        """As every VLA policy, with V in place of the model's own value."""
        super().act(td, deterministic)
        if not self.shares_trunk:
            td.set(schema.VALUE, self.get_value(td))
        return td

    def evaluate_actions(self, td: TensorDictBase) -> dict[str, Tensor]:
        """Likewise."""
        scored = super().evaluate_actions(td)
        if not self.shares_trunk:
            scored["value"] = self.get_value(td)
        return scored

    def get_value(self, td: TensorDictBase) -> Tensor:
        """V(observation), [B]."""
        if self.shares_trunk:
            return super().get_value(td)
        observations, _ = self._observations(td)
        return self.state_value(self.encoder(observations).unsqueeze(0))[0]

    def check_box(self, space: gymnasium.Space) -> None:
        """Against the Box that the actor was trained in, also where that is [-1, 1]."""
        ContinuousActor.check_box(self, space)

    def observe(self, td: TensorDictBase | Mapping[str, Any]) -> None:
        """Take observations into the normalisation of the critics' vectors, and into that of a model that has one."""
        self.observe_value(td)
        super().observe(td)

    def observe_value(self, td: TensorDictBase | Mapping[str, Any]) -> None:
        """Take observations into the normalisation of the critics' vectors."""
        if not self.shares_trunk:
            self.encoder.observe(td[schema.OBSERVATION])

    # -- the border to the model ---------------------------------------------------------------------------------------

    def _score(self, observations: TensorDictBase, unit: Tensor, **keywords: Tensor) -> Tensor:
        chunks = self._as_chunks(unit) if unit.ndim == 2 else unit
        scored = check_outputs(
            self.model, "evaluate_actions", 2, self.model.evaluate_actions(observations, chunks, **keywords)
        )
        return self._scalar("evaluate_actions", "log_prob", scored[0], len(unit))

    def _check_gradient(self, what: str, unit: Tensor) -> None:
        if torch.is_grad_enabled() and not unit.requires_grad:
            raise InputError(
                f"VLA model {self.model_name} gives no gradient through {what}, which cql, td3-bc and sft with "
                "--loss mse need: let it give one, or train with iql, or with sft and --loss log_prob"
            )


def make_vla_actor(
    config: ActorConfig,
    observation_space: gymnasium.Space,
    action_space: gymnasium.Space,
    where: str,
    dtype: torch.dtype = torch.float32,
    weights_follow: bool = False,
) -> VLAActor:
    """The actor around the model that a config names, for the spaces of `where`; see `load_vla_model_for`.

    `action_space` is that of single steps, or already one of the config's chunks.
    """
    assert config.vla_config is not None
    if dtype != torch.float32:
        logger.warning("precision: not for the VLA model, which computes in the type of its weights")
    space, length = action_space, config.chunk_length
    if length > 1 and isinstance(space, gymnasium.spaces.Box) and len(space.shape) == 1:
        space = gymnasium.spaces.Box(np.tile(space.low, (length, 1)), np.tile(space.high, (length, 1)))
    model = load_vla_model_for(config.vla_config, observation_space, space, where, length, weights_follow)
    return VLAActor(model, observation_space, space, config, dtype)


def _streams(observation: Mapping[str, Tensor] | TensorDictBase) -> TensorDictBase:
    if isinstance(observation, TensorDictBase):
        return observation
    return TensorDict(dict(observation), [len(next(iter(observation.values())))])


class _IntoBox(torch.autograd.Function):
    """clip(x, −1, 1) whose gradient is stopped only where a descent along it would lead further out.

    A plain clip gives no gradient at all outside, and an action that is there would never come back.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(-1.0, 1.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        outwards = (x.abs() > 1.0) & (gradients[0] * x < 0)  # a step is −gradient
        return gradients[0].masked_fill(outwards, 0.0)


def convert_weights(policy: VLAPolicy, weights: Mapping[str, Tensor], source: str | Path) -> dict[str, Tensor] | None:
    """For a `VLAActor`, the weights of a `VLAPolicy` around the same model, and the other way round; else None.

    The model's weights and its action scale are those of the source, so that it acts as before; the rest (V, encoder,
    normalisation of rewards) stays the policy's own.
    """
    to_actor, from_actor = isinstance(policy, VLAActor), "reward_scale" in weights
    model = {name: value for name, value in weights.items() if name.startswith("model.")}
    if to_actor == from_actor or not model:
        return None
    if policy.model.shares_features:
        logger.info("%s: the model is loaded with its value", source)
    elif to_actor:
        logger.warning("%s: the model is loaded; V and the encoder of the critics start from new weights", source)
    else:
        logger.warning(
            "%s: the model is loaded; its value starts from new weights: offline, V is not part of it", source
        )
    loaded = policy.complete_weights({name: weights[name] for name in ("center", "width") if name in weights})
    own = {name: value for name, value in policy.state_dict().items() if not name.startswith("model.")}
    return own | loaded | model


def into_box(unit: Tensor) -> Tensor:
    """Unit actions as the environment executes them, differentiable."""
    return _IntoBox.apply(unit)
