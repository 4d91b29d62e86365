"""robomimic's hdf5 files: demonstrations under `data/demo_N`, low-dimensional or with camera images.

Low-dimensional observations load into one table; files with images stream from disk as named streams.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from deft.data.datasets.dataset import (
    Dataset,
    Episode,
    VectorDataset,
    action_space_of,
    box,
    check_finite,
    damaged,
    write_episode,
)
from deft.data.datasets.hdf5 import column, is_hdf5, open_hdf5, read
from deft.data.replay import TransitionTable
from deft.errors import InputError

STATE = "state"  # the stream that the low-dimensional keys become beside images
ROBOT_KEYS = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos")
LOW_DIM_KEYS = (*ROBOT_KEYS, "object")  # what robomimic trains on by default


def matches(path: Path) -> bool:
    """Whether this is an hdf5 file with demonstrations under `data`."""
    if not is_hdf5(path):
        return False
    try:
        with open_hdf5(path) as file:
            return "data" in file and hasattr(file["data"], "keys") and any(k.startswith("demo") for k in file["data"])
    except InputError:
        return False


def load(
    path: Path, name: str, observation_keys: Sequence[str] | None = None, split: str | None = None
) -> RobomimicVectorDataset | RobomimicImageDataset:
    """Load the demonstrations of a file, or those of one of its filter keys (`split="train"`, …).

    `observation_keys` are concatenated in their order into one vector; images among them become streams of their own
    and the vector the stream `state`. The default is robomimic's: position, rotation and gripper of the arm with,
    in a low-dimensional file, the object, and in a file with images, all of these.
    """
    demos = _Demonstrations(path, observation_keys, split)
    return RobomimicImageDataset(demos, name) if demos.image_keys else RobomimicVectorDataset(demos, name)


class RobomimicVectorDataset(VectorDataset):
    """Low-dimensional demonstrations in memory. `env_args` is what the file says of its robosuite environment."""

    def __init__(self, demos: _Demonstrations, name: str) -> None:
        sizes = [demos.shapes[key][0] for key in demos.vector_keys]
        table = TransitionTable(demos.lengths, sum(sizes), demos.action_dim)
        for index, demo in enumerate(demos.names):
            episode = demos.read(index)
            write_episode(
                table,
                index,
                demos.path,
                demo,
                observation=episode.streams[STATE],
                action=episode.action,
                reward=episode.reward,
                terminated=episode.terminated,
            )
        super().__init__(table, name, action_space=demos.action_space())
        self.env_args = demos.env_args
        demos.close()


class RobomimicImageDataset(Dataset):
    """Demonstrations with images, read when asked for: uint8 [T + 1, 3, height, width], and the stream `state`."""

    def __init__(self, demos: _Demonstrations, name: str) -> None:
        streams: dict[str, spaces.Space] = {}
        for key in demos.image_keys:
            height, width, channels = demos.shapes[key]
            streams[key] = spaces.Box(0, 255, (channels, height, width), np.uint8)
        if demos.vector_keys:
            streams[STATE] = box(sum(demos.shapes[key][0] for key in demos.vector_keys))
        super().__init__(name, spaces.Dict(streams), demos.action_space(), demos.lengths)
        self.env_args = demos.env_args
        self._demos = demos

    def episode(self, index: int) -> Episode:
        """One demonstration, from the file."""
        return self._demos.read(index)

    def source_files(self) -> list[Path]:
        """The file."""
        return [self._demos.path]

    def close(self) -> None:
        """Close the file."""
        self._demos.close()


class _Demonstrations:
    """The open file: which demonstrations and keys are asked for, and how one is read."""

    def __init__(self, path: Path, observation_keys: Sequence[str] | None, split: str | None) -> None:
        self.path = path
        self._file = open_hdf5(path)
        self.names = self._names(split)
        self._last_is_kept: list[bool] = []
        first = self._file["data"][self.names[0]]
        if "obs" not in first or not len(first["obs"]):
            raise damaged(path, self.names[0], "obs", "is missing; robomimic's dataset_states_to_obs.py writes it")
        self.shapes = {key: column(first["obs"], key, path, self.names[0]).shape[1:] for key in first["obs"]}
        images = [key for key in first["obs"] if len(self.shapes[key]) == 3 and first["obs"][key].dtype == np.uint8]
        keys = tuple(observation_keys) if observation_keys else ((*images, *ROBOT_KEYS) if images else LOW_DIM_KEYS)
        if isinstance(observation_keys, str):
            keys = (observation_keys,)
        if missing := [key for key in keys if key not in self.shapes]:
            known = ", ".join(self.shapes)
            raise InputError(f"{path} has no observation {', '.join(missing)}; observation_keys can name: {known}")
        self.image_keys = [key for key in keys if key in images]
        self.vector_keys = [key for key in keys if key not in images]
        if odd := [key for key in self.vector_keys if len(self.shapes[key]) != 1]:
            raise InputError(
                f"{path}: {odd[0]} has shape {self.shapes[odd[0]]}; it is neither a vector nor a uint8 image"
            )
        self.action_dim = column(first, "actions", path, self.names[0]).shape[-1]
        self.lengths = np.array([self._length(demo) for demo in self.names], np.int64)
        self.env_args = self._env_args()

    def _names(self, split: str | None) -> list[str]:
        """The demonstrations asked for, by number."""
        names = sorted((demo for demo in self._file["data"] if demo.startswith("demo")), key=_number)
        if split is None:
            return names
        masks = self._file.get("mask", {})
        if split not in masks:
            raise InputError(f"{self.path} has no split {split!r}; it has: {', '.join(masks) or 'none'}")
        # A file may be part of a larger one whose filter keys name demonstrations that are not here.
        mask = read(column(masks, split, self.path, "mask"), self.path, "mask", split)
        chosen = {demo.decode() if isinstance(demo, bytes) else str(demo) for demo in mask}
        if not chosen.intersection(names):
            raise InputError(f"{self.path}: split {split!r} names none of the file's {len(names)} demonstrations")
        return [demo for demo in names if demo in chosen]

    def _length(self, demo: str) -> int:
        """Transitions of a demonstration.

        Without `next_obs` what followed the last action is not known, so that transition is left out unless it is done.
        """
        group = self._file["data"][demo]
        count = len(column(group, "actions", self.path, demo))
        recorded = group.attrs.get("num_samples")
        if recorded is not None and int(recorded) != count:
            raise damaged(self.path, demo, "actions", f"has {count} rows where num_samples says {int(recorded)}")
        dones = column(group, "dones", self.path, demo)
        keep_last = "next_obs" in group or (len(dones) > 0 and bool(dones[-1]))
        self._last_is_kept.append(keep_last)
        length = count if keep_last else count - 1
        if length < 1:
            raise damaged(self.path, demo, "actions", f"has {count} rows, and no whole transition")
        return length

    def _env_args(self) -> dict[str, Any] | None:
        """The environment's name and settings, where the file has them."""
        text = self._file["data"].attrs.get("env_args")
        if text is None:
            return None
        try:
            return dict(json.loads(text))
        except ValueError:
            raise damaged(self.path, "data", "env_args", "is not JSON") from None

    def action_space(self) -> spaces.Box:
        """±1, and wider where recorded actions are."""
        low, high = np.zeros(self.action_dim), np.zeros(self.action_dim)
        for demo in self.names:
            actions = self._column(
                demo, "actions", int(self._file["data"][demo]["actions"].shape[0]), (self.action_dim,)
            )
            low, high = np.minimum(low, actions.min(0)), np.maximum(high, actions.max(0))
        return action_space_of(low, high)

    def read(self, index: int) -> Episode:
        """One demonstration."""
        demo, length = self.names[index], int(self.lengths[index])
        group = self._group(demo)
        count = len(group["actions"])
        streams = {key: self._images(demo, key, count) for key in self.image_keys}
        if self.vector_keys:
            streams[STATE] = np.concatenate([self._observed(demo, key, count) for key in self.vector_keys], 1)
        terminated = self._column(demo, "dones", count, ())[:length] > 0
        truncated = np.zeros(length, bool)
        truncated[-1] = not terminated[-1]
        action = self._column(demo, "actions", count, (self.action_dim,))[:length].astype(np.float32)
        reward = self._column(demo, "rewards", count, ())[:length].astype(np.float32)
        observation = {key: values[: length + 1] for key, values in streams.items()}
        return Episode(observation, action, reward, terminated, truncated)

    def _observed(self, demo: str, key: str, count: int) -> np.ndarray:
        """[count + 1, …]: `obs`, and after it the last of `next_obs` or, without that, the last again."""
        shape = self.shapes[key]
        seen = self._column(demo, f"obs/{key}", count, shape)
        dtype = np.uint8 if seen.dtype == np.uint8 else np.float32
        rows = np.empty((count + 1, *shape), dtype)
        rows[:-1] = seen
        has_next = "next_obs" in self._group(demo)
        rows[-1] = self._column(demo, f"next_obs/{key}", count, shape)[-1] if has_next else seen[-1]
        return rows

    def _images(self, demo: str, key: str, count: int) -> np.ndarray:
        """Images with their channels first: the file has them last."""
        return np.ascontiguousarray(np.moveaxis(self._observed(demo, key, count), -1, 1))

    def _column(self, demo: str, field: str, count: int, shape: tuple[int, ...]) -> np.ndarray:
        """An array of a demonstration, checked."""
        values = read(column(self._group(demo), field, self.path, demo), self.path, demo, field)
        if values.shape != (count, *shape):
            raise damaged(self.path, demo, field, f"has shape {values.shape}, not {(count, *shape)}")
        return check_finite(values, self.path, demo, field)

    def _group(self, demo: str) -> Any:
        """A demonstration's group; the file is opened again if it was closed."""
        if not self._file:
            self._file = open_hdf5(self.path)
        return self._file["data"][demo]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _number(demo: str) -> tuple[int, str]:
    """Sorts demo_2 before demo_10."""
    digits = demo.rpartition("_")[2]
    return (int(digits) if digits.isdigit() else -1, demo)
