"""Reads Minari datasets: HDF5, Arrow and Parquet storage, including what `deft collect` and `DatasetWriter` record.

`load_dataset` calls this. The package minari is only needed to download datasets.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium import spaces

from deft import trust
from deft.config.validation import shown
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
from deft.data.spaces import Stream, action_stream, space_from_json, stream_space, streams
from deft.errors import DeftError, InputError
from deft.plain_data import whole_number

if TYPE_CHECKING:
    import pyarrow

DATA_FOLDER, METADATA_FILE, EPISODES_FILE = "data", "metadata.json", "main_data.hdf5"
EPISODE_FILE = "part-0.arrow"  # Minari's name for the table, in a folder for each episode


def matches(path: Path) -> bool:
    """Return whether a folder, its data folder or its HDF5 file is a Minari dataset."""
    return _data_folder(path) is not None


def load(path: Path, name: str) -> Dataset:
    """Load a dataset: into memory if observations are one vector, otherwise episodes are read on demand."""
    folder = _data_folder(path)
    if folder is None:
        raise InputError(f"{path} is not a Minari dataset: {DATA_FOLDER}/{METADATA_FILE} is missing")
    metadata = _read_metadata(folder)
    observation_space, action_space = _spaces(metadata, folder)
    dataset = MinariDataset(folder, metadata.get("dataset_id") or name, metadata, observation_space, action_space)
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

    def __init__(
        self,
        folder: Path,
        name: str,
        metadata: dict[str, Any],
        observation_space: spaces.Space,
        action_space: spaces.Space,
    ) -> None:
        try:
            self.streams, self._action = streams(observation_space), action_stream(action_space)
        except InputError as error:
            raise InputError(f"{folder}: {error}") from None
        self._storage: _HDF5Storage | _ArrowStorage
        storage = metadata.get("data_format", "hdf5")
        if storage == "hdf5":
            self._storage = _HDF5Storage(folder)
        elif storage in ("arrow", "parquet"):
            self._storage = _ArrowStorage(folder, storage)
        else:
            raise InputError(f"{folder}: has the storage format {storage!r}; Deft reads hdf5, arrow and parquet")
        try:
            count = int(metadata["total_episodes"])
            lengths = np.array([self._storage.length(index) for index in range(count)], np.int64)
            spec = _env_spec(metadata, folder)
            observation, action = stream_space(self.streams), self._action.space
            references = _reference_returns(metadata)
            if references is None and isinstance(observation, spaces.Box) and not spec.get("kwargs"):
                # The recorded environment takes precedence over the dataset's name.
                task = known_env(spec["id"]) if spec.get("id") else known_task(name)
                references = None if task is None else (task.random_return, task.expert_return)
            super().__init__(name, observation, action, lengths, spec.get("id"), references)
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
        return Episode(
            rows.get("", rows),
            self._rows(index, "actions", self._action, length),
            self._scalars(index, "rewards", np.float32, length),
            self._scalars(index, "terminations", np.bool_, length),
            self._scalars(index, "truncations", np.bool_, length),
        )

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
        """Return one stream of an episode as rows of the stream's space, checked."""
        name, where, file = f"{field}/{stream.name}".rstrip("/"), f"episode_{index}", self._storage.file(index)
        values = self._storage.values(index, field, stream, count)
        try:
            rows = stream.to_rows(values)
        except (TypeError, ValueError) as error:
            raise damaged(file, where, name, str(error)) from None
        return check_array(rows, (count, *stream.shape), file, where, name)

    def _scalars(self, index: int, field: str, dtype: type, count: int) -> np.ndarray:
        values = np.asarray(self._storage.values(index, field, None, count))
        with np.errstate(over="ignore"):  # values beyond float32 become infinite, which the check rejects
            values = values.astype(dtype, copy=False)
        return check_array(values, (count,), self._storage.file(index), f"episode_{index}", field)


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


def _spaces(metadata: dict[str, Any], folder: Path) -> tuple[spaces.Space, spaces.Space]:
    """Return observation and action space: those in the metadata, or those of the recorded environment."""
    file, found = folder / METADATA_FILE, []
    for field in ("observation_space", "action_space"):
        try:
            found.append(space_from_json(metadata[field]) if field in metadata else _env_space(metadata, folder, field))
        except DeftError as error:
            raise error if field not in metadata else InputError(f"{file}: {field}: {error}") from None
        except ValueError as error:
            raise damaged(file, "the top", field, f"is not a space: {error}") from None
    return found[0], found[1]


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

    def length(self, index: int) -> int:
        """Return the number of transitions of an episode."""
        return len(column(self._group(index), "rewards", self._path, f"episode_{index}"))

    def values(self, index: int, field: str, stream: Stream | None, count: int) -> Any:
        """Return the recorded values of a field, or of one stream of it."""
        where = f"episode_{index}"
        steps = () if stream is None else stream.path
        key = "/".join([field, *(step if isinstance(step, str) else f"_index_{step}" for step in steps)])
        values = read(column(self._group(index), key, self._path, where), self._path, where, key)
        if stream is not None and isinstance(stream.source, spaces.Text):
            return [text.decode("utf-8") if isinstance(text, bytes) else text for text in values]
        if stream is not None and _is_jpeg(values.ndim, stream):
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

    def length(self, index: int) -> int:
        """Return the number of transitions of an episode."""
        folder, where = self.file(index), f"episode_{index}"
        metadata = read_json(folder / METADATA_FILE, where, "total_steps")
        count = whole_number(metadata.get("total_steps"))
        if count is None:
            raise damaged(folder / METADATA_FILE, where, "total_steps", "is missing or not a whole number")
        check_rows(count, sum(part.stat().st_size for part in folder.iterdir()), folder, where, "total_steps")
        return count

    def values(self, index: int, field: str, stream: Stream | None, count: int) -> Any:
        """Return the first `count` recorded values of a field, or of one stream of it."""
        where, path = f"episode_{index}", self.file(index)
        try:
            array = self._table(index)[field].combine_chunks()
            for step in () if stream is None else stream.path:
                array = array.field(str(step))
            array = array[:count]  # actions and rewards are padded by one row
            if stream is not None and isinstance(stream.source, spaces.Text):
                return array.to_pylist()
            if stream is None or isinstance(stream.source, spaces.Discrete):
                return array.to_numpy(zero_copy_only=False)
            if _is_jpeg(1 if str(array.type).endswith("binary") else 1 + len(stream.shape), stream):
                return _decode_images([value.as_py() for value in array], stream, path, where, field)
            flat = array.flatten().to_numpy(zero_copy_only=False)
            return np.require(flat.reshape(len(array), *(stream.source.shape or ())), requirements="W")
        except (KeyError, ValueError, TypeError, AttributeError, MemoryError, OSError) as error:
            if isinstance(error, DeftError):
                raise
            name = field if stream is None or not stream.name else f"{field}/{stream.name}"
            raise damaged(path, where, name, f"cannot be read: {error}") from None

    def close(self) -> None:
        """Release the table in memory."""
        self._latest = None

    def _table(self, index: int) -> pyarrow.Table:
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
