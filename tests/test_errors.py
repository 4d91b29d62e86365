"""The exceptions: one printable line, and a conversion of what user code raises."""

from __future__ import annotations

import pytest

from deft.errors import DeftError, InputError, RunError, Stopped, one_line, user_code


def test_a_message_is_one_printable_line() -> None:
    assert str(InputError("a\n  b\tc \x1b[31m")) == "a b c \\x1b[31m"
    assert one_line(ValueError("a\n b")) == "ValueError: a b"
    assert one_line(ValueError()) == "ValueError"


def test_wrong_input_has_another_exit_status_than_a_failed_run() -> None:
    assert (InputError("x").exit_status, RunError("x").exit_status) == (2, 1)


@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit(3)])
def test_what_user_code_raises_becomes_a_deft_error(error: BaseException) -> None:
    with pytest.raises(RunError, match=r"^env.step: (ValueError: broken|SystemExit: 3)$"), user_code("env.step:"):
        raise error


@pytest.mark.parametrize("error", [InputError("own"), Stopped(), KeyboardInterrupt()])
def test_what_is_not_the_users_passes_unchanged(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, user_code("env.step:", DeftError):
        raise error
    assert caught.value is error
