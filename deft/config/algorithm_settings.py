"""Settings classes of the algorithms, listed in `ALGORITHM_SETTINGS`; a new algorithm adds its class here.

This module is the place to import all of them from. It declares the algorithms that learn from rollouts or with
critics; what every algorithm has is in `algorithm_base`, algorithms without critics are in `supervised_settings`.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from deft.config import groups
from deft.config.algorithm_base import AlgorithmSettings, OfflineSettings
from deft.config.supervised_settings import (
    DAggerSettings,
    DTSettings,
    ImitationSettings,  # noqa: F401 (a base class that other modules import from here)
    RecapOfflineSettings,
    RecapSettings,
    RewardModelSettings,
    SFTSettings,
    VisionSettings,
)
from deft.config.validation import (
    Count,
    Fraction,
    NonNegative,
    NonNegativeInt,
    Number,
    Positive,
    Several,
    Switch,
    settings,
)

DEFAULT_GROUPS = 8  # of GRPO, if neither num_envs nor groups_per_iteration is given


@settings
class RolloutSettings(AlgorithmSettings, groups.PolicyGradientSettings, groups.MicroBatchSettings):
    """Settings of the algorithms that learn from rollouts."""

    sequence_length: Count = 16
    """Steps per training sequence of recurrent policies."""
    adam_epsilon: Positive = 1e-5
    """Epsilon of Adam."""
    learning_rate_schedule: Literal["constant", "linear", "adaptive"] = "constant"
    """`linear`: decay to 0 at the end; `adaptive`: keep the KL divergence of an update near `desired_kl`."""
    desired_kl: Positive = 0.01
    """KL divergence per update of the adaptive schedule."""
    ratio: Literal["step", "token"] = "step"
    """Compute one probability ratio per action, or one per token (action dimension, step of a chunk or denoising)."""
    exploration_scale: Positive = 1.0
    """Factor on the standard deviation of a policy from `model_path`; above 1 if supervised training left it small."""
    auxiliary_learning_rate: NonNegative = 0.0
    """Initial learning rate of the auxiliary loss (object positions of `vla-tiny`, from labels); 0: none."""
    auxiliary_epochs: Count = 1
    """Initial epochs of the auxiliary loss per rollout; they decrease to 1 over the training."""
    action_critic_coef: NonNegative = 0.0
    """Weight of the gradient of a critic of actions that reads the streams of `critic_observation`; 0: none."""
    action_critic_batch_size: Count = 4096
    """Transitions per gradient step of the critic of actions; fewer for a CPU and small rollouts."""
    precision: groups.Precision = "fp32"
    """Number format of products; `bf16`: the image layers of `vla-tiny` alone; `tf32` is for GPUs."""
    capture: Literal["auto", "on", "off"] = "auto"
    """Capture gradient steps as CUDA graphs and replay them; `auto`: on a GPU, for policies known to allow it."""

    @model_validator(mode="after")
    def _judges_whole_actions(self) -> RolloutSettings:
        if self.action_critic_coef and self.ratio == "token":
            raise ValueError("action_critic_coef: needs ratio step")
        return self


@settings
class PPOSettings(RolloutSettings, groups.ActorCriticSettings, groups.CompileSettings):
    """Proximal policy optimization."""

    clip_range_vf: Positive | None = None
    """Clip the value to its old estimate ± this; None: no clipping."""
    normalize_advantage: Switch = True
    """Normalize the advantages of each minibatch."""
    behavior_weight_cap: Positive = 5.0
    """Largest importance weight of a transition collected by an older policy (VLA mode)."""
    value_updates: NonNegativeInt = 0
    """Further gradient steps of the value of `critic_observation` for each rollout, on the last rollouts; 0: none."""
    self_imitation_coef: NonNegative = 0.0
    """Weight of the imitation of the policy's own episodes whose return was larger than expected; 0: none."""
    self_imitation_return: Number | None = None
    """Smallest sum of rewards of an episode that is imitated; None: any."""
    denoising_discount: Fraction = 1.0
    """With `ratio token`: discount of the advantage for each denoising step before the last one (DPPO)."""

    @model_validator(mode="after")
    def _fits_the_ratio(self) -> PPOSettings:
        if self.denoising_discount != 1 and self.ratio != "token":
            raise ValueError("denoising_discount: weighs single denoising steps; give ratio token")
        if self.self_imitation_return is not None and not self.self_imitation_coef:
            raise ValueError("self_imitation_return: nothing is imitated; give self_imitation_coef")
        return self


@settings
class GRPOSettings(RolloutSettings):
    """Group relative policy optimization."""

    gamma = Field(1.0, description="Discount factor of an episode's return; 1: the undiscounted return.")
    batch_size = 256
    entropy_coef = 0.0
    sequence_length = 64
    group_size: Several = 4
    """Episodes per group; they start from the same state and are compared."""
    groups_per_iteration: Count | None = None
    """Groups per iteration; None: `num_envs` / `group_size`, or 8 if `num_envs` is not given."""
    max_resamples: NonNegativeInt = 1
    """Extra rounds of groups per iteration while too few groups differ in return; 0: none."""
    advantage: Literal["outcome", "process"] = "outcome"
    """`outcome`: compare the returns of whole episodes; `process`: compare the return-to-go at every step."""
    normalize_std: Switch = True
    """Divide advantages by the group's standard deviation; false: subtract the mean only (Dr. GRPO)."""
    reward_weights: dict[str, Number] = Field(default_factory=dict)
    """Weights of reward terms that are normalised per group (default 1); empty: use the total reward."""
    clip_range: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Clip the probability ratio to 1 − this, and to 1 + this if `clip_range_high` is not given."""
    clip_range_high: Positive | None = None
    """Clip the probability ratio to 1 + this (clip-higher)."""
    kl_coef: NonNegative = 0.1
    """Weight of the KL divergence from the reference (the initial policy); 0: no reference."""
    reference_update_interval: Count | None = None
    """Iterations between updates of the reference to the current policy; None: never."""
    auxiliary_warmup: NonNegativeInt = 0
    """Iterations at the start that train only the auxiliary loss and the critic of actions."""

    @model_validator(mode="after")
    def _something_warms_up(self) -> GRPOSettings:
        if self.auxiliary_warmup and not self.auxiliary_learning_rate and not self.action_critic_coef:
            raise ValueError(
                f"auxiliary_warmup {self.auxiliary_warmup}: nothing warms up; give auxiliary_learning_rate or "
                "action_critic_coef"
            )
        return self

    @property
    def envs_per_group(self) -> int:
        """Episodes of a group."""
        return self.group_size

    def copies(self, num_envs: int) -> int:
        """Return enough environments for all groups of an iteration if `num_envs` is at its default."""
        return self.group_size * (self.groups_per_iteration or DEFAULT_GROUPS) if num_envs == 1 else num_envs


@settings
class OffPolicySettings(OfflineSettings):
    """Settings of the algorithms with critics."""

    tau: Fraction = 0.005
    """Soft update rate of the target networks."""
    num_critics: Count = 2
    """Number of critics; the smallest of their values is used."""
    critic_layer_norm: Switch = False
    """Use LayerNorm in the critics."""


@settings
class StochasticPolicySettings(OffPolicySettings):
    """Settings of the algorithms with critics whose policy has a learning rate of its own."""

    policy_learning_rate: Positive | None = None
    """Learning rate of the policy and the temperature; None: `learning_rate`, which the critics use."""
    learning_rate_schedule: Literal["constant", "cosine"] = "constant"
    """Schedule of the policy's and temperature's learning rate; `cosine`: decay to 0 at the end of training."""


@settings
class TemperatureSettings(StochasticPolicySettings):
    """Settings of the algorithms with critics and an entropy bonus."""

    alpha: Literal["auto"] | NonNegative = "auto"
    """Entropy temperature; `auto`: learn it so that the entropy is `target_entropy`."""
    target_entropy: Literal["auto"] | Number = "auto"
    """Target entropy of the policy's actions in [-1, 1]; `auto`: −(number of action dimensions)."""


@settings
class IQLSettings(StochasticPolicySettings):
    """Implicit Q-learning."""

    expectile: Annotated[float, Field(gt=0, lt=1)] = 0.7
    """τ of the expectile regression of V: 0.5 is the mean; 1 is the best action in the dataset."""
    temperature: NonNegative = 3.0
    """β of the weights exp(β · advantage); 0 is behaviour cloning."""
    max_weight: Positive = 100.0
    """Upper bound of the weights exp(β · advantage)."""
    advantage: Literal["critic", "return"] = "critic"
    """Advantage: Q − V of the critics, or the discounted return of the episode − V."""
    position_source: Literal["labels", "start"] = "labels"
    """Object positions that `vla-tiny` acts on in training: labels, or predictions of the initial model."""
    reward_scaling: Literal["none", "return_range"] = "return_range"
    """`return_range`: multiply rewards by 1000 / (best − worst return), as in the paper for locomotion."""
    auxiliary_learning_rate: NonNegative = 0.0
    """Learning rate of the auxiliary loss (object positions of `vla-tiny`); 0: that of the policy."""
    learning_rate_schedule = "cosine"
    allow_constant_reward: Switch = False
    """Allow rewards that are all 0, or all equal where no episode terminates; this is behaviour cloning."""


@settings
class CQLSettings(TemperatureSettings):
    """Conservative Q-learning, CQL(H)."""

    policy_learning_rate = 1e-4
    cql_alpha: NonNegative = 5.0
    """Weight of the conservative penalty."""
    cql_samples: Count = 10
    """Actions sampled for the penalty from each source: uniform, policy, policy at the next state."""
    cql_temperature: Positive = 1.0
    """Temperature of the logsumexp in the penalty."""
    min_q_weight: Fraction = 1.0
    """Weight w in the target w · min Q + (1 − w) · max Q over the critics."""
    policy_warmup: NonNegativeInt = 0
    """Updates at the start that train the policy by behaviour cloning."""
    cql_lagrange: Switch = False
    """Learn the weight of the penalty so that the Q gap between policy and data is `cql_target_action_gap`."""
    cql_target_action_gap: Number = 10.0
    """Target of the Q gap with `cql_lagrange`."""
    cal_ql: Switch = False
    """Cal-QL: bound the Q values of policy actions from below by the dataset's returns, for online fine-tuning."""
    backup_entropy: Switch = False
    """Include the policy's entropy in the target."""
    backup_action: Literal["sample", "likeliest"] = "sample"
    """Next action in the target: sampled from the policy, or its most likely action."""


@settings
class DelayedSettings(OffPolicySettings):
    """Settings of TD3 and the algorithms that are based on it."""

    policy_noise: NonNegative = 0.2
    """Standard deviation of the noise on the target policy's actions."""
    noise_clip: NonNegative = 0.5
    """Clip the noise to ± this."""
    policy_delay: Count = 2
    """Critic updates per policy update."""


@settings
class TD3BCSettings(DelayedSettings):
    """TD3 with behaviour cloning."""

    alpha: NonNegative = 2.5
    """Weight of the Q value, λ = α / mean |Q|; 0 is behaviour cloning."""


@settings
class ReBRACSettings(DelayedSettings, StochasticPolicySettings):
    """TD3 with separate behaviour cloning penalties for the policy and the critics."""

    learning_rate = Field(1e-3, description="Learning rate of AdamW.")
    batch_size = Field(1024, description="Transitions per batch.")
    weight_decay = 0.0
    critic_layer_norm = True
    policy_bc_coef: NonNegative = 0.01
    """β_π: weight of the squared distance between the policy's action and the data's in the policy loss."""
    critic_bc_coef: NonNegative = 0.01
    """β_Q: weight of the squared distance between the next action and the data's in the target of the critics."""
    normalize_q: Switch = True
    """Divide the Q value of the policy loss by its mean magnitude in the batch."""


@settings
class FQLSettings(OffPolicySettings):
    """Flow Q-learning; with `chunk_length` above 1 Q-chunking (QC-FQL, QC)."""

    DENOISES: ClassVar[bool] = True

    weight_decay = 0.0
    critic_layer_norm = True
    policy_extraction: Literal["distill", "best_of_n"] = "distill"
    """`distill`: a one-step network near the flow policy maximises Q; `best_of_n`: the best of n samples acts."""
    alpha: NonNegative = 10.0
    """Weight of the squared distance between the one-step network and the flow policy (`distill`)."""
    num_candidates: Several = 32
    """Samples of the flow policy of which the best acts (`best_of_n`)."""
    value_aggregation: Literal["mean", "min"] = "mean"
    """Target of the critics: the mean or the minimum of their values."""
    normalize_q: Switch = False
    """Divide the Q value of the policy loss by its mean magnitude in the batch."""


@settings
class ReplaySettings(groups.TakeoverSettings, OffPolicySettings):
    """Settings of the algorithms with critics that learn in an environment, from a replay buffer."""

    LEARNS_FROM = "replay"

    weight_decay = 0.0
    buffer_size: Count = 1_000_000
    """Capacity of the replay buffer in transitions; at most `total_timesteps` are allocated."""
    learning_starts: NonNegativeInt = 10_000
    """Env steps before the first update."""
    random_steps: NonNegativeInt | None = None
    """Env steps with uniformly random actions at the start; None: `learning_starts`, or 0 with `model_path`."""
    train_freq: Count = 1
    """Steps per environment between two rounds of updates."""
    updates_per_step: Positive = 1.0
    """Updates per env step (update-to-data ratio)."""
    n_step: Count = 1
    """Number of rewards in an n-step target."""
    critic_warmup: NonNegativeInt = 0
    """Updates at the start that train only the critics."""
    keep_critics: Switch = True
    """With `model_path`: also load the critics of that run, if it has any."""
    prior_data: str | None = None
    """Mix transitions of this dataset into every batch."""
    prior_fraction: Fraction = 0.5
    """Fraction of a batch that comes from `prior_data`."""
    intervention_weight: Positive = 1.0
    """Sample transitions of `prior_data` that an expert decided this many times as often as others."""
    random_shift: NonNegativeInt = 4
    """Largest random shift of images in pixels; 0: none."""
    capture: Literal["auto", "on", "off"] = "auto"
    """Capture the update as a CUDA graph and replay it; `auto`: on a GPU."""


@settings
class TD3Settings(ReplaySettings, DelayedSettings):
    """Twin delayed deep deterministic policy gradient."""

    exploration_noise: NonNegative = 0.1
    """Standard deviation of the noise on the actions of training, in half ranges of the action space."""


@settings
class FQLOnlineSettings(FQLSettings, ReplaySettings):
    """Flow Q-learning and Q-chunking in an environment."""


@settings
class CalQLSettings(CQLSettings, ReplaySettings):
    """Cal-QL's online phase: calibrated CQL in an environment, on a mix of a dataset and new episodes."""

    NOT_OFFERED: ClassVar[tuple[str, ...]] = ("takeover", "takeover_rate")

    cal_ql = True

    @model_validator(mode="after")
    def _has_whole_returns(self) -> CalQLSettings:
        if self.takeover:
            raise ValueError("takeover: cal-ql learns from the returns of whole episodes; use sac")
        return self


@settings
class SACSettings(TemperatureSettings, ReplaySettings, groups.CompileSettings):
    """Soft actor-critic."""

    alpha_start: Positive | None = None
    """Initial value of a learned temperature; None: 1, or with `model_path` that of its run, else 0.05."""
    policy_delay: Count = 1
    """Critic updates per policy update."""
    anchor_coef: NonNegative = 0.0
    """Weight of the KL divergence from the policy of `model_path`, with Q scaled to mean size 1; 0: none."""
    anchor_half_life: Positive | None = None
    """Half-life of `anchor_coef` in updates, after `critic_warmup`; None: constant."""
    anchor_floor: NonNegative = 0.0
    """Lower bound of the decaying `anchor_coef`."""
    target_critics: Count | None = None
    """Size of the random subset of critics whose minimum is the target; None: all."""

    @model_validator(mode="after")
    def _subset_fits(self) -> SACSettings:
        if self.target_critics is not None and self.target_critics > self.num_critics:
            raise ValueError(f"target_critics {self.target_critics} is more than num_critics {self.num_critics}")
        return self

    @model_validator(mode="after")
    def _an_anchor_lets_go(self) -> SACSettings:
        if not self.anchor_coef and (self.anchor_half_life is not None or self.anchor_floor):
            raise ValueError("anchor_half_life, anchor_floor: there is no anchor; give anchor_coef")
        if self.anchor_floor > self.anchor_coef:
            raise ValueError(f"anchor_floor {self.anchor_floor:g} is above anchor_coef {self.anchor_coef:g}")
        return self


@settings
class DSRLSettings(SACSettings):
    """Reinforcement learning in the noise space of a frozen flow policy (DSRL)."""

    learning_starts = 1_000
    random_shift = 0
    keep_critics = False
    alpha = Field(
        0.0, description="Entropy temperature; `auto`: learn it so that the entropy is `target_entropy`; 0: no bonus."
    )
    target_entropy = Field("auto", description="Target entropy of the noise in units of `noise_bound`; `auto`: 0.")
    critic_warmup = 200
    anchor_coef = Field(
        0.02, description="Weight of the KL divergence from noise N(0, 1), with Q scaled to mean size 1; 0: none."
    )
    critic: Literal["noise", "action"] = "noise"
    """What the critics judge: the noise (DSRL-SAC), or the action, with noise critics distilled from it (DSRL-NA)."""
    noise_bound: Positive = 1.5
    """Largest absolute value of each number of the noise; the frozen policy was trained on N(0, 1)."""
    shared_noise: Switch = False
    """Start all steps of an action chunk from the same noise."""

    @model_validator(mode="after")
    def _fits_a_frozen_policy(self) -> DSRLSettings:
        if self.random_steps:
            raise ValueError("random_steps: dsrl explores by its noise, and random actions have none; leave it out")
        if self.prior_data is not None and self.critic == "noise":
            raise ValueError("prior_data: a dataset holds no noise; use critic action")
        if self.takeover and self.critic == "noise":
            raise ValueError("takeover: a person's action has no noise; use critic action")
        return self


ALGORITHM_SETTINGS: dict[str, type[AlgorithmSettings]] = {
    "ppo": PPOSettings,
    "grpo": GRPOSettings,
    "sac": SACSettings,
    "td3": TD3Settings,
    "cal-ql": CalQLSettings,
    "fql-online": FQLOnlineSettings,
    "dsrl": DSRLSettings,
    "iql": IQLSettings,
    "cql": CQLSettings,
    "td3-bc": TD3BCSettings,
    "rebrac": ReBRACSettings,
    "fql": FQLSettings,
    "dt": DTSettings,
    "sft": SFTSettings,
    "dagger": DAggerSettings,
    "reward-model": RewardModelSettings,
    "recap": RecapSettings,
    "recap-offline": RecapOfflineSettings,
    "vision": VisionSettings,
}
