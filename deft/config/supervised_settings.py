"""Settings of the algorithms that learn from a dataset or from labels without critics: imitation, classifiers, models.

`deft.config.algorithm_settings` lists them with all others; import them from there.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from deft.config import groups
from deft.config.algorithm_base import OfflineSettings
from deft.config.validation import (
    Count,
    Fraction,
    NonNegative,
    NonNegativeInt,
    Number,
    Positive,
    Switch,
    settings,
)


def _names_with_commas(value: Any) -> Any:
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list | tuple):
        return value
    return tuple(name for word in words for name in (word.split(",") if isinstance(word, str) else [word]) if name)


Augmentations = Annotated[tuple[Literal["shift", "color"], ...], BeforeValidator(_names_with_commas)]


@settings
class ImitationSettings(OfflineSettings, groups.MicroBatchSettings):
    """Settings of the algorithms that imitate actions."""

    loss: Literal["log_prob", "mse"] = "log_prob"
    """`log_prob`: negative log-likelihood, which also trains the standard deviation; `mse`: squared error."""
    learning_rate_schedule: Literal["constant", "cosine"] = "constant"
    """`cosine`: decay to 0 at the end of training."""
    augment: Augmentations = ()
    """Random image augmentation: `shift` by up to 1/16 of a side; `color`: gain, offset and gamma."""


@settings
class SFTSettings(ImitationSettings, groups.HeldOutSettings):
    """Supervised fine-tuning (behaviour cloning)."""


@settings
class DAggerSettings(groups.TakeoverSettings, ImitationSettings):
    """DAgger: imitation of an expert that labels the states that the policy visits."""

    LEARNS_FROM = "labels"

    initial_beta: Fraction = 1.0
    """Probability that the expert acts in the first round."""
    beta: Fraction = 0.5
    """Factor on that probability after each round; 0: the expert acts in the first round alone."""
    updates_per_round: Count = 200
    """Gradient updates on all labels after each round of `rollout_steps`."""
    prior_data: str | None = None
    """Add the episodes of this dataset (demonstrations) to the labels from the start."""
    record: Switch = True
    """Write the labelled episodes as a dataset into the run directory at the end (extra `data`)."""
    expert_finishes: Switch = False
    """Let an expert that acts finish the episode, and imitate its steps alone; for policies of action chunks."""

    @model_validator(mode="after")
    def _someone_is_imitated(self) -> Self:
        if self.expert_finishes and self.takeover:
            raise ValueError("expert_finishes: is for a scripted expert; with takeover a person decides when to act")
        if self.expert_finishes and self.beta != 1:
            raise ValueError(
                f"beta {self.beta:g}: with expert_finishes only steps of the expert are imitated, so it must not act "
                "less and less; give beta 1"
            )
        return self


@settings
class RecapOfflineSettings(ImitationSettings):
    """RECAP on a dataset: a policy conditioned on whether an action was an improvement."""

    positive_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.4
    """Fraction of the transitions with the largest advantages that are labelled as improvements."""
    indicator_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.3
    """Probability of training without the indicator, for the policy without condition (guidance)."""
    advantage: Literal["return", "step"] = "return"
    """Advantage: recorded return − V, or reward + γ V − V over one decision of the policy."""
    value_warmup: NonNegativeInt = 200
    """Updates at the start that train only V."""
    value_learning_rate: Positive | None = None
    """Learning rate of V; None: `learning_rate`."""


@settings
class RecapSettings(groups.TakeoverSettings, RecapOfflineSettings):
    """RECAP: rounds of collecting episodes, labelling them with V, and conditioned imitation."""

    LEARNS_FROM = "labels"

    updates_per_round: Count = 200
    """Gradient updates on all data after each round of `rollout_steps`."""
    prior_data: str | None = None
    """Add the episodes of this dataset to the data from the start."""
    record: Switch = True
    """Write the collected episodes as a dataset into the run directory at the end (extra `data`)."""


@settings
class RewardModelSettings(OfflineSettings, groups.HeldOutSettings):
    """Reward model: a classifier of frames that show success."""

    label: Literal["terminated", "reward"] = "terminated"
    """Frames that show success: those after a step that terminates its episode, or after a reward above a threshold."""
    reward_threshold: Number = 0.5
    """Threshold of `label: reward`."""
    val_fraction = 0.1
    augment: Augmentations = ()
    """Random image augmentation: `shift` by up to 1/16 of a side; `color`: gain, offset and gamma."""


@settings
class VisionSettings(OfflineSettings, groups.HeldOutSettings):
    """Vision: self-supervised training of camera encoders on video."""

    batch_size = Field(64, description="Transitions per batch; the next images of all others are the alternatives.")
    learning_rate = Field(2e-3, description="Learning rate of Adam.")
    weight_decay = 0.01
    learning_rate_schedule: Literal["constant", "cosine"] = "cosine"
    """`cosine`: decay to 0 at the end of training."""
    prediction_weight: NonNegative = 1.0
    """Weight of the loss of the next image after an action chunk."""
    text_weight: NonNegative = 1.0
    """Weight of the loss of the instruction that belongs to an image; 0: videos without instructions."""
    num_negatives: Count = 7
    """Instructions of other transitions that the right one is compared with."""

    @model_validator(mode="after")
    def _something_to_learn(self) -> Self:
        if not self.prediction_weight and not self.text_weight:
            raise ValueError("prediction_weight and text_weight are both 0: there is nothing to learn; set one of them")
        if self.text_weight and self.batch_size <= self.num_negatives:
            raise ValueError(
                f"num_negatives {self.num_negatives}: a batch of {self.batch_size} has too few other instructions; "
                "use fewer, or a larger batch_size"
            )
        return self


@settings
class DTSettings(OfflineSettings, groups.ClippingSettings):
    """Decision Transformer."""

    learning_rate = Field(1e-4, description="Learning rate of AdamW after the warm-up.")
    batch_size = Field(64, description="Windows per batch.")
    weight_decay = 1e-4
    max_grad_norm = 0.25
    context_length: Count = 20
    """Steps per window; each step is a return-to-go, an observation and an action."""
    n_layer: Count = 3
    """Number of transformer layers."""
    n_head: Count = 1
    """Attention heads per layer."""
    embed_dim: Count = 128
    """Embedding size of the transformer."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Dropout probability of embeddings, attention and residual branches."""
    warmup_steps: NonNegativeInt = 10_000
    """Updates of the linear learning rate warm-up."""
    target_return: tuple[Number, ...] | None = None
    """Target returns in evaluation, one or several; None: the best return of the dataset."""
    return_scale: Positive | None = None
    """Divisor of the returns-to-go; None: the power of ten below the largest return of the dataset."""
    max_episode_length: Count = 1000
    """Number of timestep embeddings; at least the length of the dataset's longest episode."""
    context_slide: Count = 1
    """Oldest steps that a full window drops at once in evaluation; 1 as in the paper, more is faster."""

    @field_validator("target_return", mode="before")
    @classmethod
    def _one_target_is_a_list_of_one(cls, value: Any) -> Any:
        return (value,) if isinstance(value, int | float) and not isinstance(value, bool) else value

    @model_validator(mode="after")
    def _sizes_fit(self) -> DTSettings:
        if self.embed_dim % self.n_head:
            raise ValueError(f"embed_dim {self.embed_dim} does not divide into n_head {self.n_head}")
        if self.context_slide > self.context_length:
            raise ValueError(f"context_slide {self.context_slide} is more than context_length {self.context_length}")
        return self
