"""Predict the features of the next images from those of the current ones and the actions between them.

Used by `deft train vision` alone: what it learns is in the camera encoders, and no policy keeps these layers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

EMBEDDING_DIM = 64
WIDTH = 256
TEMPERATURE = 0.1  # initial; learned
NO_ALTERNATIVE = -1e4  # score of an instruction with the same words as the right one: its probability is 0


class FramePredictor(nn.Module):
    """An action-conditioned world model of image features, trained to recognise the true next image (InfoNCE).

    For each camera c:  u = P_c(φ(o_t), a_t … a_{t+K−1}),  v = T_c(φ_c(o_{t+K})), both of length 1. The logit of image j
    of the batch after observation i is  u_i · v_j / τ. The scores of candidate instructions are scaled by a learned
    factor.
    """

    def __init__(self, num_cameras: int, feature_dim: int, action_dim: int) -> None:
        super().__init__()
        self.num_cameras = num_cameras
        self.predict = nn.Sequential(
            nn.Linear(num_cameras * feature_dim + action_dim, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU(),
            nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, num_cameras * EMBEDDING_DIM),
        )  # fmt: skip
        self.targets = nn.ModuleList(
            nn.Sequential(
                nn.Linear(feature_dim, WIDTH // 2), nn.LayerNorm(WIDTH // 2), nn.ReLU(),
                nn.Linear(WIDTH // 2, EMBEDDING_DIM),
            )
            for _ in range(num_cameras)
        )  # fmt: skip
        self.log_scale = nn.Parameter(torch.full((num_cameras,), -math.log(TEMPERATURE)))
        self.log_text_scale = nn.Parameter(torch.ones(num_cameras))

    def next_logits(self, features: Tensor, actions: Tensor, next_features: Tensor, same: Tensor) -> Tensor:
        """Logits of every next image of the batch after every observation: [cameras, B, B], the true one at [i, i].

        `features` and `next_features` are [B, cameras, F], `actions` [B, A]. `same` [B, B]: next images that are equal;
        they are no alternatives to each other.
        """
        predicted = self.predict(torch.cat([features.flatten(1), actions], 1)).unflatten(1, (self.num_cameras, -1))
        found = torch.stack([target(next_features[:, camera]) for camera, target in enumerate(self.targets)])
        predicted, found = functional.normalize(predicted.transpose(0, 1), dim=-1), functional.normalize(found, dim=-1)
        logits = predicted @ found.transpose(1, 2) * self.log_scale.exp()[:, None, None]
        is_other = ~torch.eye(len(same), dtype=torch.bool, device=same.device)
        return logits.masked_fill(same & is_other, -torch.inf)

    def text_logits(self, scores: Tensor) -> Tensor:
        """Scores of instructions [B, cameras, n] as logits: [cameras, B, n]."""
        return scores.transpose(0, 1) * self.log_text_scale.exp()[:, None, None]
