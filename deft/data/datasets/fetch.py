"""Download a D4RL file: resumed where it was interrupted, verified, and put where `load_dataset` finds it by its name.

Called by `deft datasets fetch` and by `load_dataset(name, download=True)`. The addresses are those of D4RL's
`infos.py`. D4RL publishes no checksums and Deft knows none: without `sha256` a file is verified by its size and its
HDF5 layout, and its SHA-256 is reported, to be compared with that of another download.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deft.errors import InputError, RunError

log = logging.getLogger(__name__)
D4RL_ADDRESS = "http://rail.eecs.berkeley.edu/datasets/offline_rl"
BLOCK = 2**20
TIMEOUT = 30.0  # seconds without a byte
ATTEMPTS = 3  # in a row without a new byte
LINE_INTERVAL = 10.0  # seconds between progress lines where there is no terminal
Progress = Callable[[int, int | None], None]

_ANT_MAZE = "Ant_maze_{maze}_noisy_multistart_{starts}_multigoal_{goals}_sparse"
_MAZES = {"umaze": "u-maze", "medium": "big-maze", "large": "hardest-maze"}
_KITCHEN = {
    "complete": "mini_kitchen_microwave_kettle_light_slider",
    "partial": "kitchen_microwave_kettle_light_slider",
    "mixed": "kitchen_microwave_kettle_bottomburner_light",
}


def d4rl_url(name: str) -> str | None:
    """Where D4RL publishes a dataset of the families that Deft knows; None for other names."""
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
    """What was downloaded, or was there already."""

    dataset: str  # the file
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
    """Download the dataset `name` into `folder`, as `name.hdf5`; by default from where D4RL publishes it."""
    address = url or d4rl_url(name)
    if address is None:
        raise InputError(
            f"{name}: no address is known; D4RL's names are such as hopper-medium-v2, antmaze-umaze-v2 and "
            "door-human-v1; give --url for another file, and Minari ids to `minari download`"
        )
    if not re.fullmatch(r"[\w.-]+", name) or name.startswith("."):
        raise InputError(f"{name!r} cannot be a file's name; use letters, digits, - and _")
    if address.partition(":")[0] not in ("http", "https", "file"):
        raise InputError(f"url: {address} is neither http, https nor file")
    if sha256 is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", sha256):
        raise InputError(f"sha256: {sha256!r} is not 64 hexadecimal digits")
    _check_readable()
    target, part = folder / f"{name}.hdf5", folder / f"{name}.hdf5.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f".{name}.lock"):  # processes that train together may all want it
            if overwrite or not target.exists():
                _Download(address, part).run(progress)
                found = _verified(part, address, sha256)
                os.replace(part, target)
                part.with_name(f"{part.name}.json").unlink(missing_ok=True)
            else:
                found = _verified(target, address, sha256, is_new=False)
    except OSError as error:
        raise RunError(f"{name} cannot be written to {folder}: {error.strerror or error}") from error
    return Fetched(**{**asdict(found), "dataset": str(target)})


def _verified(path: Path, url: str, sha256: str | None, is_new: bool = True) -> Fetched:
    """The file's size and SHA-256; a new one that is not what was asked for is deleted."""
    from deft.data.datasets.d4rl import check_layout

    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    size, found, fate = path.stat().st_size, digest.hexdigest(), "; deleted" if is_new else ""
    try:
        if sha256 is not None and found != sha256.lower():
            raise RunError(f"{url}: its sha256 is {found}, not {sha256.lower()}{fate}")
        try:
            check_layout(path)
        except InputError as error:
            raise RunError(f"{url} is no whole D4RL file ({size:,} bytes): {error}{fate}") from error
    except RunError:
        if is_new:
            path.unlink()
        raise
    verified_by = "size and HDF5 layout alone: D4RL publishes no checksum" if sha256 is None else "sha256"
    return Fetched(str(path), url, size, found, verified_by)


def _check_readable() -> None:
    """Say what is missing before the download, not after."""
    try:
        import h5py  # noqa: F401
    except ImportError:
        raise InputError('a D4RL file is read with h5py: pip install "deft[data]"') from None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait until no other process downloads the same dataset."""
    with open(path, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class _Download:
    """A file on its way: `part` holds what has come so far, and `part.json` which version of the file that is."""

    def __init__(self, url: str, part: Path) -> None:
        self.url, self.part, self.notes = url, part, part.with_name(f"{part.name}.json")

    def run(self, progress: Progress | None) -> None:
        """Download until the file is whole; a connection that breaks is opened again for the rest."""
        tries, before = 0, self._size()
        while not self._attempt(progress):
            now = self._size()
            tries, before = (0, now) if now > before else (tries + 1, before)
            if tries >= ATTEMPTS:
                raise RunError(f"{self._cut_short()}: the connection ended; run the command again to resume")
            log.info("%s: connecting again", self._cut_short())

    def _attempt(self, progress: Progress | None) -> bool:
        """Whether the file is whole after one connection."""
        state = self._state()
        done, total = self._size() if state else 0, state.get("total")
        if state and done == total:
            return True
        headers = {"User-Agent": "deft"}
        if done:
            headers |= {"Range": f"bytes={done}-", "If-Range": state["version"]}
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url, headers=headers), timeout=TIMEOUT) as response:
                if getattr(response, "status", None) != 206:  # the whole file: it has changed, or is not given in parts
                    done = 0
                elif not response.headers.get("Content-Range", "").startswith(f"bytes {done}-"):
                    raise RunError(f"{self.url}: the server sent another part than byte {done} on; delete {self.part}")
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
                f"{self.url} cannot be reached: {error.reason}; download it on a machine with a network, and put it at "
                f"{self.part.with_suffix('')}"
            ) from error
        except (http.client.HTTPException, ConnectionError, TimeoutError) as error:
            log.debug("%s: %s", self.url, error)
            return False
        return total is None or done >= total

    def _size(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def _note(self, headers: Any, total: int | None) -> None:
        """Write down which version of the file this is, where the server says it: without it nothing is resumed."""
        tag = headers.get("ETag") or ""
        version = tag if tag and not tag.startswith("W/") else headers.get("Last-Modified")
        self.notes.write_text(json.dumps({"url": self.url, "version": version, "total": total}), encoding="utf-8")

    def _state(self) -> dict[str, Any]:
        """The notes of an earlier attempt at the same address; nothing where that cannot be resumed."""
        try:
            state = json.loads(self.notes.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return state if state.get("url") == self.url and state.get("version") and self.part.exists() else {}

    def _cut_short(self) -> str:
        total = self._state().get("total")
        return f"{self.url}: {self._size():,} of {'?' if total is None else f'{total:,}'} bytes came"


@contextmanager
def shown_progress(name: str) -> Iterator[Progress]:
    """A progress bar with rate and time left on a terminal, a line now and then elsewhere."""
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
                console.print(f"{name}: {done:,} of {'?' if total is None else f'{total:,}'} bytes", highlight=False)

        yield update
