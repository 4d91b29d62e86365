"""What PPO and GRPO share: one optimizer with a schedule, minibatches in parts, and updates that resume."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from deft import schema
from deft.algorithms import optimization
from deft.algorithms.action_critic import ActionCritic
from deft.algorithms.algorithm import Algorithm, Metrics
from deft.algorithms.auxiliary import check_resumed, make_auxiliary
from deft.algorithms.captured_step import CapturedStep, can_capture
from deft.config.algorithm_settings import GRPOSettings, PPOSettings
from deft.errors import InputError, RunError, Stopped
from deft.models.normalization import freeze_statistics, frozen_statistics, restore_frozen_statistics
from deft.models.policy import Policy

OLD_LOG_PROB = "old_log_prob"  # [B], or [B, tokens]: what the ratios divide by


@dataclass
class Epochs:
    """One update: what it trains on, and how far it is."""

    data: TensorDictBase | None  # None: this process has nothing, of several that train together
    losses: list[Metrics] = field(default_factory=list)  # of each minibatch so far
    first: int = 0  # of the latest epoch's, among them
    epoch: int = 0  # how many are complete
    order: Tensor | None = None  # of the epoch under way
    done: int = 0  # minibatches of the epoch under way
    ended_early: bool = False
    kept: dict[str, Any] = field(default_factory=dict)  # tensors that the algorithm needs when the epochs are done

    def train(
        self,
        num_epochs: int,
        draw: Callable[[], Tensor],
        parts: Callable[[Tensor], Iterable[Any]],
        step: Callable[[Any], Metrics],
        ends: Callable[[list[Metrics]], bool],
        should_stop: Callable[[], bool],
    ) -> bool:
        """Step on every minibatch of `parts(order)` until all epochs are done, or one `ends` them; False if stopped.

        A `step` that raises `Stopped` has changed nothing: it is repeated when the update is continued.
        """
        while self.epoch < num_epochs and not self.ended_early:
            if self.order is None:
                self.order, self.done, self.first = draw(), 0, len(self.losses)
            for minibatch in itertools.islice(parts(self.order), self.done, None):
                if should_stop():
                    return False
                try:
                    metrics = step(minibatch)
                except Stopped:
                    return False
                if metrics:  # a process may have no part in a minibatch
                    self.losses.append(metrics)
                self.done += 1
            self.order, self.epoch = None, self.epoch + 1
            self.ended_early = ends(self.losses[self.first :])
        return True

    def state_dict(self) -> dict[str, Any]:
        """All of it as tensors and plain data, on the CPU."""
        assert self.data is not None  # with several processes an update is not stopped
        own = {name: getattr(self, name) for name in ("first", "epoch", "done", "ended_early", "order")}
        return own | {
            "data": _plain(self.data),
            "losses": _packed(self.losses),
            "kept": {name: _plain(value) for name, value in self.kept.items()},
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], device: torch.device) -> Epochs:
        """The inverse of `state_dict`; what was measured is on `device` again."""
        losses = _unpacked(state["losses"], device)
        kept = {name: _restored(value) for name, value in state["kept"].items()}
        own = {name: state[name] for name in ("first", "epoch", "done", "ended_early", "order")}
        return cls(_restored(state["data"]), losses, kept=kept, **own)


def _packed(losses: list[Metrics]) -> dict[str, Any]:
    """The metrics of many minibatches as one tensor each, with their shapes: thousands of small ones save slowly."""
    return {
        name: {
            "values": torch.cat([metrics[name].reshape(-1) for metrics in losses]).cpu(),
            "shapes": [list(metrics[name].shape) for metrics in losses],
        }
        for name in (losses[0] if losses else ())
    }


def _unpacked(packed: dict[str, Any], device: torch.device) -> list[Metrics]:
    """The inverse of `_packed`."""
    columns = {}
    for name, column in packed.items():
        parts = column["values"].to(device).split([math.prod(shape) for shape in column["shapes"]])
        columns[name] = [part.reshape(shape) for part, shape in zip(parts, column["shapes"], strict=True)]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _plain(value: Any) -> Any:
    if isinstance(value, TensorDictBase):
        return {"batch_size": list(value.batch_size), "columns": value.cpu().to_dict()}
    return value.cpu() if isinstance(value, Tensor) else value


def _restored(value: Any) -> Any:
    if isinstance(value, dict):
        return TensorDict(value["columns"], batch_size=value["batch_size"])
    return value


class PolicyGradient(Algorithm):
    """Epochs of minibatches on what the policy just did. A subclass defines `update` and the loss of a minibatch."""

    settings: Any
    unfinished: Epochs | None = None

    def __init__(self, policy: Policy, settings: PPOSettings | GRPOSettings, seed: int = 0) -> None:
        self.policy, self.settings = policy, settings
        policy.reports_tokens = settings.ratio == "token"
        self.device = next(policy.parameters()).device
        freeze_statistics(policy)
        use_precision(policy, settings.precision)
        self.auxiliary = make_auxiliary(policy, settings)  # before the optimizer, which leaves its parameters out
        self._captured = CapturedStep(self._step) if can_capture(policy, settings, self._compiles) else None
        self.optimizer = self._make_optimizer()
        self.learning_rate = settings.learning_rate
        self.action_critic = None
        if settings.action_critic_coef:
            captures = self._captured is not None
            self.action_critic = ActionCritic(policy, settings.action_critic_batch_size, seed, captures)
        policy.reparameterizes = self.action_critic is not None
        self.generator = torch.Generator().manual_seed(seed)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        return optimization.make_optimizer(
            self.policy.parameters(),
            self.settings.learning_rate,
            epsilon=self.settings.adam_epsilon,
            capturable=self._captured is not None,
        )

    def check_policy(self, fresh: bool) -> None:
        """Raise an error if there is no trained policy whose noise could be scaled."""
        if self.settings.exploration_scale == 1:
            return
        if fresh:
            raise InputError(
                "exploration_scale: scales the noise of a trained policy; give one with model_path, or set the noise "
                "of a new one with log_std_init"
            )
        if not list(self.policy.noise_parameters()):
            raise InputError(
                "exploration_scale: this policy has no standard deviation that is independent of the observation; "
                "use exploration_scale 1"
            )

    @torch.no_grad()
    def start_from_a_policy(self) -> None:
        """Scale the noise of the policy, and of a reference, by `exploration_scale`."""
        for policy in (self.policy, *self._copies()):
            for log_std in policy.noise_parameters():
                log_std.add_(math.log(self.settings.exploration_scale))

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, learning rate, generator, version, and an update that was stopped."""
        return {
            "optimizer": optimization.optimizer_state(self.optimizer),
            "learning_rate": self.learning_rate,
            "generator": self.generator.get_state(),
            "version": self.version,
            "frozen_statistics": frozen_statistics(self.policy),
            "auxiliary": None if self.auxiliary is None else optimization.optimizer_state(self.auxiliary.optimizer),
            "action_critic": None if self.action_critic is None else self.action_critic.state_dict(),
            "unfinished": None if self.unfinished is None else self.unfinished.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned. The learning rate comes from the settings unless it adapts itself."""
        check_resumed("auxiliary_learning_rate", self.auxiliary, state.get("auxiliary"))
        check_resumed("action_critic_coef", self.action_critic, state.get("action_critic"))
        optimization.load_optimizer_state(self.optimizer, state["optimizer"])
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
            optimization.load_optimizer_state(self.auxiliary.optimizer, state["auxiliary"])
        if self.action_critic is not None:
            self.action_critic.load_state_dict(state["action_critic"])

    # -- learning rate -------------------------------------------------------------------------------------------------

    def _set_learning_rate(self, learning_rate: float) -> None:
        self.learning_rate = learning_rate
        optimization.set_learning_rate(self.optimizer, learning_rate)

    def _schedule_learning_rate(self) -> None:
        if self.settings.learning_rate_schedule == "linear":
            self._set_learning_rate(self.settings.learning_rate * max(0.0, 1.0 - self.progress))

    def _adapt_learning_rate(self, approx_kl: Tensor) -> None:
        """Halfway between constant and hand-tuned: ×1.5 or ÷1.5 when an update moved half or twice the wanted KL."""
        if self.settings.learning_rate_schedule != "adaptive":
            return
        kl = self._maximum(float(approx_kl))
        if kl > 2.0 * self.settings.desired_kl:
            self._set_learning_rate(max(1e-6, self.learning_rate / 1.5))
        elif kl < 0.5 * self.settings.desired_kl:
            self._set_learning_rate(min(1e-2, self.learning_rate * 1.5))

    # -- minibatches ---------------------------------------------------------------------------------------------------

    def _minibatches(self, items: TensorDictBase, order: Tensor, size: int) -> Iterator[TensorDictBase]:
        """Transitions, or sequences of a recurrent policy, in minibatches by `order`; the last one may be smaller."""
        for index in order.split(size):
            yield (items[:, index] if self.policy.recurrent else items[index]).to(self.device)

    def _maximum(self, value: float) -> float:
        """Return the maximum of a number over all processes."""
        return value if self.processes is None else self.processes.maximum(value, self.device)

    # -- gradients -----------------------------------------------------------------------------------------------------

    def _step(self, minibatch: Any) -> Metrics:
        """Take one step of the optimizer and return the metrics of the minibatch."""
        raise TypeError(f"{type(self).__name__} does not define _step")

    @property
    def _compiles(self) -> bool:
        """Whether the update is compiled, and not captured."""
        return False

    @property
    def _kind_of_step(self) -> Hashable:
        """What the Python branches of `_step` depend on."""
        return None

    def _captured_step(self, minibatch: Any) -> Metrics:
        """`_step`, by a CUDA graph where there is one."""
        if self._captured is None or self.processes is not None:
            return self._step(minibatch)
        return self._captured(minibatch, self._kind_of_step)

    def _loss(self, scored: dict[str, Tensor], minibatch: TensorDictBase) -> tuple[Tensor, Metrics]:
        """Return the loss of a minibatch and its metrics, given the policy's scores of the stored actions."""
        raise TypeError(f"{type(self).__name__} does not define _loss")

    def _scored(self, minibatch: TensorDictBase) -> dict[str, Tensor]:
        return self.policy.evaluate_actions(minibatch)

    def _ratio_log_prob(self, scored: dict[str, Tensor]) -> Tensor:
        """The log-probs that ratios are computed from: [B], or [B, tokens] with token ratios."""
        if self.settings.ratio == "step":
            return scored["log_prob"]
        if "token_log_prob" not in scored:
            raise InputError(
                f"ratio: 'token' needs a policy that reports token_log_prob; {type(self.policy).__name__} does not "
                "here: use ratio 'step'"
            )
        return scored["token_log_prob"]

    def _improvement(self, scored: dict[str, Tensor], minibatch: TensorDictBase, is_near: Tensor) -> Tensor:
        """What the critic of actions predicts, [B], in standard deviations of the advantage; 0 unless `is_near`.

        `is_near`: which actions have a probability that has changed by at most the clip range, bool [B].
        """
        assert self.action_critic is not None
        return self.action_critic.improvement(minibatch[schema.OBSERVATION], scored) * is_near

    def _std_mean(self, advantage: Tensor) -> tuple[Tensor, Tensor]:
        """Return deviation and mean of advantages over all processes."""
        if self.processes is None:
            return torch.std_mean(advantage)
        # n, Σx and, around the common mean, Σ(x − mean)²
        sums = self.processes.sum(torch.stack([advantage.new_tensor(advantage.numel()), advantage.sum()]).double())
        mean = sums[1] / sums[0]
        squares = self.processes.sum((advantage.double() - mean).square().sum())
        return (squares / (sums[0] - 1)).sqrt().to(advantage), mean.to(advantage)

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
            optimization.backward(loss, self.optimizer)
            return metrics
        found: dict[str, list[Tensor]] = {}
        for part in minibatch.chunk(count, axis):
            if found and self._stops():
                raise Stopped  # the gradients so far are dropped
            weight = self._weight(part, minibatch)
            loss, metrics = self._loss(self._scored(part), part)
            optimization.backward(loss * (weight * scale), self.optimizer, accumulate=bool(found))
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


def use_precision(policy: Policy, precision: str) -> None:
    """Let a policy act and learn in bf16, if that is the precision; fp32 and tf32 are settings of the device."""
    if precision == "bf16":
        policy.set_precision(torch.bfloat16)


def approximate_kl(losses: list[Metrics]) -> Tensor:
    """E[(r − 1) − log r], low in variance and never negative (Schulman, 2020)."""
    log_ratio = torch.cat([loss["log_ratio"].flatten() for loss in losses])
    return (log_ratio.exp() - 1 - log_ratio).mean()


def cut_sequences(td: TensorDictBase, length: int) -> TensorDict:
    """[T, N] → [length, ⌈T / length⌉ · N], padded with zeros: consecutive steps of one environment stay together."""
    steps, num_envs = td.batch_size
    pieces = -(-steps // length)

    def cut(column: Tensor) -> Tensor:
        padding = column.new_zeros(pieces * length - steps, *column.shape[1:])
        parts = torch.cat([column, padding]).reshape(pieces, length, num_envs, *column.shape[2:])
        return parts.transpose(0, 1).reshape(length, pieces * num_envs, *column.shape[2:])

    columns = {key: cut(td[key]) for key in td.keys(True, True)}
    return TensorDict(columns, batch_size=[length, pieces * num_envs])
