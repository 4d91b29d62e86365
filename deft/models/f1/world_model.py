"""Input embeddings and output layer of the generation expert, which predicts the next frame's codes scale by scale.

The first L − 1 condition tokens belong to the block of images and words. The first scale is predicted from the last
condition token. The tokens of each finer scale follow, computed from the sum of the coarser codes' embeddings.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from deft.models.f1.config import F1Config


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
            nn.init.zeros_(self.output.weight)
            nn.init.zeros_(self.output.bias)
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
