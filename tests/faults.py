"""Faults of a machine, for tests: a process that dies at a given call, a disk that is full."""

import contextlib
import subprocess

import pytest


def dies_after(number, call):
    """`call`, which raises from its given number on: where a kill would have ended the process."""
    count = 0

    def function(*arguments, **named):
        nonlocal count
        count += 1
        if count > number:
            raise KeyboardInterrupt
        return call(*arguments, **named)

    return function


@contextlib.contextmanager
def small_disk(place, size="1m"):
    """A file system of so many bytes at a new folder; only root may make one, so the test is skipped for others."""
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("cannot mount a file system")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)
