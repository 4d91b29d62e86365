"""PPO for a residual policy: the core's, with a KL penalty to the policy that it starts from, a bound that opens with
training, and a judge that may take an update back.

`deft.training.waypoints` makes it; the policy is a `PPOPolicy`, or any whose `evaluate_actions` gives `reference_kl`.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from deft import schema
from deft.algorithms.algorithm import Metrics
from deft.algorithms.policy_gradient import Epochs
from deft.algorithms.ppo import PPO
from deft.config.algorithm_settings import PPOSettings
from deft.errors import Stopped
from deft.models.waypoint import PPOPolicy


class WaypointPPO(PPO):
    """L = L_PPO + β · KL(π ‖ π_sft); after each update β doubles or halves where the KL is 1.5 times off its target.

    `accept(policy)` looks at the policy after an update; where it says no, weights, optimizer, β and the carried
    returns are again as they were before.
    """

    name = "waypoint-ppo"
    policy: PPOPolicy

    def __init__(
        self,
        policy: PPOPolicy,
        settings: PPOSettings | None = None,
        seed: int = 0,
        *,
        kl_coef: float = 0.0,
        kl_target: float | None = None,
        residual_start: float = 1.0,
        residual_open_at: float = 0.5,
        accept: Callable[[PPOPolicy], bool] | None = None,
    ) -> None:
        super().__init__(policy, settings, seed)
        self.kl_coef, self.kl_target = kl_coef, kl_target
        self.residual_start, self.residual_open_at = residual_start, residual_open_at
        self.accept = accept
        policy.set_residual_scale(residual_start)

    def update(self, batches: Iterator[TensorDictBase]) -> Metrics:
        """PPO's update, then the penalty's coefficient and the residual's bound for the next rollout."""
        if self.accept is None:
            metrics = self._learn(map(_without_pictures, batches))
            return metrics if self.unfinished is not None else self._with_own(metrics)
        given, self.unfinished = self.unfinished, None
        rollout = _without_pictures(next(batches)) if given is None else given.data
        before = self._remember()
        metrics = self._learn(iter([rollout]))
        try:
            accepted = self.accept(self.policy)
        except Stopped:  # before it was known whether the update counts: it is made again when the run continues
            self._restore(*before)
            self.unfinished = Epochs(rollout)
            return {}
        if not accepted:
            self._take_back(*before)
        metrics["rolled_back"] = torch.tensor(float(not accepted))
        return self._with_own(metrics)

    def _learn(self, batches: Iterator[TensorDictBase]) -> Metrics:
        """PPO's update, and what follows from it for the next."""
        with _small_matrices():
            metrics = super().update(batches)
        if self.unfinished is None:
            self._adapt_kl_coef(float(metrics["reference_kl"]))
            self._open_residual()
        return metrics

    def _with_own(self, metrics: Metrics) -> Metrics:
        metrics["kl_coef"] = torch.tensor(self.kl_coef)
        metrics["residual_scale"] = self.policy.residual_scale.clone()
        return metrics

    def _stops(self) -> bool:
        """An update that may be taken back is made whole: what it began from is not saved."""
        return self.accept is None and super()._stops()

    def state_dict(self) -> dict[str, Any]:
        """PPO's, and the penalty's coefficient."""
        return super().state_dict() | {"kl_coef": self.kl_coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        super().load_state_dict(state)
        if self.kl_target is not None:  # otherwise the settings' coefficient holds, also where it changed
            self.kl_coef = state["kl_coef"]

    def _loss(self, scored: dict[str, Tensor], minibatch: TensorDictBase) -> tuple[Tensor, Metrics]:
        loss, metrics = super()._loss(scored, minibatch)
        kl = scored["reference_kl"].mean()
        metrics["reference_kl"] = kl.detach()
        return (loss + self.kl_coef * kl if self.kl_coef and not self._warms_up else loss), metrics

    def _metrics(self, losses: list[Metrics], first_of_last_epoch: int, rollout: TensorDict, stopped: bool) -> Metrics:
        metrics = super()._metrics(losses, first_of_last_epoch, rollout, stopped)
        metrics["reference_kl"] = torch.stack([loss["reference_kl"] for loss in losses[first_of_last_epoch:]]).mean()
        metrics["loss"] = metrics["loss"] + self.kl_coef * metrics["reference_kl"]
        return metrics

    def _adapt_kl_coef(self, kl: float) -> None:
        if self.kl_target is None:
            return
        if kl > 1.5 * self.kl_target:
            self.kl_coef = min(1e3, 2 * self.kl_coef)
        elif kl < self.kl_target / 1.5:
            self.kl_coef = max(1e-6, self.kl_coef / 2)

    def _open_residual(self) -> None:
        """The share that is open grows linearly from `residual_start` to 1 at `residual_open_at` of training."""
        done = 1.0 if self.residual_open_at == 0 else min(1.0, self.progress / self.residual_open_at)
        self.policy.set_residual_scale(self.residual_start + (1 - self.residual_start) * done)

    def _remember(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Weights and state as they are now."""
        weights = {name: value.clone() for name, value in self.policy.state_dict().items()}
        return weights, copy.deepcopy(self.state_dict())

    def _take_back(self, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
        """As before the update, but for its number and the order of minibatches, which continue."""
        self._restore(weights, {**state, "version": self.version, "generator": self.generator.get_state()})

    def _restore(self, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
        self.policy.load_state_dict(weights)
        self.load_state_dict(state)
        self.kl_coef = state["kl_coef"]


@contextlib.contextmanager
def _small_matrices() -> Iterator[None]:
    """Without oneDNN, whose set-up costs several times the arithmetic of layers this small on some CPUs."""
    with warnings.catch_warnings():  # torch warns of an Intel GPU setting that it touches on the way
        warnings.simplefilter("ignore", UserWarning)
        with torch.backends.mkldnn.flags(enabled=False):
            yield


def _without_pictures(rollout: TensorDictBase) -> TensorDictBase:
    """The frozen encoder has seen them, and what it made of them is in the rollout: minibatches are light then."""
    is_kept = (schema.SAMPLE, schema.LATENT) in rollout.keys(True)
    return rollout.exclude((schema.OBSERVATION, schema.CAMERA)) if is_kept else rollout
