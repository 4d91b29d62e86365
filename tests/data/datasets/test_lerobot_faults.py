"""LeRobot folders with something wrong: each fault is named in one line, with the file, the episode and the field."""

import io
import json
import logging
import re
import shutil
import struct
import zlib

import numpy as np
import pytest
from lerobot_folders import SIDE, row_of, write_folder, write_table, write_video

from deft.data.datasets import load_dataset
from deft.errors import InputError

parquet = pytest.importorskip("pyarrow.parquet")


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
