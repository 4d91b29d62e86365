"""Random windows of 4 frames from 256×256 videos of a LeRobot folder: Deft against the plain way, windows a second.

The plain way opens the file, seeks to the key frame before, decodes up to the window and converts its frames; both
ways use the same number of threads, and the frames they give are compared. Deft is measured from cold (everything is
decoded within the measured time), warm, and with a budget of 16 frames, where nothing that was decoded is found again.
The second folder is the same video with a key frame every second frame, as LeRobot records. Without `--folder` a folder
is made of noise that moves. Exit status 1 if warm or cold is below 200 windows a second.

    python benchmarks/lerobot_windows.py --folder PATH
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
from common import print_machine, print_table, write_json

from deft.data.datasets import load_dataset
from deft.data.datasets.lerobot import FrameWindows, LeRobotFolder

BAR = 200.0
SIDE, FPS, LENGTHS = 256, 20, (420, 470, 470)
KEY = "observation.images.camera"


def noise_frames(length: int, seed: int) -> list[np.ndarray]:
    """A picture of random squares that moves, with a little noise on it, for videos about as large as a camera's."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (2 * SIDE // 16, 2 * SIDE // 16, 3), np.uint8)
    picture = np.kron(blocks, np.ones((16, 16, 1), np.uint8))
    frames = []
    for number in range(length):
        frame = picture[number % SIDE : number % SIDE + SIDE, (2 * number) % SIDE : (2 * number) % SIDE + SIDE]
        frames.append((frame // 2 + rng.integers(0, 16, frame.shape, np.uint8)).astype(np.uint8))
    return frames


def write_folder(root: Path, videos: list[list[np.ndarray]], group: int) -> Path:
    """A LeRobot v2.0 folder of these videos, with a key frame every `group` frames."""
    features = {
        KEY: {"dtype": "video", "shape": [SIDE, SIDE, 3]},
        "observation.state": {"dtype": "float32", "shape": [2]},
        "action": {"dtype": "float32", "shape": [2]},
        "timestamp": {"dtype": "float32", "shape": [1]},
    }
    info = {
        "codebase_version": "v2.0", "fps": FPS, "features": features,
        "data_path": "data/episode_{episode_index:06d}.parquet",
        "video_path": "videos/{video_key}/episode_{episode_index:06d}.mp4",
    }  # fmt: skip
    for folder in ("meta", "data", f"videos/{KEY}"):
        (root / folder).mkdir(parents=True)
    (root / "meta/info.json").write_text(json.dumps(info))
    (root / "meta/tasks.jsonl").write_text("")
    lines = [json.dumps({"episode_index": n, "length": len(frames)}) for n, frames in enumerate(videos)]
    (root / "meta/episodes.jsonl").write_text("\n".join(lines))
    for number, frames in enumerate(videos):
        rows = [[float(row), 0.0] for row in range(len(frames))]
        columns = {"observation.state": rows, "action": rows, "timestamp": [row / FPS for row in range(len(frames))]}
        parquet.write_table(pa.table(columns), root / f"data/episode_{number:06d}.parquet")
        with av.open(str(root / f"videos/{KEY}/episode_{number:06d}.mp4"), "w") as container:
            stream = container.add_stream("libx264", rate=FPS, options={"g": str(group), "preset": "veryfast"})
            stream.width, stream.height, stream.pix_fmt = SIDE, SIDE, "yuv420p"
            for frame in frames:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            container.mux(stream.encode())
    return root


def whole_videos(folder: LeRobotFolder) -> list[list[np.ndarray]]:
    """All frames of all episodes, to be written again with other key frames."""
    key = folder.camera_keys[0]
    found = []
    for entry in folder.entries:
        frames = folder.images(entry, key, np.arange(entry.length), keep=False)
        found.append(list(frames.transpose(0, 2, 3, 1)))
    return found


def plain_window(path: Path, first: int, fps: float, size: int = 4) -> np.ndarray:
    """Open, seek, decode, convert: what a first version does for every window."""
    frames: list[np.ndarray] = []
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert stream.time_base is not None
        ticks = 1 / (fps * stream.time_base)
        container.seek(round(first * ticks), stream=stream, backward=True)
        for frame in container.decode(stream):
            if frame.pts is not None and round(frame.pts / ticks) >= first:
                frames.append(frame.to_ndarray(format="rgb24").transpose(2, 0, 1))
            if len(frames) == size:
                break
    return np.stack(frames)


class Figure(NamedTuple):
    """Windows a second, and the processor time of one."""

    rate: float
    cpu_ms: float


def timed(num_windows: int, work: Callable[[], object]) -> Figure:
    """Time something that makes this many windows."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Figure(num_windows / (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu) / num_windows)


def batches(windows: FrameWindows, indices: np.ndarray, batch_size: int) -> None:
    """Read windows in batches."""
    for begin in range(0, len(indices), batch_size):
        windows.batch(indices[begin : begin + batch_size])


def measure(folder_path: Path, arguments: argparse.Namespace) -> dict[str, Figure]:
    """The figures of one folder."""
    options: dict[str, Any] = {"skip_missing": True}
    folder = load_dataset(folder_path, **options)
    assert isinstance(folder, LeRobotFolder)
    key, fps, threads = folder.camera_keys[0], folder.meta.fps, arguments.threads
    deltas = {key: [-3 / fps, -2 / fps, -1 / fps, 0.0]}
    windows = folder.windows(deltas, threads)
    starts = windows.starts
    valid = np.concatenate([np.arange(a + 3, b) for a, b in pairwise(starts)])
    rng = np.random.default_rng(0)
    few, many = rng.choice(valid, arguments.few), rng.choice(valid, arguments.many)

    def plain(index: int) -> np.ndarray:
        number = int(np.searchsorted(starts, index, "right")) - 1
        return plain_window(folder.entries[number].videos[key].path, int(index - starts[number]) - 3, fps)

    expected: list[np.ndarray] = []
    with ThreadPoolExecutor(threads) as pool:
        result = {"plain": timed(len(few), lambda: expected.extend(pool.map(plain, few)))}
    for name in ("cold", "warm"):
        result[name] = timed(len(many), lambda: batches(windows, many, arguments.batch_size))
    for index, frames in zip(few, expected, strict=True):
        if not np.array_equal(windows[int(index)][key].numpy(), frames):
            raise SystemExit(f"frames differ at {index}")
    folder.close()
    height, width = folder.image_sizes[key]
    small = load_dataset(folder_path, cache_bytes=16 * 3 * height * width, **options)
    assert isinstance(small, LeRobotFolder)
    result["uncached"] = timed(len(few), lambda: batches(small.windows(deltas, threads), few, arguments.batch_size))
    small.close()
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, help="a LeRobot folder with 256×256 videos; its first camera is read")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--few", type=int, default=200, help="windows for the slow ways")
    parser.add_argument("--many", type=int, default=4000, help="windows for the quick ways")
    parser.add_argument("--json", help="write the figures to this file")
    arguments = parser.parse_args()
    print_machine()
    with tempfile.TemporaryDirectory() as scratch:
        given = arguments.folder
        if given is None:
            videos = [noise_frames(length, seed) for seed, length in enumerate(LENGTHS)]
            given = write_folder(Path(scratch) / "long", videos, 250)
        else:
            whole = load_dataset(given, skip_missing=True)
            assert isinstance(whole, LeRobotFolder)
            videos = whole_videos(whole)
        short = write_folder(Path(scratch) / "short", videos, 2)
        del videos
        results = {"as they are": measure(given, arguments), "every 2 frames": measure(short, arguments)}
    for name, found in results.items():
        print(f"\nkey frames: {name}")
        rows = [
            [way, f"{figure.rate:.0f}", f"{figure.rate / found['plain'].rate:.1f}×", f"{figure.cpu_ms:.2f} ms"]
            for way, figure in found.items()
        ]
        print_table(["windows of 4 frames", "a second", "against plain", "processor time of one"], rows)
    figures = {name: {way: figure._asdict() for way, figure in found.items()} for name, found in results.items()}
    write_json(arguments.json, figures)
    return int(any(found[way].rate < BAR for found in results.values() for way in ("cold", "warm")))


if __name__ == "__main__":
    sys.exit(main())
