"""The metadata and tables of LeRobot folders."""

import json
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from deft.data.datasets.lerobot_files import DataFiles, EpisodeEntry, read_meta, read_range, read_table
from deft.errors import InputError

FEATURES = {
    "action": {"dtype": "float32", "shape": [2]},
    "timestamp": {"dtype": "float32", "shape": [1]},
    "observation.images.top": {"dtype": "video", "shape": [8, 8, 3]},
}


def write_meta(root: Path, **changes) -> Path:
    """A v2.1 folder of two episodes, without tables and videos."""
    info = {
        "codebase_version": "v2.1",
        "fps": 10,
        "features": FEATURES,
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/{video_key}/episode_{episode_index:06d}.mp4",
        "chunks_size": 1,
    }
    (root / "meta").mkdir(parents=True)
    (root / "meta" / "info.json").write_text(json.dumps(info | changes))
    (root / "meta" / "tasks.jsonl").write_text(
        '{"task_index": 0, "task": "pick"}\n\n{"task_index": 1, "task": "place"}\n'
    )
    lines = [{"episode_index": 1, "length": 4}, {"episode_index": 0, "length": 3}]
    (root / "meta" / "episodes.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return root


def write_table(path: Path, length: int, **changes) -> Path:
    columns = {
        "action": pa.array(np.arange(2.0 * length).reshape(-1, 2).tolist(), pa.list_(pa.float32())),
        "timestamp": pa.array(np.arange(length) / 10, pa.float32()),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(columns | changes), path)
    return path


def test_episodes_are_sorted_and_have_their_paths(tmp_path):
    meta = read_meta(write_meta(tmp_path))
    assert (meta.version, meta.fps, meta.tasks) == ("v2.1", 10.0, {0: "pick", 1: "place"})
    assert [(entry.index, entry.length) for entry in meta.episodes] == [(0, 3), (1, 4)]
    assert meta.episodes[1].data_path == tmp_path / "data/chunk-001/episode_000001.parquet"
    video = meta.episodes[0].videos["observation.images.top"]
    assert video.path == tmp_path / "videos/observation.images.top/episode_000000.mp4"
    assert video.from_timestamp is None  # its own file
    assert meta.keys("video") == ["observation.images.top"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codebase_version": "v1.6"}, r"info\.json: codebase_version is v1\.6; Deft reads v2\.0, v2\.1, v3\.0"),
        ({"fps": 0}, "field fps: is missing or not a positive number"),
        ({"data_path": None}, "field data_path: is missing"),
        ({"video_path": None}, "field video_path: is missing, and there are video features"),
        ({"chunks_size": 0}, "field chunks_size: is 0; it must be at least 1"),
        ({"data_path": "../{episode_index}"}, "leads out of the folder"),
        ({"data_path": "{nothing}"}, "is not a valid pattern: 'nothing'"),
    ],
)
def test_wrong_metadata_names_the_field(changes, message, tmp_path):
    with pytest.raises(InputError, match=message):
        read_meta(write_meta(tmp_path, **changes))


@pytest.mark.parametrize("name", ["info.json", "tasks.jsonl", "episodes.jsonl"])
def test_a_missing_file_is_named(name, tmp_path):
    (write_meta(tmp_path) / "meta" / name).unlink()
    with pytest.raises(InputError, match=rf"{name}: damaged at the top, field JSON: the file is missing"):
        read_meta(tmp_path)


def test_a_line_that_is_no_object_is_named(tmp_path):
    (write_meta(tmp_path) / "meta" / "tasks.jsonl").write_text('{"task_index": 0, "task": "pick"}\n\n[1]')
    with pytest.raises(InputError, match=r"tasks\.jsonl: damaged at line 3, field JSON: is not an object"):
        read_meta(tmp_path)


def test_the_range_is_over_all_episodes(tmp_path):
    meta = read_meta(write_meta(tmp_path))
    assert read_range(meta, "action") is None
    stats = [
        {"stats": {"action": {"min": [0, -5], "max": [1, 2]}}},
        {"stats": {"action": {"min": [-1, 0], "max": [0, 7]}}},
    ]
    (tmp_path / "meta" / "episodes_stats.jsonl").write_text("\n".join(map(json.dumps, stats)))
    low, high = read_range(meta, "action")
    assert (low.tolist(), high.tolist()) == ([-1, -5], [1, 7])
    assert read_range(meta, "timestamp") is None
    stats[0]["stats"]["action"]["min"] = [2, 2]
    (tmp_path / "meta" / "episodes_stats.jsonl").write_text("\n".join(map(json.dumps, stats)))
    with pytest.raises(InputError, match="statistics of action, field min: is larger than max"):
        read_range(meta, "action")


def tables(root: Path, **settings) -> tuple[DataFiles, list[EpisodeEntry]]:
    meta = read_meta(write_meta(root))
    for entry in meta.episodes:
        write_table(entry.data_path, entry.length)
    return DataFiles(meta, ["action", "timestamp"], **settings), meta.episodes


def test_columns_are_arrays_of_the_declared_shape(tmp_path):
    files, (first, second) = tables(tmp_path)
    rows = files.rows(second)
    assert rows["action"].dtype == np.float32
    assert rows["action"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert rows["timestamp"].dtype == np.float64
    assert files.rows(first)["action"].shape == (3, 2)


@pytest.mark.parametrize(("budget_bytes", "kept"), [(2**20, 2), (1, 1)])
def test_tables_stay_in_memory_within_the_budget(budget_bytes, kept, tmp_path):
    files, entries = tables(tmp_path, budget_bytes=budget_bytes)
    for entry in entries:
        files.rows(entry)
    assert len(files._tables) == kept
    copied = pickle.loads(pickle.dumps(files))
    assert not copied._tables  # another process reads the tables itself
    assert copied.rows(entries[0])["action"].shape == (3, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"action": pa.array([[0.0, 1.0]] * 2 + [None], pa.list_(pa.float32()))}, "field action: has empty values"),
        ({"action": pa.array([[0.0]] * 3, pa.list_(pa.float32()))}, r"field action: 3 values; meta/ declares 3 rows"),
        ({"action": pa.array(["a", "b", "c"])}, "field action: holds string, not numbers"),
        ({"timestamp": pa.array([0.0, float("nan"), 0.2])}, "field timestamp: row 1 is not a finite number"),
    ],
)
def test_damaged_columns_are_named(changes, message, tmp_path):
    files, (first, _) = tables(tmp_path)
    write_table(first.data_path, 3, **changes)
    with pytest.raises(InputError, match=rf"episode_000000\.parquet: damaged at episode 0, {message}"):
        files.rows(first)


def test_tables_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match="field task: the file is missing"):
        read_table(tmp_path / "none.parquet", "the top", "task")
    path = write_table(tmp_path / "some.parquet", 3)
    with pytest.raises(InputError, match="field reward: the column is missing"):
        read_table(path, "the top", "task", ["action", "reward"])
    path.write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(InputError, match=r"cannot be read as parquet .*git lfs pull"):
        read_table(path, "the top", "task")
