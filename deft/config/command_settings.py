"""Typed settings classes of the commands other than `deft train`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from deft.config.groups import EnvironmentChoice, PortSettings
from deft.config.validation import (
    Count,
    NonNegative,
    NonNegativeInt,
    OutputPath,
    Positive,
    Switch,
    VideoPath,
    settings,
)

Split = Literal["train", "held-out", "all"]


@settings
class DelaySettings:
    """A simulated delay of the computation of action chunks."""

    inference_delay: NonNegativeInt | None = None
    """Simulate that a chunk takes this many steps to compute, and measure the jumps between chunks."""
    chunking: Literal["wait", "async", "rtc"] = "async"
    """With `inference_delay`: stand still meanwhile, continue with the last chunk, or use real-time chunking."""
    execution_horizon: Count | None = None
    """With `inference_delay`: start the next chunk after this many steps of the last one; by default half of it."""
    max_guidance: NonNegative = 5.0
    """With `chunking rtc`: largest factor of the guidance towards the last chunk in a denoising step."""


@settings
class EvaluateConfig(EnvironmentChoice, DelaySettings):
    """Evaluate a trained policy."""

    path: str | None = None
    """Run directory (its best or latest checkpoint) or checkpoint."""
    suite: str | None = None
    """Evaluate on the tasks of a suite, such as `metaworld/MT10`; `--episodes` is then per task."""
    policy: Literal["random", "expert"] | None = None
    """Evaluate random actions or the environment's scripted expert instead of a run."""
    video: VideoPath | None = None
    """Write a video of the first episodes to this file (`.mp4`)."""
    videos: OutputPath | None = None
    """Write videos of up to three successful and three failed episodes into this directory."""
    split: Split | None = None
    """Object combinations of the tabletop: those of training, held-out ones, or all."""
    shuffle_instructions: Switch = False
    """Name a random object of the scene in the instruction, to measure how much the policy depends on language."""
    random_policy: Switch = False
    """Play uniformly random actions on the same seeds, as a baseline."""
    vector: Literal["sync", "process", "warp"] | None = None
    """How the environments run, as in training; by default one after the other in this process."""

    @model_validator(mode="after")
    def _delay_fits(self) -> EvaluateConfig:
        names = [field.name for field in fields(DelaySettings)]
        if self.inference_delay is None:
            if given := [name for name in names if getattr(self, name) != getattr(EvaluateConfig, name)]:
                raise ValueError(f"{given[0]}: is for evaluations with a delay; give inference_delay too")
            return self
        for name in ("suite", "policy", "random_policy", "video", "videos"):
            if getattr(self, name):
                raise ValueError(f"inference_delay: is for the policy of a run, without {name}; leave one of them out")
        return self

    def of_run(self) -> dict[str, Any]:
        """Return the arguments of `evaluate_run`."""
        others = {"suite", "policy", *(field.name for field in fields(DelaySettings))}
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in others}


@settings
class CompareRunsConfig(EnvironmentChoice):
    """Compare several policies on the same episodes."""

    runs: tuple[str, ...]
    """Runs or checkpoints; `ppo=RUN,RUN` or `ppo=runs/ppo_*`: several seeds of a method; `random`; `expert`."""
    episodes = Field(100, description="Episodes per policy and column of the table.")
    split: tuple[Split, ...] | None = None
    """Columns of the table; by default `train` and `held-out` where the environment has these splits."""
    shuffle_instructions: Switch = False
    """Add a column in which the instruction names a random object."""
    vector: Literal["sync", "process", "warp"] = "sync"
    """How the environments run, as in training."""
    out: OutputPath | None = None
    """Directory for `comparison.json` and its plot; by default `comparison` in the last run's directory."""

    @field_validator("runs")
    @classmethod
    def _one_or_more(cls, runs: tuple[str, ...]) -> tuple[str, ...]:
        if not runs:
            raise ValueError("give the runs to compare")
        if len(set(runs)) < len(runs):
            raise ValueError("a run is named twice; give each once")
        return runs


@settings
class PolicyChoice(EnvironmentChoice):
    """A policy to play, and the environment."""

    policy: str
    """Run directory or checkpoint, `random` (uniform actions), or `expert` (the environment's scripted policy)."""
    max_episode_steps: Count | None = None
    """Time limit that replaces the environment's own."""


@settings
class CollectConfig(PolicyChoice):
    """Record episodes of a policy as a dataset."""

    out: OutputPath
    """Directory of the dataset, with a Minari-style name: `datasets/reach/expert-v0`."""
    format: Literal["minari", "lerobot"] = "minari"
    """Dataset format: Minari, or LeRobot v3.0 (continuous actions only)."""
    fps: Positive | None = None
    """Frames per second of a LeRobot dataset; by default the environment's `render_fps`."""
    use_videos: Switch = True
    """Store the cameras of a LeRobot dataset as mp4; `--no-use-videos` stores lossless PNG images."""
    steps: Count | None = None
    """Record exactly this many env steps; unfinished episodes are truncated."""
    episodes: Count | None = None  # type: ignore[assignment]
    """Record this many whole episodes."""
    noise: NonNegative = 0.0
    """Noise on the actions. Box: standard deviation in half ranges; discrete: probability of a random action."""
    deterministic = Field(False, description="Play the most likely actions; by default actions are sampled.")
    num_envs: Count = 1
    """Parallel environments."""
    vector: Literal["sync", "process", "warp"] = "sync"
    """Run the environments in this process, in worker processes, or in one simulation on MuJoCo Warp."""
    only_success: Switch = False
    """Record only episodes that end with success; others are played and dropped."""
    append: Switch = False
    """Append to an existing dataset."""
    seed = Field(0, description="Seed of the recording; appended episodes start from seed + number of episodes.")

    @model_validator(mode="after")
    def _has_one_end(self) -> CollectConfig:
        if (self.steps is None) == (self.episodes is None):
            raise ValueError("give --steps or --episodes, one of them")
        if self.only_success and self.steps is not None:
            raise ValueError("--only-success records whole episodes; give --episodes instead of --steps")
        if self.vector == "warp" and self.policy == "expert":
            raise ValueError("--vector warp: the scripted expert acts in the CPU simulator; use --vector process")
        return self


@settings
class PlayConfig(PolicyChoice):
    """Play episodes of a policy, a scripted expert or random actions, and record a video."""

    policy = "expert"
    video: VideoPath | None = None
    """Write a video of the episodes to this file (`.mp4`)."""
    episodes = 3


@settings
class FetchConfig:
    """Download a dataset and verify it."""

    name: str
    """D4RL name (`hopper-medium-v2`), or with `url` any name."""
    url: str | None = None
    """Download from this http, https or file URL instead of D4RL's."""
    sha256: str | None = None
    """SHA-256 that the file must have; D4RL publishes none, so by default size and HDF5 layout are verified."""
    out: OutputPath | None = None
    """Target directory; by default the first of DEFT_DATASETS, or `~/.deft/datasets`."""
    overwrite: Switch = False
    """Download again and replace an existing file."""


@settings
class ReportConfig:
    """Write report.html, one self-contained page about a run, about several runs, or about a comparison."""

    directories: tuple[str, ...]
    """Run directories; `ppo=RUN,RUN` or `ppo=runs/ppo_*`: seeds of a method; or the folder of a comparison."""
    out: OutputPath | None = None
    """File to write; by default `report.html` in the directory of a single run, else in the current one."""


@settings
class ViewConfig(PortSettings):
    """Serve a page about a run, in progress or finished, or about the runs in a folder, until Ctrl-C."""

    run: str
    """Run directory, or a folder with runs."""


@settings
class DoctorConfig:
    """Examine this machine: rendering, speed, installed extras, and what to install for the rest."""

    cluster: Switch = False
    """Examine the Ray cluster instead, and show where a run would place its workers."""
    ray_address: str = "auto"
    """Ray cluster to examine with --cluster: `auto`, `local` or `host:port`."""


@settings
class RunsConfig:
    """List the runs in a directory: what they train, how far they are, and how good the policy is."""

    directory: str | None = None
    """Directory to search; by default `$OUTPUT_BASE` or `outputs`."""


@settings
class InfoConfig:
    """Print versions, platform, GPUs, renderers and installed extras, to paste into a bug report."""


@settings
class CompletionConfig:
    """Print a script that completes commands, flags and values in a shell."""

    shell: Literal["bash", "zsh", "fish"]
    """Shell."""
