"""Folders of npz episodes of pixels, as V-D4RL, DrQ-v2 and Dreamer write them: one file for each episode.

Row t holds an observation together with the action and reward that led to it; row 0 is the reset, with a zero action.
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from deft.data.datasets.dataset import (
    Dataset,
    Episode,
    action_space_of,
    check_array,
    check_finite,
    damaged,
    space_of,
    truncated_at_end,
)
from deft.errors import InputError
from deft.schema import channels_first, has_channels_last

OBSERVATION_KEYS = ("observation", "image")  # of DrQ-v2 and of Dreamer
UNREADABLE = (OSError, ValueError, EOFError, KeyError, MemoryError, zipfile.BadZipFile, zlib.error)
WHERE = "its episode"


def matches(path: Path) -> bool:
    """Return whether this is an npz episode or a folder of them."""
    files = _files(path)
    for file in files:
        try:
            with np.load(file) as arrays:
                return {"action", "reward"} <= set(arrays) and any(key in arrays for key in OBSERVATION_KEYS)
        except UNREADABLE:
            continue
    return len(files) > 0  # all of them are damaged: `load` reports how


def load(path: Path, name: str) -> NpzDataset:
    """Open the episodes of a folder; their observations stay on disk."""
    return NpzDataset(_files(path), name)


class NpzDataset(Dataset):
    """Episodes of uint8 images with the channels first; stacked frames stay stacked."""

    def __init__(self, files: list[Path], name: str) -> None:
        self._files = files
        self._key, self._shape, self._dtype = _observation_header(files[0])
        # Dreamer's images have their channels last, DrQ's have them first.
        self._channels_last = len(self._shape) == 3 and has_channels_last(self._shape, np.uint8)
        row = (self._shape[-1], *self._shape[:-1]) if self._channels_last else self._shape
        actions = [self._action(file) for file in files]
        if odd := [i for i, action in enumerate(actions) if action.shape[1:] != actions[0].shape[1:]]:
            raise damaged(files[odd[0]], WHERE, "action", f"has shape {actions[odd[0]].shape}")
        low, high = (np.stack([bound(action, 0) for action in actions]) for bound in (np.min, np.max))
        lengths = np.array([len(action) for action in actions])
        super().__init__(name, space_of(row, self._dtype), action_space_of(low.min(0), high.max(0)), lengths)

    def episode(self, index: int) -> Episode:
        """Return one episode, read from its file."""
        file, length = self._files[index], int(self.lengths[index])
        with _opened(file) as arrays:
            observation = _array(arrays, file, self._key, (length + 1, *self._shape))
            if (observation.dtype == np.uint8) != (self._dtype == np.uint8):
                wrong = f"is {observation.dtype}; in {self._files[0].name} it is {self._dtype}"
                raise damaged(file, WHERE, self._key, wrong)
            reward = _array(arrays, file, "reward", (length + 1,))[1:].astype(np.float32)
            ended = "is_terminal" if "is_terminal" in arrays else "discount"
            flags = _array(arrays, file, ended, (length + 1,))[1:]
        if self._channels_last:
            observation = np.ascontiguousarray(channels_first(observation))
        if observation.dtype != np.uint8:
            observation = observation.astype(np.float32)
        # A discount of 0 is a terminal step. An episode whose last discount is 1 was ended by its time limit.
        terminated = flags > 0 if ended == "is_terminal" else flags == 0
        return Episode(observation, self._action(file), reward, terminated, truncated_at_end(terminated))

    def source_files(self) -> list[Path]:
        """Return the file of each episode."""
        return list(self._files)

    def _action(self, file: Path) -> np.ndarray:
        """Return the actions of an episode, float32 [T, A], without the one of the reset."""
        with _opened(file) as arrays:
            action = _array(arrays, file, "action")
        if action.ndim != 2 or len(action) < 2:
            raise damaged(file, WHERE, "action", f"has shape {action.shape}; it needs two rows or more of vectors")
        if np.any(action[0]):
            raise damaged(
                file, "row 0", "action", "is not zero: each row must hold the action that led to its observation"
            )
        return action[1:].astype(np.float32)


def _array(arrays: Any, file: Path, key: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """Return one array of a file, checked."""
    if key not in arrays:
        raise damaged(file, WHERE, key, f"is missing; the file has: {', '.join(arrays)}")
    try:
        values: np.ndarray = arrays[key]
    except UNREADABLE as error:
        raise damaged(file, WHERE, key, f"cannot be decoded: {error}") from None
    return check_finite(values, file, WHERE, key) if shape is None else check_array(values, shape, file, WHERE, key)


def _observation_header(file: Path) -> tuple[str, tuple[int, ...], np.dtype]:
    """Return the key of a file's observations, the shape of a row, and the type."""
    with _opened(file) as arrays:
        key = next((key for key in OBSERVATION_KEYS if key in arrays), OBSERVATION_KEYS[0])
        values = _array(arrays, file, key)
    if values.ndim < 2:
        raise damaged(file, WHERE, key, f"has shape {values.shape}; it needs a row for each step")
    return key, values.shape[1:], values.dtype


def _files(path: Path) -> list[Path]:
    """Return the npz files of a path, sorted by name."""
    if path.is_dir():
        return sorted(path.glob("*.npz"))
    return [path] if path.suffix == ".npz" else []


def _opened(file: Path) -> Any:
    """Open an npz file; pickled objects in it are not loaded."""
    try:
        return np.load(file, allow_pickle=False)
    except UNREADABLE as error:
        raise InputError(f"{file}: cannot be read as npz, it may be cut short: {error}") from None
