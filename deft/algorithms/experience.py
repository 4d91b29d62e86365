"""What an algorithm learns from: one of these is `Algorithm.experience`.

`deft.training.experience` builds the collection that an online algorithm declares, and asks nothing else of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from tensordict import TensorDictBase


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Rollouts [T, N] of the current policy, each used for one update.

    Transitions carry V(final observation) where a segment ends, or the next observation.
    """

    on_policy: ClassVar[bool] = True
    next_observation: bool = False
    """Store `schema.NEXT_OBSERVATION` instead of `schema.NEXT_VALUE`."""
    reward_terms: bool = False
    """Store the named terms of the reward as `schema.NEXT_REWARD_TERMS`."""
    consecutive: str = ""
    """The settings, if any, for which each rollout must continue the episodes of the one before, column by column."""


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Whole episodes in groups: all members of a group start from the same state.

    `update` receives one rollout [T, groups · group_size] per round, with the members of a group side by side and the
    steps after an episode's end outside `schema.STEP_MASK`.
    """

    on_policy: ClassVar[bool] = True
    next_observation: ClassVar[bool] = False
    group_size: int
    """Episodes that start from one state."""
    groups_per_iteration: int | None = None
    """Groups that an update needs; None: as many as the environments hold at once."""
    max_resamples: int = 0
    """Further rounds in an iteration while too few groups are useful."""
    count_useful: Callable[[TensorDictBase], int] | None = None
    """Number of groups of a round that the algorithm can learn from; None: all of them."""
    reward_terms: bool = False
    """Store the named terms of the reward as `schema.NEXT_REWARD_TERMS`."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Batches drawn from a ring buffer of transitions that keeps what earlier policies collected."""

    on_policy: ClassVar[bool] = False
    next_observation: ClassVar[bool] = True
    batch_size: int = 256
    buffer_size: int = 1_000_000
    """Transitions that the buffer holds."""
    train_freq: int = 1
    """Steps of every environment between two calls of `update`."""
    updates_per_step: float = 1.0
    """Batches per env step."""
    learning_starts: int = 0
    """Env steps before the first batch."""
    random_steps: int | None = None
    """Env steps of uniformly random actions at the start; None: `learning_starts` for an untrained policy, else 0."""
    n_step: int = 1
    """Rewards that a transition sums."""
    gamma: float = 0.99
    returns: bool = False
    """Add the discounted return of the episode as `schema.VALUE_TARGET`; transitions wait for its end."""
    prior_data: str | None = None
    """A dataset that every batch is mixed with."""
    prior_fraction: float = 0.5
    """Fraction of a batch that comes from `prior_data`."""
    intervention_weight: float = 1.0
    """How often a transition of `prior_data` that an expert decided is sampled, relative to others."""
    precision: str = "fp32"
    """Precision of matrix products: float32, tf32 or bf16."""
    capture: Literal["auto", "on", "off"] = "off"
    """Record updates as a CUDA graph. The algorithm must then define `step`, `schedule` and `period` as
    `OfflineAlgorithm` does."""
    kept: tuple[str | tuple[str, ...], ...] = ()
    """Further keys of a step that the buffer stores, where a step has them, such as (`sample`, `noise`)."""
    takeover: bool = False
    """Whether a person can take over in the live view; their transitions are added to the prior data."""
    takeover_rate: float = 10.0
    """Env steps per second while a person watches."""
    captured_warmup: int = 0
    """First updates that run other operations than later ones; they are recorded separately."""
    reward_terms: bool = False
    """Store the named terms of the reward as `schema.NEXT_REWARD_TERMS`."""


@dataclass(frozen=True, kw_only=True)
class Labels:
    """Batches of all steps so far, with the actions that the environment's scripted expert would take there.

    Without an expert, the policy acts alone, and whole episodes are learned from. The environments take single steps.
    In each decision of the policy, a chunk of its steps, the scripted expert acts instead with the probability
    initial_beta · beta^round.
    """

    on_policy: ClassVar[bool] = False
    next_observation: ClassVar[bool] = True
    reward_terms: ClassVar[bool] = False
    batch_size: int = 256
    updates_per_round: int = 200
    """Batches after each round of `rollout_steps`."""
    initial_beta: float = 1.0
    beta: float = 0.5
    prior_data: str | None = None
    """A dataset whose episodes are among the labels from the start."""
    record: bool = True
    """Write the episodes as a dataset at the end."""
    expert_finishes: bool = False
    """Whether a scripted expert that acts does so to the end of the episode, and only its steps are learned from."""
    expert: Literal["scripted", "person", "none"] = "scripted"
    """Who labels steps: the environment's scripted expert all of them, a person those in which they act, or nobody."""
    takeover: bool = False
    """Whether a person can take over in the live view."""
    takeover_rate: float = 10.0
    """Env steps per second while a person watches."""

    @property
    def has_expert(self) -> bool:
        """Whether there are labels."""
        return self.expert != "none"


@dataclass(frozen=True, kw_only=True)
class DatasetBatches:
    """Batches of a dataset; `OfflineTrainer` draws them from the algorithm's sampler."""

    on_policy: ClassVar[bool] = False


Experience: TypeAlias = Rollouts | Groups | Replay | Labels | DatasetBatches
