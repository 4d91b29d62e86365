"""What an algorithm is to the trainer: losses, optimizers and target networks behind one method, `update`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from gymnasium import Space
from tensordict import TensorDictBase
from torch import Tensor

from deft.algorithms import optimization
from deft.algorithms.auxiliary import Auxiliary
from deft.algorithms.experience import Experience, Rollouts
from deft.algorithms.optimization import SharedTraining
from deft.config.algorithm_settings import AlgorithmSettings
from deft.config.settings import PolicyConfig
from deft.models.building import make_policy
from deft.models.normalization import has_seen_data
from deft.models.policy import Policy
from deft.models.targets import soft_update

log = logging.getLogger(__name__)
Metrics: TypeAlias = dict[str, Tensor]


class Algorithm:
    """One algorithm. The trainer calls `update` after every collection and never asks which algorithm it is."""

    name: str
    policy: Policy
    settings: AlgorithmSettings
    can_shard: ClassVar[bool] = False
    """Whether it trains sharded weights: every process then makes the same forward and backward passes."""
    exchanges_policies: ClassVar[bool] = True
    """Whether it can train a policy that another run built, and other algorithms can train its policies."""
    cannot_be_trained: ClassVar[str] = ""
    """Why other algorithms cannot train its policies, as the predicate of a message; empty: they can."""
    continues: ClassVar[tuple[str, ...]] = ()
    """Names of other algorithms whose policies it can train although they cannot be trained in general."""
    takes_chunks: ClassVar[bool] = False
    """Whether an algorithm with a replay buffer learns from action chunks as it does from single steps."""
    vla_settings: ClassVar[Mapping[str, Any]] = {}
    """Fields of `PolicyConfig` that it requires of a VLA policy from another run."""
    policy_settings: ClassVar[Mapping[str, Any]] = {}
    """Sections of `PolicyConfig` that it requires of every policy, if they are not given."""
    warmup_setting: ClassVar[str] = ""
    """The setting of how many updates at the start leave the policy as it is, if there is one."""
    fixed_settings: ClassVar[tuple[str, ...]] = ()
    """Settings that must be those that the weights were trained with, and that no weight's shape shows."""
    distribution: ClassVar[Literal["tanh_gaussian", "gaussian", "flow"] | None] = None
    """The action distribution of a new policy, if it needs a particular one."""
    acts: ClassVar[bool] = True
    """Whether what it trains acts; a model that does not is evaluated in no environment."""
    use: ClassVar[str] = ""
    """What a run that does not act is for, as the advice of an error."""
    learns_labels: ClassVar[bool] = False
    """Whether its loss on a dataset includes that of labels, which a model may learn to predict."""
    reads_reward: ClassVar[bool] = True
    """Whether it learns from rewards, which a reward model may give."""
    steps_singly: ClassVar[bool] = False
    """Whether environments take single steps in training, also with a policy that decides chunks of them."""
    version: int = 0
    """How many updates the policy's weights have seen; transitions carry it as `schema.POLICY_VERSION`."""
    progress: float = 0.0
    """How much of training is done, 0 to 1; set by the trainer, read by schedules."""

    should_stop: Callable[[], bool] = staticmethod(lambda: False)
    """Asked between two minibatches: where it says yes, `update` returns at once, and `unfinished` holds the rest."""
    unfinished: Any = None
    """An update that was stopped; part of the state. The next call of `update` completes it, without a new batch."""

    processes: SharedTraining | None = None
    """The processes that train this policy together; None where it is this one alone."""

    @classmethod
    def make_policy(
        cls, observation_space: Space, action_space: Space, config: PolicyConfig, settings: Any, **how: Any
    ) -> Policy:
        """Build the policy that this algorithm trains.

        `how`: `num_members`, `weights_follow` and `where` of `deft.models.building.make_policy`.
        """
        return make_policy(config, observation_space, action_space, **how)

    @classmethod
    def judged_by_critics(cls, settings: Any) -> str:
        """Return what its critics are functions of, beside the observation: critics of other things are not loaded."""
        return "actions"

    @classmethod
    def reads_critic_observation(cls, settings: Any) -> bool:
        """Return whether it trains a network that may read the streams of `critic_observation`."""
        return False

    @property
    def experience(self) -> Experience:
        """What `update` learns from; the trainer collects it (`deft.algorithms.experience`)."""
        return Rollouts()

    def set_reward_terms(self, names: Sequence[str]) -> None:
        """Take the names of the columns of `schema.NEXT_REWARD_TERMS`; called if `experience` asks for them."""

    def check_policy(self, fresh: bool) -> None:
        """Raise an error if the algorithm cannot train its policy; `fresh`: nothing has trained it before."""

    def check_updates(self, planned: int) -> None:
        """Warn if a run of so many updates would not train the policy."""
        warmup = getattr(self.settings, self.warmup_setting) if self.warmup_setting else 0
        if 0 < planned <= warmup:
            log.warning(
                "%s: the first %d updates leave the policy as it is, and the run makes %d: the policy will not be "
                "trained; use a smaller %s, or train for longer",
                self.warmup_setting,
                warmup,
                planned,
                self.warmup_setting,
            )

    def start_from_a_policy(self) -> None:
        """Adapt the settings of training to a policy that was trained before; called before the first update."""

    def share(self, processes: SharedTraining) -> None:
        """Train together with other processes: average gradients, merge statistics, decide alike."""
        self.processes = processes
        for part in vars(self).values():
            if isinstance(part, Auxiliary):
                part.processes = processes

    def apply_gradients(self, optimizer: torch.optim.Optimizer, max_grad_norm: float | None = None) -> Tensor:
        """Average the gradients over the processes, clip them to a norm, step; return the norm before clipping."""
        return optimization.apply_gradients(optimizer, max_grad_norm, self.processes)

    def descend(self, loss: Tensor, *optimizers: torch.optim.Optimizer) -> None:
        """Take one step of each optimizer with the gradient of a loss."""
        optimization.backward(loss, *optimizers)
        for optimizer in optimizers:
            self.apply_gradients(optimizer)

    @torch.no_grad()
    def observe(self, parts: Iterable[Any], value_only: bool = False) -> None:
        """Take observations into the normalisation of the policy, and of every copy of it that the algorithm holds.

        `value_only`: into statistics that no action depends on.
        """
        take = self.policy.observe_value if value_only else self.policy.observe
        for part in parts:
            take(part)
        if self.processes is not None:
            self.processes.merge_statistics(self.policy)
        self._copy_statistics()

    @torch.no_grad()
    def observe_critic(self, observations: Iterable[Any]) -> None:
        """Take observations into the statistics of privileged streams, if a trained policy has none of these yet."""
        critic = self.policy.critic
        if critic is None or has_seen_data(critic):
            return
        for observation in observations:
            critic.encoder.observe(observation)
        if self.processes is not None:
            self.processes.merge_statistics(self.policy)
        self._copy_statistics()

    def _copy_statistics(self) -> None:
        """Give every copy of the policy the policy's statistics."""
        for copied in self._copies():
            soft_update(copied, self.policy, 0.0)

    def _copies(self) -> Iterator[Policy]:
        """Targets, anchors and references: the policies beside the one that is trained."""
        return (part for part in vars(self).values() if isinstance(part, Policy) and part is not self.policy)

    def _complete_copies(self) -> None:
        """Give the statistics to copies that a checkpoint holds without them, as earlier versions wrote it."""
        if has_seen_data(self.policy) and not all(has_seen_data(copied) for copied in self._copies()):
            self._copy_statistics()

    def update(self, batches: Iterator[TensorDictBase]) -> Metrics:
        """Learn from as many batches as it needs; the metrics stay tensors until they are logged."""
        raise TypeError(f"{type(self).__name__} does not define update")

    def state_dict(self) -> dict[str, Any]:
        """All but the policy's weights: optimizers, targets, schedules, carried state."""
        raise TypeError(f"{type(self).__name__} does not define state_dict")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        raise TypeError(f"{type(self).__name__} does not define load_state_dict")
