"""Benchmarks that end in time: commands that are stopped, and a program that interrupts itself."""

import argparse
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(load_benchmark):
    return load_benchmark("timed_bench")


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN])  # ignored: in the background
def test_a_program_interrupts_itself(script, handler):
    started, before = time.monotonic(), signal.signal(signal.SIGINT, handler)
    with pytest.raises(script.StoppedError, match="stopped by --stop-after"), script.interrupted_after(0.1 / 60):
        time.sleep(20)
    assert time.monotonic() - started < 10
    with pytest.raises(script.StoppedError, match="not started"), script.interrupted_after(0.0):
        pass
    with script.interrupted_after(float("inf")):
        pass
    assert signal.signal(signal.SIGINT, before) == handler  # as it was


def test_an_interruption_by_the_user_stays_one(script):
    with pytest.raises(KeyboardInterrupt), script.interrupted_after(1.0):
        raise KeyboardInterrupt


def test_commands_have_the_time_that_is_left(script, tmp_path, monkeypatch):
    limits = []

    def deft(self, *words, minutes=None):
        limits.append(minutes)
        self.started -= 60 * 4  # it takes four minutes
        return {"status": script.STOPPED}

    monkeypatch.setattr(script.Bench, "deft", deft)
    bench = script.TimedBench(argparse.Namespace(results=tmp_path, cores=1, stop_after=6.0))
    bench.deft("train", "sft")  # stopped after the minutes of a training, which are not those of the call
    with pytest.raises(script.StoppedError, match="stopped: deft train sft"):
        bench.deft("train", "sft")
    with pytest.raises(script.StoppedError, match="not started: deft train sft"):
        bench.deft("train", "sft")
    assert limits == [pytest.approx(6.0, abs=0.1), pytest.approx(2.0, abs=0.1)]


def test_jobs_run_with_those_that_follow_and_a_failure_ends_none_but_its_own(script, load_benchmark, tmp_path, capsys):
    def stop():
        raise script.StoppedError("stopped: deft train ppo")

    def fail():
        raise RuntimeError("the gripper fell off")

    part = load_benchmark("bakeoff_plan").Part
    parts = [part(name, 0, 60.0) for name in ("first", "second", "stopped", "failing")]
    plan, kept = script.Plan(parts, 2, "cpu"), {}

    def keep(name, seed, found):
        time.sleep(0.005)
        kept[name, seed] = found
        return [script.Job("second", seed, lambda: 2 * found)] if name == "first" else []

    bench = script.TimedBench(argparse.Namespace(results=tmp_path, cores=1, stop_after=None, parallel=2))
    jobs = [script.Job("first", 0, lambda: 3), script.Job("stopped", 0, stop), script.Job("failing", 0, fail)]
    failures, is_left = bench.run_jobs(plan, jobs, keep)
    assert kept == {("first", 0): 3, ("second", 0): 6}
    assert failures == ["failing, seed 0: the gripper fell off"]
    assert is_left
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(";")[0] for line in lines] == ["seed 0: first done", "seed 0: second done"]
    kept.clear()
    bench.arguments.parallel = 1  # jobs end in the order of their submission
    many = [script.Job(f"job {number}", 0, lambda: None) for number in range(20)]  # several end before one is kept
    assert bench.run_jobs(plan, many, keep) == ([], False)
    assert [name for name, _ in kept] == [job.name for job in many]


@pytest.mark.parametrize("saves", [False, True])  # with the exit status of a run that saved
def test_ctrl_c_stops_commands_and_keeps_what_is_finished(script, load_benchmark, tmp_path, monkeypatch, capsys, saves):
    started = []

    def popen(words, **options):
        started.append(words)
        code = "import sys, time; print('{}', flush=True); time.sleep(60 * ('ppo' in sys.argv))"
        if saves:
            code = f"import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(130)); {code}"
        return subprocess.Popen([sys.executable, "-c", code, *words[3:]], **options)

    headline = load_benchmark("headline")
    monkeypatch.setattr(headline, "subprocess", argparse.Namespace(**vars(subprocess) | {"Popen": popen}))
    part = load_benchmark("bakeoff_plan").Part
    names = ("sft", "ppo", "dsrl", "grpo")
    plan, kept = script.Plan([part(name, 0, 60.0) for name in names], 2, "cpu"), []
    bench = script.TimedBench(argparse.Namespace(results=tmp_path, cores=1, stop_after=None, parallel=1))

    def keep(name, seed, found):
        kept.append(name)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()  # while PPO trains
        return [script.Job("grpo", 0, functools.partial(bench.deft, "train", "grpo"))]

    jobs = [script.Job(name, 0, functools.partial(bench.deft, "train", name)) for name in names[:3]]
    begun, handler = time.monotonic(), signal.getsignal(signal.SIGINT)
    failures, is_left = bench.run_jobs(plan, jobs, keep)
    assert (failures, is_left, kept) == ([], True, ["sft"])
    assert [words[4] for words in started] == ["sft", "ppo"]
    assert time.monotonic() - begun < 20
    assert signal.getsignal(signal.SIGINT) is handler
    assert bench.exit_status(failures, is_left) == 130
    assert capsys.readouterr().out.splitlines()[1:] == ["stopped; the same command continues"]


@pytest.mark.skipif(sys.platform != "linux", reason="a signal of Linux")
def test_a_command_ends_with_a_benchmark_that_is_killed():
    """The benchmark starts a command that sleeps for a minute, prints its process id, and is killed."""
    code = (
        "import headline, os, subprocess, time\n"
        "cores = sorted(os.sched_getaffinity(0))\n"
        "print(subprocess.Popen(['sleep', '60'], preexec_fn=lambda: headline.follow(cores)).pid, flush=True)\n"
        "time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=BENCHMARKS, stdout=subprocess.PIPE, text=True) as benchmark:
        pid = int(benchmark.stdout.readline())
        status = Path(f"/proc/{pid}/stat")
        assert status.read_text().split()[2] in "SR"
        benchmark.kill()
    deadline = time.monotonic() + 10
    while status.exists() and status.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not status.exists() or status.read_text().split()[2] == "Z"
