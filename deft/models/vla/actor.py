"""A vision-language-action model as the actor of IQL, CQL and TD3+BC, with V on an encoder of its own beside it.

`OffPolicy.make_policy` builds it for `policy.name: vla`. It is a whole policy: it acts, and PPO can train it further.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gymnasium
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from deft import schema
from deft.config.settings import ActorConfig
from deft.errors import InputError
from deft.models.actor import ContinuousActor, Encoded, make_encoder
from deft.models.distributions import HALF_LOG_2PI
from deft.models.mlp import BatchedMLP
from deft.models.vla.policy import VLAPolicy, takes_keyword

logger = logging.getLogger(__name__)


class VLAActor(VLAPolicy, ContinuousActor):
    """The model gives unit actions: [-1, 1] in each dim is the range of the action Box, in training and in acting.

    The critics and V do not stand on the model but on an `ObservationEncoder` over all streams, which their losses
    train. Those losses go with the scale of the rewards, and in a shared trunk they would drown the policy's gradient;
    and V(s') takes no pass through the model this way. So `get_value` here is that V, which IQL trains, and
    the model's own `get_value` stays as it was.

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
        size = None if action_space.shape is None else int(action_space.shape[-1])
        super().__init__(model, size, chunk_length=1)
        self.set_box(action_space)
        self.encoder = make_encoder(observation_space, config)
        self.feature_dim = self.encoder.dim
        self.hidden_sizes = (config.hidden_dim,) * config.num_layers
        self.value = BatchedMLP(1, self.feature_dim, self.hidden_sizes, 1, dtype=dtype)
        self._has_gaussian = callable(getattr(model, "gaussian", None))
        self._has_mean = takes_keyword(model.forward, "deterministic")

    # -- for the algorithms --------------------------------------------------------------------------------------------

    def encode(self, observation: Mapping[str, Tensor] | TensorDictBase) -> Encoded:
        """The named streams, and the critics' features of them, [1, B, F]."""
        if not isinstance(observation, TensorDictBase):
            observation = TensorDict(dict(observation), [len(next(iter(observation.values())))])
        return Encoded(observation, self.encoder(observation).unsqueeze(0))

    def mean(self, state: Encoded) -> Tensor:
        """The model's most likely action, where the environment would clip it."""
        if not self._has_mean:
            raise InputError(
                f"{self.model_name}.forward takes no `deterministic`, and td3-bc trains the most likely action: "
                "add that keyword, or train with iql"
            )
        unit = self.model(state.observation, deterministic=True)
        self._check_action(f"the action of {self.model_name}.forward", unit, len(state.observation))
        self._check_gradient("its most likely action", unit)
        return into_box(unit).unsqueeze(0)

    def log_prob(self, state: Encoded, unit: Tensor) -> Tensor:
        """Log-density of unit actions by the model's `evaluate_actions`."""
        return self._score(state.observation, unit[0]).unsqueeze(0)

    def sample(self, state: Encoded, count: int = 1) -> tuple[Tensor, Tensor]:
        """Draws as the environment would clip them, with the model's log-density of them before that.

        The density of the clipped action would make it pay for an entropy bonus to draw far outside, where it is
        small. One pass through a model that says which Gaussian it draws from; else `count` copies of the states.
        """
        observations, batch = state.observation, len(state.observation)
        if self._has_gaussian:
            mean, log_std = self._outputs("gaussian", 2, self.model.gaussian(observations))
            self._check_action(f"the mean of {self.model_name}.gaussian", mean, batch)
            noise = torch.randn(count, *mean.shape, dtype=mean.dtype, device=mean.device)
            self._check_gradient("its Gaussian", mean)
            drawn = torch.addcmul(mean, noise, log_std.exp())
            # log N(μ + σε; μ, σ) = −½ ε² − log σ − ½ log 2π
            log_prob = (-0.5 * noise.square() - log_std - HALF_LOG_2PI).sum(-1)
        else:
            repeated = torch.cat([observations] * count)
            drawn = self.model(repeated)
            self._check_action(f"the action of {self.model_name}.forward", drawn, count * batch)
            self._check_gradient("what it draws (`sample` in place of `rsample`?)", drawn)
            log_prob = self._score(repeated, drawn).unflatten(0, (count, batch))
            drawn = drawn.unflatten(0, (count, batch))
        return into_box(drawn).unsqueeze(1), log_prob.unsqueeze(1)

    def state_value(self, features: Tensor) -> Tensor:
        """V by the value network, on the critics' features."""
        return self.value(features).squeeze(-1)

    def actor_parameters(self) -> Iterator[nn.Parameter]:
        """The model; what is frozen in it is left alone by the optimizer."""
        yield from self.model.parameters()

    def encoder_parameters(self) -> Iterator[nn.Parameter]:
        """The critics' encoder."""
        yield from self.encoder.parameters()

    def value_parameters(self) -> Iterator[nn.Parameter]:
        """The value network."""
        yield from self.value.parameters()

    # -- for the collector and the trainer -----------------------------------------------------------------------------

    def act(self, td: TensorDictBase, deterministic: bool = False) -> TensorDictBase:
        """The model's unit actions as actions of the Box, before the environment's clipping, with V beside them."""
        super().act(td, deterministic)
        td.set(schema.LOG_PROB, td[schema.LOG_PROB] - self._log_widths(td))
        td.set(schema.ACTION, self.from_unit(td[schema.ACTION]))
        td.set(schema.VALUE, self.get_value(td))
        return td

    def evaluate_actions(self, td: TensorDictBase) -> dict[str, Tensor]:
        """`log_prob`, `entropy` and `value` of stored actions of the Box."""
        unit = td.copy().set(schema.ACTION, self.to_unit(td[schema.ACTION]))
        scored, log_widths = super().evaluate_actions(unit), self._log_widths(td)
        return {
            "log_prob": scored["log_prob"] - log_widths,
            "entropy": scored["entropy"] + log_widths,
            "value": self.get_value(td),
        }

    def get_value(self, td: TensorDictBase) -> Tensor:
        """V(observation), [B]."""
        observations, _ = self._observations(td)
        return self.state_value(self.encoder(observations).unsqueeze(0))[0]

    def observe(self, td: TensorDictBase | Mapping[str, Any]) -> None:
        """Take observations into the normalisation of the critics' vectors; the model reads its streams as they are."""
        self.encoder.observe(td[schema.OBSERVATION])

    # -- the border to the model ---------------------------------------------------------------------------------------

    def _score(self, observations: TensorDictBase, unit: Tensor) -> Tensor:
        scored = self._outputs("evaluate_actions", 2, self.model.evaluate_actions(observations, unit))
        return self._scalar("evaluate_actions", "log_prob", scored[0], len(unit))

    def _check_gradient(self, what: str, unit: Tensor) -> None:
        if torch.is_grad_enabled() and not unit.requires_grad:
            raise InputError(
                f"VLA model {self.model_name} gives no gradient through {what}, which cql and td3-bc need: "
                "let it give one, or train with iql"
            )

    def _log_widths(self, td: TensorDictBase) -> Tensor:
        """Σ log(half width) over the real dims: from a density of unit actions to one of the Box's."""
        mask = td.get(schema.ACTION_MASK, None)
        logs = self.width.log()
        return logs.sum() if mask is None else (logs * mask).sum(-1)


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


def weights_of_the_other_kind(
    policy: VLAPolicy, weights: Mapping[str, Tensor], source: str | Path
) -> dict[str, Tensor] | None:
    """For a `VLAActor`, those of a `VLAPolicy` around the same model, and the other way round; else None.

    The model's are taken over, the rest stays as it is. That is right where both mean the same by an action.
    """
    to_actor, from_actor = isinstance(policy, VLAActor), "center" in weights and "width" in weights
    model = {name: value for name, value in weights.items() if name.startswith("model.")}
    if to_actor == from_actor or not model:
        return None
    box = policy.state_dict() if to_actor else weights
    center, width = box["center"], box["width"]
    if bool((center != 0).any() or (width != 1).any()):
        raise InputError(
            f"{source}: a model trained offline gives actions in [-1, 1], one trained online those of the environment, "
            "and here they differ: train in an environment with actions in [-1, 1] (gymnasium.wrappers.RescaleAction)"
        )
    logger.warning(
        "%s: the model is taken over; %s",
        source,
        "the critics' encoder and V start anew" if to_actor else "its value is not: offline, V is learned beside it",
    )
    own = policy.state_dict()
    return {name: value for name, value in own.items() if not name.startswith("model.")} | model


def into_box(unit: Tensor) -> Tensor:
    """Unit actions as the environment executes them, differentiable."""
    return _IntoBox.apply(unit)
