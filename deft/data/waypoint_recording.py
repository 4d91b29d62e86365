"""Recorded driving for supervised waypoint training: one `.npz`, written by `deft collect waypoints`.

Arrays, one row a decision: `camera` uint8 [T, 3, S, S], `motion` [T, M], `waypoints` [T, K, 2] (the driver's plan, in
metres in the vehicle's frame), `episode` int64 [T]; and `about`, JSON on how it was recorded.
"""

from __future__ import annotations

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
_SHAPES = {schema.CAMERA: 4, schema.MOTION: 2, WAYPOINTS: 3, EPISODE: 1}


@dataclass
class WaypointRecording:
    """What a driver saw and planned."""

    camera: np.ndarray
    motion: np.ndarray
    waypoints: np.ndarray
    episode: np.ndarray
    about: dict[str, Any]

    def __len__(self) -> int:
        return len(self.camera)

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(unfinished, "wb") as file:
                arrays: dict[str, Any] = {
                    schema.CAMERA: self.camera,
                    schema.MOTION: self.motion,
                    WAYPOINTS: self.waypoints,
                    EPISODE: self.episode,
                    ABOUT: np.array(json.dumps(self.about)),
                }
                np.savez_compressed(file, **arrays)
            unfinished.replace(path)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise RunError(f"{path}: cannot be written: {error.strerror or error}") from error

    @classmethod
    def load(cls, path: str | Path) -> WaypointRecording:
        """Read the file; anything else is refused in one line."""
        path = Path(path)
        if not path.is_file():
            raise InputError(f"dataset: {path} does not exist; `deft collect waypoints --out {path}` records one")
        try:
            with np.load(path, allow_pickle=False) as arrays:
                found = {name: arrays[name] for name in arrays}
            about = json.loads(str(found.get(ABOUT, "{}")))
        except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
            raise InputError(f"dataset: {path} is damaged, or no waypoint recording") from error
        missing = [name for name in (*_SHAPES, ABOUT) if name not in found]
        if missing:
            raise InputError(f"dataset: {path} is no waypoint recording: it has no {', '.join(missing)}")
        count = len(found[EPISODE])
        for name, dims in _SHAPES.items():
            if found[name].ndim != dims or len(found[name]) != count or not count:
                raise InputError(f"dataset: {path}: its {name} has shape {found[name].shape}, of {count} decisions")
        return cls(found[schema.CAMERA], found[schema.MOTION], found[WAYPOINTS], found[EPISODE], about)
