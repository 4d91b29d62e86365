"""The virtual environments of suites: made, verified and repaired by `deft suite install`.

They are in `$DEFT_SUITES`, by default `~/.cache/deft/suites`, one folder per suite. `installed.json` is written last: a
folder without it is an interrupted installation. Deft's own interpreter is never changed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
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


def install(
    suite: Suite, progress: Progress = lambda *_: None, reinstall: bool = False, wheels: Sequence[Path] = ()
) -> bool:
    """Install a suite, or repair its installation; return False if it is complete already.

    With `wheels`, folders of wheel files, no network is used.
    """
    folder = folder_of(suite)
    _check_wheels(suite, wheels)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f"{suite.name}.lock"):
            if not reinstall and state_of(suite) == INSTALLED and _is_complete(suite):
                return False
            (folder / RECORD).unlink(missing_ok=True)  # first: what an interruption leaves is then incomplete
            shutil.rmtree(folder, ignore_errors=True)
            _make_environment(folder)
            _install_packages(suite, progress, wheels)
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
    """Make an empty virtual environment from the Python that runs Deft, with pip if that has `ensurepip`."""
    options = [] if _has("ensurepip") else ["--without-pip"]
    command = [sys.executable, "-I", "-m", "venv", *options, str(folder)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        text = " ".join((done.stdout + done.stderr).split())
        advice = "apt install python3-venv" if "ensurepip" in text else "see the message of Python above"
        raise RunError(f"no virtual environment can be made at {folder} ({text[-300:]}): {advice}")


def _install_packages(suite: Suite, progress: Progress, wheels: Sequence[Path] = ()) -> None:
    """Install exactly the packages of the lock file with the virtual environment's own pip."""
    options = ["install"]
    if wheels:
        options += ["--no-index", *(f"--find-links={folder.absolute()}" for folder in wheels)]
    version = ".".join(platform.python_version_tuple()[:2])
    advice = f"; this is Python {version} on {platform.machine()}: deft suite download has flags for it"
    _run_pip(suite, python_of(suite), options, progress, advice if wheels else "")


def _pip_of(python: Path) -> list[str]:
    """Return the command of pip for a virtual environment: its own, or Deft's where Python has no `ensurepip`."""
    if _has("ensurepip"):
        return [str(python), "-I", "-m", "pip"]
    if not _has("pip"):
        raise RunError("neither ensurepip nor pip is installed for the Python that runs Deft: apt install python3-venv")
    return [sys.executable, "-I", "-m", "pip", "--python", str(python)]


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _check_wheels(suite: Suite, folders: Sequence[Path]) -> None:
    """Raise InputError unless the folders, if any, have a wheel of every locked package."""
    files = [file.name.split("-") for folder in folders for file in folder.glob("*.whl")]
    found = {(_normalized(parts[0]), parts[1]) for parts in files if len(parts) > 1}
    locked = locked_packages(suite)
    missing = [f"{name} {locked[name]}" for name in locked if (_normalized(name), locked[name]) not in found]
    if folders and missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(
            f"--wheels {' '.join(map(str, folders))}: no wheel of {missing[0]}{more}; on a machine with a network, "
            f"deft suite download {suite.name} --out FOLDER makes such a folder"
        )


def _normalized(name: str) -> str:
    """Return a package's name as the names of wheels have it."""
    return re.sub(r"[-_.]+", "_", name).lower()


def download(
    suite: Suite,
    folder: Path,
    progress: Progress = lambda *_: None,
    python_version: str | None = None,
    platforms: Sequence[str] = (),
) -> list[Path]:
    """Download a wheel of every locked package into a folder, for this machine or for another; return the files.

    Packages without a wheel are built here, which is only possible for this machine.
    """
    options = ["wheel", f"--wheel-dir={folder.absolute()}"]
    if python_version is not None or platforms:
        options = ["download", f"--dest={folder.absolute()}", "--only-binary=:all:"]
        options += [f"--platform={name}" for name in platforms]
        options += [f"--python-version={python_version}"] * (python_version is not None)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="deft-suite-") as temporary:
        _make_environment(Path(temporary))  # Deft's own interpreter may have no pip
        _run_pip(suite, Path(temporary) / "bin" / "python", options, progress)
    _check_wheels(suite, [folder])
    return sorted(folder.glob("*.whl"))


def _run_pip(suite: Suite, python: Path, options: Sequence[str], progress: Progress, advice: str = "") -> None:
    """Run pip on the lock file; raise RunError with its error and the advice."""
    total, ready = len(locked_packages(suite)), 0
    common = ["--no-deps", "--no-input", "--disable-pip-version-check", "--progress-bar", "off", "-r", str(suite.lock)]
    command = [*_pip_of(python), *options, *common]
    last: deque[str] = deque(maxlen=20)
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as pip:
        try:
            for line in pip.stdout or ():
                last.append(line.strip())
                if found := re.match(r"(?:Collecting|Processing) (\S+)", line):
                    progress(ready, total, Path(found[1]).name)
                    ready += 1
                elif line.startswith("Installing collected packages"):
                    progress(total, total, "unpacking")
        except BaseException:
            pip.kill()
            raise
    if pip.returncode:
        errors = [line for line in last if "error" in line.lower()] or [*last]
        raise RunError(f"pip could not {options[0]} the suite {suite.name}: {' '.join(errors[:2])}{advice}")


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Wait until no other process installs the suite."""
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _checksum(suite: Suite) -> str:
    return hashlib.sha256(suite.lock.read_bytes()).hexdigest()
