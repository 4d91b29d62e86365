"""The exceptions of Deft: `InputError` for wrong input, `RunError` for failures during a run.

`deft` prints both as one line. The exit status is 2 for wrong input and 1 for failures. `user_code` converts the
exceptions of the user's environments and modules.
"""

import contextlib
import re
from collections.abc import Iterator
from types import TracebackType
from typing import Any


class DeftError(Exception):
    """An error with a message of one line for the user."""

    exit_status = 1

    def __init__(self, message: object = "") -> None:
        """Convert the message to one line: text of files and other libraries can contain control characters."""
        text = str(message)
        super().__init__(text if text.isprintable() else printable(text))


class Stopped(Exception):
    """A stop request (a signal) interrupted an operation such as an evaluation."""


class CommandExit(SystemExit):
    """Exit of a command by Deft itself: after `--help`, or after a stop signal."""


class InputError(DeftError, ValueError):
    """A setting, file, call or environment is invalid."""

    exit_status = 2


class RunError(DeftError, RuntimeError):
    """A run failed after its start."""


def printable(text: str) -> str:
    """Return the text on one line: spaces for line breaks and tabs, escapes for control characters."""
    words = " ".join(text.split())
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in words)


NOT_FINITE = (
    "so no environment was stepped: the policy's weights or its normalisation are no longer finite; lower "
    "learning_rate, or check the rewards and observations for extreme values"
)


def one_line(error: BaseException) -> str:
    """Return the type and message of an exception without line breaks."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


# Messages of torch and cuBLAS, of Warp, and of Warp's arrays with more rows than it can count.
_OUT_OF_MEMORY = re.compile("out of memory|alloc_failed|can't allocate|failed to allocate|array shapes must not", re.I)


@contextlib.contextmanager
def fits_memory(advice: str) -> Iterator[None]:
    """Raise InputError with `advice` if a GPU, or main memory, is too small for what runs in the context."""
    try:
        yield
    except (RuntimeError, ValueError, MemoryError) as error:
        if isinstance(error, DeftError):
            raise
        if not isinstance(error, MemoryError) and not _OUT_OF_MEMORY.search(str(error)):
            raise
        reason = ". ".join(one_line(error).split(". ")[:2])  # torch adds a page of statistics
        raise InputError(f"out of memory ({reason}): {advice}") from error


def shown(value: Any, width: int = 60) -> str:
    """Return a value for a message: on one line, shortened to `width` characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= width else f"{text[: width - 1]}…"


class user_code:
    """Context manager for calls into the user's environments and modules: converts exceptions to a DeftError.

    SystemExit is converted too, since it would end the run as if it were complete. Deft's own exceptions and
    KeyboardInterrupt are not. The message is `what`, followed by the error.
    """

    def __init__(self, what: str, kind: type[DeftError] = RunError) -> None:
        self._what, self._kind = what, kind

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, DeftError | Stopped | KeyboardInterrupt):
            raise self._kind(f"{self._what} {one_line(error)}") from error
