"""`RLConfig`: the settings of an online run as one flat class, for Python users of `PPOTrainer` and its siblings.

Every field is a setting of `deft.config.settings` under its flat name (the name of its flag, or an alias of it), and
takes its default from there.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic_core import ArgsKwargs

from deft.config.algorithm_settings import ALGORITHM_SETTINGS, GRPOSettings, PPOSettings, SACSettings
from deft.config.fields import setting_names
from deft.config.flags import run_flags
from deft.config.groups import Precision
from deft.config.loading import resolve, set_path, to_dict
from deft.config.settings import (
    ClusterConfig,
    CurriculumConfig,
    EnvConfig,
    LoggingConfig,
    PolicyConfig,
    RunConfig,
    TrainerConfig,
)
from deft.config.validation import (
    Count,
    Fraction,
    NonNegative,
    NonNegativeInt,
    Number,
    OutputPath,
    Place,
    Positive,
    Seed,
    Switch,
    settings,
    shown,
)
from deft.errors import InputError


@settings
class RLConfig:
    """Online reinforcement learning: the algorithm, its settings, and the run's."""

    algorithm: Literal["ppo", "sac", "grpo"] = "ppo"

    # Training
    total_timesteps: Count = TrainerConfig.total_timesteps
    rollout_steps: Count = TrainerConfig.buffer_size
    batch_size: Count = PPOSettings.batch_size
    learning_rate: Positive = PPOSettings.learning_rate
    discount_gamma: Fraction = PPOSettings.gamma

    # PPO
    ppo_epochs: Count = PPOSettings.n_epochs
    ppo_clip_range: Positive = PPOSettings.clip_range
    ppo_gae_lambda: Fraction = PPOSettings.gae_lambda
    ppo_value_coef: NonNegative = PPOSettings.value_coef
    ppo_entropy_coef: NonNegative = PPOSettings.entropy_coef
    ppo_clip_range_vf: Positive | None = PPOSettings.clip_range_vf
    max_grad_norm: Positive | None = PPOSettings.max_grad_norm
    normalize_advantage: Switch = PPOSettings.normalize_advantage
    target_kl: Positive | None = PPOSettings.target_kl
    learning_rate_schedule: Literal["constant", "linear", "adaptive", "cosine"] = PPOSettings.learning_rate_schedule
    desired_kl: Positive = PPOSettings.desired_kl
    behavior_weight_cap: Positive = PPOSettings.behavior_weight_cap
    sequence_length: Count = PPOSettings.sequence_length
    adam_epsilon: Positive = PPOSettings.adam_epsilon
    compile: Switch = PPOSettings.compile
    gradient_accumulation: Count = PPOSettings.gradient_accumulation
    value_warmup: NonNegativeInt = PPOSettings.value_warmup
    auxiliary_learning_rate: NonNegative = PPOSettings.auxiliary_learning_rate
    auxiliary_epochs: Count = PPOSettings.auxiliary_epochs

    # SAC
    buffer_size: Count = SACSettings.buffer_size
    learning_starts: NonNegativeInt = SACSettings.learning_starts
    random_steps: NonNegativeInt | None = SACSettings.random_steps
    tau: Fraction = SACSettings.tau
    alpha: Literal["auto"] | NonNegative = SACSettings.alpha
    alpha_start: Positive | None = SACSettings.alpha_start
    target_entropy: Literal["auto"] | Number = SACSettings.target_entropy
    train_freq: Count = SACSettings.train_freq
    updates_per_step: Positive = SACSettings.updates_per_step
    n_step: Count = SACSettings.n_step
    num_critics: Count = SACSettings.num_critics
    target_critics: Count | None = SACSettings.target_critics
    critic_layer_norm: Switch = SACSettings.critic_layer_norm
    critic_warmup: NonNegativeInt = SACSettings.critic_warmup
    keep_critics: Switch = SACSettings.keep_critics
    policy_delay: Count = SACSettings.policy_delay
    policy_learning_rate: Positive | None = SACSettings.policy_learning_rate
    anchor_coef: NonNegative = SACSettings.anchor_coef
    anchor_half_life: Positive | None = SACSettings.anchor_half_life
    anchor_floor: NonNegative = SACSettings.anchor_floor
    prior_data: str | None = SACSettings.prior_data
    prior_fraction: Fraction = SACSettings.prior_fraction
    random_shift: NonNegativeInt = SACSettings.random_shift
    weight_decay: NonNegative = SACSettings.weight_decay
    precision: Precision = SACSettings.precision
    capture: Literal["auto", "on", "off"] = SACSettings.capture

    # GRPO
    group_size: Count = GRPOSettings.group_size
    groups_per_iteration: Count | None = GRPOSettings.groups_per_iteration
    max_resamples: NonNegativeInt = GRPOSettings.max_resamples
    advantage: Literal["outcome", "process"] = GRPOSettings.advantage
    normalize_std: Switch = GRPOSettings.normalize_std
    kl_coef: NonNegative = GRPOSettings.kl_coef
    clip_range: Positive = GRPOSettings.clip_range  # of PPO too, beside `ppo_clip_range`
    clip_range_high: Positive | None = GRPOSettings.clip_range_high
    reference_update_interval: Count | None = GRPOSettings.reference_update_interval
    ratio: Literal["step", "token"] = GRPOSettings.ratio
    auxiliary_warmup: NonNegativeInt = GRPOSettings.auxiliary_warmup

    # Logging
    log_freq: NonNegativeInt = TrainerConfig.log_freq
    eval_freq: NonNegativeInt = TrainerConfig.eval_freq
    save_freq: NonNegativeInt = TrainerConfig.save_freq
    eval_episodes: Count = TrainerConfig.eval_episodes
    eval_deterministic: Switch = TrainerConfig.eval_deterministic
    keep_checkpoints: Count = TrainerConfig.keep_checkpoints
    video_freq: NonNegativeInt = TrainerConfig.video_freq
    console_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = LoggingConfig.console_level
    file_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = LoggingConfig.file_level
    enable_file_logging: Switch = LoggingConfig.enable_file_logging
    tensorboard: Switch = LoggingConfig.tensorboard
    use_wandb: Switch = LoggingConfig.use_wandb
    use_trackio: Switch = LoggingConfig.use_trackio
    progress_bar: Switch = LoggingConfig.progress_bar

    # Collection
    iterations: Count | None = TrainerConfig.iterations
    buffer_type: Literal["standard", "vla"] = TrainerConfig.buffer_type
    max_staleness: NonNegativeInt = TrainerConfig.max_staleness
    collectors: Literal["here", "ray"] = ClusterConfig.collectors
    ray_address: str = ClusterConfig.ray_address
    inference: Literal["auto", "worker", "actor"] = ClusterConfig.inference
    inference_gpus: NonNegative = ClusterConfig.inference_gpus
    worker_cpus: Positive = ClusterConfig.worker_cpus
    spare_workers: NonNegativeInt = ClusterConfig.spare_workers
    block_steps: Count | None = ClusterConfig.block_steps

    # Environment (its id comes from the environment that the trainer is given)
    num_envs: Count = EnvConfig.num_envs
    vector: Literal["sync", "process", "envpool", "gpu"] = EnvConfig.vector
    num_workers: Count | None = EnvConfig.num_workers
    max_episode_steps: Count | None = EnvConfig.max_episode_steps
    env_kwargs: dict[str, Any] = Field(default_factory=dict)
    env_timeout: Positive = EnvConfig.timeout
    restart_workers: NonNegativeInt = EnvConfig.restart_workers
    reward_weights: dict[str, Number] = Field(default_factory=dict)
    curriculum: CurriculumConfig | None = EnvConfig.curriculum

    # Policy
    hidden_sizes: tuple[Count, ...] = PolicyConfig.hidden_sizes
    hidden_dim: Count = PolicyConfig.hidden_dim
    num_layers: Count = PolicyConfig.num_layers
    distribution: Literal["tanh_gaussian", "gaussian"] | None = PolicyConfig.distribution
    activation: Literal["tanh", "relu", "elu", "gelu", "silu"] = PolicyConfig.activation
    encoder_dim: Count = PolicyConfig.encoder_dim
    memory_hidden: NonNegativeInt = PolicyConfig.memory_hidden
    memory_num_layers: Count = PolicyConfig.memory_num_layers
    log_std_init: Number = PolicyConfig.log_std_init
    normalize_observation: Switch = PolicyConfig.normalize_observation
    normalize_reward: Switch = PolicyConfig.normalize_reward
    chunk_length: Count = PolicyConfig.chunk_length

    # Run
    seed: Seed = RunConfig.seed
    device: str = RunConfig.device
    threads: Count | None = RunConfig.threads
    model_path: Place | None = RunConfig.model_path
    resume: Place | None = RunConfig.resume
    auto_resume: Switch = RunConfig.auto_resume
    overwrite: Switch = RunConfig.overwrite

    # Output
    output_dir: OutputPath | None = "./output/online_rl"

    @model_validator(mode="wrap")
    @classmethod
    def _note_what_is_given(cls, given: Any, make: Any) -> Any:
        """An algorithm's own default holds where the user said nothing, and not where the default was written out."""
        names = frozenset(given.kwargs or ()) if isinstance(given, ArgsKwargs) else _given(given)
        made = make(given)
        object.__setattr__(made, "_given", names)
        return made

    def to_run_config(self, env: str | None = None) -> RunConfig:
        """The same settings as a `RunConfig`, for the environment with this id (by default the default one)."""
        mapping: dict[str, Any] = {"algorithm": {"name": self.algorithm}}
        chosen: dict[str, str] = {}  # the name that each path's value came from
        paths, defaults = _paths(self.algorithm) if self.algorithm in ALGORITHM_SETTINGS else {}, RLConfig()
        for name in setting_names(RLConfig)[1:] if paths else ():  # an algorithm that is not there: `resolve` tells
            value = getattr(self, name)
            changed = value != getattr(defaults, name)
            if name == "curriculum":  # a section, not a flag
                if changed:
                    set_path(mapping, "env.curriculum", to_dict(value))
            elif name in paths:
                if changed or name in _given(self) or not paths[name].startswith("algorithm.cfg."):
                    other = chosen.setdefault(paths[name], name)
                    if value != getattr(self, other):
                        values = f"{shown(value)} and {other} is {shown(getattr(self, other))}"
                        raise InputError(f"{name} is {values}: two names of one setting; give one of them")
                    set_path(mapping, paths[name], value)
            elif changed:
                advice = "a rollout's length is rollout_steps" if name == "buffer_size" else "leave it out"
                raise InputError(f"{name}: {shown(value)} is given, but {self.algorithm} has no such setting; {advice}")
        if env is not None:
            set_path(mapping, "env.id", env)
        return resolve(mapping)


def _given(config: Any) -> frozenset[str]:
    """The settings that were written out when this object was made."""
    return getattr(config, "_given", frozenset())


_REPLAY = ("buffer_size", "learning_starts", "tau")


def _paths(algorithm: str) -> dict[str, str]:
    """Where each flat name belongs. `buffer_size` is the replay buffer's here; a rollout has `rollout_steps`."""
    flags = [flag for group in run_flags(algorithm) for flag in group.flags]
    paths = {name: flag.path for flag in flags for name in (flag.name, *flag.aliases)}
    return {name: path for name, path in paths.items() if name not in _REPLAY or path.startswith("algorithm.cfg.")}
