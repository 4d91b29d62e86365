"""The policy from scratch: an actor and a critic on vectors, images or dictionaries, with or without memory.

Built from the environment's spaces and `PolicyConfig`; trained by the on-policy algorithms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from deft import schema
from deft.config.settings import PolicyConfig
from deft.models.distributions import action_head
from deft.models.encoders import ObservationEncoder
from deft.models.normalization import RewardNormalizer
from deft.models.policy import Policy
from deft.models.small_actor import MOST_ROWS, SmallActor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "elu": nn.functional.elu,
    "gelu": nn.functional.gelu,
    "silu": nn.functional.silu,
}


class TwinTowers(nn.Module):
    """Two MLPs of the same hidden sizes on the same input, run as one: every hidden layer is one batched matmul.

    Weights are [2, in, out] and the heads' [in, out]: in small networks a transposed weight, or a module's call, costs
    as much as the product itself.
    """

    def __init__(self, in_dim: int, hidden_sizes: tuple[int, ...], out_dims: tuple[int, int], activation: str) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.depth = len(hidden_sizes)
        for layer, (fan_in, fan_out) in enumerate(pairwise((in_dim, *hidden_sizes))):
            weight = torch.stack([nn.init.orthogonal_(torch.empty(fan_in, fan_out), math.sqrt(2)) for _ in range(2)])
            self.register_parameter(f"weight_{layer}", nn.Parameter(weight))
            self.register_parameter(f"bias_{layer}", nn.Parameter(torch.zeros(2, 1, fan_out)))
        # A near-zero last layer of the first tower: as an actor it starts close to its mean action whatever it sees.
        for head, (dim, gain) in enumerate(zip(out_dims, (0.01, 1.0), strict=True)):
            weight = nn.init.orthogonal_(torch.empty((in_dim, *hidden_sizes)[-1], dim), gain)
            self.register_parameter(f"head_weight_{head}", nn.Parameter(weight))
            self.register_parameter(f"head_bias_{head}", nn.Parameter(torch.zeros(dim)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Both towers' outputs, [B, out_dim] each."""
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


class ActorCritic(Policy):
    """π(a | o) and V(o) on shared encoders, with separate towers for the actor and the critic.

    With `memory_hidden` > 0 a GRU stands between the encoder and the towers; its state before the step is
    `schema.MEMORY` [B, layers, hidden], its state after the step `schema.NEXT_MEMORY`.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space,
        action_space: gymnasium.Space,
        config: PolicyConfig | None = None,
    ) -> None:
        super().__init__()
        config = config or PolicyConfig()
        self.chunk_length = config.chunk_length
        self.encoder = ObservationEncoder(observation_space, config.encoder_dim, config.normalize_observation)
        self.head = action_head(action_space, config.log_std_init)
        width = self.encoder.dim
        self.memory: nn.GRU | None = None
        if config.memory_hidden:
            self.recurrent = True
            self.memory = nn.GRU(width, config.memory_hidden, config.memory_num_layers)
            width = config.memory_hidden
        self.towers = TwinTowers(width, tuple(config.hidden_sizes), (self.head.num_outputs, 1), config.activation)
        self.reward_normalizer = RewardNormalizer() if config.normalize_reward else None
        self._activation = config.activation
        self._small_actor: tuple[int, SmallActor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For copies: the small actor reads this policy's memory, not theirs."""
        return {**self.__dict__, "_small_actor": None}

    def initial_memory(self, num_envs: int) -> Tensor | None:
        """Zeros [num_envs, layers, hidden], or None without memory."""
        if self.memory is None:
            return None
        device = next(self.parameters()).device
        return torch.zeros(num_envs, self.memory.num_layers, self.memory.hidden_size, device=device)

    def act(self, td: TensorDictBase, deterministic: bool = False) -> TensorDictBase:
        """Draw an action (its mode when deterministic) and add it with its log-prob and the value."""
        features = self.encoder(td[schema.OBSERVATION])
        if self.memory is not None:
            features, memory = self._remember(features, td[schema.MEMORY])
            td.set(schema.NEXT_MEMORY, memory)
        output, value = self.towers(features)
        action, log_prob = self.head.sample(output, td.get(schema.ACTION_MASK, None), deterministic)
        td.set(schema.ACTION, action)
        td.set(schema.LOG_PROB, log_prob)
        td.set(schema.VALUE, value.squeeze(-1))
        return td

    def act_arrays(self, observation: np.ndarray | dict[str, np.ndarray]) -> dict[str, np.ndarray] | None:
        """Act in numpy, where the network is small, on the CPU and without memory, and the rows are few."""
        if isinstance(observation, dict) or len(observation) > MOST_ROWS or self.memory is not None:
            return None
        parameter: Any = self.towers.head_weight_0
        place = parameter.data_ptr()  # an optimizer or a copy may move the parameters
        if self._small_actor is None or self._small_actor[0] != place:
            if not SmallActor.fits(self.encoder, self.head, self._activation, parameter):
                return None
            vector: Any = self.encoder.streams["observation"]
            actor = SmallActor(vector, self.towers, self.towers.depth, self.head, self._activation)
            self._small_actor = (place, actor)
        return self._small_actor[1].act(observation)

    def evaluate_actions(self, td: TensorDictBase) -> dict[str, Tensor]:
        """Score stored actions; with memory `td` is [T, B] and the GRU runs from the first row's memory."""
        features = self.encoder(td[schema.OBSERVATION])
        if self.memory is None:
            output, value = self.towers(features)
        else:
            features = self._unroll(features, td)
            outputs = self.towers(features.flatten(0, 1))
            output, value = (part.unflatten(0, features.shape[:2]) for part in outputs)
        action, mask = td[schema.ACTION], td.get(schema.ACTION_MASK, None)
        log_prob, entropy = self.head.score(output, action, mask)
        scored = {"log_prob": log_prob, "entropy": entropy, "value": value.squeeze(-1)}
        if self.reports_tokens:
            scored["token_log_prob"] = self.head.token_log_prob(output, action, mask)
        return scored

    def get_value(self, td: TensorDictBase) -> Tensor:
        """V(observation) [B], from the memory before it."""
        features = self.encoder(td[schema.OBSERVATION])
        if self.memory is not None:
            features, _ = self._remember(features, td[schema.MEMORY])
        return self.towers(features)[1].squeeze(-1)

    def value_only_parameters(self) -> Iterator[nn.Parameter]:
        """Both towers: the value's gradient is 0 in the actor's. The encoder and the memory are shared."""
        return self.towers.parameters()

    def observe(self, td: TensorDictBase) -> None:
        """Take a rollout's observations into the normalisation."""
        self.encoder.observe(td[schema.OBSERVATION])

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
