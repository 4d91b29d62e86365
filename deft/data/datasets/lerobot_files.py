"""The files of a LeRobot folder: the metadata in `meta/` of each version of the layout, and the parquet tables.

v2.0 and v2.1 have one parquet file for each episode and one video for each camera and episode; files of v3.0 have
several episodes. Both are described by `EpisodeEntry`, which `lerobot.py` uses.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from deft.data.datasets.dataset import check_finite, check_rows, damaged, import_optional, json_object, read_json
from deft.data.spaces import MAX_SIZE
from deft.errors import InputError, shown
from deft.plain_data import read_bounded, whole_number

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)
VERSIONS = ("v2.0", "v2.1", "v3.0")
TABLE_CACHE_BYTES = 256 * 2**20
Columns = dict[str, Any]  # key → array of one episode's rows; images in the table stay encoded


@dataclass(frozen=True)
class VideoPart:
    """The location of an episode's frames: its own file, or a shared file starting at a time."""

    path: Path
    from_timestamp: float | None


@dataclass(frozen=True)
class EpisodeEntry:
    """The metadata of one episode."""

    index: int
    length: int  # rows
    data_path: Path
    videos: dict[str, VideoPart]

    @property
    def where(self) -> str:
        """The episode's name in messages."""
        return f"episode {self.index}"


@dataclass(frozen=True)
class LeRobotMeta:
    """The metadata of a folder."""

    root: Path
    version: str
    fps: float
    features: dict[str, dict[str, Any]]
    tasks: dict[int, str]
    episodes: list[EpisodeEntry]

    def keys(self, *dtypes: str) -> list[str]:
        """Return the features of some dtypes (`video`, `image`)."""
        return [key for key, feature in self.features.items() if feature.get("dtype") in dtypes]


def read_meta(root: Path) -> LeRobotMeta:
    """Read the metadata of any version."""
    path = root / "meta" / "info.json"
    info = read_json(path)
    version = str(info.get("codebase_version"))
    if version not in VERSIONS:
        raise InputError(f"{path}: codebase_version is {version}; Deft reads {', '.join(VERSIONS)}")
    features = _read_features(path, info)
    if not _is_number(info.get("fps")) or not 0 < info["fps"] < math.inf:
        raise damaged(path, "the top", "fps", "is missing or not a positive number")
    if not isinstance(info.get("data_path"), str):
        raise damaged(path, "the top", "data_path", "is missing")
    video_keys = [key for key, feature in features.items() if feature.get("dtype") == "video"]
    if video_keys and not isinstance(info.get("video_path"), str):
        raise damaged(path, "the top", "video_path", "is missing, and there are video features")
    read = _read_v3 if version == "v3.0" else _read_v2
    tasks, episodes = read(root, info, video_keys)
    if not episodes:
        raise InputError(f"{root}: meta/ lists no episodes")
    total = _count(info, "total_episodes", path, "the top") if "total_episodes" in info else len(episodes)
    if total != len(episodes):
        log.warning("%s: total_episodes is %d, but meta/ lists %d episodes", path, total, len(episodes))
    numbers = [episode.index for episode in episodes]
    if len(set(numbers)) < len(numbers):
        twice = next(number for number, count in Counter(numbers).items() if count > 1)
        raise damaged(root / "meta", "the list of episodes", "episode_index", f"{twice} is listed twice")
    return LeRobotMeta(root, version, float(info["fps"]), features, tasks, sorted(episodes, key=lambda e: e.index))


def _read_features(path: Path, info: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the features of `info.json`, each with a dtype and the shape of a row."""
    features = info.get("features")
    if not isinstance(features, dict):
        raise damaged(path, "the top", "features", "is missing or not an object")
    for key, feature in features.items():
        where = f"feature {shown(key)}"
        if not key or not isinstance(feature, dict):
            raise damaged(path, where, "features", f"{shown(feature)} is not an object, or has no name")
        if not isinstance(feature.get("dtype"), str):
            raise damaged(path, where, "dtype", f"{shown(feature.get('dtype'))} is missing or not text")
        shape = feature.setdefault("shape", [])
        if not isinstance(shape, list) or None in map(whole_number, shape) or not 0 < math.prod(shape) <= MAX_SIZE:
            raise damaged(path, where, "shape", f"{shown(shape)} is not a list of sizes of 1 to {MAX_SIZE:,} numbers")
        for notes in ("info", "video_info"):
            if not isinstance(feature.get(notes), dict | None):
                raise damaged(path, where, notes, f"{shown(feature[notes])} is not an object")
    return features


def _read_v2(root: Path, info: dict[str, Any], video_keys: list[str]) -> tuple[dict[int, str], list[EpisodeEntry]]:
    tasks_path, episodes_path = root / "meta" / "tasks.jsonl", root / "meta" / "episodes.jsonl"
    tasks = {}
    for where, line in _read_lines(tasks_path):
        tasks[_count(line, "task_index", tasks_path, where)] = _text(line.get("task"), tasks_path, where)
    chunk_size = _count({"chunks_size": 1000, **info}, "chunks_size", root / "meta" / "info.json", "the top")
    if chunk_size == 0:
        raise damaged(root / "meta" / "info.json", "the top", "chunks_size", "is 0; it must be at least 1")
    episodes = []
    for where, line in _read_lines(episodes_path):
        index = _count(line, "episode_index", episodes_path, where)
        names = {"episode_index": index, "episode_chunk": index // chunk_size}
        videos = {key: VideoPart(_path(root, info, "video_path", video_key=key, **names), None) for key in video_keys}
        length = _count(line, "length", episodes_path, where)
        episodes.append(EpisodeEntry(index, length, _path(root, info, "data_path", **names), videos))
    return tasks, episodes


def _read_v3(root: Path, info: dict[str, Any], video_keys: list[str]) -> tuple[dict[int, str], list[EpisodeEntry]]:
    tasks_path = root / "meta" / "tasks.parquet"
    table = read_table(tasks_path, "the top", "task")
    # pandas wrote the text as the index, which may have any name.
    texts = next((name for name in table.column_names if str(table.schema.field(name).type).endswith("string")), None)
    if texts is None or "task_index" not in table.column_names:
        raise damaged(tasks_path, "the top", "task" if texts is None else "task_index", "is missing")
    tasks = {}
    for number, row in enumerate(table.select(["task_index", texts]).to_pylist()):
        where = f"row {number}"
        tasks[_count(row, "task_index", tasks_path, where)] = _text(row[texts], tasks_path, where)
    files = sorted((root / "meta" / "episodes").glob("*/*.parquet"))
    if not files:
        raise InputError(f"{root}: meta/episodes holds no parquet files; the folder is incomplete")
    episodes = []
    for path in files:
        fields = ("episode_index", "length", "data/chunk_index", "data/file_index")
        parts = ("chunk_index", "file_index", "from_timestamp")
        columns = [*fields, *(f"videos/{key}/{part}" for key in video_keys for part in parts)]
        for number, row in enumerate(read_table(path, "the top", "episode_index", columns).to_pylist()):
            where = f"row {number}"
            index, length, chunk, file = (_count(row, name, path, where) for name in fields)
            videos = {}
            for key in video_keys:
                start = row[f"videos/{key}/from_timestamp"]
                if not _is_number(start):
                    raise damaged(path, where, f"videos/{key}/from_timestamp", f"{shown(start)} is not a time")
                names = {part: _count(row, f"videos/{key}/{part}", path, where) for part in parts[:2]}
                videos[key] = VideoPart(_path(root, info, "video_path", video_key=key, **names), float(start))
            data_path = _path(root, info, "data_path", chunk_index=chunk, file_index=file)
            episodes.append(EpisodeEntry(index, length, data_path, videos))
    return tasks, episodes


def read_range(meta: LeRobotMeta, key: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the smallest and largest values of a feature in the folder's statistics; None if it has none."""
    path = meta.root / "meta" / ("episodes_stats.jsonl" if meta.version == "v2.1" else "stats.json")
    if not path.is_file():
        return None
    if meta.version == "v2.1":
        lines = [line for _, line in _read_lines(path)]
        found = [_object(_object(line.get("stats"), path, "stats").get(key), path, key) for line in lines]
    else:
        found = [_object(read_json(path).get(key), path, key)]
    found = [statistics for statistics in found if "min" in statistics and "max" in statistics]
    if not found:
        return None
    try:
        low, high = np.array([[np.ravel(one[bound]) for one in found] for bound in ("min", "max")], np.float64)
    except (TypeError, ValueError, OverflowError):
        raise damaged(path, f"statistics of {key}", "min and max", "are not lists of numbers of one length") from None
    if (low > high).any():
        raise damaged(path, f"statistics of {key}", "min", "is larger than max")
    return low.min(0), high.max(0)


class DataFiles:
    """Columns of the parquet files as arrays; those used last stay in memory, within a budget."""

    def __init__(self, meta: LeRobotMeta, columns: Sequence[str], budget_bytes: int = TABLE_CACHE_BYTES) -> None:
        self.meta = meta
        self.columns = list(columns)
        self.budget_bytes = budget_bytes
        self._tables: OrderedDict[Path, Columns] = OrderedDict()
        self._lock = Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the settings only: another process reads the tables itself."""
        return DataFiles, (self.meta, self.columns, self.budget_bytes)

    def rows(self, entry: EpisodeEntry) -> Columns:
        """Return the rows of one episode: views of the file's arrays."""
        with self._lock:
            table = self._tables.get(entry.data_path)
            if table is None:
                table = self._tables[entry.data_path] = self._read(entry)
                while len(self._tables) > 1 and self._num_bytes() > self.budget_bytes:
                    self._tables.popitem(last=False)
            self._tables.move_to_end(entry.data_path)
        rows = slice(None)
        if self.meta.version == "v3.0":
            numbers = np.flatnonzero(table["episode_index"] == entry.index)
            if len(numbers) and numbers[-1] - numbers[0] + 1 != len(numbers):
                raise damaged(entry.data_path, entry.where, "episode_index", "its rows are not consecutive")
            rows = slice(int(numbers[0]), int(numbers[-1]) + 1) if len(numbers) else slice(0, 0)
        found = {key: values[rows] for key, values in table.items()}
        for key, values in found.items():
            if len(values) != entry.length:
                raise damaged(entry.data_path, entry.where, key, f"{len(values)} rows; meta/ declares {entry.length}")
        return found

    def _num_bytes(self) -> int:
        return sum(values.nbytes for table in self._tables.values() for values in table.values())

    def _read(self, entry: EpisodeEntry) -> Columns:
        table = read_table(entry.data_path, entry.where, "the table", self.columns)
        return {key: self._array(table[key].combine_chunks(), key, entry) for key in self.columns}

    def _array(self, column: pa.Array, key: str, entry: EpisodeEntry) -> Any:
        """Return a column as an array [rows, …] of float32, int64 or bool; images stay encoded."""
        import pyarrow as pa

        feature = self.meta.features.get(key, {})
        if feature.get("dtype") == "image":
            return column
        num_rows, values = len(column), column
        while pa.types.is_list(values.type) or pa.types.is_fixed_size_list(values.type):
            values = values.flatten()
        if values.null_count or column.null_count:
            raise damaged(entry.data_path, entry.where, key, "has empty values")
        array = values.to_numpy(zero_copy_only=False)
        if array.dtype.kind not in "fiub":
            raise damaged(entry.data_path, entry.where, key, f"holds {values.type}, not numbers")
        shape = [int(size) for size in feature.get("shape", [])]
        shape = [] if shape == [1] else shape
        if array.size != num_rows * int(np.prod(shape)):
            expected = f"{num_rows} rows of shape {shape}"
            raise damaged(entry.data_path, entry.where, key, f"{array.size} values; meta/ declares {expected}")
        kind = "f" if str(feature.get("dtype")).startswith("float") else array.dtype.kind
        kinds = {"f": np.float64 if key == "timestamp" else np.float32, "b": np.bool_}
        array = array.reshape(num_rows, *shape).astype(kinds.get(kind, np.int64), copy=False)
        return check_finite(array, entry.data_path, entry.where, key)


def read_table(path: Path, where: str, field: str, columns: Iterable[str] | None = None) -> pa.Table:
    """Return a parquet file, or some of its columns."""
    pa = import_optional("pyarrow", f"reading {path.name}")
    parquet = import_optional("pyarrow.parquet", f"reading {path.name}")
    if not path.is_file():
        raise damaged(path, where, field, "the file is missing")
    try:
        with parquet.ParquetFile(path) as file:
            wanted = None if columns is None else list(columns)
            names = file.schema_arrow.names  # raises an error if they are not UTF-8
            for name in wanted or ():
                if name not in names:
                    raise damaged(path, where, name, "the column is missing")
            check_rows(file.metadata.num_rows, path.stat().st_size, path, where, field)
            table = file.read(columns=wanted, use_threads=False)
            table.validate(full=True)  # rejects text that is not UTF-8 and offsets outside the table
            return table
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise damaged(path, where, field, f"cannot be read as parquet{_pointer(path)}: {error}") from None


def _pointer(path: Path) -> str:
    """Return a hint if the file is a Git LFS pointer."""
    with open(path, "rb") as file:
        return " (it is a Git LFS pointer: `git lfs pull` gets the file)" if file.read(11) == b"version htt" else ""


def _path(root: Path, info: dict[str, Any], pattern: str, **names: Any) -> Path:
    """Return a path for one of the patterns of `info.json`, inside the folder."""
    path = root / "meta" / "info.json"
    if re.search(r"\{[^}]*:[^}]*\d{3}", info[pattern]):  # {episode_index:2000000000d} has two billion
        raise damaged(path, "the top", pattern, f"{info[pattern]!r} has a width of more than two digits")
    if re.search(r"\{[^}:]*[.\[!]", info[pattern]):
        raise damaged(path, "the top", pattern, f"{info[pattern]!r} uses more than a number or a name")
    try:
        found = Path(info[pattern].format(**names))
    except (KeyError, IndexError, ValueError) as error:
        raise damaged(path, "the top", pattern, f"{info[pattern]!r} is not a valid pattern: {error}") from None
    if found.is_absolute() or ".." in found.parts:
        raise damaged(path, "the top", pattern, f"{str(found)!r} leads out of the folder, where Deft does not read")
    return root / found


def _read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a jsonl file, each with the name of its line."""
    try:
        lines = read_bounded(path).splitlines()
    except FileNotFoundError:
        raise damaged(path, "the top", "JSON", "the file is missing") from None
    except (OSError, UnicodeDecodeError) as error:
        raise damaged(path, "the top", "JSON", f"cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield f"line {number}", json_object(line, path, f"line {number}")


def _count(row: dict[str, Any], name: str, path: Path, where: str) -> int:
    """Return a count or an index of a row."""
    count = whole_number(row.get(name))
    if count is None:
        given = row.get(name)
        raise damaged(
            path, where, name, "is missing" if given is None else f"{shown(given)} is not a whole number of 0 or more"
        )
    return count


def _text(value: Any, path: Path, where: str) -> str:
    if not isinstance(value, str):
        raise damaged(path, where, "task", f"{shown(value)} is missing or not text")
    return value


def _object(value: Any, path: Path, where: str) -> dict[str, Any]:
    if not isinstance(value, dict | None):
        raise damaged(path, where, "statistics", f"{shown(value)} is not an object")
    return value or {}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
