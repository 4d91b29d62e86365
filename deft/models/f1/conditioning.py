"""Conditions the world model on the actions up to a_t and the state, which are added to the frame tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deft.models.f1.config import F1Config


class ActionConditioning(nn.Module):
    """[a_{t-3} … a_t] and s_t as one vector of the generation expert's width; exactly 0 before training."""

    def __init__(self, config: F1Config) -> None:
        super().__init__()
        width = config.generation.hidden_size
        inputs = config.n_obs_img_steps * config.max_action_dim + 1 + config.max_state_dim
        self.hidden = nn.Linear(inputs, width)
        self.output = nn.Linear(width, width)
        _start(self.output, config.condition_init)

    def forward(self, actions: Tensor, known: Tensor, state: Tensor) -> Tensor:
        """actions [B, H, A], known bool [B] (whether a_t is known), state [B, S] → [B, 1, C]."""
        return self.output(torch.nn.functional.silu(self.hidden(robot_features(actions, known, state))))[:, None]


def robot_features(actions: Tensor, known: Tensor, state: Tensor) -> Tensor:
    """Concatenate the actions (a_t is zero if unknown), the `known` flag and the state: [B, H·A + 1 + S]."""
    flag = known[:, None].to(actions.dtype)
    return torch.cat([actions[:, :-1].flatten(1), actions[:, -1] * flag, flag, state], -1)


def _start(layer: nn.Linear, deviation: float) -> None:
    nn.init.normal_(layer.weight, std=deviation) if deviation else nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
