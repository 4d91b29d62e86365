"""Folders of npz episodes of pixels, as V-D4RL, DrQ-v2 and Dreamer write them: a file an episode, read when asked for.

Row t holds an observation together with the action and reward that led to it; row 0 is the reset, its action a dummy.
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from deft.data.datasets.dataset import Dataset, Episode, action_space_of, check_finite, damaged
from deft.data.datasets.hdf5 import one_line
from deft.errors import InputError
from deft.schema import has_channels_last

OBSERVATION_KEYS = ("observation", "image")  # DrQ-v2's name and Dreamer's
UNREADABLE = (OSError, ValueError, EOFError, KeyError, MemoryError, zipfile.BadZipFile, zlib.error)


def matches(path: Path) -> bool:
    """Whether this is an npz episode or a folder of them."""
    files = _files(path)
    for file in files:
        try:
            with np.load(file) as arrays:
                return {"action", "reward"} <= set(arrays) and any(key in arrays for key in OBSERVATION_KEYS)
        except UNREADABLE:
            continue
    return len(files) > 0  # all of them damaged: `load` says how


def load(path: Path, name: str) -> NpzDataset:
    """Look through the episodes of a folder; their observations stay on disk."""
    return NpzDataset(_files(path), name)


class NpzDataset(Dataset):
    """Episodes of images, uint8 with the channels first; stacked frames stay stacked as the file has them."""

    def __init__(self, files: list[Path], name: str) -> None:
        self._files = files
        self._key, shape, dtype = self._observation_header(files[0])
        self._stored_shape, self._stored_type = shape, dtype
        # Dreamer's images have their channels last, DrQ's first.
        self._channels_last = len(shape) == 3 and has_channels_last(shape, np.uint8)
        row = (shape[-1], *shape[:-1]) if self._channels_last else shape
        observation_space = (
            spaces.Box(0, 255, row, np.uint8) if dtype == np.uint8 else spaces.Box(-np.inf, np.inf, row, np.float32)
        )
        actions = [self._action(file) for file in files]
        if odd := [i for i, action in enumerate(actions) if action.shape[1:] != actions[0].shape[1:]]:
            raise damaged(files[odd[0]], "its episode", "action", f"has shape {actions[odd[0]].shape}")
        low, high = (np.stack([bound(action, 0) for action in actions]) for bound in (np.min, np.max))
        lengths = np.array([len(action) for action in actions])
        super().__init__(name, observation_space, action_space_of(low.min(0), high.max(0)), lengths)

    def episode(self, index: int) -> Episode:
        """One episode, from its file."""
        file, length = self._files[index], int(self.lengths[index])
        with _opened(file) as arrays:
            observation = self._array(arrays, file, self._key, (length + 1, *self._stored_shape))
            if (observation.dtype == np.uint8) != (self._stored_type == np.uint8):
                wrong = f"is {observation.dtype}; in {self._files[0].name} it is {self._stored_type}"
                raise damaged(file, "its episode", self._key, wrong)
            reward = self._array(arrays, file, "reward", (length + 1,))[1:].astype(np.float32)
            ended = "is_terminal" if "is_terminal" in arrays else "discount"
            flags = self._array(arrays, file, ended, (length + 1,))[1:]
        if self._channels_last:
            observation = np.ascontiguousarray(np.moveaxis(observation, -1, 1))
        if observation.dtype != np.uint8:
            observation = observation.astype(np.float32)
        # A discount of 0 means that nothing follows. An episode that ends with 1 was cut by its time limit.
        terminated = flags > 0 if ended == "is_terminal" else flags == 0
        truncated = np.zeros(length, bool)
        truncated[-1] = not terminated[-1]
        return Episode(observation, self._action(file), reward, terminated, truncated)

    def source_files(self) -> list[Path]:
        """A file for each episode."""
        return list(self._files)

    def _action(self, file: Path) -> np.ndarray:
        """The actions of an episode, float32 [T, A], without the dummy of the reset."""
        with _opened(file) as arrays:
            action = self._array(arrays, file, "action", None)
        if action.ndim != 2 or len(action) < 2:
            raise damaged(
                file, "its episode", "action", f"has shape {action.shape}; it needs two rows or more of vectors"
            )
        if np.any(action[0]):
            raise damaged(
                file, "row 0", "action", "is not zero: each row must hold the action that led to its observation"
            )
        return action[1:].astype(np.float32)

    @staticmethod
    def _array(arrays: Any, file: Path, key: str, shape: tuple[int, ...] | None) -> np.ndarray:
        """One array of a file, checked; per-step scalars may have a trailing dimension."""
        if key not in arrays:
            raise damaged(file, "its episode", key, f"is missing; the file has: {', '.join(arrays)}")
        try:
            values: np.ndarray = arrays[key]
        except UNREADABLE as error:
            raise damaged(file, "its episode", key, f"cannot be decoded: {one_line(error)}") from None
        if shape is not None and len(shape) == 1 and values.shape == (*shape, 1):
            values = values[:, 0]
        if shape is not None and values.shape != shape:
            raise damaged(file, "its episode", key, f"has shape {values.shape}, not {shape}")
        return check_finite(values, file, "its episode", key)

    @staticmethod
    def _observation_header(file: Path) -> tuple[str, tuple[int, ...], np.dtype]:
        """Key, shape of a row and type of a file's observations."""
        with _opened(file) as arrays:
            key = next((key for key in OBSERVATION_KEYS if key in arrays), OBSERVATION_KEYS[0])
            values = NpzDataset._array(arrays, file, key, None)
        if values.ndim < 2:
            raise damaged(file, "its episode", key, f"has shape {values.shape}; it needs a row for each step")
        return key, values.shape[1:], values.dtype


def _files(path: Path) -> list[Path]:
    """The npz files of a path, in the order of their names."""
    if path.is_dir():
        return sorted(path.glob("*.npz"))
    return [path] if path.suffix == ".npz" else []


def _opened(file: Path) -> Any:
    """An npz file, open; nothing in it may be a pickle."""
    try:
        return np.load(file, allow_pickle=False)
    except UNREADABLE as error:
        raise InputError(f"{file}: cannot be read as npz, it may be cut short: {one_line(error)}") from None
