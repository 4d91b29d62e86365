"""What an explorer is paid for: named terms of every step, each brought to one scale by running statistics.

`explorer_rollouts` measures the steps; phase 2 pays with `StudentReward`, phase 3 with rewards of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from deft.config.f1_settings import StudentRewards
from deft.models.normalization import RunningNormalizer


@dataclass
class Measures:
    """Measures of the steps (s_t, a_t, s_{t+1}) of a rollout, [T, N] each."""

    divergence_before: Tensor  # D_t = ‖h_explorer − h_teacher‖₂ before the step
    divergence: Tensor  # D_{t+1}: after it
    uncertainty: Tensor  # mean entropy of the codes of img_{t+1}, as the world model predicted them from a_t, in nats
    error: Tensor  # their cross-entropy, in nats
    action_size: Tensor  # mean |a_t| over the real dims, as executed
    starts: Tensor  # bool: an episode's first step


class Reward(Protocol):
    """What pays a rollout."""

    def __call__(self, measures: Measures) -> tuple[Tensor, dict[str, Tensor]]:
        """The reward [T, N] and its named terms, weighted, [T, N] each."""

    def state_dict(self) -> dict[str, Any]:
        """The running statistics."""

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """The inverse of `state_dict`."""


def memory_convergence(before: Tensor, after: Tensor, decay: float = 0.07) -> Tensor:
    """r = −(D_{t+1} − D_t) − decay · D_{t+1}."""
    return -(after - before) - decay * after


def rise(values: Tensor, starts: Tensor) -> Tensor:
    """x_t − x_{t−1} along the first dim, [T, N]; 0 at an episode's first step."""
    change = torch.zeros_like(values)
    change[1:] = values[1:] - values[:-1]
    return change.masked_fill(starts, 0.0)


class StudentReward:
    """r = w_m · r_memory + w_u · clip(α · uncertainty + β · error + γ · Δerror + ε · Δuncertainty − δ · |a|, ±limit).

    Each term but |a| is first normalised: less its running mean, over its running deviation. The weights are
    therefore independent of the units of the terms. `merge` makes those statistics common to several processes.
    """

    NORMALIZED = ("memory", "uncertainty", "error", "error_progress", "uncertainty_progress")

    def __init__(self, settings: StudentRewards, merge: Callable[[nn.Module], None] | None = None) -> None:
        self.settings, self._merge = settings, merge
        self.scales = RunningNormalizer((len(self.NORMALIZED),))

    def __call__(self, measures: Measures) -> tuple[Tensor, dict[str, Tensor]]:
        """The reward [T, N] and its terms, weighted; the statistics include this rollout."""
        settings = self.settings
        raw = (
            memory_convergence(measures.divergence_before, measures.divergence, settings.memory_decay),
            measures.uncertainty,
            measures.error,
            rise(measures.error, measures.starts),
            rise(measures.uncertainty, measures.starts),
        )
        stacked = torch.stack(raw, -1).cpu()
        self.scales.observe(stacked)
        if self._merge is not None:
            self._merge(self.scales)
        normalized = dict(zip(self.NORMALIZED, self.scales(stacked).to(measures.error).unbind(-1), strict=True))
        outer = settings.wm_uncertainty_weight
        inner = {
            "uncertainty": settings.uncertainty_weight * normalized["uncertainty"],
            "error": settings.error_weight * normalized["error"],
            "error_progress": settings.error_progress_weight * normalized["error_progress"],
            "uncertainty_progress": settings.uncertainty_progress_weight * normalized["uncertainty_progress"],
            "action": -settings.action_cost * measures.action_size,
        }
        memory = settings.memory_divergence_weight * normalized["memory"]
        limit = settings.reward_limit
        reward = memory + outer * sum(inner.values(), torch.zeros_like(memory)).clamp(-limit, limit)
        return reward, {"memory": memory, **{name: outer * value for name, value in inner.items()}}

    def state_dict(self) -> dict[str, Any]:
        """The running statistics."""
        return self.scales.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.scales.load_state_dict(state)
