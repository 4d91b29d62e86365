"""The two failures that Deft tells apart: what the user gave, and what happened while running.

`deft` prints either as one line; the exit status is 2 for the first and 1 for the second.
"""


class DeftError(Exception):
    """An error whose message is meant for the user, complete in one line."""

    exit_status = 1

    def __init__(self, message: object = "") -> None:
        """Keep the message as one line: text of files and of other libraries can hold control characters."""
        text = str(message)
        super().__init__(text if text.isprintable() else printable(text))


class Stopped(Exception):
    """A stop request (a signal) ended what was under way, such as an evaluation, before it was complete."""


class InputError(DeftError, ValueError):
    """A setting, file, call or environment that cannot be used as given."""

    exit_status = 2


class RunError(DeftError, RuntimeError):
    """A run that started and could not go on."""


def printable(text: str) -> str:
    """The text on one line: spaces for line breaks and tabs, escapes for what a terminal would act on."""
    words = " ".join(text.split())
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in words)
