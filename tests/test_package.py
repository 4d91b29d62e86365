"""`import deft`: quick, without torch, and every name that it offers is there."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import deft

ROOT = Path(__file__).parents[1]


def test_import_loads_nothing_heavy() -> None:
    """`benchmarks/start_time.py` measures how long it takes; here only what makes it quick is checked."""
    program = "import sys; before = set(sys.modules); import deft; print(*sorted(set(sys.modules) - before))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert {name.partition(".")[0] for name in loaded} - {"deft"} <= set(sys.stdlib_module_names)


HEAVY = ("torch", "tensordict", "gymnasium", "numpy", "matplotlib", "mujoco", "tensorboard", "h5py")
FIRST_LINE = """
import sys
from deft import cli

cli._train = lambda training: sys.exit(f"{heavy()}")  # called after the first line is printed
heavy = lambda: sorted({name.partition(".")[0] for name in sys.modules} & set(sys.argv[1].split()))
cli.dispatch(sys.argv[2:])
sys.exit(f"{heavy()}")
"""


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("train ppo --env CartPole-v1", "starting ppo on CartPole-v1 in a new directory in outputs\n"),
        ("train --recipe tabletop-ppo", "starting ppo on tabletop in outputs/tabletop-ppo\n"),
        ("recipes", ""),
        ("--help", "usage: deft COMMAND ...\n"),
    ],
)
def test_the_first_line_of_a_command_waits_for_nothing_heavy(command: str, line: str) -> None:
    """Torch and tensordict alone take seconds to import; `deft train` prints a line before."""
    words = [sys.executable, "-c", FIRST_LINE, " ".join(HEAVY), *command.split()]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.stderr == "[]\n"
    assert done.stdout.startswith(line)


@pytest.mark.parametrize("name", deft.__all__)
def test_every_name_loads(name: str) -> None:
    assert name in dir(deft)
    value = getattr(deft, name)
    if name != "__version__":
        assert value is getattr(importlib.import_module(deft._modules()[name]), name)


def test_the_public_names_are_what_the_type_checker_imports() -> None:
    tree = ast.parse((ROOT / "deft" / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == set(deft.__all__) - {"__version__"}
    assert {"Trainer", "PPOConfig", "load_rl_config"} <= seen


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'deft' has no attribute 'PPOTrainr'"):
        _ = deft.PPOTrainr  # type: ignore[attr-defined]


def test_the_version_is_the_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert deft.__version__ == project["version"]
