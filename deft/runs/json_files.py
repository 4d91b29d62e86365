"""JSON files that a run writes: results, metrics, model configs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deft.errors import InputError, RunError
from deft.ownership import record


def write_json(content: Any, path: Path) -> None:
    """Write a JSON file atomically; numbers that are not finite become null."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(plain(content), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        record(unfinished.replace(path))
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror or error}") from error


def read_json(path: Path) -> Any:
    """Read a JSON file that a run wrote; an empty list where there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON") from error


def plain(value: Any) -> Any:
    """Return a value as JSON has it: NumPy arrays and tensors as lists or numbers, null for what is not finite."""
    if isinstance(value, Mapping):
        return {str(name): plain(nested) for name, nested in value.items()}
    if isinstance(value, list | tuple):
        return [plain(nested) for nested in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value
