"""A simulator's chatter is held back, whoever writes it; Deft's own log is not."""

import logging
import os
import subprocess
import sys

import pytest

from deft.envs.suppress_logs import suppress_logs

# Run in a process of its own: pytest puts its own file in the place of `sys.stdout`.
CHATTER = """
import os, subprocess, sys
from deft.envs.suppress_logs import suppress_logs

def chatter(name):
    os.write(1, f"native {name}\\n".encode())
    os.write(2, f"native {name}\\n".encode())
    print("python", name)
    print("python", name, file=sys.stderr)
    subprocess.run([sys.executable, "-c", f"print('child {name}')"], check=True)

print("before")
with suppress_logs():
    chatter("outer")
    with suppress_logs():
        chatter("inner")
    chatter("outer again")
print("after")
with suppress_logs(enabled=False):
    print("not suppressed")
print("after", file=sys.stderr)
"""


def test_silence_lasts_as_long_as_the_block() -> None:
    done = subprocess.run([sys.executable, "-c", CHATTER], capture_output=True, text=True)
    assert done.stderr == "after\n"
    assert done.stdout == "before\nafter\nnot suppressed\n"


def test_deft_log_is_kept_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("deft")
    handler = logging.StreamHandler(sys.stderr)  # writes to descriptor 2, which is silent inside
    logger.addHandler(handler)
    try:
        with suppress_logs():
            logging.getLogger("deft.envs.adapters.maniskill").warning("one")
            logging.getLogger("deft.training").warning("two")
            logging.getLogger("someone.else").warning("not ours")
        logger.warning("three")
    finally:
        logger.removeHandler(handler)
    lines = [line for line in capfd.readouterr().err.splitlines() if line in ("one", "two", "three", "not ours")]
    assert lines == ["one", "two", "three"]
    assert logger.propagate


def test_levels_are_the_loggers_own(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "deft")
    with suppress_logs():
        logging.getLogger("deft.envs").debug("too fine")
        logging.getLogger("deft.envs").info("fine")
    assert [record.message for record in caplog.records] == ["fine"]


def test_what_was_printed_is_a_note_of_the_failure(capfd: pytest.CaptureFixture[str]) -> None:
    @suppress_logs()
    def fail() -> None:
        os.write(2, b"vk: failed to find a rendering device\n")
        raise RuntimeError("no device")

    with pytest.raises(RuntimeError, match="no device") as caught:
        fail()
    assert "failed to find a rendering device" in caught.value.__notes__[0]
    assert capfd.readouterr().err == ""
    print("still here")
    assert capfd.readouterr().out == "still here\n"


def test_what_was_printed_is_in_the_debug_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "deft")
    with suppress_logs():
        os.write(1, b"chatter\n")
    assert [record.message for record in caplog.records] == ["suppressed: chatter"]


def test_other_loggers_speak_from_warnings_on() -> None:
    logger = logging.getLogger("test.simulator")
    logger.setLevel(logging.DEBUG)
    with suppress_logs(loggers=("test.simulator",)):
        pass
    assert not logger.isEnabledFor(logging.INFO)
    assert logger.isEnabledFor(logging.WARNING)


def test_closed_descriptors_are_left_closed() -> None:
    code = (
        "import os; os.close(1)\n"
        "from deft.envs.suppress_logs import suppress_logs\n"
        "with suppress_logs():\n    os.write(2, b'hidden')\n"
        "os.write(2, b'shown')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "shown")
