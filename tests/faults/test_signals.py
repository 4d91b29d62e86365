"""Signals and killed workers of real processes."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from faulty_worlds import NEVER, TINY, Command, assert_one_line

from deft.runs import checkpoint

# -- real processes ----------------------------------------------------------------------------------------------------

in_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for child processes in /proc")


def children(parent: int) -> list[int]:
    """The processes that have this parent."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


PATIENCE = 300.0  # seconds: a limit for what hangs, on a machine that is busy with other things


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts an endless `python -m deft train` in tmp_path/run, and waits for its first checkpoint."""
    started: list[subprocess.Popen[str]] = []

    def begin(flags: str) -> subprocess.Popen[str]:
        command = f"-m deft train ppo --env CartPole-v1 {TINY} --total-timesteps {NEVER} --output-dir run {flags}"
        process = subprocess.Popen(
            [sys.executable, *shlex.split(command)],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        wait_for(lambda: process.poll() is not None or checkpoint.list_checkpoints(tmp_path / "run"))
        assert process.poll() is None
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@in_proc
@pytest.mark.parametrize(
    ("number", "flags", "status"),
    [
        (signal.SIGINT, "--num-envs 2 --vector process", 130),
        (signal.SIGTERM, "--buffer-type vla", 143),
        (signal.SIGUSR1, "--num-envs 2 --vector process", 138),
    ],
)
def test_a_signal_stops_the_run_and_saves_it(
    number: signal.Signals, flags: str, status: int, start: Any, tmp_path: Path, deft: Command
) -> None:
    process = start(flags)
    workers = children(process.pid)
    process.send_signal(number)
    _, complaint = process.communicate(timeout=PATIENCE)
    assert process.returncode == status, complaint
    lines = complaint.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("deft: stopped by ")
    assert workers or "process" not in flags
    wait_for(lambda: not any(map(is_running, workers)))
    latest, problems = checkpoint.latest_whole_checkpoint(tmp_path / "run")
    assert latest is not None
    assert not problems
    steps = checkpoint.load_training_state(latest)["num_timesteps"]
    assert deft(f"train --resume {tmp_path}/run --total-timesteps {steps + 64}") == (0, [])


@in_proc
def test_a_killed_worker_is_replaced(start: Any, tmp_path: Path) -> None:
    process = start("--num-envs 2 --num-workers 2 --vector process")
    first, second = children(process.pid)
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: set(children(process.pid)) - {first, second})
    metrics = tmp_path / "run" / "episode_metrics.jsonl"
    wait_for(lambda: '"rollout/lost_episodes": 1' in metrics.read_text())  # an update after the loss
    assert process.poll() is None
    assert is_running(second)


@in_proc
def test_a_killed_worker_ends_the_run_where_none_may_be_replaced(start: Any, tmp_path: Path, deft: Command) -> None:
    process = start("--num-envs 2 --num-workers 2 --vector process --restart-workers 0")
    first, second = children(process.pid)
    os.kill(first, signal.SIGKILL)
    _, complaint = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert_one_line(complaint.splitlines(), "worker process", "environment", "SIGKILL")
    wait_for(lambda: not is_running(second))
    latest, problems = checkpoint.latest_whole_checkpoint(tmp_path / "run")
    assert latest is not None
    assert not problems
    steps = checkpoint.load_training_state(latest)["num_timesteps"]
    assert deft(f"train --resume {tmp_path}/run --total-timesteps {steps + 64}") == (0, [])
