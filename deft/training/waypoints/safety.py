"""The safety mode of waypoint PPO: a policy is deployed only if it is no worse than the supervised one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deft.evaluation.waypoints import HeldOut
from deft.models.waypoint import PPOPolicy


class SafetyCheck:
    """Checks whether a policy's measures on held-out episodes are at most the supervised policy's.

    `WaypointPPO` calls it after every update, and reverts the update if it returns False. A measure that the
    environment does not have (ADE without a ground truth) is left out. Each of several environments is checked.
    """

    def __init__(self, held_out: HeldOut, measures: Sequence[str] = ("collision_rate", "ade")) -> None:
        self.held_out = held_out
        self._wanted = tuple(measures)
        self.baseline: dict[str, Any] = {}
        self.deployed: dict[str, Any] = {}
        self.candidate: dict[str, Any] = {}
        self.measures: tuple[str, ...] = ()

    def set_baseline(self, policy: PPOPolicy) -> None:
        """Measure the policy as it is before training: the supervised one."""
        self.baseline = self.deployed = self.held_out.evaluate(policy)
        watched = [name for name in self.baseline if name.rpartition("/")[2] in self._wanted]
        of_each = [name for name in watched if "/" in name]  # a gain in one environment must not hide a loss in another
        self.measures = tuple(of_each or watched)

    def __call__(self, policy: PPOPolicy) -> bool:
        """Whether the policy may be deployed."""
        self.candidate = self.held_out.evaluate(policy)
        accepted = all(self.candidate[name] <= self.baseline[name] for name in self.measures)
        if accepted:
            self.deployed = self.candidate
        return accepted

    def metrics(self) -> dict[str, Tensor]:
        """Return the measures of the deployed policy and of the last candidate on the held-out set."""
        values = {f"safety/{name}": self.deployed[name] for name in self.measures}
        values |= {f"safety/candidate_{name}": self.candidate[name] for name in self.measures}
        return {name: torch.tensor(float(value)) for name, value in values.items()}
