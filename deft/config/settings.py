"""Every setting of a run, as typed classes: the config file, the command line and the Python API share them.

`deft.config.loading` reads and writes them; `deft.cli` makes the flags from them. An algorithm's own settings are in
`deft.config.algorithm_settings`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

from pydantic import Field, TypeAdapter, ValidationInfo, field_validator, model_validator

from deft.config.algorithm_settings import ALGORITHM_SETTINGS, AlgorithmSettings
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


def check_vla_config(policy: Any) -> None:
    """Refuse a VLA policy without its model, and a model without a VLA policy."""
    if policy.name == "vla" and policy.vla_config is None:
        raise ValueError("name 'vla' needs vla_config with at least model_class")
    if policy.name != "vla" and policy.vla_config is not None:
        raise ValueError(f"vla_config is given but name is '{policy.name}'; write name 'vla' or leave it out")


@settings
class ActorConfig:
    """The policy, and the shape of its critics."""

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
    chunk_length: Count = 1
    """Env steps that one inference decides; above 1 with a VLA model alone."""
    vla_config: VLAConfig | None = None
    """The model behind `name: vla`."""

    @model_validator(mode="after")
    def _vla_config_goes_with_vla(self) -> ActorConfig:
        check_vla_config(self)
        if self.chunk_length > 1 and self.name != "vla":
            raise ValueError(f"chunk_length {self.chunk_length}: name '{self.name}' decides one step at a time")
        return self


@settings
class OnlineActorConfig(ActorConfig):
    """The policy that learns from a replay buffer, and the shape of its critics."""

    distribution: Literal["tanh_gaussian", "gaussian"] = "tanh_gaussian"
    """`tanh_gaussian`: squashed, its deviation depends on the state; `gaussian`: as IQL and TD3+BC train it."""
    normalize_observation: Switch = False
    """Scale vector observations by mean and deviation before learning starts; saved with the policy."""


@settings
class PolicyConfig:
    """What is trained."""

    name: Literal["actor_critic", "vla", "actor"] = "actor_critic"
    """A network from scratch, a VLA model behind `VLAPolicy`, or the actor of another run (`model_path`)."""
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
    actor: OnlineActorConfig | None = None
    """The network behind `name: actor`; taken from the run that `model_path` names."""

    @model_validator(mode="after")
    def _vla_config_goes_with_vla(self) -> PolicyConfig:
        check_vla_config(self)
        if (self.name == "actor") != (self.actor is not None):
            raise ValueError("name 'actor' and the section actor go together; --model-path RUN sets both")
        return self


@settings
class LoopConfig:
    """How long to train in an environment, and what is written when."""

    total_timesteps: Count = 1_000_000
    """Env steps in all."""
    eval_freq: NonNegativeInt = 5_000
    """Env steps between evaluations; 0: none."""
    eval_episodes: Count = 10
    """Episodes of an evaluation."""
    eval_deterministic: Switch = True
    """Evaluate the most likely actions (a flow: denoised from drawn noise); `--eval-stochastic`: sampled ones."""
    log_freq: NonNegativeInt = 1_000
    """Env steps between lines of metrics."""
    save_freq: NonNegativeInt = 10_000
    """Env steps between checkpoints; 0: at the end alone."""
    keep_checkpoints: Count = 3
    """How many of the latest to keep, besides the best."""
    video_freq: NonNegativeInt = 0
    """Env steps between videos of an evaluation episode; 0: none."""
    max_staleness: NonNegativeInt = 1
    """VLA mode and Ray: how many versions older than the learner's the acting weights may be. 0: they take turns."""


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
class RunSettings:
    """What every run has, whatever it trains on."""

    output_dir: OutputPath | None = None
    """The run directory; by default `<algorithm>-<env or dataset>-<time>` in `$OUTPUT_BASE`, else in `outputs`."""
    seed: Seed = 0
    """One seed, one result."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    threads: Count | None = None
    """Torch's threads; by default OMP_NUM_THREADS, one for a small network, else as many as measure faster."""
    fsdp: Switch = False
    """Share out weights, gradients and moments among the processes (FSDP), for large models; ppo and sft."""
    model_path: Place | None = None
    """Start from the weights of this run, checkpoint or weights file."""
    resume: Place | None = None
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
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)


@settings
class ReplayRunConfig(RunConfig):
    """One run in an environment that learns from a replay buffer."""

    policy: OnlineActorConfig = Field(default_factory=OnlineActorConfig)  # type: ignore[assignment]
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
    eval_deterministic: Switch = True
    """Evaluate the most likely actions (a flow: denoised from drawn noise); `--eval-stochastic`: sampled ones."""
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
    """The class of a run's settings, by its algorithm's."""
    return {"rollouts": RunConfig, "replay": ReplayRunConfig, "dataset": OfflineRunConfig}[algorithm_class.LEARNS_FROM]


Split = Literal["train", "held-out", "all"]


@settings
class EvaluateConfig:
    """What to evaluate, and how."""

    path: str
    """A run folder (its best or latest checkpoint) or a checkpoint."""
    episodes: Count = 10
    """How many episodes."""
    video: VideoPath | None = None
    """Write a video of the first episodes to this file (`.mp4`)."""
    videos: OutputPath | None = None
    """Write videos of single episodes into this folder: three that succeed and three that fail, where there are."""
    env: str | None = None
    """Play in this environment instead of the run's own."""
    task: str | None = None
    """The environment's `task`; the same as `--env-kwargs task=…`."""
    split: Split | None = None
    """The tabletop's objects: the combinations of training, those that training never sees, or all."""
    shuffle_instructions: Switch = False
    """Name an object of the scene by chance, whatever the goal is: how much of the success hangs on the words."""
    env_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the environment's constructor, beside those of the run."""
    rename_streams: dict[str, str] = Field(default_factory=dict)
    """Rename observation streams of the environment, as NEW_NAME=STREAM, to the names that the policy has."""
    random_policy: Switch = False
    """Play uniformly random actions instead, on the same seeds: the baseline."""
    deterministic: Switch = True
    """Play the most likely actions (a flow: denoised from drawn noise); `--stochastic`: sampled as in training."""
    seed: Seed = 0
    """Episode i starts from seed + i, and noise is drawn by it; training and its evaluations use seeds from 2^24 on."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""


@settings
class CompareRunsConfig:
    """Which policies to compare, and on what: all play the same episodes."""

    runs: tuple[str, ...]
    """Runs or checkpoints; `ppo=RUN,RUN` or `ppo=runs/ppo_*`: the seeds of a method; `random`; `expert` (a script)."""
    env: str | None = None
    """Any Gymnasium id, or one of Deft's own; by default each run's own."""
    env_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the environment's constructor, beside those of each run."""
    rename_streams: dict[str, str] = Field(default_factory=dict)
    """Rename observation streams of the environment, as NEW_NAME=STREAM, to the names that the policy has."""
    task: str | None = None
    """The environment's `task`; the same as `--env-kwargs task=…`."""
    episodes: Count = 100
    """How many episodes, for each policy and each column of the table."""
    split: tuple[Split, ...] | None = None
    """Columns of the table; by default `train` and `held-out` where the world has these splits."""
    shuffle_instructions: Switch = False
    """Add a column in which the words name an object by chance."""
    deterministic: Switch = True
    """Play the most likely actions (a flow: denoised from drawn noise); `--stochastic`: sampled as in training."""
    out: OutputPath | None = None
    """Folder for `comparison.json` and its plot; by default `comparison` in the last run's folder."""
    seed: Seed = 0
    """Episode i of every policy starts from seed + i; another seed gives a new set of test episodes."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""

    @field_validator("runs")
    @classmethod
    def _one_or_more(cls, runs: tuple[str, ...]) -> tuple[str, ...]:
        if not runs:
            raise ValueError("give the runs to compare")
        if len(set(runs)) < len(runs):
            raise ValueError("a run is named twice; give each once")
        return runs


@settings
class CollectConfig:
    """What to play, and where to record it."""

    policy: str
    """A run folder or checkpoint, `random` (uniform actions), or `expert` (the environment's own script)."""
    out: OutputPath
    """The dataset's folder, named as Minari names datasets: `datasets/reach/expert-v0`."""
    format: Literal["minari", "lerobot"] = "minari"
    """The layout to write: Minari's, or LeRobot's (v3.0), which needs continuous actions."""
    fps: Positive | None = None
    """Frames per second of a LeRobot dataset; by default the environment's `render_fps`."""
    use_videos: Switch = True
    """Store the cameras of a LeRobot dataset as mp4; if false as PNG, without loss."""
    env: str | None = None
    """Any Gymnasium id, or one of Deft's own; by default the one that the policy was trained in."""
    task: str | None = None
    """The environment's `task`, as a VLA model sees it; the tabletop then has its cameras and words, see its page."""
    steps: Count | None = None
    """Record exactly so many env steps; episodes that are open then are cut."""
    episodes: Count | None = None
    """Record so many whole episodes."""
    noise: NonNegative = 0.0
    """On the policy's actions. Box: Gaussian, in half ranges of the action; discrete: chance of a random action."""
    deterministic: Switch = False
    """Play the most likely actions (a flow: denoised from drawn noise); `--stochastic`: sampled as in training."""
    num_envs: Count = 1
    """Copies stepped together."""
    vector: Literal["sync", "process"] = "sync"
    """How the copies run: in this process, or in worker processes."""
    env_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the environment's constructor, beside those of the policy's run."""
    rename_streams: dict[str, str] = Field(default_factory=dict)
    """Rename observation streams of the environment, as NEW_NAME=STREAM, to the names that the policy has."""
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
    video: VideoPath | None = None
    """Write a video of the episodes to this file (`.mp4`)."""
    episodes: Count = 3
    """How many episodes."""
    deterministic: Switch = True
    """Play the most likely actions (a flow: denoised from drawn noise); `--stochastic`: sampled as in training."""
    seed: Seed = 0
    """Episode i starts from seed + i."""
    env_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the environment's constructor, beside those of the policy's run."""
    rename_streams: dict[str, str] = Field(default_factory=dict)
    """Rename observation streams of the environment, as NEW_NAME=STREAM, to the names that the policy has."""
    max_episode_steps: Count | None = None
    """A time limit in place of the environment's own."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""


@settings
class FetchConfig:
    """What to download, from where, and how to verify it."""

    name: str
    """A D4RL name (`hopper-medium-v2`), or with `url` a name of your own."""
    url: str | None = None
    """Download this http, https or file URL in place of D4RL's own."""
    sha256: str | None = None
    """The SHA-256 that the file must have; D4RL publishes none, so by default size and HDF5 layout are verified."""
    out: OutputPath | None = None
    """The folder to put it in; by default the first of DEFT_DATASETS, or `~/.deft/datasets`."""
    overwrite: Switch = False
    """Download it again where it is there already."""


# Settings that may also be written in another place of a file: there → where they belong.
MOVED_SETTINGS: dict[str, str] = {
    "trainer.rollout_steps": "trainer.buffer_size",
    "algorithm.cfg.rollout_steps": "trainer.buffer_size",
    "trainer.num_iterations": "trainer.iterations",
    "algorithm.cfg.num_iterations": "trainer.iterations",
    "trainer.batch_size": "algorithm.cfg.batch_size",
}

# Sections that may be written as a plain string, and the setting that it stands for.
SHORTHANDS: dict[str, str] = {"env": "id", "policy": "name", "algorithm": "name", "dataset": "path"}
