"""Proximal policy optimization (Schulman et al., 2017), for feed-forward, recurrent, chunked and VLA policies.

Rollouts that an older policy acted are handled by decoupled clipping (Hilton et al., 2022): the ratio is clipped around
a proximal policy, the weights at the start of the update, and each transition is weighted by how likely that policy
was to act as the older one did.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from deft import schema
from deft.algorithms import optimization
from deft.algorithms.algorithm import Metrics
from deft.algorithms.auxiliary import check_resumed
from deft.algorithms.experience import Rollouts
from deft.algorithms.policy_gradient import OLD_LOG_PROB, Epochs, PolicyGradient, approximate_kl, cut_sequences
from deft.algorithms.returns import generalized_advantage, next_values, returns_so_far
from deft.algorithms.self_imitation import SelfImitation
from deft.algorithms.value_history import ValueHistory
from deft.config.algorithm_settings import PPOSettings
from deft.errors import InputError, Stopped
from deft.models.policy import Policy

log = logging.getLogger(__name__)
BEHAVIOR_WEIGHT = "behavior_weight"
IMITATED = "imitated"  # of a minibatch: as many decisions of the memory of `self_imitation_coef`
# Rollouts up to this size are shuffled whole, once an epoch; larger ones (images) minibatch by minibatch.
SHUFFLE_WHOLE_BYTES = 64 * 2**20


class PPO(PolicyGradient):
    """L = E[ w · max(−r A, −clip(r, 1−ε, 1+ε) A) ] + c_v · ½(V − R)² − c_e · H.

    r = π_θ / π_proximal, w = min(π_proximal / π_behaviour, cap); on fresh data w = 1 and π_proximal is the policy that
    acted. R = A + V_old, A by GAE(λ).
    """

    name = "ppo"
    can_shard: ClassVar[bool] = True
    warmup_setting = "value_warmup"
    settings: PPOSettings

    def __init__(self, policy: Policy, settings: PPOSettings | None = None, seed: int = 0) -> None:
        super().__init__(policy, settings or PPOSettings(), seed)
        self._held = self._held_in_warmup() if self.settings.value_warmup else []
        self.value_history = None
        if self.settings.value_updates:
            given = self.settings.value_updates, self.settings.gae_lambda, seed
            self.value_history = ValueHistory(policy, *given, captures=self._captured is not None)
        self.self_imitation = None
        if self.settings.self_imitation_coef:
            self.self_imitation = SelfImitation(policy, self.settings.self_imitation_return, seed)
        self._warned_lengths: set[int] = set()
        self._scale: tuple[Tensor, Tensor] | None = None  # of a minibatch's advantages, while it is taken in parts
        self.running_return: Tensor | None = None  # [N], carried from rollout to rollout for reward normalisation
        self._evaluate = torch.compile(policy.evaluate_actions) if self.settings.compile else policy.evaluate_actions

    @classmethod
    def reads_critic_observation(cls, settings: Any) -> bool:
        """True: its value function may read the streams of `critic_observation`."""
        return True

    @property
    def experience(self) -> Rollouts:
        """Rollouts, which `value_updates` and `self_imitation_coef` join in time."""
        needed = {"value_updates": self.value_history, "self_imitation_coef": self.self_imitation}
        return Rollouts(consecutive=", ".join(name for name, part in needed.items() if part is not None))

    def update(self, batches: Iterator[TensorDictBase]) -> Metrics:
        """One rollout [T, N], several epochs of minibatches."""
        epochs, self.unfinished = self.unfinished or self._begin(next(batches)), None
        rollout: TensorDict = epochs.data
        warms_up = self._warms_up
        is_unweighed = rollout.get(BEHAVIOR_WEIGHT, None) is None and self._is_stale(rollout)
        needs_tokens = self.settings.ratio == "token" and rollout.get(OLD_LOG_PROB, None) is None
        if (is_unweighed or needs_tokens) and not self._score_again(rollout, is_unweighed):
            self.unfinished = epochs
            return {}
        if not epochs.train(
            self.settings.n_epochs,
            partial(self._order, rollout),
            partial(self._parts, rollout),
            self._step_with_memory,
            self._kl_too_large,
            self._stops,
        ):
            self.unfinished = epochs
            return {}
        self.version += 1
        metrics = self._metrics(epochs.losses, epochs.first, rollout, epochs.ended_early)
        if not warms_up:  # else the policy has not moved, and its KL says nothing
            self._adapt_learning_rate(metrics["approx_kl"])
        metrics |= epochs.kept
        if self.auxiliary is not None:
            rows = rollout.select(schema.OBSERVATION).flatten(0, 1)
            metrics |= self.auxiliary.update(rows, self.generator, self.progress)
        self.observe([rollout], value_only=warms_up)
        return metrics

    def _begin(self, rollout: TensorDictBase) -> Epochs:
        """What an update trains on: the rollout with advantages."""
        schema.check_scalars(rollout)
        self._schedule_learning_rate()
        if self.version == self.settings.value_warmup > 0:
            optimization.restart(self.optimizer)
        epochs = Epochs(self._with_advantages(rollout))
        if self.value_history is not None:
            epochs.kept["value_history_loss"] = self.value_history.loss
        if self.action_critic is not None:
            assert epochs.data is not None
            epochs.kept |= self.action_critic.learn(epochs.data, processes=self.processes)
        if self.self_imitation is not None:
            epochs.kept |= self.self_imitation.metrics()
        return epochs

    def state_dict(self) -> dict[str, Any]:
        """Return the shared state and the carried returns."""
        carried = self.running_return
        return super().state_dict() | {
            "running_return": None if carried is None else carried.cpu(),
            "value_history": None if self.value_history is None else self.value_history.state_dict(),
            "self_imitation": None if self.self_imitation is None else self.self_imitation.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        super().load_state_dict(state)
        self.running_return = state["running_return"]
        for setting, name, part in (
            ("value_updates", "value_history", self.value_history),
            ("self_imitation_coef", "self_imitation", self.self_imitation),
        ):
            saved = state.get(name)
            check_resumed(setting, part, saved)
            if saved is not None and part is not None:
                part.load_state_dict(saved)

    @property
    def _compiles(self) -> bool:
        return self.settings.compile

    # -- warm-up of the value ------------------------------------------------------------------------------------------

    @property
    def _kind_of_step(self) -> bool:
        return self._warms_up

    @property
    def _warms_up(self) -> bool:
        """Whether this update trains the value alone and leaves the distribution of actions bit for bit as it is."""
        return self.version < self.settings.value_warmup

    def _held_in_warmup(self) -> list[nn.Parameter]:
        """The parameters that wait: all that an action depends on."""
        trained = {id(parameter) for parameter in self.policy.value_only_parameters()}
        if not trained:
            raise InputError("value_warmup: the policy has no parameters of the value alone; use value_warmup 0")
        return [parameter for parameter in self.policy.parameters() if id(parameter) not in trained]

    # -- before the epochs ---------------------------------------------------------------------------------------------

    def _with_advantages(self, rollout: TensorDictBase) -> TensorDict:
        """The rollout with `advantage` and `value_target`."""
        steps, value = self._steps(rollout), rollout[schema.VALUE].float()
        if self.value_history is None:
            advantage = generalized_advantage(value=value, gae_lambda=self.settings.gae_lambda, **steps)
        else:
            self.value_history.processes = self.processes
            advantage, value = self.value_history.learn(rollout, steps)
        if self.self_imitation is not None:
            self.self_imitation.remember(rollout, steps)
        result = TensorDict(dict(rollout.items()), batch_size=rollout.batch_size)
        result[schema.ADVANTAGE] = advantage
        result[schema.VALUE_TARGET] = advantage + value
        return result

    @torch.no_grad()
    def _steps(self, rollout: TensorDictBase) -> dict[str, Tensor]:
        """What advantages are made of beside V: reward, next value, discount, and which steps ended, [T, N] each."""
        reward = rollout[schema.NEXT_REWARD].float()
        terminated, truncated = rollout[schema.NEXT_TERMINATED], rollout[schema.NEXT_TRUNCATED]
        done = terminated | truncated
        discount = torch.full_like(reward, self.settings.gamma)
        if schema.NEXT_NUM_STEPS in rollout.keys(True):
            discount = self.settings.gamma ** rollout[schema.NEXT_NUM_STEPS]
        return {
            "reward": self._normalize_reward(reward, done, discount),
            "next_value": self._next_value(rollout, rollout[schema.VALUE].float(), done),
            "terminated": terminated,
            "done": done,
            "discount": discount,
        }

    def _next_value(self, rollout: TensorDictBase, value: Tensor, done: Tensor) -> Tensor:
        """V(s_{t+1}): the next row's value, and the stored bootstrap where no row follows (truncation, last step)."""
        if schema.NEXT_VALUE in rollout.keys(True):
            return next_values(value, rollout[schema.NEXT_VALUE].float(), done)
        following_td = rollout[schema.NEXT].flatten(0, 1).to(self.device)
        return self.policy.get_value(following_td).float().to(value.device).reshape(value.shape)

    def _normalize_reward(self, reward: Tensor, done: Tensor, discount: Tensor | float) -> Tensor:
        normalizer = self.policy.reward_normalizer
        if normalizer is None:  # an actor's value may have learned from scaled rewards
            scale = getattr(self.policy, "reward_scale", None)
            return reward if scale is None else reward * scale.to(reward.device)
        if self.running_return is None or self.running_return.shape != reward.shape[1:]:
            self.running_return = torch.zeros_like(reward[0])
        carried = self.running_return.to(reward.device)
        returns, self.running_return = returns_so_far(reward, done, discount, carried)
        normalizer.observe(returns.to(self.device))
        if self.processes is not None:
            self.processes.merge_statistics(self.policy)
        return normalizer(reward.to(self.device)).to(reward.device)

    def _is_stale(self, rollout: TensorDictBase) -> bool:
        """Whether an older policy acted, in any process: with sharded weights all make the same passes."""
        return self._maximum(float((rollout[schema.POLICY_VERSION] != self.version).any())) > 0

    @torch.no_grad()
    def _score_again(self, rollout: TensorDict, is_stale: bool) -> bool:
        """Stale data: put the proximal policy's log-probs in place of the behaviour's, and the weight between them.

        With token ratios, add the log-probs of the tokens. False, with the rollout as it was, if the run is to stop
        before that is done.
        """
        behavior = rollout[schema.LOG_PROB]
        log_probs, tokens = [], []
        for part in self._parts(rollout, torch.arange(self._num_items(rollout))):
            if self._stops():
                return False
            scored = self.policy.evaluate_actions(part)
            log_probs.append(scored["log_prob"].to(behavior))
            tokens.append(self._ratio_log_prob(scored).to(behavior))
        if self.settings.ratio == "token":
            rollout[OLD_LOG_PROB] = self._by_step(torch.cat(tokens, int(self.policy.recurrent)), behavior)
        if not is_stale:
            return True
        proximal = self._by_step(torch.cat(log_probs, int(self.policy.recurrent)), behavior)
        rollout[BEHAVIOR_WEIGHT] = (proximal - behavior).exp().clamp(max=self.settings.behavior_weight_cap)
        rollout[schema.LOG_PROB] = proximal
        return True

    def _by_step(self, values: Tensor, rollout: Tensor) -> Tensor:
        """Values of all items in their order, as [T, N, …] like those of a rollout."""
        if self.policy.recurrent:  # [length, chunks · N, …] → [T, N, …]
            values = values.unflatten(1, (-1, rollout.shape[1])).transpose(0, 1)
            return values.reshape(*rollout.shape, *values.shape[3:])
        return values.reshape(*rollout.shape, *values.shape[1:])

    # -- minibatches ---------------------------------------------------------------------------------------------------

    def _length(self, rollout: TensorDictBase) -> int:
        """Steps of a training sequence: the longest divisor of T up to `sequence_length`."""
        steps = rollout.batch_size[0]
        wanted = min(self.settings.sequence_length, steps)
        length = max(n for n in range(1, wanted + 1) if steps % n == 0)
        if 2 * length <= wanted and steps not in self._warned_lengths:
            self._warned_lengths.add(steps)
            log.warning(
                "memory trains on sequences of %d steps: a rollout of %d divides into none longer", length, steps
            )
        return length

    def _num_items(self, rollout: TensorDictBase) -> int:
        """Things that are shuffled: transitions, or sequences for a policy with memory."""
        return rollout.numel() // (self._length(rollout) if self.policy.recurrent else 1)

    def _order(self, rollout: TensorDict) -> Tensor:
        """A new order of the things that are shuffled."""
        return torch.randperm(self._num_items(rollout), generator=self.generator)

    def _parts(self, rollout: TensorDict, order: Tensor) -> Iterator[TensorDictBase]:
        """The rollout in minibatches by `order`, the last one smaller where it does not come out even."""
        keys = set(rollout.keys()) - {schema.POLICY_VERSION, schema.NEXT}
        size = self.settings.batch_size
        order = order.to(rollout[schema.LOG_PROB].device)
        if self.policy.recurrent:
            length = self._length(rollout)
            selected = rollout.select(*keys, schema.NEXT_TERMINATED, schema.NEXT_TRUNCATED)
            yield from self._minibatches(cut_sequences(selected, length), order, max(1, size // length))
            return
        flat = rollout.select(*keys).flatten(0, 1)
        if flat.bytes() <= SHUFFLE_WHOLE_BYTES:
            yield from flat[order].to(self.device).split(size)
        else:
            yield from self._minibatches(flat, order, size)

    # -- one gradient step ---------------------------------------------------------------------------------------------

    def _step_with_memory(self, minibatch: TensorDictBase) -> Metrics:
        """A step on a minibatch and on as many decisions of the policy's own successes."""
        memory = self.self_imitation
        if memory is None or self._warms_up:
            return self._captured_step(minibatch)
        imitated = memory.draw(len(minibatch))
        if imitated is not None:
            minibatch = minibatch.copy().set(IMITATED, imitated)
        try:
            return self._captured_step(minibatch)
        except Stopped:  # the step is repeated
            memory.undraw()
            raise

    def _step(self, minibatch: TensorDictBase) -> Metrics:
        if self.settings.gradient_accumulation > 1 and minibatch.numel() > 1:
            self._scale = self._std_mean(minibatch[schema.ADVANTAGE])
        losses = self._backward(minibatch)
        if self._warms_up:  # Adam does not move what never had a gradient
            for parameter in self._held:
                if parameter.grad is not None:
                    parameter.grad.zero_()
        losses["grad_norm"] = self.apply_gradients(self.optimizer, self.settings.max_grad_norm)
        return losses

    def _scored(self, minibatch: TensorDictBase) -> dict[str, Tensor]:
        return self._evaluate(minibatch)

    def _loss(self, scored: dict[str, Tensor], minibatch: TensorDictBase) -> tuple[Tensor, Metrics]:
        settings, advantage = self.settings, self._weighted_advantage(minibatch)
        if settings.ratio == "step":
            log_ratio = scored["log_prob"] - minibatch[schema.LOG_PROB]
        else:  # every token has its step's advantage; that of earlier denoising steps is discounted
            log_ratio = self._ratio_log_prob(scored) - minibatch[OLD_LOG_PROB]
            steps = torch.arange(log_ratio.shape[-1] - 1, -1, -1, device=log_ratio.device)
            advantage = advantage.unsqueeze(-1) * settings.denoising_discount**steps
        ratio = log_ratio.exp()
        found = ratio.detach()
        plain = found * advantage
        clipped = found.clamp(1 - settings.clip_range, 1 + settings.clip_range) * advantage
        error = self._squared_error(scored["value"], minibatch)
        # Few operations with a gradient: for a small network they take as long as a layer.
        loss = error * (0.5 * settings.value_coef)
        if not self._warms_up:
            # The gradient of min(r A, clip(r) A) is that of r A where that is the smaller one, and 0 elsewhere.
            loss = loss - self._over_tokens(ratio * (advantage * (plain <= clipped)))
            if self.action_critic is not None:
                better = self._improvement(scored, minibatch, (found - 1).abs() <= settings.clip_range)
                loss = torch.sub(loss, better, alpha=settings.action_critic_coef)
            if settings.entropy_coef:
                loss = torch.sub(loss, scored["entropy"], alpha=settings.entropy_coef)
        loss, imitated = loss.mean(), {}
        if self.self_imitation is not None:
            imitated["self_imitation_loss"] = torch.zeros_like(loss)
            if minibatch.get(IMITATED, None) is not None:
                imitation = self.self_imitation.loss(minibatch[IMITATED])
                loss = torch.add(loss, imitation, alpha=settings.self_imitation_coef)
                imitated["self_imitation_loss"] = imitation.detach()
        return loss, {
            **imitated,
            "policy_loss": -self._over_tokens(torch.minimum(plain, clipped)),
            "value_loss": 0.5 * error.detach(),
            "entropy": scored["entropy"].detach(),
            "log_ratio": log_ratio.detach(),
        }

    def _over_tokens(self, values: Tensor) -> Tensor:
        """The mean over the tokens of an action, where each has a ratio of its own."""
        return values if self.settings.ratio == "step" else values.mean(-1)

    def _weighted_advantage(self, minibatch: TensorDictBase) -> Tensor:
        """Return the normalised advantage, times the weight of transitions that an older policy acted."""
        advantage, weight = minibatch[schema.ADVANTAGE], minibatch.get(BEHAVIOR_WEIGHT, None)
        if self.settings.normalize_advantage and (advantage.numel() > 1 or self._scale is not None):
            std, mean = self._std_mean(advantage) if self._scale is None else self._scale
            advantage = (advantage - mean) / (std + 1e-8)
        return advantage if weight is None else advantage * weight

    def _squared_error(self, value: Tensor, minibatch: TensorDictBase) -> Tensor:
        """(V − R)², [B]; with clipping, the larger of that and of V clipped around V_old."""
        target, limit = minibatch[schema.VALUE_TARGET], self.settings.clip_range_vf
        error = (value - target).square()
        if limit is None:
            return error
        old = minibatch[schema.VALUE]
        return torch.maximum(error, (old + (value - old).clamp(-limit, limit) - target).square())

    def _mean_kl(self, losses: list[Metrics]) -> Tensor:
        """`approximate_kl` over all processes, which decide by it alike."""
        kl = approximate_kl(losses)
        if self.processes is not None:
            self.processes.average([kl])
        return kl

    # -- schedules and metrics -----------------------------------------------------------------------------------------

    def _kl_too_large(self, epoch: list[Metrics]) -> bool:
        if self.settings.target_kl is None:
            return False
        return float(self._mean_kl(epoch)) > 1.5 * self.settings.target_kl

    def _metrics(self, losses: list[Metrics], first_of_last_epoch: int, rollout: TensorDict, stopped: bool) -> Metrics:
        """Means over all minibatches; KL and clip fraction over the last epoch, when the policy has moved furthest."""
        last = losses[first_of_last_epoch:]
        imitated = [] if self.self_imitation is None else ["self_imitation_loss"]
        metrics = self._mean_losses(losses, ("policy_loss", "value_loss", "entropy", "grad_norm", *imitated))
        metrics["loss"] = (
            metrics["policy_loss"]
            + self.settings.value_coef * metrics["value_loss"]
            - self.settings.entropy_coef * metrics["entropy"]
        )
        self._check_finite(metrics)
        log_ratio = torch.cat([loss["log_ratio"].flatten() for loss in last])
        target, value = rollout[schema.VALUE_TARGET], rollout[schema.VALUE]
        metrics["approx_kl"] = self._mean_kl(last)
        metrics["clip_fraction"] = ((log_ratio.exp() - 1).abs() > self.settings.clip_range).float().mean()
        # 1 − Var(R − V) / Var(R): 1 is a perfect critic, 0 no better than a constant
        variance = target.var(correction=0)
        metrics["explained_variance"] = torch.where(
            variance > 0, 1 - (target - value).var(correction=0) / variance, torch.zeros_like(variance)
        )
        metrics["learning_rate"] = torch.tensor(self.learning_rate)
        metrics["staleness"] = (self.version - 1 - rollout[schema.POLICY_VERSION]).float().mean()
        metrics["epochs_stopped_early"] = torch.tensor(float(stopped))
        return metrics
