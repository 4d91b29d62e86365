"""Opening HDF5 files and reading their arrays, with a one-line error for every fault; used by the HDF5 formats."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deft.data.datasets.dataset import damaged, import_optional
from deft.errors import InputError

if TYPE_CHECKING:
    import h5py

BLOCK_ROWS = 16_384  # rows read at a time: fast, and small compared to a dataset
CHUNK_CACHE_BYTES = 2**20  # for each array; HDF5 2.0's default of 8 MiB adds up over the arrays of a file
MAX_EXPANSION = 4096  # bytes of values for each byte in the file: deflate reaches 1032


def open_hdf5(path: Path) -> h5py.File:
    """Open a file for reading; raise InputError if it links to other files."""
    h5py = import_optional("h5py", f"reading {path.name}")
    try:
        file = h5py.File(path, "r", rdcc_nbytes=CHUNK_CACHE_BYTES)
    except OSError as error:
        raise InputError(f"{path}: cannot be read as HDF5, it may be cut short: {error}") from None
    try:
        _check_links(file, path)
    except BaseException:
        file.close()
        raise
    return file


def _check_links(file: h5py.File, path: Path) -> None:
    """Raise InputError for external links: they would read any file that the author of this one names."""
    import h5py

    inside = (h5py.h5l.TYPE_HARD, h5py.h5l.TYPE_SOFT)
    try:
        outside = file.id.links.visit(lambda name, info: None if info.type in inside else name, info=True)
    except (KeyError, OSError, RuntimeError) as error:
        raise InputError(f"{path}: damaged: its groups cannot be listed: {error}") from None
    if outside is not None:
        name = outside.decode("utf-8", "replace")
        raise InputError(f"{path}: {name} is a link to another file, which Deft does not follow; copy its content here")


def is_hdf5(path: Path) -> bool:
    """Return whether a file begins with the signature of HDF5, complete or not."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(8) == b"\x89HDF\r\n\x1a\n"


def keys_of(path: Path, group: str = "/") -> list[str]:
    """Return the keys of a group; none if the file is not a readable HDF5 file with this group."""
    if not is_hdf5(path):
        return []
    try:
        with open_hdf5(path) as file:
            found = file.get(group)
            return list(found) if hasattr(found, "keys") else []
    except InputError:
        return []


def column(group: Any, key: str, path: Path, where: str = "the top") -> h5py.Dataset:
    """Return the array `key` of a group; `key` may be a path within it."""
    import h5py

    try:
        found = group[key]
    except (KeyError, OSError, RuntimeError):
        found = None
    if not isinstance(found, h5py.Dataset):
        raise damaged(path, where, key, "is missing")
    if found.external or found.is_virtual:
        raise InputError(
            f"{path}: {key} at {where} has its values in another file, which Deft does not read; copy them here"
        )
    stored, declared = found.id.get_storage_size(), found.nbytes
    if declared > MAX_EXPANSION * stored + CHUNK_CACHE_BYTES:
        raise damaged(path, where, key, f"declares the shape {found.shape}, and the file holds {stored:,} bytes of it")
    return found


def read(array: Any, path: Path | str, where: str, field: str, rows: slice = slice(None)) -> np.ndarray:
    """Return rows of an array of a file; raise InputError if they cannot be decoded."""
    try:
        return array[rows]
    except (OSError, RuntimeError, MemoryError) as error:
        raise damaged(path, where, field, f"cannot be decoded: {error}") from None


def blocks(array: Any) -> Iterator[slice]:
    """Yield slices of about `BLOCK_ROWS` rows, in whole chunks, so that no chunk is decoded twice."""
    chunk_rows = (getattr(array, "chunks", None) or (1,))[0]
    step = chunk_rows * max(1, BLOCK_ROWS // chunk_rows)
    for start in range(0, len(array), step):
        yield slice(start, min(start + step, len(array)))
