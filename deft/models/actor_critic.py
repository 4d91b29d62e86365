"""The policy from scratch: networks on vectors, images or dictionaries, with or without memory, and an action head.

Built from the spaces and `PolicyConfig`; every algorithm trains it. `name: actor_critic` builds PPO's networks,
`name: actor` those of SAC and the offline algorithms, also for several members (seeds) at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from deft import schema
from deft.config.settings import PolicyConfig
from deft.errors import InputError
from deft.models.denoising import DENOISING_CHUNKS, Denoising, DenoisingHead, add_new_parts
from deft.models.distributions import (
    HALF_LOG_2PI,
    ActionHead,
    BoundedGaussianHead,
    BoxHead,
    CategoricalHead,
    GaussianHead,
    TanhGaussianHead,
    action_head,
)  # fmt: skip
from deft.models.encoders import ObservationEncoder, VectorEncoder, make_encoder
from deft.models.inpainting import Inpainting
from deft.models.legacy_weights import keep_reward_normalizer, translate
from deft.models.mlp import BatchedMLP
from deft.models.normalization import RewardNormalizer
from deft.models.policy import SAMPLED_NOISE, Encoded, Policy

MOST_ROWS = 16  # environments up to which `SmallActor` acts; with more torch is as fast
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "elu": nn.functional.elu,
    "gelu": nn.functional.gelu,
    "silu": nn.functional.silu,
}
NUMPY_ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0.0),
}


class TwinMLP(nn.Module):
    """An actor and a value MLP of the same hidden sizes on the same input: each hidden layer is one batched matmul.

    Weights are [2, in, out], those of the last layers [in, out]. In small networks a transposed weight or a module
    call costs as much as the product itself.
    """

    def __init__(self, in_dim: int, hidden_sizes: tuple[int, ...], out_dims: tuple[int, int], activation: str) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.depth = len(hidden_sizes)
        for layer, (fan_in, fan_out) in enumerate(pairwise((in_dim, *hidden_sizes))):
            weight = torch.stack([nn.init.orthogonal_(torch.empty(fan_in, fan_out), math.sqrt(2)) for _ in range(2)])
            self.register_parameter(f"weight_{layer}", nn.Parameter(weight))
            self.register_parameter(f"bias_{layer}", nn.Parameter(torch.zeros(2, 1, fan_out)))
        # A near-zero last layer of the actor: at first the action hardly depends on the observation.
        for head, (dim, gain) in enumerate(zip(out_dims, (0.01, 1.0), strict=True)):
            weight = nn.init.orthogonal_(torch.empty((in_dim, *hidden_sizes)[-1], dim), gain)
            self.register_parameter(f"head_weight_{head}", nn.Parameter(weight))
            self.register_parameter(f"head_bias_{head}", nn.Parameter(torch.zeros(dim)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs of the actor and of the value network, [B, out_dim] each."""
        parameters = self._parameters  # attribute access on a module is slow enough to show
        hidden = x.expand(2, *x.shape)
        for layer in range(self.depth):
            weight, bias = parameters[f"weight_{layer}"], parameters[f"bias_{layer}"]
            hidden = self.activation(torch.baddbmm(bias, hidden, weight))  # type: ignore[arg-type]
        first, second = hidden.unbind(0)
        return (
            torch.addmm(parameters["head_bias_0"], first, parameters["head_weight_0"]),  # type: ignore[arg-type]
            torch.addmm(parameters["head_bias_1"], second, parameters["head_weight_1"]),  # type: ignore[arg-type]
        )

    def single(self, x: Tensor, index: int) -> Tensor:
        """The output of the actor (0) or the value network (1) alone, [B, out_dim]."""
        parameters: Any = self._parameters
        for layer in range(self.depth):
            x = self.activation(
                torch.addmm(parameters[f"bias_{layer}"][index], x, parameters[f"weight_{layer}"][index])
            )
        return torch.addmm(parameters[f"head_bias_{index}"], x, parameters[f"head_weight_{index}"])


class SmallActor:
    """The arithmetic of `ActorCritic.act` in numpy, without the overhead of torch calls.

    One observation through a 64-64 network costs about ten microseconds of arithmetic and several hundred of dispatch.
    It reads the policy's parameters in place, so it acts with the current weights. It samples from `np.random`.
    """

    def __init__(
        self, encoder: VectorEncoder, towers: nn.Module, depth: int, head: ActionHead, activation: str
    ) -> None:
        parameters = {name: parameter.detach().numpy() for name, parameter in towers.named_parameters()}
        weights = [parameters[f"weight_{layer}"] for layer in range(depth)]
        biases = [parameters[f"bias_{layer}"][:, 0] for layer in range(depth)]
        self._towers = [
            (
                [(weight[tower], bias[tower]) for weight, bias in zip(weights, biases, strict=True)],
                parameters[f"head_weight_{tower}"],
                parameters[f"head_bias_{tower}"],
            )
            for tower in range(2)
        ]
        self._activation = NUMPY_ACTIVATIONS[activation]
        normalizer = encoder.normalizer
        self._normalization = None
        if normalizer is not None:
            self._normalization = (normalizer.scale.numpy(), normalizer.shift.numpy(), normalizer.clip)
        self._sample: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
        if isinstance(head, GaussianHead):
            self._log_std, self._center, self._width = (
                tensor.detach().numpy() for tensor in (head.log_std, head.center, head.width)
            )
            self._log_width = 0.0 if head.is_unit else float(np.log(self._width).sum())
            self._unit, self._shape = head.is_unit, head.action_shape
            self._sample = self._sample_gaussian
        else:
            self._sample = self._sample_categorical

    @staticmethod
    def fits(encoder: ObservationEncoder, head: ActionHead, activation: str, parameter: Tensor) -> bool:
        """Whether a policy of these parts is supported: one input vector, tanh or relu, on the CPU."""
        only = next(iter(encoder.streams.values()))
        simple_head = isinstance(head, GaussianHead) or (isinstance(head, CategoricalHead) and head.scalar)
        return (
            encoder.is_single
            and isinstance(only, VectorEncoder)
            and simple_head
            and activation in NUMPY_ACTIVATIONS
            and parameter.is_cpu
        )

    def act(self, observation: np.ndarray) -> dict[str, np.ndarray]:
        """Action, log-prob and value of each row."""
        x = observation if observation.dtype == np.float32 else observation.astype(np.float32)
        if x.ndim > 2:
            x = x.reshape(len(x), -1)
        if self._normalization is not None:
            scale, shift, clip = self._normalization
            x = np.minimum(np.maximum(x * scale + shift, -clip), clip)
        outputs = []
        for hidden_layers, head_weight, head_bias in self._towers:
            hidden = x
            for weight, bias in hidden_layers:
                hidden = self._activation(hidden @ weight + bias)
            outputs.append(hidden @ head_weight + head_bias)
        action, log_prob = self._sample(outputs[0])
        return {schema.ACTION: action, schema.LOG_PROB: log_prob, schema.VALUE: outputs[1][:, 0]}

    def _sample_gaussian(self, mean: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        noise = np.random.standard_normal(mean.shape).astype(np.float32)
        unit = mean + noise * np.exp(self._log_std)
        constant = self._log_std.sum() + (self._log_width + mean.shape[-1] * HALF_LOG_2PI)
        log_prob = -0.5 * np.einsum("ij,ij->i", noise, noise) - np.float32(constant)
        action = unit if self._unit else self._center + unit * self._width
        return action if len(self._shape) == 1 else action.reshape(len(action), *self._shape), log_prob

    def _sample_categorical(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Gumbel-max, as in `CategoricalHead`."""
        shifted = logits - logits.max(-1, keepdims=True)
        log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        noise = np.random.standard_exponential(log_p.shape).astype(np.float32)
        choice = (log_p - np.log(noise)).argmax(-1)
        return choice, log_p[np.arange(len(choice)), choice]


class ActorCritic(Policy):
    """π(a | o) and V(o) on a shared encoder, with separate networks for the actor and the value.

    With `memory_hidden` > 0 a GRU follows the encoder; its state before the step is `schema.MEMORY`
    [B, layers, hidden], its state after the step `schema.NEXT_MEMORY`.
    """

    acts_on_features = True
    capturable = True

    def __init__(
        self,
        observation_space: gymnasium.Space,
        action_space: gymnasium.Space,
        config: PolicyConfig | None = None,
        num_members: int = 1,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.policy_config = config = config or PolicyConfig()
        self.num_members = num_members
        public = self._add_critic(observation_space, config)
        assert public is not None
        self._spaces = (public, action_space)
        if self.critic_streams and isinstance(public, gymnasium.spaces.Dict):
            self.streams = frozenset(public)
        self.chunk_length = config.chunk_length
        self.hidden_sizes = (config.hidden_dim,) * config.num_layers
        self.towers: TwinMLP | None = None
        self.memory: nn.GRU | None = None
        if config.name == "actor":
            self._build_separate(num_members, dtype)
        else:
            self._build_twin()
        if num_members > 1 and (self.towers is not None or any(True for _ in self.encoder.parameters())):
            raise InputError("num_seeds: several seeds at once need vector observations and policy name 'actor'")
        self.feature_dim = self.encoder.dim
        self.register_buffer("reward_scale", torch.ones(()))
        self.reward_normalizer = RewardNormalizer() if config.normalize_reward else None
        if isinstance(self.head, BoxHead):
            self.head.chunk_length = config.chunk_length
        self.is_continuous = isinstance(self.head, BoxHead) and self.memory is None
        self.noise_shape = self.head.noise_shape
        self.can_inpaint = self.noise_shape is not None
        self.has_samples = self.noise_shape is None
        self.has_mean = self.can_reparameterize = self.is_continuous and self.has_samples
        self.action_dim = getattr(self.head, "action_dim", None)
        self._small_actor: tuple[int, SmallActor] | None = None
        self.register_load_state_dict_pre_hook(_translate_weights)

    def _build_twin(self) -> None:
        """PPO's networks: orthogonal weights, actor and value in one batched matmul."""
        config = self.policy_config
        assert config is not None
        if config.distribution in DENOISING_CHUNKS:
            raise InputError(
                f"distribution: PPO and GRPO create Gaussian policies; a {config.distribution} policy must come from "
                "another run: give it as model_path (deft train sft makes one), or remove distribution"
            )
        self.encoder = ObservationEncoder(self._spaces[0], config.encoder_dim, config.normalize_observation)
        self.head: ActionHead = action_head(self._spaces[1], config.log_std_init)
        width = self.encoder.dim
        if config.memory_hidden:
            self.recurrent = True
            self.memory = nn.GRU(width, config.memory_hidden, config.memory_num_layers)
            width = config.memory_hidden
        self.towers = TwinMLP(width, tuple(config.hidden_sizes), (self.head.num_outputs, 1), config.activation)

    def _build_separate(self, num_members: int, dtype: torch.dtype) -> None:
        """The networks of SAC and the offline algorithms, which train actor and value by different optimizers."""
        config, (observation_space, action_space) = self.policy_config, self._spaces
        assert config is not None
        if config.distribution == "tanh_gaussian":
            self.head = TanhGaussianHead(action_space)
        elif config.distribution in DENOISING_CHUNKS:
            self.head = self._denoising_head(num_members)
        else:
            self.head = BoundedGaussianHead(action_space, config.log_std_init, num_members)
        self.encoder = make_encoder(observation_space, config)
        self.actor = BatchedMLP(num_members, self.encoder.dim, self.hidden_sizes, self.head.num_outputs, dtype=dtype)
        self.value = BatchedMLP(num_members, self.encoder.dim, self.hidden_sizes, 1, dtype=dtype)

    def _denoising_head(self, num_members: int) -> DenoisingHead:
        """A flow on features of the actor network, which is as wide as its hidden layers."""
        config, space = self.policy_config, self._spaces[1]
        assert config is not None
        if num_members > 1:
            raise InputError(f"num_seeds: distribution '{config.distribution}' is trained one seed at a time; use 1")
        length, kind = config.chunk_length, config.distribution or ""
        size = int(np.prod(space.shape or ())) // length
        chunks = DENOISING_CHUNKS[kind](config.hidden_dim, length, size, Denoising.of(config))
        return DenoisingHead(space, chunks, config.hidden_dim)

    def __getstate__(self) -> dict[str, Any]:
        """For copies: the small actor reads this policy's parameters, not theirs."""
        return {**self.__dict__, "_small_actor": None}

    # -- for collectors and on-policy algorithms -----------------------------------------------------------------------

    def initial_memory(self, num_envs: int) -> Tensor | None:
        """Zeros [num_envs, layers, hidden], or None without memory."""
        if self.memory is None:
            return None
        device = next(self.parameters()).device
        return torch.zeros(num_envs, self.memory.num_layers, self.memory.hidden_size, device=device)

    def act(self, td: TensorDictBase, deterministic: bool = False) -> TensorDictBase:
        """Sample an action (its mode when deterministic) and add it with its log-prob and the value."""
        features = self.encoder(td[schema.OBSERVATION])
        if self.memory is not None:
            features, memory = self._remember(features, td[schema.MEMORY])
            td.set(schema.NEXT_MEMORY, memory)
        output, value = self._outputs(features)
        action, log_prob, sample = self.head.act(output, td.get(schema.ACTION_MASK, None), deterministic)
        td.set(schema.ACTION, action)
        td.set(schema.LOG_PROB, log_prob)
        self._set_value(td, value.squeeze(-1))
        if sample is not None:
            td.set(schema.SAMPLE, sample)
        return td

    def action_selection(self, deterministic: bool) -> str:
        """A flow samples the noise that it starts from."""
        return (
            SAMPLED_NOISE if deterministic and self.noise_shape is not None else super().action_selection(deterministic)
        )

    def act_arrays(self, observation: np.ndarray | dict[str, np.ndarray]) -> dict[str, np.ndarray] | None:
        """Act in numpy, where the network is small, on the CPU and without memory, and the rows are few."""
        if isinstance(observation, dict) or len(observation) > MOST_ROWS:
            return None
        if self.memory is not None or self.towers is None:
            return None
        assert self.policy_config is not None
        parameter: Any = self.towers.head_weight_0
        address = parameter.data_ptr()  # an optimizer or a copy may move the parameters
        if self._small_actor is None or self._small_actor[0] != address:
            if not SmallActor.fits(self.encoder, self.head, self.policy_config.activation, parameter):
                return None
            vector: Any = self.encoder.streams["observation"]
            actor = SmallActor(vector, self.towers, self.towers.depth, self.head, self.policy_config.activation)
            self._small_actor = (address, actor)
        return self._small_actor[1].act(observation)

    def evaluate_actions(self, td: TensorDictBase) -> dict[str, Tensor]:
        """Score stored actions; with memory `td` is [T, B] and the GRU runs from the first row's memory."""
        features = self.encoder(td[schema.OBSERVATION])
        if self.memory is None:
            output, value = self._outputs(features)
        else:
            features = self._unroll(features, td)
            outputs = self._outputs(features.flatten(0, 1))
            output, value = (part.unflatten(0, features.shape[:2]) for part in outputs)
        action, mask = td[schema.ACTION], td.get(schema.ACTION_MASK, None)
        sample = td.get(schema.SAMPLE, None)
        log_prob, entropy = self.head.score(output, action, mask, sample)
        value = self._privileged_value(td) if self.critic_streams else value.squeeze(-1)
        scored = {"log_prob": log_prob, "entropy": entropy, "value": value}
        if self.reparameterizes:
            unit = self.to_unit(action)
            mean, _ = self._box_head.gaussian(output)
            scored["reparameterized"] = self.executed(unit + (mean - mean.detach()))
        if self.reports_tokens and (tokens := self.head.token_log_prob(output, action, mask, sample)) is not None:
            scored["token_log_prob"] = tokens
        return scored

    def get_value(self, td: TensorDictBase) -> Tensor:
        """V(observation) [B], from the memory before it."""
        if self.critic_streams:
            return self._privileged_value(td)
        features = self.encoder(td[schema.OBSERVATION])
        if self.memory is not None:
            features, _ = self._remember(features, td[schema.MEMORY])
        if self.towers is None:
            return self.state_value(features.unsqueeze(0))[0]
        return self.towers(features)[1].squeeze(-1)

    def value_only_parameters(self) -> Iterator[nn.Parameter]:
        """The value network; a `TwinMLP` as a whole, since the value's gradient is 0 in its actor."""
        if self.critic is not None:
            return self.critic.parameters()
        return self.value.parameters() if self.towers is None else self.towers.parameters()

    def observe(self, td: TensorDictBase | Mapping[str, Any]) -> None:
        """Update the observation normalisation."""
        self.observe_value(td)
        self.encoder.observe(td[schema.OBSERVATION])

    # -- for off-policy, offline and supervised algorithms -------------------------------------------------------------

    @property
    def center(self) -> Tensor:
        """Centre of the action range."""
        return self._box_head.center

    @property
    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """The smallest and the largest action."""
        return self._box_head.bounds

    def to_unit(self, action: Tensor) -> Tensor:
        """Actions in the environment's units as unit actions, a chunk in one row […, K · A]."""
        return self._box_head.to_unit(action.flatten(-2) if self.chunk_length > 1 else action)

    def executed(self, unit: Tensor) -> Tensor:
        """Unit actions as the environment clips them."""
        return self._box_head.executed(unit)

    def from_unit(self, unit: Tensor) -> Tensor:
        """Unit actions as actions in the environment's units."""
        return self._box_head.from_unit(unit)

    def check_box(self, space: gymnasium.Space) -> None:
        """Compare the action range with an environment's."""
        if isinstance(self.head, BoxHead) and self.towers is None:
            self.head.check_box(space)

    def misfit(self, space: gymnasium.Space, weights: Mapping[str, Tensor] | None = None) -> tuple[str, float] | None:
        """Return how the action range differs from a Box."""
        if not isinstance(self.head, BoxHead) or self.towers is not None:
            return None
        if weights is not None:
            weights = {name: self.complete_weights(weights)[f"head.{name}"] for name in ("center", "width")}
        return self.head.misfit(space, weights)

    def encode(self, observation: Any, object_positions: Tensor | None = None) -> Encoded:
        """Features [members, B, F] of [B, …] (one member) or [members, B, …]."""
        features = self.encoder(observation)
        features = features if features.ndim == 3 else features.unsqueeze(0)
        return Encoded(observation, features, privileged=self._privileged_features(observation))

    def with_output(self, state: Encoded) -> Encoded:
        """Add the output of the actor network."""
        return state._replace(output=self._actor_output(state))

    def mean(self, state: Encoded) -> Tensor:
        """The most likely unit action."""
        return self._box_head.mean(self._actor_output(state))

    def log_prob(self, state: Encoded, unit: Tensor) -> Tensor:
        """Log-density of unit actions."""
        return self._box_head.log_prob(self._actor_output(state), unit)

    def sample(self, state: Encoded, count: int = 1) -> tuple[Tensor, Tensor]:
        """`count` unit actions per state from one pass through the network, and their log-densities."""
        return self._box_head.rsample(self._actor_output(state), count)

    def denoise(
        self,
        state: Encoded,
        noise: Tensor,
        action_mask: Tensor | None = None,
        inpainting: Inpainting | None = None,
    ) -> Tensor:
        """Unit actions [B, K · A] that noise [B, K, A] leads to; padded dims are 0."""
        inpainting = None if inpainting is None else inpainting.masked(action_mask)
        unit = self._box_head.denoise(self._actor_output(state)[0], noise, inpainting)
        return unit if action_mask is None else unit.masked_fill(~action_mask.tile(self.chunk_length), 0.0)

    def imitation_loss(self, state: Encoded, unit: Tensor) -> Tensor:
        """That of the head: −log π, or the loss of a flow."""
        if self.noise_shape is None:
            return super().imitation_loss(state, unit)
        return self._box_head.imitation_loss(self._actor_output(state), unit, state.step_mask)

    def divergence(self, state: Encoded, other: Policy, other_state: Encoded) -> Tensor:
        """Exact between two heads of one kind, else estimated."""
        if not isinstance(other, ActorCritic) or type(other.head) is not type(self.head):
            return super().divergence(state, other, other_state)
        return self._box_head.divergence(self._actor_output(state), other._box_head, other._actor_output(other_state))

    def state_value(self, features: Tensor) -> Tensor:
        """V by the value network."""
        if self.towers is None:
            return self.value(features).squeeze(-1)
        return self.towers.single(features[0], 1).squeeze(-1).unsqueeze(0)

    def actor_parameters(self) -> Iterator[nn.Parameter]:
        """The actor network and the deviation of a Gaussian; a `TwinMLP` as a whole, which holds V too."""
        yield from self.actor.parameters() if self.towers is None else self.towers.parameters()
        yield from self.head.parameters()

    def encoder_parameters(self) -> Iterator[nn.Parameter]:
        """The encoder, where it learns."""
        yield from self.encoder.parameters()

    def noise_parameters(self) -> Iterator[Tensor]:
        """The deviation of a Gaussian head."""
        yield from self.head.noise_parameters()

    def value_parameters(self) -> Iterator[nn.Parameter]:
        """The value network; none of a `TwinMLP`."""
        if self.critic is not None:
            yield from self.critic.parameters()
        else:
            yield from self.value.parameters() if self.towers is None else ()

    @torch.no_grad()
    def member(self, index: int) -> ActorCritic:
        """One member as a policy of its own, with a copy of its weights; itself where it is alone.

        It acts, and has no value of privileged streams.
        """
        if self.num_members == 1:
            return self
        alone = ActorCritic(*self._spaces, self.policy_config, dtype=self.actor.dtype).to(self.center.device)
        stacked = {name for name, _ in self.named_parameters()}
        weights = {
            name: value[index : index + 1] if name in stacked else value for name, value in self.state_dict().items()
        }
        alone.load_state_dict(alone._keep_critic(weights))
        return alone

    # -- weights -------------------------------------------------------------------------------------------------------

    def complete_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Translate weights of the previous version."""
        completed = keep_reward_normalizer(self, self._keep_critic(weights))
        translate(completed)
        completed = add_new_parts(self, completed)
        return completed

    # -- networks ------------------------------------------------------------------------------------------------------

    @property
    def _box_head(self) -> BoxHead:
        if not isinstance(self.head, BoxHead):
            raise self._not_continuous()
        return self.head

    def _outputs(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs of the actor and of the value network for features [B, F]."""
        if self.towers is not None:
            return self.towers(features)
        if self.num_members > 1:
            raise InputError(f"a policy of {self.num_members} members does not act itself: use member(i)")
        features = features.unsqueeze(0)
        return self.actor(features)[0], self.value(features)[0]

    def _actor_output(self, state: Encoded) -> Tensor:
        """Output of the actor network, [members, B, O].

        The gradient reaches the encoder. An algorithm whose critics train the encoder passes detached features.
        """
        if state.output is not None:
            return state.output
        if self.towers is None:
            return self.actor(state.features)
        return self.towers.single(state.features[0], 0).unsqueeze(0)

    def _remember(self, features: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor]:
        """One GRU step: features [B, F] and memory [B, layers, hidden] → features and next memory."""
        if memory is None:
            raise ValueError("memory cannot be None: it is zeros at an episode's first step")
        assert self.memory is not None
        output, state = self.memory(features.unsqueeze(0), memory.transpose(0, 1).contiguous())
        return output[0], state.transpose(0, 1)

    def _unroll(self, features: Tensor, td: TensorDictBase) -> Tensor:
        """Features [T, B, F] through the GRU; where an episode ended in between, the memory restarts at zeros."""
        memory = td[schema.MEMORY][0]
        done = td[schema.NEXT_TERMINATED] | td[schema.NEXT_TRUNCATED]
        outputs = []
        for t in range(features.shape[0]):
            if t > 0:
                memory = memory * (~done[t - 1]).to(memory.dtype)[:, None, None]
            output, memory = self._remember(features[t], memory)
            outputs.append(output)
        return torch.stack(outputs)


def _translate_weights(_: nn.Module, weights: dict[str, Any], prefix: str, *rest: Any) -> None:
    translate(weights, prefix)
