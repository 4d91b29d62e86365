"""Minari's layout for `Recording`: a folder for each episode with one Arrow table, and `metadata.json`.

`minari.load_dataset` and `deft.load_dataset` read it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from deft.data.datasets.dataset import Episode, import_optional, read_json
from deft.data.datasets.minari import DATA_FOLDER, EPISODE_FILE, METADATA_FILE
from deft.data.recording import Content
from deft.data.spaces import Stream, action_stream, recorded_space, space_from_json, space_to_json, streams
from deft.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa

LAYOUT_VERSION = "0.5.4"  # the version of Minari that defines this layout
FIRST_VERSION = "-v0"  # added to names without a version
COMPRESSION = "zstd"  # lossless

_NAME = re.compile(r"[-\w]+")


class MinariFiles:
    """The files of a Minari dataset; `details` are additional entries of its metadata."""

    needs_final_observation = True

    def __init__(self, path: Path, details: Mapping[str, Any] | None = None) -> None:
        _import_pyarrow()
        self.dataset_id, self.datasets_path = minari_id(path)
        self.metadata: dict[str, Any] = {
            "total_episodes": 0,
            "total_steps": 0,
            "data_format": "arrow",
            "jpeg_encoding": False,
            "dataset_id": self.dataset_id,
            "minari_version": LAYOUT_VERSION,
            "dataset_size": 0.0,  # in MB, as Minari computes it
        }
        if taken := sorted(self.metadata.keys() & (details or {}).keys()):
            raise InputError(f"metadata: {taken[0]} is an entry that Minari defines; choose another name")
        self.metadata |= details or {}
        self.observation: list[Stream] = []
        self._next = self.metadata

    @property
    def num_episodes(self) -> int:
        """The number of episodes on disk."""
        return self.metadata["total_episodes"]

    @property
    def num_steps(self) -> int:
        """The number of transitions on disk."""
        return self.metadata["total_steps"]

    def is_dataset(self, folder: Path) -> bool:
        """Return whether the folder has Minari's metadata."""
        return (folder / DATA_FOLDER / METADATA_FILE).is_file()

    def open(self, folder: Path) -> Iterator[dict[str, Content]]:
        """Read the metadata; no files need to be written."""
        file = folder / DATA_FOLDER / METADATA_FILE
        metadata = read_json(file)
        needed = ("total_episodes", "total_steps", "data_format", "observation_space", "action_space")
        if missing := [name for name in needed if name not in metadata]:
            raise InputError(f"{file}: {missing[0]} is missing; record into another dataset")
        if metadata["data_format"] != "arrow" or metadata.get("jpeg_encoding") is not False:
            stored = f"data_format {metadata['data_format']}, jpeg_encoding {metadata.get('jpeg_encoding')}"
            raise InputError(f"{folder}: has {stored}, to which Deft cannot append; record into another dataset")
        self.metadata = {"dataset_size": 0.0, **metadata}
        return iter(())

    def recorded_spaces(self) -> tuple[spaces.Space, spaces.Space] | None:
        """Return the spaces of the episodes on disk; None if there are none."""
        if not self.num_episodes:
            return None
        return space_from_json(self.metadata["observation_space"]), space_from_json(self.metadata["action_space"])

    def set_spaces(self, observation_space: spaces.Space, action_space: spaces.Space, widen: bool = False) -> None:
        """Set the spaces of the episodes; with `widen` they may contain those of the episodes on disk and more."""
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
        """Return the files of the next episode: its table and metadata, and the dataset's metadata."""
        index, length = self.num_episodes, len(episode)
        own = {"id": index, "total_steps": length, **attributes}
        files: dict[str, Content] = {
            f"{DATA_FOLDER}/{index}/{EPISODE_FILE}": self._table(episode),
            f"{DATA_FOLDER}/{index}/{METADATA_FILE}": json.dumps(own).encode(),
        }
        size = sum(len(content) for content in files.values()) / 1e6
        self._next = {
            **self.metadata,
            "total_episodes": index + 1,
            "total_steps": self.num_steps + length,
            "dataset_size": round(self.metadata["dataset_size"] + size, 1),
        }
        return {**files, f"{DATA_FOLDER}/{METADATA_FILE}": json.dumps(self._next).encode()}

    def advance(self) -> None:
        """Count the episode that was encoded last."""
        self.metadata = self._next

    def _table(self, episode: Episode) -> memoryview:
        """Return an Arrow file with one record batch of T + 1 rows; columns of T rows are padded, as in Minari."""
        pa, rows = _import_pyarrow(), episode.streams
        tree: dict[str, Any] = {}
        for part in self.observation:
            *above, name = ("", *map(str, part.path))
            node = tree
            for step in above:
                node = node.setdefault(step, {})
            node[name] = _column(part.from_rows(rows[part.name]), part.source)
        columns = {
            "observations": _nested(tree[""]),
            "actions": _column(self.action.from_rows(episode.action), self.action.source, pad=1),
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
    """Return a tree of columns as one column, with Minari's names for the parts of Dict and Tuple spaces."""
    if not isinstance(node, dict):
        return node
    return _import_pyarrow().StructArray.from_arrays([_nested(part) for part in node.values()], names=list(node))


def _column(values: np.ndarray | list[str], space: spaces.Space | None, pad: int = 0) -> pa.Array:
    """Return values of a space as a column: texts, numbers (of a Discrete space or none), or flattened arrays."""
    pa = _import_pyarrow()
    if isinstance(values, list):
        return pa.array([*values, *[None] * pad], pa.string())
    values = np.concatenate([values, np.zeros((pad, *values.shape[1:]), values.dtype)]) if pad else values
    if space is None or isinstance(space, spaces.Discrete):
        return pa.array(values)
    flat = np.ascontiguousarray(values).reshape(len(values), -1)
    return pa.FixedSizeListArray.from_arrays(flat.reshape(-1), flat.shape[1])


def _import_pyarrow() -> Any:
    return import_optional("pyarrow", "recording")


def dataset_path(path: str | Path) -> Path:
    """Return the folder of a dataset: the given path, with a version if it has none."""
    found = Path(path).expanduser()
    if _NAME.fullmatch(found.name) and not re.search(r"-v\d*$", found.name):
        return found.with_name(f"{found.name}{FIRST_VERSION}")
    return found


def minari_id(path: Path) -> tuple[str, Path]:
    """Return the Minari id of the dataset at `path`, and the folder (MINARI_DATASETS_PATH) that contains it.

    The folder is Minari's default if the path is below it, else `datasets` or the current folder, else the parent.
    """
    absolute = Path(os.path.abspath(path))
    if not re.fullmatch(r"[-\w]+-v\d+", absolute.name):
        stem = re.sub(r"[^-\w]+", "-", re.sub(r"-v\d*$", "", absolute.name)).strip("-") or "recording"
        raise InputError(
            f"--out {path}: the name of a Minari dataset has letters, digits, - and _, and ends with a version: "
            f"write {path.parent / stem}-v0"
        )
    minari = os.environ.get("MINARI_DATASETS_PATH") or Path.home() / ".minari" / "datasets"
    for root in (Path(os.path.abspath(minari)), Path.cwd() / "datasets", Path.cwd()):
        if absolute.is_relative_to(root):
            parts = absolute.relative_to(root).parts
            if all(_NAME.fullmatch(part) for part in parts) and (len(parts) == 1 or len("/".join(parts[:-1])) > 1):
                return "/".join(parts), root
    return absolute.name, absolute.parent
