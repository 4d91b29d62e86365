"""What PPO and GRPO share: one optimizer with a schedule, minibatches in parts, and updates that resume."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from deft.algorithms.algorithm import Algorithm, Metrics
from deft.algorithms.auxiliary import check_resumed, make_auxiliary
from deft.algorithms.epochs import Epochs
from deft.algorithms.optimization import backward, make_optimizer, set_learning_rate
from deft.algorithms.optimizer_state import load_optimizer_state, optimizer_state
from deft.config.algorithm_settings import GRPOSettings, PPOSettings
from deft.errors import RunError, Stopped
from deft.models.normalization import freeze_statistics, frozen_statistics, restore_frozen_statistics
from deft.models.policy import Policy


class PolicyGradient(Algorithm):
    """Epochs of minibatches on what the policy just did. A subclass defines `update` and the loss of a minibatch."""

    settings: Any
    unfinished: Epochs | None = None

    def __init__(self, policy: Policy, settings: PPOSettings | GRPOSettings, seed: int = 0) -> None:
        self.policy, self.settings = policy, settings
        self.device = next(policy.parameters()).device
        freeze_statistics(policy)
        self.auxiliary = make_auxiliary(policy, settings)  # before the optimizer, which leaves its parameters out
        self.optimizer = self._make_optimizer()
        self.learning_rate = settings.learning_rate
        self.generator = torch.Generator().manual_seed(seed)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        return make_optimizer(self.policy.parameters(), self.settings.learning_rate, epsilon=self.settings.adam_epsilon)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, learning rate, generator, version, and an update that was stopped."""
        return {
            "optimizer": optimizer_state(self.optimizer),
            "learning_rate": self.learning_rate,
            "generator": self.generator.get_state(),
            "version": self.version,
            "frozen_statistics": frozen_statistics(self.policy),
            "auxiliary": None if self.auxiliary is None else self.auxiliary.state_dict(),
            "unfinished": None if self.unfinished is None else self.unfinished.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned. The learning rate comes from the settings unless it adapts itself."""
        check_resumed(self.auxiliary, state)
        load_optimizer_state(self.optimizer, state["optimizer"])
        adapted = self.settings.learning_rate
        if self.settings.learning_rate_schedule == "adaptive":  # the last version stored it with the optimizer
            adapted = state["learning_rate"] if "learning_rate" in state else state["optimizer"]["learning_rate"]
        self._set_learning_rate(adapted)
        self.generator.set_state(state["generator"])
        self.version = state["version"]
        restore_frozen_statistics(self.policy, state["frozen_statistics"])
        unfinished = state["unfinished"]
        self.unfinished = None if unfinished is None else Epochs.from_state(unfinished, self.device)
        if self.auxiliary is not None:
            self.auxiliary.load_state_dict(state["auxiliary"])

    # -- learning rate -------------------------------------------------------------------------------------------------

    def _set_learning_rate(self, learning_rate: float) -> None:
        self.learning_rate = learning_rate
        set_learning_rate(self.optimizer, learning_rate)

    def _schedule_learning_rate(self) -> None:
        if self.settings.learning_rate_schedule == "linear":
            self._set_learning_rate(self.settings.learning_rate * max(0.0, 1.0 - self.progress))

    # -- gradients -----------------------------------------------------------------------------------------------------

    def _loss(self, scored: dict[str, Tensor], minibatch: TensorDictBase) -> tuple[Tensor, Metrics]:
        """Return the loss of a minibatch and its metrics, given the policy's scores of the stored actions."""
        raise TypeError(f"{type(self).__name__} does not define _loss")

    def _scored(self, minibatch: TensorDictBase) -> dict[str, Tensor]:
        return self.policy.evaluate_actions(minibatch)

    def _weight(self, part: TensorDictBase, minibatch: TensorDictBase) -> Tensor | float:
        """Return the share of a minibatch's mean that a part of it has."""
        return part.numel() / minibatch.numel()

    def _stops(self) -> bool:
        """Return whether an update is to end before its next minibatch, or part of one."""
        return self.should_stop()

    def _backward(self, minibatch: TensorDictBase, scale: Tensor | float = 1.0) -> Metrics:
        """Compute the gradients of the loss times `scale`, in `gradient_accumulation` parts: ∇L = Σ (n_i / n) ∇L_i."""
        axis = minibatch.batch_dims - 1
        count = min(self.settings.gradient_accumulation, minibatch.batch_size[axis])
        if count == 1 and isinstance(scale, float):
            loss, metrics = self._loss(self._scored(minibatch), minibatch)
            backward(loss, self.optimizer)
            return metrics
        found: dict[str, list[Tensor]] = {}
        for part in minibatch.chunk(count, axis):
            if found and self._stops():
                raise Stopped  # the gradients so far are dropped
            weight = self._weight(part, minibatch)
            loss, metrics = self._loss(self._scored(part), part)
            backward(loss * (weight * scale), self.optimizer, accumulate=bool(found))
            for name, value in metrics.items():
                found.setdefault(name, []).append(value if value.ndim else value * weight)
        return {
            name: torch.cat(values, min(axis, values[0].ndim - 1)) if values[0].ndim else torch.stack(values).sum(0)
            for name, values in found.items()
        }

    # -- metrics -------------------------------------------------------------------------------------------------------

    def _mean_losses(self, losses: list[Metrics], names: Iterable[str]) -> Metrics:
        """Return the means over minibatches, of values for each row or of one for each minibatch."""
        means = {}
        for name in names:
            values = [loss[name] for loss in losses]
            is_even = len({value.shape for value in values}) == 1
            means[name] = (
                torch.stack(values).flatten(1).mean(1).mean()
                if is_even and values[0].ndim
                else torch.stack([value.mean() for value in values]).mean()
            )
        return means

    def _check_finite(self, metrics: Metrics) -> None:
        """Raise an error if the loss or the gradient's norm is not finite; on a GPU no gradient was checked before."""
        if not bool(torch.isfinite(metrics["loss"] + metrics["grad_norm"])):
            raise RunError(
                f"the loss became {float(metrics['loss'])} (gradient norm {float(metrics['grad_norm'])}) in update "
                f"{self.version}: lower learning_rate, or check the rewards and observations; checkpoints saved before "
                "this update are good"
            )


def approximate_kl(losses: list[Metrics]) -> Tensor:
    """E[(r − 1) − log r], low in variance and never negative (Schulman, 2020)."""
    log_ratio = torch.cat([loss["log_ratio"].flatten() for loss in losses])
    return (log_ratio.exp() - 1 - log_ratio).mean()
