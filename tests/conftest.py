"""What every test shares: one thread, so that results do not depend on the cores; the selection of fast tests.

`--fast` skips the tests that `durations.json` lists, those of at least half a second; a new test is fast until it is
measured. `make test-fast` also leaves out `tests/training`, `tests/benchmarks` and `test_docs.py`.
`--store-durations` measures them again while it runs the suite, and updates the entries of the files that were run.
"""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import attempt, succeed
from suite_fixtures import fake, installed  # noqa: F401 (fixtures of several folders)

DURATIONS = Path(__file__).parent / "durations.json"
SLOW_SECONDS = 0.5

os.environ["OMP_NUM_THREADS"] = "1"  # a fixed count: training measures none, and the processes it starts inherit it


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the plots at the end of a run, which take longer than a small run."""
    monkeypatch.setattr("deft.training.run.plot_run", lambda folder: [])


@pytest.fixture
def deft(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """Runs `deft ARGUMENTS` in `tmp_path`; it must succeed; returns its JSON results."""
    monkeypatch.chdir(tmp_path)
    return partial(succeed, capsys)


@pytest.fixture
def deft_or_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any] | str]:
    """Runs `deft ARGUMENTS` in `tmp_path`; returns its JSON results, or the line of its error."""
    monkeypatch.chdir(tmp_path)
    return partial(attempt, capsys)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="Skip the tests that durations.json lists.")
    parser.addoption("--store-durations", action="store_true", help="Update durations.json.")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--store-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(StoreDurations())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--fast"):
        return
    slow = json.loads(DURATIONS.read_text())
    deselected = [item for item in items if item.nodeid in slow]
    config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if item.nodeid not in slow]


class StoreDurations:
    """Adds up the phases of each test, and writes those that take long."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        files = {name.partition("::")[0] for name in self.seconds}
        known = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
        kept = {name: value for name, value in known.items() if name.partition("::")[0] not in files}
        slow = {name: round(value, 1) for name, value in self.seconds.items() if value >= SLOW_SECONDS}
        DURATIONS.write_text(json.dumps(dict(sorted((kept | slow).items())), indent=1) + "\n")
