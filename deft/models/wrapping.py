"""A policy around another one, in whose action range it acts.

The base of `ResidualPolicy`, `AdvantagePolicy`, `NoisePolicy` and `QFlowPolicy`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import gymnasium
from torch import Tensor

from deft.models.policy import Encoded, Policy

BASE = "base."  # prefix of the weights of the policy inside


class WrappingPolicy(Policy):
    """Acts in the units of `base`, whose weights are saved with its own."""

    is_continuous = True
    base: Policy

    def wrap(self, base: Policy) -> None:
        """Set the policy inside, and what is the same for both."""
        self.base = base
        self.policy_config = base.policy_config
        self.chunk_length, self.streams, self.hidden_sizes = base.chunk_length, base.streams, base.hidden_sizes
        self.action_dim, self.feature_dim = base.action_dim, base.feature_dim

    def read_privileged(self, observation_space: gymnasium.Space, names: Sequence[str]) -> Self:
        """Let critics read these streams (`critic_observation`), which the policy inside was built without."""
        if names:
            assert self.policy_config is not None
            self.policy_config = dataclasses.replace(self.policy_config, critic_observation=tuple(names))
            self._add_critic(observation_space, self.policy_config)
        return self

    def with_privileged(self, state: Encoded, observation: Any) -> Encoded:
        """Add what critics read beside the features."""
        return state._replace(privileged=self._privileged_features(observation))

    def freeze_statistics(self) -> None:
        """Freeze those of the policy inside."""
        self.base.freeze_statistics()

    @property
    def center(self) -> Tensor:
        """Centre of the action range."""
        return self.base.center

    def to_unit(self, action: Tensor) -> Tensor:
        """Actions in the environment's units as unit actions of the policy inside."""
        return self.base.to_unit(action)

    def from_unit(self, unit: Tensor) -> Tensor:
        """Unit actions as actions in the environment's units."""
        return self.base.from_unit(unit)

    def executed(self, unit: Tensor) -> Tensor:
        """Unit actions as the environment clips them."""
        return self.base.executed(unit)

    def check_box(self, space: gymnasium.Space) -> None:
        """Compare the action range of the policy inside with an environment's."""
        self.base.check_box(space)

    def misfit(self, space: gymnasium.Space, weights: Mapping[str, Tensor] | None = None) -> tuple[str, float] | None:
        """Return how the action range differs from a Box."""
        return self.base.misfit(space, None if weights is None else base_weights(weights))

    def with_base_weights(self, weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], bool]:
        """Complete the weights of such a policy, or those of the policy inside alone; return which these were."""
        base = {BASE + name: value for name, value in self.base.complete_weights(base_weights(weights)).items()}
        is_alone = not any(name.startswith(BASE) for name in weights)
        rest = self.state_dict() if is_alone else weights
        return base | {name: value for name, value in rest.items() if not name.startswith(BASE)}, is_alone


def base_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of the policy inside: those with its prefix, or all weights of another policy."""
    inside = {name.removeprefix(BASE): value for name, value in weights.items() if name.startswith(BASE)}
    return inside or dict(weights)
