"""Group relative policy optimization (Shao et al., 2024): several episodes from one state, each judged by the others.

No value function: the group's mean return is the baseline. `deft.training.group_collection` plays the groups; the
trainer hands them over one round at a time, as rollouts [T, groups · group_size] with the members of a group side by
side.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from deft import schema
from deft.algorithms import action_critic
from deft.algorithms.algorithm import Metrics
from deft.algorithms.experience import Groups
from deft.algorithms.policy_gradient import (
    OLD_LOG_PROB,
    Epochs,
    PolicyGradient,
    approximate_kl,
    cut_sequences,
    use_precision,
)
from deft.algorithms.returns import discounted_sum
from deft.config.algorithm_settings import GRPOSettings
from deft.errors import InputError
from deft.models.normalization import freeze_statistics
from deft.models.policy import Policy
from deft.models.targets import frozen_copy, soft_update

log = logging.getLogger(__name__)
REFERENCE_LOG_PROB = "reference_log_prob"
DEVIATION = "advantage_deviation"  # of the iteration, the same for every step
EPSILON = 1e-8
SMALLEST_SPREAD = 1e-6  # standard deviations below this, beside the size of the returns, are rounding
LARGEST_LOG_RATIO = 20.0  # to the reference; beyond it exp() would be all of the loss


class GRPO(PolicyGradient):
    """L = E[ −min(r A, clip(r, 1 − ε_low, 1 + ε_high) A) + β · KL(π_θ ‖ π_ref) − c_e · H ].

    r = π_θ / π_old; A = (R − mean) / std over the group; KL by the estimator k3 = π_ref/π_θ − log(π_ref/π_θ) − 1. The
    expectation is over all steps that belong to an episode. The policy's value, where it has one, is left alone.

    With `action_critic_coef` c there is a further term − c σ E[ improvement ], of the actions whose r is not clipped.
    `ActionCritic.improvement` is in standard deviations of A, and σ is that of the real steps of the iteration. The
    advantages of PPO have deviation 1; the factor σ gives c the same meaning here, in whatever unit A is.
    """

    name = "grpo"
    settings: GRPOSettings

    def __init__(self, policy: Policy, settings: GRPOSettings | None = None, seed: int = 0) -> None:
        settings = settings or GRPOSettings()
        freeze_statistics(policy)
        policy.reports_tokens = settings.ratio == "token"  # and so does the reference, a copy of it
        use_precision(policy, settings.precision)
        self.reference: Policy | None = frozen_copy(policy) if settings.kl_coef else None
        super().__init__(policy, settings, seed)
        self.reward_terms: tuple[str, ...] = ()
        """Names of the reward's terms, where the environment has any; see `set_reward_terms`."""

    @classmethod
    def reads_critic_observation(cls, settings: Any) -> bool:
        """With a critic of actions, which is the only network beside the policy that it trains."""
        return settings.action_critic_coef > 0

    @property
    def experience(self) -> Groups:
        """Groups of `group_size` episodes; those whose members have different returns are useful."""
        return Groups(
            group_size=self.settings.group_size,
            groups_per_iteration=self.settings.groups_per_iteration,
            max_resamples=self.settings.max_resamples,
            count_useful=self.groups_with_spread,
            reward_terms=True,
        )

    def set_reward_terms(self, names: Sequence[str]) -> None:
        """Take the names of the columns of `schema.NEXT_REWARD_TERMS`; raise an error for weights of others."""
        unknown = sorted(set(self.settings.reward_weights) - set(names))
        if unknown and not names:
            raise InputError(f"reward_weights: {', '.join(unknown)} given, but the environment names no reward terms")
        if unknown:
            raise InputError(f"reward_weights: no reward term {unknown[0]!r}; the environment has {', '.join(names)}")
        self.reward_terms = tuple(names)

    def update(self, batches: Iterator[TensorDictBase]) -> Metrics:
        """All rounds of an iteration, several epochs of minibatches."""
        epochs, self.unfinished = self.unfinished or self._begin(list(batches)), None
        learns = self._maximum(0 if epochs.data is None else 1) > 0
        if learns and not self._train(epochs):
            self.unfinished = epochs
            return {}
        metrics = {name: value for name, value in epochs.kept.items() if isinstance(value, Tensor)}
        observed = [value for value in epochs.kept.values() if not isinstance(value, Tensor)]
        metrics |= self._loss_metrics(epochs) if epochs.losses else self._no_step()
        if learns:  # else nothing moved
            self._adapt_learning_rate(metrics["approx_kl"])
        self.version += 1
        if self.auxiliary is not None:
            rows = torch.cat(observed)
            fewest = -int(self._maximum(-len(rows)))  # so that all processes take as many steps
            metrics |= self.auxiliary.update(rows[:fewest], self.generator, self.progress)
        self.observe(part.to(self.device) for part in observed)
        interval = self.settings.reference_update_interval
        if self.reference is not None and interval is not None and self.version % interval == 0:
            soft_update(self.reference, self.policy, 1.0)
        return metrics

    def _begin(self, rounds: list[TensorDictBase]) -> Epochs:
        """What an update trains on, and what it keeps: the metrics of the groups, and the observations by round."""
        for rollout in rounds:
            schema.check_scalars(rollout)
        self._schedule_learning_rate()
        advantages = [self.advantages(rollout) for rollout in rounds]
        kept: dict[str, Any] = self._group_metrics(rounds, advantages)
        for number, rollout in enumerate(rounds):
            kept[f"observed {number}"] = rollout.select(schema.OBSERVATION)[rollout[schema.STEP_MASK]]
        waits = self.version < self.settings.auxiliary_warmup
        data = None if waits else self._training_steps(rounds, advantages)
        if self.action_critic is not None:
            deviation = self._learn_actions(rounds, advantages, kept)
            if data is not None:
                data[DEVIATION] = deviation.to(data[schema.ADVANTAGE]).expand(data.batch_size).clone()
        return Epochs(data, kept=kept)

    def state_dict(self) -> dict[str, Any]:
        """Return the shared state and the reference's weights."""
        reference = None if self.reference is None else self.reference.state_dict()
        own = {"reference": reference and {name: value.cpu() for name, value in reference.items()}}
        return super().state_dict() | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned; call it when the policy has its weights."""
        super().load_state_dict(state)
        if self.reference is None:
            return
        if state["reference"] is None:
            log.warning("kl_coef was 0 until now: the reference is the policy of this checkpoint")
            self.reference.load_state_dict(self.policy.state_dict())
        else:
            self.reference.load_state_dict(state["reference"])
            self._complete_copies()

    # -- advantages ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def advantages(self, rollout: TensorDictBase) -> Tensor:
        """A of every step [T, N]; 0 after an episode's end, and in groups without a spread.

        `outcome`: (R_i − mean) / std over the group's returns R_i; `process`: the same at each step t with the returns
        from t on, over the members that still act. With weighted terms the sum over the terms k of w_k · A_k.
        """
        mask = rollout[schema.STEP_MASK]
        rewards, weights = self._weighted_rewards(rollout)
        discount = self.settings.gamma * torch.ones_like(rewards[..., 0])
        if schema.NEXT_NUM_STEPS in rollout.keys(True):
            discount = self.settings.gamma ** rollout[schema.NEXT_NUM_STEPS].double()
        # R_t = r_t + γ R_{t+1}, of real steps alone: rows after the end are 0
        to_go = discounted_sum(rewards * mask[..., None], discount[..., None].expand_as(rewards))
        if self.settings.advantage == "outcome":
            to_go = to_go[:1].expand_as(to_go)
        groups = (len(mask), -1, self.settings.group_size)
        normalized = group_normalized(
            to_go.reshape(*groups, rewards.shape[-1]),
            (mask if self.settings.advantage == "process" else mask[:1].expand_as(mask)).reshape(*groups, 1),
            self.settings.normalize_std,
        )
        return (normalized @ weights).reshape(mask.shape).mul(mask).float()

    def _weighted_rewards(self, rollout: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Rewards [T, N, K] and the weights [K] of their advantages; without weights the plain reward, K = 1."""
        if not self.settings.reward_weights:
            reward = rollout[schema.NEXT_REWARD].double().unsqueeze(-1)
            return reward, reward.new_ones(1)
        terms = rollout[schema.NEXT_REWARD_TERMS].double()
        weights = [self.settings.reward_weights.get(name, 1.0) for name in self.reward_terms]
        return terms, terms.new_tensor(weights)

    def groups_with_spread(self, rollout: TensorDictBase) -> int:
        """How many groups of a rollout there is something to learn from."""
        return int(self._has_spread(self.advantages(rollout)).sum())

    def _has_spread(self, advantage: Tensor) -> Tensor:
        """Which groups have members that did better than others, bool [groups]."""
        return (advantage != 0).any(0).reshape(-1, self.settings.group_size).any(1)

    # -- the critic of actions -----------------------------------------------------------------------------------------

    def _learn_actions(self, rounds: list[TensorDictBase], advantages: list[Tensor], kept: dict[str, Any]) -> Tensor:
        """Train the critic of actions on all real steps; return the deviation of their advantages, over all processes.

        Groups without a spread are among them: no action was better there. Its metrics are added to `kept`.
        """
        critic = self.action_critic
        assert critic is not None
        steps: Any = torch.cat(
            [
                critic.columns(rollout).set(schema.ADVANTAGE, advantage)[rollout[schema.STEP_MASK]]
                for rollout, advantage in zip(rounds, advantages, strict=True)
            ]
        )
        most, fewest = int(self._maximum(len(steps))), -int(self._maximum(-len(steps)))
        if most == 0:  # all episodes were lost
            return torch.zeros(())
        if fewest > 0:  # processes take as many gradient steps as each other, and each needs data of its own
            self.observe_critic([steps[schema.OBSERVATION].to(self.device)])  # before its first features
            batches = -(-most // critic.batch_size)  # an iteration is as much as many short rollouts
            kept |= critic.learn(steps, batches * action_critic.NUM_UPDATES, self.processes)
        return self._std_mean(steps[schema.ADVANTAGE])[0]

    # -- what is trained on --------------------------------------------------------------------------------------------

    def _training_steps(self, rounds: list[TensorDictBase], advantages: list[Tensor]) -> TensorDict | None:
        """The real steps of the groups that have a spread: [S], or sequences [L, S] for a policy with memory.

        None where no group has one.
        """
        parts, length = [], min(self.settings.sequence_length, max(len(rollout) for rollout in rounds))
        for rollout, advantage in zip(rounds, advantages, strict=True):
            kept = self._has_spread(advantage).repeat_interleave(self.settings.group_size)
            keys = set(rollout.keys()) - {schema.POLICY_VERSION, schema.VALUE, schema.NEXT}
            td = rollout.select(*keys, schema.NEXT_TERMINATED, schema.NEXT_TRUNCATED)[:, kept]
            td[schema.ADVANTAGE] = advantage[:, kept]
            if self.policy.recurrent:
                sequences = cut_sequences(td, length)
                parts.append(sequences[:, sequences[schema.STEP_MASK].any(0)])  # those with a real step
            else:
                parts.append(td[td[schema.STEP_MASK]])
        steps: Any = torch.cat(parts, int(self.policy.recurrent))
        if not steps.batch_size[-1]:  # numel() of an empty TensorDict is 1
            return None
        steps[OLD_LOG_PROB] = steps[schema.LOG_PROB]
        if self.settings.ratio == "token":  # the weights that score are those that acted
            steps[OLD_LOG_PROB] = self._score(self.policy, steps)
        if self.reference is not None:
            steps[REFERENCE_LOG_PROB] = self._score(self.reference, steps)
        return steps

    @torch.no_grad()
    def _score(self, policy: Policy, steps: TensorDict) -> Tensor:
        """Log-probs of all actions, [S] or [L, S], and [..., tokens] with token ratios."""
        size, device = self._minibatch_size(steps), steps[schema.LOG_PROB].device
        order = torch.arange(steps.batch_size[-1], device=device)
        scored = [policy.evaluate_actions(part) for part in self._minibatches(steps, order, size)]
        return torch.cat([self._ratio_log_prob(part) for part in scored], steps.batch_dims - 1).to(device)

    def _minibatch_size(self, steps: TensorDict) -> int:
        return max(1, self.settings.batch_size // (steps.batch_size[0] if self.policy.recurrent else 1))

    # -- the epochs ----------------------------------------------------------------------------------------------------

    def _train(self, epochs: Epochs) -> bool:
        """All epochs; False where the run is to stop before they are done."""
        steps: Any = epochs.data

        def order() -> Tensor:
            return torch.randperm(0 if steps is None else steps.batch_size[-1], generator=self.generator)

        def minibatches(order: Tensor) -> Iterator[TensorDictBase | None]:
            # Processes take as many steps as the one with the most minibatches, each with a part of its own, if any.
            size = 1 if steps is None else self._minibatch_size(steps)
            own = -(-len(order) // size)
            if steps is not None:
                yield from self._minibatches(steps, order.to(steps[schema.LOG_PROB].device), size)
            yield from [None] * (int(self._maximum(own)) - own)

        def ends(losses: list[Metrics]) -> bool:
            limit = self.settings.target_kl
            return limit is not None and self._maximum(float(approximate_kl(losses)) if losses else 0.0) > 1.5 * limit

        return epochs.train(self.settings.n_epochs, order, minibatches, self._captured_step, ends, self.should_stop)

    def _step(self, minibatch: TensorDictBase | None) -> Metrics:
        """One step of the optimizer, on the mean over all processes' steps; this one may have none."""
        share = self._share(minibatch)
        if minibatch is None:
            metrics: Metrics = {}
            self.optimizer.zero_grad(set_to_none=False)
        else:
            metrics = self._backward(minibatch, share)
        norm = self.apply_gradients(self.optimizer, self.settings.max_grad_norm)
        if metrics:
            metrics["grad_norm"] = norm
        return metrics

    def _weight(self, part: TensorDictBase, minibatch: TensorDictBase) -> Tensor:
        return part[schema.STEP_MASK].sum() / minibatch[schema.STEP_MASK].sum()

    def _share(self, minibatch: TensorDictBase | None) -> Tensor | float:
        """n_i · processes / Σ n: the mean of gradients weighted so is the gradient of the mean over all steps."""
        if self.processes is None:
            return 1.0
        own = torch.zeros((), device=self.device) if minibatch is None else minibatch[schema.STEP_MASK].sum().float()
        return own * self.processes.count / self.processes.sum(own.clone())

    def _loss(self, scored: dict[str, Tensor], minibatch: TensorDictBase) -> tuple[Tensor, Metrics]:
        """The loss of a minibatch, and its parts; log-probs are [B], or [B, tokens] with token ratios."""
        settings, mask, advantage = self.settings, minibatch[schema.STEP_MASK], minibatch[schema.ADVANTAGE]
        log_prob, old = self._ratio_log_prob(scored).float(), minibatch[OLD_LOG_PROB]
        weight = mask.float() / mask.sum()
        entropy = (weight * scored["entropy"]).sum()
        if settings.ratio == "token":  # every token has its step's advantage
            mask, advantage = mask.unsqueeze(-1).expand_as(log_prob), advantage.unsqueeze(-1)
            weight = mask.float() / mask.sum()
        log_ratio = torch.where(mask, log_prob - old, 0.0)
        ratio = log_ratio.exp()
        high = settings.clip_range if settings.clip_range_high is None else settings.clip_range_high
        clipped = ratio.clamp(1 - settings.clip_range, 1 + high)
        policy_loss = -(weight * torch.minimum(ratio * advantage, clipped * advantage)).sum()
        loss = policy_loss - settings.entropy_coef * entropy
        kl = torch.zeros_like(policy_loss)
        if self.reference is not None:
            kl = (weight * k3(log_prob, minibatch[REFERENCE_LOG_PROB])).sum()
            loss = loss + settings.kl_coef * kl
        reported = loss.detach()  # as in PPO without the critic of actions: A(s, a) has no lower bound
        if self.action_critic is not None:
            better = self._improvement(scored, minibatch, ratio.detach() == clipped.detach())
            loss = loss - settings.action_critic_coef * (weight * minibatch[DEVIATION] * better).sum()
        # Only sequences have steps outside of the mask; to select them waits for the GPU.
        real: Any = mask if self.policy.recurrent else ...
        return loss, {
            "policy_loss": policy_loss.detach(),
            "kl": kl.detach(),
            "entropy": entropy.detach(),
            "loss": reported,
            "log_ratio": log_ratio.detach()[real],
            "is_clipped": (ratio != clipped).detach()[real],
        }

    # -- metrics -------------------------------------------------------------------------------------------------------

    def _loss_metrics(self, epochs: Epochs) -> Metrics:
        """Means over all minibatches; KL and clip fraction over the last epoch, when the policy has moved furthest."""
        losses, last = epochs.losses, epochs.losses[epochs.first :]
        metrics = self._mean_losses(losses, ("policy_loss", "kl", "entropy", "loss", "grad_norm"))
        self._check_finite(metrics)
        metrics["approx_kl"] = approximate_kl(last)
        metrics["clip_fraction"] = torch.cat([loss["is_clipped"] for loss in last]).float().mean()
        metrics["learning_rate"] = torch.tensor(self.learning_rate)
        metrics["epochs_stopped_early"] = torch.tensor(float(epochs.ended_early))
        return metrics

    def _no_step(self) -> Metrics:
        """The metrics of an iteration in which no group has a spread, or the policy waits: nothing moves."""
        names = ("policy_loss", "loss", "grad_norm", "approx_kl", "clip_fraction", "epochs_stopped_early")
        rate = torch.tensor(self.learning_rate)
        return {**{name: torch.tensor(0.0) for name in names}, "learning_rate": rate}

    def _group_metrics(self, rounds: list[TensorDictBase], advantages: list[Tensor]) -> Metrics:
        """What was played: returns, their spread inside the groups, groups without one, idle steps, reward terms."""
        size = self.settings.group_size
        returns, terms, num_groups, num_kept, idle = [], [], 0, 0, 0
        for rollout, advantage in zip(rounds, advantages, strict=True):
            mask = rollout[schema.STEP_MASK]
            returns.append((rollout[schema.NEXT_REWARD].double() * mask).sum(0)[mask[0]])
            if self.reward_terms:
                terms.append((rollout[schema.NEXT_REWARD_TERMS].double() * mask[..., None]).sum(0)[mask[0]])
            num_groups += mask.shape[1] // size
            num_kept += int(self._has_spread(advantage).sum())
            idle += int((~mask).sum())
        all_returns = torch.cat(returns)
        spread = all_returns.reshape(-1, size).std(1, correction=0)
        metrics = {
            "mean_return": all_returns.mean(),
            "return_spread": spread.mean(),
            "groups": torch.tensor(float(num_groups)),
            "dropped_groups": torch.tensor(float(num_groups - num_kept)),
            "rounds": torch.tensor(float(len(rounds))),
            "idle_steps": torch.tensor(float(idle)),
        }
        means = torch.cat(terms).mean(0) if terms else ()
        return metrics | {f"term_{name}": mean for name, mean in zip(self.reward_terms, means, strict=True)}


def group_normalized(values: Tensor, mask: Tensor, divide: bool) -> Tensor:
    """(x − mean) / std over the members [..., members, K] where `mask` [..., members, 1] holds; 0 without a spread.

    The deviation is the population's. Fewer than two members, or a deviation that is rounding alone, are no spread.
    """
    count = mask.sum(-2, keepdim=True).clamp(min=1)
    mean = (values * mask).sum(-2, keepdim=True) / count
    centered = (values - mean) * mask
    std = (centered.square().sum(-2, keepdim=True) / count).sqrt()
    has_spread = std > SMALLEST_SPREAD * mean.abs().clamp(min=1e-6)
    return centered * has_spread / (std + EPSILON if divide else 1.0)


def k3(log_prob: Tensor, reference: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(π ‖ π_ref) from actions of π: exp(d) − d − 1 with d = log π_ref − log π; ≥ 0."""
    difference = (reference - log_prob).clamp(max=LARGEST_LOG_RATIO)
    return difference.exp() - difference - 1
