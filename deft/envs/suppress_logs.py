"""Silence for simulators: what they and their drivers print while they are imported and made goes nowhere.

The adapters of ManiSkill and RoboTwin use it. Much of that chatter is written by native code,
straight to the file descriptors 1 and 2, where neither `sys.stdout` nor `logging` can hold it back. Deft's own log is
kept.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import IO

log = logging.getLogger(__name__)
_MOST_CHARACTERS = 4000  # of what was held back, the end is shown in a failure


@contextlib.contextmanager
def suppress_logs(enabled: bool = True, loggers: tuple[str, ...] = ()) -> Iterator[None]:
    """Hold back what this process writes to stdout and stderr, in Python and below it.

    Records of Deft's loggers are kept and appear at the end of the block; those of `loggers` (others' names) appear
    from WARNING on, from here on. What was held back is logged at DEBUG, and is a note of an exception that leaves the
    block. Descriptors belong to the whole process: keep the block short, and do not use it where other threads print.
    """
    for name in loggers:
        logging.getLogger(name).setLevel(logging.WARNING)
    if not enabled:
        yield
        return
    with tempfile.TemporaryFile() as held_back:
        try:
            with _deft_log_kept(), _descriptors_into(held_back):
                yield
        except BaseException as error:
            if text := _end_of(held_back):
                error.add_note(f"it had printed:\n{text}")
            raise
        if text := _end_of(held_back):
            log.debug("held back: %s", text)


@contextlib.contextmanager
def _descriptors_into(file: IO[bytes]) -> Iterator[None]:
    """Point descriptors 1 and 2 to a file for a while."""
    saved: dict[int, int] = {}
    _flush()
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # closed, as in some daemons
            saved[descriptor] = os.dup(descriptor)
            os.dup2(file.fileno(), descriptor)
    try:
        yield
    finally:
        _flush()  # what Python has buffered was printed inside
        for descriptor, original in saved.items():
            os.dup2(original, descriptor)
            os.close(original)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


class _Keeper(logging.Handler):
    """Keeps records for later."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextlib.contextmanager
def _deft_log_kept() -> Iterator[None]:
    """Have Deft's log wait until its handlers can write again."""
    logger = logging.getLogger("deft")
    handlers, propagate, keeper = logger.handlers[:], logger.propagate, _Keeper()
    logger.handlers, logger.propagate = [keeper], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = handlers, propagate
        for record in keeper.records:
            logger.handle(record)


def _end_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace").strip()[-_MOST_CHARACTERS:]
