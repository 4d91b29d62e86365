"""Track the files that Deft wrote: the manifest of a checkpoint, and the index of a run directory.

`deft_manifest.json` in a checkpoint lists the size and BLAKE2b hash of each of its files. It is written last. Every
loader calls `verify` before it reads a file.
`.deft-files` in a run directory lists the files that Deft wrote there. Writers call `record`. Deft deletes only
files that are listed in one of the two.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import unicodedata
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from deft.errors import InputError

log = logging.getLogger(__name__)
MANIFEST = "deft_manifest.json"
MANIFEST_FORMAT = "deft-manifest-1"
CHECKPOINT_FORMAT = "deft-checkpoint-1"  # first entry of every training_state.pt
INDEX = ".deft-files"
KEPT = ".kept"  # suffix of renamed files and directories that Deft did not write
INDEX_HEADER = "deft-run-1: the files in this folder that Deft wrote; --overwrite deletes these alone"
DIGEST_SIZE = 32
Entry = dict[str, Any]  # {"bytes": size, "blake2b": hex digest}
_verified: set[tuple[str, int, int, int]] = set()  # files whose hash was verified, so that each is read only once


class HashingFile:
    """A file opened for writing that hashes its content."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.blake2b(digest_size=DIGEST_SIZE)
        self._size = 0

    def write(self, data: bytes) -> int:
        """Write and hash a block."""
        self._hash.update(data)
        self._size += len(data)
        return self._file.write(data)

    def flush(self) -> None:
        """Flush the file."""
        self._file.flush()

    @property
    def entry(self) -> Entry:
        """Manifest entry of the content written so far."""
        return {"bytes": self._size, "blake2b": self._hash.hexdigest()}


def write_manifest(folder: Path, known: Mapping[str, Entry]) -> None:
    """Write the manifest of all files in a folder; `known` has the entries of files that are already hashed."""
    names = [name for name in relative_files(folder) if name != MANIFEST]
    files = {name: known.get(name) or _entry_of(folder / name) for name in names}
    content = {"format": MANIFEST_FORMAT, "files": files, "checksum": _checksum(files)}
    with open(folder / MANIFEST, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> dict[str, Entry] | None:
    """Return a folder's manifest entries by relative path, or None without a manifest; raise an error if damaged."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_bytes())
        files = content["files"]
        is_whole = content["format"] == MANIFEST_FORMAT and content["checksum"] == _checksum(files)
        if is_whole and all(_is_inside(name) and {"bytes", "blake2b"} <= files[name].keys() for name in files):
            return dict(files)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise InputError(f"{path}: damaged, so the files of {folder.name} cannot be verified; use another checkpoint")


def verify(path: Path) -> None:
    """Raise an error if a file is damaged, by its manifest or else by the CRCs of a torch file."""
    for folder in (path.parent, path.parent.parent):  # the second for peft_adapter/ and explorer/
        files = read_manifest(folder)
        if files is not None:
            name = path.relative_to(folder).as_posix()
            if name in files:
                _check_hash(path, files[name])
            return
    log.debug("%s has no %s beside it: only the CRCs inside the file are checked", path, MANIFEST)
    _check_crcs(path)


def verify_folder(folder: Path) -> bool:
    """Verify all files of a checkpoint; return False if it has no manifest (earlier versions wrote none)."""
    files = read_manifest(folder)
    if files is None:
        return False
    for name, entry in files.items():
        if not (folder / name).is_file():
            raise InputError(f"{folder / name}: missing; {folder.name} is not a whole checkpoint")
        _check_hash(folder / name, entry)
    return True


def relative_files(folder: Path) -> list[str]:
    """Return the sorted relative paths of all files and links in a folder."""
    found = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(path.relative_to(folder).as_posix() for path in found)


def delete_files(folder: Path, names: Iterable[str]) -> None:
    """Delete files in a folder by relative path, in this order, and then the subfolders that become empty."""
    parents: set[Path] = set()
    for name in names:
        path = folder / name
        if not _is_inside(name) or folder.resolve() not in (path.parent.resolve() / "_").parents:
            continue  # a name or link that points outside the folder
        if path.is_symlink() or path.is_file():
            path.unlink()
            parents |= set(path.relative_to(folder).parents)
    for parent in sorted(parents - {Path()}, key=lambda one: -len(one.parts)):
        if (folder / parent).is_dir() and not any((folder / parent).iterdir()):
            (folder / parent).rmdir()


def check_output_path(path: str | Path) -> str | Path:
    """Return the path; raise an error if it contains control characters (the index has one name per line)."""
    if odd := [character for character in str(path) if unicodedata.category(character) in ("Cc", "Zl", "Zp", "Cs")]:
        raise InputError(f"the path {str(path)!r} holds the control character {odd[0]!r}; use a name without it")
    return path


# -- the index of a run directory ------------------------------------------------------------------------------------


def start_index(run_dir: Path) -> None:
    """Create the empty index of a run directory if it is missing."""
    if not (run_dir / INDEX).exists():
        (run_dir / INDEX).write_text(INDEX_HEADER + "\n", encoding="utf-8")


def indexed_files(run_dir: Path) -> list[str]:
    """Return the relative paths in the index of a run directory."""
    try:
        lines = (run_dir / INDEX).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return lines[1:] if lines[:1] == [INDEX_HEADER] else []


def record(path: Path) -> Path:
    """Add a new file to the index of its run directory, if it is in one."""
    folder, name = _indexed_by(path)
    if folder is not None and name not in indexed_files(folder) and len(name.splitlines()) == 1:
        with open(folder / INDEX, "a", encoding="utf-8") as file:
            file.write(name + "\n")
    return path


def keep_foreign(path: Path) -> None:
    """Rename an existing file that is about to be overwritten in a run directory if Deft did not write it."""
    folder, name = _indexed_by(path)
    is_file = path.is_symlink() or path.is_file()
    if folder is not None and is_file and name not in indexed_files(folder):
        kept = free_place(path)
        os.replace(path, kept)
        log.warning("%s: Deft did not write it; renamed to %s", path, kept.name)


def _indexed_by(path: Path) -> tuple[Path | None, str]:
    """Return the run directory with an index that a file is in, or None, and the relative path of the file."""
    folder = next((parent for parent in list(path.parents)[:2] if (parent / INDEX).is_file()), None)
    return folder, "" if folder is None else path.relative_to(folder).as_posix()


def free_place(path: Path) -> Path:
    """Return a free path with the suffix `.kept`, and a number if needed, for a file that Deft did not write."""
    candidates = (path.with_name(f"{path.name}{KEPT}{number or ''}") for number in itertools.count())
    return next(candidate for candidate in candidates if not os.path.lexists(candidate))


def has_format(path: Path) -> bool:
    """Return whether a file is a training state of Deft, by the start of its pickle, without unpickling."""
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(one for one in archive.namelist() if one.endswith("/data.pkl"))
            with archive.open(name) as file:
                return CHECKPOINT_FORMAT.encode() in file.read(256)
    except (OSError, zipfile.BadZipFile, StopIteration, ValueError, RuntimeError, NotImplementedError):
        return False


# -- hashes ----------------------------------------------------------------------------------------------------------


def _check_hash(path: Path, expected: Entry) -> None:
    try:
        about = path.stat()
        key = (str(path.resolve()), about.st_ino, about.st_size, about.st_mtime_ns)
        if key in _verified and about.st_size == expected["bytes"]:
            return
        found = _entry_of(path) if about.st_size == expected["bytes"] else None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    if found is None:
        raise InputError(
            f"{path}: damaged or cut short: it has {about.st_size} bytes, and {MANIFEST} lists {expected['bytes']}; "
            "use another checkpoint"
        )
    if found != expected:
        raise InputError(f"{path}: damaged: its hash differs from the one in {MANIFEST}; use another checkpoint")
    _verified.add(key)


def _entry_of(path: Path) -> Entry:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=DIGEST_SIZE))
        return {"bytes": file.tell(), "blake2b": digest.hexdigest()}


def _check_crcs(path: Path) -> None:
    """Compare the records of a file written by torch.save with the CRC-32 that the file stores for each."""
    try:
        if not zipfile.is_zipfile(path):
            return
        with zipfile.ZipFile(path) as archive:
            for name in _records_with_crc(archive, path.stat().st_size):
                with archive.open(name) as record_file:
                    while record_file.read(1 << 20):  # raises BadZipFile at the end if the CRC differs
                        pass
    except FileNotFoundError:
        return  # the loader raises the error
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, RuntimeError, NotImplementedError) as error:
        raise InputError(f"{path}: damaged: its content differs from its checksums (CRC-32)") from error


def _records_with_crc(archive: zipfile.ZipFile, file_size: int) -> Iterator[str]:
    records = [one for one in archive.infolist() if one.compress_type == zipfile.ZIP_STORED]
    if sum(one.file_size for one in records) > file_size:
        raise zipfile.BadZipFile("records overlap")
    # All zero: torch.save did not compute them (torch.serialization.set_crc32_options).
    return (one.filename for one in records if any(other.CRC for other in records))


def _checksum(files: Mapping[str, Entry]) -> str:
    return hashlib.blake2b(json.dumps(files, sort_keys=True).encode(), digest_size=DIGEST_SIZE).hexdigest()


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and bool(path.parts)
