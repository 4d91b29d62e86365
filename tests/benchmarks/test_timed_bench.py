"""Benchmarks that end in time: commands that are stopped, and a program that interrupts itself."""

import argparse
import time

import pytest


@pytest.fixture
def script(load_benchmark):
    return load_benchmark("timed_bench")


def test_a_program_interrupts_itself(script):
    started = time.monotonic()
    with pytest.raises(script.StoppedError, match="stopped by --stop-after"), script.interrupted_after(0.1 / 60):
        time.sleep(20)
    assert time.monotonic() - started < 10
    with pytest.raises(script.StoppedError, match="not started"), script.interrupted_after(0.0):
        pass
    with script.interrupted_after(float("inf")):
        pass


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
