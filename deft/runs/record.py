"""`run.json` in a run directory: what was started, when, where and on which machine, and how it ended.

`Run` writes it when training starts and ends. A run that is resumed has one session for each start. A session without
`ended` is in progress, or its process was killed.
"""

from __future__ import annotations

import functools
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deft
from deft.machine import available_cores, physical_memory, processor
from deft.ownership import keep_foreign
from deft.runs.json_files import read_json, write_json

if TYPE_CHECKING:
    import torch

METRICS_FILE = "episode_metrics.jsonl"
RECORD_FILE = "run.json"
COMPLETE, STOPPED, FAILED = "complete", "stopped", "failed"  # how a session ended
PROGRAMS = ("deft", "__main__.py")  # the names under which the command `deft` runs
GIT_TIMEOUT = 5.0  # seconds


class RunRecord:
    """The sessions of a run. `resumes`: append to those in the directory, else replace them."""

    def __init__(self, run_dir: Path, resumes: bool) -> None:
        self._path = Path(run_dir) / RECORD_FILE
        before = read_json(self._path) if resumes else []
        self._sessions: list[dict[str, Any]] = before["sessions"] if isinstance(before, dict) else []
        self._content: dict[str, Any] = {}

    def start(self, step: int, total: int, unit: str, device: torch.device) -> None:
        """Write the start of a session at a step of the `total` steps that the run has; `unit` is what steps are."""
        keep_foreign(self._path)
        session: dict[str, Any] = {
            "started": round(time.time(), 3),
            "first_step": step,
            "ended": None,
            "last_step": None,
        }
        session |= {"status": None, "command": started_as(sys.argv), "directory": str(Path.cwd())}
        self._sessions.append(session | software() | machine(device))
        self._content = {"unit": unit, "total": total, "sessions": self._sessions}
        write_json(self._content, self._path)

    def end(self, step: int, status: str, reason: str | None = None) -> None:
        """Write the end of the session: its last step, and how it ended."""
        ending = {"ended": round(time.time(), 3), "last_step": step, "status": status}
        self._sessions[-1] |= ending | ({"reason": reason} if reason else {})
        write_json(self._content, self._path)


def started_as(arguments: Sequence[str]) -> str | None:
    """Return the command that started this process; None in an interactive session."""
    program, *rest = arguments or [""]
    if Path(program).name in PROGRAMS:
        return shlex.join(["deft", *rest])
    return shlex.join(["python", program, *rest]) if program.endswith(".py") else None


def machine(device: torch.device) -> dict[str, Any]:
    """Return the host, processor, cores and memory of this machine, and the device that trains."""
    import torch  # slow to import, and readers of run.json do not need it

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "host": platform.node(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "cores": available_cores(),
        "memory_gib": round(physical_memory() / 2**30, 1),
        "device": str(device) if name is None else f"{device} ({name})",
    }


@functools.cache
def software() -> dict[str, Any]:
    """Return the versions of Deft, Python and torch; the commit if Deft runs from a clone."""
    import torch

    return {
        "deft": deft.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _commit() -> str | None:
    """Return the commit of the clone that Deft is imported from, with `-dirty` if files were changed."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT, check=True)
    except (OSError, subprocess.SubprocessError):  # git is not installed, or does not trust the folder
        return None
    return found.stdout.strip() or None
