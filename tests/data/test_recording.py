"""Recordings: no fault costs a complete episode."""

import contextlib
import errno
import fcntl
import json
import os
import resource

import numpy as np
import pytest
from faults import dies_after, small_disk
from gymnasium import spaces
from recordings import BOX, counting, record, started

from deft.data.datasets import Episode, load_dataset
from deft.errors import InputError, RunError


def test_append_adds_to_what_is_there(tmp_path):
    path = tmp_path / "counting-v0"
    record(path, counting(3))
    with pytest.raises(InputError, match="the dataset exists; append to it"):
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


def test_unfinished_folders_are_removed_on_the_next_start(tmp_path):
    folder = ".counting-v0.deft-partial"
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


def test_an_existing_folder_is_not_written_into(tmp_path):
    (tmp_path / "link-v0").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match="is a broken symbolic link"):
        record(tmp_path / "link-v0", counting(2))
    (tmp_path / "mine-v0" / ".deft-partial").mkdir(parents=True)
    with pytest.raises(InputError, match="exists and is not a dataset"):
        record(tmp_path / "mine-v0", counting(2))
    assert (tmp_path / "mine-v0" / ".deft-partial").is_dir()
    (tmp_path / "mine-v0" / "data").mkdir()
    (tmp_path / "mine-v0" / "data" / "metadata.json").write_text(json.dumps({"total_episodes": 1}))
    with pytest.raises(InputError, match=r"metadata\.json: total_steps is missing"):
        record(tmp_path / "mine-v0", counting(2), append=True)
