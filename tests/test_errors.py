"""The exceptions: one printable line, and a conversion of what user code raises."""

from __future__ import annotations

import pytest
import torch

from deft.errors import DeftError, InputError, RunError, Stopped, fits_memory, one_line, user_code


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


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            torch.cuda.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which "
                "12.56 GiB is free. See documentation for Memory Management"
            ),
            "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB",
        ),
        (
            RuntimeError("Failed to allocate 4000 bytes on device 'cuda:0'"),  # Warp
            "RuntimeError: Failed to allocate 4000 bytes on device 'cuda:0'",
        ),
        (
            ValueError("Array shapes must not exceed the maximum representable value of a signed 32-bit integer"),
            "ValueError: Array shapes must not exceed the maximum representable value of a signed 32-bit integer",
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"),
            "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED",
        ),
        (MemoryError(), "MemoryError"),
    ],
)
def test_memory_that_does_not_suffice_is_wrong_input(error: BaseException, reason: str) -> None:
    with pytest.raises(InputError) as caught, fits_memory("use a smaller batch_size than 64"):
        raise error
    assert str(caught.value) == f"out of memory ({reason}): use a smaller batch_size than 64"


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes differ"), ValueError("x"), InputError("out of memory"), Stopped()]
)
def test_other_errors_pass_where_memory_is_checked(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, fits_memory("use less"):
        raise error
    assert caught.value is error
