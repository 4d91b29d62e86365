"""Recordings: what is written is what Minari and Deft read, and what is not finished leaves nothing."""

import json

import minari
import numpy as np
import pytest
from gymnasium import spaces

from deft.data.datasets import Episode, load_dataset
from deft.data.recording import Recording, place
from deft.errors import InputError, RunError
from deft.schema import encode_text

BOX = spaces.Box(-1, 1, (2,), np.float32)
ACTION = spaces.Box(-1, 1, (1,), np.float32)


def counting(length, first=0.0):
    """Observations and actions number themselves; the episode terminates."""
    observation = (first + np.arange(2 * length + 2, dtype=np.float32).reshape(-1, 2)) / 100
    terminated = np.arange(length) == length - 1
    action = np.linspace(-1, 1, length, dtype=np.float32)[:, None]
    return Episode(observation, action, np.ones(length, np.float32), terminated, np.zeros(length, bool))


def record(path, *episodes, append=False, observation_space=BOX, action_space=ACTION):
    with Recording(path, observation_space, action_space, append=append) as recording:
        for episode in episodes:
            recording.add(episode, seed=7, success=None)
        recording.commit()
    return recording


def test_minari_and_deft_read_what_was_written(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    episodes = [counting(3), counting(5, first=20)]
    recording = record(tmp_path / "toy" / "counting-v0", *episodes)
    assert (recording.dataset_id, recording.datasets_path) == ("toy/counting-v0", tmp_path)

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
    # Deft's rows: counting from 0, text as bytes; é takes two bytes, so 8 characters take 16.
    rows = {
        "arm/angle": np.array([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]], np.float32),
        "arm/held": np.array([[0, 1], [1, 0], [1, 1]], np.float32),
        "mode": np.array([0, 3, 1]),
        "dials": np.array([[0, 2], [1, 0], [1, 1]]),
        "rgb": pictures,
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


def test_append_adds_to_what_is_there(tmp_path):
    path = tmp_path / "counting-v0"
    record(path, counting(3))
    with pytest.raises(InputError, match="--append adds to it"):
        record(path, counting(3))
    recording = record(path, counting(4), append=True)
    assert (recording.num_episodes, recording.num_steps) == (2, 7)
    assert load_dataset(path).lengths.tolist() == [3, 4]
    with pytest.raises(InputError, match="has another observation_space"):
        record(path, counting(2), append=True, observation_space=spaces.Box(-2, 2, (2,), np.float32))
    assert [entry.name for entry in tmp_path.iterdir()] == ["counting-v0"]


def test_what_is_not_committed_leaves_nothing(tmp_path):
    path = tmp_path / "counting-v0"
    with Recording(path, BOX, ACTION) as recording:
        recording.add(counting(3))
    assert list(tmp_path.iterdir()) == []

    record(path, counting(3))
    before = {file.name: file.read_bytes() for file in (path / "data").iterdir()}
    with Recording(path, BOX, ACTION, append=True) as recording:
        recording.add(counting(5))
        assert len(list(tmp_path.iterdir())) == 2  # all of it is beside the dataset
    assert {file.name: file.read_bytes() for file in (path / "data").iterdir()} == before
    assert list(tmp_path.iterdir()) == [path]


def test_more_episodes_than_the_metadata_counts_are_a_whole_dataset(tmp_path):
    """Where a process dies between the two moves of `commit`."""
    path = tmp_path / "counting-v0"
    record(path, counting(3))
    old = (path / "data" / "metadata.json").read_bytes()
    record(path, counting(4), append=True)
    (path / "data" / "metadata.json").write_bytes(old)
    assert load_dataset(path).lengths.tolist() == [3]


def test_two_processes_do_not_undo_each_other(tmp_path):
    path = tmp_path / "counting-v0"
    record(path, counting(3))
    with Recording(path, BOX, ACTION, append=True) as late:
        late.add(counting(5))
        record(path, counting(4), append=True)
        with pytest.raises(RunError, match="changed by another process"):
            late.commit()
    assert load_dataset(path).lengths.tolist() == [3, 4]


def test_what_would_be_damaged_is_refused(tmp_path):
    episode = counting(3)
    episode.reward[1] = np.nan
    with pytest.raises(RunError, match="episode 0: reward is not finite"):
        record(tmp_path / "counting-v0", episode)
    short = counting(3)
    short.observation = short.observation[:-1]
    with pytest.raises(RunError, match=r"observation has shape \(3, 2\), not \(4, 2\)"):
        record(tmp_path / "counting-v0", short)
    with pytest.raises(InputError, match="a Sequence space is not supported"):
        record(tmp_path / "counting-v0", observation_space=spaces.Dict({"words": spaces.Sequence(BOX)}))
    assert list(tmp_path.iterdir()) == []


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
    dataset_id, root = place(tmp_path / path)
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


def test_an_existing_folder_is_not_written_into(tmp_path):
    (tmp_path / "mine-v0").mkdir()
    with pytest.raises(InputError, match="exists and is no dataset"):
        record(tmp_path / "mine-v0", counting(2))
    (tmp_path / "mine-v0" / "data").mkdir()
    (tmp_path / "mine-v0" / "data" / "metadata.json").write_text(json.dumps({"total_episodes": 1}))
    with pytest.raises(InputError, match="cannot be read as a dataset's metadata"):
        record(tmp_path / "mine-v0", counting(2), append=True)
