"""Opening HDF5 files and reading their columns, with every fault as one line; shared by the loaders of hdf5 formats."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deft.data.datasets.dataset import damaged
from deft.errors import InputError

if TYPE_CHECKING:
    import h5py

BLOCK_ROWS = 16_384  # read at a time: enough to be quick, little beside a dataset
CHUNK_CACHE_BYTES = 2**20  # an array; from HDF5 2.0 on the default is 8 MiB, which adds up over the columns of a file
MAX_EXPANSION = 4096  # bytes of values for one in the file: deflate reaches 1032


def open_hdf5(path: Path) -> h5py.File:
    """The file, open for reading; one that leads into other files is rejected."""
    try:
        import h5py
    except ImportError:
        raise InputError(f'reading {path.name} needs h5py: pip install "deft[data]"') from None
    try:
        file = h5py.File(path, "r", rdcc_nbytes=CHUNK_CACHE_BYTES)
    except OSError as error:
        raise InputError(f"{path}: cannot be read as HDF5, it may be cut short: {one_line(error)}") from None
    try:
        _check_links(file, path)
    except BaseException:
        file.close()
        raise
    return file


_checked: dict[Path, tuple[int, ...]] = {}  # files without links to others, as they were when they were looked through


def _check_links(file: h5py.File, path: Path) -> None:
    """Reject external links: they would read whatever file the author of this one names."""
    import h5py

    status = os.stat(path)
    version = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    if _checked.get(path) == version:
        return
    inside = (h5py.h5l.TYPE_HARD, h5py.h5l.TYPE_SOFT)
    try:
        outside = file.id.links.visit(lambda name, info: None if info.type in inside else name, info=True)
    except (KeyError, OSError, RuntimeError) as error:
        raise InputError(f"{path}: damaged: its groups cannot be listed: {one_line(error)}") from None
    if outside is not None:
        name = outside.decode("utf-8", "replace")
        raise InputError(f"{path}: {name} is a link to another file, which Deft does not follow; copy its content here")
    _checked[path] = version


def is_hdf5(path: Path) -> bool:
    """Whether a file begins as HDF5 does, whole or not."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(8) == b"\x89HDF\r\n\x1a\n"


def column(group: Any, key: str, path: Path, where: str = "the top") -> h5py.Dataset:
    """The array `key` of a group, which may be a path within it."""
    import h5py

    try:
        found = group[key]
    except (KeyError, OSError, RuntimeError):
        found = None
    if not isinstance(found, h5py.Dataset):
        raise damaged(path, where, key, "is missing")
    if found.external or found.is_virtual:
        raise InputError(
            f"{path}: {key} at {where} has its values in another place, where Deft does not read; copy them"
        )
    stored, declared = found.id.get_storage_size(), found.nbytes
    if declared > MAX_EXPANSION * stored + CHUNK_CACHE_BYTES:
        raise damaged(path, where, key, f"declares the shape {found.shape}, and the file holds {stored:,} bytes of it")
    return found


def read(array: Any, path: Path | str, where: str, field: str, rows: slice = slice(None)) -> np.ndarray:
    """Rows of an array of a file; what cannot be decoded is reported with its place."""
    try:
        return array[rows]
    except (OSError, RuntimeError, MemoryError) as error:
        raise damaged(path, where, field, f"cannot be decoded: {one_line(error)}") from None


def blocks(array: Any) -> Iterator[slice]:
    """Slices of rows that cover an array: about `BLOCK_ROWS`, in whole chunks so that none is decoded twice."""
    chunk_rows = (getattr(array, "chunks", None) or (1,))[0]
    step = chunk_rows * max(1, BLOCK_ROWS // chunk_rows)
    for start in range(0, len(array), step):
        yield slice(start, min(start + step, len(array)))


def one_line(error: BaseException) -> str:
    """An error's text without line breaks."""
    return " ".join(str(error).split())
