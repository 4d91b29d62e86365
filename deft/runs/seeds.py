"""Which seeds episodes start from, so that online training, the evaluations during it, and tests never share one.

Recordings and tests do share seeds in environments without splits: a policy trained on a recording is tested with
another `--seed` than that of `deft collect`.

0 to 2^24 − 1        recordings and tests: `deft collect`, `deft evaluate` and `deft compare` play seed, seed + 1, …
2^24 to 2^29 − 1     environments that train: a block of consecutive seeds for each run seed (`training_seed`)
2^29 to 2^30 − 1     evaluations during training, which choose the best checkpoint (`EVALUATION_SEED`)
from 2^30            tests in environments that have splits (`deft.evaluation.evaluate.first_seed`)
"""

from __future__ import annotations

import numpy as np

TRAINING_SEEDS = range(2**24, 2**29)
EVALUATION_SEED = 2**29  # evaluations during training play the episodes from the run's seed plus this


def training_seed(*key: int) -> int:
    """The seed of a run's first training environment; environment i starts from this plus i.

    `key` is the run's seed, and what else tells two starts of one run apart. `SeedSequence` spreads the keys over
    `TRAINING_SEEDS`: blocks of two run seeds overlap with a chance of about block size / 2^28.
    """
    return TRAINING_SEEDS[int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]) % len(TRAINING_SEEDS)]


def process_seed(seed: int, rank: int) -> int:
    """The seed of the random numbers that one of several processes draws; the first process has the run's own."""
    return seed if rank == 0 else int(np.random.SeedSequence([seed, rank]).generate_state(1, np.uint64)[0] >> 1)
