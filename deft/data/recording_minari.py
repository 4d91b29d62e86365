"""Minari's layout for `Recording`: a folder for each episode with one Arrow table, and `metadata.json`.

`minari.load_dataset` and `deft.load_dataset` read it. A dataset in Minari's HDF5 storage becomes one of Arrow tables
when it is appended to: HDF5 can neither add an episode in one step nor survive a full disk.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from deft.data.datasets.dataset import Episode
from deft.data.recording import Content
from deft.data.spaces import Stream, action_stream, recorded_space, space_from_json, space_to_json, streams
from deft.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa

LAYOUT_VERSION = "0.5.4"  # of Minari, whose layout this is
DATA_FOLDER, METADATA_FILE, EPISODES_FILE = "data", "metadata.json", "main_data.hdf5"
FIRST_VERSION = "-v0"  # what a name without one becomes
EPISODE_FILE = "part-0.arrow"  # as Minari names it, in a folder for each episode
COMPRESSION = "zstd"  # without loss

_NAME = re.compile(r"[-\w]+")

log = logging.getLogger(__name__)


class MinariFiles:
    """The episodes of a Minari dataset; `details` are more entries of its metadata."""

    needs_final_observation = True

    def __init__(self, path: Path, details: Mapping[str, Any] | None = None) -> None:
        _import_pyarrow()
        self.dataset_id, self.datasets_path = place(path)
        self.metadata: dict[str, Any] = {
            "total_episodes": 0,
            "total_steps": 0,
            "data_format": "arrow",
            "jpeg_encoding": False,
            "dataset_id": self.dataset_id,
            "minari_version": LAYOUT_VERSION,
            "dataset_size": 0.0,  # in MB, as Minari counts it
        }
        if taken := sorted(self.metadata.keys() & (details or {}).keys()):
            raise InputError(f"metadata: {taken[0]} is an entry of Minari's own; choose another name")
        self.metadata |= details or {}
        self.observation: list[Stream] = []
        self._next = self.metadata

    @property
    def num_episodes(self) -> int:
        """Episodes that are in place."""
        return self.metadata["total_episodes"]

    @property
    def num_steps(self) -> int:
        """Transitions that are in place."""
        return self.metadata["total_steps"]

    def is_dataset(self, folder: Path) -> bool:
        """Whether the folder has Minari's metadata."""
        return (folder / DATA_FOLDER / METADATA_FILE).is_file()

    def open(self, folder: Path) -> Generator[dict[str, Content]]:
        """Read the metadata; episodes in HDF5 become Arrow tables."""
        file = folder / DATA_FOLDER / METADATA_FILE
        try:
            metadata: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            for name in ("total_episodes", "total_steps", "data_format", "observation_space", "action_space"):
                metadata[name]  # a KeyError where it is missing
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{file}: cannot be read as a dataset's metadata: {error!r}") from None
        if metadata["data_format"] not in ("arrow", "hdf5") or metadata.get("jpeg_encoding") is not False:
            stored = f"data_format {metadata['data_format']}, jpeg_encoding {metadata.get('jpeg_encoding')}"
            raise InputError(f"{folder}: has {stored}, which Deft only reads; record into another dataset")
        if metadata["data_format"] == "hdf5":
            yield from self._leave_hdf5(folder, metadata)
        else:
            self.metadata = {"dataset_size": 0.0, **metadata}

    def _leave_hdf5(self, folder: Path, metadata: dict[str, Any]) -> Generator[dict[str, Content]]:
        """The episodes of the one HDF5 file as Arrow tables; they count once all of them are in place."""
        from deft.data.datasets.hdf5 import open_hdf5
        from deft.data.datasets.minari import MinariDataset

        data, count = folder / DATA_FOLDER, metadata["total_episodes"]
        log.info("%s: rewriting its %d episodes from HDF5 to Arrow tables, which can be appended to", folder, count)
        self.metadata = {**metadata, "data_format": "arrow", "total_episodes": 0, "total_steps": 0, "dataset_size": 0.0}
        recorded = [space_from_json(metadata[name]) for name in ("observation_space", "action_space")]
        self.set_spaces(recorded[0], recorded[1])
        source = MinariDataset(data, folder.name, metadata, recorded[0], recorded[1])
        try:
            with open_hdf5(data / EPISODES_FILE) as file:
                for index in range(count):
                    group = file[f"episode_{index}"]
                    if len(group.get("infos", ())):
                        raise InputError(
                            f"{folder}: has infos, which Deft does not record; record into another dataset"
                        )
                    attributes = {name: np.asarray(value).tolist() for name, value in group.attrs.items()}
                    files = self.encode(source.episode(index), attributes)
                    if index + 1 < count:
                        del files[f"{DATA_FOLDER}/{METADATA_FILE}"]
                    yield files
                    self.advance()
            (data / EPISODES_FILE).unlink()
        finally:
            source.close()
            if self.num_episodes < count:
                for index in range(count):
                    shutil.rmtree(data / str(index), ignore_errors=True)

    def recorded_spaces(self) -> tuple[spaces.Space, spaces.Space] | None:
        """The spaces of the episodes in place; None where there are none."""
        if not self.num_episodes:
            return None
        return space_from_json(self.metadata["observation_space"]), space_from_json(self.metadata["action_space"])

    def set_spaces(self, observation_space: spaces.Space, action_space: spaces.Space, widen: bool = False) -> None:
        """Set what episodes consist of; with `widen` the spaces hold the episodes in place and more."""
        self.observation, self.action = streams(observation_space), action_stream(action_space)
        given = {
            "observation_space": space_to_json(recorded_space(observation_space)),
            "action_space": space_to_json(recorded_space(action_space)),
        }
        for name, space in given.items():
            if self.num_episodes and not widen and self.metadata[name] != space:
                raise InputError(f"its episodes have another {name}; record into another dataset")
        self.metadata = {**self.metadata, **given}

    def encode(self, episode: Episode, attributes: Mapping[str, Any]) -> dict[str, Content]:
        """The table and the metadata of the next episode, and with it the dataset's metadata."""
        index, length = self.num_episodes, len(episode)
        rows = episode.streams
        observations = {stream.path: stream.from_rows(rows[stream.name]) for stream in self.observation}
        table = _table(self.observation, observations, self.action, self.action.from_rows(episode.action), episode)
        files = _episode_files(index, table, {"id": index, "total_steps": length, **attributes})
        size = sum(len(content) for content in files.values()) / 1e6
        counted = {"total_episodes": index + 1, "total_steps": self.num_steps + length}
        self._next = {**self.metadata, **counted, "dataset_size": round(self.metadata["dataset_size"] + size, 1)}
        return {**files, f"{DATA_FOLDER}/{METADATA_FILE}": json.dumps(self._next).encode()}

    def advance(self) -> None:
        """Count the episode that was encoded last."""
        self.metadata = self._next


def _table(
    parts: list[Stream],
    observations: Mapping[tuple[str | int, ...], np.ndarray | list[str]],
    action: Stream,
    actions: np.ndarray | list[str],
    episode: Any,
) -> memoryview:
    """An Arrow file with one record batch of T + 1 rows; what has T rows is padded by one, as Minari does."""
    pa = _import_pyarrow()
    tree: dict[str, Any] = {}
    for part in parts:
        *above, name = ("", *map(str, part.path))
        node = tree
        for step in above:
            node = node.setdefault(step, {})
        node[name] = _column(observations[part.path], part.source)
    columns = {
        "observations": _nested(tree[""]),
        "actions": _column(actions, action.source, pad=1),
        "rewards": _column(episode.reward, None, pad=1),
        "terminations": _column(episode.terminated, None, pad=1),
        "truncations": _column(episode.truncated, None, pad=1),
    }
    batch = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=COMPRESSION)) as writer:
        writer.write_batch(batch)
    return memoryview(sink.getvalue())


def _nested(node: Any) -> pa.Array:
    """A tree of columns as one, with the names that Minari gives the parts of Dict and Tuple spaces."""
    pa = _import_pyarrow()
    if not isinstance(node, dict):
        return node
    return pa.StructArray.from_arrays([_nested(part) for part in node.values()], names=list(node))


def _column(values: np.ndarray | list[str], space: spaces.Space | None, pad: int = 0) -> pa.Array:
    """Values of a space as a column: texts, numbers (of a Discrete space or none), or flattened arrays."""
    pa = _import_pyarrow()
    if isinstance(values, list):
        return pa.array([*values, *[None] * pad], pa.string())
    values = np.concatenate([values, np.zeros((pad, *values.shape[1:]), values.dtype)]) if pad else values
    if space is None or isinstance(space, spaces.Discrete):
        return pa.array(values)
    flat = np.ascontiguousarray(values).reshape(len(values), -1)
    return pa.FixedSizeListArray.from_arrays(flat.reshape(-1), flat.shape[1])


def _episode_files(index: int, table: memoryview, metadata: dict[str, Any]) -> dict[str, Content]:
    folder = f"{DATA_FOLDER}/{index}"
    return {f"{folder}/{EPISODE_FILE}": table, f"{folder}/{METADATA_FILE}": json.dumps(metadata).encode()}


def _import_pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise InputError('recording needs pyarrow: pip install "deft[data]"') from None
    return pyarrow


def dataset_path(path: str | Path) -> Path:
    """The folder of a dataset: the path as given, with a version where it has none."""
    found = Path(path).expanduser()
    if _NAME.fullmatch(found.name) and not re.search(r"-v\d*$", found.name):
        return found.with_name(f"{found.name}{FIRST_VERSION}")
    return found


def place(path: Path) -> tuple[str, Path]:
    """The Minari id of a dataset that lies at `path`, and the folder (MINARI_DATASETS_PATH) that it is counted from.

    That folder is Minari's own where the path is below it, else `datasets` or the present folder, else the one above.
    """
    absolute = Path(os.path.abspath(path))
    if not re.fullmatch(r"[-\w]+-v\d+", absolute.name):
        stem = re.sub(r"[^-\w]+", "-", re.sub(r"-v\d*$", "", absolute.name)).strip("-") or "recording"
        raise InputError(
            f"--out {path}: a Minari dataset is named in letters, digits, - and _ and ends in its version: "
            f"write {path.parent / stem}-v0"
        )
    minari = os.environ.get("MINARI_DATASETS_PATH") or Path.home() / ".minari" / "datasets"
    for root in (Path(os.path.abspath(minari)), Path.cwd() / "datasets", Path.cwd()):
        if absolute.is_relative_to(root):
            parts = absolute.relative_to(root).parts
            if all(_NAME.fullmatch(part) for part in parts) and (len(parts) == 1 or len("/".join(parts[:-1])) > 1):
                return "/".join(parts), root
    return absolute.name, absolute.parent
