"""Cal-QL's online phase (Nakamoto et al., 2023): calibrated CQL continues in an environment, on old and new data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from deft.algorithms.algorithm import Metrics
from deft.algorithms.cql import CQL
from deft.algorithms.experience import Replay
from deft.algorithms.off_policy import LEARNED_ALPHA
from deft.algorithms.replay import ReplayLearner
from deft.config.algorithm_settings import CalQLSettings
from deft.models.policy import Policy


class CalQL(ReplayLearner, CQL):
    """The losses of CQL with Q(s, a_i) ← max(Q(s, a_i), G) for the actions a_i of the policy in the penalty.

    G is the discounted return from s to the end of the episode, of the dataset or of the environment. Each batch mixes
    both (`prior_data`, `prior_fraction`). Episodes of the environment enter the replay buffer when they end.
    """

    name = "cal-ql"
    settings: CalQLSettings

    def __init__(self, policy: Policy, settings: CalQLSettings | None = None, seed: int = 0) -> None:
        super().__init__(policy, settings or CalQLSettings(), seed)

    @property
    def experience(self) -> Replay:
        """Batches of a replay buffer, with the returns of their episodes."""
        return replace(super().experience, returns=self.settings.cal_ql)

    def start_from_a_policy(self) -> None:
        """Start with a low temperature: that of a new policy would make a trained one forget."""
        super().start_from_a_policy()
        if self.settings.alpha == "auto":
            self.log_alpha.data.fill_(math.log(LEARNED_ALPHA))

    def load_critics(self, state: dict[str, Any]) -> None:
        """Load the critics, the temperature and the factor of the penalty, as far as the algorithm before had them."""
        super().load_critics(state)
        scalars = state.get("scalars", {})  # of SAC the temperature alone
        if "0" in scalars and self.settings.alpha == "auto":
            self.log_alpha.data.copy_(scalars["0"])
        if "1" in scalars:
            self.log_factor.data.copy_(scalars["1"])

    def _step(self, batch: Mapping[Any, Any]) -> Metrics:
        return super()._step(self._shifted(batch))
