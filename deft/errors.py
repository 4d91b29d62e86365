"""The two failures that Deft tells apart: what the user gave, and what happened while running.

`deft` prints either as one line; the exit status is 2 for the first and 1 for the second.
"""


class DeftError(Exception):
    """An error whose message is meant for the user, complete in one line."""

    exit_status = 1


class Stopped(Exception):
    """A stop request (a signal) ended what was under way, such as an evaluation, before it was complete."""


class InputError(DeftError, ValueError):
    """A setting, file, call or environment that cannot be used as given."""

    exit_status = 2


class RunError(DeftError, RuntimeError):
    """A run that started and could not go on."""
