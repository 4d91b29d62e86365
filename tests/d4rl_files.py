"""Files in the layout of D4RL."""

from pathlib import Path

import h5py
import numpy as np


def write_hopper(path: Path, num_rows: int, episode_length: int) -> None:
    """Write a dataset of the shape of hopper-medium-v2: noise, in episodes that all end as terminals."""
    generator = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file["observations"] = generator.normal(size=(num_rows, 11)).astype(np.float32)
        file["actions"] = generator.uniform(-1, 1, (num_rows, 3)).astype(np.float32)
        file["rewards"] = generator.normal(size=num_rows).astype(np.float32)
        file["terminals"] = np.arange(num_rows) % episode_length == episode_length - 1
        file["timeouts"] = np.zeros(num_rows, bool)
