"""What an explorer may be paid for besides the world model's error: three measures that ordinary motion does not raise.

The student uses them by weights of `student.rewards`, and `Ensemble` is the adversarial phase's `reward: disagreement`:

    disagreement       deviation of the predictions of an ensemble that learns from the explorer's episodes
    learning_progress  how much that ensemble's error has fallen lately
    excess_error       the world model's error beyond what the robot's own motion explains

Of pure noise the first two pay nothing in the long run: all members learn its mean, and their error stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from deft import schema
from deft.config.f1_settings import StudentRewards
from deft.data.episodes import EpisodeBatch
from deft.evaluation.world_model import HORIZON
from deft.models.f1.disagreement import Disagreement
from deft.models.f1.policy import F1Policy
from deft.models.targets import NO_OLDER_COPY, OlderCopy
from deft.runs.processes import Processes
from deft.training.phases.explorer_rollouts import MEASURED_TOGETHER, Collected, Measures

FURTHER = ("disagreement", "learning_progress", "excess_error")  # terms of the student's reward
ENSEMBLE_RATE = 1e-3  # Adam's learning rate
KEPT = 0.9  # of the sums of the motion baseline, from rollout to rollout
RIDGE = 1e-3  # relative to the mean of the diagonal


class Ensemble:
    """An ensemble of small networks that predict the next frame, and its optimizer."""

    def __init__(self, world_model: F1Policy, size: int, processes: Processes | None = None) -> None:
        self.model = Disagreement(world_model.config, size).to(world_model.device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), ENSEMBLE_RATE)
        self._processes = processes

    def disagreement(self, batch: EpisodeBatch) -> Tensor:
        """The deviation of its predictions, [T, B]."""
        return _by_step(batch, self.model)

    def learn(self, batch: EpisodeBatch) -> Tensor:
        """Train on a batch of episodes, in order; return the mean loss."""
        losses = []
        for part in batch.parts(MEASURED_TOGETHER):
            for _, steps, _ in part.chunks(HORIZON):
                loss = self.model.loss(steps)
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                if self._processes is not None:
                    self._processes.average_gradients(self.model.parameters())
                self.optimizer.step()
                losses.append(loss.detach())
        return torch.stack(losses).mean()

    def state_dict(self) -> dict[str, Any]:
        """Return weights and optimizer."""
        return {"ensemble": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict`."""
        self.model.load_state_dict(state["ensemble"])
        self.optimizer.load_state_dict(state["optimizer"])


class MotionBaseline:
    """The world model's error that the robot's motion explains: a linear model, fitted to the latest rollouts.

    ê = w · φ, φ = (1, |a_t|, a_t², |a_{t−1}|, a_{t−1}²) by dims. A fast arm is predicted badly wherever it is; an error
    beyond that is due to what is in view.
    """

    def __init__(self, processes: Processes | None = None) -> None:
        self._processes = processes
        self.sums: Tensor | None = None  # Σ φ (φ, e)ᵀ, [F, F + 1]

    def excess(self, features: Tensor, error: Tensor) -> Tensor:
        """Return e − ê [T, N]; the fit includes this rollout. `features` are [T, N, F]."""
        rows, targets = features.flatten(0, 1).double(), error.flatten().double()
        new = rows.T @ torch.cat([rows, targets[:, None]], 1)
        if self._processes is not None:
            new = self._processes.sum(new)
        self.sums = new if self.sums is None else KEPT * self.sums.to(new.device) + new
        squares, products = self.sums[:, :-1], self.sums[:, -1]
        ridge = RIDGE * squares.diagonal().mean() * torch.eye(len(squares), dtype=squares.dtype, device=squares.device)
        weights = torch.linalg.solve(squares + ridge, products)
        return (targets - rows @ weights).view(error.shape).to(error)

    @staticmethod
    def features(found: Collected) -> Tensor:
        """φ of every step, [T, N, F], from the executed actions."""
        mask = found.rollout[schema.ACTION_MASK][0, 0].bool()
        action = found.executed().to(mask.device)[..., mask].abs()
        before = torch.cat([torch.zeros_like(action[:1]), action[:-1]])
        before = before.masked_fill(found.starts().to(mask.device)[..., None], 0.0)
        return torch.cat([torch.ones_like(action[..., :1]), action, action**2, before, before**2], -1)


class Novelty:
    """The further terms of the student's reward that have a weight, and what they learn from."""

    def __init__(self, rewards: StudentRewards, world_model: F1Policy, processes: Processes | None = None) -> None:
        self.rewards = rewards
        self.ensemble: Ensemble | None = None
        self.older: OlderCopy[Disagreement] | None = None
        self._rollouts = 0
        if rewards.disagreement_weight or rewards.learning_progress_weight:
            self.ensemble = Ensemble(world_model, rewards.ensemble_members, processes)
        if self.ensemble is not None and rewards.learning_progress_weight:
            self.older = OlderCopy(self.ensemble.model, rewards.ensemble_lag)
        self.baseline = MotionBaseline(processes) if rewards.excess_error_weight else None

    @property
    def is_active(self) -> bool:
        """Whether any of the terms has a weight."""
        return self.ensemble is not None or self.baseline is not None

    @torch.no_grad()
    def measure(self, batch: EpisodeBatch, found: Collected, measures: Measures) -> dict[str, Tensor]:
        """Return the raw terms of a rollout by name, [T, N] each."""
        terms: dict[str, Tensor] = {}
        if self.ensemble is not None and self.rewards.disagreement_weight:
            terms["disagreement"] = found.spread(self.ensemble.disagreement(batch)).to(measures.error)
        if self.ensemble is not None and self.older is not None:
            older, model = self.older.network, self.ensemble.model
            progress = _by_step(batch, lambda steps: older.errors(steps) - model.errors(steps))
            terms["learning_progress"] = found.spread(progress).to(measures.error)
        if self.baseline is not None:
            terms["excess_error"] = self.baseline.excess(MotionBaseline.features(found), measures.error)
        return terms

    def learn(self, batch: EpisodeBatch) -> dict[str, Tensor]:
        """Train the ensemble on the episodes of a rollout, after they were measured."""
        if self.ensemble is None:
            return {}
        losses = [self.ensemble.learn(batch) for _ in range(self.rewards.ensemble_epochs)]
        self._rollouts += 1
        if self.older is not None:
            self.older.update(self.ensemble.model, self._rollouts)
        return {"train/ensemble_loss": losses[-1]}

    def state_dict(self) -> dict[str, Any]:
        """Return ensemble, older ensemble, baseline and counter."""
        return {
            "ensemble": None if self.ensemble is None else self.ensemble.state_dict(),
            **(NO_OLDER_COPY if self.older is None else self.older.state_dict()),
            "baseline": None if self.baseline is None else self.baseline.sums,
            "rollouts": self._rollouts,
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Load a `state_dict`; what a run did not have before starts anew."""
        if state is None:
            return
        if self.ensemble is not None and state["ensemble"] is not None:
            self.ensemble.load_state_dict(state["ensemble"])
            self._rollouts = state["rollouts"]
        if self.older is not None and state["older"] is not None:
            self.older.load_state_dict(state)
        if self.baseline is not None:
            self.baseline.sums = state["baseline"]


def _by_step(batch: EpisodeBatch, function: Callable[[dict[str, Tensor]], Tensor]) -> Tensor:
    """A function of the steps of all episodes, [T, B], some episodes at a time."""
    found = []
    for part in batch.parts(MEASURED_TOGETHER):
        values = torch.cat([part.all_rows(function(steps), rows) for _, steps, rows in part.chunks(HORIZON)])
        found.append(functional.pad(values, (0, 0, 0, batch.longest - len(values))))
    return torch.cat(found, 1)
