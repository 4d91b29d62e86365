"""What the tests of the benchmarks share."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load_benchmark(monkeypatch):
    """A script of `benchmarks/` as a module, by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module
