"""The settings of `deft train tokenizer`: one flat class, from which `deft.cli` makes the flags."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from deft.config.validation import (
    Count,
    Fraction,
    NonNegative,
    NonNegativeInt,
    OutputPath,
    Positive,
    Seed,
    Switch,
    settings,
)


@settings
class TokenizerTrainingConfig:
    """Training of an image tokenizer, on pictures of the tabletop or on recorded ones."""

    model: str = "tiny"
    """Whose tokenizer: a preset of F1 (`tiny`, `small`, `full`), or a config file."""
    dataset: str | None = None
    """Recorded pictures (a LeRobot folder, npz episodes, …) in place of the tabletop's."""
    dataset_options: dict[str, Any] = Field(default_factory=dict)
    """How its format is loaded (`skip_missing=true`, `image_size=128`, …), as in `load_dataset`."""
    cameras: tuple[str, ...] | None = None
    """Which picture streams of the dataset; by default all."""
    init_weights: str | None = None
    """Start from this tokenizer: a file, or `tiny_tokenizer`, which ships with Deft; none: from new weights."""
    output_dir: OutputPath = "outputs/tokenizer"
    """The run folder; `tokenizer.safetensors` in it is the result."""
    num_updates: Count = 1600
    """Gradient updates."""
    batch_size: Count = 16
    """Pictures an update."""
    lr: Positive = 2e-3
    """AdamW's step size at its highest; it rises for 50 updates and falls to 0 as a cosine."""
    num_frames: Count = 16384
    """Pictures to learn from: rendered, or taken evenly from the dataset."""
    held_out_frames: Count = 512
    """Pictures of scenes, or of recorded episodes, that are kept for evaluation."""
    held_out_episodes: Fraction = 0.1
    """Share of a dataset's episodes that are kept for it; one at least."""
    pictures_per_scene: Count = 4
    """Moments at which a scene is seen, by both cameras."""
    env_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the tabletop (`domain_randomization`, `num_objects`, …)."""
    num_workers: NonNegativeInt | None = None
    """Processes that render; by default all cores but one, 0: a thread of this process."""
    plain_share: Fraction = 0.1
    """Share of the updates, at the start, in which the decoder sees the features themselves and no codes; tokenizers
    with a linear path begin with codes at once."""
    gradient_weight: NonNegative = 0.5
    """Weight of the error in differences between neighbouring pixels, which keeps edges sharp."""
    color_jitter: Fraction = 0.2
    """How much the channels of a picture are scaled at random, so that more colours are seen."""
    shift_augmentation: NonNegativeInt = 0
    """Pixels by which a picture is moved at most, at random: for few scenes, seen by a camera that stands still."""
    revive_interval: NonNegativeInt = 50
    """Updates after which codes that are hardly used get a new place; 0: never."""
    eval_interval: NonNegativeInt = 250
    """Updates between evaluations; 0: at the end alone."""
    save_interval: NonNegativeInt = 250
    """Updates between checkpoints; 0: at the end alone."""
    log_interval: Count = 25
    """Updates between lines of metrics."""
    keep_checkpoints: Count = 2
    """How many of the latest checkpoints are kept."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the convolutions; auto: bfloat16 on a GPU that has it. Codes are always found in float32."""
    seed: Seed = 0
    """One seed, one result, on one machine."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    threads: Count | None = None
    """Torch's threads; by default OMP_NUM_THREADS, one for a small network, else as many as measure faster."""
    resume: Switch = False
    """Go on from the latest checkpoint in `output_dir`."""
    overwrite: Switch = False
    """Replace a run that is already in `output_dir`."""
