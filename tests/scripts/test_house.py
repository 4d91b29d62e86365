"""The structure table of `scripts/house.py`, on a small checkout whose figures are known."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]

FILES = {
    "deft/__init__.py": "",
    "deft/models/policy.py": (
        '"""Documented."""\n\n\nclass Policy:\n    """A policy."""\n\n    def act(self, td):\n'
        '        """Act."""\n        raise NotImplementedError\n\n\nclass Small(Policy):\n'
        "    def act(self, td):  # the formula\n        return td\n"
    ),
    "deft/training/trainer.py": (
        "from deft.algorithms.ppo import PPO\nfrom deft.evaluation import report\n\n\n"
        "def train(run, env, name):\n    if name == 'ppo':\n        with StopSignal(), folder_lock(run):\n"
        "            env.step(PPO, report)\n"
    ),
    "deft/algorithms/ppo.py": (
        "class PPO:\n    def __init__(self, a, b, c, d, e, f, g, *, h, i):\n        pass\n\n\n"
        "class FlatAdam:\n    def step(self):\n        pass\n\n    def zero_grad(self):\n        pass\n"
    ),
    "deft/evaluation/report.py": "# The run goes on, as it told us.\nPAGES = 1\n",
    "tests/models/test_policy.py": "",
    "docs/index.md": "word " * 1501,
}


@pytest.fixture(scope="module")
def house() -> ModuleType:
    spec = importlib.util.spec_from_file_location("house", ROOT / "scripts" / "house.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["house"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_figures_of_a_small_checkout(house: ModuleType, checkout: Path) -> None:
    figures = {figure.name: figure.value for figure in reversed(house.measure(checkout))}
    assert figures["files in `deft/`"] == "5"
    # 6 of policy.py (2 classes, 2 methods, raise, return), 6 of trainer.py, 8 of ppo.py, 1 of report.py
    assert figures["code lines in `deft/` (no blanks, comments, docstrings)"] == str(6 + 6 + 8 + 1)
    assert figures["run lifecycles (files that lock a run directory and install stop signals)"] == "1"
    assert figures["kinds of policy (classes that implement `act(td)`)"] == "1"
    assert figures["calls of `env.step` outside `deft/envs`"] == "1"
    assert figures["imports of concrete algorithms in `training`, `runs`"] == "1"
    assert figures["comparisons with an algorithm's name in `training`, `runs`"] == "1"
    assert figures["imports training → evaluation / evaluation → training"] == "1 / 0"
    assert figures["optimizer classes that are not `torch.optim.Optimizer`"] == "1"
    assert figures["constructors with more than 8 parameters"] == "1"
    assert figures["modules without a mirrored test file"] == "3"
    assert figures["pages in `docs/` over 1,500 words"] == "1"
    assert figures["superseded words in `deft/`"] == "2"


def test_table_has_a_column_for_the_earlier_checkout(house: ModuleType, checkout: Path) -> None:
    table = house.table(house.measure(checkout), house.measure(checkout)).splitlines()
    assert table[0] == "| | before | now |"
    assert "| files in `deft/` | 5 | 5 |" in table


def test_the_repository_itself_is_measured(house: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert house.main([str(ROOT)]) == 0
    assert "| files in `deft/` |" in capsys.readouterr().out
