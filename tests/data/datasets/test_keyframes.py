"""Labels from later steps of an episode: the next change of the gripper, the end, and fixed numbers of steps ahead."""

import numpy as np
import pytest

from deft import DatasetWriter
from deft.data.datasets import load_dataset
from deft.data.datasets.keyframes import KeyframeDataset
from deft.errors import InputError

LENGTH = 20


@pytest.fixture
def recorded(tmp_path):
    """`state` is (t², t, −t); the gripper is open (+1) in steps 0 to 4 and 12 to 19, and closed (−1) between."""
    steps = np.arange(LENGTH + 1.0)
    action = np.zeros((LENGTH, 2))
    action[:, 1] = np.where((np.arange(LENGTH) >= 5) & (np.arange(LENGTH) < 12), -1, 1)
    with DatasetWriter(tmp_path / "one-v0", format="minari") as writer:
        streams = {"state": np.stack([steps**2, steps, -steps], 1), "image": np.zeros((LENGTH + 1, 3, 4, 4), np.uint8)}
        writer.add_episode(streams, action, np.ones(LENGTH), np.arange(LENGTH) == LENGTH - 1)
    return load_dataset(tmp_path / "one-v0")


def test_labels_are_differences_to_later_steps(recorded):
    dataset = KeyframeDataset(recorded, "state", [0, 1])
    episode = dataset.episode(0)
    labels = episode.observation["keyframes"].reshape(LENGTH + 1, 4, 2)
    assert dataset.observation_space["keyframes"].shape == (8,)
    # The gripper changes in steps 5 and 12; after step 12 the last step, 20, takes the place of a change.
    for step, change in ((0, 5), (4, 5), (5, 12), (11, 12), (12, 20), (20, 20)):
        later = np.array([change, 20, min(step + 8, 20), min(step + 16, 20)])
        np.testing.assert_array_equal(labels[step, :, 1], later - step)
        np.testing.assert_array_equal(labels[step, :, 0], later**2 - step**2)
    np.testing.assert_array_equal(episode.observation["state"], recorded.episode(0).observation["state"])
    assert dataset.fingerprint() == f"{recorded.fingerprint()}-state:0,1:-1"  # with other labels a resume is an error
    assert dataset.source_files() == recorded.source_files()
    assert dataset.episode_returns().tolist() == [LENGTH]


def test_all_numbers_of_the_stream_are_the_default(recorded):
    assert KeyframeDataset(recorded, "state").observation_space["keyframes"].shape == (12,)


def test_a_dim_that_never_changes_has_the_last_step_alone(recorded):
    labels = KeyframeDataset(recorded, "state", [1], switch=0).episode(0).observation["keyframes"]
    np.testing.assert_array_equal(labels[:, 0], labels[:, 1])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("hand",), "keyframe_stream: dataset one-v0 has no vectors named 'hand'; it has state$"),
        (("image",), "no vectors named 'image'"),
        (("state", [0, -3]), "keyframe_dims: 0 -3 names a number twice$"),
        (("state", [3]), "keyframe_dims: state has 3 numbers, and no number 3$"),
        (("state", [0], 2), "keyframe_switch: dataset one-v0 has no action dim 2$"),
    ],
)
def test_what_the_dataset_does_not_have_is_an_error(recorded, given, message):
    with pytest.raises(InputError, match=message):
        KeyframeDataset(recorded, *given)


def test_labels_are_not_replaced(recorded):
    with pytest.raises(InputError, match=r"has labels \(keyframes\) already"):
        KeyframeDataset(KeyframeDataset(recorded, "state"), "state")
