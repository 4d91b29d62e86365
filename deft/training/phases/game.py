"""The rules of the game between world model and explorer: what a step pays, and when a side has collapsed.

`AdversarialTrainer` uses them; `deft evaluate` measures the reward of scenes with and without noise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from deft.config.f1_settings import AdversarialSection
from deft.data.episodes import EpisodeBatch
from deft.errors import RunError
from deft.models.f1.disagreement import Disagreement
from deft.models.f1.policy import F1Policy
from deft.models.normalization import RunningNormalizer
from deft.models.targets import frozen_copy
from deft.training.phases.explorer_rollouts import STEPS_TOGETHER, Collected, measure
from deft.training.phases.rewards import Measures

REWARD_LIMIT = 10.0
SMALLEST = 1e-6  # of the scale
ENSEMBLE_RATE = 1e-3  # Adam's step size
FORGOTTEN = 1.3  # times the lowest held-out loss: the world model unlearns
LEAST_SPREAD = 0.02  # deviation of the explorer's actions, of the largest action
MOST_SATURATED = 0.98  # share of its actions that are at the limits
LEAST_PAID = 0.01  # share of the steps that are above the floor


class GameReward:
    """Pays the explorer for (s_t, a_t, s_{t+1}); e is the world model's cross-entropy on img_{t+1}, given a_t.

    error: r = e. disagreement: r = the deviation of an ensemble's predictions of img_{t+1}. progress: what it has been
    learning lately, r = min(e_older − e, u_older − u) with an older world model and the mean entropy u of what is
    predicted. Of noise it only learns that it cannot be predicted: e falls because u rises, which does not pay.

    Where e is below `reward_floor`, r = 0. r is divided by its running root mean square, and cut at ±10.
    `merge` makes that root mean square common to several processes.
    """

    def __init__(
        self, settings: AdversarialSection, world_model: F1Policy, merge: Callable[[nn.Module], None] | None = None
    ) -> None:
        self.settings, self._merge = settings, merge
        self.scale = RunningNormalizer(())
        self.older: F1Policy | None = None
        self._waiting: dict[str, Tensor] = {}  # the weights that will be the older ones next
        self.ensemble: Disagreement | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        if settings.reward == "progress":
            self.older = frozen_copy(world_model).eval()
            self._waiting = _weights(world_model)
        elif settings.reward == "disagreement":
            self.ensemble = Disagreement(world_model.config, settings.ensemble_size).to(world_model.device)
            self.optimizer = torch.optim.Adam(self.ensemble.parameters(), ENSEMBLE_RATE)

    def raw(self, world_model: F1Policy, found: Collected) -> tuple[Tensor, Measures, dict[str, Tensor]]:
        """The reward [T, N] before the floor and the scale, the world model's measures, and what else it is made of."""
        others: dict[str, Tensor] = {}
        older = None if self.older is None else measure(self.older, found)
        measures = measure(world_model, found)  # last: the explorer's memory learns from the present world model's
        if older is not None:
            others = {"older_wm_error": older.error, "older_wm_uncertainty": older.uncertainty}
            raw = torch.minimum(older.error - measures.error, older.uncertainty - measures.uncertainty)
            return raw, measures, others
        if self.ensemble is not None:
            return self._disagreement(world_model, found).to(measures.error), measures, others
        return measures.error, measures, others

    def pay(self, world_model: F1Policy, found: Collected) -> dict[str, Tensor]:
        """Put the reward into the rollout; returns the means that are logged."""
        raw, measures, others = self.raw(world_model, found)
        paid = torch.where(measures.error > self.settings.reward_floor, raw, torch.zeros_like(raw))
        self.scale.observe(paid.cpu())
        if self._merge is not None:
            self._merge(self.scale)
        size = float((self.scale.variance + self.scale.mean.square()).sqrt())  # nothing is subtracted: 0 stays 0
        reward = (paid / max(size, SMALLEST)).clamp(-REWARD_LIMIT, REWARD_LIMIT)
        found.pay(reward, {self.settings.reward: reward})
        return {
            "train/wm_error": measures.error.mean(),
            "train/wm_uncertainty": measures.uncertainty.mean(),
            f"reward/{self.settings.reward}": raw.mean(),
            "reward/paid_steps": (measures.error > self.settings.reward_floor).float().mean(),
            **{f"train/{name}": value.mean() for name, value in others.items()},
        }

    def learn(self, batch: EpisodeBatch) -> dict[str, Tensor]:
        """Train the ensemble, where there is one, on a batch of episodes."""
        if self.ensemble is None or self.optimizer is None:
            return {}
        losses = []
        for start in range(0, batch.longest, STEPS_TOGETHER):
            cut = batch.chunk(start, STEPS_TOGETHER)
            assert cut is not None
            loss = self.ensemble.loss(cut[0])
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
            losses.append(loss.detach())
        return {"train/ensemble_loss": torch.stack(losses).mean()}

    def end_iteration(self, world_model: F1Policy, iteration: int) -> None:
        """Every `progress_lag` iterations the older world model is replaced by the one of that many before."""
        if self.older is not None and iteration % self.settings.progress_lag == 0:
            self.older.load_state_dict(self._waiting)
            self._waiting = _weights(world_model)

    def state_dict(self) -> dict[str, Any]:
        """Scale, older weights, ensemble."""
        return {
            "scale": self.scale.state_dict(),
            "older": None if self.older is None else _weights(self.older),
            "waiting": self._waiting,
            "ensemble": None if self.ensemble is None else self.ensemble.state_dict(),
            "optimizer": None if self.optimizer is None else self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`; if `reward` has changed, its state is initialised."""
        if self.older is not None and state["older"] is not None:
            self.older.load_state_dict(state["older"])
            self._waiting = state["waiting"]
            self.scale.load_state_dict(state["scale"])
        if self.ensemble is not None and self.optimizer is not None and state["ensemble"] is not None:
            self.ensemble.load_state_dict(state["ensemble"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.scale.load_state_dict(state["scale"])
        if self.settings.reward == "error" and state["older"] is None and state["ensemble"] is None:
            self.scale.load_state_dict(state["scale"])

    def _disagreement(self, world_model: F1Policy, found: Collected) -> Tensor:
        assert self.ensemble is not None
        batch = found.batch(world_model)
        parts = []
        for start in range(0, batch.longest, STEPS_TOGETHER):
            cut = batch.chunk(start, STEPS_TOGETHER)
            assert cut is not None
            spread = self.ensemble(cut[0])
            whole = spread.new_zeros(len(spread), len(batch.lengths))
            whole[:, cut[1].to(spread.device)] = spread
            parts.append(whole)
        return found.spread(torch.cat(parts))


def _weights(policy: F1Policy) -> dict[str, Tensor]:
    """A copy on the CPU."""
    return {name: value.detach().cpu().clone() for name, value in policy.state_dict().items()}


class Collapse(RunError):
    """A side of the game has collapsed, or there is nothing left to play for."""


class CollapseGuard:
    """Raises an error when one side has collapsed for `patience` iterations in a row, with the reason."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.lowest_loss: float | None = None  # of the world model on held-out episodes
        self.counts = {"forgets": 0, "freezes": 0, "saturates": 0, "unpaid": 0}

    def check(self, held_out_loss: float, spread: float, saturated: float, paid: float) -> None:
        """Look at an iteration: the world model's held-out loss, the explorer's actions, the share of paid steps."""
        self.lowest_loss = held_out_loss if self.lowest_loss is None else min(self.lowest_loss, held_out_loss)
        now = {
            "forgets": not held_out_loss <= FORGOTTEN * self.lowest_loss,  # NaN counts too
            "freezes": spread < LEAST_SPREAD,
            "saturates": saturated > MOST_SATURATED,
            "unpaid": paid < LEAST_PAID,
        }
        reasons = {
            "forgets": f"the world model has collapsed: its held-out loss is {held_out_loss:.3f}, and was "
            f"{self.lowest_loss:.3f}; lower wm_learning_rate, or raise random_share",
            "freezes": f"the explorer has collapsed: its actions hardly differ (deviation {spread:.3f}); "
            "lower explorer_learning_rate",
            "saturates": f"the explorer has collapsed: {saturated:.0%} of its actions are at their limits; "
            "lower explorer_learning_rate",
            "unpaid": f"the game is over: {1 - paid:.0%} of the explorer's steps are predicted below reward_floor; "
            "the world model is as good as this explorer can make it, or lower reward_floor",
        }
        for name, shows in now.items():
            self.counts[name] = self.counts[name] + 1 if shows else 0
            if self.counts[name] >= self.patience:
                raise Collapse(f"{reasons[name]} (for {self.patience} iterations; checkpoints before that are good)")

    def state_dict(self) -> dict[str, Any]:
        """What was counted."""
        return {"lowest_loss": self.lowest_loss, "counts": dict(self.counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.lowest_loss, self.counts = state["lowest_loss"], dict(state["counts"])
