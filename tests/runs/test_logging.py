"""`RunLogger`: what it writes, what a resumed run finds, and that it leaves the process as it was."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deft.config.settings import LoggingConfig
from deft.errors import RunError
from deft.runs.logging import RunLogger

QUIET = LoggingConfig(console_level="CRITICAL", tensorboard=False, enable_file_logging=False)


@dataclass
class FinishedEpisode:
    episode_return: float
    length: int = 10
    success: bool | None = None
    terms: dict[str, float] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)


def reject_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def read_lines(run_dir: Path) -> list[dict[str, Any]]:
    """The lines without their time; NaN and Infinity, which Python's reader would accept, raise an error."""
    text = (run_dir / "episode_metrics.jsonl").read_text()
    lines = [json.loads(line, parse_constant=reject_constant) for line in text.splitlines()]
    for line in lines:
        assert abs(line.pop("time") - time.time()) < 600
    return lines


def test_lines_of_updates_episodes_and_evaluations(tmp_path: Path) -> None:
    with RunLogger(tmp_path, QUIET, total_timesteps=100) as run:
        assert run.mean_reward is None
        run.log_episode(10, FinishedEpisode(1.0, 10, True, {"reach": 0.5}))
        run.log_episode(20, FinishedEpisode(2.0, 30, False, labels={"task": "lift", "instruction": "lift the cube"}))
        run.log_metrics(20, {"train/policy_loss": torch.tensor(0.25), "train/version": 3})
        run.log_evaluation(
            20, {"episodes": 2, "mean_reward": np.float32(1.5), "tasks": {"lift": {"success_rate": 1.0}}}
        )
    assert read_lines(tmp_path) == [
        {"type": "episode", "step": 10, "episode_return": 1.0, "length": 10, "success": True, "terms": {"reach": 0.5}},
        {"type": "episode", "step": 20, "episode_return": 2.0, "length": 30, "success": False, "task": "lift"},
        {
            "type": "update",
            "step": 20,
            "rollout/mean_reward": 1.5,  # (1 + 2) / 2
            "rollout/mean_length": 20.0,  # (10 + 30) / 2
            "rollout/success_rate": 0.5,  # 1 of 2
            "rollout/term_reach": 0.5,  # of the one episode that has it
            "train/policy_loss": 0.25,
            "train/version": 3,
        },
        {
            "type": "evaluation",
            "step": 20,
            "episodes": 2,
            "mean_reward": 1.5,
            "tasks": {"lift": {"success_rate": 1.0}},
        },
    ]


def test_a_longer_window_holds_more(tmp_path: Path) -> None:
    with RunLogger(tmp_path, QUIET, total_timesteps=100, window=128) as run:
        for number in range(150):
            run.log_episode(number, FinishedEpisode(float(number), length=1, terms={"part": float(number)}))
        assert run.mean_reward == run.mean_terms["part"] == 85.5  # mean of 22 … 149


def test_window_holds_the_last_100_episodes(tmp_path: Path) -> None:
    with RunLogger(tmp_path, QUIET, total_timesteps=100) as run:
        for number in range(150):
            run.log_episode(number, FinishedEpisode(float(number), length=2 * number))
        assert run.mean_reward == 99.5  # mean of 50 … 149
        assert run.mean_length == 199.0
        assert run.success_rate is None  # the environment did not say


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    with RunLogger(tmp_path, QUIET, total_timesteps=100) as run:
        run.log_metrics(1, {"a": float("nan"), "b": torch.tensor(float("inf")), "c": 2.0})
        run.log_evaluation(2, {"mean_reward": np.float32("nan"), "returns": np.array([1.0, -np.inf]), "name": "x"})
        run.log_episode(3, FinishedEpisode(float("-inf"), terms={"reach": float("nan")}))
    update, evaluation, episode = read_lines(tmp_path)
    assert update == {"type": "update", "step": 1, "a": None, "b": None, "c": 2.0}
    assert evaluation == {"type": "evaluation", "step": 2, "mean_reward": None, "returns": [1.0, None], "name": "x"}
    assert episode["episode_return"] is None
    assert episode["terms"] == {"reach": None}


def test_tensors_come_over_in_one_transfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transfers = []
    tolist = torch.Tensor.tolist

    def counted(tensor: torch.Tensor) -> Any:
        transfers.append(tensor.shape)
        return tolist(tensor)

    def forbidden(tensor: torch.Tensor) -> None:
        raise AssertionError("one synchronization a metric")

    metrics = {
        "one": torch.tensor(1.0, requires_grad=True),
        "two": torch.tensor([2.0], dtype=torch.float64),
        "three": torch.tensor(3),
        "four": 4.0,
    }
    with RunLogger(tmp_path, QUIET, total_timesteps=100) as run, monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "tolist", counted)
        patch.setattr(torch.Tensor, "item", forbidden)
        patch.setattr(torch.Tensor, "__float__", forbidden)
        run.log_metrics(5, metrics)
    assert transfers == [(3,)]
    assert read_lines(tmp_path) == [{"type": "update", "step": 5, "one": 1.0, "two": 2.0, "three": 3.0, "four": 4.0}]


def test_a_metric_is_one_number_and_keeps_off_the_fields_of_a_line(tmp_path: Path) -> None:
    with RunLogger(tmp_path, QUIET, total_timesteps=100) as run:
        with pytest.raises(ValueError, match=r"metric loss has shape \(2,\)"):
            run.log_metrics(1, {"loss": torch.zeros(2)})
        with pytest.raises(ValueError, match=r"'step'.* cannot name a metric"):
            run.log_metrics(1, {"step": 2.0})


def log_steps(run: RunLogger, first: int, last: int) -> None:
    for step in range(first, last):
        run.log_episode(step, FinishedEpisode(float(step**2), length=step))
        run.log_metrics(step, {"loss": 1.0 / (1 + step)})


@pytest.mark.parametrize("half_line", [b'{"type": "update", "step": 1', b'{"type": "update", "step": 1}'])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, half_line: bytes) -> None:
    with RunLogger(tmp_path / "whole", QUIET, total_timesteps=300) as run:
        log_steps(run, 1, 240)
        expected_mean = run.mean_reward

    with RunLogger(tmp_path / "broken", QUIET, total_timesteps=300) as run:
        log_steps(run, 1, 151)
        torch.save(run.state_dict(), tmp_path / "state.pt")  # the checkpoint at step 150
        log_steps(run, 151, 200)  # lost with the process, which leaves half a line behind
    path = tmp_path / "broken" / "episode_metrics.jsonl"
    path.write_bytes(path.read_bytes() + half_line)  # without its end, be it only the newline

    with RunLogger(tmp_path / "broken", QUIET, total_timesteps=300, start_step=150) as run:
        run.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        log_steps(run, 151, 240)
        assert run.mean_reward == expected_mean
    assert read_lines(tmp_path / "broken") == read_lines(tmp_path / "whole")
    assert sorted(path.name for path in (tmp_path / "broken").iterdir()) == [".deft-files", "episode_metrics.jsonl"]


def test_a_run_from_the_start_replaces_the_metrics_of_an_earlier_one(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        with RunLogger(tmp_path, QUIET, total_timesteps=100) as run:
            run.log_metrics(0, {"loss": value})
    assert read_lines(tmp_path) == [{"type": "update", "step": 0, "loss": 2.0}]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("name", ["episode_metrics.jsonl", "tensorboard", "logs"])
def test_a_full_disk_ends_the_run_with_one_line(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    handlers, level = list(logging.getLogger("deft").handlers), logging.getLogger("deft").level

    def train() -> None:
        with RunLogger(tmp_path, LoggingConfig(console_level="ERROR"), total_timesteps=100) as run:
            place = tmp_path / name
            path = place if place.is_file() else next(place.iterdir())
            full = os.open("/dev/full", os.O_WRONLY)
            for descriptor in Path("/proc/self/fd").iterdir():  # the open file now is the full device
                if descriptor.is_symlink() and os.readlink(descriptor) == str(path):
                    os.dup2(full, int(descriptor.name))
            os.close(full)
            logging.getLogger("deft.test").info("a line for the log")
            run.log_metrics(1, {"loss": 1.0})
            run.flush()
            raise AssertionError("the failure was not seen while training")

    with pytest.raises(RunError, match=r"cannot write the logs of .*No space left on device") as caught:
        train()
    assert "\n" not in str(caught.value)
    assert "Traceback" not in capsys.readouterr().err
    assert (logging.getLogger("deft").handlers, logging.getLogger("deft").level) == (handlers, level)


def test_a_run_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot write the logs of .*file/run: Not a directory"):
        RunLogger(tmp_path / "file" / "run", QUIET, total_timesteps=1)


def test_console_and_file_levels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("deft.somewhere")
    with RunLogger(tmp_path, LoggingConfig(console_level="WARNING", tensorboard=False), total_timesteps=1):
        log.debug("for the file")
        log.warning("for %s", "both")
    log.warning("for neither")
    console = [line for line in capsys.readouterr().err.splitlines() if "for neither" not in line]
    assert len(console) == 1
    assert re.fullmatch(r"\d\d:\d\d:\d\d WARNING for both", console[0])
    (path,) = (tmp_path / "logs").iterdir()
    assert re.fullmatch(r"rl_training_\d{8}_\d{6}\.log", path.name)
    lines = path.read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == [
        "DEBUG deft.somewhere: for the file",
        "WARNING deft.somewhere: for both",
    ]


def test_runs_of_one_process_share_the_console_and_leave_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deft_logger, root = logging.getLogger("deft"), logging.getLogger()
    before = (list(deft_logger.handlers), deft_logger.level, list(root.handlers), root.level)
    settings = LoggingConfig(tensorboard=False)
    first = RunLogger(tmp_path / "first", settings, total_timesteps=1)
    second = RunLogger(tmp_path / "second", settings, total_timesteps=1)
    logging.getLogger("deft.test").info("said once")
    first.close()  # not in the order of opening: the second keeps its console
    logging.getLogger("deft.test").info("said later")
    second.close()
    second.close()  # a second time does nothing
    error_output = capsys.readouterr().err
    assert error_output.count("said once") == 1
    assert error_output.count("said later") == 1
    assert (list(deft_logger.handlers), deft_logger.level, list(root.handlers), root.level) == before
    texts = [next((tmp_path / name / "logs").iterdir()).read_text() for name in ("first", "second")]
    assert ["said later" in text for text in texts] == [False, True]
