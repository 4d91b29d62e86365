"""Recordings: what is written is what Minari and Deft read, and no fault costs a whole episode."""

import contextlib
import errno
import fcntl
import json
import os
import resource

import minari
import numpy as np
import pytest
from faults import dies_after, small_disk
from gymnasium import spaces

from deft.data.datasets import Episode, load_dataset
from deft.data.recording import Recording
from deft.data.recording_minari import MinariFiles, dataset_path, place
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


def started(path, append=False, observation_space=BOX, action_space=ACTION):
    path = dataset_path(path)
    recording = Recording(path, MinariFiles(path), append=append)
    try:
        recording.set_spaces(observation_space, action_space)
    except InputError:
        recording.close()
        raise
    return recording


def record(path, *episodes, **settings):
    with started(path, **settings) as recording:
        for episode in episodes:
            recording.add(episode, seed=np.int64(7), success=None)
    return recording


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


def test_append_adds_to_what_is_there(tmp_path):
    path = tmp_path / "counting-v0"
    record(path, counting(3))
    with pytest.raises(InputError, match="is a dataset already; append to it"):
        record(path, counting(3))
    recording = record(path, counting(4), append=True)
    assert (recording.num_episodes, recording.num_steps) == (2, 7)
    assert load_dataset(path).lengths.tolist() == [3, 4]
    with pytest.raises(InputError, match="have another observation_space"):
        record(path, counting(2), append=True, observation_space=spaces.Box(-2, 2, (2,), np.float32))
    assert [entry.name for entry in tmp_path.iterdir()] == ["counting-v0"]


def test_an_episode_is_on_disk_when_it_was_added(tmp_path):
    """Without anything that closes the recording: so it is after a kill."""
    path = tmp_path / "counting-v0"
    recording = started(path)
    assert not path.exists()
    for count in (1, 2, 3):
        recording.add(counting(count))
        assert load_dataset(path).lengths.tolist() == list(range(1, count + 1))
    recording.close()
    assert sorted(file.name for file in path.iterdir()) == ["data"]


def test_a_recording_without_episodes_leaves_nothing(tmp_path):
    started(tmp_path / "counting-v0").close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_a_kill_between_two_renames_of_append_is_repaired(moves, tmp_path, monkeypatch):
    """An episode is three files, and the third one, the metadata, counts it."""
    path = tmp_path / "counting-v0"
    record(path, counting(3))
    recording = started(path, append=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", dies_after(moves, os.replace))
        with pytest.raises(KeyboardInterrupt):
            recording.add(counting(9))
    os.close(recording._lock)  # which is all that the system does for a killed process
    assert load_dataset(path).lengths.tolist() == [3]
    record(path, counting(4), append=True)
    assert load_dataset(path).lengths.tolist() == [3, 4]
    np.testing.assert_array_equal(load_dataset(path).episode(1).observation, counting(4).observation)
    assert sorted(file.name for file in path.rglob("*")) == sorted(
        ["data", "0", "1", *["part-0.arrow"] * 2, *["metadata.json"] * 3]
    )


@pytest.mark.parametrize("folder", [".counting-v0.deft-partial", ".counting-v0.0a1b2c3d.partial"])
def test_unfinished_folders_are_removed_on_the_next_start(folder, tmp_path):
    """The second name is that of earlier versions."""
    (tmp_path / folder / "data").mkdir(parents=True)
    (tmp_path / folder / "data" / "main_data.hdf5").write_bytes(b"half")
    (tmp_path / ".counting-v0.notes.partial").mkdir()  # nothing of Deft's
    record(tmp_path / "counting-v0", counting(3))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".counting-v0.notes.partial", "counting-v0"]


def test_appending_rewrites_nothing(tmp_path):
    path = tmp_path / "counting-v0"
    record(path, counting(3))
    before = {file: file.stat().st_ino for file in (path / "data" / "0").iterdir()}
    record(path, counting(4), append=True)
    assert {file: file.stat().st_ino for file in before} == before


def test_a_second_process_is_turned_away(tmp_path):
    path = tmp_path / "counting-v0"
    first = started(path)
    with pytest.raises(InputError, match="another process is recording into it"):  # before its first episode
        started(path)
    first.add(counting(3))
    for append in (False, True):
        with pytest.raises(InputError, match="another process is recording into it"):
            started(path, append=append)
    first.add(counting(4))
    first.close()
    record(path, counting(5), append=True)
    assert load_dataset(path).lengths.tolist() == [3, 4, 5]


def test_a_file_system_without_locks_is_written_to(tmp_path, monkeypatch, caplog):
    def flock(folder, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    record(tmp_path / "counting-v0", counting(3))
    assert load_dataset(tmp_path / "counting-v0").num_episodes == 1
    assert "has no locks" in caplog.text


def test_a_failed_write_keeps_what_is_there_and_can_be_tried_again(tmp_path):
    """A limit of the file size in place of a full disk: 100 random steps of 800 bytes do not fit into 40,000."""
    path, space = tmp_path / "counting-v0", spaces.Box(-1, 1, (200,), np.float32)
    large = Episode(
        np.random.default_rng(0).random((101, 200), np.float32), np.zeros((100, 1), np.float32),
        np.zeros(100, np.float32), np.zeros(100, bool), np.arange(100) == 99,
    )  # fmt: skip
    small = Episode(large.observation[:11], *(array[-10:] for array in (large.action, large.reward)),
                    large.terminated[-10:], large.truncated[-10:])  # fmt: skip
    with started(path, observation_space=space) as recording:
        recording.add(small)
        with file_size_limit(40_000), pytest.raises(RunError, match=f"{path} cannot be written: File too large"):
            recording.add(large)
        assert sum(file.is_file() for file in path.rglob("*")) == 3  # nothing that keeps the disk full
        assert load_dataset(path).lengths.tolist() == [10]
        recording.add(large)
    assert load_dataset(path).lengths.tolist() == [10, 100]


@contextlib.contextmanager
def file_size_limit(num_bytes):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_keeps_the_whole_episodes(tmp_path):
    """Episodes of 40 kB on a disk of 1 MB: all but the last are there, and its files are gone."""
    space, generator = spaces.Box(-1, 1, (200,), np.float32), np.random.default_rng(0)
    added: list[np.ndarray] = []

    def add_forever(recording):
        while True:
            observation = generator.random((51, 200), np.float32)
            ends = np.arange(50) == 49
            recording.add(Episode(observation, np.zeros((50, 1), np.float32), np.zeros(50), ends, ~ends & ends))
            added.append(observation)

    with small_disk(tmp_path / "disk") as place:
        path = place / "counting-v0"
        with started(path, observation_space=space) as recording, pytest.raises(RunError, match="no space left"):
            add_forever(recording)
        assert len(added) > 5
        dataset = load_dataset(path)
        assert dataset.num_episodes == len(added)
        for index, observation in enumerate(added):
            np.testing.assert_array_equal(dataset.episode(index).observation, observation)
        assert [entry.name for entry in path.iterdir()] == ["data"]
        record(path, append=True, observation_space=space)  # nothing is added, and the disk is full still


def write_hdf5(path, episodes):
    """A dataset as earlier versions recorded it: Minari's HDF5 storage."""
    import h5py

    record(path, *episodes)
    data = path / "data"
    metadata = json.loads((data / "metadata.json").read_text())
    for index in range(len(episodes)):
        for file in (data / str(index)).iterdir():
            file.unlink()
        (data / str(index)).rmdir()
    with h5py.File(data / "main_data.hdf5", "w") as file:
        for index, episode in enumerate(episodes):
            group = file.create_group(f"episode_{index}")
            group.attrs.update({"id": index, "total_steps": len(episode), "seed": 40 + index, "policy": "expert"})
            fields = (episode.observation, episode.action, episode.reward, episode.terminated, episode.truncated)
            for name, values in zip(FIELDS, fields, strict=True):
                group.create_dataset(name, data=values)
    (data / "metadata.json").write_text(json.dumps(metadata | {"data_format": "hdf5"}))


FIELDS = ("observations", "actions", "rewards", "terminations", "truncations")


def test_an_hdf5_dataset_can_be_appended_to(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    path = tmp_path / "counting-v0"
    write_hdf5(path, [counting(3), counting(5, first=20)])
    record(path, counting(4), append=True)
    theirs, ours = minari.load_dataset("counting-v0"), load_dataset(path)
    assert theirs.total_steps == len(ours) == 12
    for index, episode in enumerate([counting(3), counting(5, first=20), counting(4)]):
        np.testing.assert_array_equal(theirs[index].observations, episode.observation)
        np.testing.assert_array_equal(theirs[index].terminations, episode.terminated)
        np.testing.assert_array_equal(ours.episode(index).action, episode.action)
    kept = list(theirs.storage.get_episode_metadata([1]))
    assert kept == [{"id": 1, "total_steps": 5, "seed": 41, "policy": "expert"}]
    assert not (path / "data" / "main_data.hdf5").exists()


def test_a_failure_while_leaving_hdf5_changes_nothing(tmp_path, monkeypatch):
    path = tmp_path / "counting-v0"
    write_hdf5(path, [counting(3), counting(5, first=20)])
    before = {file.name: file.read_bytes() for file in (path / "data").iterdir()}
    monkeypatch.setattr(os, "replace", dies_after(2, os.replace))  # the first episode's two files are in place
    with pytest.raises(KeyboardInterrupt):
        started(path, append=True)
    assert {file.name: file.read_bytes() for file in (path / "data").iterdir()} == before
    assert [entry.name for entry in path.iterdir()] == ["data"]


def test_what_would_be_damaged_is_rejected(tmp_path):
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
    (tmp_path / "link-v0").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match="is a link to nothing"):
        record(tmp_path / "link-v0", counting(2))
    (tmp_path / "mine-v0" / ".deft-partial").mkdir(parents=True)
    with pytest.raises(InputError, match="exists and is not a dataset"):
        record(tmp_path / "mine-v0", counting(2))
    assert (tmp_path / "mine-v0" / ".deft-partial").is_dir()
    (tmp_path / "mine-v0" / "data").mkdir()
    (tmp_path / "mine-v0" / "data" / "metadata.json").write_text(json.dumps({"total_episodes": 1}))
    with pytest.raises(InputError, match="cannot be read as a dataset's metadata"):
        record(tmp_path / "mine-v0", counting(2), append=True)
