"""Typed settings classes of a run, shared by config files, the command line and the Python API.

`deft.config.loading` reads and writes them. `deft.cli` makes the flags from them. The settings of each algorithm are
in `deft.config.algorithm_settings`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, TypeAdapter, ValidationInfo, field_validator, model_validator

from deft.config.algorithm_settings import ALGORITHM_SETTINGS, AlgorithmSettings
from deft.config.fields import setting_names
from deft.config.groups import (
    DENOISING_UNUSED,
    AdvantageConfig,
    CurriculumConfig,
    DenoisingSettings,
    ProgressSettings,
    ResidualConfig,
    RewardModelConfig,
    RunSettings,
    ShardSettings,
    ViewSettings,
)
from deft.config.validation import (
    Count,
    NonNegative,
    NonNegativeInt,
    Number,
    Place,
    Positive,
    Switch,
    quoted,
    settings,
)
from deft.errors import InputError, shown

GPU_VECTORS = ("gpu", "warp")  # values of `env.vector` whose environments are simulated on a GPU
TIME_LIMIT = "max_episode_steps"  # may also be among the arguments of an environment, as for `gymnasium.make`


@settings
class EvaluationEnvConfig:
    """The environment to evaluate in."""

    id: str | None = None
    """Gymnasium id; by default the environment of the dataset."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment's constructor; null: the environment's default."""
    max_episode_steps: Count | None = None
    """Time limit that replaces the environment's own."""
    rename_streams: dict[str, str] = Field(default_factory=dict)
    """Rename observation streams of the environment to the names that the policy expects, as NEW_NAME=STREAM."""
    suite_path: Place | None = None
    """Folder with the files of a suite that no package contains, such as the scenes of LIBERO."""

    @model_validator(mode="after")
    def _check_time_limit(self) -> EvaluationEnvConfig:
        named = self.kwargs.get(TIME_LIMIT)
        if named is not None and self.max_episode_steps not in (None, named):
            raise ValueError(
                f"{TIME_LIMIT} is {self.max_episode_steps}, and the environment's arguments (--env-kwargs) set it to "
                f"{shown(named)}; give one of them"
            )
        return self

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments to pass to the constructor: `kwargs` without null values and without a time limit."""
        return {name: value for name, value in self.kwargs.items() if value is not None and name != TIME_LIMIT}

    @property
    def time_limit(self) -> Any:
        """The time limit that replaces the environment's own, wherever it is given; None: the environment's own."""
        return self.kwargs.get(TIME_LIMIT) if self.max_episode_steps is None else self.max_episode_steps

    def with_arguments(self, kwargs: Mapping[str, Any], max_episode_steps: int | None = None) -> Self:
        """Return a copy in which these arguments replace those of the same names, and this time limit the one here.

        A time limit replaces the one here wherever either is given, as a setting or among the arguments.
        """
        own, limit = self.kwargs, self.max_episode_steps
        if max_episode_steps is not None or TIME_LIMIT in kwargs:
            own = {name: value for name, value in own.items() if name != TIME_LIMIT}
            limit = max_episode_steps
        return dataclasses.replace(self, kwargs={**own, **kwargs}, max_episode_steps=limit)


@settings
class EnvConfig(EvaluationEnvConfig):
    """The environment to train in."""

    id: str = "deft/Reach-v0"
    """Gymnasium id or name of a Deft environment."""
    num_envs: Count = 1
    """Number of parallel environments."""
    vector: Literal["sync", "process", "envpool", "gpu", "warp"] = "sync"
    """Run the environments in this process, in worker processes, in envpool, in a GPU simulator (gpu: ManiSkill), or as
    one simulation on MuJoCo Warp (warp: the tabletop and the F1 environments)."""
    num_workers: Count | None = None
    """Worker processes (`vector: process`) or Ray workers; by default one per core, at most one per environment."""
    training_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments that only the training environments have, on top of `kwargs`; evaluations and videos do not."""
    timeout: Positive = 60.0
    """Timeout of one environment step in seconds (`vector: process` and VLA mode)."""
    restart_workers: NonNegativeInt = 3
    """Consecutive restarts of a worker that hangs or dies, without its open episodes; 0: raise an error."""
    reward_weights: dict[str, Number] = Field(default_factory=dict)
    """Weights of the named reward terms; the reward is their weighted sum. Other terms have weight 1."""
    curriculum: CurriculumConfig | None = None
    """Difficulty levels of the environment; None: no curriculum."""

    @property
    def for_training(self) -> Self:
        """A copy whose `kwargs` are those of the training environments."""
        limit = None if TIME_LIMIT in self.training_kwargs else self.max_episode_steps
        return dataclasses.replace(self.with_arguments(self.training_kwargs, limit), training_kwargs={})


@settings
class VLAConfig:
    """The vision-language-action model to load."""

    model_class: str
    """Dotted class path, or name of an entry point in the group `deft.vla_models`."""
    model_path: Place | None = None
    """Weights file: `.safetensors`, `.pth` or `.pt` (tensors only). None: random initialisation."""
    model_config: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the model's constructor."""


UNUSED = {
    "hidden_sizes": "has num_layers layers of width hidden_dim; use --hidden-dim and --num-layers",
    "activation": "has fixed activation functions; leave --activation out",
    "hidden_dim": "has layers of the widths hidden_sizes; use --hidden-sizes",
    "num_layers": "has one layer for each width of hidden_sizes; use --hidden-sizes",
    "memory_num_layers": "has no recurrent memory; give --memory-hidden (ppo, grpo)",
    **DENOISING_UNUSED,
}
"""Settings of the networks that some policies do not use: what such a policy has instead."""

MODEL_CHUNKS = {"vla-tiny": 4}
"""Default action chunk length of each model that `--model` names."""


@settings
class PolicyConfig(DenoisingSettings):
    """The policy: its networks, its action distribution and its critics."""

    HAS_CRITICS: ClassVar[bool] = False
    """Whether the algorithm trains critics of `num_layers` layers of width `hidden_dim` beside every policy."""

    name: Literal["actor_critic", "actor", "vla"] = "actor_critic"
    """`actor_critic`: network of PPO; `actor`: network of SAC and the offline algorithms; `vla`: a VLA model."""
    hidden_sizes: tuple[Count, ...] = (64, 64)
    """Widths of the hidden layers of an `actor_critic`."""
    activation: Literal["tanh", "relu", "elu", "gelu", "silu"] = "tanh"
    """Activation function of an `actor_critic`."""
    hidden_dim: Count = 256
    """Width of the hidden layers of an `actor`, of critics, and of a separate value network."""
    num_layers: Count = 2
    """Number of hidden layers of an `actor`, of critics, and of a separate value network."""
    distribution: Literal["tanh_gaussian", "gaussian", "flow", "diffusion"] | None = None
    """Action distribution of an `actor`: state-dependent std and tanh squashing, a Gaussian with bounded mean, or one
    that denoises, which sft and iql train from scratch, and ppo, grpo and dsrl from their policy."""
    encoder_dim: Count = 256
    """Size of the image encoder's features."""
    memory_hidden: NonNegativeInt = 0
    """Hidden size of the recurrent memory (GRU) of an `actor_critic`; 0: none."""
    memory_num_layers: Count = 1
    """Number of layers of the recurrent memory."""
    log_std_init: Number = 0.0
    """Initial log standard deviation of a Gaussian policy."""
    normalize_observation: Switch = True
    """Normalize vector observations by their mean and standard deviation."""
    normalize_reward: Switch = True
    """Divide rewards by the running standard deviation of the discounted return (ppo, grpo)."""
    chunk_length: Count = 1
    """Action chunk length: env steps per inference."""
    action_dim: Count | None = None
    """Size of an action; if given, it must match the environment."""
    unit_actions: Switch = False
    """Scale the VLA model's actions from [-1, 1] to the action space; false: the model outputs environment units."""
    separate_value: Switch = False
    """Use a separate encoder for the value function and critics of a VLA model that does not expose its features."""
    critic_observation: tuple[str, ...] = ()
    """Observation streams that only the value function and critics read; the policy acts without them."""
    vla_config: VLAConfig | None = None
    """The VLA model, for `name: vla`."""
    residual: ResidualConfig | None = None
    """Freeze the policy of `model_path` and train a bounded correction of its actions; None: train the policy."""
    advantage: AdvantageConfig | None = None
    """Condition the policy on an advantage indicator; recap sets it."""

    @model_validator(mode="before")
    @classmethod
    def _lift_actor_section(cls, given: Any) -> Any:
        """Read configs of version 1, which nest a policy from another run in the section `actor`."""
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
        if len(set(self.critic_observation)) < len(self.critic_observation):
            raise ValueError("critic_observation: a stream is named twice; name each once")
        if self.name != "actor_critic" and self.memory_hidden:
            raise ValueError(f"memory_hidden {self.memory_hidden}: name '{self.name}' has no recurrent memory")
        return self

    def changed(self) -> set[str]:
        """Return the names of the settings that differ from their defaults."""
        default = type(self)()
        return {name for name in setting_names(type(self)) if getattr(self, name) != getattr(default, name)}

    def reject_unused(self, changed: Collection[str], algorithm: AlgorithmSettings) -> None:
        """Raise an error if the policy of this algorithm does not use one of the settings that the user changed."""
        uses_hidden_dim = self.HAS_CRITICS or self.name != "actor_critic" or bool(self.critic_observation)
        distribution = self.distribution or ("flow" if algorithm.DENOISES else None)
        used = {
            "hidden_sizes": self.name != "actor",
            "activation": self.name == "actor_critic",
            "hidden_dim": uses_hidden_dim,
            "num_layers": uses_hidden_dim,
            "memory_num_layers": self.memory_hidden > 0,
            **{name: self.name == "actor" and self.uses(name, distribution) for name in DENOISING_UNUSED},
        }
        for name in UNUSED:
            if name in changed and not used[name]:
                value = getattr(self, name)
                value = list(value) if isinstance(value, tuple) else value
                raise InputError(f"policy.{name}: {shown(value)} has no effect: policy '{self.name}' {UNUSED[name]}")


@settings
class DatasetPolicyConfig(PolicyConfig):
    """The policy of an offline algorithm, and its critics."""

    HAS_CRITICS: ClassVar[bool] = True
    name = "actor"
    normalize_reward = False
    unit_actions = True
    separate_value = True


@settings
class ReplayPolicyConfig(DatasetPolicyConfig):
    """The policy of an algorithm with a replay buffer, and its critics."""

    normalize_observation = False


@settings
class LoopConfig(ProgressSettings):
    """How long to train in an environment, and when to evaluate, log and save."""

    total_timesteps: Count = 1_000_000
    """Total env steps of training."""
    video_freq: NonNegativeInt = 0
    """Evaluate and record a video of an episode every this many {unit}, and at the end; 0: never."""
    max_staleness: NonNegativeInt = 1
    """Weight updates by which collection may lag behind the learner (VLA mode and Ray); 0: no overlap."""


@settings
class ClusterConfig:
    """Where episodes are collected: in this process, or by workers on a Ray cluster."""

    collectors: Literal["here", "ray"] = "here"
    """`here`: collect in this process; `ray`: in Ray workers, on one or several machines (extra `scale`)."""
    ray_address: str = "local"
    """Ray cluster: `local` starts a new one; `auto` uses the one that this machine belongs to; or `host:port`."""
    inference: Literal["auto", "worker", "actor"] = "auto"
    """Run policy inference in every worker or in one shared actor; `auto`: an actor from 20 M parameters."""
    inference_gpus: NonNegative = 0.0
    """Fraction of a GPU for the inference actor; 0: it runs on a CPU."""
    worker_cpus: Positive = 1.0
    """CPUs that Ray reserves for each worker."""
    spare_workers: NonNegativeInt = 1
    """Idle workers that replace a dead worker at once; 0: start a new worker instead."""
    block_steps: Count | None = None
    """Largest number of steps that a worker sends at once; by default 256, or the rollout length if smaller."""


@settings
class TrainerConfig(LoopConfig):
    """How long to train, the rollout size, and when to evaluate, log and save."""

    rollout_steps: Count = 2048
    """Rollout length: steps per environment."""
    buffer_type: Literal["standard", "vla"] = "standard"
    """`standard`: alternate collection and training; `vla`: collect in a background thread during training."""
    iterations: Count | None = None
    """Total number of rollouts; replaces `total_timesteps`."""


@settings
class LoggingConfig(ViewSettings):
    """Console, log file, experiment trackers and live view."""

    console_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = "INFO"
    """Lowest level of messages on the console."""
    file_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = "DEBUG"
    """Lowest level of messages in the log file."""
    enable_file_logging: Switch = True
    """Write a log file `logs/rl_training_*.log`."""
    tensorboard: Switch = True
    """Write TensorBoard event files to `tensorboard/`."""
    use_wandb: Switch = False
    """Log to Weights & Biases (extra `wandb`); offline without an API key."""
    use_trackio: Switch = False
    """Log to a local trackio project (extra `trackio`)."""
    progress_bar: Switch = True
    """Show a progress bar on a terminal."""

    @classmethod
    def with_view(cls, given: ViewSettings) -> LoggingConfig:
        """Return the default settings with the live view of settings that have no section `logging`."""
        return cls(view=given.view, view_port=given.view_port)


@settings
class AlgorithmConfig:
    """The algorithm and its settings."""

    name: str = "ppo"
    """Name of the algorithm, a key of `ALGORITHM_SETTINGS`."""
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
        if settings_class is None:  # the name is unknown, and its own error is reported
            return AlgorithmSettings()
        return TypeAdapter(settings_class).validate_python(cfg)


@settings
class TrainingRun(RunSettings, ShardSettings):
    """Settings of every run of an algorithm."""

    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    model_path: Place | None = None
    """Initialise from the weights of this run, checkpoint or weights file."""


@settings
class RunConfig(TrainingRun):
    """Settings of a run in an environment, as written to its run directory."""

    env: EnvConfig = Field(default_factory=EnvConfig)
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    reward_model: RewardModelConfig | None = None
    """The reward of a trained success classifier; None: the environment's reward."""


@settings
class ReplayRunConfig(RunConfig):
    """Settings of a run in an environment with a replay buffer."""

    policy: ReplayPolicyConfig = Field(default_factory=ReplayPolicyConfig)
    trainer: LoopConfig = Field(default_factory=LoopConfig)  # type: ignore[assignment]


@settings
class LabelledRunConfig(RunConfig):
    """Settings of a run in an environment whose expert labels the visited states."""

    policy: DatasetPolicyConfig = Field(default_factory=DatasetPolicyConfig)


@settings
class DatasetConfig:
    """The dataset to train on."""

    path: str | None = None
    """Dataset name (`hopper-medium-v2`, a Minari id) or path; see docs/how-to/datasets.md."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the dataset's loader."""
    download: Switch = False
    """Download the dataset (D4RL or Minari) if it is not on this machine."""
    rename_streams: dict[str, str] = Field(default_factory=dict)
    """Rename observation streams of the dataset to the names that the policy expects, as NEW_NAME=STREAM."""
    reference_returns: tuple[Number, Number] | None = None
    """Returns of a random and an expert policy for the normalised score; by default those of the dataset."""
    cache_gb: Positive = 2.0
    """Memory in GB for the episode cache of an image dataset, which is read from disk during training."""
    intervention_weight: Positive = 1.0
    """Sample transitions that are marked as interventions of an expert this many times as often as others."""
    keyframe_stream: str | None = None
    """Stream of which later values are labels for vla-tiny: where the robot goes next; see docs/how-to/keyframes.md."""
    keyframe_dims: tuple[int, ...] = ()
    """The numbers of `keyframe_stream` that are labels, for example those of the hand's position; by default all."""
    keyframe_switch: int = -1
    """The action dim whose changes of sign are key frames: that of the gripper."""


@settings
class OfflineTrainerConfig(ProgressSettings):
    """How long to train on a dataset, and when to evaluate, log and save."""

    UNIT = "epochs"

    num_epochs: Count = 100
    """Total epochs of training."""
    updates_per_epoch: Count | None = None
    """Gradient updates per epoch; by default one pass over the dataset, transitions / batch_size."""
    num_seeds: Count = 1
    """Independent learners trained in one batched update, each with its own weights and batches."""
    eval_freq = 5
    log_freq = Field(1_000, description="Log metrics every this many updates.")
    save_freq = 10
    capture: Literal["auto", "on", "off"] = "auto"
    """Capture the update as a CUDA graph and replay it; `auto`: on a GPU."""


@settings
class OfflineRunConfig(TrainingRun):
    """Settings of a run on a dataset, as written to its run directory."""

    dataset: DatasetConfig = Field(default_factory=DatasetConfig)
    env: EvaluationEnvConfig = Field(default_factory=EvaluationEnvConfig)
    policy: DatasetPolicyConfig = Field(default_factory=DatasetPolicyConfig)
    trainer: OfflineTrainerConfig = Field(default_factory=OfflineTrainerConfig)


def run_class(algorithm_class: type[AlgorithmSettings]) -> Any:
    """Return the settings class of a run with this algorithm."""
    classes = {
        "rollouts": RunConfig,
        "replay": ReplayRunConfig,
        "labels": LabelledRunConfig,
        "dataset": OfflineRunConfig,
    }
    return classes[algorithm_class.LEARNS_FROM]
