"""Input and output layers of the generation expert, which predicts the next frame, and of the action expert.

The frame's codes are predicted scale by scale. The first L − 1 condition tokens belong to the block of images and
words. The first scale is predicted from the last condition token. The tokens of each finer scale follow, computed from
the sum of the coarser codes' embeddings.

Actions are predicted by flow matching (`deft.models.flow_chain`): x_t = t·ε + (1 − t)·a runs from the actions (t = 0)
to noise (t = 1); the expert learns its velocity ε − a.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from deft.models.f1.config import F1Config

SHORTEST_PERIOD, LONGEST_PERIOD = 4e-3, 4.0


class WorldModelHead(nn.Module):
    """Embeddings and output layer of the generation expert."""

    level: Tensor
    mask_embedding: Tensor

    def __init__(self, config: F1Config) -> None:
        super().__init__()
        length, code_dim, width = config.num_tokens, config.tokenizer.code_dim, config.generation.hidden_size
        self.num_tokens = length
        self.num_frames = config.n_obs_img_steps
        # [B·(L−1), D, T] → one frame: the history compressed over time
        self.temporal = nn.Conv1d(code_dim, code_dim, self.num_frames, self.num_frames)
        self.history_positions = nn.Parameter(torch.empty(1, length - 1, code_dim))
        self.embedding = nn.Linear(code_dim, width)
        self.start = nn.Parameter(torch.empty(1, 1, width))
        self.condition_positions = nn.Parameter(torch.empty(1, length, width))
        self.output_positions = nn.Parameter(torch.empty(1, length, width))
        levels = [level for level, side in enumerate(config.tokenizer.scales) for _ in range(side * side)]
        self.register_buffer("level", torch.tensor([levels]))
        self.level_embedding = nn.Embedding(len(config.tokenizer.scales), width)
        self.register_buffer("mask_embedding", torch.empty(1, 1, code_dim))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, config.tokenizer.codebook_size)
        if config.motion_prior:  # a new model predicts the prior's logits; random output weights would dominate them
            for parameter in self.output.parameters():
                nn.init.zeros_(parameter)
        deviation = math.sqrt(1 / width / 3)
        for tensor in (self.history_positions, self.start, self.condition_positions, self.output_positions):
            nn.init.trunc_normal_(tensor, std=deviation)
        nn.init.trunc_normal_(self.level_embedding.weight, std=deviation)
        nn.init.trunc_normal_(self.mask_embedding, std=deviation)

    def compress(self, history: Tensor) -> Tensor:
        """Compress the embeddings of T frames [B, T, L − 1, D] to one frame with position embeddings: [B, L − 1, D]."""
        batch, frames, tokens, dim = history.shape
        moved = history.permute(0, 2, 3, 1).reshape(batch * tokens, dim, frames)
        return self.temporal(moved).reshape(batch, tokens, dim) + self.history_positions

    def condition(self, compressed: Tensor) -> Tensor:
        """Return the condition tokens [B, L, C]: a start token, then the history, without output positions."""
        start = self.start.expand(compressed.shape[0], -1, -1)
        return torch.cat([start, self.embedding(compressed)], 1) + self.condition_positions

    def position_embeddings(self, first: int, last: int) -> Tensor:
        """Return the position and level embeddings of the predicted tokens first … last − 1, [1, n, C]."""
        return self.output_positions[:, first:last] + self.level_embedding(self.level[:, first:last])

    def logits(self, output: Tensor) -> Tensor:
        """[B, n, C] of the expert → [B, n, codes], in float32."""
        return self.output(self.norm(output.float()))


def choose(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Sample a code for each token of [B, n, K] by top-k (0: all codes) and nucleus sampling (`top_p`)."""
    if top_k == 1:
        return logits.argmax(-1)
    if 0 < top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k, -1).values[..., -1:], -torch.inf)
    if top_p < 1.0:
        ordered, order = logits.sort(-1, descending=True)
        probabilities = ordered.softmax(-1)
        # Drop codes after top_p is reached; the most likely code always stays.
        dropped = probabilities.cumsum(-1) - probabilities >= top_p
        logits = logits.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)
    probabilities = logits.softmax(-1)
    return torch.multinomial(probabilities.flatten(0, 1), 1).view(logits.shape[:-1])


class ActionConditioning(nn.Module):
    """[a_{t-3} … a_t] and s_t as one vector of the generation expert's width; exactly 0 before training."""

    def __init__(self, config: F1Config) -> None:
        super().__init__()
        width = config.generation.hidden_size
        inputs = config.n_obs_img_steps * config.max_action_dim + 1 + config.max_state_dim
        self.hidden = nn.Linear(inputs, width)
        self.output = nn.Linear(width, width)
        if config.condition_init:
            nn.init.normal_(self.output.weight, std=config.condition_init)
        else:
            nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, actions: Tensor, known: Tensor, state: Tensor) -> Tensor:
        """actions [B, H, A], known bool [B] (whether a_t is known), state [B, S] → [B, 1, C]."""
        return self.output(functional.silu(self.hidden(robot_features(actions, known, state))))[:, None]


def robot_features(actions: Tensor, known: Tensor, state: Tensor) -> Tensor:
    """Concatenate the actions (a_t is zero if unknown), the `known` flag and the state: [B, H·A + 1 + S]."""
    flag = known[:, None].to(actions.dtype)
    return torch.cat([actions[:, :-1].flatten(1), actions[:, -1] * flag, flag, state], -1)


class ActionHead(nn.Module):
    """Embeds the state and noisy actions, and projects the expert's output to the velocity."""

    def __init__(self, config: F1Config) -> None:
        super().__init__()
        width = config.action.hidden_size
        self.state_proj = nn.Linear(config.max_state_dim, width)
        self.action_in_proj = nn.Linear(config.max_action_dim, width)
        self.action_time_mlp_in = nn.Linear(2 * width, width)
        self.action_time_mlp_out = nn.Linear(width, width)
        self.action_out_proj = nn.Linear(width, config.max_action_dim)

    def embed(self, state: Tensor, noisy: Tensor, time: Tensor) -> Tensor:
        """Return tokens [B, 1 + K, C] from state [B, S], noisy actions [B, K, A] and time [B]."""
        actions = self.action_in_proj(noisy)
        times = time_embedding(time, actions.shape[-1])[:, None].expand_as(actions)
        hidden = functional.silu(self.action_time_mlp_in(torch.cat([actions, times], -1)))
        return torch.cat([self.state_proj(state)[:, None], self.action_time_mlp_out(hidden)], 1)

    def velocity(self, output: Tensor) -> Tensor:
        """[B, K, C] of the expert → ε − a, [B, K, A]."""
        return self.action_out_proj(output.float())


def time_embedding(time: Tensor, size: int) -> Tensor:
    """sin and cos of time [B] at periods from 0.004 to 4, in float64 as published: [B, size]."""
    fraction = torch.linspace(0.0, 1.0, size // 2, dtype=torch.float64, device=time.device)
    period = SHORTEST_PERIOD * (LONGEST_PERIOD / SHORTEST_PERIOD) ** fraction
    angle = 2 * math.pi / period * time[:, None]
    return torch.cat([angle.sin(), angle.cos()], 1).float()


def sample_time(batch: int, device: torch.device) -> Tensor:
    """t ~ 0.999 · Beta(1.5, 1) + 0.001. Its distribution function is t^1.5, so t = u^(2/3)."""
    return 0.999 * torch.rand(batch, device=device) ** (2 / 3) + 0.001
