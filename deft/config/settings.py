"""Every setting of a run, as typed classes: the config file, the command line and the Python API share them.

`deft.config.loading` reads and writes them; `deft.cli` makes the flags from them. An algorithm's own settings are in
`deft.config.algorithm_settings`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, ClassVar, Literal

from pydantic import Field, TypeAdapter, ValidationInfo, field_validator, model_validator

from deft.config.algorithm_settings import ALGORITHM_SETTINGS, AlgorithmSettings
from deft.config.groups import EnvironmentChoice, ProgressSettings, RunSettings
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
    VideoPath,
    quoted,
    settings,
    shown,
)

DEFAULT_CURRICULUM_STEPS = (10_000, 50_000)


@settings
class CurriculumConfig:
    """Levels of difficulty, one after another: the environment's `set_difficulty(level)` is called with each."""

    levels: tuple[str | int | Number, ...] = ("easy", "medium", "hard")
    """What `set_difficulty` is given, easiest first."""
    at_steps: tuple[Count, ...] | None = None
    """Env steps at which the second, third, … level begins; by default 10000 and 50000, for three levels."""
    success_rate: Fraction | None = None
    """In place of `at_steps`: the next level begins when this share of the last `window` episodes succeeded."""
    window: Count = 100
    """Episodes at the present level that `success_rate` is counted over."""

    @model_validator(mode="after")
    def _levels_have_one_end(self) -> CurriculumConfig:
        if len(self.levels) < 2 or len(set(self.levels)) < len(self.levels):
            raise ValueError(f"levels: at least two different ones are needed, not {shown(list(self.levels))}")
        if self.success_rate is not None:
            if self.at_steps is not None:
                raise ValueError("give at_steps or success_rate, one of them")
            return self
        if self.at_steps is None and len(self.levels) == len(DEFAULT_CURRICULUM_STEPS) + 1:
            object.__setattr__(self, "at_steps", DEFAULT_CURRICULUM_STEPS)  # not checked again
        steps = self.at_steps or ()
        if len(steps) != len(self.levels) - 1 or any(first >= second for first, second in pairwise(steps)):
            raise ValueError(
                f"at_steps: {len(self.levels)} levels need {len(self.levels) - 1} growing numbers of steps, not "
                f"{shown(list(steps))}; or give success_rate"
            )
        return self


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
    """Worker processes (`vector: process`) or Ray workers; by default one a core, at most one an environment."""
    max_episode_steps: Count | None = None
    """A time limit in place of the environment's own."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the environment's constructor."""
    timeout: Positive = 60.0
    """Seconds that one step may take before the environment counts as hung (`process` vectors and VLA mode)."""
    restart_workers: NonNegativeInt = 3
    """How often in a row a worker process that hangs or dies is replaced, losing its episodes; 0: it ends the run."""
    reward_weights: dict[str, Number] = Field(default_factory=dict)
    """Weights of the reward's named terms: the reward becomes their weighted sum. A term not named has weight 1."""
    rename_streams: dict[str, str] = Field(default_factory=dict)
    """Rename observation streams of the environment, as NEW_NAME=STREAM, to the names that the policy has."""
    curriculum: CurriculumConfig | None = None
    """Levels of difficulty that the environment goes through; None: it stays as it is."""


@settings
class VLAConfig:
    """Which vision-language-action model to load, and from where."""

    model_class: str
    """A dotted class path, or the name of an entry point of the group `deft.vla_models`."""
    model_path: Place | None = None
    """Weights: `.safetensors`, `.pth` or `.pt` (tensors only). None: new weights from the seed."""
    model_config: dict[str, Any] = Field(default_factory=dict)
    """Passed to the model's constructor."""


MODEL_CHUNKS = {"vla-tiny": 4}
"""Env steps that one inference of a model decides, where `--model` names it and `--chunk-length` is not given."""


@settings
class PolicyConfig:
    """The policy: its networks, its action distribution, and the shape of its critics."""

    name: Literal["actor_critic", "actor", "vla"] = "actor_critic"
    """`actor_critic`: PPO's network from scratch; `actor`: that of SAC and offline algorithms; `vla`: a VLA model."""
    hidden_sizes: tuple[Count, ...] = (64, 64)
    """Hidden layers of an `actor_critic`."""
    activation: Literal["tanh", "relu", "elu", "gelu", "silu"] = "tanh"
    """Between the hidden layers of an `actor_critic`."""
    hidden_dim: Count = 256
    """Width of the hidden layers of an `actor`, of critics, and of a separate value network."""
    num_layers: Count = 2
    """Number of these layers."""
    distribution: Literal["tanh_gaussian", "gaussian"] | None = None
    """Of an `actor`: `tanh_gaussian` is squashed, its deviation depends on the state; `gaussian` has a bounded mean."""
    encoder_dim: Count = 256
    """Width of the features of the image encoder."""
    memory_hidden: NonNegativeInt = 0
    """Width of the recurrent memory (GRU) of an `actor_critic`; 0: none."""
    memory_num_layers: Count = 1
    """Layers of the recurrent memory."""
    log_std_init: Number = 0.0
    """Initial log standard deviation of a Gaussian policy."""
    normalize_observation: Switch = True
    """Normalize vector observations by their mean and deviation; saved with the policy."""
    normalize_reward: Switch = True
    """Scale rewards by the running deviation of the discounted return (ppo, grpo); saved with the policy."""
    chunk_length: Count = 1
    """Env steps that one inference decides."""
    action_dim: Count | None = None
    """Checked against the environment where given."""
    unit_actions: Switch = False
    """The VLA model's actions in [-1, 1] are scaled to the action Box; if false they are in the environment's units."""
    separate_value: Switch = False
    """V and critics of a VLA model have an encoder of their own, unless the model offers its features."""
    vla_config: VLAConfig | None = None
    """The model behind `name: vla`."""

    @model_validator(mode="before")
    @classmethod
    def _lift_actor_section(cls, given: Any) -> Any:
        """Read configs of version 1, in which a policy from another run was the nested section `actor`."""
        if not isinstance(given, dict) or "actor" not in given:
            return given
        section, nested = {name: value for name, value in given.items() if name != "actor"}, given["actor"]
        if nested is None:
            return section
        return {"normalize_reward": False, "unit_actions": True, "separate_value": True, **nested}

    @model_validator(mode="after")
    def _check_name(self) -> PolicyConfig:
        if self.name == "vla" and self.vla_config is None:
            raise ValueError("name 'vla' needs vla_config with at least model_class")
        if self.name != "vla" and self.vla_config is not None:
            raise ValueError(f"vla_config is given but name is '{self.name}'; write name 'vla' or leave it out")
        if self.name == "actor" and self.chunk_length > 1:
            raise ValueError(f"chunk_length {self.chunk_length}: name '{self.name}' decides one step at a time")
        if self.name != "actor_critic" and self.memory_hidden:
            raise ValueError(f"memory_hidden {self.memory_hidden}: name '{self.name}' has no recurrent memory")
        return self


@settings
class DatasetPolicyConfig(PolicyConfig):
    """The policy that learns from a dataset, and the shape of its critics."""

    name: Literal["actor_critic", "actor", "vla"] = "actor"
    normalize_reward: Switch = False
    unit_actions: Switch = True
    separate_value: Switch = True


@settings
class ReplayPolicyConfig(DatasetPolicyConfig):
    """The policy that learns from a replay buffer, and the shape of its critics."""

    distribution: Literal["tanh_gaussian", "gaussian"] | None = "tanh_gaussian"
    normalize_observation: Switch = False


@settings
class LoopConfig(ProgressSettings):
    """How long to train in an environment, and when to evaluate, log and save."""

    total_timesteps: Count = 1_000_000
    """Env steps of the whole training."""
    video_freq: NonNegativeInt = 0
    """Record a video of an evaluation episode every this many {unit}; 0: never."""
    max_staleness: NonNegativeInt = 1
    """VLA mode and Ray: how many versions the acting weights may be behind the learner's. 0: no overlap."""


@settings
class ClusterConfig:
    """Who collects: this process, or workers on a Ray cluster."""

    collectors: Literal["here", "ray"] = "here"
    """`here`: this process steps the environments. `ray`: workers do, here or on other machines (extra `scale`)."""
    ray_address: str = "local"
    """`local`: a Ray of the run's own; `auto`: the cluster that this machine belongs to; or `host:port`."""
    inference: Literal["auto", "worker", "actor"] = "auto"
    """Where the policy acts: in every worker, or in one actor for all. `auto`: an actor from 20 M parameters on."""
    inference_gpus: NonNegative = 0.0
    """Share of a GPU that the inference actor takes; 0: it acts on a CPU."""
    worker_cpus: Positive = 1.0
    """CPUs that Ray sets aside for each worker."""
    spare_workers: NonNegativeInt = 1
    """Workers that wait, where there is room, to take the place of one that dies at once; 0: a new one is started."""
    block_steps: Count | None = None
    """Most steps that a worker collects before it hands them over; by default 256, at most a rollout's."""


@settings
class TrainerConfig(LoopConfig):
    """Who runs the loop, for how long, and what is written when."""

    buffer_size: Count = 2048
    """Steps of a rollout, for each environment."""
    buffer_type: Literal["standard", "vla"] = "standard"
    """`standard`: collect, train, clear. `vla`: a background collector writes while the main thread trains."""
    iterations: Count | None = None
    """Rollouts in all; where given, in place of `total_timesteps`."""


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
class TrainingRun(RunSettings):
    """Settings of every run of an algorithm."""

    fsdp: Switch = False
    """Shard weights, gradients and optimizer state over the processes (FSDP), for large models; ppo and sft."""
    model_path: Place | None = None
    """Initialise from the weights of this run, checkpoint or weights file."""


@settings
class RunConfig(TrainingRun):
    """One run in an environment: the resolved settings that are written into its folder and repeat it."""

    env: EnvConfig = Field(default_factory=EnvConfig)
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)


@settings
class ReplayRunConfig(RunConfig):
    """One run in an environment that learns from a replay buffer."""

    policy: ReplayPolicyConfig = Field(default_factory=ReplayPolicyConfig)
    trainer: LoopConfig = Field(default_factory=LoopConfig)  # type: ignore[assignment]


@settings
class DatasetConfig:
    """What is learned from."""

    path: str | None = None
    """A name (`hopper-medium-v2`, a Minari id) or a path; see docs/datasets.md."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the loader of its format."""
    download: Switch = False
    """Download a D4RL name or a Minari id that is not on this machine."""
    rename_streams: dict[str, str] = Field(default_factory=dict)
    """Rename observation streams of the dataset, as NEW_NAME=STREAM, to the names that the policy has."""
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
    rename_streams: dict[str, str] = Field(default_factory=dict)
    """Rename observation streams of the environment, as NEW_NAME=STREAM; by default as in the dataset, where needed."""


@settings
class OfflineTrainerConfig(ProgressSettings):
    """How long to train on a dataset, and when to evaluate, log and save."""

    UNIT: ClassVar[str] = "epochs"

    num_epochs: Count = 100
    """Epochs of the whole training."""
    updates_per_epoch: Count | None = None
    """Gradient updates per epoch; by default one pass over the dataset, transitions / batch_size."""
    num_seeds: Count = 1
    """Independent learners trained in one batched update, each with its own weights and batches."""
    eval_freq: NonNegativeInt = 5
    log_freq: NonNegativeInt = 1_000
    """Log metrics every this many updates."""
    save_freq: NonNegativeInt = 10
    capture: Literal["auto", "on", "off"] = "auto"
    """Capture the update as a CUDA graph and replay it; `auto`: on a GPU."""


@settings
class OfflineRunConfig(TrainingRun):
    """One run on a dataset: the resolved settings that are written into its folder and repeat it."""

    dataset: DatasetConfig = Field(default_factory=DatasetConfig)
    env: EvaluationEnvConfig = Field(default_factory=EvaluationEnvConfig)
    policy: DatasetPolicyConfig = Field(default_factory=DatasetPolicyConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    trainer: OfflineTrainerConfig = Field(default_factory=OfflineTrainerConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)


def run_class(algorithm_class: type[AlgorithmSettings]) -> Any:
    """The class of a run's settings, by its algorithm's."""
    return {"rollouts": RunConfig, "replay": ReplayRunConfig, "dataset": OfflineRunConfig}[algorithm_class.LEARNS_FROM]


Split = Literal["train", "held-out", "all"]


@settings
class EvaluateConfig(EnvironmentChoice):
    """Evaluate a trained policy."""

    path: str
    """Run directory (its best or latest checkpoint) or checkpoint."""
    episodes: Count = 10
    """Episodes to play."""
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


@settings
class CompareRunsConfig(EnvironmentChoice):
    """Compare several policies on the same episodes."""

    runs: tuple[str, ...]
    """Runs or checkpoints; `ppo=RUN,RUN` or `ppo=runs/ppo_*`: several seeds of a method; `random`; `expert`."""
    episodes: Count = 100
    """Episodes per policy and column of the table."""
    split: tuple[Split, ...] | None = None
    """Columns of the table; by default `train` and `held-out` where the environment has these splits."""
    shuffle_instructions: Switch = False
    """Add a column in which the instruction names a random object."""
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
class CollectConfig(EnvironmentChoice):
    """Record episodes of a policy as a dataset."""

    policy: str
    """Run directory or checkpoint, `random` (uniform actions), or `expert` (the environment's scripted policy)."""
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
    episodes: Count | None = None
    """Record this many whole episodes."""
    noise: NonNegative = 0.0
    """Noise on the actions. Box: standard deviation in half ranges; discrete: probability of a random action."""
    deterministic: Switch = False
    """Play the most likely actions; by default actions are sampled as in training."""
    num_envs: Count = 1
    """Parallel environments."""
    vector: Literal["sync", "process"] = "sync"
    """Run the environments in this process or in worker processes."""
    max_episode_steps: Count | None = None
    """Time limit that replaces the environment's own."""
    append: Switch = False
    """Append to an existing dataset."""
    seed: Seed = 0
    """Seed of the recording; appended episodes start from seed + the number of existing episodes."""

    @model_validator(mode="after")
    def _has_one_end(self) -> CollectConfig:
        if (self.steps is None) == (self.episodes is None):
            raise ValueError("give --steps or --episodes, one of them")
        return self


@settings
class PlayConfig(EnvironmentChoice):
    """Play episodes of a policy, a scripted expert or random actions, and record a video."""

    policy: str = "expert"
    """Run directory or checkpoint, `random` (uniform actions), or `expert` (the environment's scripted policy)."""
    video: VideoPath | None = None
    """Write a video of the episodes to this file (`.mp4`)."""
    episodes: Count = 3
    """Episodes to play."""
    max_episode_steps: Count | None = None
    """Time limit that replaces the environment's own."""


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
    """Write report.html, a page that summarises a run of the F1 phases, into the run directory."""

    run: str
    """Run directory."""


@settings
class DoctorConfig:
    """Examine this machine: rendering, speed, installed extras, and what to install for the rest."""

    cluster: Switch = False
    """Examine the Ray cluster instead, and show where a run would place its workers."""
    ray_address: str = "auto"
    """Ray cluster to examine with --cluster: `auto`, `local` or `host:port`."""
