"""The two failures that Deft tells apart: what the user gave, and what happened while running.

`deft` prints either as one line; the exit status is 2 for the first and 1 for the second. `user_code` turns what the
user's environments and modules raise into them.
"""

from types import TracebackType


class DeftError(Exception):
    """An error whose message is meant for the user, complete in one line."""

    exit_status = 1

    def __init__(self, message: object = "") -> None:
        """Keep the message as one line: text of files and of other libraries can hold control characters."""
        text = str(message)
        super().__init__(text if text.isprintable() else printable(text))


class Stopped(Exception):
    """A stop request (a signal) ended what was under way, such as an evaluation, before it was complete."""


class CommandExit(SystemExit):
    """The end of a command that Deft itself decided on: after `--help`, or after a stop signal."""


class InputError(DeftError, ValueError):
    """A setting, file, call or environment that cannot be used as given."""

    exit_status = 2


class RunError(DeftError, RuntimeError):
    """A run that started and could not go on."""


def printable(text: str) -> str:
    """The text on one line: spaces for line breaks and tabs, escapes for what a terminal would act on."""
    words = " ".join(text.split())
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in words)


NOT_FINITE = (
    "so no environment was stepped: the policy's weights or its normalisation are no longer finite; lower "
    "learning_rate, or check the rewards and observations for extreme values"
)


def one_line(error: BaseException) -> str:
    """An exception's type and message without line breaks."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


class user_code:
    """Context manager for calls into the user's environments and modules: whatever they raise becomes a DeftError.

    sys.exit() too: it would end the run as if it were done. Deft's own exceptions and Ctrl-C pass unchanged. The
    message is `what`, then the error.
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
