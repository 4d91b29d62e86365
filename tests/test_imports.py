"""Imports point one way: cli → training → view → evaluation → runs → algorithms → models, data → config, schema."""

import ast
from pathlib import Path

import pytest

import deft

ROOT = Path(deft.__file__).parent
BASE = {"config", "schema", "errors", "machine", "ownership", "plain_data", "trust"}
ALLOWED = {
    "schema": {"errors"},
    "errors": set(),
    "machine": set(),
    "ownership": {"errors"},
    "plain_data": {"errors"},
    "trust": {"errors"},
    "config": BASE,
    "envs": BASE | {"envs"},
    "data": BASE | {"data"},
    "models": BASE | {"models"},
    "algorithms": BASE | {"algorithms", "models", "data"},
    "runs": BASE | {"runs", "algorithms", "models", "data"},
    "view": BASE | {"view", "evaluation", "runs"},
    "deployment": BASE | {"deployment", "evaluation", "runs", "models", "data", "envs"},
    "client": set(),
    "training": BASE | {"training", "view", "runs", "evaluation", "algorithms", "models", "data", "envs"},
    "evaluation": BASE | {"runs", "evaluation", "algorithms", "models", "data", "envs"},
}


def imported(path: Path) -> set[str]:
    """The parts of Deft that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "deft":
            names |= {f"deft.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.add(node.module)
    return {name.split(".")[1] for name in names if name.startswith("deft.")}


@pytest.mark.parametrize("room", ALLOWED)
def test_imports_point_one_way(room):
    files = sorted((ROOT / room).rglob("*.py")) if (ROOT / room).is_dir() else [ROOT / f"{room}.py"]
    assert files
    for file in files:
        assert imported(file) <= ALLOWED[room], file
