"""What IQL, CQL, TD3+BC and SAC share: critics beside a policy, one update a batch, and all of it resumes."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import gymnasium
import torch
from torch import Tensor, nn
from torch.nn import functional

from deft import schema
from deft.algorithms.offline import PRECISIONS, OfflineAlgorithm, to_cpu
from deft.algorithms.optimization import FusedAdam, fused_adam
from deft.algorithms.sharded_optimization import ShardedFusedAdam
from deft.config.algorithm_settings import OfflineSettings, OffPolicySettings
from deft.config.settings import ActorConfig
from deft.data.datasets.dataset import Dataset
from deft.data.replay import ReplayBuffer
from deft.data.streaming import StreamingBuffer
from deft.errors import InputError
from deft.models.actor import Actor, ContinuousActor, Encoded
from deft.models.critics import Critics
from deft.models.policy import Policy
from deft.models.vla.actor import make_vla_actor

log = logging.getLogger(__name__)


class ActorAlgorithm(OfflineAlgorithm):
    """Trains an actor of unit actions on single transitions."""

    settings: OfflineSettings
    policy: ContinuousActor
    distribution: str = "gaussian"
    """Which of `Actor`'s distributions the algorithm trains."""
    needs_next_observation: bool = True
    """Whether its batches hold the observation that a transition leads to."""

    def __init__(self, policy: ContinuousActor, settings: OfflineSettings, seed: int = 0) -> None:
        if not isinstance(policy, ContinuousActor):
            raise InputError(f"{self.name} trains an actor of unit actions; {type(policy).__name__} is not one")
        self.policy, self.settings = policy, settings
        self.actor_optimizer = self._optimizer(self._actor_trains(), self._actor_learning_rate())

    def _actor_trains(self) -> Iterator[nn.Parameter]:
        return self.policy.actor_parameters()

    def _actor_learning_rate(self) -> float:
        """The policy's own, where the settings give it one."""
        own = getattr(self.settings, "policy_learning_rate", None)
        return self.settings.learning_rate if own is None else own

    def _policy_optimizers(self) -> list[tuple[FusedAdam | ShardedFusedAdam, float]]:
        """What trains the policy, each with the step size that it begins with."""
        return [(self.actor_optimizer, self._actor_learning_rate())]

    def _optimizer(self, parameters: Iterator[nn.Parameter], learning_rate: float) -> FusedAdam | ShardedFusedAdam:
        return fused_adam(parameters, learning_rate, self.settings.weight_decay)

    @classmethod
    def make_policy(
        cls,
        observation_space: gymnasium.Space,
        action_space: gymnasium.Space,
        config: ActorConfig,
        settings: Any,
        num_members: int = 1,
        weights_follow: bool = False,
    ) -> Policy:
        """An `Actor` for the spaces, or a `VLAActor` around the model that the config names."""
        dtype = PRECISIONS[settings.precision]
        if cls.distribution == "tanh_gaussian" and config.log_std_init != ActorConfig.log_std_init:
            log.warning("log_std_init: not used: the deviation of %s's policy depends on the state", cls.name)
        if config.vla_config is not None:
            if num_members > 1:
                raise InputError("num_seeds: a VLA model is trained one seed at a time; start a run for each")
            return make_vla_actor(config, observation_space, action_space, "the dataset", dtype, weights_follow)
        return Actor(observation_space, action_space, config, cls.distribution, num_members, dtype)

    def make_sampler(self, dataset: Dataset, seed: int, device: torch.device, cache_bytes: int) -> Any:
        """Single transitions, out of memory or off the disk."""
        if dataset.table is not None:
            return ReplayBuffer(dataset.table, seed, self.policy.num_members, device)
        return StreamingBuffer(
            dataset,
            cache_bytes,
            seed,
            device=device,
            chunk_length=self.policy.chunk_length,
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
        """The policy's step size, where the settings let it fall."""
        if getattr(self.settings, "learning_rate_schedule", "constant") == "cosine":
            # α_t = α (1 + cos π t) / 2
            share = 0.5 * (1 + math.cos(math.pi * min(1.0, self.progress)))
            for optimizer, rate in self._policy_optimizers():
                optimizer.learning_rate.fill_(rate * share)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _parts(self) -> dict[str, Any]:
        """Everything with a state beside the policy."""
        return {"actor_optimizer": self.actor_optimizer}

    def state_dict(self) -> dict[str, Any]:
        """Optimizers, counters, and what else has a state."""
        parts = {name: to_cpu(part.state_dict()) for name, part in self._parts().items()}
        return {**parts, "version": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`; refuses what does not fit."""
        self._load_parts(state, self._parts())
        self._complete_copies()
        self.version = state["version"]

    def _load_parts(self, state: dict[str, Any], names: Iterable[str]) -> None:
        parts = self._parts()
        for name in names:
            if name not in state:
                raise InputError(f"the checkpoint has no {name}; it cannot be resumed with these settings")
            try:
                parts[name].load_state_dict(state[name])
            except RuntimeError as error:
                raise InputError(
                    f"{name} of the checkpoint does not fit: go on with the sizes it was trained with (num_critics, "
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

    def __init__(self, policy: ContinuousActor, settings: OffPolicySettings, seed: int = 0) -> None:
        super().__init__(policy, settings, seed)
        self.critics = Critics(
            policy.num_members,
            settings.num_critics,
            policy.feature_dim,
            policy.action_dim,
            policy.hidden_sizes,
            settings.critic_layer_norm,
            PRECISIONS[settings.precision],
        ).to(policy.center.device)
        self.critic_optimizer = self._optimizer(self._critic_trains(), settings.learning_rate)

    def _critic_trains(self) -> Iterator[nn.Parameter]:
        yield from self.critics.online.parameters()
        yield from self.policy.encoder_parameters()

    def _parts(self) -> dict[str, Any]:
        return {"critics": self.critics, **super()._parts(), "critic_optimizer": self.critic_optimizer}

    def prepare(self, dataset: Dataset, sampler: Any, fresh: bool) -> None:
        """Fit the normalisation. The critics learn from rewards as they are, whatever the policy's former ones did."""
        super().prepare(dataset, sampler, fresh)
        self.policy.reward_scale.fill_(1.0)

    def adopt(self, state: dict[str, Any]) -> None:
        """Take the critics out of the state of another off-policy algorithm."""
        self._load_parts(state, ("critics",))

    # -- pieces of a step ----------------------------------------------------------------------------------------------

    def _encode(self, observation: Any) -> Encoded:
        return self.policy.encode(observation)

    def _read(self, batch: Mapping[Any, Any]) -> tuple[Encoded, Tensor, Encoded, Tensor, Tensor]:
        """State, unit action and next state; the reward, and γ where the episode goes on after it (else 0)."""
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


class SoftPolicy(OffPolicy):
    """An off-policy algorithm whose policy is paid for entropy, with a temperature α that is learned or fixed."""

    settings: Any

    def __init__(self, policy: ContinuousActor, settings: Any, seed: int = 0) -> None:
        self.log_alpha = nn.Parameter(torch.zeros(policy.num_members, device=policy.center.device))
        self._fix_alpha(settings)
        super().__init__(policy, settings, seed)

    def _fix_alpha(self, settings: Any) -> None:
        if settings.alpha != "auto":
            self.log_alpha.data.fill_(math.log(max(float(settings.alpha), 1e-8)))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`; the temperature is a setting: a resumed run may fix another, or learn it."""
        super().load_state_dict({**state, "actor_optimizer": self._fitted(state["actor_optimizer"])})
        self._fix_alpha(self.settings)

    def _fitted(self, moments: dict[str, Any]) -> dict[str, Any]:
        """Adam's memory of the policy, which ends with α's where α was learned: cut off, or begun anew."""
        if not isinstance(self.actor_optimizer, FusedAdam):
            return moments
        missing = sum(parameter.numel() for parameter in self.actor_optimizer.parameters) - moments["first"].numel()
        if abs(missing) != self.log_alpha.numel():
            return moments
        return {name: functional.pad(part, (0, missing)) if part.ndim else part for name, part in moments.items()}

    @property
    def target_entropy(self) -> float:
        """What `alpha: auto` holds the entropy of unit actions at."""
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


class Scalars:
    """Learned scalars, as a part of an algorithm with a state."""

    def __init__(self, *scalars: nn.Parameter) -> None:
        self._scalars = scalars

    def state_dict(self) -> dict[str, Tensor]:
        """Their values, numbered."""
        return {str(index): scalar.detach() for index, scalar in enumerate(self._scalars)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """The inverse."""
        for index, scalar in enumerate(self._scalars):
            scalar.data.copy_(state[str(index)])
