"""Reads Minari datasets: HDF5, Arrow and Parquet storage, and the recordings of `deft collect`.

Called by `load_dataset`. Minari itself is needed for nothing but the download of a remote dataset.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from gymnasium import spaces

from deft import trust
from deft.config.validation import shown
from deft.data.datasets.dataset import (
    Dataset,
    Episode,
    VectorDataset,
    check_finite,
    check_rows,
    damaged,
    decode_image,
    known_env,
    known_task,
    write_episode,
)
from deft.data.datasets.hdf5 import column, is_hdf5, one_line, open_hdf5, read
from deft.data.recording_minari import DATA_FOLDER, EPISODE_FILE, EPISODES_FILE, METADATA_FILE
from deft.data.replay import TransitionTable
from deft.data.spaces import Stream, action_stream, space_from_json, stream_space, streams
from deft.errors import DeftError, InputError
from deft.plain_data import parse_bounded, read_bounded, whole_number

if TYPE_CHECKING:
    import pyarrow

NEEDS_PYARROW = 'reading {} needs pyarrow: pip install "deft[data]"'


def matches(path: Path) -> bool:
    """Whether a folder (or the data folder or HDF5 file in it) holds a Minari dataset."""
    return _data_folder(path) is not None


def load(path: Path, name: str) -> Dataset:
    """The dataset: in memory where observations are one vector, else read from disk episode by episode."""
    folder = _data_folder(path)
    if folder is None:
        raise InputError(f"{path} is no Minari dataset: there is no {DATA_FOLDER}/{METADATA_FILE}")
    metadata = _read_metadata(folder)
    name = metadata.get("dataset_id") or name
    observation_space, action_space = _spaces(metadata, folder)
    dataset = MinariDataset(folder, name, metadata, observation_space, action_space)
    if not dataset.is_vector:
        return dataset
    try:
        return _in_memory(dataset)
    finally:
        dataset.close()


def download(dataset_id: str) -> Path:
    """Fetch a dataset from Minari's server into Minari's folder, and say where it is."""
    try:
        import minari
        from minari.storage.datasets_root_dir import get_dataset_path
    except ImportError:
        raise InputError(f'downloading {dataset_id} needs Minari: pip install "deft[data]"') from None
    try:
        minari.download_dataset(dataset_id)
    except ImportError as error:
        raise InputError(f"{dataset_id} cannot be downloaded: {one_line(error)}") from error
    except Exception as error:  # Minari lets through whatever its server's client raises
        raise InputError(f"{dataset_id} cannot be downloaded: {type(error).__name__}: {one_line(error)}") from error
    return Path(get_dataset_path(dataset_id))


class MinariDataset(Dataset):
    """Episodes read from disk when they are asked for."""

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
        self._source: _Source
        storage = metadata.get("data_format", "hdf5")
        if storage == "hdf5":
            self._source = _HDF5Source(folder)
        elif storage in ("arrow", "parquet"):
            self._source = _ArrowSource(folder, storage)
        else:
            raise InputError(f"{folder}: has the storage format {storage!r}; Deft reads hdf5, arrow and parquet")
        try:
            count = int(metadata["total_episodes"])
            lengths = np.array([self._source.length(index) for index in range(count)], np.int64)
            spec = _env_spec(metadata, folder)
            observation, action = stream_space(self.streams), self._action.space
            references = _reference_returns(metadata)
            if references is None and isinstance(observation, spaces.Box) and not spec.get("kwargs"):
                # What the recording says of its environment counts for more than its name.
                task = known_env(spec["id"]) if spec.get("id") else known_task(name)
                references = None if task is None else (task.random_return, task.expert_return)
            super().__init__(name, observation, action, lengths, spec.get("id"), references)
            self.env_kwargs = spec.get("kwargs") or {}
        except BaseException:
            self._source.close()
            raise

    @property
    def is_vector(self) -> bool:
        """Whether the episodes fit a table: one vector of floats as observation, a vector or a number as action."""
        space = self.observation_space
        is_flat = isinstance(space, spaces.Box) and len(space.shape) == 1 and space.dtype == np.float32
        action = self.action_space
        return is_flat and (
            isinstance(action, spaces.Discrete) or (isinstance(action, spaces.Box) and len(action.shape) == 1)
        )

    def episode(self, index: int) -> Episode:
        """One episode, from disk."""
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
        """The HDF5 file, or the tables of all episodes."""
        places = sorted({self._source.file(index) for index in range(self.num_episodes)})
        return [file for place in places for file in (sorted(place.iterdir()) if place.is_dir() else [place])]

    def _content(self, index: int) -> list[bytes]:
        """Images as the file has them: checkpoints of earlier versions, which did not turn them, know these."""
        episode = self.episode(index)
        rows = [part.as_stored(episode.streams[part.name]) for part in self.streams]
        return [np.ascontiguousarray(array).tobytes() for array in (*rows, episode.action, episode.reward)]

    def close(self) -> None:
        """Close the file."""
        self._source.close()

    def _rows(self, index: int, field: str, stream: Stream, count: int) -> np.ndarray:
        """One field of an episode as Deft has it, after seeing that it has the shape that the metadata says."""
        field, where, file = f"{field}/{stream.name}".rstrip("/"), f"episode_{index}", self._source.file(index)
        values = self._source.values(index, field.partition("/")[0], stream, count)
        try:
            rows = stream.to_rows(values)
        except (TypeError, ValueError) as error:
            raise damaged(file, where, field, one_line(error)) from None
        if rows.shape == (count, 1) and stream.shape == ():
            rows = rows[:, 0]  # some datasets store each number of a Discrete as an array of one
        if rows.shape != (count, *stream.shape):
            raise damaged(file, where, field, f"has shape {rows.shape}, not {(count, *stream.shape)}")
        return check_finite(rows, file, where, field)

    def _scalars(self, index: int, field: str, dtype: type, count: int) -> np.ndarray:
        where, file = f"episode_{index}", self._source.file(index)
        values = np.asarray(self._source.values(index, field, None, count))
        if values.shape != (count,):
            raise damaged(file, where, field, f"has shape {values.shape}, not {(count,)}")
        return check_finite(values.astype(dtype, copy=False), file, where, field)


def _in_memory(source: MinariDataset) -> VectorDataset:
    """The episodes in one table; beside it, one episode at a time is in memory."""
    action_dim = 1 if isinstance(source.action_space, spaces.Discrete) else source.action_space.shape[0]  # type: ignore[index]
    table = TransitionTable(source.lengths, source.observation_space.shape[0], action_dim)  # type: ignore[index]
    for index in range(source.num_episodes):
        episode = source.episode(index)
        write_episode(
            table,
            index,
            source._source.file(index),
            f"episode_{index}",
            observation=episode.observation,
            action=episode.action,
            reward=episode.reward,
            terminated=episode.terminated,
        )
    dataset = VectorDataset(
        table, source.name, source.observation_space, source.action_space, source.env_id, source.reference_returns
    )
    dataset.env_kwargs = source.env_kwargs
    return dataset


# ---------------------------------------------------------------------------------------------------------- metadata


def _data_folder(path: Path) -> Path | None:
    """The folder with the metadata; None where there is none of Minari's."""
    folders = (path / DATA_FOLDER, path) if path.is_dir() else (path.parent,) if path.name == EPISODES_FILE else ()
    for folder in folders:
        if (folder / METADATA_FILE).is_file():
            try:
                found = parse_bounded(read_bounded(folder / METADATA_FILE))
            except (OSError, ValueError):  # a damaged file is told by `load`
                found = {"minari_version": "?"} if (folder / EPISODES_FILE).exists() else None
            if isinstance(found, dict) and ("minari_version" in found or "data_format" in found):
                return folder
        elif is_hdf5(folder / EPISODES_FILE):  # before Minari 0.5 the metadata lay in the file itself
            return folder
    return None


def _read_metadata(folder: Path) -> dict[str, Any]:
    file = folder / METADATA_FILE
    if not file.exists():
        file = folder / EPISODES_FILE
        with open_hdf5(file) as episodes:
            attributes = dict(episodes.attrs)
        metadata = {name: value.item() if hasattr(value, "item") else value for name, value in attributes.items()}
    else:
        try:
            metadata = parse_bounded(read_bounded(file))
        except (OSError, ValueError) as error:
            raise InputError(f"{file}: damaged: {one_line(error)}") from None
    if not isinstance(metadata, dict):
        raise damaged(file, "the top", "JSON", "is not an object")
    if whole_number(metadata.get("total_episodes")) is None:
        raise damaged(file, "the top", "total_episodes", "is missing or not a whole number")
    for field in ("dataset_id", "data_format", "env_spec", "eval_env_spec", "env_module"):
        if not isinstance(metadata.get(field), str | None):
            raise damaged(file, "the top", field, f"{shown(metadata[field])} is not text")
    return metadata


def _spaces(metadata: dict[str, Any], folder: Path) -> tuple[spaces.Space, spaces.Space]:
    """Observation and action space: as written, else those of the environment that the dataset names."""
    found: list[spaces.Space] = []
    for field in ("observation_space", "action_space"):
        if field in metadata:
            try:
                found.append(space_from_json(metadata[field]))
            except DeftError as error:
                raise InputError(f"{folder / METADATA_FILE}: {field}: {error}") from None
            except ValueError as error:
                raise damaged(folder / METADATA_FILE, "the top", field, f"is no space: {one_line(error)}") from None
            continue
        spec = _env_spec(metadata, folder)
        if not spec:
            raise damaged(folder / METADATA_FILE, "the top", field, "is missing, and no environment is named")
        import gymnasium

        module, _, env_id = spec["id"].rpartition(":")
        try:
            if module:
                trust.import_module(module, spec["id"], "env_spec", "--env")
            kwargs = spec.get("kwargs") or {}
            trust.check_env_kwargs(env_id, kwargs)
            env = gymnasium.make(env_id, **kwargs)
        except InputError:
            raise
        except Exception as error:  # whatever the environment's constructor raises
            raise InputError(
                f"{folder}: does not say its {field}, and {spec['id']} cannot be made to see it: {one_line(error)}"
            ) from error
        found.append(getattr(env, field))
        env.close()
    return found[0], found[1]


def _env_spec(metadata: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The environment to evaluate in, as Gymnasium's spec has it; empty where the dataset does not say."""
    text = metadata.get("eval_env_spec") or metadata.get("env_spec")
    if not text:
        return {}
    file = folder / METADATA_FILE
    try:
        spec = parse_bounded(text)
    except ValueError as error:
        raise damaged(file, "the top", "env_spec", f"cannot be read: {one_line(error)}") from None
    kwargs = spec.get("kwargs") if isinstance(spec, dict) else None
    if not isinstance(spec, dict) or not isinstance(spec.get("id"), str) or not isinstance(kwargs, dict | None):
        raise damaged(file, "the top", "env_spec", f"{shown(spec)} is not an object with an id and kwargs")
    if module := metadata.get("env_module"):  # as recorded by Deft: what must be imported for the id to be known
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


class _Source(Protocol):
    """The episodes on disk, in one of Minari's storage formats."""

    def file(self, index: int) -> Path:
        """Where an episode lies, for messages."""

    def length(self, index: int) -> int:
        """Transitions of an episode."""

    def values(self, index: int, field: str, stream: Stream | None, count: int) -> Any:
        """`count` recorded values of a field, or of one stream of it."""

    def close(self) -> None:
        """Let go of open files."""


class _HDF5Source:
    """One HDF5 file with a group `episode_N` for each episode."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / EPISODES_FILE
        self._file = open_hdf5(self._path)
        self._latest: tuple[int, Any] = (-1, {})  # the fields of one episode are read one after another

    def file(self, index: int) -> Path:
        return self._path

    def length(self, index: int) -> int:
        return len(column(self._group(index), "rewards", self._path, f"episode_{index}"))

    def values(self, index: int, field: str, stream: Stream | None, count: int) -> Any:
        where = f"episode_{index}"
        steps = () if stream is None else stream.path
        key = "/".join([field, *(step if isinstance(step, str) else f"_index_{step}" for step in steps)])
        array = column(self._group(index), key, self._path, where)
        values = read(array, self._path, where, key)
        if stream is not None and isinstance(stream.source, spaces.Text):
            return [text.decode("utf-8") if isinstance(text, bytes) else text for text in values]
        if stream is not None and _is_jpeg(values.ndim, stream):
            return _decode_images(values, stream, self._path, where, key)
        return values

    def close(self) -> None:
        self._file.close()

    def _group(self, index: int) -> Any:
        """The group of an episode; empty where the file has none, so that the field that is missing is named."""
        latest = self._latest
        if latest[0] != index:
            try:
                latest = index, self._file[f"episode_{index}"]
            except (KeyError, OSError, RuntimeError):
                latest = index, {}
            self._latest = latest
        return latest[1]


class _ArrowSource:
    """A folder for each episode, with one Arrow or Parquet table of T + 1 rows."""

    def __init__(self, folder: Path, storage: str) -> None:
        self._folder, self._storage = folder, storage
        self._latest: tuple[int, Any] | None = None  # the fields of one episode are read one after another

    def file(self, index: int) -> Path:
        return self._folder / str(index)

    def length(self, index: int) -> int:
        folder, where = self.file(index), f"episode_{index}"
        file = folder / METADATA_FILE
        try:
            metadata = parse_bounded(read_bounded(file))
        except FileNotFoundError:
            raise damaged(file, where, "total_steps", "the file is not there") from None
        except (OSError, ValueError) as error:
            raise damaged(file, where, "total_steps", f"cannot be read: {one_line(error)}") from None
        count = whole_number(metadata.get("total_steps") if isinstance(metadata, dict) else None)
        if count is None:
            raise damaged(file, where, "total_steps", "is missing or not a whole number")
        check_rows(count, sum(part.stat().st_size for part in folder.iterdir()), folder, where, "total_steps")
        return count

    def values(self, index: int, field: str, stream: Stream | None, count: int) -> Any:
        where, path = f"episode_{index}", self.file(index)
        try:
            array = self._table(index)[field].combine_chunks()
            for step in () if stream is None else stream.path:
                array = array.field(str(step))
            array = array[:count]  # actions and rewards are padded by one row
            if stream is None:
                return array.to_numpy(zero_copy_only=False)
            if isinstance(stream.source, spaces.Text):
                return array.to_pylist()
            if _is_jpeg(1 if _is_binary(array) else 1 + len(stream.shape), stream):
                return _decode_images([value.as_py() for value in array], stream, path, where, field)
            if isinstance(stream.source, spaces.Discrete):
                return array.to_numpy(zero_copy_only=False)
            flat = array.flatten().to_numpy(zero_copy_only=False)
            return np.require(flat.reshape(len(array), *(stream.source.shape or ())), requirements="W")
        except (KeyError, ValueError, TypeError, AttributeError, MemoryError, OSError) as error:
            if isinstance(error, DeftError):
                raise
            name = field if stream is None or not stream.name else f"{field}/{stream.name}"
            raise damaged(path, where, name, f"cannot be read: {one_line(error)}") from None

    def close(self) -> None:
        self._latest = None

    def _table(self, index: int) -> pyarrow.Table:
        if self._latest is None or self._latest[0] != index:
            try:
                import pyarrow as pa
                from pyarrow import dataset
            except ImportError:
                raise InputError(NEEDS_PYARROW.format(self._folder)) from None
            folder = self.file(index)
            if sorted(file.name for file in folder.glob("*.arrow")) == [EPISODE_FILE]:  # as nearly always, and quicker
                with pa.OSFile(str(folder / EPISODE_FILE)) as file:
                    table = pa.ipc.open_file(file).read_all()
            else:
                ignored = ["_", ".", METADATA_FILE]
                table = dataset.dataset(str(folder), format=self._storage, ignore_prefixes=ignored).to_table()
            table.validate(full=True)  # lengths in a damaged file can lead anywhere in memory
            self._latest = index, table
        return self._latest[1]


def _is_binary(array: Any) -> bool:
    import pyarrow

    return pyarrow.types.is_binary(array.type) or pyarrow.types.is_large_binary(array.type)


def _is_jpeg(ndim: int, stream: Stream) -> bool:
    """Whether values are JPEG files: of a picture there is one row of bytes, where the space says rows of pixels."""
    space = stream.source
    is_picture = isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) in (2, 3)
    return is_picture and ndim < 1 + len(stream.shape)


def _decode_images(files: Any, stream: Stream, path: Path, where: str, field: str) -> np.ndarray:
    shape = stream.source.shape or ()
    images = []
    for row, content in enumerate(files):
        try:
            images.append(decode_image(content, (shape[0], shape[1])))
        except ValueError as error:
            raise damaged(path, where, field, f"row {row} {error}") from None
    return np.stack(images)
