"""Q(s, a): an ensemble of critics with target networks, trained by the off-policy algorithms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from deft.models.mlp import BatchedMLP
from deft.models.targets import frozen_copy, soft_update


class Critics(nn.Module):
    """`num_critics` networks on features and unit actions for each of `num_members` members, and target copies.

    Features are [members, B, F], actions [members, B, A], values [members, critics, B].
    """

    def __init__(
        self,
        num_members: int,
        num_critics: int,
        feature_dim: int,
        action_dim: int,
        hidden_sizes: Sequence[int],
        layer_norm: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.num_members, self.num_critics = num_members, num_critics
        self.online = BatchedMLP(
            num_members * num_critics, feature_dim + action_dim, hidden_sizes, 1, layer_norm, dtype
        )
        self.target = frozen_copy(self.online)

    def forward(self, features: Tensor, action: Tensor, frozen: bool = False) -> Tensor:
        """Values; with `frozen` the gradient reaches the action but not the critics."""
        return self._values(self.online(torch.cat([features, action], -1), frozen))

    def first_values(self, features: Tensor, action: Tensor) -> Tensor:
        """Values of each member's first critic, [members, B]; the gradient reaches the action but not the critics."""
        inputs = torch.cat([features, action], -1)
        return self.online(inputs, frozen=True, stride=self.num_critics).squeeze(-1)

    def target_values(self, features: Tensor, action: Tensor) -> Tensor:
        """Values of the target networks."""
        return self._values(self.target(torch.cat([features, action], -1)))

    def move_target(self, tau: float) -> None:
        """target ← (1 − τ) target + τ online."""
        soft_update(self.target, self.online, tau)

    def _values(self, output: Tensor) -> Tensor:
        return output.view(self.num_members, self.num_critics, -1)
