"""The policy around a vision-language-action model, for every algorithm.

Built from `PolicyConfig` with `name: vla` (`deft.models.building`), or by hand around any module with the methods of
`VLAModelInterface`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import gymnasium
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from deft import schema
from deft.config.settings import PolicyConfig
from deft.errors import InputError
from deft.models.action_scale import ActionScale, into_box
from deft.models.denoising import add_new_parts
from deft.models.encoders import ObservationEncoder, make_encoder
from deft.models.inpainting import Inpainting
from deft.models.legacy_weights import add_reward_scale, keep_reward_normalizer
from deft.models.mlp import BatchedMLP
from deft.models.normalization import RewardNormalizer
from deft.models.policy import MODE, SAMPLE, SAMPLED_NOISE, Encoded, Policy, real_steps
from deft.models.vla.interface import as_vla_model, check_outputs, overrides

logger = logging.getLogger(__name__)
VALUE_PARTS = ("encoder.", "value.")


class VLAPolicy(ActionScale, Policy):
    """A VLA model as a `Policy`; every shape that the model returns is checked here.

    With `unit_actions` the model's actions are unit actions: [-1, 1] in each dim is the range of the action Box.
    Without it the scale is 1: the model's actions are in the environment's units. Weights bring the scale that they
    were trained with, so that a model trained on the unit actions of a dataset acts in the robot's units.

    V is the model's own `get_value`. With `separate_value` V and the critics read an `ObservationEncoder` over all
    streams, which their losses train: in shared layers those losses, which depend on the scale of the rewards, would
    dominate the policy's gradient. A model with `shares_features` needs none: critics and V read its features, which
    learn from the policy's loss alone.

    A chunk of K actions is one unit action of K · A dims to the algorithms. The environment clips the model's actions,
    and so do `mean` and `sample`: what is trained is what is executed.

    The model stays in `eval()` whatever the mode of the policy: with dropout the network that samples an action would
    differ from the one that scores it, and PPO's ratios would not start at 1.
    """

    is_continuous = True

    def __init__(
        self,
        model: nn.Module,
        action_dim: int | None = None,
        chunk_length: int | None = None,
        normalize_reward: bool = False,
        *,
        observation_space: gymnasium.Space | None = None,
        action_space: gymnasium.Space | None = None,
        config: PolicyConfig | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.model = as_vla_model(model)
        self.model_name = type(model).__name__
        self.policy_config = config
        config = config or PolicyConfig(normalize_reward=normalize_reward)
        if action_space is not None and action_space.shape:
            shape = action_space.shape
            action_dim, chunk_length = int(shape[-1]), shape[0] if len(shape) == 2 else 1
        self.step_dim = self._agree("action_dim", action_dim, self.model.action_dim)
        self.chunk_length = self._agree("chunk_length", chunk_length, self.model.chunk_length) or 1
        self.action_shape = (self.chunk_length, self.step_dim or -1)[self.chunk_length == 1 :]
        self.has_box = config.unit_actions and action_space is not None
        if self.has_box:
            assert action_space is not None
            self.set_box(action_space)
        else:
            # If neither model nor caller sets the number of dims, one number is the scale of all of them.
            size = 1 if self.step_dim is None else self.chunk_length * self.step_dim
            self.action_dim = self.step_dim
            self.set_scale(torch.zeros(size), torch.ones(size))
        self.register_buffer("reward_scale", torch.ones(()))
        self.hidden_sizes = (config.hidden_dim,) * config.num_layers
        observation_space = self._add_critic(observation_space, config)
        self.encoder: ObservationEncoder | None = None
        self.streams = self.model.streams
        self.feature_dim = self.model.feature_dim
        if config.separate_value and not self.model.shares_features:
            assert observation_space is not None, "separate_value needs the observation space"
            self.encoder = make_encoder(observation_space, config)
            self.feature_dim = self.encoder.dim
            self.value = BatchedMLP(1, self.feature_dim, self.hidden_sizes, 1, dtype=dtype)
            self.streams = None  # the encoder reads all of them
        if self.critic_streams and self.streams is None and isinstance(observation_space, gymnasium.spaces.Dict):
            self.streams = frozenset(observation_space)
        self.has_mean, self.has_samples = self.model.has_mean, self.model.has_samples
        self.noise_shape, self.can_reparameterize = self.model.noise_shape, self.model.can_reparameterize
        self.can_inpaint = self.noise_shape is not None and self.model.can_inpaint
        self.acts_on_features = self.encoder is None and self.model.shares_features
        self.reward_normalizer = RewardNormalizer() if config.normalize_reward else None
        self.capturable = self.model.capturable
        self._sample_method = "act" if overrides(model, "act") else "forward"
        self._score_method = "evaluate" if overrides(model, "evaluate") else "evaluate_actions"
        self._has_own_loss = overrides(model, "imitation_loss")
        self._warned_of_sampling = False
        self._padded_batches = 0
        self.register_load_state_dict_pre_hook(_complete_copies)
        self.model.eval()

    def train(self, mode: bool = True) -> Self:
        """Set the policy's mode; the model stays in evaluation mode (see the class)."""
        super().train(mode)
        self.model.eval()
        return self

    # -- for collectors and on-policy algorithms -----------------------------------------------------------------------

    def act(self, td: TensorDictBase, deterministic: bool = False) -> TensorDictBase:
        """Sample actions (the most likely ones when deterministic) and add them with their log-prob and the value."""
        observations, batch = self._observations(td)
        model, method = self.model, self._sample_method
        if deterministic and not model.takes_deterministic and not self._warned_of_sampling:
            self._warned_of_sampling = True
            logger.warning("%s has no `deterministic` keyword: its actions are sampled", self.model_name)
        how: dict[str, Any] = {"deterministic": deterministic} if model.takes_deterministic else {}
        outputs = model.act(observations, **how, **self._mask_keyword(td))
        action, log_prob, value, *rest = check_outputs(model, "act", 4 if model.keeps_sample else 3, outputs)
        if model.keeps_sample:  # random values beside the action, such as the denoising chain of a flow
            td.set(schema.SAMPLE, TensorDict(dict(rest[0]), batch_size=[batch]))
        self._check_action(f"the action of {self.model_name}.{method}", action, batch)
        is_one_pass = method == "act"
        log_prob = self._scalar("act" if is_one_pass else "evaluate_actions", "log_prob", log_prob, batch)
        if not self.is_unit:
            action, log_prob = self.from_unit(action.flatten(1)), log_prob - self._log_widths(td)
        td.set(schema.ACTION, action)
        td.set(schema.LOG_PROB, log_prob)
        if self.critic_streams or self.encoder is None:
            self._set_value(td, self._value("act" if is_one_pass else "get_value", value, batch))
        else:
            td.set(schema.VALUE, self.get_value(td))
        return td

    def action_selection(self, deterministic: bool) -> str:
        """A model without the keyword `deterministic` samples; a flow samples the noise that it starts from."""
        if not deterministic or not self.model.takes_deterministic:
            return SAMPLE
        return SAMPLED_NOISE if self.model.starts_from_noise else MODE

    def evaluate_actions(self, td: TensorDictBase) -> dict[str, Tensor]:
        """`log_prob`, `entropy` and `value` of stored actions, each [B] and differentiable."""
        observations, batch = self._observations(td)
        action = td[schema.ACTION]
        self._check_action("the stored action", action, batch)
        if self.is_unit:
            scored = self._evaluate(td, observations, action, batch)
        else:
            scored = self._evaluate(td, observations, self._as_chunks(self.to_unit(action)), batch)
            log_widths = self._log_widths(td)
            scored["log_prob"] = scored["log_prob"] - log_widths
            scored["entropy"] = scored["entropy"] + log_widths
        if self.critic_streams or self.encoder is not None:
            scored["value"] = self.get_value(td)
        return scored

    def _evaluate(
        self, td: TensorDictBase, observations: TensorDictBase, action: Tensor, batch: int
    ) -> dict[str, Tensor]:
        """The model's scores of its own, unscaled actions."""
        keywords: dict[str, Any] = self._mask_keyword(td)
        if self.model.keeps_sample:
            if td.get(schema.SAMPLE, None) is None:
                raise InputError(f"{self.model_name} needs the sample of an action to score it; no `sample` is stored")
            keywords["sample"] = td[schema.SAMPLE]
        by_token = self.reports_tokens and overrides(self.model, "evaluate_tokens")
        outputs: Sequence[Tensor]
        paths: dict[str, Tensor] = {}
        if self.reparameterizes:
            method = "evaluate_path"
            *outputs, path, others = self.model.evaluate_path(observations, action, **keywords)
            paths["reparameterized"] = self.executed(path.flatten(1))
            if others is not None:
                paths["alternatives"], paths["alternative_probs"] = self.executed(others[0].flatten(2)), others[1]
        else:
            method = "evaluate_tokens" if by_token else self._score_method
            evaluate = self.model.evaluate_tokens if by_token else self.model.evaluate
            outputs = evaluate(observations, action, **keywords)
        log_prob, entropy, value = check_outputs(self.model, method, 3, outputs)
        scored = {
            "entropy": self._scalar(method, "entropy", entropy, batch),
            "value": self._value("get_value" if method == "evaluate_actions" else method, value, batch),
            **paths,
        }
        if not by_token:
            return {"log_prob": self._scalar(method, "log_prob", log_prob, batch), **scored}
        self._check_shape(f"log_prob of {self.model_name}.{method}", log_prob, batch, "tokens")
        return {"log_prob": log_prob.sum(1), "token_log_prob": log_prob, **scored}

    def get_value(self, td: TensorDictBase) -> Tensor:
        """V(observation), [B]."""
        observations, batch = self._observations(td)
        if self.critic_streams:
            return self._privileged_value(td)
        if self.encoder is not None:
            return self.state_value(self.encoder(observations).unsqueeze(0))[0]
        return self._value("get_value", self.model.get_value(observations), batch)

    def observe(self, td: TensorDictBase | Mapping[str, Any]) -> None:
        """Update the running statistics of the model and of the encoder of V."""
        self.observe_value(td)
        self.model.observe(_streams(td[schema.OBSERVATION], self.critic_streams))

    def observe_value(self, td: TensorDictBase | Mapping[str, Any]) -> None:
        """Update the running statistics of V, if it has an encoder of its own."""
        super().observe_value(td)
        if self.encoder is not None:
            self.encoder.observe(td[schema.OBSERVATION])

    def set_precision(self, dtype: torch.dtype) -> None:
        """Compute most of the model's forward pass in `dtype`."""
        self.model.set_precision(dtype)

    def freeze_statistics(self) -> None:
        """Freeze the running statistics of the model."""
        self.model.freeze_statistics()

    def value_only_parameters(self) -> Iterable[nn.Parameter]:
        """V, with its encoder if it has one of its own."""
        return [*self.encoder_parameters(), *self.value_parameters()]

    def auxiliary_loss(self, td: TensorDictBase) -> Tensor:
        """The model's auxiliary loss, [B]."""
        observations, batch = self._observations(td)
        return self._scalar("auxiliary_loss", "loss", self.model.auxiliary_loss(observations), batch)

    def auxiliary_parameters(self) -> Iterable[nn.Parameter]:
        """Return the parameters that the model's auxiliary loss trains."""
        return self.model.auxiliary_parameters()

    def describe_frames(
        self, observation: Mapping[str, Tensor] | TensorDictBase, num_texts: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """The model's features of images, and its scores of instructions."""
        streams = _streams(observation, self.critic_streams)
        outputs = self.model.describe_frames(streams, num_texts)
        features, scores = check_outputs(self.model, "describe_frames", 2, outputs)
        self._check_shape(f"features of {self.model_name}.describe_frames", features, len(streams), *self.frame_shape)
        return features, scores

    def vision_parameters(self) -> Iterable[nn.Parameter]:
        """Return the parameters of the model's vision encoder."""
        return self.model.vision_parameters()

    @property
    def frame_shape(self) -> tuple[int, int]:
        """That of the model."""
        return self.model.frame_shape

    # -- for off-policy, offline and supervised algorithms -------------------------------------------------------------

    def encode(
        self, observation: Mapping[str, Tensor] | TensorDictBase, object_positions: Tensor | None = None
    ) -> Encoded:
        """The named streams and their features [1, B, F], those of the model or of the critics' encoder."""
        streams = _streams(observation, self.critic_streams)
        privileged = self._privileged_features(observation)
        if self.encoder is not None:
            return Encoded(streams, self.encoder(streams).unsqueeze(0), privileged=privileged)
        if not self.model.shares_features:
            return Encoded(streams, torch.zeros(1, len(streams), 0, device=self.center.device))
        known = () if object_positions is None else (object_positions,)
        features, losses = self.model.training_features(streams, *known)
        auxiliary_loss = None
        if losses is not None:
            auxiliary_loss = self._scalar("training_features", "loss", losses, len(streams)).mean().unsqueeze(0)
        return Encoded(streams, features.detach().unsqueeze(0), features, auxiliary_loss, privileged=privileged)

    def encode_to_act(self, observation: Mapping[str, Tensor] | TensorDictBase) -> Encoded:
        """As `encode`, with the model's features of acting, which use no labels."""
        if self.encoder is not None or not self.model.shares_features:
            return self.encode(observation)
        streams = _streams(observation, self.critic_streams)
        features = self.model.features(streams)
        return Encoded(streams, features.detach().unsqueeze(0), features)

    @torch.no_grad()
    def object_positions(self, observation: Mapping[str, Tensor] | TensorDictBase) -> Tensor:
        """Object positions that the model predicts."""
        return self.model.object_positions(_streams(observation, self.critic_streams))

    def imitation(self, observation: Any, unit: Tensor, step_mask: Tensor | None, loss: str) -> dict[str, Tensor]:
        """Use the model's own loss where it has one, in one pass."""
        if loss == "mse" or not self._has_own_loss:
            return super().imitation(observation, unit, step_mask, loss)
        streams = _streams(observation, self.critic_streams)
        losses = self.model.imitation_loss(streams, self._as_chunks(unit[0]), step_mask=step_mask)
        return {"bc_loss": self._scalar("imitation_loss", "loss", losses, unit.shape[1]).mean().unsqueeze(0)}

    def check_mean(self, algorithm: str) -> None:
        """Raise an error if the model has no mean action, with what a model of one's own may lack."""
        if not self.model.takes_deterministic:
            raise InputError(
                f"policy: {algorithm} trains the most likely action, and {self.model_name}.forward takes no "
                "`deterministic`: add that keyword, or train with iql or sft"
            )
        super().check_mean(algorithm)

    @property
    def described(self) -> str:
        """The name of the model."""
        return self.model_name

    def mean(self, state: Encoded) -> Tensor:
        """The model's most likely action, clipped as by the environment; an error for heads without a mean."""
        if not self.has_mean:
            raise InputError(f"{self.model_name} has no mean action")
        unit = self.model(state.observation, deterministic=True)
        self._check_action(f"the action of {self.model_name}.forward", unit, len(state.observation))
        self._check_gradient("its most likely action", unit)
        return self.executed(unit.flatten(1)).unsqueeze(0)

    def log_prob(self, state: Encoded, unit: Tensor) -> Tensor:
        """Log-density of unit actions by the model's `evaluate_actions`."""
        return self._score(state.observation, unit[0]).unsqueeze(0)

    def imitation_loss(self, state: Encoded, unit: Tensor) -> Tensor:
        """The model's own loss where it has one, else −log π of the real steps."""
        mask = state.step_mask
        if self._has_own_loss:
            known = {} if state.shared_features is None else {"features": state.shared_features}
            losses = self.model.imitation_loss(state.observation, self._as_chunks(unit[0]), step_mask=mask, **known)
            return self._scalar("imitation_loss", "loss", losses, unit.shape[1]).unsqueeze(0)
        if mask is not None and self.model.takes_step_mask:
            return -self._score(state.observation, unit[0], step_mask=mask).unsqueeze(0)
        if mask is not None and not overrides(self.model, "gaussian"):  # a Gaussian's steps are independent
            self._check_steps(state)
        return super().imitation_loss(state, unit)

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
        one = self._sampled_action(state)
        other = one.roll(1, -2)  # actions of other rows, so that nothing more is sampled
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
    def _sampled_action(self, state: Encoded) -> Tensor:
        """Sample an action of the model, before clipping."""
        return self.model(state.observation).flatten(1).unsqueeze(0)

    def sample(self, state: Encoded, count: int = 1) -> tuple[Tensor, Tensor]:
        """Samples as the environment would clip them, with the model's log-density of them before that.

        With the density of the clipped action an entropy bonus would reward samples far outside, where it is small.
        """
        samples, log_prob = self._sample(state, count)
        return self.executed(samples).unsqueeze(1), log_prob.unsqueeze(1)

    def denoise(
        self,
        state: Encoded,
        noise: Tensor,
        action_mask: Tensor | None = None,
        inpainting: Inpainting | None = None,
    ) -> Tensor:
        """Unit actions [B, K · A] that noise leads to."""
        how = {} if inpainting is None else {"inpainting": inpainting}
        unit = self.model.denoise(state.observation, noise, action_mask, state.shared_features, **how)
        self._check_action(f"the action of {self.model_name}.denoise", unit, len(noise))
        return unit.flatten(1)

    def divergence(self, state: Encoded, other: Policy, other_state: Encoded) -> Tensor:
        """log π − log π_other of one sample each, before clipping."""
        samples, log_prob = self._sample(state, 1)
        return log_prob - other.log_prob(other_state, samples)

    def _sample(self, state: Encoded, count: int) -> tuple[Tensor, Tensor]:
        """`count` unit actions per state before clipping, [count, B, K · A], and the model's log-density of them."""
        sampled = self.model.sample_many(state.observation, count)
        samples, log_prob = check_outputs(self.model, "sample_many", 2, sampled)
        self._check_action(f"the action of {self.model_name}", samples.flatten(0, 1), count * len(state.observation))
        self._check_gradient("its samples (`sample` in place of `rsample`?)", samples)
        return samples.flatten(2), log_prob

    def state_value(self, features: Tensor) -> Tensor:
        """V on the critics' features, by the value network or by the model that shares its features."""
        return (self.value(features) if self.encoder is not None else self.model.value_of(features)).squeeze(-1)

    def actor_parameters(self) -> Iterator[nn.Parameter]:
        """The model without the parameters of its V, if it shares features; the optimizer skips frozen ones."""
        values = {id(parameter) for parameter in self._own_value_parameters()} if self.model.shares_features else set()
        yield from (parameter for parameter in self.model.parameters() if id(parameter) not in values)

    def noise_parameters(self) -> Iterator[Tensor]:
        """Those of the model."""
        yield from self.model.noise_parameters()

    def encoder_parameters(self) -> Iterator[nn.Parameter]:
        """The critics' encoder; none where they read the model's features."""
        yield from () if self.encoder is None else self.encoder.parameters()

    def value_parameters(self) -> Iterator[nn.Parameter]:
        """The value network, or the value of the model; that of the privileged streams where it replaces them."""
        yield from self._own_value_parameters() if self.critic is None else self.critic.parameters()

    def _own_value_parameters(self) -> Iterable[nn.Parameter]:
        return self.model.value_parameters() if self.encoder is None else self.value.parameters()

    # -- weights and action scale --------------------------------------------------------------------------------------

    def complete_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights with the policy's own value network where they have none, and without one where it has none.

        A model keeps its action scale, whether V was a part of it or not.
        """
        completed = add_new_parts(self, keep_reward_normalizer(self, self._keep_critic(weights)))
        _complete(self, completed)
        if self.step_dim is None and completed["center"].shape != self.center.shape:
            self.set_scale(torch.zeros_like(completed["center"]), torch.ones_like(completed["width"]))
        own = {name: value for name, value in self.state_dict().items() if name.startswith(VALUE_PARTS)}
        theirs = [name for name in completed if name.startswith(VALUE_PARTS)]
        if bool(own) == bool(theirs) or not any(name.startswith("model.") for name in completed):
            return completed
        if own:
            logger.warning("the model is loaded; V and the encoder of the critics start from new weights")
            return own | completed
        logger.warning("the model is loaded; its own value starts from new weights: V was not a part of it")
        return {name: value for name, value in completed.items() if name not in theirs}

    def to_unit(self, action: Tensor) -> Tensor:
        """Actions, or chunks […, K, A] of them, as unit actions, a chunk in one row […, K · A]."""
        return super().to_unit(action.flatten(-2) if self.chunk_length > 1 else action)

    def check_box(self, space: gymnasium.Space) -> None:
        """Compare the action range with an environment's; a model without a scale acts in the environment's units."""
        if self.has_box or not self.is_unit:
            super().check_box(space)

    def misfit(self, space: gymnasium.Space, weights: Mapping[str, Tensor] | None = None) -> tuple[str, float] | None:
        """Return how the action range differs from a Box."""
        return super().misfit(space, weights) if self.has_box else None

    def executed(self, unit: Tensor) -> Tensor:
        """Unit actions as the environment clips them; without a scale the model's actions have no known bounds."""
        return into_box(unit) if self.has_box or not self.is_unit else unit

    def _as_chunks(self, unit: Tensor) -> Tensor:
        """Unit actions [B, K · A] as the model has them: [B, K, A], or [B, A] without chunks."""
        return unit.unflatten(-1, (self.chunk_length, -1)) if self.chunk_length > 1 else unit

    def _log_widths(self, td: TensorDictBase) -> Tensor:
        """Σ log(half width) over the real dims: from a density of unit actions to one in the environment's units."""
        mask = td.get(schema.ACTION_MASK, None)
        logs = self.width.log().view(self.chunk_length, -1).sum(0)
        return logs.sum() if mask is None else (logs * mask).sum(-1)

    # -- checks of the outputs of the model ----------------------------------------------------------------------------

    def _agree(self, name: str, given: int | None, own: int | None) -> int | None:
        """Return a size that the caller or the model sets; raise an error if they differ."""
        if given is not None and own is not None and given != own:
            raise InputError(f"{name} {given} does not fit VLA model {self.model_name}, built with {name} {own}")
        return own if given is None else given

    def _observations(self, td: TensorDictBase) -> tuple[TensorDictBase, int]:
        observations = td[schema.OBSERVATION]
        if not isinstance(observations, TensorDictBase):
            raise InputError(
                f"VLA model {self.model_name} reads named streams; this environment's observation is one tensor "
                f"{list(observations.shape)}: use an environment with a Dict observation space"
            )
        if td.batch_dims != 1:
            raise InputError(f"VLAPolicy takes a batch [B]; this one is {list(td.batch_size)}: flatten it first")
        return _streams(observations, self.critic_streams), td.batch_size[0]

    def _mask_keyword(self, td: TensorDictBase) -> dict[str, Any]:
        mask = td.get(schema.ACTION_MASK, None)
        if mask is None:
            return {}
        if self.model.takes_action_mask:
            return {"action_mask": mask}
        if not bool(mask.all()):
            raise InputError(
                f"the environment pads its actions, but VLA model {self.model_name} takes no `action_mask`: "
                "the padded dims would enter its log-probs"
            )
        return {}

    def _score(self, observations: TensorDictBase, unit: Tensor, **keywords: Tensor) -> Tensor:
        model: Any = self.model
        scored = model.evaluate_actions(observations, self._as_chunks(unit), **keywords)
        log_prob, _ = check_outputs(model, "evaluate_actions", 2, scored)
        return self._scalar("evaluate_actions", "log_prob", log_prob, len(unit))

    def _check_gradient(self, what: str, unit: Tensor) -> None:
        if torch.is_grad_enabled() and not unit.requires_grad:
            raise InputError(
                f"VLA model {self.model_name} gives no gradient through {what}, which cql, td3-bc and sft with "
                "--loss mse need: let it give one, or train with iql, or with sft and --loss log_prob"
            )

    def _check_action(self, source: str, action: Tensor, batch: int) -> None:
        steps = [self.chunk_length] if self.chunk_length > 1 else []
        self._check_shape(source, action, batch, *steps, self.step_dim or "A")

    def _scalar(self, method: str, name: str, values: Tensor, batch: int) -> Tensor:
        return self._check_shape(f"{name} of {self.model_name}.{method}", values, batch)

    def _value(self, method: str, values: Tensor, batch: int) -> Tensor:
        return self._check_shape(f"value of {self.model_name}.{method}", values, batch, 1).squeeze(1)

    def _check_shape(self, what: str, values: Tensor, *shape: int | str) -> Tensor:
        """Return a tensor of this shape, in which a name stands for any size; raise an error for another shape."""
        sizes = [size if isinstance(wanted, str) else wanted for wanted, size in zip(shape, values.shape, strict=False)]
        if values.ndim != len(shape) or list(values.shape) != sizes:
            wanted = ", ".join(map(str, shape))
            raise InputError(f"{what} has shape {list(values.shape)}; it must have [{wanted}]")
        return values


def _streams(observation: Mapping[str, Tensor] | TensorDictBase, hidden: tuple[str, ...] = ()) -> TensorDictBase:
    """Return the observation as a TensorDict without the hidden streams."""
    if isinstance(observation, TensorDictBase | Tensor):
        return observation.exclude(*hidden) if hidden and isinstance(observation, TensorDictBase) else observation
    rows = {name: stream for name, stream in observation.items() if name not in hidden}
    return TensorDict(rows, [len(next(iter(rows.values())))])


def _complete(policy: VLAPolicy, weights: dict[str, Any], prefix: str = "") -> None:
    """Add the buffers that weights of the previous version lack, in place: scale 1, rewards as they are."""
    add_reward_scale(weights, prefix)
    weights.setdefault(f"{prefix}center", torch.zeros_like(policy.center))
    weights.setdefault(f"{prefix}width", torch.ones_like(policy.width))


def _complete_copies(policy: Any, weights: dict[str, Any], prefix: str, *rest: Any) -> None:
    if any(name.startswith(prefix) for name in weights):
        _complete(policy, weights, prefix)
