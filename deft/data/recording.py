"""Writes episodes as a dataset in Minari's layout, which `minari.load_dataset` and `deft.load_dataset` read.

`deft collect` calls it. Everything is written into a hidden folder beside the dataset and moved into place by `commit`:
a process that is killed leaves no dataset, or the one that was there before, untouched.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from gymnasium import spaces

from deft.data.datasets.dataset import Episode
from deft.data.spaces import action_stream, recorded_space, space_to_json, streams
from deft.errors import InputError, RunError

if TYPE_CHECKING:
    import h5py

LAYOUT_VERSION = "0.5.4"  # of Minari, whose layout this is
DATA_FOLDER, METADATA_FILE, EPISODES_FILE = "data", "metadata.json", "main_data.hdf5"
FIRST_VERSION = "-v0"  # what a name without one becomes
COMPRESSED_FRAMES = 16  # images are compressed, without loss, so many at a time

_NAME = re.compile(r"[-\w]+")


class Recording:
    """A dataset that is being written. Used as a context; without `commit` it leaves nothing behind."""

    def __init__(
        self,
        path: str | Path,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        *,
        env_spec: str | None = None,
        details: Mapping[str, Any] | None = None,
        append: bool = False,
    ) -> None:
        """`env_spec`: Gymnasium's JSON of the environment; `details`: more entries for the metadata."""
        self.path = Path(path).expanduser()
        if _NAME.fullmatch(self.path.name) and not re.search(r"-v\d*$", self.path.name):
            self.path = self.path.with_name(f"{self.path.name}{FIRST_VERSION}")
        self.dataset_id, self.datasets_path = place(self.path)
        self._observation = streams(observation_space)
        self._action = action_stream(action_space)
        self._metadata: dict[str, Any] = {
            "total_episodes": 0,
            "total_steps": 0,
            "data_format": "hdf5",
            "jpeg_encoding": False,
            "observation_space": space_to_json(recorded_space(observation_space)),
            "action_space": space_to_json(recorded_space(action_space)),
            "dataset_id": self.dataset_id,
            "minari_version": LAYOUT_VERSION,
        }
        if env_spec is not None:
            self._metadata["env_spec"] = env_spec
        self._before = self._existing(append)
        self._metadata |= self._before or details or {}
        self._open()

    @property
    def num_episodes(self) -> int:
        """Episodes so far, with those that were there before."""
        return self._metadata["total_episodes"]

    @property
    def num_steps(self) -> int:
        """Transitions so far, with those that were there before."""
        return self._metadata["total_steps"]

    def add(self, episode: Episode, **attributes: Any) -> None:
        """Write one whole episode. `attributes` are kept with it: the `seed` it was reset with, `success`, …"""
        index, length = self.num_episodes, len(episode)
        self._check(episode, f"episode {index}")
        with self._writing():
            group = self._file.create_group(f"episode_{index}")
            group.attrs.update({"id": index, "total_steps": length})
            group.attrs.update({name: value for name, value in attributes.items() if value is not None})
            rows = episode.streams
            for stream in self._observation:
                key = "/".join(["observations", *(_key(part) for part in stream.path)])
                _write(group, key, stream.from_rows(rows[stream.name]))
            _write(group, "actions", self._action.from_rows(episode.action))
            _write(group, "rewards", episode.reward)
            _write(group, "terminations", episode.terminated)
            _write(group, "truncations", episode.truncated)
        self._metadata["total_episodes"] += 1
        self._metadata["total_steps"] += length

    def commit(self) -> None:
        """Put the dataset into its place, with the episodes added so far."""
        data = self._folder / DATA_FOLDER
        with self._writing():
            self._file.close()
            # The size in MB, as Minari counts it.
            self._metadata["dataset_size"] = round((data / EPISODES_FILE).stat().st_size / 1e6, 1)
            (data / METADATA_FILE).write_text(json.dumps(self._metadata), encoding="utf-8")
            if self._before is None:
                if self.path.exists():
                    raise RunError(f"{self.path} has appeared while it was being recorded; it is left as it is")
                os.rename(self._folder, self.path)
                return
            target = self.path / DATA_FOLDER
            if json.loads((target / METADATA_FILE).read_text(encoding="utf-8")) != self._before:
                raise RunError(f"{self.path} was changed by another process while it was being added to")
            # In this order: a file with more episodes than its metadata counts is still a whole dataset.
            os.replace(data / EPISODES_FILE, target / EPISODES_FILE)
            os.replace(data / METADATA_FILE, target / METADATA_FILE)

    def close(self) -> None:
        """Remove what was not committed."""
        with contextlib.suppress(OSError, RuntimeError):  # a full disk fails here once more
            self._file.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _existing(self, append: bool) -> dict[str, Any] | None:
        """The metadata of the dataset to add to, None for a new one; refuses what these episodes do not fit."""
        metadata_file = self.path / DATA_FOLDER / METADATA_FILE
        if not metadata_file.is_file():
            if self.path.exists():
                raise InputError(f"--out {self.path}: exists and is no dataset; give another name")
            return None
        if not append:
            raise InputError(f"--out {self.path}: is a dataset already; --append adds to it, or give another name")
        try:
            metadata: dict[str, Any] = json.loads(metadata_file.read_text(encoding="utf-8"))
            same = {
                name: metadata.get(name) == self._metadata[name]
                for name in ("data_format", "observation_space", "action_space", "jpeg_encoding")
            }
            metadata["total_episodes"], metadata["total_steps"]  # a KeyError where they are missing
        except (ValueError, KeyError, AttributeError) as error:
            raise InputError(f"{metadata_file}: cannot be read as a dataset's metadata: {error!r}") from None
        if not all(same.values()):
            different = next(name for name in same if not same[name])
            raise InputError(f"--append: {self.path} has another {different}; record into another dataset")
        return metadata

    def _open(self) -> None:
        try:
            import h5py
        except ImportError:
            raise InputError('recording needs h5py: pip install "deft[data]"') from None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._folder = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}.partial")
            self._folder.mkdir()
        except OSError as error:
            raise InputError(f"--out {self.path}: cannot be written: {error.strerror or error}") from error
        try:
            with self._writing():
                data = self._folder / DATA_FOLDER
                data.mkdir()
                if self._before is not None:
                    shutil.copyfile(self.path / DATA_FOLDER / EPISODES_FILE, data / EPISODES_FILE)
                self._file: h5py.File = h5py.File(data / EPISODES_FILE, "a")
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def _check(self, episode: Episode, where: str) -> None:
        """Refuse what would be a damaged dataset: the environment or the policy gave it."""
        length, rows = len(episode), episode.streams
        fields = [(stream.name or "observation", rows[stream.name], length + 1, stream) for stream in self._observation]
        fields.append(("action", episode.action, length, self._action))
        for name, values, count, stream in fields:
            if values.shape != (count, *stream.shape):
                raise RunError(f"{where}: {name} has shape {values.shape}, not {(count, *stream.shape)}")
        for name, values in [*((name, values) for name, values, _, _ in fields), ("reward", episode.reward)]:
            if values.dtype.kind == "f" and not np.isfinite(values).all():
                raise RunError(f"{where}: {name} is not finite; nothing was recorded")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """A failure of the disk as one line."""
        try:
            yield
        except OSError as error:
            raise RunError(
                f"{self.path} cannot be written: {' '.join(str(error.strerror or error).split())}"
            ) from error


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


def _key(part: str | int) -> str:
    """How Minari names a part of a Dict or Tuple in HDF5."""
    return part if isinstance(part, str) else f"_index_{part}"


def _write(group: h5py.Group, key: str, values: np.ndarray | list[str]) -> None:
    if isinstance(values, list):
        import h5py

        group.create_dataset(key, data=values, dtype=h5py.string_dtype("utf-8"))
    elif values.dtype == np.uint8 and values.ndim > 2:
        chunks = (min(COMPRESSED_FRAMES, len(values)), *values.shape[1:])
        group.create_dataset(key, data=values, chunks=chunks, compression="lzf")
    else:
        group.create_dataset(key, data=values)
