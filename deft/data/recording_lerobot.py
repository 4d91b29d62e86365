"""LeRobot's layout (v3.0) for `Recording`: tables in parquet, cameras as mp4 or PNG, tasks and statistics.

LeRobot and `deft.load_dataset` read it. A file of v3.0 holds several episodes: with each episode the last table and the
last video of each camera are replaced, until they have a certain size; the next episode then starts a new file.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from deft.data.datasets.dataset import Episode, import_optional, read_json
from deft.data.datasets.lerobot_files import read_table
from deft.data.datasets.video import import_av
from deft.data.recording import Content, EpisodeFiles, import_pyarrow
from deft.data.spaces import Stream, action_stream, streams
from deft.errors import InputError
from deft.schema import channels_last

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = "v3.0"
FILES_PER_CHUNK = 1000
FILE_BYTES, FILE_EPISODES = 8 * 2**20, 100  # a file of this size, or with this many episodes, is complete
FILE = "chunk-{chunk_index:03d}/file-{file_index:03d}"
DATA_PATH, EPISODES_PATH = f"data/{FILE}.parquet", f"meta/episodes/{FILE}.parquet"
VIDEO_PATH = f"videos/{{video_key}}/{FILE}.mp4"
INFO_PATH, STATS_PATH, TASKS_PATH = "meta/info.json", "meta/stats.json", "meta/tasks.parquet"
OWN_PATH = "meta/deft.json"  # metadata that LeRobot does not define: the environment and the user's entries
ATTRIBUTES = "deft/attributes"  # a column of JSON in the table of episodes
CODECS = ("libx264", "libsvtav1")  # the first one that this build of FFmpeg has is used
# Every second frame is a key frame, as in LeRobot's own recordings: random frames are fast to decode.
CODEC_OPTIONS = {"crf": "18", "g": "2", "bf": "0"}
QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
SAMPLED_FRAMES, SAMPLED_PIXELS = 100, 64  # for a camera's statistics: frames, and pixels on each side

FLOAT, BOOL, INT = ({"dtype": dtype, "shape": [1], "names": None} for dtype in ("float32", "bool", "int64"))
ROW_FEATURES: dict[str, dict[str, Any]] = {
    "next.reward": FLOAT,
    "next.done": BOOL,
    "next.terminated": BOOL,
    "next.truncated": BOOL,
    "timestamp": FLOAT,
    "frame_index": INT,
    "episode_index": INT,
    "index": INT,
    "task_index": INT,
}

Statistics = dict[str, dict[str, np.ndarray]]


@dataclass(frozen=True)
class _Video:
    """The last video file of a camera, to which episodes are appended."""

    number: int = 0
    content: bytes = b""
    num_frames: int = 0


@dataclass(frozen=True)
class _State:
    """The state of the dataset on disk."""

    num_episodes: int = 0
    num_frames: int = 0
    num_steps: int = 0
    tasks: dict[str, int] = field(default_factory=dict)
    statistics: Statistics = field(default_factory=dict)
    number: int = 0  # of the last table of rows, and of the last table of episodes
    rows: tuple[pa.Table, ...] = ()
    episodes: tuple[pa.Table, ...] = ()
    videos: dict[str, _Video] = field(default_factory=dict)


class LeRobotFiles(EpisodeFiles):
    """The files of a LeRobot dataset; `details` are the entries of `meta/deft.json`."""

    def __init__(
        self,
        fps: float,
        details: Mapping[str, Any] | None = None,
        robot_type: str | None = None,
        use_videos: bool = True,
    ) -> None:
        import_pyarrow()
        if not np.isfinite(fps) or fps <= 0:
            raise InputError(f"fps is {fps}; it must be greater than 0")
        self.fps, self.robot_type, self.use_videos = fps, robot_type, use_videos
        self.own = dict(details or {})
        self.features: dict[str, dict[str, Any]] = {}
        self._keys: dict[str, str] = {}  # stream → feature
        self._text: Stream | None = None
        self._state = self._next = _State()

    @property
    def num_episodes(self) -> int:
        """The number of episodes on disk."""
        return self._state.num_episodes

    @property
    def num_steps(self) -> int:
        """The number of actions on disk."""
        return self._state.num_steps

    def is_dataset(self, folder: Path) -> bool:
        """Return whether the folder has LeRobot's `meta/info.json`."""
        return (folder / INFO_PATH).is_file()

    def open(self, folder: Path) -> Iterator[dict[str, Content]]:
        """Read the dataset; yield a table without the rows of an episode that `meta/episodes` does not list."""
        if not (folder / OWN_PATH).is_file():
            raise InputError(f"{folder}: was not recorded by Deft ({OWN_PATH} is missing); record into another dataset")
        info, self.own = read_json(folder / INFO_PATH), read_json(folder / OWN_PATH)
        if info.get("fps") != self.fps:
            raise InputError(f"{folder}: has {info.get('fps')} fps, not {self.fps:g}; record into another dataset")
        self.features, self.robot_type = info["features"], info.get("robot_type")
        files = sorted((folder / "meta" / "episodes").glob("*/*.parquet"))
        episodes = [row for file in files for row in read_table(file, "the top", "episodes").to_pylist()]
        tasks = read_table(folder / TASKS_PATH, "the top", "task")
        last, videos = episodes[-1], [key for key in self.features if self.features[key]["dtype"] == "video"]
        numbers = {key: max(_number(row, f"videos/{key}") for row in episodes) for key in videos}
        number = _number(last, "data")
        self._state = _State(
            num_episodes=len(episodes),
            num_frames=last["dataset_to_index"],
            num_steps=sum(json.loads(row[ATTRIBUTES])["num_steps"] for row in episodes),
            tasks=dict(zip(tasks["task"].to_pylist(), tasks["task_index"].to_pylist(), strict=True)),
            statistics=self._merged(episodes),
            number=number + 1,
            videos={key: _Video(numbers[key] + 1) for key in videos},
        )
        # A killed process may have written the rows of one more episode, which meta/ does not list.
        (folder / _numbered(DATA_PATH, number + 1)).unlink(missing_ok=True)
        rows = read_table(folder / _numbered(DATA_PATH, number), "the top", "episode_index")
        listed = int(np.sum(rows["episode_index"].to_numpy() < len(episodes)))
        if listed < len(rows):
            yield {_numbered(DATA_PATH, number): _parquet([rows.slice(0, listed)])}

    def set_spaces(self, observation_space: spaces.Space, action_space: spaces.Space, widen: bool = False) -> None:
        """Set the spaces of the episodes; raise InputError if the dataset has other features."""
        self.observation, self.action = streams(observation_space), action_stream(action_space)
        if not isinstance(self.action.source, spaces.Box):
            kind = type(action_space).__name__
            raise InputError(f"LeRobot datasets hold continuous actions, not those of a {kind} space; use minari")
        texts = [stream for stream in self.observation if isinstance(stream.source, spaces.Text)]
        if len(texts) > 1:
            raise InputError(f"LeRobot has one text (the task) for each row; the observation has {len(texts)}")
        self._text = texts[0] if texts else None
        features: dict[str, dict[str, Any]] = {}
        self._keys = {}
        for stream in self.observation:
            if stream is not self._text:
                key, feature = self._feature(stream)
                if key in features:
                    raise InputError(f"two observations have the name {key} in LeRobot's layout; rename {stream.name}")
                features[key] = feature
                self._keys[stream.name] = key
        features["action"] = {"dtype": "float32", "shape": [math.prod(self.action.shape)], "names": None}
        features |= ROW_FEATURES
        if self.num_episodes and features != self.features:
            other = [key for key in {**features, **self.features} if features.get(key) != self.features.get(key)]
            raise InputError(f"its episodes have another {other[0]}; record into another dataset")
        self.features = features

    def _feature(self, stream: Stream) -> tuple[str, dict[str, Any]]:
        """Return the key of a stream and its entry in `info.json`."""
        name, shape, dtype = stream.name.replace("/", "_"), stream.shape, stream.space.dtype
        is_image = dtype == np.uint8 and len(shape) > 1
        if name.startswith("observation."):
            key = name
        elif is_image:
            key = f"observation.images.{name}" if name else "observation.image"
        else:
            key = f"observation.{name or 'state'}"
        if not is_image:
            return key, {
                "dtype": "float32" if dtype is None else dtype.name,
                "shape": [math.prod(stream.shape)],
                "names": None,
            }
        if len(shape) != 3 or 3 not in (shape[0], shape[-1]):
            raise InputError(f"{key} has shape {shape}; LeRobot stores images of 3 channels, H x W x 3 or 3 x H x W")
        height, width = shape[:2] if shape[-1] == 3 else shape[1:]
        feature = {"shape": [height, width, 3], "names": ["height", "width", "channels"]}
        if not self.use_videos:
            return key, {"dtype": "image", **feature}
        if height % 2 or width % 2:
            raise InputError(f"{key} has {height} x {width} pixels; videos need even numbers: set use_videos to false")
        notes = {
            "video.fps": _whole(self.fps), "video.height": height, "video.width": width, "video.channels": 3,
            "video.codec": {"libx264": "h264", "libsvtav1": "av1"}[_codec()], "video.pix_fmt": "yuv420p",
            "video.is_depth_map": False, "has_audio": False,
        }  # fmt: skip
        return key, {"dtype": "video", **feature, "info": notes}

    def encode(self, episode: Episode, attributes: Mapping[str, Any]) -> dict[str, Content]:
        """Return the tables and videos with the next episode, and the metadata that count it."""
        state, index = self._state, self._state.num_episodes
        columns, texts = self._columns(episode)
        length = len(texts)
        tasks = dict(state.tasks)
        for text in texts:
            tasks.setdefault(text, len(tasks))
        columns |= {
            "timestamp": (np.arange(length) / self.fps).astype(np.float32),
            "frame_index": np.arange(length),
            "episode_index": np.full(length, index),
            "index": state.num_frames + np.arange(length),
            "task_index": np.array([tasks[text] for text in texts]),
        }
        statistics = {key: _statistics(values) for key, values in columns.items()}
        files: dict[str, Content] = {}
        row: dict[str, Any] = {
            "episode_index": index,
            "tasks": list(dict.fromkeys(texts)),
            "length": length,
            "dataset_from_index": state.num_frames,
            "dataset_to_index": state.num_frames + length,
            ATTRIBUTES: json.dumps({"num_steps": len(episode), **attributes}),
        }
        videos = dict(state.videos)
        for key in [key for key in columns if self.features[key]["dtype"] == "video"]:
            before, video = self._video(videos.get(key, _Video()), columns.pop(key))
            videos[key] = video
            files[_numbered(VIDEO_PATH, video.number, video_key=key)] = video.content
            row |= _file_columns(f"videos/{key}", video.number)
            row[f"videos/{key}/from_timestamp"] = before / self.fps
            row[f"videos/{key}/to_timestamp"] = video.num_frames / self.fps

        table, number, rows, episodes = self._table(columns), state.number, state.rows, state.episodes
        if len(rows) >= FILE_EPISODES or sum(part.nbytes for part in rows) >= FILE_BYTES:
            number, rows, episodes = number + 1, (), ()
        row |= {**_file_columns("data", number), **_file_columns("meta/episodes", number)}
        row |= {f"stats/{key}/{name}": value.tolist() for key in statistics for name, value in statistics[key].items()}
        episode_table = import_pyarrow().table({name: [value] for name, value in row.items()})
        rows, episodes = (*rows, table), (*episodes, episode_table)
        files[_numbered(DATA_PATH, number)] = _parquet(rows)
        if tasks != state.tasks:
            files[TASKS_PATH] = _tasks_parquet(tasks)
        merged = {key: _merge(state.statistics.get(key), statistics[key]) for key in statistics}
        if not index:
            files[OWN_PATH] = _json(self.own)
        files[STATS_PATH] = _json({key: {name: v.tolist() for name, v in merged[key].items()} for key in merged})
        files[_numbered(EPISODES_PATH, number)] = _parquet([import_pyarrow().concat_tables(episodes)])
        self._next = _State(
            index + 1, state.num_frames + length, state.num_steps + len(episode),
            tasks, merged, number, rows, episodes, videos,
        )  # fmt: skip
        files[INFO_PATH] = _json(self._info(self._next))
        return files

    def advance(self) -> None:
        """Count the episode that was encoded last."""
        self._state = self._next

    def _columns(self, episode: Episode) -> tuple[dict[str, np.ndarray], list[str]]:
        """Return the rows of an episode by feature, and the task of each row.

        An observation after the last action has its own row, with a copy of the last action and no reward.
        """
        rows, columns = episode.streams, {}
        for name, key in self._keys.items():
            is_image = self.features[key]["dtype"] in ("video", "image")
            flat = rows[name] if is_image else rows[name].reshape(len(rows[name]), -1)
            columns[key] = channels_last(flat) if is_image and flat.shape[-1] != 3 else flat
        length = len(next(iter(rows.values())))
        extra = length - len(episode)
        action = episode.action.reshape(len(episode), -1).astype(np.float32)
        columns["action"] = np.concatenate([action, action[-1:].repeat(extra, 0)])
        columns["next.reward"] = np.pad(episode.reward.astype(np.float32), (0, extra))
        columns["next.done"] = np.arange(length) >= len(episode) - 1
        columns["next.terminated"] = np.pad(episode.terminated.astype(bool), (0, extra))
        columns["next.truncated"] = np.pad(episode.truncated.astype(bool), (0, extra))
        texts = [""] * length if self._text is None else self._text.from_rows(rows[self._text.name])
        return columns, list(texts)

    def _table(self, columns: Mapping[str, np.ndarray]) -> pa.Table:
        pa = import_pyarrow()
        arrays, fields = [], []
        for key, feature in self.features.items():
            if feature["dtype"] == "video":
                continue
            values = columns[key]
            if feature["dtype"] == "image":
                kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
                array = pa.array([{"bytes": _png(image), "path": None} for image in values], kind)
            elif feature["shape"] == [1]:
                array = pa.array(values.reshape(-1), pa.from_numpy_dtype(np.dtype(feature["dtype"])))
            else:
                flat = values.astype(feature["dtype"], copy=False).reshape(-1)
                array = pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
            arrays.append(array)
            fields.append(pa.field(key, array.type))
        return pa.Table.from_arrays(arrays, schema=pa.schema(fields))

    def _video(self, video: _Video, frames: np.ndarray) -> tuple[int, _Video]:
        """Append an episode to a camera's video; return the number of frames before it, and the video."""
        if len(video.content) >= FILE_BYTES:
            video = _Video(video.number + 1)
        fps = Fraction(self.fps).limit_denominator(1001)
        content = encode_video(frames, fps)
        if video.num_frames:
            content = join_videos(video.content, content, Fraction(video.num_frames) / fps)
        return video.num_frames, _Video(video.number, content, video.num_frames + len(frames))

    def _merged(self, episodes: Sequence[Mapping[str, Any]]) -> Statistics:
        """Return the statistics of all episodes, from those of each one."""
        merged: Statistics = {}
        for row in episodes:
            for key in self.features:
                prefix = f"stats/{key}/"
                found = {name.removeprefix(prefix): np.array(row[name]) for name in row if name.startswith(prefix)}
                merged[key] = _merge(merged.get(key), found)
        return merged

    def _info(self, state: _State) -> dict[str, Any]:
        has_videos = any(feature["dtype"] == "video" for feature in self.features.values())
        return {
            "codebase_version": VERSION,
            "robot_type": self.robot_type,
            "total_episodes": state.num_episodes,
            "total_frames": state.num_frames,
            "total_tasks": len(state.tasks),
            "chunks_size": FILES_PER_CHUNK,
            "data_files_size_in_mb": 100,
            "video_files_size_in_mb": 200,
            "fps": _whole(self.fps),
            "splits": {"train": f"0:{state.num_episodes}"},
            "data_path": DATA_PATH,
            "video_path": VIDEO_PATH if has_videos else None,
            "features": self.features,
        }


# ---------------------------------------------------------------------------------------------------------- statistics


def _statistics(values: np.ndarray) -> dict[str, np.ndarray]:
    """Return minimum, maximum, mean, deviation and quantiles of a column; for images by channel, in [0, 1]."""
    count, is_image = len(values), values.ndim == 4
    if is_image:  # [T, h, w, 3]
        values = values[np.linspace(0, count - 1, min(count, SAMPLED_FRAMES)).astype(int)]
        count = len(values)
        height, width = (max(1, size // SAMPLED_PIXELS) for size in values.shape[1:3])
        values = values[:, ::height, ::width].reshape(-1, 3) / np.float32(255)
    else:
        values = values.reshape(count, -1).astype(np.float64)
    found = {"min": values.min(0), "max": values.max(0), "mean": values.mean(0, np.float64), "std": values.std(0)}
    found |= dict(zip(QUANTILES, np.quantile(values, list(QUANTILES.values()), axis=0), strict=True))
    shape = (3, 1, 1) if is_image else (-1,)
    return {name: value.reshape(shape).astype(np.float64) for name, value in found.items()} | {
        "count": np.array([count])
    }


def _merge(one: dict[str, np.ndarray] | None, other: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the statistics of two parts together. Quantiles are averaged, an approximation that LeRobot uses too."""
    if one is None:
        return other
    counts = one["count"], other["count"]
    total = counts[0] + counts[1]

    def mean(name: str) -> np.ndarray:
        return (one[name] * counts[0] + other[name] * counts[1]) / total

    merged = {name: mean(name) for name in ("mean", *QUANTILES)}
    # σ² = Σ n (σ² + (μ − mean)²) / Σ n
    spread = [part["std"] ** 2 + (part["mean"] - merged["mean"]) ** 2 for part in (one, other)]
    merged["std"] = np.sqrt((spread[0] * counts[0] + spread[1] * counts[1]) / total)
    low, high = np.minimum(one["min"], other["min"]), np.maximum(one["max"], other["max"])
    return {"min": low, "max": high, **merged, "count": total}


# --------------------------------------------------------------------------------------------------------------- files


def encode_video(frames: np.ndarray, fps: Fraction) -> bytes:
    """Return an mp4 file of frames [T, h, w, 3]."""
    av = import_av()
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream(_codec(), rate=fps, options=CODEC_OPTIONS)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            image = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), "rgb24")
            container.mux(stream.encode(image))
        container.mux(stream.encode())
    return buffer.getvalue()


def join_videos(one: bytes, other: bytes, start: Fraction) -> bytes:
    """Return the concatenation of two mp4 files, without re-encoding; the second one begins at `start` seconds."""
    av = import_av()
    buffer = io.BytesIO()
    with (
        av.open(io.BytesIO(one)) as first,
        av.open(io.BytesIO(other)) as second,
        av.open(buffer, "w", format="mp4") as container,
    ):
        stream = container.add_stream_from_template(first.streams.video[0])
        for source, offset in ((first, Fraction(0)), (second, start)):
            for packet in source.demux(source.streams.video[0]):
                if packet.dts is None:  # the empty packet at the end
                    continue
                ticks = round(offset / packet.time_base)
                packet.pts, packet.dts = packet.pts + ticks, packet.dts + ticks
                packet.stream = stream
                container.mux(packet)
    return buffer.getvalue()


def _codec() -> str:
    available = import_av().codecs_available
    found = next((name for name in CODECS if name in available), None)
    if found is None:
        raise InputError(f"this build of FFmpeg has none of {', '.join(CODECS)}; set use_videos to false")
    return found


def _png(image: np.ndarray) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image)).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def _parquet(tables: Sequence[pa.Table]) -> memoryview:
    """Return a parquet file with a row group for each table."""
    sink = import_pyarrow().BufferOutputStream()
    with import_optional("pyarrow.parquet", "recording").ParquetWriter(sink, tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table)
    return memoryview(sink.getvalue())


def _tasks_parquet(tasks: Mapping[str, int]) -> memoryview:
    """Return the table of tasks in the form that pandas writes for LeRobot, with the text as the index."""
    pa = import_pyarrow()
    column = {"pandas_type": "unicode", "numpy_type": "object", "metadata": None}
    number = {"pandas_type": "int64", "numpy_type": "int64", "metadata": None}
    notes = {
        "index_columns": ["task"],
        "column_indexes": [{"name": None, "field_name": None, **column, "metadata": {"encoding": "UTF-8"}}],
        "columns": [
            {"name": "task_index", "field_name": "task_index", **number},
            {"name": "task", "field_name": "task", **column},
        ],
        "pandas_version": "2.2.0",
    }
    columns = {"task_index": pa.array(list(tasks.values()), pa.int64()), "task": pa.array(list(tasks), pa.string())}
    return _parquet([pa.table(columns).replace_schema_metadata({"pandas": json.dumps(notes)})])


def _numbered(pattern: str, number: int, **names: str) -> str:
    chunk, file = divmod(number, FILES_PER_CHUNK)
    return pattern.format(chunk_index=chunk, file_index=file, **names)


def _file_columns(prefix: str, number: int) -> dict[str, int]:
    chunk, file = divmod(number, FILES_PER_CHUNK)
    return {f"{prefix}/chunk_index": chunk, f"{prefix}/file_index": file}


def _number(row: Mapping[str, Any], prefix: str) -> int:
    return row[f"{prefix}/chunk_index"] * FILES_PER_CHUNK + row[f"{prefix}/file_index"]


def _json(content: Any) -> bytes:
    return json.dumps(content, indent=4).encode()


def _whole(number: float) -> float:
    return int(number) if number == int(number) else number
