"""The interface of an algorithm that learns from a dataset, for the offline trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deft.algorithms.algorithm import Algorithm, Metrics
from deft.algorithms.experience import DatasetBatches, Experience
from deft.config.algorithm_settings import OfflineSettings
from deft.config.groups import HeldOutSettings
from deft.data.datasets.dataset import Dataset

PRECISIONS = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}


class OfflineAlgorithm(Algorithm):
    """An algorithm that builds its policy, samples a dataset, and takes one gradient step per batch."""

    settings: OfflineSettings
    capturable: bool = True
    """Whether `step` may be captured as a CUDA graph: it never synchronises with the device."""
    period: int = 1
    """Number of steps after which the operations repeat; a capture holds as many."""

    @property
    def held_out_fraction(self) -> float:
        """The fraction of the episodes that is held out of training, for `validate`."""
        return self.settings.val_fraction if isinstance(self.settings, HeldOutSettings) else 0.0

    @property
    def patience(self) -> int:
        """Validations without a lower loss after which training ends; 0: it does not end early."""
        return self.settings.early_stopping if isinstance(self.settings, HeldOutSettings) else 0

    def validate(self, batches: Sequence[Mapping[Any, Any]]) -> Metrics:
        """Return losses on held-out batches, `bc_loss` among them; called if `held_out_fraction` is not 0."""
        raise TypeError(f"{type(self).__name__} does not define validate")

    @property
    def experience(self) -> Experience:
        """Batches of a dataset."""
        return DatasetBatches()

    def make_sampler(self, dataset: Dataset, seed: int, device: torch.device, cache_bytes: int) -> Any:
        """Return the sampler of its batches."""
        raise TypeError(f"{type(self).__name__} does not define make_sampler")

    def prepare(self, dataset: Dataset, sampler: Any, fresh: bool) -> None:
        """Set up the sampler, and, where training is `fresh`, fit the policy's normalisation to the dataset."""

    def check_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Raise an error if a run with these weights cannot be resumed with these settings; called before loading."""

    def resumed(self) -> None:
        """Apply settings that may change at a resume; called after a checkpoint is loaded."""

    def schedule(self) -> None:
        """Update values that depend on `progress`; called before each step, outside a captured graph."""

    def update(self, batches: Iterator[Mapping[Any, Any]]) -> Metrics:
        """One gradient step on one batch."""
        self.schedule()
        return self.step(next(batches))

    def _update_all(self, batches: Iterator[Mapping[Any, Any]]) -> Metrics:
        """One step on each batch, for algorithms in an environment; the metrics of the last one."""
        metrics: Metrics = {}
        for batch in batches:
            self.schedule()
            metrics = self.step(batch)
        return metrics

    def step(self, batch: Mapping[Any, Any]) -> Metrics:
        """One gradient step."""
        metrics = self._step(batch)
        self.version += 1
        return metrics

    def _step(self, batch: Mapping[Any, Any]) -> Metrics:
        raise TypeError(f"{type(self).__name__} does not define _step")


def to_cpu(value: Any) -> Any:
    """A nested state with its tensors copied to main memory."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    return {name: to_cpu(nested) for name, nested in value.items()} if isinstance(value, dict) else value
