"""Settings that several commands share, declared once: the classes of `deft.config` are composed of these groups.

A class that counts in other units than steps names them in `UNIT`, which the help texts of its frequencies show.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from deft.config.validation import (
    Count,
    NonNegativeInt,
    OutputPath,
    Place,
    Seed,
    Switch,
    settings,
)

Precision = Literal["fp32", "tf32", "bf16"]
AutoPrecision = Literal["auto", "fp32", "tf32", "bf16"]


@settings
class SeedSettings:
    """Seed and device."""

    seed: Seed = 0
    """Seed of every random number generator."""
    device: str = "auto"
    """Device: `auto`, `cpu`, `cuda` or `cuda:N`."""


@settings
class ComputeSettings(SeedSettings):
    """Seed, device and threads of a training run."""

    threads: Count | None = None
    """CPU threads of PyTorch; by default OMP_NUM_THREADS, else a number chosen by the size of the network."""


@settings
class ResumeSettings:
    """How a run starts where an earlier one exists."""

    resume: Place | None = None
    """Resume from this checkpoint, or from the latest checkpoint of this run directory."""
    auto_resume: Switch = False
    """Resume from the latest checkpoint in `output_dir` if there is one."""
    overwrite: Switch = False
    """Replace an existing run in `output_dir`."""


@settings
class RunSettings(ComputeSettings, ResumeSettings):
    """Directory, seed, device and start of a run."""

    output_dir: OutputPath | None = None
    """Run directory; by default `<algorithm>-<env or dataset>-<time>` in `$OUTPUT_BASE` or `outputs`."""


@settings
class CheckpointSettings:
    """When checkpoints are saved."""

    UNIT: ClassVar[str] = "env steps"

    save_freq: NonNegativeInt = 10_000
    """Save a checkpoint every this many {unit}; 0: only at the end."""
    keep_checkpoints: Count = 3
    """Keep this many of the latest checkpoints, and the best."""


@settings
class EvaluationSettings:
    """When the policy is evaluated during training."""

    UNIT: ClassVar[str] = "env steps"

    eval_freq: NonNegativeInt = 5_000
    """Evaluate every this many {unit}; 0: never."""
    eval_episodes: Count = 10
    """Episodes per evaluation."""


@settings
class ProgressSettings(CheckpointSettings, EvaluationSettings):
    """When a run evaluates, logs and saves."""

    eval_deterministic: Switch = True
    """Evaluate the most likely actions; `--eval-stochastic` evaluates sampled actions."""
    log_freq: NonNegativeInt = 1_000
    """Log metrics every this many {unit}."""


@settings
class EnvironmentChoice(SeedSettings):
    """The environment in which a policy is played."""

    env: str | None = None
    """Gymnasium id or name of a Deft environment; by default the environment of the run."""
    task: str | None = None
    """Task of the environment; the same as `--env-kwargs task=TASK`."""
    env_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment's constructor, added to those of the run."""
    rename_streams: dict[str, str] = Field(default_factory=dict)
    """Rename observation streams of the environment to the names that the policy expects, as NEW_NAME=STREAM."""
    deterministic: Switch = True
    """Play the most likely actions; `--stochastic` samples actions as in training."""
    seed: Seed = 0
    """Episode i starts from seed + i."""
