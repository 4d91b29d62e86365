"""Reads a run directory for the live view, while a run writes to it. Nothing but the viewer's mark is written.

Nothing here imports torch: the server is a process beside the training, and has to be small.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deft.config.loading import read_mapping
from deft.errors import DeftError
from deft.evaluation.plots import METRICS_FILE
from deft.ownership import record
from deft.runs import live
from deft.runs.operator import CONTROLS, FRAME, MOST_NUMBERS
from deft.view.curves import Curve, panels

CONFIG_FILES = ("config.yaml", "config.json")
RECORD_FILE = "run.json"  # of `deft.runs.record`, which imports torch
MEDIA = {"samples": ".png", "videos": ".mp4"}  # folders of predictions and recordings, and the files in them
MEDIA_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
MOST_MEDIA = 2  # of each folder: the latest
WINDOW = 100  # episodes of a task in its success rate
LOG_BYTES, LOG_LINES = 65_536, 60
DETAIL = re.compile(r"\S+ \S+ DEBUG ")  # lines of the log that are not shown
NEWS = 120.0  # seconds without news after which a run on another machine is no longer called running
RUNNING, UNKNOWN, KILLED, REMOVED = "running", "unknown", "killed", "removed"


def is_run(folder: Path) -> bool:
    """Whether a folder is a run directory."""
    return any((folder / name).is_file() for name in (METRICS_FILE, RECORD_FILE, *CONFIG_FILES))


def find_runs(folder: Path) -> list[str]:
    """Return the runs in a folder by name, the latest first: those below it, and "." for the folder itself."""
    try:
        below = [entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith(".")]
    except OSError:
        return []
    names = [name for name in below if any((folder / name / file).is_file() for file in (METRICS_FILE, RECORD_FILE))]
    if (folder / METRICS_FILE).is_file() or (not names and is_run(folder)):
        names.append(".")
    return sorted(names, key=lambda name: _changed(folder / name), reverse=True)


def _changed(run: Path) -> float:
    """Return when something was last written to a run."""
    files = (run / METRICS_FILE, run / RECORD_FILE, run / live.FOLDER / live.PROGRESS)
    times = [0.0]
    for file in files:
        with contextlib.suppress(OSError):
            times.append(file.stat().st_mtime)
    return max(times)


class RunReader:
    """What the page shows of one run; reads only what was added since the last time. Used by several threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._file: tuple[int, int] | None = None  # of the metrics: device and inode
        self._offset = 0
        self._version = 0
        self._curves: dict[str, Curve] = {}
        self._tasks: dict[str, tuple[deque[bool], Curve]] = {}
        self._episodes, self._unreadable, self._step = 0, 0, 0
        self._first_time: float | None = None
        self._last_time: float | None = None
        self._evaluation: dict[str, Any] = {}

    def snapshot(self, seen: str) -> dict[str, Any]:
        """Return what the page shows; the charts only if they are not those of the version `seen`."""
        with self._lock:
            if not self.folder.is_dir():
                self._forget()
                return {"name": self.folder.name, "state": REMOVED}
            self._read_metrics()
            found = self._state()
            version = f"{self._file}-{self._version}"
            found["version"] = version
            if seen != version:
                curves = {name: curve for name, (_, curve) in self._tasks.items()}
                found["panels"] = panels(self._curves, curves)
        found |= {"name": self.folder.name, "about": self._about(), "log": self._log_tail(), "media": self._media()}
        return found

    def mark_viewed(self) -> None:
        """Let the training know that a page is open, so that it writes progress and images."""
        path = self.folder / live.FOLDER / live.VIEWER
        with contextlib.suppress(OSError):  # a run of an earlier version, or of someone else
            is_new = not path.exists()
            path.touch()
            if is_new:
                record(path)

    def controls(self) -> dict[str, Any] | None:
        """Return what a person can move in the environments of the run; None if nobody can take over."""
        found = _read_json(self.folder / live.FOLDER / CONTROLS)
        names, count = found.get("names"), _number(found.get("num_envs"))
        if not isinstance(names, list) or not names or not isinstance(count, int):
            return None
        shown = [str(name)[:40] for name in names[:MOST_NUMBERS]]
        return {"names": shown, "num_envs": count, "rate": _number(found.get("rate")) or 10.0}

    def frame(self) -> dict[str, Any]:
        """Return the latest frame of the environment that a person watches; empty if there is none."""
        return _read_json(self.folder / live.FOLDER / FRAME)

    def media_file(self, folder: str, name: str) -> Path | None:
        """Return a file of the page; None unless it is one of `MEDIA`, inside the run directory."""
        if folder not in MEDIA or not MEDIA_NAME.fullmatch(name) or not name.endswith(MEDIA[folder]):
            return None
        path = (self.folder / folder / name).resolve()
        return path if path.is_file() and path.is_relative_to(self.folder.resolve()) else None

    # -- metrics -----------------------------------------------------------------------------------------------------

    def _read_metrics(self) -> None:
        try:
            with open(self.folder / METRICS_FILE, "rb") as file:
                about = os.fstat(file.fileno())
                identity = about.st_dev, about.st_ino
                if identity != self._file or about.st_size < self._offset:  # written anew: resumed, or replaced
                    self._forget()
                    self._file = identity
                file.seek(self._offset)
                lines = file.read().split(b"\n")
        except OSError:
            self._forget()
            return
        self._offset += sum(len(line) + 1 for line in lines[:-1])  # the last one is not complete
        for line in lines[:-1]:
            try:
                self._add(line)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                self._unreadable += 1
        self._version += len(lines) - 1

    def _add(self, text: bytes) -> None:
        is_episode = text.startswith(b'{"type": "episode"')
        if is_episode and b'"task"' not in text:  # there may be millions
            self._episodes += 1
            return
        line = json.loads(text)
        step, when = int(line["step"]), float(line["time"])
        self._step = max(self._step, step)
        self._last_time = when
        if self._first_time is None:
            self._first_time = when
        if is_episode:
            self._add_episode(step, line)
        elif line["type"] == "evaluation":
            self._evaluation = line
            self._add_values(step, {f"evaluation/{name}": value for name, value in line.items()})
        elif line["type"] == "update":
            self._add_values(step, line)

    def _add_episode(self, step: int, line: Mapping[str, Any]) -> None:
        self._episodes += 1
        if isinstance(line["success"], bool):
            latest, curve = self._tasks.setdefault(str(line["task"]), (deque(maxlen=WINDOW), Curve()))
            latest.append(line["success"])
            if curve.steps and curve.steps[-1] == step:
                return  # the episodes of a rollout are logged together
            curve.add(step, sum(latest) / len(latest))

    def _add_values(self, step: int, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            is_metric = name.rpartition("/")[2] not in ("type", "step", "time", "episodes")
            if is_metric and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                self._curves.setdefault(name, Curve()).add(step, value)

    # -- state -------------------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        """Return whether the run is in progress, how far it is, and its latest results."""
        about = _read_json(self.folder / RECORD_FILE)
        progress = _read_json(self.folder / live.FOLDER / live.PROGRESS)
        sessions = about.get("sessions")
        session = sessions[-1] if isinstance(sessions, list) and sessions and isinstance(sessions[-1], dict) else {}
        state = self._find_state(session, progress)
        step = max(self._step, _number(progress.get("step")) or 0, _number(session.get("last_step")) or 0)
        total = _number(progress.get("total")) or _number(about.get("total"))
        is_running = state == RUNNING
        rate = (_number(progress.get("rate")) if _is_new(progress) else None) or self._mean_rate(session)
        found = {
            "state": state,
            "reason": session.get("reason"),
            "step": step,
            "total": total,
            "unit": progress.get("unit") or about.get("unit") or "steps",
            "rate": rate if is_running else None,
            "left": (total - step) / rate if is_running and total and rate and total > step else None,
            "elapsed": self._elapsed(sessions, is_running),
            "episodes": self._episodes,
            "unreadable": self._unreadable,
            "tasks": [
                {"task": task, "success_rate": sum(latest) / len(latest), "episodes": len(latest)}
                for task, (latest, _) in sorted(self._tasks.items())
                if latest
            ],
            "evaluation": {
                name: self._evaluation[name]
                for name in ("step", "mean_reward", "success_rate", "episodes", "normalized_score")
                if _number(self._evaluation.get(name)) is not None
            },
        }
        for name in ("mean_reward", "success_rate"):
            curve = self._curves.get(f"rollout/{name}")
            found[name] = curve.values[-1] if curve else None
        if is_running and progress.get("evaluating"):
            found["evaluating"] = progress["evaluating"]
        if is_running:
            found["controls"] = self.controls()
        if progress.get("tiles") and (self.folder / live.FOLDER / live.TILES).is_file():
            found["tiles"] = {**progress["tiles"], "time": progress.get("time")}
        return found

    def _find_state(self, session: Mapping[str, Any], progress: Mapping[str, Any]) -> str:
        if session.get("ended") is not None:
            return str(session.get("status") or UNKNOWN)
        process, host = _number(progress.get("process")), progress.get("host") or session.get("host")
        if process is not None and host == socket.gethostname():
            return RUNNING if _is_alive(int(process)) else KILLED
        if not session and process is None:
            return UNKNOWN
        return RUNNING if time.time() - _changed(self.folder) < NEWS else UNKNOWN

    def _elapsed(self, sessions: Any, is_running: bool) -> float | None:
        """Return the seconds of training, over all sessions."""
        if not isinstance(sessions, list):
            if self._first_time is None or self._last_time is None:
                return None
            return self._last_time - self._first_time
        seconds = 0.0
        for session in sessions:
            started, ended = _number(session.get("started")), _number(session.get("ended"))
            if ended is None and session is sessions[-1]:
                ended = time.time() if is_running else self._last_time
            if started is not None and ended is not None:
                seconds += max(0.0, ended - started)
        return seconds

    def _mean_rate(self, session: Mapping[str, Any]) -> float | None:
        """Return the steps per second of this session, by its metrics."""
        started, first = _number(session.get("started")), _number(session.get("first_step"))
        if started is None or first is None or self._last_time is None or self._last_time <= started:
            return None
        return max(0.0, self._step - first) / (self._last_time - started)

    # -- the rest ----------------------------------------------------------------------------------------------------

    def _about(self) -> str:
        """Return what is trained, and in which environment."""
        file = next((self.folder / name for name in CONFIG_FILES if (self.folder / name).is_file()), None)
        try:
            settings = read_mapping(file) if file else {}
        except DeftError:
            return ""
        algorithm, env, phase = settings.get("algorithm"), settings.get("env"), settings.get("phase")
        algorithm = algorithm.get("name") if isinstance(algorithm, dict) else algorithm
        env = env.get("id") if isinstance(env, dict) else env
        return " · ".join(str(part) for part in (phase, algorithm, env) if isinstance(part, str) and part)

    def _log_tail(self) -> list[str]:
        """Return the last lines of the latest log file, from INFO on."""
        try:
            latest = max((self.folder / "logs").glob("*.log"), key=lambda path: path.name)
            with open(latest, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - LOG_BYTES))
                lines = file.read().decode("utf-8", "replace").splitlines()
        except (OSError, ValueError):
            return []
        shown = [line for line in lines[1 if size > LOG_BYTES else 0 :] if not DETAIL.match(line)]
        return shown[-LOG_LINES:]

    def _media(self) -> list[dict[str, Any]]:
        """Return the latest predictions and videos, newest first."""
        found = []
        for folder, ending in MEDIA.items():
            files = []
            with contextlib.suppress(OSError):
                files = [(path.stat().st_mtime_ns, path.name) for path in (self.folder / folder).glob(f"*{ending}")]
            shown = [(when, name) for when, name in sorted(files, reverse=True) if MEDIA_NAME.fullmatch(name)]
            found += [{"folder": folder, "name": name, "time": when} for when, name in shown[:MOST_MEDIA]]
        return found


def _read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object that a run wrote; empty if there is none, or it is damaged."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _number(value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None


def _is_new(progress: Mapping[str, Any]) -> bool:
    when = _number(progress.get("time"))
    return when is not None and time.time() - when < NEWS


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        return True
    return True
