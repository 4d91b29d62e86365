"""Every setting of a run, as typed classes: the config file, the command line and the Python API share them.

`deft.config.loading` reads and writes them; `deft.cli` makes the flags from them. An algorithm's own settings live in a
class of their own here, named in `ALGORITHM_SETTINGS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, TypeAdapter, ValidationInfo, field_validator, model_validator

from deft.config.validation import (
    Count,
    Fraction,
    NonNegative,
    NonNegativeInt,
    Number,
    Positive,
    Seed,
    Switch,
    quoted,
    settings,
    shown,
)


@settings
class EnvConfig:
    """The world a policy acts in."""

    id: str = "deft/Reach-v0"
    """Any Gymnasium id, or one of Deft's own."""
    num_envs: Count = 1
    """Copies stepped together."""
    vector: Literal["sync", "process", "envpool", "gpu"] = "sync"
    """How the copies run: here, in worker processes, in envpool's threads, or in one GPU simulation (ManiSkill)."""
    num_workers: Count | None = None
    """Worker processes (`vector: process`); by default one a core, at most one an environment."""
    max_episode_steps: Count | None = None
    """A time limit in place of the environment's own."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the environment's constructor."""
    timeout: Positive = 60.0
    """Seconds that one step may take before the environment counts as hung (`process` vectors and VLA mode)."""
    restart_workers: NonNegativeInt = 3
    """How often in a row a worker process that hangs or dies is replaced, losing its episodes; 0: it ends the run."""


@settings
class VLAConfig:
    """Which vision-language-action model to load, and from where."""

    model_class: str
    """A dotted class path, or the name of an entry point of the group `deft.vla_models`."""
    model_path: str | None = None
    """Weights: `.safetensors`, `.pth` or `.pt` (tensors only). None: new weights from the seed."""
    model_config: dict[str, Any] = Field(default_factory=dict)
    """Passed to the model's constructor."""


@settings
class PolicyConfig:
    """What is trained."""

    name: Literal["actor_critic", "vla"] = "actor_critic"
    """A network from scratch, or a VLA model behind `VLAPolicy`."""
    hidden_sizes: tuple[Count, ...] = (64, 64)
    """Hidden layers of the actor and of the critic."""
    activation: Literal["tanh", "relu", "elu", "gelu", "silu"] = "tanh"
    """Between the hidden layers."""
    encoder_dim: Count = 256
    """Width of the features that the image encoder gives."""
    memory_hidden: NonNegativeInt = 0
    """Width of the recurrent memory (GRU); 0: none."""
    memory_num_layers: Count = 1
    """Layers of the recurrent memory."""
    log_std_init: Number = 0.0
    """Log standard deviation of a Gaussian policy at the start."""
    normalize_observation: Switch = True
    """Scale vector observations by their running mean and deviation; saved with the policy."""
    normalize_reward: Switch = True
    """Scale rewards by the running deviation of the discounted return; saved with the policy."""
    chunk_length: Count = 1
    """Env steps that one inference decides."""
    action_dim: Count | None = None
    """Checked against the environment where given."""
    vla_config: VLAConfig | None = None
    """The model behind `name: vla`."""

    @model_validator(mode="after")
    def _vla_config_goes_with_vla(self) -> PolicyConfig:
        check_vla_config(self)
        return self


def check_vla_config(policy: Any) -> None:
    """Refuse a VLA policy without its model, and a model without a VLA policy."""
    if policy.name == "vla" and policy.vla_config is None:
        raise ValueError("name 'vla' needs vla_config with at least model_class")
    if policy.name != "vla" and policy.vla_config is not None:
        raise ValueError(f"vla_config is given but name is '{policy.name}'; write name 'vla' or leave it out")


@settings
class AlgorithmSettings:
    """The base of every algorithm's own settings."""

    ALIASES: ClassVar[Mapping[str, str]] = {}
    """Other names that the documents give to these settings; accepted in files and as flags."""

    learning_rate: Positive = 3e-4
    """Adam's step size."""
    gamma: Fraction = 0.99
    """Discount."""
    batch_size: Count = 64
    """Transitions in a minibatch (steps times sequences, with memory)."""


@settings
class PPOSettings(AlgorithmSettings):
    """Proximal policy optimization."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "lr": "learning_rate",
        "discount_gamma": "gamma",
        "ppo_gae_lambda": "gae_lambda",
        "ppo_epochs": "n_epochs",
        "ppo_clip_range": "clip_range",
        "clip_epsilon": "clip_range",
        "ppo_clip_range_vf": "clip_range_vf",
        "ppo_value_coef": "value_coef",
        "ppo_entropy_coef": "entropy_coef",
    }

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
    compile: Switch = False
    """Compile the update with torch.compile."""


@settings
class OfflineSettings(AlgorithmSettings):
    """The base of the algorithms that learn from a dataset."""

    ALIASES: ClassVar[Mapping[str, str]] = {"lr": "learning_rate", "discount_gamma": "gamma"}

    batch_size: Count = 256
    """Transitions (or windows) in a batch."""
    weight_decay: NonNegative = 1e-6
    """Decoupled weight decay (AdamW)."""
    precision: Literal["float32", "tf32", "bf16"] = "float32"
    """What the matrix products compute in: `bf16` is quicker where the machine has units for it, `tf32` on a GPU."""


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
    reward_scaling: Literal["none", "return_range"] = "return_range"
    """`return_range`: rewards times 1000 / (best − worst return of the dataset), as in the paper for locomotion."""
    learning_rate_schedule: Literal["constant", "cosine"] = "cosine"
    """Of the policy: `cosine` goes to 0 at the end of training."""


@settings
class CQLSettings(OffPolicySettings):
    """Conservative Q-learning, CQL(H)."""

    policy_learning_rate: Positive = 1e-4
    """Adam's step size for the policy and the temperature; `learning_rate` is the critics'."""
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
    """Entropy temperature: learned towards an entropy of minus the action dims, or fixed."""
    backup_entropy: Switch = False
    """Whether the target counts the policy's entropy."""


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
    dropout: Fraction = 0.1
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
    "iql": IQLSettings,
    "cql": CQLSettings,
    "td3-bc": TD3BCSettings,
    "dt": DTSettings,
}


@settings
class TrainerConfig:
    """Who runs the loop, for how long, and what is written when."""

    buffer_size: Count = 2048
    """Steps of a rollout, for each environment."""
    buffer_type: Literal["standard", "vla"] = "standard"
    """`standard`: collect, train, clear. `vla`: a background collector writes while the main thread trains."""
    total_timesteps: Count = 1_000_000
    """Env steps in all."""
    iterations: Count | None = None
    """Rollouts in all; where given, in place of `total_timesteps`."""
    max_staleness: NonNegativeInt = 1
    """VLA mode: how many versions older than the learner's the acting weights may be. 0 equals standard mode."""
    eval_freq: NonNegativeInt = 5_000
    """Env steps between evaluations; 0: none."""
    eval_episodes: Count = 10
    """Episodes of an evaluation."""
    log_freq: NonNegativeInt = 1_000
    """Env steps between lines of metrics."""
    save_freq: NonNegativeInt = 10_000
    """Env steps between checkpoints; 0: at the end alone."""
    keep_checkpoints: Count = 3
    """How many of the latest to keep, besides the best."""
    video_freq: NonNegativeInt = 0
    """Env steps between videos of an evaluation episode; 0: none."""


@settings
class LoggingConfig:
    """What is said, where."""

    console_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = "INFO"
    """Least level on the console."""
    file_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = "DEBUG"
    """Least level in `logs/`."""
    enable_file_logging: Switch = True
    """Write `logs/rl_training_*.log`."""
    tensorboard: Switch = True
    """Write `tensorboard/`."""
    use_wandb: Switch = False
    """Log to Weights & Biases too (extra `wandb`); offline without a key."""
    use_trackio: Switch = False
    """Log to trackio too (extra `trackio`); local."""
    progress_bar: Switch = True
    """Show a progress bar on a terminal."""


@settings
class AlgorithmConfig:
    """Which algorithm, with its settings."""

    name: str = "ppo"
    """One of the names in `ALGORITHM_SETTINGS`."""
    cfg: AlgorithmSettings = Field(default_factory=lambda given: ALGORITHM_SETTINGS[given["name"]]())
    """The settings of that algorithm."""

    @field_validator("name")
    @classmethod
    def _name_is_known(cls, name: str) -> str:
        if name not in ALGORITHM_SETTINGS:
            raise ValueError(f"{shown(name)} is not allowed; one of {quoted(ALGORITHM_SETTINGS)}")
        return name

    @field_validator("cfg", mode="before")
    @classmethod
    def _cfg_is_of_the_named_algorithm(cls, cfg: Any, info: ValidationInfo) -> Any:
        settings_class = ALGORITHM_SETTINGS.get(info.data.get("name", ""))
        if settings_class is None:  # the name is wrong: that error is the one to tell
            return AlgorithmSettings()
        return TypeAdapter(settings_class).validate_python(cfg)


@settings
class RunSettings:
    """What every run has, whatever it trains on."""

    output_dir: str | None = None
    """The run folder; by default `outputs/<algorithm>-<env or dataset>-<time>`."""
    seed: Seed = 0
    """One seed, one result."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    threads: Count | None = None
    """Torch's threads; by default what the machine has left beside workers and collector."""
    model_path: str | None = None
    """Start from the weights of this run, checkpoint or weights file."""
    resume: str | None = None
    """Go on from this checkpoint (or the latest of this run folder)."""
    auto_resume: Switch = False
    """Go on from the latest checkpoint in `output_dir`, if there is one."""
    overwrite: Switch = False
    """Replace a run that is already in `output_dir`."""


@settings
class RunConfig(RunSettings):
    """One run in an environment: the resolved settings that are written into its folder and repeat it."""

    env: EnvConfig = Field(default_factory=EnvConfig)
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)


@settings
class DatasetConfig:
    """What is learned from."""

    path: str | None = None
    """A name (`hopper-medium-v2`, a Minari id) or a path; see docs/datasets.md."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the loader of its format."""
    download: Switch = False
    """Fetch a Minari id that is not on this machine."""
    reference_returns: tuple[Number, Number] | None = None
    """Returns of a random and an expert policy, which the normalised score is made of; by default the dataset's own."""
    cache_gb: Positive = 2.0
    """Memory for the episodes of a dataset that is streamed from disk (images)."""


@settings
class EvaluationEnvConfig:
    """The environment to evaluate in."""

    id: str | None = None
    """Any Gymnasium id; by default the dataset's own."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the environment's constructor."""
    max_episode_steps: Count | None = None
    """A time limit in place of the environment's own."""


@settings
class ActorConfig:
    """The policy, and the shape of its critics."""

    chunk_length: ClassVar[int] = 1  # these policies decide one step at a time

    name: Literal["actor", "vla"] = "actor"
    """A network from scratch, or a VLA model."""
    hidden_dim: Count = 256
    """Width of the hidden layers of actor, value and critics."""
    num_layers: Count = 2
    """Hidden layers."""
    encoder_dim: Count = 256
    """Width of the features that the image encoder gives."""
    log_std_init: Number = 0.0
    """Log standard deviation of a Gaussian policy at the start."""
    normalize_observation: Switch = True
    """Scale vector observations by the dataset's mean and deviation; saved with the policy."""
    vla_config: VLAConfig | None = None
    """The model behind `name: vla`."""

    @model_validator(mode="after")
    def _vla_config_goes_with_vla(self) -> ActorConfig:
        check_vla_config(self)
        return self


@settings
class OfflineTrainerConfig:
    """How long to train on a dataset, and what is written when."""

    num_epochs: Count = 100
    """Epochs in all."""
    updates_per_epoch: Count | None = None
    """Gradient updates of an epoch; by default one pass over the dataset, transitions / batch_size."""
    num_seeds: Count = 1
    """Independent learners trained at once in one batched update, each with its own weights and batches."""
    eval_freq: NonNegativeInt = 5
    """Epochs between evaluations; 0: none."""
    eval_episodes: Count = 10
    """Episodes of an evaluation."""
    log_freq: NonNegativeInt = 1_000
    """Updates between lines of metrics."""
    save_freq: NonNegativeInt = 10
    """Epochs between checkpoints; 0: at the end alone."""
    keep_checkpoints: Count = 3
    """How many of the latest to keep, besides the best."""
    capture: Literal["auto", "on", "off"] = "auto"
    """Record the update as one CUDA graph and replay it; `auto`: on a GPU."""


@settings
class OfflineRunConfig(RunSettings):
    """One run on a dataset: the resolved settings that are written into its folder and repeat it."""

    dataset: DatasetConfig = Field(default_factory=DatasetConfig)
    env: EvaluationEnvConfig = Field(default_factory=EvaluationEnvConfig)
    policy: ActorConfig = Field(default_factory=ActorConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    trainer: OfflineTrainerConfig = Field(default_factory=OfflineTrainerConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)


def run_class(algorithm_class: type[AlgorithmSettings]) -> Any:
    """The class of a run's settings (`RunConfig` or `OfflineRunConfig`), by its algorithm's."""
    return OfflineRunConfig if issubclass(algorithm_class, OfflineSettings) else RunConfig


@settings
class EvaluateConfig:
    """What to evaluate, and how."""

    path: str
    """A run folder (its best or latest checkpoint) or a checkpoint."""
    episodes: Count = 10
    """How many episodes."""
    video: str | None = None
    """Write a video of the first episodes to this file (`.mp4`)."""
    env: str | None = None
    """Play in this environment instead of the run's own."""
    random_policy: Switch = False
    """Play uniformly random actions instead, on the same seeds: the baseline."""
    seed: Seed = 0
    """Seed of the evaluation's environments."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""


@settings
class CollectConfig:
    """What to play, and where to record it."""

    policy: str
    """A run folder or checkpoint, `random` (uniform actions), or `expert` (the environment's own script)."""
    out: str
    """The dataset's folder, named as Minari names datasets: `datasets/reach/expert-v0`."""
    env: str | None = None
    """Any Gymnasium id, or one of Deft's own; by default the one that the policy was trained in."""
    steps: Count | None = None
    """Record exactly so many env steps; episodes that are open then are cut."""
    episodes: Count | None = None
    """Record so many whole episodes."""
    noise: NonNegative = 0.0
    """On the policy's actions. Box: Gaussian, in half ranges of the action; discrete: chance of a random action."""
    deterministic: Switch = False
    """Take the policy's likeliest action, as in evaluation, in place of a sampled one."""
    num_envs: Count = 1
    """Copies stepped together."""
    vector: Literal["sync", "process"] = "sync"
    """How the copies run: in this process, or in worker processes."""
    env_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the environment's constructor, beside those of the policy's run."""
    max_episode_steps: Count | None = None
    """A time limit in place of the environment's own."""
    append: Switch = False
    """Add to the dataset where there is one."""
    seed: Seed = 0
    """One seed, one recording; appended episodes start from seed + the number of those there."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""

    @model_validator(mode="after")
    def _has_one_end(self) -> CollectConfig:
        if (self.steps is None) == (self.episodes is None):
            raise ValueError("give --steps or --episodes, one of them")
        return self


@settings
class PlayConfig:
    """What to watch, and where."""

    env: str | None = None
    """Any Gymnasium id, or one of Deft's own; by default the one that the policy was trained in, or `tabletop`."""
    task: str | None = None
    """The environment's `task`; the same as `--env-kwargs task=…`."""
    policy: str = "expert"
    """A run folder or checkpoint, `random` (uniform actions), or `expert` (the environment's own script)."""
    video: str | None = None
    """Write a video of the episodes to this file (`.mp4`)."""
    episodes: Count = 3
    """How many episodes."""
    seed: Seed = 0
    """Episode i starts from seed + i."""
    env_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the environment's constructor, beside those of the policy's run."""
    max_episode_steps: Count | None = None
    """A time limit in place of the environment's own."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""


# Settings that may also be written in another place of a file: there → where they belong.
MOVED_SETTINGS: dict[str, str] = {
    "trainer.rollout_steps": "trainer.buffer_size",
    "algorithm.cfg.rollout_steps": "trainer.buffer_size",
    "trainer.batch_size": "algorithm.cfg.batch_size",
}

# Sections that may be written as a plain string, and the setting that it stands for.
SHORTHANDS: dict[str, str] = {"env": "id", "policy": "name", "algorithm": "name", "dataset": "path"}
