"""The base of SFT, IQL, CQL, TD3+BC, ReBRAC and SAC: a policy, critics beside it, one update per batch."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from gymnasium import Space
from torch import Tensor, nn

from deft import schema
from deft.algorithms import optimization
from deft.algorithms.algorithm import Metrics
from deft.algorithms.offline import PRECISIONS, OfflineAlgorithm, to_cpu
from deft.config.algorithm_settings import DelayedSettings, OfflineSettings, OffPolicySettings
from deft.config.settings import PolicyConfig
from deft.data.datasets.dataset import Dataset
from deft.data.replay import ChunkBuffer, ReplayBuffer
from deft.data.streaming import StreamingBuffer
from deft.errors import InputError
from deft.models.building import make_policy
from deft.models.critics import Critics
from deft.models.policy import Encoded, Policy
from deft.models.targets import frozen_copy, soft_update

log = logging.getLogger(__name__)
LEARNED_ALPHA = 0.05  # initial temperature for a policy of an algorithm without one


class ActorAlgorithm(OfflineAlgorithm):
    """Trains a policy of continuous actions on single transitions."""

    settings: OfflineSettings
    policy: Policy
    vla_settings: ClassVar[Mapping[str, Any]] = {
        "unit_actions": True,
        "separate_value": True,
        "normalize_reward": False,
    }
    distribution: ClassVar[Literal["tanh_gaussian", "gaussian", "flow"] | None] = "gaussian"
    needs_next_observation: bool = True
    """Whether its batches hold the observation that a transition leads to."""
    trains: ClassVar[Literal["log_prob", "mean", "samples"]] = "log_prob"
    """What the policy loss is a function of: log-probs of given actions, or `Policy.mean` or `Policy.sample`."""

    def __init__(self, policy: Policy, settings: OfflineSettings, seed: int = 0) -> None:
        if not policy.is_continuous:
            memory = " with recurrent memory" if policy.recurrent else ""
            raise InputError(
                f"policy: {self.name} needs continuous actions in a Box and no memory; {type(policy).__name__}{memory} "
                "does not have that: train it with ppo or grpo"
            )
        self.policy, self.settings = policy, settings
        if self.trains == "mean":
            policy.check_mean(self.name)
        elif self.trains == "samples":
            policy.check_samples(self.name)
        self.actor_optimizer = self._optimizer(self._actor_trains(), self._actor_learning_rate())

    def _actor_trains(self) -> Iterator[nn.Parameter]:
        return self.policy.actor_parameters()

    def _actor_learning_rate(self) -> float:
        """The policy's own, where the settings give it one."""
        own = getattr(self.settings, "policy_learning_rate", None)
        return self.settings.learning_rate if own is None else own

    def _policy_optimizers(self) -> list[tuple[torch.optim.Optimizer, float]]:
        """The optimizers of the policy, each with its initial learning rate."""
        return [(self.actor_optimizer, self._actor_learning_rate())]

    def _optimizer(self, parameters: Iterator[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
        return optimization.make_optimizer(
            parameters, learning_rate, weight_decay=self.settings.weight_decay, capturable=True
        )

    @classmethod
    def make_policy(
        cls, observation_space: Space, action_space: Space, config: PolicyConfig, settings: Any, **how: Any
    ) -> Policy:
        """Build the policy of a config, with this algorithm's distribution where the config gives none."""
        if config.distribution is None:
            config = dataclasses.replace(config, distribution=cls.distribution)
        if config.distribution == "tanh_gaussian" and config.log_std_init != PolicyConfig.log_std_init:
            log.warning("log_std_init: not used: the deviation of %s's policy depends on the state", cls.name)
        dtype = PRECISIONS[settings.precision]
        return make_policy(config, observation_space, action_space, dtype=dtype, **how)

    def make_sampler(self, dataset: Dataset, seed: int, device: torch.device, cache_bytes: int) -> Any:
        """Sample single transitions, from memory or from disk."""
        length = self.policy.chunk_length
        if dataset.table is not None and length > 1:
            return ChunkBuffer(dataset.table, length, self.settings.gamma, seed, self.policy.num_members, device)
        if dataset.table is not None:
            return ReplayBuffer(dataset.table, seed, self.policy.num_members, device)
        return StreamingBuffer(
            dataset,
            cache_bytes,
            seed,
            device=device,
            chunk_length=length,
            chunk_gamma=self.settings.gamma,
            next_observation=self.needs_next_observation,
        )

    def prepare(self, dataset: Dataset, sampler: Any, fresh: bool) -> None:
        """Fit the observation normalisation to the dataset."""
        if fresh:
            self.observe({schema.OBSERVATION: block} for block in sampler.observations())
            self.policy.freeze_statistics()
            self._copy_statistics()

    def schedule(self) -> None:
        """Set the policy's learning rate by its schedule."""
        if getattr(self.settings, "learning_rate_schedule", "constant") == "cosine":
            # α_t = α (1 + cos π t) / 2
            share = 0.5 * (1 + math.cos(math.pi * min(1.0, self.progress)))
            for optimizer, rate in self._policy_optimizers():
                optimization.set_learning_rate(optimizer, rate * share)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _parts(self) -> dict[str, Any]:
        """Everything with a state except the policy, by name."""
        return {"actor_optimizer": self.actor_optimizer}

    def state_dict(self) -> dict[str, Any]:
        """Optimizers, counters, and the other parts with a state."""
        states = {
            name: optimization.optimizer_state(part) if isinstance(part, torch.optim.Optimizer) else part.state_dict()
            for name, part in self._parts().items()
        }
        return {**to_cpu(states), "version": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state; raise an error where it does not fit."""
        self._load_parts(state, self._parts())
        self._complete_copies()
        self.version = state["version"]

    def _load_parts(self, state: dict[str, Any], names: Iterable[str]) -> None:
        parts = self._parts()
        for name in names:
            if name not in state:
                raise InputError(f"the checkpoint has no {name}; it cannot be resumed with these settings")
            load = partial(optimization.load_optimizer_state, parts[name])
            try:
                (load if isinstance(parts[name], torch.optim.Optimizer) else parts[name].load_state_dict)(state[name])
            except RuntimeError as error:
                raise InputError(
                    f"{name} of the checkpoint does not fit: use the sizes that it was trained with (num_critics, "
                    "critic_layer_norm, hidden_dim, num_layers, num_seeds)"
                ) from error


class OffPolicy(ActorAlgorithm):
    """A policy, critics, an optimizer for each, and the step that a subclass defines.

    The critics' loss trains the encoder that they share with the policy (`encoder_parameters`). The policy's loss is
    computed from detached features, so it does not reach the encoder, as in SAC from pixels (DrQ).

    Losses are written for several members at once ([members, …], a sum over members at the end): their networks share
    no parameter, so each gets the gradient that it would get alone.
    """

    settings: OffPolicySettings

    def __init__(self, policy: Policy, settings: OffPolicySettings, seed: int = 0) -> None:
        super().__init__(policy, settings, seed)
        if policy.critic_streams and policy.critic is None:
            raise InputError(
                f"critic_observation {' '.join(policy.critic_streams)}: the policy was built for observations without "
                "these named streams"
            )
        if not policy.feature_dim:
            raise InputError(
                f"policy: {self.name}'s critics need features of the observation; build {type(policy).__name__} with "
                "separate_value, or give its model the methods `features` and `value_of`"
            )
        self.critics = self._make_critics(policy, settings)
        self.critic_optimizer = self._optimizer(self._critic_trains(), settings.learning_rate)
        self._policy_metrics: Metrics = {}  # of the latest policy update, which following critic updates report too

    @classmethod
    def reads_critic_observation(cls, settings: Any) -> bool:
        """True: its critics may read the streams of `critic_observation`."""
        return True

    @property
    def critic_action_dim(self) -> int:
        """Numbers of an action as the critics judge it."""
        return int(self.policy.action_dim)

    def _make_critics(self, policy: Policy, settings: OffPolicySettings) -> Critics:
        """Critics of features of the policy, on its device."""
        return new_critics(policy, settings, self.critic_action_dim)

    def _critic_trains(self) -> Iterator[nn.Parameter]:
        yield from self.critics.online.parameters()
        yield from self.policy.encoder_parameters()

    def _parts(self) -> dict[str, Any]:
        return {"critics": self.critics, **super()._parts(), "critic_optimizer": self.critic_optimizer}

    def prepare(self, dataset: Dataset, sampler: Any, fresh: bool) -> None:
        """Fit the normalisation, and reset the reward scale: new critics learn from unscaled rewards."""
        super().prepare(dataset, sampler, fresh)
        self.policy.reward_scale.fill_(1.0)

    def state_dict(self) -> dict[str, Any]:
        """Critics, targets, optimizers, counters, and the latest metrics of the policy."""
        return {**super().state_dict(), "policy_metrics": to_cpu(self._policy_metrics)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state; raise an error where it does not fit."""
        super().load_state_dict(state)
        self._policy_metrics = dict(state.get("policy_metrics", {}))

    def load_critics(self, state: dict[str, Any]) -> None:
        """Load the critics from the state of another off-policy algorithm."""
        self._load_parts(state, ("critics",))

    # -- pieces of a step ----------------------------------------------------------------------------------------------

    def _descend_critics(self, loss: Tensor) -> None:
        """One step of the critics, and of the encoder that they share with the policy."""
        self.descend(loss, self.critic_optimizer)

    def _descend_both(self, critic_loss: Tensor, policy_loss: Tensor) -> None:
        """One step of critics and policy from one backward pass; losses are values for each member."""
        self.descend((critic_loss + policy_loss).sum(), self.critic_optimizer, self.actor_optimizer)

    def _encode(self, observation: Any) -> Encoded:
        return self.policy.encode(observation)

    def _read(self, batch: Mapping[Any, Any]) -> tuple[Encoded, Tensor, Encoded, Tensor, Tensor]:
        """State, unit action, next state, reward, and the discount γ (0 after a terminal state)."""
        state = self._encode(batch[schema.OBSERVATION])._replace(step_mask=batch.get(schema.STEP_MASK))
        with torch.no_grad():
            next_state = self._encode(batch[schema.NEXT_OBSERVATION])
            action = self.policy.to_unit(batch[schema.ACTION])
            reward, discount = batch[schema.NEXT_REWARD], batch.get(schema.DISCOUNT)
            if discount is None:
                gamma = self.settings.gamma
                discount = gamma - gamma * batch[schema.NEXT_TERMINATED]
            if action.ndim == 2:  # one member
                action, reward, discount = action.unsqueeze(0), reward.unsqueeze(0), discount.unsqueeze(0)
            return state, action, next_state, reward, discount


class TwinDelayed(OffPolicy):
    """TD3's step (Fujimoto et al., 2018), the base of TD3+BC and ReBRAC; a subclass defines the policy loss.

    With ã = clip(π̄(s') + clip(ε, ±c), ±1), the target critics and policy Q̄, π̄, and a penalty P that is 0 here:
    L_Q = E (r + γ (min Q̄(s', ã) − P(s', ã)) − Q(s, a))². The policy and all targets move every `policy_delay` updates.
    """

    settings: DelayedSettings
    trains = "mean"

    def __init__(self, policy: Policy, settings: DelayedSettings, seed: int = 0) -> None:
        super().__init__(policy, settings, seed)
        self.target_policy = frozen_copy(policy)
        self.period = self.settings.policy_delay

    def _step(self, batch: Mapping[Any, Any]) -> Metrics:
        settings, policy, critics = self.settings, self.policy, self.critics
        state, action, next_state, reward, discount = self._read(batch)
        with torch.no_grad():
            noise = (torch.randn_like(action) * settings.policy_noise).clamp(-settings.noise_clip, settings.noise_clip)
            next_action = (self.target_policy.mean(next_state) + noise).clamp(-1.0, 1.0)
            next_q = critics.target_values(next_state.for_critics, next_action).amin(1)
            backup = torch.addcmul(reward, discount, self._next_value(next_q, next_action, batch))
        q = critics(state.for_critics, action)
        q_loss = (q - backup.unsqueeze(1)).square().mean(-1).sum(1)
        self._descend_critics(q_loss.sum())
        if (self.version + 1) % settings.policy_delay == 0:
            self._policy_metrics = self._improve(state._replace(features=state.features.detach()), action)
            critics.move_target(settings.tau)
            soft_update(self.target_policy, policy, settings.tau)
        return {"q_loss": q_loss.detach().mean(), "mean_q": q.detach().mean(), **self._policy_metrics}

    def _next_value(self, next_q: Tensor, next_action: Tensor, batch: Mapping[Any, Any]) -> Tensor:
        """The value of the next state, [members, B], for the target."""
        return next_q

    def _improve(self, state: Encoded, action: Tensor) -> Metrics:
        """One policy step."""
        raise TypeError(f"{type(self).__name__} does not define _improve")

    def _parts(self) -> dict[str, Any]:
        return {**super()._parts(), "target_policy": self.target_policy}


class SoftPolicy(OffPolicy):
    """An off-policy algorithm with an entropy bonus, whose temperature α is learned or fixed."""

    settings: Any
    trains = "samples"

    def __init__(self, policy: Policy, settings: Any, seed: int = 0) -> None:
        self.log_alpha = nn.Parameter(torch.zeros(policy.num_members, device=policy.center.device))
        self._fix_alpha(settings)
        super().__init__(policy, settings, seed)

    def _fix_alpha(self, settings: Any) -> None:
        if settings.alpha != "auto":
            self.log_alpha.data.fill_(math.log(max(float(settings.alpha), 1e-8)))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state. The temperature is a setting: a resumed run may fix another one, or learn it."""
        super().load_state_dict({**state, "actor_optimizer": self._fitted(state["actor_optimizer"])})
        self._fix_alpha(self.settings)

    def _fitted(self, state: dict[str, Any]) -> dict[str, Any]:
        """The policy's optimizer state, which ends with α's if α was learned: drop that, or start it at zero."""
        own = optimization.parameters_of(self.actor_optimizer)
        if optimization.are_sharded(own):
            return state
        covered = own if own[-1] is self.log_alpha else [*own, self.log_alpha]
        state = optimization.from_flat_state(state, self.actor_optimizer, covered)
        entries = dict(state["state"])
        if len(entries) == len(covered) > len(own):
            del entries[len(own)]
        elif len(entries) == len(own) - 1 and len(own) == len(covered):
            zero = torch.zeros_like(self.log_alpha)
            entries[len(entries)] = {"step": entries[0]["step"], "exp_avg": zero, "exp_avg_sq": zero.clone()}
        groups = [{**state["param_groups"][0], "params": list(range(len(entries)))}]
        return {**state, "state": entries, "param_groups": groups}

    @property
    def target_entropy(self) -> float:
        """The entropy of unit actions that `alpha: auto` aims at."""
        wanted = self.settings.target_entropy
        return -float(self.policy.action_dim) if wanted == "auto" else float(wanted)

    def _actor_trains(self) -> Iterator[nn.Parameter]:
        yield from self.policy.actor_parameters()
        if self.settings.alpha == "auto":  # else it is fixed, from weight decay too
            yield self.log_alpha

    def _alpha_loss(self, log_prob: Tensor) -> Tensor:
        """L_α = −log α · E[log π + target entropy], a value for each member."""
        if self.settings.alpha != "auto":
            return torch.zeros_like(self.log_alpha)
        return -self.log_alpha * (log_prob.detach() + self.target_entropy).mean(-1)


def new_critics(policy: Policy, settings: OffPolicySettings, action_dim: int) -> Critics:
    """Critics of features of a policy and of actions of a size, on the policy's device."""
    return Critics(
        policy.num_members,
        settings.num_critics,
        policy.critic_dim,
        action_dim,
        policy.hidden_sizes,
        settings.critic_layer_norm,
        PRECISIONS[settings.precision],
    ).to(policy.center.device)
