"""Progress of a run: log lines off a terminal, a bar on one."""

from __future__ import annotations

import io
import logging
import re
import sys
import time
from pathlib import Path

import pytest
import torch

from deft.config.settings import LoggingConfig
from deft.envs.vector import Episode
from deft.runs import logging as run_logging
from deft.runs import progress
from deft.runs.logging import RunLogger

QUIET = LoggingConfig(console_level="CRITICAL", tensorboard=False, enable_file_logging=False)


class Clock:
    """Stands in for the module's `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return time.time()


def test_progress_lines_off_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr(run_logging, "time", clock)
    monkeypatch.setattr(progress, "time", clock)
    settings = LoggingConfig(tensorboard=False, enable_file_logging=False)
    with RunLogger(tmp_path, settings, total_timesteps=6000, start_step=1000) as run:
        run.log_episode(1100, Episode(0, 12.5, 10, None, {}))
        for step in range(1100, 2001, 100):  # 100 steps a second
            clock.now += 1.0
            run.progress(step, kl=0.5)
        run.progress(2050)  # within ten seconds of the line
    lines = capsys.readouterr().err.splitlines()
    # 1,000 steps in 10 s are 100 steps/s; the 4,000 that are left take 40 s. The last step is shown at the end.
    assert [line.split(" ", 1)[1] for line in lines] == [
        "INFO 33% of 6,000 · 2,000 steps · 100 steps/s · 0:00:40 left · mean_reward 12.5 · kl 0.5 · 0:00:10 elapsed",
        "INFO 34% of 6,000 · 2,050 steps · 105 steps/s · 0:00:38 left · mean_reward 12.5 · 0:00:10 elapsed",
    ]


def test_a_last_round_may_go_beyond_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = LoggingConfig(tensorboard=False, enable_file_logging=False)
    with RunLogger(tmp_path, settings, total_timesteps=2) as run:
        run.progress(3)
    assert "INFO 100% of 2 · 3 steps" in capsys.readouterr().err


@pytest.mark.parametrize(("rate", "shown"), [(1234.6, "1,235"), (9.94, "9.9"), (0.184, "0.18"), (0.0, "0")])
def test_slow_rates_are_not_rounded_to_none(rate: float, shown: str) -> None:
    assert progress._rate(rate) == shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def use_terminal(monkeypatch: pytest.MonkeyPatch, columns: int = 120) -> Terminal:
    """A terminal as stderr; pytest replaces stderr after the fixtures of a test, so that this is none."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    return terminal


def drawn_lines(terminal: Terminal) -> list[str]:
    """What was drawn, line by line, without colours and movements of the cursor."""
    return [line.strip() for line in re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", terminal.getvalue()).split("\n")]


def test_progress_bar_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    settings = LoggingConfig(tensorboard=False, enable_file_logging=False)
    with RunLogger(tmp_path, settings, total_timesteps=1000) as run, RunLogger(tmp_path / "2", settings, 10) as other:
        run.log_episode(400, Episode(0, 12.5, 10, None, {}))
        run.progress(400)
        logging.getLogger("deft.test").warning("above [the] bar")
        other.progress(10)  # a terminal has room for one bar: this run speaks in lines
        run.progress(1000, entropy=0.5)
    drawn = terminal.getvalue()
    assert "  0%" in drawn
    assert "100%" in drawn
    assert "1,000 steps" in drawn
    assert "mean_reward  entropy" in drawn_lines(terminal)
    assert "12.5         0.5" in drawn_lines(terminal)
    assert "WARNING above [the] bar" in drawn
    assert "INFO 100% of 10" in drawn
    assert drawn.count("\x1b[?25l") == drawn.count("\x1b[?25h") == 1  # the cursor comes back
    assert not progress.ProgressDisplay.bar_in_use


METRICS = {"approx_kl": 0.01, "clip_fraction": 0.1, "entropy": torch.tensor(0.5), "value_loss": 3.0, "policy_loss": 4.0}


def test_the_table_of_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    assert drawn_table(tmp_path / "wide", terminal) == [
        "mean_reward  success_rate  approx_kl  entropy  value_loss  evaluation/mean_reward  evaluation/success_rate",
        "12.5         1             0.01       0.5      3           20.5                    0.75",
    ]
    terminal = use_terminal(monkeypatch, columns=60)  # 13 + 14 + 11 + 9 + 10 = 57 columns fit; the next 22 do not
    assert drawn_table(tmp_path / "narrow", terminal, lines=4) == [
        "mean_reward  success_rate  approx_kl  entropy  value_loss",
        "12.5         1             0.01       0.5      3",
        "evaluation/mean_reward  evaluation/success_rate",
        "20.5                    0.75",
    ]


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        (120, "1,234,567 steps · 12,345 steps/s · 0:12:34 left · 0:01:40 elapsed"),
        (81, "1,234,567 steps · 12,345 steps/s · 0:12:34 left · 0:01:40 elapsed"),  # 65 + 16 columns
        (80, "1,234,567 steps · 12,345 steps/s · 0:12:34 left"),
        (63, "1,234,567 steps · 12,345 steps/s · 0:12:34 left"),  # 47 + 16 columns
        (60, "1,234,567 steps · 0:12:34 left"),
        (46, "1,234,567 steps · 0:12:34 left"),  # 30 + 16 columns
        (45, "1,234,567 steps"),
    ],
)
def test_a_narrow_terminal_has_fewer_parts(columns: int, text: str) -> None:
    """The percentage and the bar take 16 columns."""
    parts = ["1,234,567 steps", "12,345 steps/s", "0:12:34 left", "0:01:40 elapsed"]
    assert progress.BESIDE_TEXT == 16
    assert progress.fitted(parts, columns - progress.BESIDE_TEXT) == text


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_no_line_of_the_display_is_cut(columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch, columns)
    with RunLogger(tmp_path, LoggingConfig(tensorboard=False, enable_file_logging=False), 12_345_678) as run:
        run.log_metrics(400, METRICS)
        run.progress(1_234_567)
        with run.evaluation(1000, lambda: False) as count:
            time.sleep(progress.BAR_INTERVAL)
            count(1000)
    lines = drawn_lines(terminal)
    assert any("1,234,567 steps · " in line and " left" in line for line in lines)
    assert any("evaluating: 1000 of 1000 episodes" in line for line in lines)
    assert "…" not in terminal.getvalue()
    assert max(len(part) for line in lines for part in line.split("\r")) <= columns


def drawn_table(folder: Path, terminal: Terminal, lines: int = 2) -> list[str]:
    settings = LoggingConfig(tensorboard=False, enable_file_logging=False)
    with RunLogger(folder, settings, total_timesteps=1000) as run:
        run.log_episode(400, Episode(0, 12.5, 10, True, {}))
        run.log_metrics(400, METRICS)
        run.log_evaluation(400, {"mean_reward": 20.5, "std_reward": 1.0, "success_rate": 0.75})
        run.progress(400)
    return [line for line in drawn_lines(terminal) if line][-lines:]
