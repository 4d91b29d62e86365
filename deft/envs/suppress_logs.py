"""Suppress the output of simulators and their drivers while they are imported and constructed.

The adapters of ManiSkill and RoboTwin use it. Native code writes directly to the file descriptors 1 and 2, which
neither `sys.stdout` nor `logging` controls. Deft's own log is kept.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import IO

log = logging.getLogger(__name__)
_MOST_RECORDS = 2**20  # more would be lost
_MOST_CHARACTERS = 4000  # of the suppressed output, the end is part of an exception


@contextlib.contextmanager
def suppress_logs(enabled: bool = True, loggers: tuple[str, ...] = ()) -> Iterator[None]:
    """Suppress everything that this process writes to stdout and stderr, including native code.

    Records of Deft's loggers are emitted at the end of the block. The level of `loggers` becomes WARNING permanently.
    Suppressed output is logged at DEBUG, and added as a note to an exception that leaves the block. Descriptors belong
    to the whole process: keep the block short, and do not use it while other threads print.
    """
    for name in loggers:
        logging.getLogger(name).setLevel(logging.WARNING)
    if not enabled:
        yield
        return
    with tempfile.TemporaryFile() as suppressed:
        try:
            with _deft_log_kept(), _descriptors_into(suppressed):
                yield
        except BaseException as error:
            if text := _end_of(suppressed):
                error.add_note(f"output before the error:\n{text}")
            raise
        if text := _end_of(suppressed):
            log.debug("suppressed: %s", text)


@contextlib.contextmanager
def _descriptors_into(file: IO[bytes]) -> Iterator[None]:
    """Redirect descriptors 1 and 2 to a file."""
    saved: dict[int, int] = {}
    _flush()
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # closed, as in some daemons
            saved[descriptor] = os.dup(descriptor)
            os.dup2(file.fileno(), descriptor)
    try:
        yield
    finally:
        _flush()  # text that Python has buffered was printed in the block
        for descriptor, original in saved.items():
            os.dup2(original, descriptor)
            os.close(original)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


@contextlib.contextmanager
def _deft_log_kept() -> Iterator[None]:
    """Delay Deft's log until its handlers can write again."""
    logger = logging.getLogger("deft")
    handlers, propagate, keeper = logger.handlers[:], logger.propagate, logging.handlers.BufferingHandler(_MOST_RECORDS)
    logger.handlers, logger.propagate = [keeper], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = handlers, propagate
        for record in keeper.buffer:
            logger.handle(record)


def _end_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace").strip()[-_MOST_CHARACTERS:]
