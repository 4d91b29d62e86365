"""The settings of the three training phases, section by section as an `rl_config.yaml` has them.

`deft.config.rl_yaml` reads such files and makes flags of these classes; the trainers of `deft.training.phases` take
them. The section `environment` belongs to the environments: `deft.envs.robot_world.TaskConfig`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from deft.config.settings import LoggingConfig
from deft.config.validation import Count, Fraction, NonNegative, NonNegativeInt, Positive, Seed, Switch, settings


@settings
class ModelSection:
    """Which F1 model is trained, and from what weights."""

    config_file: str = "tiny"
    """A preset (`tiny`, `small`, `full`), or a YAML or JSON file of a model's config."""
    checkpoint_path: str | None = None
    """Weights to start from: a file, a checkpoint, or a published model's folder; without it, new weights."""
    lora: dict[str, Any] | None = None
    """LoRA adapters on the weights (`r`, `lora_alpha`, `target_modules`): all but them and the memory stays frozen."""
    untrained_tokenizer: Switch = False
    """Allow an image tokenizer without trained weights; its codes mean nothing."""


@settings
class TrainingConfig:
    """How a phase trains."""

    num_episodes: Count = 10_000
    """Episodes to train on."""
    steps_per_episode: Count = 50
    """Steps of an episode."""
    batch_size: Count = 8
    """Episodes that are trained on side by side, in each process."""
    learning_rate: Positive = 2e-3
    """AdamW's step size at its highest."""
    weight_decay: NonNegative = 0.01
    """AdamW's weight decay, of matrices alone."""
    scheduler: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate goes to `min_learning_rate` by the end of the run."""
    min_learning_rate: NonNegative = 1e-5
    """The learning rate at the end."""
    max_grad_norm: Positive | None = 1.0
    """Gradient clipping."""
    action_dim: Literal[32] = 32
    """Size of an action, with its padding."""
    state_dim: Literal[32] = 32
    """Size of a state, with its padding."""
    n_pred_img_steps: Literal[1] = 1
    """Frames that are predicted at a time."""
    save_every: NonNegativeInt = 200
    """Episodes from checkpoint to checkpoint; 0: at the end alone."""
    keep_checkpoints: Count = 3
    """The latest checkpoints that are kept."""
    log_every: Count = 10
    """Episodes from line to line of `episode_metrics.jsonl`."""
    video_save_every: NonNegativeInt = 200
    """Episodes from video to video (`videos/episode_n.mp4`: head, wrist, predicted wrist); 0: none."""
    sample_save_every: NonNegativeInt = 200
    """Episodes from picture to picture (`samples/episode_n.png`: truth, prediction, error); 0: none."""
    sequential_training: Switch = True
    """Train on episodes in order, chunk after chunk, with the memory carried; else on random steps."""
    bptt_length: Count = 8
    """Steps of a chunk: gradients go back through the memory this far."""
    memory_backprop: Switch = True
    """Let gradients pass through the memory within a chunk."""
    motion_warmup: Fraction = 0.15
    """Share of the run, at its start, that teaches the motion prior alone, at a fraction of the cost."""
    motion_learning_rate: Positive = 2e-3
    """AdamW's step size in the warm-up."""
    train_understanding: Switch = True
    """Train the understanding expert too; else the world model, the memory and the motion alone."""
    freeze_vision_encoder: Switch = False
    """Leave the vision tower as it is; for pretrained ones."""
    colour_augmentation: Fraction = 0.2
    """How much the colours of an episode are changed, alike in all of its frames; 0: not at all."""
    num_envs: Count | None = None
    """Copies of the environment; by default one for each core that training leaves free."""
    overlap: Switch = True
    """Collect in processes beside training; else in turns with it, repeatable bit for bit."""
    buffer_capacity: Count = 512
    """Episodes that are kept to train on again while new ones are under way."""
    learning_starts: Count | None = None
    """Episodes to collect before training begins, with `overlap`; by default `batch_size`."""
    dataset: str | None = None
    """Train on recorded video instead: a name or path of a dataset with pictures."""
    dataset_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the dataset's format, such as `skip_missing`."""
    wrist_camera: str | None = None
    """The dataset's stream of pictures to predict; found by its name where it is not given."""
    head_camera: str | None = None
    """The dataset's stream of pictures from outside; "none": do without."""
    holdout: Fraction = 0.1
    """Share of the dataset's episodes, at least one, that is kept for `deft evaluate`."""
    max_minutes: Positive | None = None
    """End the run after this long, saved; the learning rate goes by the clock then."""
    precision: Literal["auto", "float32", "tf32", "bfloat16"] = "auto"
    """Of the products; `auto`: bfloat16 where the machine is quicker with it."""
    seed: Seed = 0
    """Of the scenes, the actions and the weights."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    threads: Count | None = None
    """Torch's threads; by default all cores."""


@settings
class TeacherSection:
    """Phase 1, the world model."""

    output_dir: str = "./outputs/teacher_rl"
    """The run folder."""


@settings
class StudentRewards:
    """What the explorer is rewarded for."""

    memory_divergence_weight: NonNegative = 0.5
    """How far the student's memory is from the teacher's."""
    wm_uncertainty_weight: NonNegative = 0.5
    """How wrong the world model is."""


@settings
class StudentSection:
    """Phase 2, the explorer."""

    output_dir: str = "./outputs/student_rl"
    """The run folder."""
    rewards: StudentRewards = Field(default_factory=StudentRewards)


@settings
class AdversarialSection:
    """Phase 3, world model against explorer."""

    output_dir: str = "./outputs/adversarial_rl"
    """The run folder."""
    total_iterations: Count = 100_000
    """Rounds of the two."""


@settings
class RunSection:
    """How this process came to the run; not kept with it."""

    resume: str | None = None
    """Go on from this checkpoint, or from the latest of this run folder."""
    auto_resume: Switch = False
    """Go on from the latest whole checkpoint in `output_dir`, where there is one."""
    overwrite: Switch = False
    """Replace a run that is in `output_dir`."""


@settings
class PhaseConfig:
    """An `rl_config.yaml`: what the three phases share, and a section for each."""

    phase: Literal["teacher", "student", "adversarial"] | None = None
    """Which phase the file is the run of; files that serve all have none."""
    model: ModelSection = Field(default_factory=ModelSection)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    environment: dict[str, Any] = Field(default_factory=dict)
    """The world: the settings of `F1RLEnv`'s `task_config`."""
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    teacher: TeacherSection = Field(default_factory=TeacherSection)
    student: StudentSection = Field(default_factory=StudentSection)
    adversarial: AdversarialSection = Field(default_factory=AdversarialSection)
    run: RunSection = Field(default_factory=RunSection)
