"""`OfflineReplayBuffer`: what it loads, what it samples, and its errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from offline_worlds import two_step_dataset

from deft import OfflineReplayBuffer, schema
from deft.errors import InputError


def arrays(**changes: Any) -> dict[str, np.ndarray]:
    """D4RL's columns of two episodes: three steps that end, two steps that are cut. Row i sees [i, -i] and earns i."""
    number = np.arange(5, dtype=np.float32)
    return {
        "observations": np.stack([number, -number], 1),
        "actions": number[:, None] / 10,
        "rewards": number,
        "terminals": np.array([False, False, True, False, False]),
        "timeouts": np.array([False, False, False, False, True]),
        **changes,
    }


def test_d4rl_arrays_become_transitions_of_the_schema() -> None:
    buffer = OfflineReplayBuffer(obs_dim=2, action_dim=1)
    assert len(buffer) == 0
    assert buffer.load_dataset(arrays()) is buffer
    # Without next_observations what followed the cut row 4 is not known: four of the five rows are transitions.
    assert len(buffer) == 4
    batch = buffer.sample(256)
    assert batch[schema.OBSERVATION].shape == (256, 2)
    row = batch[schema.OBSERVATION][:, 0]
    assert set(row.tolist()) == {0.0, 1.0, 2.0, 3.0}
    torch.testing.assert_close(batch[schema.OBSERVATION][:, 1], -row)
    torch.testing.assert_close(batch[schema.ACTION][:, 0], row / 10)
    torch.testing.assert_close(batch[schema.NEXT_REWARD], row)
    torch.testing.assert_close(batch[schema.NEXT_TERMINATED], (row == 2).float())
    goes_on = row != 2  # after an end there is nothing to look at
    torch.testing.assert_close(batch[schema.NEXT_OBSERVATION][goes_on, 0], row[goes_on] + 1)


def test_next_observations_keep_the_transition_into_a_time_limit() -> None:
    following = arrays()["observations"] + np.array([1.0, -1.0], np.float32)
    buffer = OfflineReplayBuffer(2, 1).load_dataset(arrays(next_observations=following))
    assert len(buffer) == 5
    batch = buffer.sample(64)
    torch.testing.assert_close(batch[schema.NEXT_OBSERVATION][:, 0], batch[schema.OBSERVATION][:, 0] + 1)


def test_one_seed_one_order() -> None:
    first, second, other = (OfflineReplayBuffer(2, 1, seed=seed).load_dataset(arrays()) for seed in (3, 3, 4))
    assert torch.equal(first.sample(16)[schema.NEXT_REWARD], second.sample(16)[schema.NEXT_REWARD])
    assert not torch.equal(first.sample(64)[schema.NEXT_REWARD], other.sample(64)[schema.NEXT_REWARD])


def test_files_and_datasets_are_taken_too(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "own.hdf5", "w") as file:
        for name, values in arrays().items():
            file[name] = values
    assert len(OfflineReplayBuffer(2, 1).load_dataset(tmp_path / "own.hdf5")) == 4
    dataset = two_step_dataset(10)
    buffer = OfflineReplayBuffer(2, 1).load_dataset(dataset)
    assert buffer.dataset is dataset
    # Another dataset takes the place of the first, in what is drawn too.
    buffer.sample(4)
    assert set(buffer.load_dataset(arrays()).sample(64)[schema.NEXT_REWARD].tolist()) == {0.0, 1.0, 2.0, 3.0}


@pytest.mark.parametrize(
    ("sizes", "changes", "named"),
    [
        ((3, 1), {}, "obs_dim: 3 was given; the dataset arrays has 2"),
        ((2, 4), {}, "action_dim: 4 was given; the dataset arrays has 1"),
        ((2, 1), {"rewards": np.array([0, 1, np.nan, 3, 4], np.float32)}, "rewards: is not a finite 32-bit number"),
        ((2, 1), {"rewards": np.zeros(4, np.float32)}, "rewards: has shape (4,), not (5,)"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(sizes: tuple[int, int], changes: Any, named: str) -> None:
    buffer = OfflineReplayBuffer(*sizes)
    with pytest.raises(InputError) as error:
        buffer.load_dataset(arrays(**changes))
    assert named in str(error.value)
    assert "\n" not in str(error.value)
    assert len(buffer) == 0


def test_missing_columns_are_named() -> None:
    columns = arrays()
    del columns["terminals"]
    with pytest.raises(InputError, match=r"lacks terminals; it has: observations, actions"):
        OfflineReplayBuffer(2, 1).load_dataset(columns)


def test_an_empty_buffer_says_what_comes_first() -> None:
    with pytest.raises(InputError, match="call load_dataset first"):
        OfflineReplayBuffer(2, 1).sample(4)
    with pytest.raises(InputError, match="no-such-dataset-v0 was not found"):
        OfflineReplayBuffer(2, 1).load_dataset("no-such-dataset-v0")
