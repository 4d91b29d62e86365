"""Records a dataset episode by episode, for `deft collect` and `DatasetWriter`.

The files of an episode are written to a hidden folder and then renamed to their final paths; the file with the number
of episodes is replaced last. If the process is killed, fails or finds the disk full, the dataset is readable and has
every episode for which `add` returned. Files of earlier episodes are neither copied nor rewritten.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import fcntl
import logging
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from deft.data.datasets.dataset import Episode, import_optional
from deft.data.spaces import Stream
from deft.errors import InputError, RunError
from deft.ownership import check_output_path

STAGING = ".deft-partial"  # in the dataset's folder: the files of the episode that is being written
SYNC_SECONDS = 1.0  # the shortest time between two calls of fsync before files are renamed
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

log = logging.getLogger(__name__)

Content = bytes | memoryview


class EpisodeFiles(ABC):
    """A dataset format: how episodes become files."""

    observation: Sequence[Stream] = ()
    action: Stream
    needs_final_observation = False
    """Whether an episode of T actions needs T + 1 observations; otherwise it may have T."""

    @property
    @abstractmethod
    def num_episodes(self) -> int:
        """The number of episodes on disk."""

    @property
    @abstractmethod
    def num_steps(self) -> int:
        """The number of actions on disk."""

    @abstractmethod
    def is_dataset(self, folder: Path) -> bool:
        """Return whether the folder holds a dataset of this format."""

    @abstractmethod
    def open(self, folder: Path) -> Iterator[Mapping[str, Content]]:
        """Read a dataset in order to append to it; yield files that must be written first."""

    def recorded_spaces(self) -> tuple[spaces.Space, spaces.Space] | None:
        """Return the spaces of the episodes on disk; None if there are none, or the format does not store them."""
        return None

    @abstractmethod
    def set_spaces(self, observation_space: spaces.Space, action_space: spaces.Space, widen: bool = False) -> None:
        """Set the spaces of the episodes; raise InputError if those on disk have others.

        With `widen` the spaces may contain those of the episodes on disk and more, if the format stores bounds.
        """

    @abstractmethod
    def encode(self, episode: Episode, attributes: Mapping[str, Any]) -> dict[str, Content]:
        """Return the files of the next episode by their path in the folder, in the order of renaming."""

    @abstractmethod
    def advance(self) -> None:
        """Count the episode that was encoded last; its files are on disk."""


def import_pyarrow() -> Any:
    """Import pyarrow, which writes the tables of both formats."""
    return import_optional("pyarrow", "recording")


class Recording:
    """A dataset that is being written. Use it as a context manager: closing it unlocks the folder.

    The folder is locked while it is written. It gets its final name with the first episode.
    """

    def __init__(self, path: Path, files: EpisodeFiles, *, append: bool = False) -> None:
        check_output_path(path)
        self.path = path
        self._files = files
        self._new = path.with_name(f".{path.name}{STAGING}")  # the folder of a new dataset before its first episode
        self._synced, self._is_staging = -SYNC_SECONDS, False
        if self.path.is_symlink() and not self.path.exists():
            raise InputError(f"{self.path}: is a broken symbolic link; give another name")
        with self._opening():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._root, self._lock = self._locked_folder()
        try:
            if self._root == self.path:
                self._open_existing(append)
            with self._opening():
                self._remove_unfinished()
        except BaseException:
            self.close()
            raise

    @property
    def num_episodes(self) -> int:
        """The number of episodes in the dataset, including those of earlier recordings."""
        return self._files.num_episodes

    @property
    def num_steps(self) -> int:
        """The number of transitions in the dataset, including those of earlier recordings."""
        return self._files.num_steps

    @property
    def kept(self) -> str:
        """A text about what is on disk, for messages about a recording that ends early."""
        count = self.num_episodes
        return f"{self.path} holds {count} complete episode{'s' * (count != 1)}" if count else "nothing was recorded"

    def set_spaces(self, observation_space: spaces.Space, action_space: spaces.Space, widen: bool = False) -> None:
        """Set the spaces of the episodes, before the first one is added, or later wider ones."""
        try:
            self._files.set_spaces(observation_space, action_space, widen)
        except InputError as error:
            raise InputError(f"{self.path}: {error}") from None

    def add(self, episode: Episode, **attributes: Any) -> None:
        """Write one episode. `attributes` are stored with it: the `seed` of its reset, `success`, …"""
        self._check(episode, f"episode {self.num_episodes}")
        given = {
            name: value.item() if isinstance(value, np.generic) else value
            for name, value in attributes.items()
            if value is not None
        }
        files = self._files.encode(episode, given)
        try:
            self._publish(files)
        except OSError as error:
            raise RunError(f"{self.path} cannot be written: {_reason(error)}") from error
        self._files.advance()

    def close(self) -> None:
        """Unlock the folder, and delete one without episodes. Calling it again has no effect."""
        if self._lock is None:
            return
        if self._root == self._new:
            shutil.rmtree(self._root, ignore_errors=True)
        elif self._is_staging:
            shutil.rmtree(self._root / STAGING, ignore_errors=True)
        os.close(self._lock)
        self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self.close()

    def _publish(self, files: Mapping[str, Content]) -> None:
        """Write the files of an episode: after a failure, none of them belongs to the dataset."""
        staging, moved = self._root / STAGING, []
        is_synced = time.monotonic() - self._synced >= SYNC_SECONDS
        try:
            staging.mkdir(exist_ok=True)
            self._is_staging = True
            for folder in dict.fromkeys((self._root / name).parent for name in files):
                folder.mkdir(parents=True, exist_ok=True)
            for number, content in enumerate(files.values()):
                with open(staging / str(number), "wb") as file:
                    file.write(content)
                    if is_synced:
                        file.flush()
                        os.fsync(file.fileno())
            for number, name in enumerate(files):
                if not os.path.exists(self._root / name):
                    moved.append(self._root / name)
                os.replace(staging / str(number), self._root / name)
            if self._root == self._new:
                os.rename(self._new, self.path)
                self._root = self.path
        except OSError:
            for path in [*moved, *(staging / str(number) for number in range(len(files)))]:
                with contextlib.suppress(OSError):  # frees the space; the error itself is raised below
                    path.unlink(missing_ok=True)
            raise
        if is_synced:
            self._synced = time.monotonic()

    def _locked_folder(self) -> tuple[Path, int | None]:
        """Return the dataset's folder, or the temporary one of a new dataset, locked until this process ends."""
        while True:
            root = self.path if self.path.exists() else self._new
            if root == self._new:
                root.mkdir(exist_ok=True)
            try:
                folder = os.open(root, os.O_RDONLY)
            except FileNotFoundError:
                continue
            try:
                self._flock(folder)
                found = os.stat(root)
            except BlockingIOError:
                os.close(folder)
                raise InputError(
                    f"{self.path}: another process is recording into it; wait until it ends, or give another name"
                ) from None
            except FileNotFoundError:
                found = None
            except BaseException:
                os.close(folder)
                raise
            if found is not None and os.path.samestat(found, os.fstat(folder)):
                return root, folder
            os.close(folder)  # another process has renamed or removed it in the meantime: try again

    def _flock(self, folder: int) -> None:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            log.warning("%s: the file system has no locks; record into it from one process at a time", self.path)

    def _remove_unfinished(self) -> None:
        """Delete the incomplete episode that a killed process left."""
        for leftover in [*self._root.iterdir()] if self._root == self._new else [*self._root.glob(STAGING)]:
            log.info("%s: deleted an incomplete episode of an interrupted recording: %s", self.path, leftover.name)
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()

    def _open_existing(self, append: bool) -> None:
        if not self._files.is_dataset(self._root):
            raise InputError(f"{self.path}: exists and is not a dataset of this format; give another name")
        if not append:
            raise InputError(
                f"{self.path}: the dataset exists; append to it (--append, in Python append=True), or give another name"
            )
        with self._opening():
            for files in self._files.open(self._root):
                self._publish(files)

    @contextlib.contextmanager
    def _opening(self) -> Iterator[None]:
        """Turn an OSError into a one-line error."""
        try:
            yield
        except OSError as error:
            kind = RunError if error.errno in DISK_FULL else InputError
            raise kind(f"{self.path} cannot be written: {_reason(error)}") from error

    def _check(self, episode: Episode, where: str) -> None:
        """Raise RunError for an episode that would damage the dataset."""
        length, rows, streams = len(episode), episode.streams, self._files.observation
        counts = {len(rows[stream.name]) for stream in streams}
        count = length if counts == {length} and not self._files.needs_final_observation else length + 1
        fields = [(stream.name or "observation", rows[stream.name], (count, *stream.shape)) for stream in streams]
        fields += [
            ("action", episode.action, (length, *self._files.action.shape)),
            ("reward", episode.reward, (length,)),
        ]
        for name, values, shape in fields:
            if values.shape != shape:
                raise RunError(f"{where}: {name} has shape {values.shape}, not {shape}")
            if values.dtype.kind == "f" and not np.isfinite(values).all():
                raise RunError(f"{where}: {name} is not finite; the episode was not recorded")


def environment_details(spec: EnvSpec | None, env_id: str) -> dict[str, str]:
    """Return an environment's metadata: its specification in Gymnasium's JSON, and the module of `module:Name-v0`."""
    if spec is None:
        return {}
    spec = copy.deepcopy(spec)
    spec.order_enforce = True  # Deft disables this check in its own environments
    spec.entry_point = _importable(spec.entry_point)
    spec.vector_entry_point = _importable(spec.vector_entry_point)
    try:
        details = {"env_spec": spec.to_json()}
    except (TypeError, ValueError) as error:
        log.warning("the dataset's metadata does not contain its environment: %s", error)
        return {}
    module = env_id.rpartition(":")[0]
    return {**details, "env_module": module} if module else details


def _importable(entry_point: Any) -> str | None:
    """Return an environment's class or function as `module:Name`; None if it cannot be imported by name."""
    if entry_point is None or isinstance(entry_point, str):
        return entry_point
    name = getattr(entry_point, "__qualname__", "<unknown>")
    return f"{entry_point.__module__}:{name}" if name.isidentifier() else None


def _reason(error: OSError) -> str:
    return "no space left on the disk" if error.errno in DISK_FULL else str(error.strerror or error)
