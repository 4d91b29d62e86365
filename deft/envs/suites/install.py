"""The virtual environments of suites: made, verified and repaired by `deft suite install`.

They are in `$DEFT_SUITES`, by default `~/.cache/deft/suites`, one folder per suite. `installed.json` is written last: a
folder without it is an interrupted installation. Deft's own interpreter is never changed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from deft.envs.suites import Suite
from deft.errors import InputError, RunError, one_line

FOLDER_VARIABLE = "DEFT_SUITES"
RECORD = "installed.json"
INSTALLED, MISSING, INCOMPLETE, OUTDATED = "installed", "not installed", "installed incompletely", "outdated"
PROBE_TIMEOUT = 300.0  # seconds
Progress = Callable[[int, int, str], None]
"""Called with the number of packages that are ready, the number of all, and what is being done."""

# Prints the version of each package of the lock file and the files of it that are missing.
_PROBE = """
import importlib.metadata, json, sys
found, missing = {}, []
for name in sys.argv[1:]:
    try:
        package = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        continue
    found[name] = package.version
    files = [file for file in package.files or () if not str(file).endswith(".pyc")]
    missing += [str(file) for file in files if not file.locate().exists()][:1]
print(json.dumps({"packages": found, "missing": missing}))
"""


def suites_folder() -> Path:
    """Return the folder of all suites."""
    given = os.environ.get(FOLDER_VARIABLE)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(given).expanduser() if given else cache / "deft" / "suites"


def folder_of(suite: Suite) -> Path:
    """Return the folder of a suite's virtual environment."""
    return suites_folder() / suite.name


def python_of(suite: Suite) -> Path:
    """Return the suite's interpreter."""
    return folder_of(suite) / "bin" / "python"


def state_of(suite: Suite) -> str:
    """Return whether a suite is installed, without starting a process."""
    folder = folder_of(suite)
    if not folder.exists():
        return MISSING
    record = read_record(suite)
    if record is None or not python_of(suite).exists():
        return INCOMPLETE
    return INSTALLED if record.get("lock") == _checksum(suite) else OUTDATED


def read_record(suite: Suite) -> dict[str, Any] | None:
    """Return what the last complete installation recorded; None without one."""
    with contextlib.suppress(OSError, ValueError):
        record = json.loads((folder_of(suite) / RECORD).read_text())
        return record if isinstance(record, dict) else None
    return None


def locked_packages(suite: Suite) -> dict[str, str]:
    """Return the version of every package in the lock file."""
    lines = [line.partition("#")[0].strip() for line in suite.lock.read_text().splitlines()]
    return dict(line.split("==") for line in lines if line)


def installed_packages(suite: Suite) -> tuple[dict[str, str], list[str]]:
    """Return the versions that the suite's interpreter finds of the locked packages, and files that are missing."""
    command = [str(python_of(suite)), "-I", "-c", _PROBE, *locked_packages(suite)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT, check=True)
        answer = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise RunError(
            f"the interpreter of the suite {suite.name} does not run ({one_line(error)}): deft suite install "
            f"{suite.name} repairs it"
        ) from error
    return answer["packages"], answer["missing"]


def differences(suite: Suite) -> list[str]:
    """Describe each package that is not as the lock file has it."""
    found, missing = installed_packages(suite)
    wrong = [
        f"{name} is {found.get(name, 'not installed')}, the lock file has {version}"
        for name, version in locked_packages(suite).items()
        if found.get(name) != version
    ]
    return wrong + [f"the file {file} is missing" for file in missing]


def install(suite: Suite, progress: Progress = lambda *_: None, reinstall: bool = False) -> bool:
    """Install a suite, or repair its installation; return False if it is complete already."""
    folder = folder_of(suite)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f"{suite.name}.lock"):
            if not reinstall and state_of(suite) == INSTALLED and _is_complete(suite):
                return False
            shutil.rmtree(folder, ignore_errors=True)
            _make_environment(folder)
            _install_packages(suite, progress)
            wrong = differences(suite)
            if wrong:
                raise RunError(f"the suite {suite.name} was not installed completely: {wrong[0]}")
            record = {"lock": _checksum(suite), "python": platform.python_version(), "packages": locked_packages(suite)}
            (folder / f"{RECORD}.new").write_text(json.dumps(record, indent=2) + "\n")
            os.replace(folder / f"{RECORD}.new", folder / RECORD)
    except OSError as error:
        raise InputError(
            f"{folder}: the suite {suite.name} cannot be installed there ({one_line(error)}); set {FOLDER_VARIABLE} to "
            "another folder"
        ) from error
    return True


def _is_complete(suite: Suite) -> bool:
    with contextlib.suppress(RunError):
        return not differences(suite)
    return False


def _make_environment(folder: Path) -> None:
    """Make an empty virtual environment with pip, from the Python that runs Deft."""
    done = subprocess.run(
        [sys.executable, "-I", "-m", "venv", str(folder)], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        text = " ".join((done.stdout + done.stderr).split())
        advice = "apt install python3-venv" if "ensurepip" in text else "see the message of Python above"
        raise RunError(f"no virtual environment can be made at {folder} ({text[-300:]}): {advice}")


def _install_packages(suite: Suite, progress: Progress) -> None:
    """Install exactly the packages of the lock file with the virtual environment's own pip."""
    total, ready = len(locked_packages(suite)), 0
    options = ["--no-deps", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    command = [str(python_of(suite)), "-I", "-m", "pip", "install", *options, "-r", str(suite.lock)]
    last: deque[str] = deque(maxlen=20)
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as pip:
        try:
            for line in pip.stdout or ():
                last.append(line.strip())
                if found := re.match(r"\s*Collecting (\S+)", line):
                    progress(ready, total, found[1])
                    ready += 1
                elif line.startswith("Installing collected packages"):
                    progress(total, total, "unpacking")
        except BaseException:
            pip.kill()
            raise
    if pip.returncode:
        errors = [line for line in last if "error" in line.lower()] or [*last]
        raise RunError(f"pip could not install the suite {suite.name}: {' '.join(errors[:2])}")


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Wait until no other process installs the suite."""
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _checksum(suite: Suite) -> str:
    return hashlib.sha256(suite.lock.read_bytes()).hexdigest()
