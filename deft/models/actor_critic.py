"""The policy from scratch: an actor and a critic on vectors, images or dictionaries, with or without memory.

Built from the environment's spaces and `PolicyConfig`; trained by the on-policy algorithms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import gymnasium
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from deft import schema
from deft.config.settings import PolicyConfig
from deft.models.distributions import action_head
from deft.models.encoders import ObservationEncoder
from deft.models.normalization import RewardNormalizer
from deft.models.policy import Policy

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "elu": nn.functional.elu,
    "gelu": nn.functional.gelu,
    "silu": nn.functional.silu,
}


class TwinTowers(nn.Module):
    """Two MLPs of the same hidden sizes on the same input, run as one: every hidden layer is one batched matmul."""

    def __init__(self, in_dim: int, hidden_sizes: tuple[int, ...], out_dims: tuple[int, int], activation: str) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        widths = [in_dim, *hidden_sizes]
        self.weights = nn.ParameterList([torch.empty(2, i, o) for i, o in pairwise(widths)])
        self.biases = nn.ParameterList([torch.zeros(2, 1, width) for width in hidden_sizes])
        for weight in self.weights:
            for tower in range(2):
                nn.init.orthogonal_(weight[tower], math.sqrt(2))
        self.heads = nn.ModuleList([nn.Linear(widths[-1], dim) for dim in out_dims])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Both towers' outputs, [B, out_dim] each."""
        hidden = x.expand(2, *x.shape)
        for weight, bias in zip(self.weights, self.biases, strict=True):
            hidden = self.activation(torch.baddbmm(bias, hidden, weight))
        return self.heads[0](hidden[0]), self.heads[1](hidden[1])


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
        # A near-zero last layer: the first policy is close to its mean action whatever it sees.
        for layer, gain in zip(self.towers.heads, (0.01, 1.0), strict=True):
            assert isinstance(layer, nn.Linear)
            nn.init.orthogonal_(layer.weight, gain)
            nn.init.zeros_(layer.bias)
        self.reward_normalizer = RewardNormalizer() if config.normalize_reward else None

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

    def evaluate_actions(self, td: TensorDictBase) -> dict[str, Tensor]:
        """Score stored actions; with memory `td` is [T, B] and the GRU runs from the first row's memory."""
        features = self.encoder(td[schema.OBSERVATION])
        batch = features.shape[:-1]
        if self.memory is not None:
            features = self._unroll(features, td)
        output, value = self.towers(features.reshape(-1, features.shape[-1]))
        output, value = output.reshape(*batch, -1), value.reshape(batch)
        log_prob, entropy = self.head.score(output, td[schema.ACTION], td.get(schema.ACTION_MASK, None))
        return {"log_prob": log_prob, "entropy": entropy, "value": value}

    def get_value(self, td: TensorDictBase) -> Tensor:
        """V(observation) [B], from the memory before it."""
        features = self.encoder(td[schema.OBSERVATION])
        if self.memory is not None:
            features, _ = self._remember(features, td[schema.MEMORY])
        return self.towers(features)[1].squeeze(-1)

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
