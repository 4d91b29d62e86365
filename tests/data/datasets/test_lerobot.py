"""LeRobot folders in their three versions: the real one, the same data rewritten, and small ones made here."""

import json
import logging
import pickle
import shutil
from fractions import Fraction

import numpy as np
import pytest
import torch
from lerobot_folders import FPS, SIDE, TASKS, V2_PATHS, V3_PATHS, grey, row_of, write_folder, write_lines, write_table
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


def test_symbolic_links_are_followed(tmp_path):
    """The Hugging Face cache keeps files elsewhere, and links to them."""
    write_folder(tmp_path / "folder")
    (tmp_path / "folder" / "data").rename(tmp_path / "blobs")
    (tmp_path / "folder" / "data").symlink_to(tmp_path / "blobs")
    assert load_dataset(tmp_path / "folder").num_episodes == 2


def test_deltas_must_be_whole_steps(folder):
    with pytest.raises(InputError, match=r"delta_timestamps of action: 0\.25 s is not a multiple of 1/fps = 0\.1 s"):
        folder.windows({"action": [0, 0.25]})
    folder.windows({"action": [0.10005]})  # within tolerance_s
    with pytest.raises(InputError, match=r"names observation\.images\.side; small has: .*observation\.images\.top"):
        folder.windows({"observation.images.side": [0]})


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
