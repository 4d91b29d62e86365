"""The files of a run's live view: its progress, and camera images of its environments, in `live/` of the run directory.

`RunLogger.progress` calls `LiveFiles.update`, which compares two times and returns, except every two seconds. Then it
writes, if a page is open: `deft.view` touches the file `live/viewer` as long as one is.
"""

from __future__ import annotations

import io
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from deft import schema
from deft.errors import one_line
from deft.ownership import record
from deft.runs.json_files import write_json

FOLDER, PROGRESS, TILES, VIEWER = "live", "progress.json", "tiles.jpg", "viewer"
INTERVAL = 2.0  # seconds between two writes, at least
MOST_TIME = 0.01  # the largest fraction of the time that writing may take
ABSENCE = 10.0  # seconds after which a viewer that was not heard of is gone
RATE_PERIOD = 60.0  # seconds over which the rate is measured
MOST_ENVS = 8
LARGEST_TILE = 192  # pixels
JPEG = {"quality": 88, "subsampling": 0}

log = logging.getLogger(__name__)


class LiveFiles:
    """Writes the files; `observe` returns the latest observation of the environments, or None."""

    def __init__(self, run_dir: Path, observe: Callable[[], Any], unit: str) -> None:
        self._folder, self._observe, self._unit = Path(run_dir) / FOLDER, observe, unit
        self._samples: deque[tuple[float, int]] = deque()
        self._next = 0.0
        self._has_failed = False
        self.evaluating: tuple[int, int] | None = None
        """Episodes of an evaluation under way: done, and in all."""

    def start(self, step: int, total: int) -> None:
        """Write the progress at the start of training, which also tells a viewer which process trains."""
        self._samples = deque([(time.monotonic(), step)])
        self._write(step, total, with_images=False)

    def update(self, step: int, total: int) -> None:
        """Write progress and images if it is time to, and somebody views the run."""
        now = time.monotonic()
        if now < self._next:
            return
        self._samples.append((now, step))
        while self._samples[0][0] < now - RATE_PERIOD and len(self._samples) > 2:
            self._samples.popleft()
        if self.is_watched():
            self._write(step, total)
        duration = time.monotonic() - now
        self._next = now + max(INTERVAL, duration / MOST_TIME)

    def is_watched(self) -> bool:
        """Whether a page is open."""
        try:
            return time.time() - os.stat(self._folder / VIEWER).st_mtime < ABSENCE
        except OSError:
            return False

    def _write(self, step: int, total: int, with_images: bool = True) -> None:
        """Write both files; a failure ends the live view, not the run."""
        if self._has_failed or not self._folder.parent.is_dir():
            return
        (first_time, first_step), (last_time, last_step) = self._samples[0], self._samples[-1]
        progress = {
            "process": os.getpid(),
            "host": socket.gethostname(),
            "time": time.time(),
            "step": step,
            "total": total,
            "unit": self._unit,
            "rate": (last_step - first_step) / (last_time - first_time) if last_time > first_time else None,
            "evaluating": self.evaluating,
        }
        try:
            self._folder.mkdir(exist_ok=True)
            observation = self._observe() if with_images else None
            images = {} if observation is None else camera_images(observation)
            if images:
                picture, cameras = mosaic(images)
                unfinished = self._folder / f".{TILES}.{os.getpid()}"
                unfinished.write_bytes(picture)
                record(unfinished.replace(self._folder / TILES))
                progress["tiles"] = {"cameras": cameras, "texts": instructions(observation)}
            write_json(progress, self._folder / PROGRESS)
        except Exception as error:  # whatever is wrong with a stream or the disk, training does not depend on it
            self._has_failed = True
            log.warning("the live view is no longer written: %s", one_line(error))


def camera_images(observation: Any) -> dict[str, np.ndarray]:
    """Return the newest images of the first environments by camera, uint8 [n, h, w, 3], at most 192 pixels wide.

    `observation` is an array or tensor [N, …], or a mapping of them; a tensor may be on a GPU.
    """
    streams = observation if isinstance(observation, Mapping) else {"camera": observation}
    found = {}
    for name, stream in streams.items():
        if not str(stream.dtype).endswith("uint8") or stream.ndim < 4:
            continue
        rows = _to_numpy(stream[:MOST_ENVS])
        while rows.ndim > 4:  # a history: its newest frame
            rows = rows[:, -1]
        if not schema.has_channels_last(rows.shape[1:], rows.dtype):
            rows = schema.channels_last(rows)
        if rows.shape[-1] != 3:  # grey, or a stack of grey frames
            rows = np.repeat(rows[..., -1:], 3, -1)
        stride = -(-max(rows.shape[1:3]) // LARGEST_TILE)
        found[str(name)] = rows[:, ::stride, ::stride]
    return found


def mosaic(images: Mapping[str, np.ndarray]) -> tuple[bytes, list[dict[str, Any]]]:
    """Return a JPEG with a row of tiles for each camera, and name, top, size and number of each row's tiles."""
    from PIL import Image

    width = max(rows.shape[0] * rows.shape[2] for rows in images.values())
    canvas = np.zeros((sum(rows.shape[1] for rows in images.values()), width, 3), np.uint8)
    cameras, top = [], 0
    for name, rows in images.items():
        count, height, tile = rows.shape[:3]
        canvas[top : top + height, : count * tile] = np.moveaxis(rows, 0, 1).reshape(height, count * tile, 3)
        cameras.append({"name": name, "top": top, "width": tile, "height": height, "count": count})
        top += height
    file = io.BytesIO()
    Image.fromarray(canvas).save(file, "JPEG", **JPEG)
    return file.getvalue(), cameras


def instructions(observation: Any) -> list[str]:
    """Return the instructions of the first environments; an empty list if the observation has none."""
    if not isinstance(observation, Mapping) or schema.INSTRUCTION not in observation:
        return []
    rows = _to_numpy(observation[schema.INSTRUCTION][:MOST_ENVS])
    is_text = rows.dtype == np.uint8 and rows.ndim == 2
    return [bytes(row).rstrip(b"\0").decode("utf-8", "replace") for row in rows] if is_text else []


def _to_numpy(rows: Any) -> np.ndarray:
    return rows.cpu().numpy() if hasattr(rows, "cpu") else np.asarray(rows)
