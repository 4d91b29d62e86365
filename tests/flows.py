"""Flow policies whose actions are known functions of their noise."""

import torch
from offline_worlds import small_actor

from deft.models.actor_critic import ActorCritic


@torch.no_grad()
def linear_flow(slope: float, observation_dim: int = 1) -> ActorCritic:
    """A flow of one action with v(x, t) = slope · x: 5 Euler steps lead from w to w (1 − slope / 5)⁵."""
    policy = small_actor(observation_dim, 1, "flow", normalize_observation=False)
    chunks = policy.head.chunks
    for parameter in chunks.parameters():
        if parameter is not chunks.log_noise:
            parameter.zero_()
    chunks.noisy.weight[:2, 0] = torch.tensor([1.0, -1.0])  # relu(x) and relu(−x)
    chunks.out.weight[0, :2] = torch.tensor([slope, -slope])
    return policy
