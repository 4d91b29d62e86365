"""Minari's layout: Minari and Deft read what was written, and datasets have ids that Minari accepts."""

import json

import minari
import numpy as np
import pytest
from gymnasium import spaces
from recordings import BOX, counting, record, started

from deft.data.datasets import Episode, load_dataset
from deft.data.datasets.minari import minari_id
from deft.errors import InputError
from deft.schema import encode_text


def test_minari_and_deft_read_what_was_written(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    episodes = [counting(3), counting(5, first=20)]
    record(tmp_path / "toy" / "counting-v0", *episodes)

    theirs, ours = minari.load_dataset("toy/counting-v0"), load_dataset("toy/counting-v0")
    assert theirs.total_steps == len(ours) == 8
    assert theirs.observation_space == ours.observation_space == BOX
    assert theirs.spec.version == 0
    assert next(iter(theirs.storage.get_episode_metadata([0]))) == {"id": 0, "total_steps": 3, "seed": 7}
    assert "toy/counting-v0" in minari.list_local_datasets()
    for index, episode in enumerate(episodes):
        their, our = theirs[index], ours.episode(index)
        for field, theirs_field in (("observation", "observations"), ("action", "actions"), ("reward", "rewards")):
            np.testing.assert_array_equal(getattr(episode, field), getattr(their, theirs_field))
            np.testing.assert_array_equal(getattr(episode, field), getattr(our, field))
        np.testing.assert_array_equal(their.terminations, our.terminated)
        np.testing.assert_array_equal(their.truncations, our.truncated)


def test_every_kind_of_space_comes_back(tmp_path, monkeypatch):
    """Nested Dict, text beyond ASCII, counting from 3, flags, and pictures, which must not pass through JPEG."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    observation_space = spaces.Dict(
        {
            "arm": spaces.Dict({"angle": spaces.Box(-1, 1, (2,), np.float64), "held": spaces.MultiBinary(2)}),
            "mode": spaces.Discrete(4, start=3),
            "dials": spaces.MultiDiscrete([2, 3], start=[1, 0]),
            "rgb": spaces.Box(0, 255, (32, 40, 3), np.uint8),
            "instruction": spaces.Text(8, charset="abcé "),
        }
    )
    pictures = np.random.default_rng(0).integers(0, 256, (3, 32, 40, 3), np.uint8)
    # Deft's rows: counting from 0, channels first, text as bytes; é takes two bytes, so 8 characters take 16.
    rows = {
        "arm/angle": np.array([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]], np.float32),
        "arm/held": np.array([[0, 1], [1, 0], [1, 1]], np.float32),
        "mode": np.array([0, 3, 1]),
        "dials": np.array([[0, 2], [1, 0], [1, 1]]),
        "rgb": np.ascontiguousarray(pictures.transpose(0, 3, 1, 2)),
        "instruction": np.stack([encode_text(text, 16) for text in ("bé a", "", "c")]),
    }
    episode = Episode(rows, np.array([1, 0]), np.zeros(2, np.float32), np.zeros(2, bool), np.array([False, True]))
    record(
        tmp_path / "spaces-v1", episode, observation_space=observation_space, action_space=spaces.Discrete(2, start=5)
    )

    their = minari.load_dataset("spaces-v1")[0]
    assert their.observations["mode"].tolist() == [3, 6, 4]
    assert their.observations["dials"].tolist() == [[1, 2], [2, 0], [2, 1]]
    assert their.observations["arm"]["held"].tolist() == [[0, 1], [1, 0], [1, 1]]
    assert their.observations["instruction"] == ["bé a", "", "c"]
    assert their.actions.tolist() == [6, 5]
    np.testing.assert_array_equal(their.observations["rgb"], pictures)

    dataset = load_dataset(tmp_path / "spaces-v1")
    assert dataset.table is None
    assert dataset.action_space == spaces.Discrete(2)
    assert dataset.observation_space["instruction"].shape == (16,)
    ours = dataset.episode(0)
    assert list(ours.observation) == [*dataset.observation_space]
    for name, values in rows.items():
        np.testing.assert_array_equal(ours.observation[name], values)
        assert ours.observation[name].dtype == dataset.observation_space[name].dtype
    assert ours.action.tolist() == [1, 0]
    assert ours.truncated.tolist() == [False, True]
    dataset.close()


@pytest.mark.parametrize("stored", [{"data_format": "hdf5"}, {"jpeg_encoding": True}])
def test_other_storage_cannot_be_appended_to(stored, tmp_path):
    path = tmp_path / "counting-v0"
    record(path, counting(3))
    file = path / "data" / "metadata.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | stored))
    before = {entry: entry.read_bytes() for entry in path.rglob("*") if entry.is_file()}
    with pytest.raises(InputError, match=rf"{next(iter(stored))} .*cannot append; record into another dataset"):
        started(path, append=True)
    assert {entry: entry.read_bytes() for entry in path.rglob("*") if entry.is_file()} == before


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("datasets/reach/expert-v0", ("reach/expert-v0", "datasets")),
        ("reach/expert-v0", ("reach/expert-v0", ".")),
        ("expert-v12", ("expert-v12", ".")),
        ("store/reach/expert-v0", ("reach/expert-v0", "store")),  # Minari's folder, below
        ("with space/reach-v0", ("reach-v0", "with space")),  # no id: Minari's names have no spaces
        ("x/reach-v0", ("reach-v0", "x")),  # nor has a namespace of one letter
    ],
)
def test_the_id_is_the_path_from_minaris_folder(path, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "store"))
    dataset_id, root = minari_id(tmp_path / path)
    assert (dataset_id, root) == (expected[0], tmp_path / expected[1])
    from minari.dataset.minari_dataset import parse_dataset_id

    parse_dataset_id(dataset_id)  # Minari agrees that it is one


@pytest.mark.parametrize(("name", "advice"), [("my data", "my-data-v0"), ("mine-v", "mine-v0")])
def test_a_name_that_minari_refuses_is_mended(name, advice, tmp_path):
    with pytest.raises(InputError, match=f"write {tmp_path / advice}$"):
        record(tmp_path / name)


def test_a_name_without_a_version_is_the_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record(tmp_path / "mine", counting(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine-v0"]
    assert load_dataset("mine").num_episodes == load_dataset("mine-v0").num_episodes == 1
