"""Every setting of a run, as typed classes: the config file, the command line and the Python API share them.

`deft.config.loading` reads and writes them; `deft.cli` makes the flags from them. An algorithm's own settings live in a
class of their own here, named in `ALGORITHM_SETTINGS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

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
    vector: Literal["sync", "process", "envpool"] = "sync"
    """How the copies run: in this process, in worker processes over shared memory, or in envpool's threads."""
    num_workers: Count | None = None
    """Worker processes (`vector: process`); by default one a core, at most one an environment."""
    max_episode_steps: Count | None = None
    """A time limit in place of the environment's own."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the environment's constructor."""
    timeout: Positive = 60.0
    """Seconds that one step may take before the environment counts as hung (`process` vectors and VLA mode)."""


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
        if self.name == "vla" and self.vla_config is None:
            raise ValueError("name 'vla' needs vla_config with at least model_class")
        if self.name != "vla" and self.vla_config is not None:
            raise ValueError(f"vla_config is given but name is '{self.name}'; write name 'vla' or leave it out")
        return self


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


ALGORITHM_SETTINGS: dict[str, type[AlgorithmSettings]] = {"ppo": PPOSettings}


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
class RunConfig:
    """One run: the resolved settings that are written into its folder and repeat it."""

    env: EnvConfig = Field(default_factory=EnvConfig)
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    output_dir: str | None = None
    """The run folder; by default `outputs/<algorithm>-<env>-<time>`."""
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
class EvaluateConfig:
    """What to evaluate, and how."""

    path: str
    """A run folder (its best or latest checkpoint) or a checkpoint."""
    episodes: Count = 10
    """How many episodes."""
    video: str | None = None
    """Write a video of the first episodes to this file (`.mp4`)."""
    random_policy: Switch = False
    """Play uniformly random actions instead, on the same seeds: the baseline."""
    seed: Seed = 0
    """Seed of the evaluation's environments."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""


# Settings that may also be written in another place of a file: there → where they belong.
MOVED_SETTINGS: dict[str, str] = {
    "trainer.rollout_steps": "trainer.buffer_size",
    "algorithm.cfg.rollout_steps": "trainer.buffer_size",
    "trainer.batch_size": "algorithm.cfg.batch_size",
}

# Sections that may be written as a plain string, and the setting that it stands for.
SHORTHANDS: dict[str, str] = {"env": "id", "policy": "name", "algorithm": "name"}
