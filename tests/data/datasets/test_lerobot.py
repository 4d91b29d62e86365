"""LeRobot folders in their three versions: the real one, the same data rewritten, and small ones made here."""

import io
import json
import logging
import pickle
import re
import shutil
import struct
import zlib
from fractions import Fraction

import numpy as np
import pytest
import torch
from shared_data import shared_data

from deft.data.datasets import load_dataset
from deft.data.datasets.lerobot import LeRobotFolder, stream_names
from deft.errors import InputError
from deft.schema import decode_text

av = pytest.importorskip("av")
pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

REAL = "lerobot_v2/robot_sim_picknplace"
CAMERA = "observation.images.ego_view"
FPS, SIDE = 10, 32
V2_PATHS = {
    "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
}
V3_PATHS = {
    "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
}
TASKS = ["pick the cup", "öffne die Tür"]  # the second has more bytes (15) than characters (13)


# --- a small folder: state [t] = row, counted over all episodes, and the picture of a row spells it in grey


def grey(row):
    return 8 * row + 4  # far enough apart to survive lossy coding


def row_of(picture):
    return round((float(picture.mean()) - 4) / 8)


def write_video(path, rows, height=SIDE):
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=FPS, options={"bf": "2", "g": "8", "crf": "10"})
        stream.width, stream.height, stream.pix_fmt = SIDE, height, "yuv420p"
        for row in rows:
            picture = np.full((height, SIDE, 3), grey(row), np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


def write_table(path, columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(columns), path)


def write_lines(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def png(row):
    from PIL import Image

    target = io.BytesIO()
    Image.fromarray(np.full((SIDE, SIDE, 3), grey(row), np.uint8)).save(target, "PNG")
    return target.getvalue()


def write_folder(root, version="v2.0", lengths=(12, 9), reward=False, done=False, stored=False, clock=0.0):
    """`stored` puts the pictures into the table; `clock` is the time of an episode's first row."""
    features = {
        "observation.state": {"dtype": "float32", "shape": [2], "names": None},
        "observation.images.top": {"dtype": "image" if stored else "video", "shape": [SIDE, SIDE, 3], "names": None},
        "action": {"dtype": "float64", "shape": [3], "names": None},
        "timestamp": {"dtype": "float32", "shape": [1], "names": None},
        "episode_index": {"dtype": "int64", "shape": [1], "names": None},
        "task_index": {"dtype": "int64", "shape": [1], "names": None},
    }
    features |= {"next.reward": {"dtype": "float32", "shape": [1]}} if reward else {}
    features |= {"next.done": {"dtype": "bool", "shape": [1]}} if done else {}
    info = {"codebase_version": version, "fps": FPS, "features": features, "chunks_size": 1}
    info |= V3_PATHS if version == "v3.0" else V2_PATHS
    starts = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    tables = []
    for episode, (start, length) in enumerate(zip(starts, lengths, strict=False)):
        rows = range(start, start + length)
        columns = {
            "observation.state": [[row, -row] for row in rows],
            "action": [[row + 0.5, 0.0, 1.0] for row in rows],
            "timestamp": [clock + number / FPS for number in range(length)],
            "episode_index": [episode] * length,
            "task_index": [episode % 2] * length,
        }
        columns |= {"next.reward": [float(row == rows[-1]) for row in rows]} if reward else {}
        columns |= {"next.done": [row == rows[-1] for row in rows]} if done else {}
        columns |= {"observation.images.top": [{"bytes": png(row), "path": ""} for row in rows]} if stored else {}
        tables.append(columns)

    meta = root / "meta"
    meta.mkdir(parents=True)
    (meta / "info.json").write_text(json.dumps(info))
    low, high = [0.5, 0.0, 1.0], [starts[-1] - 0.5, 0.0, 1.0]
    if version == "v3.0":
        merged = {key: [value for table in tables for value in table[key]] for key in tables[0]}
        write_table(root / "data/chunk-000/file-000.parquet", merged)
        if not stored:
            write_video(root / "videos/observation.images.top/chunk-000/file-000.mp4", range(starts[-1]))
        episodes = {"episode_index": list(range(len(lengths))), "length": list(lengths)}
        for name in ("data", "videos/observation.images.top"):
            episodes |= {f"{name}/chunk_index": [0] * len(lengths), f"{name}/file_index": [0] * len(lengths)}
        episodes["videos/observation.images.top/from_timestamp"] = [start / FPS for start in starts[:-1]]
        episodes["videos/observation.images.top/to_timestamp"] = [start / FPS for start in starts[1:]]
        write_table(meta / "episodes/chunk-000/file-000.parquet", episodes)
        write_table(meta / "tasks.parquet", {"task_index": [0, 1], "__index_level_0__": TASKS})
    else:
        for episode, table in enumerate(tables):
            write_table(root / f"data/chunk-{episode:03d}/episode_{episode:06d}.parquet", table)
            if not stored:
                place = f"videos/chunk-{episode:03d}/observation.images.top/episode_{episode:06d}.mp4"
                write_video(root / place, range(starts[episode], starts[episode + 1]))
        lines = [{"episode_index": number, "tasks": [], "length": length} for number, length in enumerate(lengths)]
        write_lines(meta / "episodes.jsonl", lines)
        write_lines(meta / "tasks.jsonl", [{"task_index": n, "task": task} for n, task in enumerate(TASKS)])
    if version == "v2.1":
        halves = [{"action": {"min": low, "max": [0.6, 0.0, 1.0]}}, {"action": {"min": [3.0, 0.0, 1.0], "max": high}}]
        lines = [{"episode_index": number, "stats": half} for number, half in enumerate(halves)]
        write_lines(meta / "episodes_stats.jsonl", lines)
    else:
        (meta / "stats.json").write_text(json.dumps({"action": {"min": low, "max": high}}))
    return root


@pytest.fixture(params=["v2.0", "v2.1", "v3.0"])
def folder(request, tmp_path):
    return load_dataset(write_folder(tmp_path / "small", request.param))


def test_an_episode_is_what_was_recorded(folder):
    assert isinstance(folder, LeRobotFolder)
    # Without next.done the last row's action has no next observation: 12 and 9 rows make 11 and 8 transitions.
    assert folder.lengths.tolist() == [11, 8]
    assert len(folder) == 19
    episode = folder.episode(1)
    rows = np.arange(12, 21)
    assert episode.observation["state"].tolist() == [[row, -row] for row in rows]
    assert [row_of(picture) for picture in episode.observation["top"]] == rows.tolist()
    assert episode.observation["top"].shape == (9, 3, SIDE, SIDE)
    assert [decode_text(text) for text in episode.observation["instruction"]] == [TASKS[1]] * 9
    assert episode.action.tolist() == [[row + 0.5, 0, 1] for row in rows[:-1]]
    assert episode.action.dtype == np.float32
    assert not episode.reward.any()
    assert not episode.terminated.any()
    assert np.flatnonzero(episode.truncated).tolist() == [7]
    for name, stream in episode.observation.items():
        assert folder.observation_space[name].contains(stream[0])


def test_the_action_space_is_the_range_of_the_statistics(folder):
    # dims 1 and 2 never move: 0 ± 1 and 1 ± 1
    np.testing.assert_allclose(folder.action_space.low, [0.5, -1, 0], atol=1e-6)
    np.testing.assert_allclose(folder.action_space.high, [20.5, 1, 2], atol=1e-5)
    for index in range(2):
        assert all(folder.action_space.contains(action) for action in folder.episode(index).action)


@pytest.mark.parametrize("version", ["v2.0", "v2.1", "v3.0"])
@pytest.mark.parametrize("statistics", [None, {}, {"action": {"min": [0.0], "max": [1.0]}}])
def test_the_range_of_actions_is_computed_where_there_are_no_statistics(tmp_path, version, statistics):
    root = write_folder(tmp_path / "small", version)
    file = root / "meta" / ("episodes_stats.jsonl" if version == "v2.1" else "stats.json")
    if statistics is None:
        file.unlink()
    else:
        file.write_text(json.dumps({"stats": statistics} if version == "v2.1" else statistics))
    # Rows 0 to 20 have the actions [row + 0.5, 0, 1]; the second episode begins at row 12.
    whole, part = load_dataset(root), load_dataset(root, episodes=[1])
    np.testing.assert_allclose(whole.action_space.low, [0.5, -1, 0], atol=1e-6)
    np.testing.assert_allclose(whole.action_space.high, [20.5, 1, 2], atol=1e-5)
    np.testing.assert_allclose(part.action_space.low, [12.5, -1, 0], atol=1e-5)
    assert all(whole.action_space.contains(action) for action in whole.episode(1).action)


def test_windows_stay_in_their_episode(folder):
    windows = folder.windows(
        {"observation.state": [-0.2, 0], "action": [0, 0.1, 0.2], "observation.images.top": [-0.1, 0]}
    )
    assert len(windows) == 21
    # Frame 12 is the second episode's first: rows 10 and 11 belong to the first one and are replaced by 12.
    item = windows[12]
    assert item["observation.state"][:, 0].tolist() == [12, 12]
    assert item["observation.state_is_pad"].tolist() == [True, False]
    assert item["action"][:, 0].tolist() == [12.5, 13.5, 14.5]
    assert item["action_is_pad"].tolist() == [False] * 3
    assert [row_of(picture) for picture in item["observation.images.top"].float()] == [12, 12]
    assert item["observation.images.top_is_pad"].tolist() == [True, False]
    assert item["task"] == TASKS[1]
    assert (int(item["episode_index"]), int(item["frame_index"])) == (1, 0)
    # Frame 10 has one successor in its episode.
    item = windows[10]
    assert item["action"][:, 0].tolist() == [10.5, 11.5, 11.5]
    assert item["action_is_pad"].tolist() == [False, False, True]
    assert [row_of(picture) for picture in item["observation.images.top"].float()] == [9, 10]
    assert item["observation.images.top"].dtype == torch.uint8
    with pytest.raises(IndexError, match="21 of 21"):
        windows[21]


def test_a_batch_is_its_items(folder):
    windows = folder.windows({"observation.images.top": [-0.1, 0, 0.1], "action": [0, 0.1]}, num_threads=3)
    indices = [20, 0, 11, 12, 5]
    batch = windows.batch(indices)
    assert batch["task"] == [windows[index]["task"] for index in indices]
    for number, index in enumerate(indices):
        for key, value in windows[index].items():
            assert batch[key][number] == value if key == "task" else torch.equal(batch[key][number], value)
    plain = folder.windows()
    assert plain.batch([3])["observation.images.top"].shape == (1, 3, SIDE, SIDE)


def test_windows_work_in_the_workers_of_a_data_loader(folder):
    windows = folder.windows({"action": [0, 0.1]})
    assert row_of(windows[4]["observation.images.top"].float()) == 4  # files are open before the workers start
    loader = torch.utils.data.DataLoader(windows, batch_size=7, num_workers=2)
    rows = [row_of(picture.float()) for batch in loader for picture in batch["observation.images.top"]]
    assert rows == list(range(21))
    assert row_of(pickle.loads(pickle.dumps(windows))[20]["observation.images.top"].float()) == 20


def test_the_last_row_is_a_transition_where_it_ended_the_episode(tmp_path):
    folder = load_dataset(write_folder(tmp_path / "small", reward=True, done=True))
    assert folder.lengths.tolist() == [12, 9]
    assert folder.episode_returns().tolist() == [1, 1]
    episode = folder.episode(0)
    assert np.flatnonzero(episode.terminated).tolist() == [11]
    assert np.flatnonzero(episode.reward).tolist() == [11]
    assert not episode.truncated.any()
    # 13 observations: the last one stands for the one after the end
    assert episode.observation["state"][:, 0].tolist() == [*range(12), 11]
    assert row_of(episode.observation["top"][-1]) == 11


def test_rewards_are_not_invented(tmp_path, caplog):
    root = write_folder(tmp_path / "small")
    with caplog.at_level(logging.WARNING):
        assert load_dataset(root).episode_returns().tolist() == [0, 0]
    assert "no next.reward" in caplog.text
    folder = load_dataset(root, terminal_reward=2.0)
    episode = folder.episode(0)
    assert episode.reward.tolist() == [0] * 10 + [2]
    assert episode.terminated.tolist() == [False] * 10 + [True]
    assert not episode.truncated.any()
    assert folder.episode_returns().tolist() == [2, 2]
    with pytest.raises(InputError, match=r"has rewards"):
        load_dataset(write_folder(tmp_path / "other", reward=True), terminal_reward=1.0)


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_pictures_may_be_in_the_table(tmp_path, version):
    folder = load_dataset(write_folder(tmp_path / "small", version, stored=True), image_size=8)
    episode = folder.episode(1)
    assert episode.observation["top"].shape == (9, 3, 8, 8)
    assert (episode.observation["top"] == np.array([grey(row) for row in range(12, 21)])[:, None, None, None]).all()
    window = folder.windows({"observation.images.top": [-0.1, 0]})[20]["observation.images.top"]
    assert window[:, 0, 0, 0].tolist() == [grey(19), grey(20)]


def test_a_clock_that_starts_late_shifts_no_picture(tmp_path):
    folder = load_dataset(write_folder(tmp_path / "small", clock=1 / FPS))
    assert [row_of(picture) for picture in folder.episode(1).observation["top"]] == list(range(12, 21))


def test_choosing_episodes_and_cameras(tmp_path):
    root = write_folder(tmp_path / "small")
    assert load_dataset(root, episodes=[1]).episode(0).observation["state"][0, 0] == 12
    assert "top" not in load_dataset(root, cameras=[]).observation_space.spaces
    assert "top" in load_dataset(root, cameras=["observation.images.top"]).observation_space.spaces
    with pytest.raises(InputError, match=r"no episode 5; meta/ lists 0–1"):
        load_dataset(root, episodes=[5])
    with pytest.raises(InputError, match=r"no camera wrist; it has: top"):
        load_dataset(root, cameras=["wrist"])


def test_streams_are_named_by_as_much_as_tells_them_apart():
    keys = ["observation.state", "observation.left.rgb", "observation.right.rgb", "observation.instruction"]
    assert list(stream_names(keys).values()) == ["state", "left_rgb", "right_rgb", "instruction"]


# --- what is wrong, in one line


def test_deltas_must_be_whole_steps(folder):
    with pytest.raises(InputError, match=r"delta_timestamps of action: 0\.25 s is not a multiple of 1/fps = 0\.1 s"):
        folder.windows({"action": [0, 0.25]})
    folder.windows({"action": [0.10005]})  # within tolerance_s
    with pytest.raises(InputError, match=r"names observation\.images\.side; small has: .*observation\.images\.top"):
        folder.windows({"observation.images.side": [0]})


def test_missing_files_are_named_or_left_out(tmp_path, caplog):
    root = write_folder(tmp_path / "small")
    video = root / "videos/chunk-001/observation.images.top/episode_000001.mp4"
    video.unlink()
    with pytest.raises(
        InputError, match=r"episodes 1 .*chunk-001.*episode_000001\.mp4\).*episodes=\[0\].*skip_missing"
    ):
        load_dataset(root)
    with pytest.raises(InputError, match=r"episode_000001\.mp4"):
        load_dataset(root, episodes=[0, 1], skip_missing=True)  # asked for by number
    with caplog.at_level(logging.WARNING):
        assert load_dataset(root, skip_missing=True).num_episodes == 1
    assert "episodes 1" in caplog.text
    assert load_dataset(root, cameras=[]).num_episodes == 2
    (root / "data/chunk-001/episode_000001.parquet").unlink()
    with pytest.raises(InputError, match=r"data/chunk-001/episode_000001\.parquet"):
        load_dataset(root)
    (root / "data/chunk-000/episode_000000.parquet").unlink()
    with pytest.raises(InputError, match=r"none of its tables is on disk"):
        load_dataset(root, skip_missing=True)


def rewrite(root, change):
    """Change the columns of the second episode's table."""
    path = root / "data/chunk-001/episode_000001.parquet"
    columns = parquet.read_table(path).to_pydict()
    change(columns)
    write_table(path, columns)


def set_value(key, row, value):
    return lambda columns: columns[key].__setitem__(row, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("action"), r"episode 1, field action: the column is missing"),
        (lambda c: [values.pop() for values in c.values()], r"episode 1, field \S+: 8 rows; meta/ declares 9"),
        (set_value("action", 3, [1.0]), r"episode 1, field action: 25 values; meta/ declares 9 rows of shape \[3\]"),
        (set_value("action", 3, [1.0, float("nan"), 1]), r"episode 1, field action: row 3 is not a finite number"),
        (set_value("action", 3, [1.0, None, 1]), r"episode 1, field action: has empty values"),
        (set_value("timestamp", 4, 0.46), r"episode 1, field timestamp: rows 3 and 4 are 0\.16\d+ s apart, not 1/fps"),
        (set_value("task_index", 2, 7), r"episode 1, field task_index: meta/ lists no task 7"),
    ],
)
def test_a_damaged_table_is_named_with_episode_and_field(tmp_path, change, message):
    root = write_folder(tmp_path / "small")
    rewrite(root, change)
    folder = load_dataset(root)
    folder.episode(0)
    with pytest.raises(InputError, match=r"episode_000001\.parquet: damaged at " + message):
        folder.episode(1)


@pytest.mark.parametrize(("old", "new"), [(b"length", b"leng\xe1h"), (b"pick the cup", b"pick the \xe1up")])
def test_text_of_a_table_that_is_not_utf8_is_named(tmp_path, old, new):
    root = write_folder(tmp_path / "small", "v3.0")
    for path in (root / "meta").rglob("*.parquet"):
        columns = parquet.read_table(path)
        parquet.write_table(columns, path, compression="none", store_schema=False, use_dictionary=False)
        path.write_bytes(path.read_bytes().replace(old, new))
    with pytest.raises(
        InputError, match=r"parquet: damaged at the top, field \w+: cannot be read as parquet"
    ) as caught:
        load_dataset(root)
    assert "UnicodeDecodeError" not in str(caught.value)


def test_a_truncated_table_is_named(tmp_path):
    root = write_folder(tmp_path / "small")
    path = root / "data/chunk-001/episode_000001.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"episode_000001\.parquet: damaged at episode 1, .*cannot be read as parquet"):
        load_dataset(root).episode(1)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(InputError, match=r"git lfs pull"):
        load_dataset(root).episode(1)


def test_a_video_with_fewer_frames_than_rows_is_named(tmp_path):
    root = write_folder(tmp_path / "small")
    write_video(root / "videos/chunk-001/observation.images.top/episode_000001.mp4", range(12, 20))
    message = r"episode_000001\.mp4: damaged at episode 1, field observation\.images\.top: 8 frames; .* 9 rows"
    with pytest.raises(InputError, match=message):
        load_dataset(root).episode(1)
    with pytest.raises(InputError, match=message):
        load_dataset(root).windows()[12]


def test_a_video_that_is_none_is_named_with_its_episode(tmp_path):
    root = write_folder(tmp_path / "small")
    path = root / "videos/chunk-001/observation.images.top/episode_000001.mp4"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(
        InputError, match=r"episode_000001\.mp4: .*\(episode 1, field observation\.images\.top\)"
    ) as caught:
        load_dataset(root).episode(1)
    assert "\n" not in str(caught.value)


def test_frames_of_another_size_raise_an_error(tmp_path):
    root = write_folder(tmp_path / "small")
    write_video(root / "videos/chunk-001/observation.images.top/episode_000001.mp4", range(12, 21), height=16)
    for size in (None, 8):  # 8: they would be scaled to it, whatever their shape
        with pytest.raises(
            InputError, match=r"episode 1, field observation\.images\.top: frames of shape \(3, 16, 32\)"
        ):
            load_dataset(root, image_size=size).episode(1)
    with pytest.raises(InputError, match=r"images can only shrink"):
        load_dataset(root, image_size=64)


def test_an_episode_that_begins_between_two_frames_raises_an_error(tmp_path):
    root = write_folder(tmp_path / "small", "v3.0")
    path = root / "meta/episodes/chunk-000/file-000.parquet"
    columns = parquet.read_table(path).to_pydict()
    columns["videos/observation.images.top/from_timestamp"][1] += 0.02
    write_table(path, columns)
    with pytest.raises(InputError, match=r"file-000\.mp4: damaged at episode 1, .*no frame at from_timestamp 1\.22"):
        load_dataset(root).episode(1)
    assert row_of(load_dataset(root, tolerance_s=0.03).episode(1).observation["top"][0]) == 12


def test_unreadable_meta_is_named(tmp_path):
    root = write_folder(tmp_path / "small")
    info = root / "meta/info.json"
    whole = json.loads(info.read_text())
    for change, message in [
        ({"codebase_version": "v1.6"}, r"codebase_version is v1\.6; Deft reads v2\.0, v2\.1, v3\.0"),
        ({"fps": None}, r"field fps"),
        ({"data_path": "data/{train}.parquet"}, r"field data_path: .* is not a valid pattern: 'train'"),
    ]:
        info.write_text(json.dumps(whole | change))
        with pytest.raises(InputError, match=message):
            load_dataset(root)
    info.write_text("{")
    with pytest.raises(InputError, match=r"info\.json: damaged"):
        load_dataset(root)
    info.write_text(json.dumps(whole))
    (root / "meta/episodes.jsonl").write_text('{"episode_index": 0}\n')
    with pytest.raises(InputError, match=r"episodes\.jsonl: damaged at line 1, field length: is missing"):
        load_dataset(root)


def set_info(**change):
    def changed(root):
        path = root / "meta/info.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))

    return changed


def set_feature(key, **change):
    def changed(root):
        path = root / "meta/info.json"
        info = json.loads(path.read_text())
        info["features"][key] |= change
        path.write_text(json.dumps(info))

    return changed


def set_file(name, content):
    return lambda root: (root / "meta" / name).write_bytes(content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_info(features=[]), "field features: is missing or not an object"),
        (set_info(features=None), "field features: is missing or not an object"),
        (set_info(features={"action": 3}), "feature 'action', field features: 3 is not an object"),
        (set_info(chunks_size=0), "field chunks_size: is 0"),
        (set_info(chunks_size="many"), "field chunks_size: 'many' is not a whole number"),
        (set_info(total_episodes=-1), "field total_episodes: -1 is not a whole number"),
        (set_info(fps="10"), "field fps"),
        (set_info(fps=True), "field fps"),
        (set_info(data_path=["a"]), "field data_path: is missing"),
        (set_info(data_path="data/{episode_index[0]}"), "data_path: .* uses more than a number"),
        (set_info(data_path="data/{episode_index.real}"), "data_path: .* uses more than a number"),
        (set_info(data_path="data/\x00{episode_index}"), r"none of its tables is on disk; .*data/\\x000"),
        (set_feature("action", shape="3"), "feature 'action', field shape: '3' is not a list of sizes"),
        (set_feature("action", shape=[[3]]), r"field shape: \[\[3\]\] is not"),
        (set_feature("action", shape=[-3]), r"field shape: \[-3\] is not"),
        (set_feature("action", shape=[0]), r"field shape: \[0\] is not"),
        (set_feature("action", shape=[10**400]), "field shape: .* is not"),
        (
            set_feature("action", shape=[10**9]),
            r"\[1000000000\] is not a list of sizes of 1 to 67,108,864 numbers",
        ),
        (set_feature("action", dtype=None), "field dtype: None is missing or not text"),
        (set_feature("observation.images.top", info=[1]), r"field info: \[1\] is not an object"),
        (set_feature("observation.images.top", shape=[2, 2]), "not an image of 3 channels"),
        (set_file("info.json", b""), "info.json: damaged"),
        (set_file("info.json", b"null"), "info.json: damaged at the top, field JSON: is not an object"),
        (set_file("info.json", b"\xff\xfe"), "info.json: damaged"),
        (set_file("tasks.jsonl", b'{"task_index": 0}'), "tasks.jsonl: damaged at line 1, field task: None is missing"),
        (set_file("tasks.jsonl", b'{"task_index": "x", "task": "a"}'), "field task_index: 'x' is not a whole"),
        (set_file("tasks.jsonl", b"[1]"), "line 1, field JSON: is not an object"),
        (set_file("episodes.jsonl", b'{"episode_index": 0, "length": -4}'), "field length: -4 is not a whole"),
        (
            set_file("episodes.jsonl", b'{"episode_index": 0, "length": 1e300}'),
            "field length: 1e.300 is not a whole",
        ),
        (
            set_file("episodes.jsonl", b'{"episode_index": [], "length": 4}'),
            r"field episode_index: \[\] is not a whole",
        ),
        (set_file("episodes.jsonl", b'{"episode_index": 0, "length": 4}'), "12 rows; meta/ declares 4"),
        (set_file("stats.json", b'{"action": {"min": "a", "max": [1]}}'), "min and max: are not lists of numbers"),
        (set_file("stats.json", b'{"action": {"min": [1], "max": [2, 3]}}'), "are not lists of numbers of one length"),
        (set_file("stats.json", b'{"action": {"min": [3, 0, 0], "max": [2, 1, 1]}}'), "min: is larger than max"),
        (set_file("stats.json", b'{"action": 5}'), "field statistics: 5 is not an object"),
    ],
)
def test_malformed_meta_is_named(tmp_path, change, message):
    root = write_folder(tmp_path / "small", stored=True)
    change(root)
    with pytest.raises(InputError, match=message) as caught:
        load_dataset(root).episode(0)
    assert not re.search(r"\w+Error", str(caught.value))


def test_a_total_that_differs_from_the_list_is_warned_about(tmp_path, caplog):
    root = write_folder(tmp_path / "small", stored=True)
    set_info(total_episodes=3)(root)
    load_dataset(root)
    assert "total_episodes is 3, but meta/ lists 2 episodes" in caplog.text


def image_that_declares(kind, width, height):
    """A few hundred bytes that declare any size."""
    from PIL import Image

    target = io.BytesIO()
    Image.new("RGB", (4, 4)).save(target, kind)
    content = bytearray(target.getvalue())
    if kind == "PNG":  # the first chunk: length, IHDR, width, height, …, CRC
        content[16:24] = struct.pack(">II", width, height)
        content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    elif kind == "JPEG":
        start = content.index(b"\xff\xc0") + 5
        content[start : start + 4] = struct.pack(">HH", height, width)
    else:
        content[6:10] = struct.pack("<HH", width, height)
    return bytes(content)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF"])
@pytest.mark.parametrize("side", [9000, 60_000])  # 81 million pixels, and 3.6 billion
def test_an_image_that_declares_another_size_is_not_decoded(tmp_path, kind, side, monkeypatch):
    from PIL import ImageFile

    root = write_folder(tmp_path / "small", stored=True)
    rewrite(root, set_value("observation.images.top", 4, {"bytes": image_that_declares(kind, side, side), "path": ""}))
    monkeypatch.setattr(ImageFile.ImageFile, "load_prepare", None)  # which would take the memory
    place = r"episode 1, field observation\.images\.top: row 4 "
    with pytest.raises(
        InputError, match=place + rf"(is larger than the|has {side} × {side} pixels; .*) {SIDE} × {SIDE}"
    ):
        load_dataset(root).images(load_dataset(root).entries[1], "observation.images.top", np.array([4]))


def test_decoded_frames_stay_within_the_budget(tmp_path):
    frame = 3 * SIDE * SIDE
    folder = load_dataset(write_folder(tmp_path / "small", lengths=(20, 11)), cache_bytes=5 * frame)
    windows = folder.windows({"observation.images.top": [-0.1, 0]})
    for index in np.random.default_rng(0).integers(0, 31, 40):
        picture = windows[int(index)]["observation.images.top"][1]
        assert row_of(picture.float()) == index
        assert folder.reader.cache.num_bytes <= 5 * frame
    folder.episode(0)
    assert folder.reader.cache.num_bytes <= 5 * frame


# --- the real folder (v2.0), and the same recordings in the layouts of v2.1 and v3.0


def real_info(source, version, paths):
    info = json.loads((source / "meta/info.json").read_text())
    del info["features"]["observation.images.egoview"]  # no video of it is in the folder
    return info | paths | {"codebase_version": version}


def as_v21(source, target):
    shutil.copytree(source / "data", target / "data")
    shutil.copytree(source / "videos", target / "videos")
    (target / "meta").mkdir()
    (target / "meta/info.json").write_text(json.dumps(real_info(source, "v2.1", V2_PATHS)))
    shutil.copy(source / "meta/tasks.jsonl", target / "meta")
    lines = (source / "meta/episodes.jsonl").read_text().splitlines()[:3]
    (target / "meta/episodes.jsonl").write_text("\n".join(lines))
    stats = json.loads((source / "meta/stats.json").read_text())
    write_lines(target / "meta/episodes_stats.jsonl", [{"episode_index": n, "stats": stats} for n in range(3)])
    return target


def join_videos(sources, target):
    """One file of all frames, without coding them anew: packets moved on by the time of what is before."""
    target.parent.mkdir(parents=True, exist_ok=True)
    starts, offset = [], 0
    with av.open(str(target), "w") as output:
        stream = None
        for source in sources:
            with av.open(str(source)) as given:
                video = given.streams.video[0]
                stream = stream or output.add_stream_from_template(video)
                step = int(1 / (video.average_rate * video.time_base))
                starts.append(float(offset * video.time_base))
                for packet in given.demux(video):
                    if packet.dts is None:
                        continue
                    packet.pts, packet.dts, packet.stream = packet.pts + offset, packet.dts + offset, stream
                    output.mux(packet)
                offset += video.frames * step
    return [*starts, float(offset * Fraction(1, 10240))]


def as_v30(source, target):
    """Episodes 0 and 1 in the first file of tables and videos, episode 2 in the second."""
    tables = [parquet.read_table(path) for path in sorted(source.glob("data/*/*.parquet"))]
    videos = sorted(source.glob("videos/*/*/*.mp4"))
    write_table(target / "data/chunk-000/file-000.parquet", pa.concat_tables(tables[:2]))
    write_table(target / "data/chunk-000/file-001.parquet", tables[2])
    first = join_videos(videos[:2], target / f"videos/{CAMERA}/chunk-000/file-000.mp4")
    second = join_videos(videos[2:], target / f"videos/{CAMERA}/chunk-000/file-001.mp4")
    episodes = {
        "episode_index": [0, 1, 2],
        "length": [len(table) for table in tables],
        "dataset_from_index": [0, 416, 886],
        "dataset_to_index": [416, 886, 1356],
        f"videos/{CAMERA}/from_timestamp": [*first[:-1], second[0]],
        f"videos/{CAMERA}/to_timestamp": [*first[1:], second[1]],
    }
    for name in ("data", f"videos/{CAMERA}"):
        episodes |= {f"{name}/chunk_index": [0, 0, 0], f"{name}/file_index": [0, 0, 1]}
    write_table(target / "meta/episodes/chunk-000/file-000.parquet", episodes)
    tasks = [json.loads(line) for line in (source / "meta/tasks.jsonl").read_text().splitlines()]
    write_table(target / "meta/tasks.parquet", {key: [task[key] for task in tasks] for key in ("task_index", "task")})
    (target / "meta/info.json").write_text(json.dumps(real_info(source, "v3.0", V3_PATHS)))
    shutil.copy(source / "meta/stats.json", target / "meta")
    return target


def test_the_real_folder_says_what_is_not_there(caplog):
    path = shared_data(REAL)
    message = (
        r"episodes 3–4 .*episode_000003\.parquet.* and videos of observation\.images\.egoview .*episodes=\[0, 1, 2\]"
    )
    with pytest.raises(
        InputError, match=message + r" and cameras=\['ego_view'\], .* --dataset-options skip_missing=true"
    ):
        load_dataset(path)
    with caplog.at_level(logging.WARNING):
        folder = load_dataset(path, skip_missing=True)
    assert "egoview" in caplog.text
    # meta/episodes.jsonl: 416, 470 and 470 rows; next.done is set in each last row
    assert folder.lengths.tolist() == [416, 470, 470]
    assert load_dataset(path, episodes=[0, 1, 2], cameras=["ego_view"]).lengths.tolist() == [416, 470, 470]
    assert folder.episode_returns().tolist() == [1, 1, 1]
    with pytest.raises(InputError, match="egoview"):
        load_dataset(path, episodes=[0], cameras=["egoview"], skip_missing=True)


def test_the_real_episode_is_that_of_its_files():
    path = shared_data(REAL)
    folder = load_dataset(path, skip_missing=True, image_size=64)
    episode = folder.episode(1)
    table = parquet.read_table(path / "data/chunk-000/episode_000001.parquet").to_pydict()
    np.testing.assert_array_equal(episode.observation["state"][:-1], np.array(table["observation.state"], np.float32))
    np.testing.assert_array_equal(episode.action, np.array(table["action"], np.float32))
    assert decode_text(episode.observation["instruction"][7]).startswith("pick the ketchup from the counter")
    assert episode.observation["ego_view"].shape == (471, 3, 64, 64)
    assert all(folder.action_space.contains(action) for action in episode.action)
    with av.open(str(path / f"videos/chunk-000/{CAMERA}/episode_000001.mp4")) as container:
        for number, frame in enumerate(container.decode(video=0)):
            if number % 50:
                continue
            whole = frame.to_ndarray(format="rgb24").transpose(2, 0, 1).reshape(3, 64, 4, 64, 4)
            # Areas are averaged before colours are converted, which differs a little where colours are clipped.
            assert np.abs(whole.mean((2, 4)) - episode.observation["ego_view"][number]).mean() < 1


def test_three_versions_of_the_real_data_give_the_same_items(tmp_path):
    path = shared_data(REAL)
    roots = [path, as_v21(path, tmp_path / "v21"), as_v30(path, tmp_path / "v30")]
    # A small budget: only what is asked for is decoded.
    folders = [load_dataset(root, skip_missing=True, cache_bytes=2**24) for root in roots]
    assert [folder.meta.version for folder in folders] == ["v2.0", "v2.1", "v3.0"]
    deltas = {CAMERA: [-0.15, -0.1, -0.05, 0], "action": [0, 0.05, 0.1], "observation.state": [-0.05, 0]}
    windows = [folder.windows(deltas) for folder in folders]
    # both ends of each episode, and positions in the first and the second group of frames of each video
    indices = [0, 2, 200, 414, 415, 416, 417, 600, 700, 885, 886, 1000, 1200, 1355]
    batches = [window.batch(indices) for window in windows]
    for batch in batches[1:]:
        assert batch.keys() == batches[0].keys()
        for key, values in batches[0].items():
            assert values == batch[key] if key == "task" else torch.equal(values, batch[key]), key
    for folder in folders[1:]:
        assert folder.observation_space == folders[0].observation_space
        assert folder.action_space == folders[0].action_space
    episodes = [load_dataset(folder.meta.root, image_size=32, skip_missing=True).episode(1) for folder in folders]
    for episode in episodes[1:]:
        for name, stream in episodes[0].streams.items():
            assert np.array_equal(stream, episode.streams[name]), name
        for field in ("action", "reward", "terminated", "truncated"):
            assert np.array_equal(getattr(episodes[0], field), getattr(episode, field))


def test_the_real_pictures_are_those_of_decoding_in_order():
    path = shared_data(REAL)
    windows = load_dataset(path, skip_missing=True, cache_bytes=2**22).windows({CAMERA: [-0.15, -0.1, -0.05, 0]})
    wanted = {100, 251, 415}
    with av.open(str(path / f"videos/chunk-000/{CAMERA}/episode_000000.mp4")) as container:
        frames = [
            frame.to_ndarray(format="rgb24") if any(number in range(row - 3, row + 1) for row in wanted) else None
            for number, frame in enumerate(container.decode(video=0))
        ]
    for row in sorted(wanted, reverse=True):
        expected = np.stack(frames[row - 3 : row + 1]).transpose(0, 3, 1, 2)
        assert np.array_equal(windows[row][CAMERA].numpy(), expected)


@pytest.mark.parametrize("version", ["v2.0", "v3.0"])
@pytest.mark.parametrize("key", ["data_path", "video_path"])
@pytest.mark.parametrize("start", ["../outside/", "{root}/outside/", "data/../../outside/"])
def test_paths_stay_inside_the_folder(tmp_path, version, key, start):
    """The same files, reached through a path that leaves the folder, are not read."""
    root = tmp_path / "folder"
    write_folder(root, version)
    shutil.copytree(root, tmp_path / "outside")
    info = json.loads((root / "meta/info.json").read_text())
    info[key] = start.replace("{root}", str(tmp_path)) + info[key]
    (root / "meta/info.json").write_text(json.dumps(info))
    with pytest.raises(InputError, match=rf"field {key}: .* leads out of the folder"):
        load_dataset(root)


def test_a_camera_name_does_not_lead_out_of_the_folder(tmp_path):
    write_folder(tmp_path)
    text = (tmp_path / "meta/info.json").read_text()
    (tmp_path / "meta/info.json").write_text(text.replace("observation.images.top", "../../../top"))
    with pytest.raises(InputError, match=r"field video_path: .* leads out of the folder"):
        load_dataset(tmp_path)


def test_symbolic_links_are_followed(tmp_path):
    """The Hugging Face cache keeps files elsewhere, and links to them."""
    write_folder(tmp_path / "folder")
    (tmp_path / "folder" / "data").rename(tmp_path / "blobs")
    (tmp_path / "folder" / "data").symlink_to(tmp_path / "blobs")
    assert load_dataset(tmp_path / "folder").num_episodes == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fps": float("nan")}, "fps"),
        ({"fps": float("inf")}, "fps"),
        ({"data_path": "{episode_index:2000000000d}"}, "has a width of more than two digits"),
    ],
)
def test_metadata_that_would_hang_or_mislead_is_rejected(tmp_path, change, words):
    write_folder(tmp_path / "data")
    path = tmp_path / "data/meta/info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError, match=words):
        load_dataset(tmp_path / "data")


def test_an_episode_that_is_listed_twice_is_rejected(tmp_path):
    write_folder(tmp_path / "data")
    path = tmp_path / "data/meta/episodes.jsonl"
    path.write_text(path.read_text() + path.read_text().splitlines()[1] + "\n")
    with pytest.raises(InputError, match="1 is listed twice"):
        load_dataset(tmp_path / "data")
