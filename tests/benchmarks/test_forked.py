"""Commands of `deft` that are forked from a process which has imported Deft."""

import os
import signal
import threading

import pytest

import deft


@pytest.fixture
def forked(load_benchmark, monkeypatch):
    module = load_benchmark("forked")
    monkeypatch.setattr(module, "IMPORTED", [])  # the imports of a server take seconds
    for name, value in module.worker_environment(1).items():
        monkeypatch.setenv(name, value)
    return module.Forked(1, threading.Event())


def test_a_command_has_a_status_an_output_and_errors(forked):
    cores = sorted(os.sched_getaffinity(0))[:1]
    status, output, errors = forked.command(["collect", "--env", "reach"], cores, None)
    assert (status, output) == (2, "")
    assert "--policy: missing" in errors
    status, output, errors = forked.command(["--version"], cores, None)
    assert (status, errors) == (0, "")
    assert deft.__version__ in output
    # One that takes longer than its limit is stopped: by Deft, or by the system while it is still imported.
    stopped = (128 + signal.SIGTERM, -signal.SIGTERM)
    assert forked.command(["collect", "--env", "reach"], cores, 0.0)[0] in stopped
    forked._is_interrupted.set()
    assert forked.command(["collect", "--env", "reach"], cores, None)[0] in stopped
