"""JSON and YAML from files of unknown origin: bounded in size, depth and number of values.

Configs, dataset metadata and model descriptions are read through here, so that no file can make the reader hang: YAML
aliases of a few hundred bytes can stand for billions of values, and JSON can nest deeper than Python's stack.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deft.errors import InputError

MAX_BYTES = 2**26
MAX_DEPTH = 64
MAX_VALUES = 2_000_000
NESTS_TOO_DEEP = f"nests deeper than {MAX_DEPTH} levels"


def read_bounded(path: Path) -> str:
    """The text of a file that is not too large for a description; an OSError or ValueError where it cannot be read."""
    if path.stat().st_size > MAX_BYTES:
        raise InputError(f"{path}: {path.stat().st_size:,} bytes; a description has at most {MAX_BYTES:,}")
    return path.read_text(encoding="utf-8-sig")


def parse_bounded(text: str, parse: Callable[[str], Any] = json.loads, max_values: int = MAX_VALUES) -> Any:
    """The plain data that `text` holds; a ValueError where it nests or expands too far."""
    try:
        value = parse(text)
    except RecursionError:
        raise ValueError(NESTS_TOO_DEEP) from None
    check_bounds(value, max_values)
    return value


def check_bounds(value: Any, max_values: int = MAX_VALUES) -> None:
    """Raise a ValueError where plain data nests too deep, or where shared parts (YAML aliases) expand too far."""
    layer, count = [value], 0
    for _ in range(MAX_DEPTH):
        parts: list[Any] = []
        for part in layer:
            inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
            parts += inner
            if count + len(parts) > max_values:
                raise ValueError(f"holds more than {max_values:,} values")
        if not parts:
            return
        count += len(parts)
        layer = parts
    raise ValueError(NESTS_TOO_DEEP)


def whole_number(value: Any) -> int | None:
    """A count or an index of a description; None where it is missing, negative, no whole number or beyond 2⁵³."""
    is_whole = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 2**53
    return int(value) if is_whole and value == int(value) else None
