"""robomimic's HDF5 files: demonstrations under `data/demo_N`, low-dimensional or with camera images.

Low-dimensional demonstrations are loaded into memory; files with images are read on demand as named streams.
"""

from __future__ import annotations

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
    check_array,
    damaged,
    json_object,
    truncated_at_end,
)
from deft.data.datasets.hdf5 import column, keys_of, open_hdf5, read
from deft.errors import InputError
from deft.schema import channels_first

STATE = "state"  # the stream of the low-dimensional keys in a dataset with images
ROBOT_KEYS = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos")
LOW_DIM_KEYS = (*ROBOT_KEYS, "object")  # robomimic's default


def matches(path: Path) -> bool:
    """Return whether this is an HDF5 file with demonstrations under `data`."""
    return any(key.startswith("demo") for key in keys_of(path, "data"))


def load(
    path: Path, name: str, observation_keys: Sequence[str] | None = None, split: str | None = None
) -> VectorDataset | RobomimicDataset:
    """Load the demonstrations of a file, or those of one of its filter keys (`split="train"`, …).

    `observation_keys` are concatenated in their order into one vector; images among them become separate streams and
    the vector becomes the stream `state`. The default is robomimic's: the arm's position, rotation and gripper, with
    the object in a low-dimensional file, and with all images in a file that has images.
    """
    dataset = RobomimicDataset(path, name, observation_keys, split)
    return dataset if dataset.image_keys else VectorDataset.from_dataset(dataset)


class RobomimicDataset(Dataset):
    """Demonstrations read on demand: images are uint8 [T + 1, 3, height, width], beside the stream `state`.

    Without images the observation is one vector. `env_args` describes the robosuite environment.
    """

    def __init__(self, path: Path, name: str, observation_keys: Sequence[str] | None, split: str | None) -> None:
        self.path = path
        self._file = open_hdf5(path)
        self.names = self._demonstrations(split)
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
        lengths = np.array([self._length(demo) for demo in self.names], np.int64)
        super().__init__(name, self._observation_space(), self._action_space(), lengths)
        text = self._file["data"].attrs.get("env_args")
        self.env_args = None if text is None else json_object(text, path, "data", "env_args")

    def episode(self, index: int) -> Episode:
        """Return one demonstration, read from the file."""
        demo, length = self.names[index], int(self.lengths[index])
        count = len(self._group(demo)["actions"])
        images = {key: channels_first(self._observed(demo, key, count)) for key in self.image_keys}
        streams = {key: np.ascontiguousarray(frames) for key, frames in images.items()}
        if self.vector_keys:
            streams[STATE] = np.concatenate([self._observed(demo, key, count) for key in self.vector_keys], 1)
        streams = {key: values[: length + 1] for key, values in streams.items()}
        terminated = self._column(demo, "dones", count, ())[:length] > 0
        return Episode(
            streams if self.image_keys else streams[STATE],
            self._column(demo, "actions", count, (self.action_dim,))[:length].astype(np.float32, copy=False),
            self._column(demo, "rewards", count, ())[:length].astype(np.float32, copy=False),
            terminated,
            truncated_at_end(terminated),
        )

    def source_files(self) -> list[Path]:
        """Return the file."""
        return [self.path]

    def close(self) -> None:
        """Close the file; reading an episode opens it again."""
        self._file.close()

    def _demonstrations(self, split: str | None) -> list[str]:
        """Return the names of the demonstrations of a split, in the order of their numbers."""
        names = sorted((demo for demo in self._file["data"] if demo.startswith("demo")), key=_number)
        if split is None:
            return names
        masks = self._file.get("mask", {})
        if split not in masks:
            raise InputError(f"{self.path} has no split {split!r}; it has: {', '.join(masks) or 'none'}")
        # The file may be a part of a larger one whose filter keys name demonstrations that this one does not have.
        mask = read(column(masks, split, self.path, "mask"), self.path, "mask", split)
        chosen = {demo.decode() if isinstance(demo, bytes) else str(demo) for demo in mask}
        if not chosen.intersection(names):
            raise InputError(f"{self.path}: split {split!r} names none of the file's {len(names)} demonstrations")
        return [demo for demo in names if demo in chosen]

    def _length(self, demo: str) -> int:
        """Return the number of transitions of a demonstration.

        Without `next_obs` the last transition has no next observation; it is left out unless it is done.
        """
        group = self._file["data"][demo]
        count = len(column(group, "actions", self.path, demo))
        recorded = group.attrs.get("num_samples")
        if recorded is not None and int(recorded) != count:
            raise damaged(self.path, demo, "actions", f"has {count} rows where num_samples is {int(recorded)}")
        dones = column(group, "dones", self.path, demo)
        has_last = "next_obs" in group or (len(dones) > 0 and bool(dones[-1]))
        if count < 2 - has_last:
            raise damaged(self.path, demo, "actions", f"has {count} rows, and no complete transition")
        return count if has_last else count - 1

    def _observation_space(self) -> spaces.Space:
        dim = sum(self.shapes[key][0] for key in self.vector_keys)
        if not self.image_keys:
            return box(dim)
        streams: dict[str, spaces.Space] = {}
        for key in self.image_keys:
            height, width, channels = self.shapes[key]
            streams[key] = spaces.Box(0, 255, (channels, height, width), np.uint8)
        return spaces.Dict(streams | ({STATE: box(dim)} if self.vector_keys else {}))

    def _action_space(self) -> spaces.Box:
        """Return [-1, 1], or wider if recorded actions are."""
        low, high = np.zeros(self.action_dim), np.zeros(self.action_dim)
        for demo in self.names:
            count = int(self._file["data"][demo]["actions"].shape[0])
            actions = self._column(demo, "actions", count, (self.action_dim,))
            low, high = np.minimum(low, actions.min(0)), np.maximum(high, actions.max(0))
        return action_space_of(low, high)

    def _observed(self, demo: str, key: str, count: int) -> np.ndarray:
        """Return [count + 1, …]: `obs`, then the last row of `next_obs`, or the last row of `obs` again."""
        shape = self.shapes[key]
        seen = self._column(demo, f"obs/{key}", count, shape)
        rows = np.empty((count + 1, *shape), np.uint8 if seen.dtype == np.uint8 else np.float32)
        rows[:-1] = seen
        has_next = "next_obs" in self._group(demo)
        rows[-1] = self._column(demo, f"next_obs/{key}", count, shape)[-1] if has_next else seen[-1]
        return rows

    def _column(self, demo: str, field: str, count: int, shape: tuple[int, ...]) -> np.ndarray:
        """Return an array of a demonstration, checked; floats as float32."""
        values = read(column(self._group(demo), field, self.path, demo), self.path, demo, field)
        if values.dtype.kind == "f":
            with np.errstate(over="ignore"):  # values beyond float32 become infinite, which the check rejects
                values = values.astype(np.float32, copy=False)
        return check_array(values, (count, *shape), self.path, demo, field)

    def _group(self, demo: str) -> Any:
        """Return a demonstration's group; open the file again if it was closed."""
        if not self._file:
            self._file = open_hdf5(self.path)
        return self._file["data"][demo]


def _number(demo: str) -> tuple[int, str]:
    """Return a sort key that puts demo_2 before demo_10."""
    digits = demo.rpartition("_")[2]
    return (int(digits) if digits.isdigit() else -1, demo)
