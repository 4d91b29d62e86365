"""The settings of each algorithm, as typed classes named in `ALGORITHM_SETTINGS`; a new algorithm adds its own here."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from deft.config.groups import Precision
from deft.config.validation import (
    Count,
    Fraction,
    NonNegative,
    NonNegativeInt,
    Number,
    Positive,
    Switch,
    settings,
)

DEFAULT_GROUPS = 8  # of GRPO, where neither num_envs nor groups_per_iteration is given


@settings
class AlgorithmSettings:
    """The base of every algorithm's own settings."""

    LEARNS_FROM: ClassVar[Literal["rollouts", "replay", "dataset"]] = "rollouts"
    """Which kind of run it is: in an environment, by rollouts or from a replay buffer, or on a dataset."""

    learning_rate: Positive = 3e-4
    """Adam's step size."""
    gamma: Fraction = 0.99
    """Discount."""
    batch_size: Count = 64
    """Transitions in a minibatch (steps times sequences, with memory)."""

    @property
    def envs_per_group(self) -> int:
        """Environments that must be in one process, because their episodes are compared; 1: any split will do."""
        return 1

    def copies(self, num_envs: int) -> int:
        """How many environments a run steps together, where `env.num_envs` says this."""
        return num_envs


@settings
class PPOSettings(AlgorithmSettings):
    """Proximal policy optimization."""

    gae_lambda: Fraction = 0.95
    """Advantage estimation: 0 is one-step TD, 1 is Monte Carlo."""
    n_epochs: Count = 4
    """Passes over each rollout."""
    clip_range: Positive = 0.2
    """How far the probability ratio may move from 1."""
    clip_range_vf: Positive | None = None
    """How far the value may move from its old estimate; None: not clipped."""
    value_coef: NonNegative = 0.5
    """Weight of the value loss."""
    entropy_coef: NonNegative = 0.01
    """Weight of the entropy bonus."""
    max_grad_norm: Positive | None = 0.5
    """Gradient clipping."""
    gradient_accumulation: Count = 1
    """Parts of a minibatch that go through the policy one after the other: the same step in less memory."""
    normalize_advantage: Switch = True
    """Per minibatch."""
    target_kl: Positive | None = None
    """Stop the epochs of an update when the approximate KL passes 1.5 times this."""
    learning_rate_schedule: Literal["constant", "linear", "adaptive"] = "constant"
    """`linear` goes to 0 at the end of training; `adaptive` keeps the KL of an update near `desired_kl`."""
    desired_kl: Positive = 0.01
    """For the adaptive schedule."""
    behavior_weight_cap: Positive = 5.0
    """Largest importance weight of a transition that an older policy acted (VLA mode)."""
    sequence_length: Count = 16
    """Steps of a training sequence, for policies with memory."""
    adam_epsilon: Positive = 1e-5
    """Adam's epsilon."""
    value_warmup: NonNegativeInt = 0
    """Updates at the start that train the value alone: its own layers, and nothing that an action depends on."""
    auxiliary_learning_rate: NonNegative = 0.0
    """Step size, at first, of what it learns besides its reward: `vla-tiny` to see, from labels. 0: nothing."""
    auxiliary_epochs: Count = 1
    """Passes over a rollout for that, at first; one fewer with each equal part of the training, and one in the last."""
    compile: Switch = False
    """Compile the update with torch.compile."""


@settings
class GRPOSettings(AlgorithmSettings):
    """Group relative policy optimization."""

    gamma: Fraction = 1.0
    """Discount of an episode's return; 1: its plain sum."""
    batch_size: Count = 256
    """Transitions in a minibatch (steps times sequences, with memory)."""
    group_size: Count = 4
    """Episodes that start from one state and are compared with each other."""
    groups_per_iteration: Count | None = None
    """Groups of an iteration; None: as many as `num_envs` holds at once, 8 where that is not given."""
    max_resamples: NonNegativeInt = 1
    """Rounds of further groups in an iteration, while too few groups have a spread of return; 0: none."""
    advantage: Literal["outcome", "process"] = "outcome"
    """`outcome`: the episode's return, for all its steps; `process`: the return from each step on, against the other
    members at the same step."""
    normalize_std: Switch = True
    """Divide by the group's standard deviation; off: subtract its mean alone (Dr. GRPO)."""
    reward_weights: dict[str, Number] = Field(default_factory=dict)
    """Weights of the reward's named terms, each normalised in its group first (one not named: 1); empty: the reward."""
    n_epochs: Count = 4
    """Passes over the groups of an iteration."""
    clip_range: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """How far the probability ratio may fall below 1, and rise above it where `clip_range_high` is not given."""
    clip_range_high: Positive | None = None
    """How far the ratio may rise above 1 (clip-higher)."""
    kl_coef: NonNegative = 0.1
    """Weight of the KL divergence from the reference, the policy at the start; 0: no reference is kept."""
    reference_update_interval: Count | None = None
    """Iterations after which the reference becomes the policy of then; None: it stays."""
    ratio: Literal["step", "token"] = "step"
    """One ratio for each decision of the policy, or for each token that it reports (dims, steps of a chunk)."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus."""
    max_grad_norm: Positive | None = 0.5
    """Gradient clipping."""
    gradient_accumulation: Count = 1
    """Parts of a minibatch that go through the policy one after the other: the same step in less memory."""
    target_kl: Positive | None = None
    """Stop the epochs of an update when the approximate KL from the policy that acted passes 1.5 times this."""
    learning_rate_schedule: Literal["constant", "linear"] = "constant"
    """`linear` goes to 0 at the end of training."""
    sequence_length: Count = 64
    """Steps of a training sequence, for policies with memory."""
    adam_epsilon: Positive = 1e-5
    """Adam's epsilon."""

    auxiliary_learning_rate: NonNegative = 0.0
    """Step size, at first, of what it learns besides its reward: `vla-tiny` to see, from labels. 0: nothing."""
    auxiliary_epochs: Count = 1
    """Passes over a rollout for that, at first; one fewer with each equal part of the training, and one in the last."""
    auxiliary_warmup: NonNegativeInt = 0
    """Iterations at the start that train that alone: what the policy does waits until it sees."""

    @model_validator(mode="after")
    def _a_group_compares(self) -> GRPOSettings:
        if self.group_size < 2:
            raise ValueError(f"group_size {self.group_size}: a group compares at least 2 episodes")
        return self

    @model_validator(mode="after")
    def _something_warms_up(self) -> GRPOSettings:
        if self.auxiliary_warmup and not self.auxiliary_learning_rate:
            raise ValueError(
                f"auxiliary_warmup {self.auxiliary_warmup}: nothing learns then; give auxiliary_learning_rate"
            )
        return self

    @property
    def envs_per_group(self) -> int:
        """The members of a group."""
        return self.group_size

    def copies(self, num_envs: int) -> int:
        """All the groups of an iteration at once, where the number of environments is left at its default."""
        return self.group_size * (self.groups_per_iteration or DEFAULT_GROUPS) if num_envs == 1 else num_envs


@settings
class OfflineSettings(AlgorithmSettings):
    """The base of the algorithms that learn from a dataset."""

    LEARNS_FROM: ClassVar[Literal["rollouts", "replay", "dataset"]] = "dataset"

    batch_size: Count = 256
    """Transitions (or windows) in a batch."""
    weight_decay: NonNegative = 1e-6
    """Decoupled weight decay (AdamW)."""
    precision: Precision = "fp32"
    """Number format of matrix products; `bf16` needs hardware support to be faster, `tf32` is for GPUs."""


@settings
class OffPolicySettings(OfflineSettings):
    """The base of the algorithms with critics."""

    tau: Fraction = 0.005
    """How far the target networks move towards the trained ones at each update."""
    num_critics: Count = 2
    """Size of the ensemble of critics; the smallest of their values counts."""
    critic_layer_norm: Switch = False
    """LayerNorm in the critics."""


@settings
class IQLSettings(OffPolicySettings):
    """Implicit Q-learning."""

    expectile: Annotated[float, Field(gt=0, lt=1)] = 0.7
    """τ of the expectile regression of V on Q: 0.5 is the mean, towards 1 the best action in the data."""
    temperature: NonNegative = 3.0
    """β of the weights exp(β · advantage); 0 is behaviour cloning."""
    max_weight: Positive = 100.0
    """Where those weights are clipped."""
    advantage: Literal["critic", "return"] = "critic"
    """What those weights compare with V: the critics' value, or what the episode went on to earn, discounted."""
    position_source: Literal["labels", "start"] = "labels"
    """Object positions that `vla-tiny` learns to act on: labels, or those predicted by the model that the run starts
    from, which its own episodes depend on."""
    reward_scaling: Literal["none", "return_range"] = "return_range"
    """`return_range`: rewards times 1000 / (best − worst return of the dataset), as in the paper for locomotion."""
    policy_learning_rate: Positive | None = None
    """The policy's step size; None: that of the critics and V, `learning_rate`."""
    auxiliary_learning_rate: NonNegative = 0.0
    """Step size of what the policy learns besides: `vla-tiny` to see, from labels. 0: that of the policy."""
    learning_rate_schedule: Literal["constant", "cosine"] = "cosine"
    """Of the policy: `cosine` goes to 0 at the end of training."""
    allow_constant_reward: Switch = False
    """Train although every reward is 0, or all are alike and no episode terminates: in effect behaviour cloning."""


@settings
class CQLSettings(OffPolicySettings):
    """Conservative Q-learning, CQL(H)."""

    policy_learning_rate: Positive = 1e-4
    """Adam's step size for the policy and the temperature; `learning_rate` is the critics'."""
    learning_rate_schedule: Literal["constant", "cosine"] = "constant"
    """Of the policy: `cosine` goes to 0 at the end of training."""
    cql_alpha: NonNegative = 5.0
    """Weight of the conservative penalty."""
    cql_samples: Count = 10
    """Actions of each kind (random, of the policy here, of the policy at the next state) in the penalty."""
    cql_temperature: Positive = 1.0
    """Temperature of its logsumexp."""
    min_q_weight: Fraction = 1.0
    """The target is this times the smallest of the critics' values plus the rest times the largest."""
    policy_warmup: NonNegativeInt = 0
    """Updates at the start in which the policy clones the data instead of following the critics."""
    cql_lagrange: Switch = False
    """Learn a factor on the penalty that holds the gap between policy and data at `cql_target_action_gap`."""
    cql_target_action_gap: Number = 10.0
    """For `cql_lagrange`."""
    cal_ql: Switch = False
    """Bound the values of the policy's actions from below by the dataset's returns (Cal-QL), for offline to online."""
    alpha: Literal["auto"] | NonNegative = "auto"
    """Entropy temperature: learned towards `target_entropy`, or fixed."""
    target_entropy: Literal["auto"] | Number = "auto"
    """Entropy of the policy's unit actions that `alpha: auto` holds; `auto`: minus the action dims."""
    backup_entropy: Switch = False
    """Whether the target counts the policy's entropy."""
    backup_action: Literal["sample", "likeliest"] = "sample"
    """Whose value the target is: of the policy as it is trained, or of its likeliest action, which is evaluated."""


@settings
class TD3BCSettings(OffPolicySettings):
    """TD3 with behaviour cloning."""

    alpha: NonNegative = 2.5
    """Weight of the value against behaviour cloning, λ = α / mean |Q|; 0 is behaviour cloning."""
    policy_noise: NonNegative = 0.2
    """Deviation of the noise on the target policy's actions."""
    noise_clip: NonNegative = 0.5
    """Where that noise is clipped."""
    policy_delay: Count = 2
    """Critic updates for each policy update."""


@settings
class SFTSettings(OfflineSettings):
    """Supervised fine-tuning (behaviour cloning)."""

    gradient_accumulation: Count = 1
    """Parts of a batch that go through the policy one after the other: the same step in less memory."""
    loss: Literal["log_prob", "mse"] = "log_prob"
    """`log_prob`: the likelihood of the data's actions, so that the deviation is learned too; `mse`: squared error."""
    learning_rate_schedule: Literal["constant", "cosine"] = "constant"
    """`cosine` goes to 0 at the end of training."""
    val_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Episodes to hold out for `val_loss`, rounded to whole episodes; 0: none."""
    early_stopping: NonNegativeInt = 0
    """Stop after this many epochs in a row without a lower `val_loss`; 0: never."""
    augment: tuple[Literal["shift", "color"], ...] = ()
    """Change the images of a batch at random: `shift` by up to 1/16 of a side, `color` by gain, offset and gamma."""

    @field_validator("augment", mode="before")
    @classmethod
    def _names_with_commas(cls, value: Any) -> Any:
        words = [value] if isinstance(value, str) else value
        if not isinstance(words, list | tuple):
            return value
        return tuple(name for word in words for name in (word.split(",") if isinstance(word, str) else [word]) if name)

    @model_validator(mode="after")
    def _something_ends_it(self) -> SFTSettings:
        if self.early_stopping and not self.val_fraction:
            raise ValueError(f"early_stopping {self.early_stopping}: needs a val_loss; give val_fraction above 0")
        return self


@settings
class SACSettings(OffPolicySettings):
    """Soft actor-critic."""

    LEARNS_FROM: ClassVar[Literal["rollouts", "replay", "dataset"]] = "replay"

    weight_decay: NonNegative = 0.0
    """Decoupled weight decay (AdamW)."""
    buffer_size: Count = 1_000_000
    """Transitions that the replay buffer holds; the oldest go first. It takes memory for `total_timesteps` at most."""
    learning_starts: NonNegativeInt = 10_000
    """Env steps before the first update."""
    random_steps: NonNegativeInt | None = None
    """Env steps of uniformly random actions at the start; None: `learning_starts`, or 0 for a policy that was given."""
    alpha: Literal["auto"] | NonNegative = "auto"
    """Entropy temperature: learned towards `target_entropy`, or fixed."""
    alpha_start: Positive | None = None
    """What a learned temperature starts from; None: 1, or for a policy that was given that of its run, else 0.05."""
    target_entropy: Literal["auto"] | Number = "auto"
    """Entropy of the policy's unit actions that `alpha: auto` holds; `auto`: minus the action dims."""
    train_freq: Count = 1
    """Steps of every environment between two turns of learning."""
    updates_per_step: Positive = 1.0
    """Updates for each env step collected (the update-to-data ratio)."""
    n_step: Count = 1
    """Rewards that a target sums before it trusts the critics."""
    policy_delay: Count = 1
    """Critic updates for each policy update."""
    policy_learning_rate: Positive | None = None
    """Adam's step size for the policy and the temperature; None: `learning_rate`, which is the critics'."""
    learning_rate_schedule: Literal["constant", "cosine"] = "constant"
    """Of the policy and the temperature: `cosine` goes to 0 at the end of training."""
    critic_warmup: NonNegativeInt = 0
    """Updates at the start that train the critics alone, and nothing that an action depends on."""
    anchor_coef: NonNegative = 0.0
    """Weight of the policy's KL divergence from the policy that was given, beside values of mean size 1; 0: none."""
    anchor_half_life: Positive | None = None
    """Updates, after `critic_warmup`, in which that weight halves; None: it stays."""
    anchor_floor: NonNegative = 0.0
    """The weight at which the halving ends: how far the policy may stray in the end."""
    target_critics: Count | None = None
    """Of how many critics, drawn anew at each update, the target takes the smallest value; None: of all."""
    keep_critics: Switch = True
    """With `model_path`: start from the critics of that run too, where it has any."""
    prior_data: str | None = None
    """A dataset that every batch is mixed with."""
    prior_fraction: Fraction = 0.5
    """Which part of a batch it gives."""
    random_shift: NonNegativeInt = 4
    """Pixels by which images are shifted at random in a batch; 0: not at all."""
    compile: Switch = False
    """Compile the update with torch.compile."""
    capture: Literal["auto", "on", "off"] = "auto"
    """Record the update as one CUDA graph and replay it; `auto`: on a GPU."""

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
class DTSettings(OfflineSettings):
    """Decision Transformer."""

    learning_rate: Positive = 1e-4
    """AdamW's step size after the warm-up."""
    batch_size: Count = 64
    """Windows in a batch."""
    context_length: Count = 20
    """Steps of a window: return-to-go, observation and action each."""
    n_layer: Count = 3
    """Layers of the transformer."""
    n_head: Count = 1
    """Attention heads of a layer."""
    embed_dim: Count = 128
    """Width of the transformer."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """On embeddings, attention and residual branches, while training."""
    weight_decay: NonNegative = 1e-4
    """Decoupled weight decay (AdamW)."""
    warmup_steps: NonNegativeInt = 10_000
    """Updates over which the learning rate rises from 0, linearly."""
    max_grad_norm: Positive | None = 0.25
    """Gradient clipping."""
    target_return: tuple[Number, ...] | None = None
    """Returns to aim at in evaluation, one or several; None: the best return of the dataset."""
    return_scale: Positive | None = None
    """What returns-to-go are divided by; None: the power of ten below the largest return of the dataset."""
    max_episode_length: Count = 1000
    """Timesteps that have an embedding; at least the dataset's longest episode."""
    context_slide: Count = 1
    """How many of its oldest steps a full window drops at once while acting: 1 is the paper's, more is quicker."""

    @field_validator("target_return", mode="before")
    @classmethod
    def _one_target_is_a_list_of_one(cls, value: Any) -> Any:
        return (value,) if isinstance(value, int | float) and not isinstance(value, bool) else value

    @model_validator(mode="after")
    def _sizes_fit(self) -> DTSettings:
        if self.embed_dim % self.n_head:
            raise ValueError(f"embed_dim {self.embed_dim} does not divide into n_head {self.n_head}")
        if self.context_slide > self.context_length:
            raise ValueError(f"context_slide {self.context_slide} is more than context_length {self.context_length}")
        return self


ALGORITHM_SETTINGS: dict[str, type[AlgorithmSettings]] = {
    "ppo": PPOSettings,
    "grpo": GRPOSettings,
    "sac": SACSettings,
    "iql": IQLSettings,
    "cql": CQLSettings,
    "td3-bc": TD3BCSettings,
    "dt": DTSettings,
    "sft": SFTSettings,
}
