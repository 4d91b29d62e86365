"""Streams of a dataset under other names."""

import numpy as np
import pytest

from deft import DatasetWriter
from deft.data.datasets import load_dataset
from deft.errors import InputError


@pytest.fixture
def recorded(tmp_path):
    with DatasetWriter(tmp_path / "two-v0", format="minari") as writer:
        observations = {"z_top": np.arange(8.0).reshape(4, 2), "a_wrist": -np.arange(8.0).reshape(4, 2)}
        writer.add_episode(observations, np.zeros((3, 1)), np.ones(3), np.arange(3) == 2)
    return tmp_path / "two-v0"


def test_streams_have_the_given_names(recorded):
    dataset = load_dataset(recorded)
    renamed = load_dataset(recorded, rename_streams={"top": "z_top", "wrist": "a_wrist"})
    assert list(renamed.observation_space) == ["top", "wrist"]
    episode, own = renamed.episode(0), dataset.episode(0)
    assert np.array_equal(episode.observation["top"], own.observation["z_top"])
    assert np.array_equal(episode.observation["wrist"], own.observation["a_wrist"])
    assert renamed.episode_returns().tolist() == [3.0]
    assert renamed.fingerprint() == dataset.fingerprint()


def test_a_name_that_is_not_there_is_an_error(recorded):
    with pytest.raises(InputError, match=r"dataset .* has no stream 'top'; it has a_wrist, z_top"):
        load_dataset(recorded, rename_streams={"camera": "top"})
