"""What an explorer is paid for: in phase 2 named terms of every step, in phase 3 what the world model cannot predict.

The rewards are brought to one scale by running statistics. `CollapseGuard` ends phase 3 when a side has collapsed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from deft.config.f1_settings import AdversarialSection, StudentRewards
from deft.data.episodes import EpisodeBatch
from deft.errors import RunError
from deft.models.f1.policy import F1Policy
from deft.models.normalization import RunningNormalizer
from deft.models.targets import NO_OLDER_COPY, OlderCopy
from deft.training.phases.explorer_rollouts import Collected, Measures, measure
from deft.training.phases.novelty import Ensemble

REWARD_LIMIT = 10.0
SMALLEST = 1e-6  # of the scale
FORGOTTEN = 1.3  # times the lowest held-out loss: the world model forgets
LEAST_SPREAD = 0.02  # deviation of the explorer's actions, relative to the largest action
MOST_SATURATED = 0.98  # fraction of its actions that are at the limits
LEAST_PAID = 0.01  # fraction of the steps that are above the floor


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
    The terms of `deft.training.phases.novelty` that have a weight are added within the clip.
    """

    NORMALIZED = ("memory", "uncertainty", "error", "error_progress", "uncertainty_progress")

    def __init__(self, settings: StudentRewards, merge: Callable[[nn.Module], None] | None = None) -> None:
        self.settings, self._merge = settings, merge
        self.scales = RunningNormalizer((len(self.NORMALIZED),))
        self.further = nn.ModuleDict()  # a normaliser for each further term

    def __call__(
        self, measures: Measures, further: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The reward [T, N] and its terms, weighted; the statistics include this rollout."""
        settings = self.settings
        raw = (
            memory_convergence(measures.divergence_before, measures.divergence, settings.memory_decay),
            measures.uncertainty,
            measures.error,
            rise(measures.error, measures.starts),
            rise(measures.uncertainty, measures.starts),
        )
        stacked, others = torch.stack(raw, -1).cpu(), {name: value.cpu() for name, value in (further or {}).items()}
        self.scales.observe(stacked)
        for name, value in others.items():
            if name not in self.further:
                self.further[name] = RunningNormalizer(())
            self._scale(name).observe(value)
        if self._merge is not None:
            self._merge(self.scales)
            self._merge(self.further)
        normalized = dict(zip(self.NORMALIZED, self.scales(stacked).to(measures.error).unbind(-1), strict=True))
        normalized |= {name: self._scale(name)(value).to(measures.error) for name, value in others.items()}
        outer = settings.wm_uncertainty_weight
        memory = settings.memory_divergence_weight * normalized.pop("memory")
        inner = {name: getattr(settings, f"{name}_weight") * value for name, value in normalized.items()}
        inner["action"] = -settings.action_cost * measures.action_size
        limit = settings.reward_limit
        reward = memory + outer * sum(inner.values(), torch.zeros_like(memory)).clamp(-limit, limit)
        return reward, {"memory": memory, **{name: outer * value for name, value in inner.items()}}

    def _scale(self, name: str) -> RunningNormalizer:
        scale = self.further[name]
        assert isinstance(scale, RunningNormalizer)
        return scale

    def state_dict(self) -> dict[str, Any]:
        """The running statistics."""
        further = {name: scale.state_dict() for name, scale in self.further.items()}
        return {"scales": self.scales.state_dict(), "further": further}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.scales.load_state_dict(state.get("scales", state))  # earlier versions saved the scales alone
        for name, saved in state.get("further", {}).items():
            self.further[name] = RunningNormalizer(())
            self.further[name].load_state_dict(saved)


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
        self.older: OlderCopy[F1Policy] | None = None
        self.ensemble: Ensemble | None = None
        if settings.reward == "progress":
            self.older = OlderCopy(world_model, settings.progress_lag)
        elif settings.reward == "disagreement":
            self.ensemble = Ensemble(world_model, settings.ensemble_size)

    def raw(self, world_model: F1Policy, found: Collected) -> tuple[Tensor, Measures, dict[str, Tensor]]:
        """The reward [T, N] before the floor and the scale, the world model's measures, and what else it is made of."""
        older = None if self.older is None else measure(self.older.network, found)
        measures = measure(world_model, found)  # last: the explorer's memory learns from the present world model's
        if older is not None:
            others = {"older_wm_error": older.error, "older_wm_uncertainty": older.uncertainty}
            raw = torch.minimum(older.error - measures.error, older.uncertainty - measures.uncertainty)
            return raw, measures, others
        if self.ensemble is not None:
            spread = found.spread(self.ensemble.disagreement(found.batch(world_model)))
            return spread.to(measures.error), measures, {}
        return measures.error, measures, {}

    def paid(self, raw: Tensor, measures: Measures) -> Tensor:
        """The raw reward where the error is above the floor, 0 elsewhere."""
        return torch.where(measures.error > self.settings.reward_floor, raw, 0.0)

    def pay(self, world_model: F1Policy, found: Collected) -> dict[str, Tensor]:
        """Put the reward into the rollout; returns the means that are logged."""
        raw, measures, others = self.raw(world_model, found)
        paid = self.paid(raw, measures)
        self.scale.observe(paid.cpu())
        if self._merge is not None:
            self._merge(self.scale)
        size = float((self.scale.variance + self.scale.mean.square()).sqrt())  # nothing is subtracted: 0 stays 0
        reward = (paid / max(size, SMALLEST)).clamp(-REWARD_LIMIT, REWARD_LIMIT)
        found.pay(reward)
        return {
            "train/wm_error": measures.error.mean(),
            "train/wm_uncertainty": measures.uncertainty.mean(),
            f"reward/{self.settings.reward}": raw.mean(),
            "reward/paid_steps": (measures.error > self.settings.reward_floor).float().mean(),
            **{f"train/{name}": value.mean() for name, value in others.items()},
        }

    def learn(self, batch: EpisodeBatch) -> dict[str, Tensor]:
        """Train the ensemble, where there is one, on a batch of episodes."""
        return {} if self.ensemble is None else {"train/ensemble_loss": self.ensemble.learn(batch)}

    def end_iteration(self, world_model: F1Policy, iteration: int) -> None:
        """Every `progress_lag` iterations the older world model is replaced by the one of that many before."""
        if self.older is not None:
            self.older.update(world_model, iteration)

    def state_dict(self) -> dict[str, Any]:
        """Scale, older weights, ensemble."""
        return {
            "scale": self.scale.state_dict(),
            **(NO_OLDER_COPY if self.older is None else self.older.state_dict()),
            **({"ensemble": None, "optimizer": None} if self.ensemble is None else self.ensemble.state_dict()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`; if `reward` has changed, its state is initialised."""
        if (self.older is None) != (state["older"] is None) or (self.ensemble is None) != (state["ensemble"] is None):
            return
        self.scale.load_state_dict(state["scale"])
        if self.older is not None:
            self.older.load_state_dict(state)
        if self.ensemble is not None:
            self.ensemble.load_state_dict(state)


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
        signs = {
            "forgets": (
                not held_out_loss <= FORGOTTEN * self.lowest_loss,  # NaN counts too
                f"the world model has collapsed: its held-out loss is {held_out_loss:.3f}, and was "
                f"{self.lowest_loss:.3f}; lower wm_learning_rate, or raise random_share",
            ),
            "freezes": (
                spread < LEAST_SPREAD,
                f"the explorer has collapsed: its actions hardly differ (deviation {spread:.3f}); "
                "lower explorer_learning_rate",
            ),
            "saturates": (
                saturated > MOST_SATURATED,
                f"the explorer has collapsed: {saturated:.0%} of its actions are at their limits; "
                "lower explorer_learning_rate",
            ),
            "unpaid": (
                paid < LEAST_PAID,
                f"the game is over: {1 - paid:.0%} of the explorer's steps are predicted below reward_floor; "
                "the world model is as good as this explorer can make it, or lower reward_floor",
            ),
        }
        for name, (shows, reason) in signs.items():
            self.counts[name] = self.counts[name] + 1 if shows else 0
            if self.counts[name] >= self.patience:
                raise Collapse(f"{reason} (for {self.patience} iterations; checkpoints before that are good)")

    def state_dict(self) -> dict[str, Any]:
        """What was counted."""
        return {"lowest_loss": self.lowest_loss, "counts": dict(self.counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.lowest_loss, self.counts = state["lowest_loss"], dict(state["counts"])
