"""The loss on episodes that are held out of training, which may end training early."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from deft.algorithms.algorithm import Metrics
from deft.algorithms.offline import OfflineAlgorithm
from deft.data.datasets.dataset import Dataset, EpisodeSubset, validation_episodes
from deft.data.streaming import episode_bytes
from deft.errors import InputError
from deft.runs.random_state import separate_random_state

log = logging.getLogger(__name__)
MOST_TRANSITIONS = 2_048  # of the held-out episodes, evenly spaced: a validation costs at most a few updates
MOST_BYTES = 2**28  # that they may take, images included


class Validation:
    """Measures the loss on the same held-out transitions each time, and counts how long it has not fallen."""

    def __init__(self, measure: Callable[[], Metrics], held_out: np.ndarray, patience: int, seed: int) -> None:
        self._measure, self._patience, self._seed = measure, patience, seed
        self.held_out = held_out.tolist()
        self.best, self.since = math.inf, 0  # the lowest loss, and the validations since

    def run(self) -> dict[str, float]:
        """Return `val_loss` and further losses, with the same random draws each time."""
        with separate_random_state(self._seed):
            results = {f"val_{name}": float(value) for name, value in self._measure().items()}
        results["val_loss"] = loss = results.pop("val_bc_loss")
        self.best, self.since = (loss, 0) if loss < self.best else (self.best, self.since + 1)
        return results

    @property
    def is_over(self) -> bool:
        """Whether training should end: the loss has not fallen for `early_stopping` validations."""
        return 0 < self._patience <= self.since

    @property
    def chooses_best(self) -> bool:
        """Whether the latest loss makes its checkpoint the best: with `early_stopping` alone."""
        return self._patience > 0 and self.since == 0

    def state_dict(self) -> dict[str, Any]:
        """Return the held-out episodes and the counters."""
        return {"held_out": self.held_out, "best": self.best, "since": self.since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load them; the episodes must be the same."""
        check_held_out(state, self.held_out)
        self.best, self.since = state["best"], state["since"]


def check_held_out(state: dict[str, Any] | None, held_out: list[int]) -> None:
    """Raise an error if a checkpoint held out other episodes: it was trained on some that would now validate it."""
    if (state or {}).get("held_out", []) != held_out:
        raise InputError(
            "val_fraction, seed: the run held out other episodes; resume with its own settings, or start a new run "
            "with --model_path"
        )


def hold_out(
    algorithm: OfflineAlgorithm, dataset: Dataset, seed: int, device: torch.device, cache_bytes: int
) -> tuple[Dataset, Validation | None]:
    """Return the episodes that an algorithm trains on, and the validation on the others, if any are held out."""
    fraction, count = algorithm.held_out_fraction, dataset.num_episodes
    held_out = validation_episodes(count, fraction, seed)
    if not len(held_out):
        if fraction:
            log.info("no validation loss: val_fraction %g of %d episodes is none; all are trained on", fraction, count)
        return dataset, None
    training = EpisodeSubset(dataset, np.setdiff1d(np.arange(count), held_out))
    kept = EpisodeSubset(dataset, held_out)
    log.info(
        "%d of %d episodes (%d transitions) are held out for val_loss (val_fraction %g)",
        len(held_out), count, len(kept), fraction,
    )  # fmt: skip
    row_bytes = max(1, int(episode_bytes(kept).sum()) // len(kept))
    num_rows = max(1, min(len(kept), MOST_TRANSITIONS, MOST_BYTES // row_bytes))
    chosen = np.linspace(0, len(kept) - 1, num_rows).round().astype(np.int64)
    sampler = algorithm.make_sampler(kept, seed, device, cache_bytes)
    size = max(1, algorithm.settings.batch_size // getattr(algorithm.settings, "gradient_accumulation", 1))
    batches = [sampler.gather(chosen[start : start + size]) for start in range(0, num_rows, size)]
    return training, Validation(lambda: algorithm.validate(batches), held_out, algorithm.patience, seed)
