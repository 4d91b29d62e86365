"""Small LeRobot folders in their three versions, for tests of datasets.

The state of a row is its number, counted over all episodes; its image spells the number in grey.
"""

import io
import json

import numpy as np
import pytest

av = pytest.importorskip("av")
pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

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
