"""LeRobot recordings: the layout of v3.0, exact statistics, and no fault that costs a whole episode."""

import json
import os

import numpy as np
import pyarrow.parquet as parquet
import pytest
from faults import dies_after, small_disk
from gymnasium import spaces

from deft.config.command_settings import CollectConfig
from deft.data import recording_lerobot
from deft.data.datasets import Episode, load_dataset
from deft.data.recording import Recording
from deft.data.recording_lerobot import LeRobotFiles
from deft.errors import InputError, RunError
from deft.schema import encode_text
from deft.training.collect import collect

OBSERVATION = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (3, 16, 24), np.uint8),
        "instruction": spaces.Text(8, charset="abcd "),
        "state": spaces.Box(-9, 9, (2,), np.float32),
    }
)
ACTION = spaces.Box(-1, 1, (2,), np.float32)


def make(length, seed):
    """An episode that is truncated; the words change in its middle."""
    generator = np.random.default_rng(seed)
    # Blocks of one colour: a codec that halves the resolution of colours keeps them.
    camera = generator.integers(0, 256, (length + 1, 3, 2, 3), np.uint8).repeat(8, 2).repeat(8, 3)
    words = [encode_text("ab" if step < 2 else "cd", 8) for step in range(length + 1)]
    rows = {
        "camera": camera,
        "instruction": np.stack(words),
        "state": generator.normal(size=(length + 1, 2)).astype(np.float32),
    }
    action = generator.uniform(-1, 1, (length, 2)).astype(np.float32)
    ends = np.zeros(length, bool)
    return Episode(rows, action, generator.random(length, np.float32), ends, np.arange(length) == length - 1)


def started(path, append=False, **settings):
    recording = Recording(path, LeRobotFiles(10, {"note": "mine"}, **settings), append=append)
    recording.set_spaces(OBSERVATION, ACTION)
    return recording


def record(path, *episodes, **settings):
    with started(path, **settings) as recording:
        for episode in episodes:
            recording.add(episode, seed=7)


def check(path, *episodes, tolerance=0):
    dataset = load_dataset(path)
    assert dataset.num_episodes == len(episodes)
    for index, episode in enumerate(episodes):
        found = dataset.episode(index)
        np.testing.assert_array_equal(found.observation["state"], episode.observation["state"])
        assert [bytes(row).strip(b"\0") for row in found.observation["instruction"]] == [
            bytes(row).strip(b"\0") for row in episode.observation["instruction"]
        ]
        for field in ("action", "reward", "terminated", "truncated"):
            np.testing.assert_array_equal(getattr(found, field), getattr(episode, field))
        error = np.abs(found.observation["camera"].astype(int) - episode.observation["camera"])
        assert error.mean() <= tolerance
    dataset.close()


def test_the_layout_is_that_of_version_3(tmp_path):
    path = tmp_path / "own"
    record(path, make(3, 0), make(5, 1))
    files = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
    assert files == [
        "data/chunk-000/file-000.parquet",
        "meta/deft.json",
        "meta/episodes/chunk-000/file-000.parquet",
        "meta/info.json",
        "meta/stats.json",
        "meta/tasks.parquet",
        "videos/observation.images.camera/chunk-000/file-000.mp4",
    ]
    info = json.loads((path / "meta" / "info.json").read_text())
    # 3 + 1 and 5 + 1 observations
    assert (info["codebase_version"], info["total_episodes"], info["total_frames"], info["fps"]) == ("v3.0", 2, 10, 10)
    assert (info["total_tasks"], info["splits"], info["chunks_size"]) == (2, {"train": "0:2"}, 1000)
    camera = info["features"]["observation.images.camera"]
    assert (camera["dtype"], camera["shape"], camera["names"]) == (
        "video",
        [16, 24, 3],
        ["height", "width", "channels"],
    )
    assert info["features"]["observation.state"] == {"dtype": "float32", "shape": [2], "names": None}

    rows = parquet.read_table(path / files[0])
    assert rows["index"].to_pylist() == list(range(10))
    assert rows["frame_index"].to_pylist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]
    assert rows["task_index"].to_pylist() == [0, 0, 1, 1, 0, 0, 1, 1, 1, 1]
    assert rows["next.done"].to_pylist() == [False, False, True, True, *[False] * 4, True, True]
    assert rows["action"][3] == rows["action"][2]  # nobody acted after the final observation
    episodes = parquet.read_table(path / files[2]).to_pylist()
    assert [(row["dataset_from_index"], row["dataset_to_index"], row["length"]) for row in episodes] == [
        (0, 4, 4),
        (4, 10, 6),
    ]
    times = [
        tuple(row[f"videos/observation.images.camera/{end}_timestamp"] for end in ("from", "to")) for row in episodes
    ]
    assert times == [(0.0, 0.4), (0.4, 1.0)]
    assert episodes[0]["tasks"] == ["ab", "cd"]
    tasks = parquet.read_table(path / "meta" / "tasks.parquet").to_pandas()
    assert (list(tasks.index), list(tasks["task_index"]), tasks.index.name) == (["ab", "cd"], [0, 1], "task")


def test_statistics_are_those_of_all_rows(tmp_path):
    """Merged over episodes, and over an append, they are what numpy finds over everything at once."""
    path, episodes = tmp_path / "own", [make(3, 0), make(5, 1), make(2, 2)]
    record(path, *episodes[:2], use_videos=False)
    record(path, episodes[2], append=True, use_videos=False)
    statistics = json.loads((path / "meta" / "stats.json").read_text())
    states = np.concatenate([episode.observation["state"] for episode in episodes]).astype(np.float64)
    for name, expected in (
        ("min", states.min(0)),
        ("max", states.max(0)),
        ("mean", states.mean(0)),
        ("std", states.std(0)),
    ):
        np.testing.assert_allclose(statistics["observation.state"][name], expected, rtol=1e-12)
    assert statistics["observation.state"]["count"] == [13]
    images = np.concatenate([episode.observation["camera"] for episode in episodes]) / 255
    np.testing.assert_allclose(
        np.ravel(statistics["observation.images.camera"]["mean"]), images.mean((0, 2, 3)), rtol=1e-5
    )
    assert np.shape(statistics["observation.images.camera"]["std"]) == (3, 1, 1)


@pytest.mark.parametrize("use_videos", [True, False])
def test_episodes_come_back(use_videos, tmp_path, monkeypatch):
    """With two episodes a table and about two a video, so that files of every kind follow each other."""
    monkeypatch.setattr(recording_lerobot, "FILE_EPISODES", 2)
    monkeypatch.setattr(recording_lerobot, "FILE_BYTES", 5_000)
    path, episodes = tmp_path / "own", [make(4 + seed, seed) for seed in range(5)]
    record(path, *episodes[:3], use_videos=use_videos)
    record(path, *episodes[3:], append=True, use_videos=use_videos)
    check(path, *episodes, tolerance=6 if use_videos else 0)
    assert len(list(path.glob("data/*/*.parquet"))) == len(list(path.glob("meta/episodes/*/*.parquet"))) >= 3
    if use_videos:
        assert 1 < len(list(path.glob("videos/*/*/*.mp4"))) < 5


def test_joining_videos_changes_no_frame(tmp_path):
    """An episode's frames are the same whether it has a file of its own or stands behind another."""
    first, second = make(3, 0), make(4, 1)
    record(tmp_path / "both", first, second)
    record(tmp_path / "alone", second)
    both, alone = (load_dataset(tmp_path / name) for name in ("both", "alone"))
    np.testing.assert_array_equal(both.episode(1).observation["camera"], alone.episode(0).observation["camera"])


@pytest.mark.parametrize("moves", range(6))
def test_a_kill_between_two_renames_is_repaired(moves, tmp_path, monkeypatch):
    """The files of a later episode: video, rows, tasks (a new one), statistics, list of episodes, counts."""
    path, kept, lost, later = tmp_path / "own", make(3, 0), make(4, 1), make(2, 2)
    lost.observation["instruction"] = np.stack([encode_text("dd", 8)] * 5)
    record(path, kept)
    recording = started(path, append=True)
    recording.add(kept)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", dies_after(moves, os.replace))
        with pytest.raises(KeyboardInterrupt):
            recording.add(lost)
    os.close(recording._lock)  # which is all that the system does for a killed process
    there = [kept, kept, *([lost] if moves == 5 else [])]  # listed, and only the counts are not up to date
    check(path, *there, tolerance=6)
    record(path, later, append=True)
    check(path, *there, later, tolerance=6)
    # LeRobot reads all tables of data/ one after another: every row is there once.
    rows = [
        row for file in sorted(path.glob("data/*/*.parquet")) for row in parquet.read_table(file)["index"].to_pylist()
    ]
    total = sum(len(episode) + 1 for episode in [*there, later])
    assert rows == list(range(total))
    info = json.loads((path / "meta" / "info.json").read_text())
    assert (info["total_episodes"], info["total_frames"]) == (len(there) + 1, total)
    assert not (path / ".deft-partial").exists()


def test_a_full_disk_keeps_the_whole_episodes(tmp_path):
    added = []

    def add_forever(path):
        with started(path) as recording:
            for seed in range(1000):
                recording.add(make(60, seed))
                added.append(make(60, seed))

    with small_disk(tmp_path / "disk", "600k") as place:
        with pytest.raises(RunError, match="no space left on the disk"):
            add_forever(place / "own")
        assert len(added) > 2
        check(place / "own", *added, tolerance=6)


def test_collect_writes_lerobot(tmp_path):
    """The same seed gives the same episodes as in Minari's layout."""
    settings = {"env": "reach", "policy": "expert", "episodes": 3, "env_kwargs": {"observation": "vla"}}
    collect(CollectConfig(out=str(tmp_path / "one-v0"), **settings))
    found = collect(CollectConfig(out=str(tmp_path / "two"), format="lerobot", fps=15, use_videos=False, **settings))
    assert (found["dataset"], found["recorded_episodes"], "minari_id" in found) == (str(tmp_path / "two"), 3, False)
    one, two = load_dataset(tmp_path / "one-v0"), load_dataset(tmp_path / "two")
    for index in range(3):
        ours, theirs = one.episode(index), two.episode(index)
        assert set(ours.observation) == set(theirs.observation) == {"rgb", "proprio", "instruction"}
        for name in ("rgb", "proprio"):
            np.testing.assert_array_equal(ours.observation[name], theirs.observation[name])
        for field in ("action", "reward", "terminated", "truncated"):
            np.testing.assert_array_equal(getattr(ours, field), getattr(theirs, field))


@pytest.mark.parametrize(
    ("observation", "action", "complaint"),
    [
        (spaces.Box(0, 255, (16, 24, 1), np.uint8), ACTION, "images of 3 channels"),
        (spaces.Box(0, 255, (15, 24, 3), np.uint8), ACTION, "15 x 24 pixels; videos need even numbers: set use_videos"),
        (spaces.Dict({"a": spaces.Text(4), "b": spaces.Text(4)}), ACTION, "one text"),
        (OBSERVATION, spaces.Discrete(2), "continuous actions"),
    ],
)
def test_what_lerobot_cannot_hold(observation, action, complaint, tmp_path):
    with Recording(tmp_path / "own", LeRobotFiles(10)) as recording, pytest.raises(InputError, match=complaint):
        recording.set_spaces(observation, action)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_appended_to(tmp_path):
    path = tmp_path / "own"
    record(path, make(3, 0))
    with pytest.raises(InputError, match="has 10 fps, not 20"):
        Recording(path, LeRobotFiles(20), append=True)
    with (
        Recording(path, LeRobotFiles(10), append=True) as recording,
        pytest.raises(InputError, match=r"own: its episodes have another observation.images.camera"),
    ):
        recording.set_spaces(spaces.Dict({"state": OBSERVATION["state"]}), ACTION)
    (path / "meta" / "deft.json").unlink()
    with pytest.raises(InputError, match="was not recorded by Deft"):
        Recording(path, LeRobotFiles(10), append=True)
    check(path, make(3, 0), tolerance=6)


def test_an_episode_of_half_an_hour_is_read(tmp_path):
    """Past 1,024 s neighbouring float32 times are 1.2e-4 s apart, more than the reader's tolerance of 1e-4 s."""
    length, space = 18_000, spaces.Box(-9, 9, (1,), np.float32)
    zeros, ends = np.zeros((length, 2), np.float32), np.zeros(length, bool)
    with Recording(tmp_path / "own", LeRobotFiles(10)) as recording:
        recording.set_spaces(space, ACTION)
        recording.add(Episode(np.zeros((length + 1, 1), np.float32), zeros, zeros[:, 0], ends, ends))
    assert len(load_dataset(tmp_path / "own").episode(0)) == length


def test_lerobot_reads_it(tmp_path):
    """LeRobot's own reader, where it is installed."""
    module = pytest.importorskip("lerobot.datasets.lerobot_dataset")
    episodes = [make(3, 0), make(5, 1)]
    record(tmp_path / "own", *episodes)
    theirs = module.LeRobotDataset("deft/own", root=tmp_path / "own", video_backend="pyav")
    assert (len(theirs), theirs.num_episodes) == (10, 2)
    rows = [(episode, step) for episode in episodes for step in range(len(episode) + 1)]
    for item, (episode, step) in zip((theirs[index] for index in range(10)), rows, strict=True):
        np.testing.assert_array_equal(item["observation.state"].numpy(), episode.observation["state"][step])
        image = item["observation.images.camera"].numpy() * 255
        assert np.abs(image - episode.observation["camera"][step]).mean() <= 6
        assert item["task"] == ("ab" if step < 2 else "cd")
