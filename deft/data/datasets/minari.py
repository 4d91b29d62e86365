"""Reads Minari datasets: HDF5, Arrow and Parquet storage, including what `deft collect` and `DatasetWriter` record.

`load_dataset` calls this. The package minari is only needed to download datasets.

`MinariFiles` writes the layout for `Recording`: a folder for each episode with one Arrow table, and `metadata.json`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium import spaces

from deft import trust
from deft.data.datasets.dataset import (
    Dataset,
    Episode,
    VectorDataset,
    check_array,
    check_rows,
    damaged,
    decode_image,
    import_optional,
    json_object,
    known_env,
    known_task,
    read_json,
)
from deft.data.datasets.hdf5 import column, is_hdf5, open_hdf5, read
from deft.data.recording import Content, EpisodeFiles, import_pyarrow
from deft.data.spaces import (
    Stream,
    action_stream,
    recorded_space,
    space_from_json,
    space_to_json,
    stream_space,
    streams,
)
from deft.errors import DeftError, InputError, shown
from deft.plain_data import whole_number

if TYPE_CHECKING:
    import pyarrow as pa

DATA_FOLDER, METADATA_FILE, EPISODES_FILE = "data", "metadata.json", "main_data.hdf5"
INTERVENTIONS, EXPERT_ACTIONS = "interventions", "expert_actions"  # columns that Deft adds
EPISODE_FILE = "part-0.arrow"  # Minari's name for the table, in a folder for each episode
_NUMBER: spaces.Space = spaces.Box(-np.inf, np.inf, (), np.float32)
_FLAG: spaces.Space = spaces.Box(np.array(False), np.array(True), dtype=np.bool_)
SCALARS = {
    field: Stream("", (), space, space)
    for field, space in (("rewards", _NUMBER), ("terminations", _FLAG), ("truncations", _FLAG))
}


def matches(path: Path) -> bool:
    """Return whether a folder, its data folder or its HDF5 file is a Minari dataset."""
    return _data_folder(path) is not None


def load(path: Path, name: str, actions: str = "executed") -> Dataset:
    """Load a dataset: into memory if observations are one vector, otherwise episodes are read on demand.

    `actions`: `executed`, or `expert` for those that an expert would have taken, if they are recorded.
    """
    if actions not in ("executed", "expert"):
        raise InputError(f"dataset_options: actions is {shown(actions)}; it must be 'executed' or 'expert'")
    folder = _data_folder(path)
    if folder is None:
        raise InputError(f"{path} is not a Minari dataset: {DATA_FOLDER}/{METADATA_FILE} is missing")
    dataset = MinariDataset(folder, name, actions == "expert")
    return VectorDataset.from_dataset(dataset) if dataset.is_vector else dataset


def download(dataset_id: str) -> Path:
    """Download a dataset from Minari's server into Minari's folder and return its path."""
    purpose = f"downloading {dataset_id}"
    minari = import_optional("minari", purpose)
    storage = import_optional("minari.storage.datasets_root_dir", purpose)
    try:
        minari.download_dataset(dataset_id)
    except ImportError as error:
        raise InputError(f"{dataset_id} cannot be downloaded: {error}") from error
    except Exception as error:  # Minari does not catch the errors of its server's client
        raise InputError(f"{dataset_id} cannot be downloaded: {type(error).__name__}: {error}") from error
    return Path(storage.get_dataset_path(dataset_id))


class MinariDataset(Dataset):
    """Episodes read from disk on demand."""

    def __init__(self, folder: Path, name: str, by_expert: bool = False) -> None:
        metadata = _read_metadata(folder)
        self._by_expert = by_expert
        name = metadata.get("dataset_id") or name
        observation_space = _space(metadata, folder, "observation_space")
        action_space = _space(metadata, folder, "action_space")
        try:
            self.streams, self._action = streams(observation_space), action_stream(action_space)
        except InputError as error:
            raise InputError(f"{folder}: {error}") from None
        storage = metadata.get("data_format", "hdf5")
        if storage not in ("hdf5", "arrow", "parquet"):
            raise InputError(f"{folder}: has the storage format {storage!r}; Deft reads hdf5, arrow and parquet")
        self._storage = _HDF5Storage(folder) if storage == "hdf5" else _ArrowStorage(folder, storage)
        try:
            lengths = [self._storage.length(index) for index in range(int(metadata["total_episodes"]))]
            spec = _env_spec(metadata, folder)
            observation, action = stream_space(self.streams), self._action.space
            references = _reference_returns(metadata)
            if references is None and isinstance(observation, spaces.Box) and not spec.get("kwargs"):
                # The recorded environment takes precedence over the dataset's name.
                task = known_env(spec["id"]) if spec.get("id") else known_task(name)
                references = None if task is None else (task.random_return, task.expert_return)
            super().__init__(name, observation, action, np.array(lengths), spec.get("id"), references)
            self.env_kwargs = spec.get("kwargs") or {}
        except BaseException:
            self._storage.close()
            raise

    def episode(self, index: int) -> Episode:
        """Return one episode, read from disk."""
        if not 0 <= index < self.num_episodes:
            raise IndexError(f"episode {index} of {self.num_episodes}")
        length = int(self.lengths[index])
        rows = {stream.name: self._rows(index, "observations", stream, length + 1) for stream in self.streams}
        episode = Episode(
            rows.get("", rows),
            self._rows(index, "actions", self._action, length),
            *(self._rows(index, field, stream, length) for field, stream in SCALARS.items()),
        )
        if self._storage.has(index, INTERVENTIONS):
            episode.intervention = self._rows(index, INTERVENTIONS, Stream("", (), _FLAG, _FLAG), length)
        if self._storage.has(index, EXPERT_ACTIONS):
            episode.expert_action = self._rows(index, EXPERT_ACTIONS, self._action, length)
        if self._by_expert:
            if episode.expert_action is None:
                file = self._storage.file(index)
                raise InputError(
                    f"{file}: has no expert's actions; leave --dataset-options actions=expert out, or use a dataset of "
                    "deft train dagger"
                )
            episode.action = episode.expert_action
        return episode

    def source_files(self) -> list[Path]:
        """Return the HDF5 file, or the tables of all episodes."""
        paths = sorted({self._storage.file(index) for index in range(self.num_episodes)})
        return [file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path])]

    def _content(self, index: int) -> list[bytes]:
        """Return the arrays of an episode as bytes, images in the layout of the file."""
        episode = self.episode(index)
        rows = [part.as_stored(episode.streams[part.name]) for part in self.streams]
        return [np.ascontiguousarray(array).tobytes() for array in (*rows, episode.action, episode.reward)]

    def close(self) -> None:
        """Close the file."""
        self._storage.close()

    def _rows(self, index: int, field: str, stream: Stream, count: int) -> np.ndarray:
        """Return one stream of an episode's field as rows of the stream's space, checked."""
        name, where, file = f"{field}/{stream.name}".rstrip("/"), f"episode_{index}", self._storage.file(index)
        values = self._storage.values(index, field, stream, count)
        try:
            with np.errstate(over="ignore"):  # values beyond float32 become infinite, which the check rejects
                rows = stream.to_rows(values)
        except (TypeError, ValueError) as error:
            raise damaged(file, where, name, str(error)) from None
        return check_array(rows, (count, *stream.shape), file, where, name)


# ---------------------------------------------------------------------------------------------------------- metadata


def _data_folder(path: Path) -> Path | None:
    """Return the folder with Minari's metadata, or None."""
    folders = (path / DATA_FOLDER, path) if path.is_dir() else (path.parent,) if path.name == EPISODES_FILE else ()
    for folder in folders:
        if (folder / METADATA_FILE).is_file():
            try:
                found = read_json(folder / METADATA_FILE)
            except InputError:  # `load` reports a damaged file
                found = {"minari_version": "?"} if (folder / EPISODES_FILE).exists() else {}
            if "minari_version" in found or "data_format" in found:
                return folder
        elif is_hdf5(folder / EPISODES_FILE):  # before Minari 0.5 the metadata was in this file
            return folder
    return None


def recorded_episodes(path: str | Path) -> int:
    """Return the number of episodes in a recording; 0 if there is none yet."""
    folder = dataset_path(path) / DATA_FOLDER
    return int(_read_metadata(folder)["total_episodes"]) if (folder / METADATA_FILE).is_file() else 0


def _read_metadata(folder: Path) -> dict[str, Any]:
    file = folder / METADATA_FILE
    if file.exists():
        metadata = read_json(file)
    else:
        file = folder / EPISODES_FILE
        with open_hdf5(file) as episodes:
            attributes = dict(episodes.attrs)
        metadata = {name: value.item() if hasattr(value, "item") else value for name, value in attributes.items()}
    if whole_number(metadata.get("total_episodes")) is None:
        raise damaged(file, "the top", "total_episodes", "is missing or not a whole number")
    for field in ("dataset_id", "data_format", "env_spec", "eval_env_spec", "env_module"):
        if not isinstance(metadata.get(field), str | None):
            raise damaged(file, "the top", field, f"{shown(metadata[field])} is not text")
    return metadata


def _space(metadata: dict[str, Any], folder: Path, field: str) -> spaces.Space:
    """Return a space of the metadata, or of the recorded environment if it is not there."""
    if field not in metadata:
        return _env_space(metadata, folder, field)
    file = folder / METADATA_FILE
    try:
        return space_from_json(metadata[field])
    except InputError as error:
        raise InputError(f"{file}: {field}: {error}") from None
    except ValueError as error:
        raise damaged(file, "the top", field, f"is not a space: {error}") from None


def _env_space(metadata: dict[str, Any], folder: Path, field: str) -> spaces.Space:
    """Return a space of the environment that the metadata names."""
    spec = _env_spec(metadata, folder)
    if not spec:
        raise damaged(folder / METADATA_FILE, "the top", field, "is missing, and no environment is named")
    module, _, env_id = spec["id"].rpartition(":")
    try:
        if module:
            trust.import_module(module, spec["id"], "env_spec", "--env")
        kwargs = spec.get("kwargs") or {}
        trust.check_env_kwargs(env_id, kwargs)
        env = gymnasium.make(env_id, **kwargs)
    except InputError:
        raise
    except Exception as error:  # any error of the environment's constructor
        raise InputError(
            f"{folder}: {field} is missing, and the environment {spec['id']}, which defines it, cannot be created: "
            f"{error}"
        ) from error
    space: spaces.Space = getattr(env, field)
    env.close()
    return space


def _env_spec(metadata: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the specification of the evaluation environment, in Gymnasium's form; empty if there is none."""
    text = metadata.get("eval_env_spec") or metadata.get("env_spec")
    if not text:
        return {}
    file = folder / METADATA_FILE
    spec = json_object(text, file, "the top", "env_spec")
    if not isinstance(spec.get("id"), str) or not isinstance(spec.get("kwargs"), dict | None):
        raise damaged(file, "the top", "env_spec", f"{shown(spec)} is not an object with an id and kwargs")
    if module := metadata.get("env_module"):  # recorded by Deft: the module that registers the id
        spec["id"] = f"{module}:{spec['id']}"
    trust.read_from(file, spec["id"], spec.get("kwargs"))
    return spec


def _reference_returns(metadata: dict[str, Any]) -> tuple[float, float] | None:
    scores = [metadata.get("ref_min_score"), metadata.get("ref_max_score")]
    if None in scores:
        return None
    are_numbers = all(isinstance(score, int | float) and abs(score) < sys.float_info.max for score in scores)
    if not are_numbers or scores[0] == scores[1]:
        raise InputError(f"dataset {shown(metadata.get('dataset_id'))}: {shown(scores)} are not two reference scores")
    return float(scores[0]), float(scores[1])  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------------- storage


class _HDF5Storage:
    """One HDF5 file with a group `episode_N` for each episode."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / EPISODES_FILE
        self._file = open_hdf5(self._path)
        self._latest: tuple[int, Any] = (-1, {})  # the fields of an episode are read one after another

    def file(self, index: int) -> Path:
        """Return the file of an episode."""
        return self._path

    def has(self, index: int, field: str) -> bool:
        """Return whether an episode has a field beyond those of every episode."""
        return field in self._group(index)

    def length(self, index: int) -> int:
        """Return the number of transitions of an episode."""
        return len(column(self._group(index), "rewards", self._path, f"episode_{index}"))

    def values(self, index: int, field: str, stream: Stream, count: int) -> Any:
        """Return the recorded values of one stream of a field."""
        where = f"episode_{index}"
        key = "/".join([field, *(step if isinstance(step, str) else f"_index_{step}" for step in stream.path)])
        values = read(column(self._group(index), key, self._path, where), self._path, where, key)
        if isinstance(stream.source, spaces.Text):
            return [text.decode("utf-8") if isinstance(text, bytes) else text for text in values]
        if _is_jpeg(values.ndim, stream):
            return _decode_images(values, stream, self._path, where, key)
        return values

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _group(self, index: int) -> Any:
        """Return the group of an episode; empty if it is missing, so that the error names the field."""
        if self._latest[0] != index:
            try:
                self._latest = index, self._file[f"episode_{index}"]
            except (KeyError, OSError, RuntimeError):
                self._latest = index, {}
        return self._latest[1]


class _ArrowStorage:
    """A folder for each episode, with one Arrow or Parquet table of T + 1 rows."""

    def __init__(self, folder: Path, storage: str) -> None:
        self._folder, self._storage = folder, storage
        self._latest: tuple[int, Any] | None = None  # the fields of an episode are read one after another

    def file(self, index: int) -> Path:
        """Return the folder of an episode."""
        return self._folder / str(index)

    def has(self, index: int, field: str) -> bool:
        """Return whether an episode has a field beyond those of every episode."""
        try:
            return field in self._table(index).column_names
        except (KeyError, ValueError, OSError):
            return False  # `values` reports a damaged file

    def length(self, index: int) -> int:
        """Return the number of transitions of an episode."""
        folder, where = self.file(index), f"episode_{index}"
        metadata = read_json(folder / METADATA_FILE, where, "total_steps")
        count = whole_number(metadata.get("total_steps"))
        if count is None:
            raise damaged(folder / METADATA_FILE, where, "total_steps", "is missing or not a whole number")
        check_rows(count, sum(part.stat().st_size for part in folder.iterdir()), folder, where, "total_steps")
        return count

    def values(self, index: int, field: str, stream: Stream, count: int) -> Any:
        """Return the first `count` recorded values of one stream of a field."""
        where, path = f"episode_{index}", self.file(index)
        try:
            array = self._table(index)[field].combine_chunks()
            for step in stream.path:
                array = array.field(str(step))
            array = array[:count]  # actions and rewards are padded by one row
            if isinstance(stream.source, spaces.Text):
                return array.to_pylist()
            if _is_jpeg(1 if str(array.type).endswith("binary") else 1 + len(stream.shape), stream):
                return _decode_images([value.as_py() for value in array], stream, path, where, field)
            flat = (array.flatten() if array.type.num_fields else array).to_numpy(zero_copy_only=False)
            return np.require(flat.reshape(len(array), *(stream.source.shape or ())), requirements="W")
        except (KeyError, ValueError, TypeError, AttributeError, MemoryError, OSError) as error:
            if isinstance(error, DeftError):
                raise
            raise damaged(path, where, f"{field}/{stream.name}".rstrip("/"), f"cannot be read: {error}") from None

    def close(self) -> None:
        """Release the table in memory."""
        self._latest = None

    def _table(self, index: int) -> pa.Table:
        if self._latest is None or self._latest[0] != index:
            pa = import_optional("pyarrow", f"reading {self._folder}")
            folder = self.file(index)
            if sorted(file.name for file in folder.glob("*.arrow")) == [EPISODE_FILE]:  # the usual case, and faster
                with pa.OSFile(str(folder / EPISODE_FILE)) as file:
                    table = pa.ipc.open_file(file).read_all()
            else:
                from pyarrow import dataset

                ignored = ["_", ".", METADATA_FILE]
                table = dataset.dataset(str(folder), format=self._storage, ignore_prefixes=ignored).to_table()
            table.validate(full=True)  # offsets in a damaged file can point anywhere in memory
            self._latest = index, table
        return self._latest[1]


def _is_jpeg(ndim: int, stream: Stream) -> bool:
    """Return whether values are JPEG files: one row of bytes for an image, where the space has rows of pixels."""
    space = stream.source
    is_image = isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) in (2, 3)
    return is_image and ndim < 1 + len(stream.shape)


def _decode_images(files: Any, stream: Stream, path: Path, where: str, field: str) -> np.ndarray:
    shape = stream.source.shape or ()
    images = []
    for row, content in enumerate(files):
        try:
            images.append(decode_image(content, (shape[0], shape[1])))
        except ValueError as error:
            raise damaged(path, where, field, f"row {row} {error}") from None
    return np.stack(images)


# ----------------------------------------------------------------------------------------------------------- writing


LAYOUT_VERSION = "0.5.4"  # the version of Minari that defines this layout
FIRST_VERSION = "-v0"  # added to names without a version
COMPRESSION = "zstd"  # lossless

_NAME = re.compile(r"[-\w]+")


class MinariFiles(EpisodeFiles):
    """The files of a Minari dataset; `details` are additional entries of its metadata."""

    needs_final_observation = True

    def __init__(self, path: Path, details: Mapping[str, Any] | None = None) -> None:
        import_pyarrow()
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
        """Set the spaces of the episodes; without `widen` they must be those of the episodes on disk."""
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
        pa, rows = import_pyarrow(), episode.streams
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
        if episode.intervention is not None:
            columns[INTERVENTIONS] = _column(episode.intervention, None, pad=1)
        if episode.expert_action is not None:
            expert = self.action.from_rows(episode.expert_action)
            columns[EXPERT_ACTIONS] = _column(expert, self.action.source, pad=1)
        batch = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=COMPRESSION)) as writer:
            writer.write_batch(batch)
        return memoryview(sink.getvalue())


def _nested(node: Any) -> pa.Array:
    """Return a tree of columns as one column, with Minari's names for the parts of Dict and Tuple spaces."""
    if not isinstance(node, dict):
        return node
    return import_pyarrow().StructArray.from_arrays([_nested(part) for part in node.values()], names=list(node))


def _column(values: np.ndarray | list[str], space: spaces.Space | None, pad: int = 0) -> pa.Array:
    """Return values of a space as a column: texts, numbers (of a Discrete space or none), or flattened arrays."""
    pa = import_pyarrow()
    if isinstance(values, list):
        return pa.array([*values, *[None] * pad], pa.string())
    values = np.concatenate([values, np.zeros((pad, *values.shape[1:]), values.dtype)]) if pad else values
    if space is None or isinstance(space, spaces.Discrete):
        return pa.array(values)
    flat = np.ascontiguousarray(values).reshape(len(values), -1)
    return pa.FixedSizeListArray.from_arrays(flat.reshape(-1), flat.shape[1])


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
