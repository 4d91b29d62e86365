"""Settings of the three training phases of F1, one class per section of an `rl_config.yaml`, and of its tokenizer.

`deft.config.rl_yaml` reads these files and makes flags from the classes. The trainers in `deft.training.phases` use
them. The section `environment` is validated by `deft.envs.robot_env.TaskConfig`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from deft.config import groups
from deft.config.algorithm_settings import PPOSettings
from deft.config.settings import LoggingConfig
from deft.config.validation import (
    Count,
    Fraction,
    Noise,
    NonNegative,
    NonNegativeInt,
    Positive,
    Several,
    Share,
    Switch,
    settings,
)


@settings
class ModelSection:
    """The F1 model to train and its initial weights."""

    config_file: str = "tiny"
    """Preset (`tiny`, `small`, `full`), or a YAML or JSON file with a model config."""
    checkpoint_path: str | None = None
    """Initialise from this weights file, checkpoint or directory of a published model, or from the teacher that ships
    with Deft (`shipped`); none: random weights."""
    lora: dict[str, Any] | None = None
    """LoRA adapters (`r`, `lora_alpha`, `target_modules`); only the adapters and the memory are trained."""
    tokenizer_weights: str | None = None
    """Image tokenizer of a new model: a file written by `deft train tokenizer`; none: that of the config."""
    untrained_tokenizer: Switch = False
    """Allow an image tokenizer with random weights; its codes carry no meaning."""


@settings
class RecordedVideo(groups.ImageDatasetSettings):
    """Train a world model on recorded video instead of random exploration."""

    wrist_camera: str | None = None
    """Image stream of the dataset to predict; by default found by its name."""
    head_camera: str | None = None
    """Image stream of the dataset that shows the scene; by default found by its name; `off`: none."""
    frame_skip: Count = 1
    """Keep every Nth frame of a recording, with the mean of the actions in between."""
    holdout: Fraction = 0.1
    """Fraction of the dataset's episodes to hold out for `deft evaluate`; at least one episode."""


@settings
class WorldModelTraining(
    RecordedVideo, groups.DecaySettings, groups.ClippingSettings, groups.MicroBatchSettings, groups.CompileSettings
):
    """Training of a world model."""

    batch_size = Field(8, description="Episodes per batch and process.")
    learning_rate = Field(2e-3, description="Peak learning rate of AdamW.")
    weight_decay = Field(0.01, description="Weight decay of AdamW, on matrices only.")
    max_grad_norm = 1.0
    scheduler: Literal["cosine", "linear", "constant"] = "cosine"
    """Decay of the learning rate to `min_learning_rate` over the run."""
    min_learning_rate: NonNegative = 1e-5
    """Learning rate at the end."""
    sequential_training: Switch = True
    """Train on chunks of episodes in order and carry the memory over; false: train on random steps."""
    bptt_length: Count = 8
    """Steps per chunk of backpropagation through time."""
    memory_backprop: Switch = True
    """Backpropagate through the memory within a chunk."""
    motion_warmup: Fraction | None = None
    """Fraction of the run, at its start, that trains only the motion prior; none: 0.15, or 0 from a checkpoint."""
    memory_warmup: Fraction | None = None
    """Fraction of the run, after `motion_warmup`, that trains only the memory; none: 0.05, or 0 from a checkpoint."""
    motion_learning_rate: Positive = 2e-3
    """Learning rate of both warm-ups."""
    train_understanding: Switch = True
    """Train the understanding expert as well as the world model, the memory and the motion prior."""
    freeze_vision_encoder: Switch = False
    """Freeze the vision encoder, if it is pretrained."""
    colour_augmentation: Fraction = 0.2
    """Strength of the random colour change of an episode, the same in all of its frames."""
    head_dropout: Fraction = 0.25
    """Fraction of the batches without the head camera, as the student has none."""
    overlap: Switch = True
    """Collect in worker processes during training; false: alternate, reproducible bit for bit."""
    buffer_capacity: Count = 512
    """Episodes in the replay buffer."""
    learning_starts: Count | None = None
    """Episodes to collect before training starts, with `overlap`; by default `batch_size`."""


@settings
class TrainingConfig(WorldModelTraining, groups.ShardSettings, groups.LoggedCheckpoints):
    """Training of a phase."""

    UNIT = "episodes"

    num_episodes: Count = 10_000
    """Episodes to collect and train on (with `dataset`, to draw from it), in whole batches; repeats do not count."""
    steps_per_episode: Count = 50
    """Steps per episode."""
    action_dim: Literal[32] = 32
    """Size of an action, with padding."""
    state_dim: Literal[32] = 32
    """Size of a state, with padding."""
    n_pred_img_steps: Literal[1] = 1
    """Frames to predict."""
    save_freq = 200
    video_freq: NonNegativeInt = 200
    """Write a video every this many {unit} (`videos/episode_n.mp4`: head, wrist, predicted wrist); 0: never."""
    sample_freq: NonNegativeInt = 200
    """Write sample images every this many {unit} (`samples/episode_n.png`: truth, prediction, error); 0: never."""
    num_envs: Count | None = None
    """Parallel environments; by default one per core that training leaves free."""
    vector: Literal["process", "warp"] = "process"
    """How the explorer's environments run in phases 2 and 3: in worker processes, or all in one simulation on the
    training device (warp: the tabletop on MuJoCo Warp)."""
    max_minutes: Positive | None = None
    """Stop and save after this many minutes; the learning rate then decays with time."""
    precision: groups.AutoPrecision = "auto"
    """Number format of matrix products; `auto`: bf16 where it is faster on this machine."""


@settings
class TeacherSection(groups.DirectorySettings):
    """Phase 1: the world model (teacher)."""

    output_dir = "./outputs/teacher_rl"


@settings
class StudentRewards:
    """Weights of the student's reward terms; each term is normalised first."""

    memory_divergence_weight: NonNegative = 0.5
    """Weight of convergence to the teacher's memory: −(D′ − D) − memory_decay · D′."""
    wm_uncertainty_weight: NonNegative = 0.5
    """Weight of the world model's reward, the sum of α, β, γ, ε and δ terms."""
    memory_decay: NonNegative = 0.07
    """Cost per step of the distance D between the memories."""
    uncertainty_weight: NonNegative = 1.0
    """α, weight of the mean entropy of the predicted codes."""
    error_weight: NonNegative = 1.0
    """β, weight of the cross-entropy (error) of the predicted codes."""
    error_progress_weight: NonNegative = 0.5
    """γ, weight of the increase of the error since the previous step."""
    uncertainty_progress_weight: NonNegative = 0.1
    """ε, weight of the increase of the uncertainty since the previous step."""
    action_cost: NonNegative = 0.01
    """δ, weight of the mean action magnitude, as a cost."""
    disagreement_weight: NonNegative = 0.0
    """Weight of the disagreement of an ensemble that learns from the student's episodes; noise gives none."""
    learning_progress_weight: NonNegative = 0.0
    """Weight of the decrease of that ensemble's error since `ensemble_lag` rollouts; noise gives none."""
    excess_error_weight: NonNegative = 0.0
    """Weight of the error beyond what the speed of the robot explains."""
    ensemble_members: Several = 5
    """Members of the ensemble of `disagreement_weight` and `learning_progress_weight`."""
    ensemble_epochs: Count = 4
    """Passes of the ensemble over the episodes of a rollout."""
    ensemble_lag: Count = 5
    """Age in rollouts of the older ensemble of `learning_progress_weight`; up to twice this."""
    reward_limit: Positive = 10.0
    """Clip the world model's reward to ± this."""


@settings
class ExplorerSettings(PPOSettings):
    """Action sampling and PPO training of the explorer."""

    learning_rate = Field(3e-4, description="Learning rate of value and memory; action weights start at 1/10 of it.")
    gamma = 0.95
    batch_size = Field(100, description="Steps per minibatch.")
    entropy_coef = Field(0.0, description="Weight of the entropy bonus; no effect, because the action noise is fixed.")
    learning_rate_schedule = "adaptive"
    desired_kl = 0.1
    clip_range = 0.3
    sequence_length = Field(10, description="Steps of backpropagation through the memory.")
    episodes_per_update: Count = 8
    """Episodes per rollout and process; with fewer environments, each plays several."""
    denoising_steps: Count = 2
    """Euler steps of flow matching from noise to an action."""
    initial_noise: NonNegative = 1.5
    """Standard deviation of the initial noise of an action."""
    noise_correlation: Fraction = 0.85
    """Correlation of the initial noise between successive env steps, for smoother motion."""
    action_noise: Noise = 0.4
    """Standard deviation of the noise in each Euler step."""
    action_limit: Share = 1.0
    """Factor on the student's actions; a smaller factor moves the robot more slowly."""
    memory_loss_weight: NonNegative = 1.0
    """Weight in the loss of the squared distance to the teacher's memory."""


@settings
class AfterTeacher(groups.DirectorySettings):
    """A phase that starts from a world model."""

    teacher_checkpoint: str | None = None
    """Load the world model from this run, checkpoint or weights file; by default the one included in Deft (`tiny`)."""


@settings
class StudentSection(AfterTeacher):
    """Phase 2: the explorer (student)."""

    output_dir = "./outputs/student_rl"
    rewards: StudentRewards = Field(default_factory=StudentRewards)
    explorer: ExplorerSettings = Field(default_factory=ExplorerSettings)


@settings
class AdversarialSection(AfterTeacher):
    """Phase 3: adversarial training of world model and explorer."""

    output_dir = "./outputs/adversarial_rl"
    iterations: Count = 100_000
    """Iterations: collect episodes, train the world model `wm_updates` times, update the explorer once."""
    student_checkpoint: str | None = None
    """Load the explorer from this run or checkpoint of phase 2; none: a new explorer."""
    wm_learning_rate: Positive = 1e-4
    """Peak learning rate of the world model (AdamW)."""
    explorer_learning_rate: Positive = 3e-4
    """Learning rate of the explorer (PPO)."""
    explorer_noise: Positive = 1.0
    """Factor on the student's action noise; a smaller factor keeps the explorer nearer to its start."""
    explorer_correlation: Fraction | None = None
    """Correlation of the noise between steps; replaces the student's `noise_correlation`."""
    explorer_scale: Share = 1.0
    """Factor on the explorer's actions; a smaller factor moves the robot more slowly."""
    wm_updates: Count = 5
    """Batches of `batch_size` episodes that train the world model per explorer update."""
    wm_warmup: NonNegativeInt = 10
    """Iterations at the start that train only the world model."""
    reward: Literal["progress", "disagreement", "error"] = "progress"
    """Reward: learning progress of the world model, disagreement of an ensemble, or prediction error."""
    reward_floor: NonNegative = 0.1
    """Cross-entropy (nats per code) below which a predicted frame gives no reward."""
    progress_lag: Count = 5
    """Age in iterations of the older world model that progress is measured against; up to twice this."""
    ensemble_size: Several = 5
    """Members of the ensemble of `reward: disagreement`."""
    replay_share: Fraction = 0.125
    """Fraction of each world model batch from older episodes of the explorer."""
    random_share: Fraction = 0.75
    """Fraction of each world model batch from random exploration, which prevents forgetting."""
    replay_capacity: Count = 256
    """Capacity of the buffers of older explorer episodes and of random episodes, each."""
    random_episodes: NonNegativeInt = 8
    """New random episodes per iteration."""
    collapse_patience: Count = 20
    """Stop the run after this many consecutive iterations with a collapsed world model or explorer."""


@settings
class AllSection(groups.DirectorySettings):
    """All three phases in order; each starts from the best checkpoint of the previous one."""

    output_dir = Field("./outputs/all", description="Directory for a run directory per phase and `report.html`.")
    teacher_episodes: Count = 2_000
    """Episodes of phase 1."""
    student_episodes: Count = 1_000
    """Episodes of phase 2."""
    teacher_minutes: Positive | None = None
    """Stop phase 1 after this many minutes."""
    student_minutes: Positive | None = None
    """Stop phase 2 after this many minutes."""
    adversarial_minutes: Positive | None = None
    """Stop phase 3 after this many minutes."""
    evaluation_episodes: Count = 16
    """Held-out episodes per evaluation of a phase."""


@settings
class PhaseConfig:
    """An `rl_config.yaml`: shared settings, and a section for each phase."""

    phase: Literal["teacher", "student", "adversarial", "all"] | None = None
    """Phase of the run that wrote this file; none in files for all phases."""
    model: ModelSection = Field(default_factory=ModelSection)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    environment: dict[str, Any] = Field(default_factory=dict)
    """Settings of the environment: `task_config` of `F1RLEnv`."""
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    teacher: TeacherSection = Field(default_factory=TeacherSection)
    student: StudentSection = Field(default_factory=StudentSection)
    adversarial: AdversarialSection = Field(default_factory=AdversarialSection)
    all: AllSection = Field(default_factory=AllSection)
    run: groups.ResumeSettings = Field(default_factory=groups.ResumeSettings)


@settings
class TokenizerTrainingConfig(
    groups.DirectorySettings,
    groups.RunSettings,
    groups.ViewSettings,
    groups.LoggedCheckpoints,
    groups.ImageDatasetSettings,
    groups.EnvKwargsSettings,
    groups.LearningSettings,
):
    """Train an image tokenizer on rendered images of the tabletop or on a dataset."""

    UNIT = "updates"

    model: str = "tiny"
    """F1 preset (`tiny`, `small`, `full`) or config file whose tokenizer is trained."""
    cameras: tuple[str, ...] | None = None
    """Image streams of the dataset; by default all."""
    init_weights: str | None = None
    """Initialise from this tokenizer: a file, or `tiny_tokenizer`, which ships with Deft."""
    output_dir = Field("outputs/tokenizer", description="Run directory; the result is its `tokenizer.safetensors`.")
    num_updates: Count = 1600
    """Gradient updates."""
    batch_size = Field(16, description="Images per update.")
    learning_rate = Field(2e-3, description="Peak learning rate of AdamW: 50 updates of warm-up, then a cosine to 0.")
    num_frames: Count = 16384
    """Images to train on: rendered, or sampled evenly from the dataset."""
    held_out_frames: Count = 512
    """Held-out images for evaluation."""
    held_out_episodes: Fraction = 0.1
    """Fraction of a dataset's episodes that is held out; at least one."""
    pictures_per_scene: Count = 4
    """Time steps at which a rendered scene is captured by both cameras."""
    num_workers: NonNegativeInt | None = None
    """Rendering processes; by default all cores but one. 0: a thread of this process."""
    plain_share: Fraction = 0.1
    """Fraction of the updates, at the start, that train the decoder on unquantized features."""
    gradient_weight: NonNegative = 0.5
    """Weight of the image gradient error in the loss."""
    color_jitter: Fraction = 0.2
    """Strength of the random colour scaling."""
    revive_interval: NonNegativeInt = 50
    """Reinitialise rarely used codes every this many updates; 0: never."""
    eval_freq: NonNegativeInt = 250
    """Evaluate every this many {unit}; 0: only at the end."""
    save_freq = 250
    log_freq = 25
    keep_checkpoints = 2
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Number format of the convolutions; `auto`: bf16 on a GPU that supports it. Codes are computed in fp32."""
