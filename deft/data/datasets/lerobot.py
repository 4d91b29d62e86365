"""LeRobot folders (v2.0, v2.1, v3.0: parquet tables, mp4 videos, language tasks) as a `Dataset` read on demand.

`load_dataset` calls `load`; `LeRobotFolder.windows` returns items as LeRobot's `delta_timestamps` do.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from deft.data.datasets.dataset import Dataset, Episode, box, damaged, decode_image, truncated_at_end
from deft.data.datasets.lerobot_files import (
    Columns,
    DataFiles,
    EpisodeEntry,
    LeRobotMeta,
    read_meta,
    read_range,
)
from deft.data.datasets.video import DEFAULT_CACHE_BYTES, VideoReader
from deft.errors import InputError
from deft.schema import channels_first, encode_text

log = logging.getLogger(__name__)

REWARD, DONE, TERMINATED, TRUNCATED = "next.reward", "next.done", "next.terminated", "next.truncated"
TASK_INDEX, TIMESTAMP = "task_index", "timestamp"
ACTIONS = ("action", "actions")  # the second is the name in openpi's datasets
INSTRUCTION = "instruction"
NUMBERS = ("float", "int", "uint", "bool")


def matches(path: Path) -> bool:
    """Return whether this is a folder with LeRobot's `meta/info.json`."""
    return (path / "meta" / "info.json").is_file()


def recorded_episodes(path: str | Path) -> int:
    """Return the number of episodes in a recording; 0 if there is none yet."""
    return len(read_meta(Path(path)).episodes) if matches(Path(path)) else 0


def load(
    path: Path,
    name: str,
    episodes: Sequence[int] | None = None,
    cameras: Sequence[str] | None = None,
    skip_missing: bool = False,
    image_size: int | Sequence[int] | None = None,
    terminal_reward: float | None = None,
    tolerance_s: float = 1e-4,
    cache_bytes: int = DEFAULT_CACHE_BYTES,
) -> LeRobotFolder:
    """Open a LeRobot folder.

    `episodes` (by number) and `cameras` (by the last part of their key, or the whole key) select a part. Files that
    `meta/` lists and the disk does not have raise an error, or are left out with `skip_missing`. `image_size` shrinks
    images by area averaging. For folders without rewards, `terminal_reward` is the reward of the last step of every
    demonstration, which becomes a terminal step. `cache_bytes` limits the decoded frames in memory.
    """
    meta = read_meta(path)
    entries, camera_keys = choose(meta, episodes, cameras, skip_missing)
    return LeRobotFolder(
        name, meta, entries, camera_keys, _height_width(image_size), terminal_reward, tolerance_s, cache_bytes
    )


class LeRobotFolder(Dataset):
    """Demonstrations of a robot, read from disk on demand.

    The observation has a stream for each `observation.*` vector (`state`), one for each camera (uint8 [3, h, w]) and
    the task's text (`instruction`). Row t of a table holds an observation and the action taken there. The action of the
    last row has no next observation, so T rows make T − 1 transitions. If `next.done` marks the last row as terminal,
    they make T: the next observation of a terminal step has no effect, and the last observation is used for it.
    """

    def __init__(
        self,
        name: str,
        meta: LeRobotMeta,
        entries: list[EpisodeEntry],
        camera_keys: list[str],
        image_size: tuple[int, int] | None,
        terminal_reward: float | None,
        tolerance_s: float,
        cache_bytes: int,
    ) -> None:
        self.meta, self.entries, self.camera_keys = meta, entries, camera_keys
        self.terminal_reward, self.tolerance_s = terminal_reward, tolerance_s
        features = meta.features
        self.action_key = next((key for key in ACTIONS if key in features), None)
        if self.action_key is None:
            raise InputError(f"{meta.root}: has no action; its features are: {', '.join(features)}")
        self.state_keys = [
            key
            for key, feature in features.items()
            if (key == "state" or key.startswith("observation.")) and feature["dtype"].startswith(NUMBERS)
        ]
        self.streams = stream_names([*self.state_keys, *camera_keys])
        if terminal_reward is not None and REWARD in features:
            raise InputError(f"{meta.root}: has rewards (next.reward); leave terminal_reward out")

        needed = [*self.state_keys, self.action_key, TIMESTAMP]
        needed += [key for key in (REWARD, DONE, TERMINATED, TRUNCATED, TASK_INDEX) if key in features]
        needed += [key for key in camera_keys if features[key]["dtype"] == "image"]
        needed += ["episode_index"] if meta.version == "v3.0" else []
        self.files = DataFiles(meta, list(dict.fromkeys(needed)))
        self.has_tasks = TASK_INDEX in features and any(meta.tasks.values())  # tasks without a text are not used
        self._text_length = max([1, *(len(task.encode()) for task in meta.tasks.values())])
        self._first_frames: dict[tuple[int, str], int] = {}
        self._checked: set[int] = set()

        sizes = {key: _image_size(meta, key) for key in camera_keys}
        for key, size in sizes.items():
            if image_size is not None and (image_size[0] > size[0] or image_size[1] > size[1]):
                raise InputError(f"image_size is {image_size}, larger than the {size} of {key}; images can only shrink")
        self.image_sizes = {key: image_size or size for key, size in sizes.items()}
        num_bytes = sum(3 * h * w for h, w in self.image_sizes.values()) * sum(e.length for e in entries)
        self.reader = VideoReader(cache_bytes, image_size, keep_groups=num_bytes <= cache_bytes)
        super().__init__(name, self._observation_space(), self._action_space(), self._count_transitions())
        self._report(num_bytes, cache_bytes)

    def _observation_space(self) -> spaces.Dict:
        streams: dict[str, spaces.Space] = {}
        for key in self.state_keys:
            streams[self.streams[key]] = box(int(np.prod(self.meta.features[key]["shape"])))
        for key, size in self.image_sizes.items():
            streams[self.streams[key]] = spaces.Box(0, 255, (3, *size), np.uint8)
        if self.has_tasks:
            streams[INSTRUCTION] = spaces.Box(0, 255, (self._text_length,), np.uint8)
        return spaces.Dict(streams)

    def _action_space(self) -> spaces.Box:
        """Return a space with the range of the recorded actions, and ±1 around an action that is constant.

        The range is that of the folder's statistics, or if it has none, of the tables of the selected episodes.
        """
        assert self.action_key is not None
        dim = int(np.prod(self.meta.features[self.action_key]["shape"]))
        found = read_range(self.meta, self.action_key)
        if found is None or found[0].shape != (dim,) or not np.isfinite(found).all():
            tables = self._tables([self.action_key])
            rows = [tables.rows(entry)[self.action_key].reshape(-1, dim) for entry in self.entries]
            found = np.min([part.min(0) for part in rows], 0), np.max([part.max(0) for part in rows], 0)
            log.info("%s: meta/ has no range of %s; it is computed from the tables", self.meta.root, self.action_key)
        low, high = found
        is_constant = high - low < 1e-6
        low, high = np.where(is_constant, low - 1, low), np.where(is_constant, high + 1, high)
        # One float32 outwards, so that no recorded action is outside because of rounding.
        return spaces.Box(
            np.nextafter(low.astype(np.float32), np.float32(-np.inf)),
            np.nextafter(high.astype(np.float32), np.float32(np.inf)),
            dtype=np.float32,
        )

    def _count_transitions(self) -> np.ndarray:
        """Return the transitions of each episode; flags at the end of an episode add one."""
        lengths = np.array([entry.length for entry in self.entries], np.int64)
        flags = [key for key in (DONE, TERMINATED, TRUNCATED) if key in self.meta.features]
        ends = self._tables(flags)
        lengths -= [not (flags and _terminated(ends.rows(entry))[-1]) for entry in self.entries]
        for entry, length in zip(self.entries, lengths, strict=True):
            if length < 1:
                raise damaged(entry.data_path, entry.where, "length", f"{entry.length} rows make no transition")
        return lengths

    def _tables(self, keys: list[str]) -> DataFiles:
        """Return some columns of the tables."""
        return DataFiles(self.meta, [*keys, "episode_index"] if self.meta.version == "v3.0" else keys)

    def _report(self, num_bytes: int, cache_bytes: int) -> None:
        """Log what was found, and warn about what is missing."""
        frames = sum(entry.length for entry in self.entries)
        cameras = ", ".join(self.streams[key] for key in self.camera_keys) or "none"
        log.info(
            "%s: LeRobot %s, %d of %d episodes, %d frames at %g fps, cameras: %s",
            self.name, self.meta.version, len(self.entries), len(self.meta.episodes), frames, self.meta.fps, cameras,
        )  # fmt: skip
        if REWARD not in self.meta.features and self.terminal_reward is None:
            log.warning(
                "%s has no next.reward: all rewards are 0; terminal_reward sets one at the end of each demonstration",
                self.name,
            )
        if self.camera_keys and num_bytes > cache_bytes:
            log.info(
                "%s: %.1f GB of frames do not fit into cache_bytes = %.1f GB: random windows are decoded each time",
                self.name, num_bytes / 1e9, cache_bytes / 1e9,
            )  # fmt: skip

    def episode(self, index: int) -> Episode:
        """Read one episode; its decoded images are not cached."""
        entry, length = self.entries[index], int(self.lengths[index])
        rows = self.rows(entry)
        # If the last row is terminal, its observation is also the next observation.
        steps = np.minimum(np.arange(length + 1), entry.length - 1)
        observation = {
            self.streams[key]: rows[key][steps].reshape(length + 1, -1).astype(np.float32, copy=False)
            for key in self.state_keys
        }
        numbers = np.arange(entry.length)
        with ThreadPoolExecutor(max(1, min(len(self.camera_keys), os.cpu_count() or 1))) as pool:
            images = pool.map(lambda key: self.images(entry, key, numbers, keep=False), self.camera_keys)
            for key, frames in zip(self.camera_keys, images, strict=True):
                observation[self.streams[key]] = frames if length < entry.length else frames[steps]
        if self.has_tasks:
            texts = {task: encode_text(self.task(entry, task), self._text_length) for task in set(rows[TASK_INDEX])}
            observation[INSTRUCTION] = np.stack([texts[task] for task in rows[TASK_INDEX]])[steps]

        assert self.action_key is not None
        reward = rows[REWARD][:length].copy() if REWARD in rows else np.zeros(length, np.float32)
        terminated = _terminated(rows)[:length]
        if self.terminal_reward is not None:
            reward[-1], terminated[-1] = self.terminal_reward, True
        action = rows[self.action_key][:length].reshape(length, -1).astype(np.float32, copy=False)
        reward = reward.astype(np.float32, copy=False)
        return Episode(observation, action, reward, terminated, truncated_at_end(terminated))

    def episode_returns(self) -> np.ndarray:
        """Return the undiscounted return of each episode, float64 [E], without decoding images."""
        if self.terminal_reward is not None:
            return np.full(self.num_episodes, self.terminal_reward, np.float64)
        returns = np.zeros(self.num_episodes)
        if REWARD in self.meta.features:
            for number, (entry, length) in enumerate(zip(self.entries, self.lengths, strict=True)):
                returns[number] = self.files.rows(entry)[REWARD][:length].sum(dtype=np.float64)
        return returns

    def windows(
        self, delta_timestamps: Mapping[str, Sequence[float]] | None = None, num_threads: int | None = None
    ) -> FrameWindows:
        """Return items for imitation learning: one for each recorded frame, with windows of time around it."""
        return FrameWindows(self, delta_timestamps or {}, num_threads)

    def rows(self, entry: EpisodeEntry) -> Columns:
        """Return an episode's columns; raise InputError unless there is one row every 1 / fps seconds."""
        rows = self.files.rows(entry)
        if entry.index not in self._checked:
            self._check_intervals(rows[TIMESTAMP], entry, entry.data_path, TIMESTAMP, self.tolerance_s)
            self._checked.add(entry.index)
        return rows

    def _check_intervals(
        self, times: np.ndarray, entry: EpisodeEntry, path: Path, field: str, tolerance: float
    ) -> None:
        interval = 1 / self.meta.fps
        off = np.abs(np.diff(times) - interval)
        tolerance += float(np.spacing(np.float32(times[-1])))  # times are float32 in the table
        if len(off) and off.max() > tolerance:
            row = int(off.argmax())
            raise damaged(
                path, entry.where, field,
                f"rows {row} and {row + 1} are {times[row + 1] - times[row]:.6f} s apart, not 1/fps = {interval:.6f} s "
                f"(tolerance_s {self.tolerance_s:g})",
            )  # fmt: skip

    def task(self, entry: EpisodeEntry, task_index: int) -> str:
        """Return the text of a task."""
        if task_index not in self.meta.tasks:
            raise damaged(entry.data_path, entry.where, TASK_INDEX, f"meta/ lists no task {task_index}")
        return self.meta.tasks[int(task_index)]

    def images(
        self, entry: EpisodeEntry, key: str, rows: np.ndarray, keep: bool = True, out: np.ndarray | None = None
    ) -> np.ndarray:
        """Return images of a camera at some rows of an episode: uint8 [len(rows), 3, h, w], in `out` if given."""
        if self.meta.features[key]["dtype"] == "image":
            images = [self._stored_image(entry, key, int(row), keep) for row in rows]
            fits = out is not None and out.shape[1:] == images[0].shape
            frames = np.stack(images, out=out if fits else None)
            path = entry.data_path
        else:
            path = entry.videos[key].path
            try:
                frames = self.reader.frames(path, self._first_frame(entry, key) + rows, keep, out)
            except InputError as error:
                if entry.where in str(error):
                    raise
                raise InputError(f"{error} ({entry.where}, field {key})") from None
        expected = (3, *self.image_sizes[key])
        if frames.shape[1:] != expected:
            raise damaged(path, entry.where, key, f"frames of shape {frames.shape[1:]}; meta/ declares {expected}")
        return frames

    def _first_frame(self, entry: EpisodeEntry, key: str) -> int:
        """Return the frame of the video at an episode's first row; check the video at the first use.

        Row i of the episode corresponds to frame i from there on. Times are only used to find the beginning of an
        episode in a shared file, since some recorders start their clock at 0 and others one step later.
        """
        if (entry.index, key) in self._first_frames:
            return self._first_frames[entry.index, key]
        path, start = entry.videos[key].path, entry.videos[key].from_timestamp
        if not path.is_file():
            raise damaged(path, entry.where, key, "the file is missing")
        video = self.reader.file(path)
        if video.size != (size := _image_size(self.meta, key)):
            raise damaged(path, entry.where, key, f"frames of shape {(3, *video.size)}; meta/ declares {(3, *size)}")
        tolerance = self.tolerance_s + video.tick
        first = 0
        if start is not None:
            first = int(np.abs(video.times - start).argmin())
            if abs(video.times[first] - start) > tolerance:
                raise damaged(
                    path, entry.where, key,
                    f"no frame at from_timestamp {start:.6f} s; the nearest is at {video.times[first]:.6f} s "
                    f"(tolerance_s {self.tolerance_s:g})",
                )  # fmt: skip
        times = video.times[first : first + entry.length]
        if len(times) < entry.length:
            raise damaged(path, entry.where, key, f"{len(times)} frames; the table has {entry.length} rows")
        self._check_intervals(times, entry, path, key, tolerance)
        self._first_frames[entry.index, key] = first
        return first

    def _stored_image(self, entry: EpisodeEntry, key: str, row: int, keep: bool) -> np.ndarray:
        """Return an image that is stored in the table, as PNG or JPEG."""
        cache_key = (entry.data_path, entry.index, key, row)
        cached = self.reader.cache.get(cache_key)
        if cached is not None:
            return cached
        from PIL import Image

        content = self.files.rows(entry)[key][row].as_py()
        try:
            pixels = decode_image(content["bytes"] if isinstance(content, dict) else b"", _image_size(self.meta, key))
        except ValueError as error:
            raise damaged(entry.data_path, entry.where, key, f"row {row} {error}") from None
        image = Image.fromarray(pixels).convert("RGB")
        if self.reader.image_size is not None:
            height, width = self.reader.image_size
            image = image.resize((width, height), Image.Resampling.BOX)
        array = np.ascontiguousarray(channels_first(np.asarray(image)))
        if keep:
            self.reader.cache.put(cache_key, array)
        return array

    def source_files(self) -> list[Path]:
        """Return the tables and the videos of the selected cameras."""
        keys = [key for key in self.camera_keys if self.meta.features[key]["dtype"] != "image"]
        tables = {entry.data_path for entry in self.entries}
        return sorted(tables | {entry.videos[key].path for entry in self.entries for key in keys})

    def close(self) -> None:
        """Close the videos and discard decoded frames."""
        self.reader.close()


class FrameWindows(torch.utils.data.Dataset):
    """Items by frame, for a `DataLoader` or in batches: for each key of `delta_timestamps`, a window of times.

    A key with deltas [−0.1, 0] returns two values: those 0.1 s before the frame and at the frame. Rows outside the
    episode are replaced by its first or last row, and `<key>_is_pad` is true there. Other keys return the value at the
    frame. Keys are those of the folder; images are uint8 […, 3, h, w]; `task` is the instruction as a string.
    """

    def __init__(
        self, folder: LeRobotFolder, delta_timestamps: Mapping[str, Sequence[float]], num_threads: int | None = None
    ) -> None:
        self.folder = folder
        self.num_threads = num_threads or min(os.cpu_count() or 1, 8)
        self.starts = np.concatenate([[0], np.cumsum([entry.length for entry in folder.entries])])
        own = ("episode_index", *folder.camera_keys)
        keys = [*(key for key in folder.files.columns if key not in own), *folder.camera_keys]
        if unknown := sorted(set(delta_timestamps) - set(keys)):
            raise InputError(f"delta_timestamps names {', '.join(unknown)}; {folder.name} has: {', '.join(keys)}")
        self.keys = keys
        self.deltas = {key: self._steps(key, deltas) for key, deltas in delta_timestamps.items()}

    def _steps(self, key: str, deltas: Sequence[float]) -> np.ndarray:
        """Convert deltas in seconds to whole steps."""
        fps, tolerance = self.folder.meta.fps, self.folder.tolerance_s
        seconds = np.asarray(deltas, np.float64).reshape(-1)
        steps = np.rint(seconds * fps)
        off = np.abs(seconds - steps / fps)
        if not len(seconds) or not (off <= tolerance).all():
            wrong = "is empty"
            if len(seconds):
                wrong = f"{seconds[off.argmax()]:g} s is not a multiple of 1/fps = {1 / fps:g} s"
            raise InputError(f"delta_timestamps of {key}: {wrong} (tolerance_s {tolerance:g})")
        return steps.astype(np.int64)

    def __len__(self) -> int:
        """Return the number of recorded frames."""
        return int(self.starts[-1])

    def __getitem__(self, index: int) -> dict[str, Tensor | str]:
        """Return the item of one frame."""
        return self._item(index, {})

    def _item(self, index: int, targets: dict[str, Tensor]) -> dict[str, Any]:
        """Return the item of one frame; images are written to `targets` if those are given."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"frame {index} of {len(self)}")
        index = int(index) % len(self)
        number = int(np.searchsorted(self.starts, index, "right")) - 1
        entry, row = self.folder.entries[number], index - int(self.starts[number])
        columns = self.folder.rows(entry)
        item: dict[str, Any] = {"episode_index": torch.tensor(entry.index), "frame_index": torch.tensor(row)}
        for key in self.keys:
            wanted = row + self.deltas.get(key, np.zeros(1, np.int64))
            inside = np.clip(wanted, 0, entry.length - 1)
            if key in self.folder.camera_keys:
                out = targets[key].numpy() if key in targets else None
                values = torch.from_numpy(self.folder.images(entry, key, inside, out=out))
            else:
                values = torch.from_numpy(columns[key][inside])
            item[key] = values if key in self.deltas else values[0]
            if key in self.deltas:
                item[f"{key}_is_pad"] = torch.from_numpy(wanted != inside)
        if self.folder.has_tasks:
            item["task"] = self.folder.task(entry, int(columns[TASK_INDEX][row]))
        return item

    def batch(self, indices: Sequence[int] | np.ndarray) -> dict[str, Tensor | list[str]]:
        """Return the items of several frames, stacked; several threads decode videos. `task` is a list."""
        # Images, which are most of the bytes, are decoded directly into the batch.
        images = {
            key: torch.empty(len(indices), len(self.deltas.get(key, [0])), 3, *size, dtype=torch.uint8)
            for key, size in self.folder.image_sizes.items()
        }
        targets = [{key: values[number] for key, values in images.items()} for number in range(len(indices))]
        with ThreadPoolExecutor(self.num_threads) as pool:
            items = list(pool.map(self._item, indices, targets))
        batch: dict[str, Any] = {}
        for key in items[0]:
            if key in images:
                batch[key] = images[key] if key in self.deltas else images[key][:, 0]
            else:
                values = [item[key] for item in items]
                batch[key] = values if key == "task" else torch.stack(values)
        return batch


def choose(
    meta: LeRobotMeta, episodes: Sequence[int] | None, cameras: Sequence[str] | None, skip_missing: bool
) -> tuple[list[EpisodeEntry], list[str]]:
    """Return the selected episodes and cameras; missing files raise InputError, or are left out (`skip_missing`)."""
    camera_keys = _choose_cameras(meta, cameras)
    listed = {entry.index: entry for entry in meta.episodes}
    if episodes is not None and (unknown := [index for index in episodes if index not in listed]):
        raise InputError(f"{meta.root}: has no episode {unknown[0]}; meta/ lists {_ranges(listed)}")
    entries = meta.episodes if episodes is None else [listed[index] for index in dict.fromkeys(episodes)]

    video_keys = [key for key in camera_keys if meta.features[key]["dtype"] == "video"]
    paths = {entry.index: {key: entry.videos[key].path for key in video_keys} for entry in entries}
    exists = {path: path.is_file() for videos in paths.values() for path in videos.values()}
    absent = [key for key in video_keys if not any(exists[videos[key]] for videos in paths.values())]
    lost: dict[int, Path] = {}  # the first missing file of each incomplete episode
    for entry in entries:
        videos = [path for key, path in paths[entry.index].items() if key not in absent and not exists[path]]
        if missing := videos if entry.data_path.is_file() else [entry.data_path]:
            lost[entry.index] = missing[0]
    complete = [entry for entry in entries if entry.index not in lost]
    if not any(entry.data_path.is_file() for entry in entries):
        raise InputError(f"{meta.root}: none of its tables is on disk; the first is {entries[0].data_path}")
    if not complete:
        raise InputError(f"{meta.root}: no episode has its table and all of its videos on disk; choose other cameras")
    if not absent and not lost:
        return list(entries), camera_keys

    faults = []
    if lost:
        faults.append(f"episodes {_ranges(lost)} (the first file: {next(iter(lost.values()))})")
    if absent:
        faults.append(f"videos of {', '.join(absent)} (the first file: {entries[0].videos[absent[0]].path})")
    what = f"{meta.root}: listed in meta/ but not on disk: {' and '.join(faults)}"
    was_selected = (bool(lost) and episodes is not None) or (bool(absent) and cameras is not None)
    if not skip_missing or was_selected:
        names = stream_names([key for key in camera_keys if key not in absent])
        advice = f"episodes={[entry.index for entry in complete]}" if len(complete) <= 20 else "episodes=[…]"
        advice += f" and cameras={list(names.values())}" if absent else ""
        raise InputError(
            f"{what}; select the files on disk with {advice}, or leave the others out with --dataset-options "
            "skip_missing=true (in Python skip_missing=True)"
        )
    log.warning("%s; left out (skip_missing)", what)
    return complete, [key for key in camera_keys if key not in absent]


def _choose_cameras(meta: LeRobotMeta, cameras: Sequence[str] | None) -> list[str]:
    """Return the keys of the selected cameras; depth maps are left out."""
    depth = [key for key in meta.keys("video", "image") if _is_depth(meta.features[key])]
    keys = [key for key in meta.keys("video", "image") if key not in depth]
    if cameras is None:
        if depth:
            log.warning("%s: depth maps are not read: %s", meta.root, ", ".join(depth))
        return keys
    by_name = {name: key for key, name in stream_names(keys).items()} | {key: key for key in keys}
    if unknown := [camera for camera in cameras if camera not in by_name]:
        names = ", ".join(stream_names(keys).values()) or "none"
        raise InputError(f"{meta.root}: has no camera {unknown[0]}; it has: {names}")
    return list(dict.fromkeys(by_name[camera] for camera in cameras))


def stream_names(keys: Sequence[str]) -> dict[str, str]:
    """Map keys of the folder to names of streams: the last part, or the whole key if that is not unique."""
    last = {key: key.rpartition(".")[2] for key in keys}
    names = list(last.values())
    return {
        key: name
        if names.count(name) == 1 and name != INSTRUCTION
        else key.removeprefix("observation.").replace(".", "_")
        for key, name in last.items()
    }


def _terminated(rows: Columns) -> np.ndarray:
    """Return which rows are terminal: `next.terminated`, or `next.done` without `next.truncated`."""
    if TERMINATED in rows:
        return rows[TERMINATED].astype(bool)
    if DONE not in rows:
        return np.zeros(len(rows[TIMESTAMP] if TIMESTAMP in rows else next(iter(rows.values()))), bool)
    done = rows[DONE].astype(bool)
    return done & ~rows[TRUNCATED].astype(bool) if TRUNCATED in rows else done


def _is_depth(feature: dict[str, Any]) -> bool:
    notes = {**(feature.get("info") or {}), **(feature.get("video_info") or {})}
    return bool(notes.get("is_depth_map") or notes.get("video.is_depth_map"))


def _image_size(meta: LeRobotMeta, key: str) -> tuple[int, int]:
    """Return height and width of a camera; channels are first or last."""
    shape = [int(size) for size in meta.features[key].get("shape") or []]
    if len(shape) != 3 or 3 not in (shape[0], shape[-1]):
        raise damaged(meta.root / "meta" / "info.json", "features", key, f"shape {shape} is not an image of 3 channels")
    return (shape[0], shape[1]) if shape[-1] == 3 else (shape[1], shape[2])


def _height_width(image_size: int | Sequence[int] | None) -> tuple[int, int] | None:
    if image_size is None:
        return None
    sizes = [image_size, image_size] if isinstance(image_size, int) else [int(size) for size in image_size]
    if len(sizes) != 2 or min(sizes) < 1:
        raise InputError(f"image_size is {image_size}; give one number, or height and width")
    return sizes[0], sizes[1]


def _ranges(numbers: Any) -> str:
    """Return numbers as text: 0–4, 7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("–".join(map(str, run)) for run in runs)
