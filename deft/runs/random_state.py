"""Random numbers of a run: which seeds episodes start from, and the process's random state, which checkpoints hold.

Online training, the evaluations during it, and tests never start an episode from the same seed.
Recordings and tests do share seeds in environments without splits: a policy trained on a recording is tested with
another `--seed` than that of `deft collect`.

0 to 2^24 − 1        recordings and tests: `deft collect`, `deft evaluate` and `deft compare` play seed, seed + 1, …
2^24 to 2^29 − 1     environments that train: a block of consecutive seeds for each run seed (`training_seed`)
2^29 to 2^30 − 1     evaluations during training, which choose the best checkpoint (`EVALUATION_SEED`)
from 2^30            tests in environments that have splits and in suites (`deft.evaluation.evaluate.first_seed`)
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

TRAINING_SEEDS = range(2**24, 2**29)
EVALUATION_SEED = 2**29  # evaluations during training play the episodes from the run's seed plus this


def training_seed(*key: int) -> int:
    """The seed of a run's first training environment; environment i starts from this plus i.

    `key` is the run's seed, and what else distinguishes two starts of one run. `SeedSequence` spreads the keys over
    `TRAINING_SEEDS`: blocks of two run seeds overlap with a chance of about block size / 2^28.
    """
    return TRAINING_SEEDS[int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]) % len(TRAINING_SEEDS)]


def process_seed(seed: int, rank: int) -> int:
    """The seed of the random numbers that one of several processes draws; the first process has the run's own."""
    return seed if rank == 0 else int(np.random.SeedSequence([seed, rank]).generate_state(1, np.uint64)[0] >> 1)


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextlib.contextmanager
def separate_random_state(seed: int) -> Iterator[None]:
    """Use a separate random state inside the context, and restore the run's afterwards."""
    state = get_random_state()
    seed_everything(seed)
    try:
        yield
    finally:
        set_random_state(state)


def get_random_state() -> dict[str, Any]:
    """Return the states of the global generators as plain data."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, gauss_next = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [
            name,
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(gauss),
        ],
        "python": [version, list(internal), gauss_next],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore what `get_random_state` returned."""
    torch.set_rng_state(state["torch"])
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    if "cuda" in state and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
