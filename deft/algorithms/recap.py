"""RECAP (π*0.6, Physical Intelligence, 2025): imitation that is conditioned on whether an action was an improvement.

`deft train recap` iterates collecting, labelling and training in an environment; `deft train recap-offline` trains on a
dataset.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from deft import schema
from deft.algorithms.algorithm import Metrics
from deft.algorithms.experience import Experience, Labels
from deft.algorithms.sft import SFT
from deft.config.algorithm_settings import RecapOfflineSettings, RecapSettings
from deft.data.datasets.dataset import Dataset
from deft.data.streaming import discounted_rewards
from deft.errors import InputError
from deft.models.advantage import NEGATIVE, NONE, POSITIVE, AdvantagePolicy
from deft.models.policy import Policy


class RecapOffline(SFT):
    """V is fitted to the returns-to-go R_t of the data, and labels them:

    L_V = E (V(o_t) − R_t)²,   A_t = R_t − V(o_t)   (or r_t + γ V(o_{t+1}) − V(o_t)),   I_t = 1[A_t > ε],
    L_π = −E log π(a_t | o_t, Ĩ_t).

    ε is the quantile of A above which a share `positive_fraction` of the batch lies. Interventions of an expert are
    positive. Ĩ is I, or none with the probability `indicator_dropout`, so that one network learns both π(a | o, I) and
    π(a | o). Acting with I = 1 improves on the data: π(a | o, I = 1) ∝ π(a | o) p(I = 1 | o, a).
    """

    name = "recap-offline"
    can_shard: ClassVar[bool] = False
    learns_labels: ClassVar[bool] = False  # its V reads all streams
    needs_next_observation = True
    warmup_setting = "value_warmup"
    policy_settings: ClassVar[Mapping[str, Any]] = {"advantage": {}}
    settings: RecapOfflineSettings
    policy: AdvantagePolicy

    def __init__(self, policy: Policy, settings: RecapOfflineSettings | None = None, seed: int = 0) -> None:
        if not isinstance(policy, AdvantagePolicy):
            raise InputError(f"policy: {self.name} trains a policy with an advantage indicator (policy.advantage)")
        super().__init__(policy, settings or RecapOfflineSettings(), seed)
        rate = self.settings.value_learning_rate or self.settings.learning_rate
        self.value_optimizer = self._optimizer(policy.returns.parameters(), rate)

    def _parts(self) -> dict[str, Any]:
        return {**super()._parts(), "value_optimizer": self.value_optimizer}

    def make_sampler(self, dataset: Dataset, seed: int, device: torch.device, cache_bytes: int) -> Any:
        """Sample transitions, or chunks, with their returns and the marks of interventions."""
        sampler = super().make_sampler(dataset, seed, device, cache_bytes)
        sampler.add_returns(self.settings.gamma)
        sampler.add_interventions()
        return sampler

    def prepare(self, dataset: Dataset, sampler: Any, fresh: bool) -> None:
        """Fit the normalisation of observations and of returns to the data."""
        super().prepare(dataset, sampler, fresh)
        statistics = self.policy.returns.statistics
        if not float(statistics.count):
            for index in range(dataset.num_episodes):
                returns = discounted_rewards(dataset.episode(index).reward, self.settings.gamma)
                statistics.observe(torch.from_numpy(returns).to(statistics.mean.device))
            statistics.frozen = True
            encoder = self.policy.returns.encoder
            if not fresh:  # a policy from another run has statistics of its own, and the model of returns is new
                for block in sampler.observations():
                    encoder.observe(block)

    def _step(self, batch: Mapping[Any, Any]) -> Metrics:
        metrics = self._step_value(batch)
        if self.version < self.settings.value_warmup:
            return metrics
        indicator, positives = self._indicator(batch)
        observation = self.policy.conditioned(batch[schema.OBSERVATION], indicator)
        return {**metrics, **super()._step({**batch, schema.OBSERVATION: observation}), "positive_fraction": positives}

    @property
    def imitator(self) -> Policy:
        """The policy that reads observations with the indicator."""
        return self.policy.base

    def _step_value(self, batch: Mapping[Any, Any]) -> Metrics:
        """One step of V towards the returns, in standard deviations of them."""
        target = self.policy.returns.statistics(batch[schema.VALUE_TARGET])
        loss = (self.policy.returns.normalized(batch[schema.OBSERVATION]) - target).square().mean()
        self.descend(loss, self.value_optimizer)
        return {"value_loss": loss.detach()}

    @torch.no_grad()
    def advantage(self, batch: Mapping[Any, Any]) -> Tensor:
        """A of each transition, [B]."""
        value = self.policy.returns(batch[schema.OBSERVATION])
        if self.settings.advantage == "return":
            return batch[schema.VALUE_TARGET] - value
        discount = batch.get(schema.DISCOUNT)
        if discount is None:
            discount = self.settings.gamma * (1 - batch[schema.NEXT_TERMINATED])
        return batch[schema.NEXT_REWARD] + discount * self.policy.returns(batch[schema.NEXT_OBSERVATION]) - value

    def _indicator(self, batch: Mapping[Any, Any]) -> tuple[Tensor, Tensor]:
        """The indicator of each transition, and the share of positive ones before dropout."""
        advantage = self.advantage(batch)
        threshold = torch.quantile(advantage, 1.0 - self.settings.positive_fraction)
        is_positive = advantage > threshold
        if schema.INTERVENTION in batch:
            is_positive = is_positive | batch[schema.INTERVENTION].bool()
        indicator = torch.where(is_positive, POSITIVE, NEGATIVE)
        is_dropped = torch.rand(len(indicator), device=indicator.device) < self.settings.indicator_dropout
        return torch.where(is_dropped, NONE, indicator), is_positive.float().mean()


class Recap(RecapOffline):
    """Collects whole episodes of the policy, adds them to the data, labels all of it anew with V, and trains."""

    name = "recap"
    steps_singly: ClassVar[bool] = True
    settings: RecapSettings

    def __init__(self, policy: Policy, settings: RecapSettings | None = None, seed: int = 0) -> None:
        super().__init__(policy, settings or RecapSettings(), seed)

    @property
    def experience(self) -> Experience:
        """Rounds of whole episodes, without an expert."""
        own = self.settings
        return Labels(
            batch_size=own.batch_size,
            updates_per_round=own.updates_per_round,
            prior_data=own.prior_data,
            record=own.record,
            expert="none",
            takeover=own.takeover,
            takeover_rate=own.takeover_rate,
        )

    def update(self, batches: Iterator[Mapping[Any, Any]]) -> Metrics:
        """One step on each batch of the round; the metrics of the last one."""
        return self._update_all(batches)
