"""Settings of every algorithm, and of every algorithm that learns from a dataset; other classes inherit from them."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from deft.config import groups
from deft.config.validation import settings

Source = Literal["rollouts", "replay", "labels", "dataset"]


@settings
class AlgorithmSettings(groups.DiscountSettings):
    """Settings that every algorithm has."""

    LEARNS_FROM: ClassVar[Source] = "rollouts"
    """Source of the training data: rollouts, a replay buffer or an expert's labels in an environment, or a dataset."""
    DENOISES: ClassVar[bool] = False
    """Whether its policies denoise (`distribution: flow`) if nothing else is given."""

    NOT_OFFERED: ClassVar[tuple[str, ...]] = ()
    """Inherited settings that have no flag, since the algorithm rejects them."""

    @property
    def envs_per_group(self) -> int:
        """Environments that must run in the same process because their episodes are compared; 1: no constraint."""
        return 1

    @property
    def takes_over(self) -> bool:
        """Whether environments must be shown to a person who may take over."""
        return False

    def copies(self, num_envs: int) -> int:
        """Return the number of parallel environments for a setting of `env.num_envs`."""
        return num_envs


@settings
class OfflineSettings(AlgorithmSettings, groups.DecaySettings):
    """Settings of the algorithms that learn from a dataset."""

    LEARNS_FROM: ClassVar[Source] = "dataset"

    batch_size = Field(256, description="Transitions (or windows) per batch.")
    precision: groups.Precision = "fp32"
    """Number format of matrix products; `bf16` is faster with hardware support; `tf32` is for GPUs."""
