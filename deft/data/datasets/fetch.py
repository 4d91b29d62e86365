"""Downloads D4RL files for `deft datasets fetch` and `load_dataset(name, download=True)`.

An interrupted download is resumed. The file is verified and stored where `load_dataset` finds it by its name. The
addresses are those of D4RL's `infos.py`. D4RL publishes no checksums: without `sha256` a file is verified by its size
and its HDF5 layout, and its SHA-256 is reported.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import json
import logging
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deft.data.datasets.dataset import import_optional
from deft.errors import InputError, RunError

log = logging.getLogger(__name__)
D4RL_ADDRESS = "http://rail.eecs.berkeley.edu/datasets/offline_rl"
BLOCK = 2**20
TIMEOUT = 30.0  # seconds without a byte
ATTEMPTS = 3  # consecutive connections without a new byte
LINE_INTERVAL = 10.0  # seconds between progress lines if there is no terminal
Progress = Callable[[int, int | None], None]

_ANT_MAZE = "Ant_maze_{maze}_noisy_multistart_{starts}_multigoal_{goals}_sparse"
_MAZES = {"umaze": "u-maze", "medium": "big-maze", "large": "hardest-maze"}
_KITCHEN = {
    "complete": "mini_kitchen_microwave_kettle_light_slider",
    "partial": "kitchen_microwave_kettle_light_slider",
    "mixed": "kitchen_microwave_kettle_bottomburner_light",
}


def d4rl_url(name: str) -> str | None:
    """Return the address of a dataset of D4RL's families that Deft knows; None for other names."""
    kinds = "random|medium|expert|medium-replay|full-replay|medium-expert"
    if found := re.fullmatch(rf"(halfcheetah|hopper|walker2d|ant)-({kinds})-v([12])", name):
        family, kind, version = found.groups()
        return f"{D4RL_ADDRESS}/gym_mujoco_v{version}/{family}_{kind.replace('-', '_')}-v{version}.hdf5"
    if re.fullmatch(r"(pen|hammer|relocate|door)-(human|cloned|expert)-v1", name):
        return f"{D4RL_ADDRESS}/hand_dapg_v1/{name}.hdf5"
    if found := re.fullmatch(r"maze2d-(umaze|medium|large)(-dense)?-v1", name):
        return f"{D4RL_ADDRESS}/maze2d/maze2d-{found[1]}{found[2] or '-sparse'}-v1.hdf5"
    if found := re.fullmatch(r"antmaze-(?:(umaze)(-diverse)?|(medium|large)-(play|diverse))-v([02])", name):
        maze, is_diverse = found[1] or found[3], "diverse" in name
        starts = is_diverse or maze != "umaze"
        file = _ANT_MAZE.format(maze=_MAZES[maze], starts=starts, goals=is_diverse)
        folder, ending = ("ant_maze_v2", "_fixed") if found[5] == "2" else ("ant_maze_new", "")
        return f"{D4RL_ADDRESS}/{folder}/{file}{ending}.hdf5"
    if found := re.fullmatch(r"kitchen-(complete|partial|mixed)-v0", name):
        return f"{D4RL_ADDRESS}/kitchen/{_KITCHEN[found[1]]}-v0.hdf5"
    return None


@dataclass
class Fetched:
    """A file that was downloaded, or already existed."""

    dataset: str  # path of the file
    url: str
    bytes: int
    sha256: str
    verified_by: str


def fetch_dataset(
    name: str,
    folder: Path,
    url: str | None = None,
    sha256: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Fetched:
    """Download the dataset `name` to `folder/name.hdf5`; the default address is D4RL's."""
    address = url or d4rl_url(name)
    if address is None:
        raise InputError(
            f"{name}: no address is known; examples of D4RL's names are hopper-medium-v2, antmaze-umaze-v2 and "
            "door-human-v1; give --url for another file, and use `minari download` for Minari ids"
        )
    if not re.fullmatch(r"[\w.-]+", name) or name.startswith("."):
        raise InputError(f"{name!r} is not a valid file name; use letters, digits, - and _")
    if address.partition(":")[0] not in ("http", "https", "file"):
        raise InputError(f"url: {address} is neither http, https nor file")
    if sha256 is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", sha256):
        raise InputError(f"sha256: {sha256!r} is not 64 hexadecimal digits")
    import_optional("h5py", "reading a D4RL file")  # before the download, not after it
    target, part = folder / f"{name}.hdf5", folder / f"{name}.hdf5.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f".{name}.lock"):  # several training processes may download it
            if overwrite or not target.exists():
                _Download(address, part).run(progress)
                found = _verified(part, address, sha256)
                os.replace(part, target)
                part.with_name(f"{part.name}.json").unlink(missing_ok=True)
            else:
                found = _verified(target, address, sha256, is_new=False)
    except OSError as error:
        raise RunError(f"{name} cannot be written to {folder}: {error.strerror or error}") from error
    return replace(found, dataset=str(target))


def _verified(path: Path, url: str, sha256: str | None, is_new: bool = True) -> Fetched:
    """Return the file's size and SHA-256; a new file that is invalid is deleted."""
    from deft.data.datasets.d4rl import check_layout

    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    size, fault = path.stat().st_size, ""
    if sha256 is not None and found != sha256.lower():
        fault = f": its sha256 is {found}, not {sha256.lower()}"
    else:
        try:
            check_layout(path)
        except InputError as error:
            fault = f" is not a complete D4RL file ({size:,} bytes): {error}"
    if fault and is_new:
        path.unlink()
    if fault:
        raise RunError(f"{url}{fault}{'; deleted' if is_new else ''}")
    verified_by = "size and HDF5 layout alone: D4RL publishes no checksum" if sha256 is None else "sha256"
    return Fetched(str(path), url, size, found, verified_by)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait until no other process is downloading the same dataset."""
    with open(path, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class _Download:
    """An unfinished download: `part` holds the bytes received so far, and `part.json` the version of the file."""

    def __init__(self, url: str, part: Path) -> None:
        self.url, self.part, self.notes = url, part, part.with_name(f"{part.name}.json")

    def run(self, progress: Progress | None) -> None:
        """Download until the file is complete; reconnect if the connection breaks."""
        tries, before = 0, self._size()
        while not self._attempt(progress):
            now = self._size()
            tries, before = (0, now) if now > before else (tries + 1, before)
            if tries >= ATTEMPTS:
                raise RunError(f"{self._received()}: the connection ended; run the command again to resume")
            log.info("%s: reconnecting", self._received())

    def _attempt(self, progress: Progress | None) -> bool:
        """Open one connection; return whether the file is complete afterwards."""
        state = self._state()
        done, total = self._size() if state else 0, state.get("total")
        if state and done == total:
            return True
        headers = {"User-Agent": "deft"}
        if done:
            headers |= {"Range": f"bytes={done}-", "If-Range": state["version"]}
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url, headers=headers), timeout=TIMEOUT) as response:
                if getattr(response, "status", None) != 206:  # the file has changed, or the server has no ranges
                    done = 0
                elif not response.headers.get("Content-Range", "").startswith(f"bytes {done}-"):
                    raise RunError(f"{self.url}: the server did not continue at byte {done}; delete {self.part}")
                length = response.headers.get("Content-Length")
                total = None if length is None else done + int(length)
                self._note(response.headers, total)
                with open(self.part, "r+b" if done else "wb") as file:
                    file.seek(done)
                    while block := response.read(BLOCK):
                        file.write(block)
                        done += len(block)
                        if progress is not None:
                            progress(done, total)
                    file.truncate()
                    file.flush()
                    os.fsync(file.fileno())
        except urllib.error.HTTPError as error:
            raise RunError(f"{self.url}: the server answered {error.code} {error.reason}") from error
        except urllib.error.URLError as error:
            raise RunError(
                f"{self.url} cannot be reached: {error.reason}; download it on another machine and copy it to "
                f"{self.part.with_suffix('')}"
            ) from error
        except (http.client.HTTPException, ConnectionError, TimeoutError) as error:
            log.debug("%s: %s", self.url, error)
            return False
        return total is None or done >= total

    def _size(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def _note(self, headers: Any, total: int | None) -> None:
        """Store the version of the file that the server reports; without one the download cannot be resumed."""
        tag = headers.get("ETag") or ""
        version = tag if tag and not tag.startswith("W/") else headers.get("Last-Modified")
        self.notes.write_text(json.dumps({"url": self.url, "version": version, "total": total}), encoding="utf-8")

    def _state(self) -> dict[str, Any]:
        """Return the notes of an earlier attempt at the same address; empty if it cannot be resumed."""
        try:
            state = json.loads(self.notes.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return state if state.get("url") == self.url and state.get("version") and self.part.exists() else {}

    def _received(self) -> str:
        return f"{self.url}: {_bytes_of(self._size(), self._state().get('total'))} received"


def _bytes_of(done: int, total: int | None) -> str:
    return f"{done:,} of {'?' if total is None else f'{total:,}'} bytes"


@contextmanager
def shown_progress(name: str) -> Iterator[Progress]:
    """Show a progress bar with rate and time left on a terminal, and a line every few seconds elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    columns = (TextColumn(name), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    next_line = time.monotonic() + LINE_INTERVAL
    with Bar(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=None)

        def update(done: int, total: int | None) -> None:
            nonlocal next_line
            bar.update(task, completed=done, total=total)
            if not console.is_terminal and time.monotonic() >= next_line:
                next_line = time.monotonic() + LINE_INTERVAL
                console.print(f"{name}: {_bytes_of(done, total)}", highlight=False)

        yield update
