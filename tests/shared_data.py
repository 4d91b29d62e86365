"""Real files to test loaders on; not part of the project, so tests that need them skip where they are absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

DEFAULT_PLACE = Path(__file__).resolve().parents[2] / "shared" / "data"


def shared_data(name: str) -> Path:
    """The path of real data (`d4rl/hopper_medium-v2.hdf5`, …), or a skip that says what is missing."""
    path = Path(os.environ.get("DEFT_DATA", DEFAULT_PLACE)) / name
    if not path.exists():
        pytest.skip(f"real data is absent: {name}; DEFT_DATA names the folder that has it")
    return path
