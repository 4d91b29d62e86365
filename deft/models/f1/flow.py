"""Actions by flow matching: the action expert's inputs, its output, the loss and the integration.

x_t = t·ε + (1 − t)·a runs from the actions (t = 0) to noise (t = 1); the expert learns its velocity ε − a.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from deft.models.f1.config import F1Config

SHORTEST_PERIOD, LONGEST_PERIOD = 4e-3, 4.0


class ActionHead(nn.Module):
    """Embeds the state and noisy actions, and projects the expert's output to the velocity."""

    def __init__(self, config: F1Config) -> None:
        super().__init__()
        width = config.action.hidden_size
        self.chunk_size = config.chunk_size
        self.action_dim = config.max_action_dim
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


def sample_time(batch: int, device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """t ~ 0.999 · Beta(1.5, 1) + 0.001. Its distribution function is t^1.5, so t = u^(2/3)."""
    uniform = torch.rand(batch, device=device, generator=generator)
    return 0.999 * uniform ** (2 / 3) + 0.001


def noisy_actions(actions: Tensor, noise: Tensor, time: Tensor) -> Tensor:
    """x_t = t·ε + (1 − t)·a."""
    return time[:, None, None] * noise + (1 - time[:, None, None]) * actions


def integrate(velocity: Callable[[Tensor, Tensor], Tensor], noise: Tensor, num_steps: int) -> Tensor:
    """Integrate from t = 1 (noise [B, K, A]) to t = 0 (actions) with Euler steps."""
    actions = noise
    for step in range(num_steps):
        time = noise.new_full((noise.shape[0],), 1.0 - step / num_steps)
        actions = actions - velocity(actions, time) / num_steps
    return actions
