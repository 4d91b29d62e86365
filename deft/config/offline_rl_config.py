"""`OfflineRLConfig`: the settings of an offline run as one flat class, for users of `IQLTrainer` and its siblings.

Every field is a setting of `deft.config.settings` under its flat name; the algorithm's own are given to its trainer.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from deft.config.algorithm_settings import OfflineSettings, OffPolicySettings
from deft.config.fields import setting_names
from deft.config.flags import run_flags
from deft.config.groups import Precision
from deft.config.loading import resolve, set_path
from deft.config.settings import (
    DatasetConfig,
    DatasetPolicyConfig,
    LoggingConfig,
    OfflineRunConfig,
    OfflineTrainerConfig,
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
    suggestion,
)
from deft.errors import InputError


@settings
class OfflineRLConfig:
    """Reinforcement learning from a dataset: what all its algorithms share, and the run's settings."""

    given: ClassVar[set[str]] = set()

    # Training
    num_epochs: Count = OfflineTrainerConfig.num_epochs
    batch_size: Count = OfflineSettings.batch_size
    learning_rate: Positive = OfflineSettings.learning_rate
    weight_decay: NonNegative = OfflineSettings.weight_decay
    updates_per_epoch: Count | None = OfflineTrainerConfig.updates_per_epoch
    num_seeds: Count = OfflineTrainerConfig.num_seeds
    precision: Precision = OfflineSettings.precision
    capture: Literal["auto", "on", "off"] = OfflineTrainerConfig.capture

    # Networks
    hidden_dim: Count = DatasetPolicyConfig.hidden_dim
    num_layers: Count = DatasetPolicyConfig.num_layers
    encoder_dim: Count = DatasetPolicyConfig.encoder_dim
    log_std_init: Number = DatasetPolicyConfig.log_std_init
    normalize_observation: Switch = DatasetPolicyConfig.normalize_observation

    # RL
    discount_gamma: Fraction = OfflineSettings.gamma
    tau: Fraction = OffPolicySettings.tau
    num_critics: Count = OffPolicySettings.num_critics
    critic_layer_norm: Switch = OffPolicySettings.critic_layer_norm

    # Logging
    log_freq: NonNegativeInt = OfflineTrainerConfig.log_freq
    eval_freq: NonNegativeInt = OfflineTrainerConfig.eval_freq
    save_freq: NonNegativeInt = OfflineTrainerConfig.save_freq
    eval_episodes: Count = OfflineTrainerConfig.eval_episodes
    eval_deterministic: Switch = OfflineTrainerConfig.eval_deterministic
    keep_checkpoints: Count = OfflineTrainerConfig.keep_checkpoints
    console_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = LoggingConfig.console_level
    file_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = LoggingConfig.file_level
    enable_file_logging: Switch = LoggingConfig.enable_file_logging
    tensorboard: Switch = LoggingConfig.tensorboard
    use_wandb: Switch = LoggingConfig.use_wandb
    use_trackio: Switch = LoggingConfig.use_trackio
    progress_bar: Switch = LoggingConfig.progress_bar

    # Run
    cache_gb: Positive = DatasetConfig.cache_gb
    seed: Seed = OfflineRunConfig.seed
    device: str = OfflineRunConfig.device
    threads: Count | None = OfflineRunConfig.threads
    model_path: Place | None = OfflineRunConfig.model_path
    resume: Place | None = OfflineRunConfig.resume
    auto_resume: Switch = OfflineRunConfig.auto_resume
    overwrite: Switch = OfflineRunConfig.overwrite

    # Output
    output_dir: OutputPath | None = "./output/offline_rl"

    def to_run_config(self, algorithm: str, **own: Any) -> OfflineRunConfig:
        """The same settings for one algorithm, with those of its own.

        Where an algorithm has another default than this class (dt: learning rate, batch size, weight decay), what was
        not given is left to the algorithm.
        """
        paths = _paths(algorithm)
        mapping: dict[str, Any] = {"algorithm": {"name": algorithm}}
        for name in setting_names(OfflineRLConfig):
            value = getattr(self, name)
            is_default = value == getattr(OfflineRLConfig, name)
            if name in paths:
                if name in self.given or not (is_default and paths[name].startswith("algorithm.cfg.")):
                    set_path(mapping, paths[name], value)
            elif not is_default:
                raise InputError(f"{name}: {shown(value)} is given, but {algorithm} has no such setting; leave it out")
        for name, value in own.items():
            path = paths.get(name, "")
            if not path.startswith("algorithm.cfg."):
                if name in setting_names(OfflineRLConfig):
                    raise InputError(f"{name}: is a setting of OfflineRLConfig; give it there")
                names = [known for known, place in paths.items() if place.startswith("algorithm.cfg.")]
                raise InputError(f"{name}: {algorithm} has no such setting; {suggestion(name, names)}")
            set_path(mapping, path, value)
        return resolve(mapping)


def _remember_what_is_given(init: Any) -> Any:
    """The constructor, which also keeps the names of its arguments: a default that is given counts as given."""

    @functools.wraps(init)
    def remembering(self: OfflineRLConfig, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        object.__setattr__(self, "given", {*setting_names(OfflineRLConfig)[: len(args)], *kwargs})

    return remembering


OfflineRLConfig.__init__ = _remember_what_is_given(OfflineRLConfig.__init__)  # type: ignore[method-assign]


def _paths(algorithm: str) -> Mapping[str, str]:
    """Where each flat name belongs."""
    flags = [flag for group in run_flags(algorithm) for flag in group.flags]
    return {name: flag.path for flag in flags for name in (flag.name, *flag.aliases)}
