"""Settings of `deft train tokenizer`."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from deft.config.groups import CheckpointSettings, RunSettings
from deft.config.validation import Count, Fraction, NonNegative, NonNegativeInt, OutputPath, Positive, settings


@settings
class TokenizerTrainingConfig(RunSettings, CheckpointSettings):
    """Train an image tokenizer on rendered images of the tabletop or on a dataset."""

    UNIT: ClassVar[str] = "updates"

    model: str = "tiny"
    """F1 preset (`tiny`, `small`, `full`) or config file whose tokenizer is trained."""
    dataset: str | None = None
    """Dataset with images (a LeRobot directory, npz episodes, …); by default rendered images of the tabletop."""
    dataset_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the dataset's loader (`skip_missing=true`, `image_size=128`, …), as in `load_dataset`."""
    cameras: tuple[str, ...] | None = None
    """Image streams of the dataset; by default all."""
    init_weights: str | None = None
    """Initialise from this tokenizer: a file, or `tiny_tokenizer`, which ships with Deft."""
    output_dir: OutputPath = "outputs/tokenizer"
    """Run directory; the result is its `tokenizer.safetensors`."""
    num_updates: Count = 1600
    """Gradient updates."""
    batch_size: Count = 16
    """Images per update."""
    learning_rate: Positive = 2e-3
    """Peak learning rate of AdamW: a warm-up of 50 updates, then a cosine decay to 0."""
    num_frames: Count = 16384
    """Images to train on: rendered, or sampled evenly from the dataset."""
    held_out_frames: Count = 512
    """Held-out images for evaluation."""
    held_out_episodes: Fraction = 0.1
    """Fraction of a dataset's episodes that is held out; at least one."""
    pictures_per_scene: Count = 4
    """Time steps at which a rendered scene is captured by both cameras."""
    env_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the tabletop (`domain_randomization`, `num_objects`, …)."""
    num_workers: NonNegativeInt | None = None
    """Rendering processes; by default all cores but one. 0: a thread of this process."""
    plain_share: Fraction = 0.1
    """Fraction of the updates, at the start, that train the decoder on unquantized features."""
    gradient_weight: NonNegative = 0.5
    """Weight of the image gradient error in the loss."""
    color_jitter: Fraction = 0.2
    """Strength of the random colour scaling."""
    shift_augmentation: NonNegativeInt = 0
    """Largest random shift of an image, in pixels."""
    revive_interval: NonNegativeInt = 50
    """Reinitialise rarely used codes every this many updates; 0: never."""
    eval_freq: NonNegativeInt = 250
    """Evaluate every this many {unit}; 0: only at the end."""
    save_freq: NonNegativeInt = 250
    log_freq: Count = 25
    """Log metrics every this many {unit}."""
    keep_checkpoints: Count = 2
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Number format of the convolutions; `auto`: bf16 on a GPU that supports it. Codes are computed in fp32."""
