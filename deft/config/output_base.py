"""Where run directories go that nobody named: below `outputs`, or below the environment variable `OUTPUT_BASE`."""

from __future__ import annotations

import os
from pathlib import Path

DEFAULT_BASE = "outputs"


def output_base() -> Path:
    """The directory that run directories are made in by default."""
    return Path(os.environ.get("OUTPUT_BASE") or DEFAULT_BASE)


def below_output_base(path: str) -> str:
    """`./outputs/NAME`, as defaults and config files have it, below `OUTPUT_BASE`; other paths as they are."""
    parts = Path(path).parts
    is_below = "OUTPUT_BASE" in os.environ and parts[:1] == (DEFAULT_BASE,)
    return str(output_base().joinpath(*parts[1:])) if is_below else path
