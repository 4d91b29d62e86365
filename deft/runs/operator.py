"""The files by which a person takes over an environment: `live/` of the run directory, beside those of the live view.

Training writes `controls.json`, what a person can move, and `frame.json`, what they see, while somebody watches. The
server of the live view (`deft.view.server`) writes `command.json`, what the person does. A command is valid for a
second: if the page is closed or the connection fails, the policy acts again.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deft.runs.json_files import write_json
from deft.runs.live import FOLDER

CONTROLS, COMMAND, FRAME = "controls.json", "command.json", "frame.json"
WATCH, ACT, AWAY = "watch", "act", "away"
VALID = 1.0  # seconds after which a command that was not repeated is void
MOST_ENVS, MOST_NUMBERS = 8, 64  # that a person can choose from, and of an action
JPEG = {"quality": 80}


@dataclass(frozen=True)
class Command:
    """What a person does: watch an environment, or act in it."""

    env: int
    action: tuple[float, ...] | None
    """Numbers in [-1, 1], of the range of each action dim; None: the person watches."""


def parse_command(content: Any, controls: Mapping[str, Any]) -> dict[str, Any]:
    """Check a command of a page for a run with these controls; raise ValueError with one line if it is wrong."""
    if not isinstance(content, dict) or set(content) - {"mode", "env", "action"}:
        raise ValueError("a command has mode, env and action")
    mode, env, action = content.get("mode"), content.get("env", 0), content.get("action", [])
    if mode not in (WATCH, ACT, AWAY):
        raise ValueError(f"mode is one of {WATCH}, {ACT}, {AWAY}")
    if not isinstance(env, int) or isinstance(env, bool) or not 0 <= env < controls["num_envs"]:
        raise ValueError(f"env is 0 to {controls['num_envs'] - 1}")
    if mode != ACT:
        return {"mode": mode, "env": env, "action": []}
    size = len(controls["names"])
    is_list = isinstance(action, list) and len(action) == size
    if not is_list or not all(isinstance(one, int | float) and math.isfinite(one) for one in action):
        raise ValueError(f"action is a list of {size} finite numbers")
    return {"mode": mode, "env": env, "action": [min(1.0, max(-1.0, float(one))) for one in action]}


def write_command(run_dir: Path, command: Mapping[str, Any]) -> None:
    """Write a checked command, with the time at which it was received."""
    write_json({**command, "time": time.time()}, run_dir / FOLDER / COMMAND)


class Operator:
    """The training's side: reads commands, shows frames, and keeps the pace while somebody watches."""

    def __init__(self, run_dir: Path, names: Sequence[str], num_envs: int, rate: float) -> None:
        self._folder, self._rate = Path(run_dir) / FOLDER, rate
        self._controls = {"names": list(names), "num_envs": min(num_envs, MOST_ENVS), "rate": rate}
        self._is_open = False
        self._read: tuple[int, int] | None = None  # of the last command: inode and time of writing
        self._command: Command | None = None
        self._expires = 0.0
        self._last_step: float | None = None

    def open(self) -> None:
        """Offer the controls to pages."""
        if not self._is_open:
            self._is_open = True
            (self._folder / COMMAND).unlink(missing_ok=True)  # of an earlier session
            write_json(self._controls, self._folder / CONTROLS)

    def close(self) -> None:
        """Withdraw the controls."""
        for name in (CONTROLS, COMMAND, FRAME):
            with contextlib.suppress(OSError):
                (self._folder / name).unlink(missing_ok=True)
        self._is_open = False

    def poll(self) -> Command | None:
        """Return the present command; None if nobody watches."""
        self.open()
        path = self._folder / COMMAND
        try:
            about = os.stat(path)
            if (about.st_ino, about.st_mtime_ns) != self._read:
                self._read = about.st_ino, about.st_mtime_ns
                content = json.loads(path.read_bytes())
                checked = parse_command({name: content[name] for name in ("mode", "env", "action")}, self._controls)
                self._expires = float(content["time"]) + VALID
                action = tuple(checked["action"]) if checked["mode"] == ACT else None
                self._command = None if checked["mode"] == AWAY else Command(checked["env"], action)
        except (OSError, ValueError, KeyError, TypeError):
            self._command = None
        return self._command if time.time() < self._expires else None

    def pace(self, num_steps: int) -> None:
        """Wait until it is time for the next step, of `num_steps` env steps of the watched environment."""
        now = time.monotonic()
        if self._last_step is not None:
            time.sleep(min(max(0.0, self._last_step + num_steps / self._rate - now), VALID))
        self._last_step = time.monotonic()

    def rest(self) -> None:
        """Forget the pace: nobody watches."""
        self._last_step = None

    def show(self, image: np.ndarray | None, **about: Any) -> None:
        """Write a frame, uint8 [h, w, 3], and what is shown beside it."""
        text = ""
        if image is not None:
            from PIL import Image

            file = io.BytesIO()
            Image.fromarray(np.ascontiguousarray(image)).save(file, "JPEG", **JPEG)
            text = base64.b64encode(file.getvalue()).decode()
        write_json({"image": text, "time": time.time(), **about}, self._folder / FRAME)
