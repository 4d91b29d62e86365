"""Signals as stop requests."""

import os
import signal

import pytest

from deft.errors import CommandExit, Stopped
from deft.runs.signals import StopSignal, interruptible, raise_if_stopped


def test_the_first_signal_only_requests_a_stop() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal() as stop:
        assert not stop()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop()
        assert stop.received is signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(CommandExit) as exit_status:
        stop.reraise()
    assert exit_status.value.code == 128 + signal.SIGTERM  # as a shell reports a process that the signal ended


def test_a_second_ctrl_c_interrupts_at_once() -> None:
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_an_ignored_hangup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` starts a process
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_work_is_interruptible_inside_the_context_alone() -> None:
    with interruptible(lambda: True), pytest.raises(Stopped):
        raise_if_stopped()
    raise_if_stopped()
