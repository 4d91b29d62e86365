"""The settings of the three training phases, section by section as an `rl_config.yaml` has them.

`deft.config.rl_yaml` reads such files and makes flags of these classes; the trainers of `deft.training.phases` take
them. The section `environment` belongs to the environments: `deft.envs.robot_env.TaskConfig`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from deft.config.algorithm_settings import PPOSettings
from deft.config.groups import AutoPrecision, CheckpointSettings, ComputeSettings, ResumeSettings
from deft.config.settings import LoggingConfig
from deft.config.validation import (
    Count,
    Fraction,
    Noise,
    NonNegative,
    NonNegativeInt,
    OutputPath,
    Positive,
    Several,
    Share,
    Switch,
    settings,
)


@settings
class ModelSection:
    """Which F1 model is trained, and from what weights."""

    config_file: str = "tiny"
    """A preset (`tiny`, `small`, `full`), or a YAML or JSON file of a model's config."""
    checkpoint_path: str | None = None
    """Weights to start from: a file, a checkpoint, or a published model's folder; without it, new weights."""
    lora: dict[str, Any] | None = None
    """LoRA adapters on the weights (`r`, `lora_alpha`, `target_modules`): all but them and the memory stays frozen."""
    tokenizer_weights: str | None = None
    """The image tokenizer of a new model: a file that `deft train tokenizer` made; none: what the config names."""
    untrained_tokenizer: Switch = False
    """Allow an image tokenizer without trained weights; its codes mean nothing."""


@settings
class RecordedVideo:
    """Train a world model on recorded video instead of random exploration."""

    dataset: str | None = None
    """Train on this dataset with images: a name or a path."""
    dataset_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the dataset's loader, such as `skip_missing`."""
    wrist_camera: str | None = None
    """Image stream of the dataset to predict; by default found by its name."""
    head_camera: str | None = None
    """Image stream of the dataset that shows the scene; by default found by its name; `off`: none."""
    frame_skip: Count = 1
    """Keep every Nth frame of a recording, with the mean of the actions in between."""
    holdout: Fraction = 0.1
    """Fraction of the dataset's episodes that is held out for `deft evaluate`; at least one episode."""
    shift_augmentation: NonNegativeInt = 0
    """Largest random shift of a recorded episode's images, in pixels."""


@settings
class WorldModelTraining(RecordedVideo):
    """How a world model is trained."""

    batch_size: Count = 8
    """Episodes per batch and process."""
    gradient_accumulation: Count = 1
    """Micro-batches per batch: the same update with less memory."""
    compile: Switch = False
    """Compile the world model's layers with torch.compile."""
    learning_rate: Positive = 2e-3
    """Peak learning rate of AdamW."""
    weight_decay: NonNegative = 0.01
    """Weight decay of AdamW, on matrices only."""
    scheduler: Literal["cosine", "linear", "constant"] = "cosine"
    """Decay of the learning rate to `min_learning_rate` over the run."""
    min_learning_rate: NonNegative = 1e-5
    """Learning rate at the end."""
    max_grad_norm: Positive | None = 1.0
    """Clip the gradient norm to this; none: no clipping."""
    sequential_training: Switch = True
    """Train on episodes in order, in chunks with the memory carried over; else on random steps."""
    bptt_length: Count = 8
    """Steps of a chunk, through which gradients are backpropagated."""
    memory_backprop: Switch = True
    """Backpropagate through the memory within a chunk."""
    motion_warmup: Fraction | None = None
    """Fraction of the run, at its start, that trains only the motion prior; none: 0.15, or 0 from a checkpoint."""
    memory_warmup: Fraction | None = None
    """Fraction after that which trains only the memory; none: 0.05, or 0 from a checkpoint."""
    motion_learning_rate: Positive = 2e-3
    """Learning rate of both warm-ups."""
    train_understanding: Switch = True
    """Train the understanding expert as well as the world model, the memory and the motion prior."""
    freeze_vision_encoder: Switch = False
    """Freeze the vision encoder; for pretrained ones."""
    colour_augmentation: Fraction = 0.2
    """Strength of the random colour change of an episode, the same in all of its frames."""
    head_dropout: Fraction = 0.25
    """Fraction of the batches without the head camera, as a student observes."""
    overlap: Switch = True
    """Collect in processes during training; else alternate with it, reproducible bit for bit."""
    buffer_capacity: Count = 512
    """Episodes that are kept for repeated training."""
    learning_starts: Count | None = None
    """Episodes to collect before training starts, with `overlap`; by default `batch_size`."""


@settings
class TrainingConfig(WorldModelTraining, ComputeSettings, CheckpointSettings):
    """How a phase trains."""

    UNIT: ClassVar[str] = "episodes"

    num_episodes: Count = 10_000
    """Episodes to collect and train on (with `dataset`, to draw from it), in whole batches; repeats do not count."""
    steps_per_episode: Count = 50
    """Steps per episode."""
    fsdp: Switch = False
    """Shard weights, gradients and optimizer state over the processes (FSDP), for large models; phase 1."""
    action_dim: Literal[32] = 32
    """Size of an action, with padding."""
    state_dim: Literal[32] = 32
    """Size of a state, with padding."""
    n_pred_img_steps: Literal[1] = 1
    """Frames to predict."""
    save_freq: NonNegativeInt = 200
    log_freq: Count = 10
    """Log metrics every this many {unit}."""
    video_freq: NonNegativeInt = 200
    """Write a video every this many {unit} (`videos/episode_n.mp4`: head, wrist, predicted wrist); 0: never."""
    sample_freq: NonNegativeInt = 200
    """Write sample images every this many {unit} (`samples/episode_n.png`: truth, prediction, error); 0: never."""
    num_envs: Count | None = None
    """Parallel environments; by default one per core that training leaves free."""
    max_minutes: Positive | None = None
    """Stop and save after this many minutes; the learning rate then decays with time."""
    precision: AutoPrecision = "auto"
    """Number format of matrix products; `auto`: bf16 where it is faster on this machine."""


@settings
class TeacherSection:
    """Phase 1, the world model."""

    output_dir: OutputPath = "./outputs/teacher_rl"
    """The run folder."""


@settings
class StudentRewards:
    """What the student is rewarded for; each term is normalised first."""

    memory_divergence_weight: NonNegative = 0.5
    """Of the memory's convergence to the teacher's: −(D′ − D) − memory_decay · D′."""
    wm_uncertainty_weight: NonNegative = 0.5
    """Of what the world model says, the sum of the five below."""
    memory_decay: NonNegative = 0.07
    """How much a distance of the memories costs while it lasts."""
    uncertainty_weight: NonNegative = 1.0
    """α, of the mean entropy of the foreseen codes."""
    error_weight: NonNegative = 1.0
    """β, of their cross-entropy."""
    error_progress_weight: NonNegative = 0.5
    """γ, of the rise of the error since the step before."""
    uncertainty_progress_weight: NonNegative = 0.1
    """ε, of the rise of the uncertainty."""
    action_cost: NonNegative = 0.01
    """δ, of the mean size of the action."""
    reward_limit: Positive = 10.0
    """The sum of the five is clipped at ± this."""


@settings
class ExplorerSettings(PPOSettings):
    """How an explorer acts and learns by PPO."""

    learning_rate: Positive = 3e-4
    """Adam's step size for value and memory; the weights that act start with a tenth of it."""
    gamma: Fraction = 0.95
    """Discount."""
    batch_size: Count = 100
    """Steps in a minibatch."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus; the chain's noise is fixed, so it teaches nothing."""
    learning_rate_schedule: Literal["constant", "linear", "adaptive"] = "adaptive"
    """`adaptive` keeps the KL of an update near `desired_kl`."""
    desired_kl: Positive = 0.1
    """For the adaptive schedule."""
    clip_range: Positive = 0.3
    """How far the probability ratio may move from 1."""
    sequence_length: Count = 10
    """Steps of a training sequence: gradients go back through the memory this far."""
    episodes_per_update: Count = 8
    """Episodes of a rollout, in each process; fewer copies of the environment play several each."""
    denoising_steps: Count = 2
    """Euler steps from noise to an action."""
    initial_noise: NonNegative = 1.5
    """Deviation of the noise that they begin with."""
    noise_correlation: Fraction = 0.85
    """How much of that noise stays from step to step of an episode: an arm that trembles gets nowhere."""
    action_noise: Noise = 0.4
    """Deviation of the noise in each of them."""
    memory_loss_weight: NonNegative = 1.0
    """Of the squared distance to the teacher's memory in the loss: the explorer's memory learns from it."""


@settings
class StudentSection:
    """Phase 2, the explorer."""

    output_dir: OutputPath = "./outputs/student_rl"
    """The run folder."""
    teacher_checkpoint: str | None = None
    """Whose world model is reused: a run, a checkpoint, a weights file; by default the one that ships, of `tiny`."""
    rewards: StudentRewards = Field(default_factory=StudentRewards)
    explorer: ExplorerSettings = Field(default_factory=ExplorerSettings)


@settings
class AdversarialSection:
    """Phase 3, world model against explorer."""

    output_dir: OutputPath = "./outputs/adversarial_rl"
    """The run folder."""
    iterations: Count = 100_000
    """Iterations: in each the explorer acts, `wm_updates` train the world model, and PPO trains the explorer once."""
    teacher_checkpoint: str | None = None
    """The world model to start from: a run or checkpoint of phase 1; by default the one that ships with Deft."""
    student_checkpoint: str | None = None
    """The explorer to start from: a run or checkpoint of phase 2; without it, a new one."""
    wm_learning_rate: Positive = 1e-4
    """AdamW's step size for the world model, at its highest."""
    explorer_learning_rate: Positive = 3e-4
    """PPO's step size for the explorer."""
    explorer_noise: Positive = 1.0
    """The explorer acts with this many times the student's noise; with less it stays nearer to where it starts."""
    explorer_correlation: Fraction | None = None
    """How much of its noise stays from step to step, in place of the student's `noise_correlation`."""
    explorer_scale: Share = 1.0
    """The robot does this share of what the explorer says: with less it goes slowly, but wherever it likes."""
    wm_updates: Count = 5
    """Batches of `batch_size` episodes that the world model trains on for each update of the explorer."""
    wm_warmup: NonNegativeInt = 10
    """Iterations at the start in which the world model alone learns."""
    reward: Literal["progress", "disagreement", "error"] = "progress"
    """What pays: the world model's learning progress on the next frame, an ensemble's disagreement, or its error."""
    reward_floor: NonNegative = 0.1
    """Cross-entropy, in nats a code, below which the next frame counts as foreseen and pays nothing."""
    progress_lag: Count = 5
    """Iterations, at least, that the older world model is old; twice as many at most."""
    ensemble_size: Several = 5
    """Members of the ensemble whose disagreement is measured."""
    replay_share: Fraction = 0.125
    """Share of each batch of the world model that comes from older episodes of the explorer."""
    random_share: Fraction = 0.75
    """Share of each batch that comes from random exploration, as in phase 1: what it knew is not forgotten."""
    replay_capacity: Count = 256
    """Older episodes of the explorer that are kept, and as many random ones."""
    random_episodes: NonNegativeInt = 8
    """New episodes of random actions in each iteration."""
    collapse_patience: Count = 20
    """Iterations in a row after which a side that shows a collapse ends the run."""


@settings
class AllSection:
    """The three phases in order, each from the best checkpoint of the one before."""

    output_dir: OutputPath = "./outputs/all"
    """The folder of the whole: a run folder for each phase, and `report.html`."""
    teacher_episodes: Count = 2_000
    """Episodes of phase 1."""
    student_episodes: Count = 1_000
    """Episodes of phase 2."""
    teacher_minutes: Positive | None = None
    """End phase 1 after this long."""
    student_minutes: Positive | None = None
    """End phase 2 after this long."""
    adversarial_minutes: Positive | None = None
    """End phase 3 after this long."""
    evaluation_episodes: Count = 16
    """Held-out episodes that each phase is evaluated on."""


@settings
class PhaseConfig:
    """An `rl_config.yaml`: what the three phases share, and a section for each."""

    phase: Literal["teacher", "student", "adversarial", "all"] | None = None
    """Which phase the file is the run of; files that serve all have none."""
    model: ModelSection = Field(default_factory=ModelSection)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    environment: dict[str, Any] = Field(default_factory=dict)
    """The world: the settings of `F1RLEnv`'s `task_config`."""
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    teacher: TeacherSection = Field(default_factory=TeacherSection)
    student: StudentSection = Field(default_factory=StudentSection)
    adversarial: AdversarialSection = Field(default_factory=AdversarialSection)
    all: AllSection = Field(default_factory=AllSection)
    run: ResumeSettings = Field(default_factory=ResumeSettings)
