"""The trackers that a run logs its scalars to."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from deft.config.settings import LoggingConfig
from deft.envs.vector import Episode
from deft.errors import InputError
from deft.runs import sinks
from deft.runs.logging import RunLogger

QUIET = LoggingConfig(console_level="CRITICAL", tensorboard=False, enable_file_logging=False)


def read_scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_scalars_and_their_purge_on_resume(tmp_path: Path) -> None:
    settings = LoggingConfig(console_level="CRITICAL")
    with RunLogger(tmp_path, settings, total_timesteps=100) as run:
        run.log_episode(5, Episode(0, 7.0, 10, None, {}))
        for step in (10, 20, 30):
            run.log_metrics(step, {"train/loss": step / 4})
        run.log_evaluation(30, {"mean_reward": 8.0, "tasks": {"lift": {"success_rate": 0.5}}, "name": "x"})
    assert read_scalars(tmp_path) == {
        "rollout/mean_reward": [(10, 7.0), (20, 7.0), (30, 7.0)],
        "rollout/mean_length": [(10, 10.0), (20, 10.0), (30, 10.0)],
        "train/loss": [(10, 2.5), (20, 5.0), (30, 7.5)],
        "evaluation/mean_reward": [(30, 8.0)],
        "evaluation/tasks/lift/success_rate": [(30, 0.5)],
    }
    with RunLogger(tmp_path, settings, total_timesteps=100, start_step=20) as run:
        run.log_metrics(25, {"train/loss": 1.0})
    assert read_scalars(tmp_path)["train/loss"] == [(10, 2.5), (20, 5.0), (25, 1.0)]
    with RunLogger(tmp_path, settings, total_timesteps=100) as run:
        run.log_metrics(0, {"train/loss": 9.0})
    assert read_scalars(tmp_path)["train/loss"] == [(0, 9.0)]


def test_a_tracker_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers, closed = list(logging.getLogger("deft").handlers), []
    monkeypatch.setattr(sinks.TensorBoardSink, "close", lambda sink: closed.append(sink._file.close()))
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, None)
        settings = LoggingConfig(console_level="CRITICAL", **{f"use_{name}": True})
        with pytest.raises(InputError, match=rf'{name} is not installed: .*`pip install -e "\.\[{name}\]"`'):
            RunLogger(tmp_path, settings, total_timesteps=1)
    assert logging.getLogger("deft").handlers == handlers
    assert len(closed) == 2  # what was already open


class FakeTracker(ModuleType):
    """A stand-in for wandb and trackio that records the calls."""

    def __init__(self, name: str, directory: Path) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, Any]] = []
        self.errors = SimpleNamespace(Error=RuntimeError)
        self.run = SimpleNamespace(dir=str(directory / "files"), log=self._log, finish=self.finish)

    def Settings(self, **values: Any) -> dict[str, Any]:
        return values

    def init(self, **values: Any) -> SimpleNamespace:
        self.calls.append(("init", values))
        return self.run

    def _log(self, metrics: dict[str, float], step: int) -> None:
        self.calls.append(("log", (step, metrics)))

    def finish(self) -> None:
        self.calls.append(("finish", None))


@pytest.mark.parametrize(
    ("environment", "mode"), [({}, "offline"), ({"WANDB_API_KEY": "x"}, None), ({"WANDB_MODE": "disabled"}, None)]
)
def test_wandb_gets_the_scalars_and_is_offline_without_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], mode: str | None
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    wandb = FakeTracker("wandb", tmp_path / "offline-run-1")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    settings = LoggingConfig(console_level="CRITICAL", tensorboard=False, use_wandb=True)
    with RunLogger(tmp_path / "name", settings, total_timesteps=1, run_config={"seed": 3}) as run:
        run.log_metrics(7, {"loss": torch.tensor(0.5)})
        run.log_evaluation(7, {"mean_reward": 2.0})
    (_, opened), *rest = wandb.calls
    assert (opened["mode"], opened["config"], opened["dir"]) == (mode, {"seed": 3}, str(tmp_path / "name"))
    assert rest == [("log", (7, {"loss": 0.5})), ("log", (7, {"evaluation/mean_reward": 2.0})), ("finish", None)]
    log = next((tmp_path / "name" / "logs").iterdir()).read_text()
    assert (f"wandb sync {tmp_path / 'offline-run-1'}" in log) == (mode == "offline")


@pytest.mark.parametrize(("start_step", "resume"), [(0, "never"), (5, "allow")])
def test_trackio_gets_the_scalars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_step: int, resume: str
) -> None:
    trackio = FakeTracker("trackio", tmp_path)
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    settings = LoggingConfig(console_level="CRITICAL", tensorboard=False, use_trackio=True)
    with RunLogger(tmp_path / "name", settings, total_timesteps=9, start_step=start_step) as run:
        run.log_metrics(7, {"loss": 0.5})
    opening = {"project": "deft", "name": "name", "config": None, "resume": resume}
    assert trackio.calls == [("init", opening), ("log", (7, {"loss": 0.5})), ("finish", None)]


def test_wandb_really_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    settings = LoggingConfig(console_level="CRITICAL", tensorboard=False, use_wandb=True)
    with RunLogger(tmp_path, settings, total_timesteps=1, run_config={"env": {"id": "x"}}) as run:
        run.log_metrics(7, {"a_distinctive_name": 0.5})
    wandb.teardown()  # its process has written by then
    (record,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert b"a_distinctive_name" in record.read_bytes()


def test_trackio_really_local(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("trackio")
    from trackio import sqlite_storage

    monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", tmp_path / "trackio")
    settings = LoggingConfig(console_level="CRITICAL", tensorboard=False, use_trackio=True)
    with RunLogger(tmp_path / "name", settings, total_timesteps=1) as run:
        run.log_metrics(7, {"loss": 0.5})
    assert capsys.readouterr().out == ""
    (entry,) = sqlite_storage.SQLiteStorage.get_logs("deft", "name")
    assert (entry["step"], entry["loss"]) == (7, 0.5)
