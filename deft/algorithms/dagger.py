"""DAgger (Ross et al., 2011): imitation of an expert that labels the states that the policy itself visits."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from deft.algorithms.algorithm import Metrics
from deft.algorithms.experience import Labels
from deft.algorithms.sft import SFT
from deft.config.algorithm_settings import DAggerSettings
from deft.models.policy import Policy

log = logging.getLogger(__name__)
LABEL_SETTINGS = (
    "batch_size", "updates_per_round", "initial_beta", "beta", "prior_data", "record", "expert_finishes", "takeover",
    "takeover_rate",
)  # fmt: skip


class DAgger(SFT):
    """In round i the mixture π_i = β_i π* + (1 − β_i) π acts, β_i = β_0 β^i, and the expert π* labels every state:

    D ← D ∪ {(s, π*(s)) : s visited by π_i},   L = −E_D log π(π*(s) | s).

    Imitation of demonstrations alone sees only states of the expert, and its errors grow with the square of the
    episode's length; on the states of the policy they grow linearly.

    A chunk of actions is played without a look at the states between. π* of these states, which π has led to, is then
    no plan: it also corrects what π did there. With `expert_finishes` π acts up to a random decision, and π* from there
    to the end of the episode; the chunks of π* alone are imitated:
    D ← D ∪ {(s_t, a_t … a_{t+K−1}) : π* acted from t on}.

    With `takeover` the expert is a person, who acts where the policy fails (HG-DAgger, Kelly et al., 2019):
    D ← D ∪ {(s, a) : the person acted}.
    """

    name = "dagger"
    can_shard: ClassVar[bool] = False
    reads_reward: ClassVar[bool] = False
    steps_singly: ClassVar[bool] = True
    settings: DAggerSettings

    def __init__(self, policy: Policy, settings: DAggerSettings | None = None, seed: int = 0) -> None:
        super().__init__(policy, settings or DAggerSettings(), seed)

    def check_policy(self, fresh: bool) -> None:
        """Warn if chunks are learned from labels that are no plan."""
        super().check_policy(fresh)
        own, length = self.settings, self.policy.chunk_length
        if length > 1 and not own.expert_finishes and not own.takeover:
            log.warning(
                "chunk_length %d: the labels of a chunk are the expert's actions along the policy's path, which are no "
                "plan; give --expert_finishes --beta 1 --initial_beta 0.15",
                length,
            )

    @property
    def experience(self) -> Labels:
        """Labels of the environment's expert, or of a person who takes over."""
        expert: Literal["person", "scripted"] = "person" if self.settings.takeover else "scripted"
        return Labels(**{name: vars(self.settings)[name] for name in LABEL_SETTINGS}, expert=expert)

    def update(self, batches: Iterator[Mapping[Any, Any]]) -> Metrics:
        """One step on each batch of the round; the metrics of the last one."""
        return self._update_all(batches)
