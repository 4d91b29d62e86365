"""Recorded driving for supervised waypoint training: one `.npz` file, written by `deft collect waypoints`.

Its arrays have one row for each decision: `camera` uint8 [T, 3, S, S], `motion` [T, M], `waypoints` [T, K, 2] (the
driver's plan in metres, in the vehicle's frame) and `episode` int64 [T]. `about` is JSON with the recording's settings.
"""

from __future__ import annotations

import contextlib
import json
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deft import schema
from deft.errors import InputError, RunError

WAYPOINTS, EPISODE, ABOUT = "waypoints", "episode", "about"
_SHAPES = {schema.CAMERA: 4, schema.MOTION: 2, WAYPOINTS: 3, EPISODE: 1}  # dimensions of each array


@dataclass
class WaypointRecording:
    """The observations and plans of a driver."""

    camera: np.ndarray
    motion: np.ndarray
    waypoints: np.ndarray
    episode: np.ndarray
    about: dict[str, Any]

    def __len__(self) -> int:
        """Return the number of decisions."""
        return len(self.camera)

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(unfinished, "wb") as file:
                arrays: dict[str, Any] = {name: getattr(self, name) for name in _SHAPES}
                np.savez_compressed(file, **arrays, about=np.array(json.dumps(self.about)))
            unfinished.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise RunError(f"{path}: cannot be written: {error.strerror or error}") from error

    @classmethod
    def load(cls, path: str | Path) -> WaypointRecording:
        """Read a recording; raise InputError for other files."""
        path = Path(path)
        if path.is_dir():
            raise InputError(
                f"dataset: {path} is a directory, not a waypoint recording; give the .npz file that "
                "`deft collect waypoints --out FILE` writes"
            )
        if not path.is_file():
            raise InputError(f"dataset: {path} does not exist; `deft collect waypoints --out {path}` records one")
        try:
            with np.load(path, allow_pickle=False) as arrays:
                found = {name: arrays[name] for name in arrays}
            about = json.loads(str(found.get(ABOUT, "{}")))
        except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
            raise InputError(f"dataset: {path} is damaged, or not a waypoint recording") from error
        missing = [name for name in (*_SHAPES, ABOUT) if name not in found]
        if missing:
            raise InputError(f"dataset: {path} is not a waypoint recording: it has no {', '.join(missing)}")
        count = len(found[EPISODE])
        for name, dims in _SHAPES.items():
            if found[name].ndim != dims or len(found[name]) != count or not count:
                raise InputError(f"dataset: {path}: {name} has shape {found[name].shape}, for {count} decisions")
        return cls(**{name: found[name] for name in _SHAPES}, about=about)
