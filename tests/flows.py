"""Flow policies whose actions are known functions of their noise."""

import torch
from offline_worlds import small_actor

from deft.models.actor_critic import ActorCritic


@torch.no_grad()
def linear_flow(slope: float, observation_dim: int = 1, action_dim: int = 1) -> ActorCritic:
    """A flow with v(x, t) = slope · x: 5 Euler steps lead from w to w (1 − slope / 5)⁵."""
    width = max(16, 2 * action_dim)
    policy = small_actor(observation_dim, action_dim, "flow", normalize_observation=False, hidden_dim=width)
    chunks = policy.head.chunks
    for parameter in chunks.parameters():
        if parameter is not chunks.log_noise:
            parameter.zero_()
    signs = torch.tensor([1.0, -1.0])
    for dim in range(action_dim):
        both = slice(2 * dim, 2 * dim + 2)
        chunks.noisy.weight[both, dim] = signs  # relu(x) and relu(−x)
        chunks.out.weight[dim, both] = slope * signs
    return policy
