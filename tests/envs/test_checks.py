"""Checks of constructor arguments: what is wrong, with the value, and what to choose."""

import math
import sys

import numpy as np
import pytest

from deft.envs.checks import (
    check_choice,
    check_difficulty,
    check_image_size,
    check_render_mode,
    check_whole,
    import_optional,
)
from deft.errors import InputError


def test_values_that_are_allowed_pass() -> None:
    check_choice("reward", "dense", ("dense", "sparse"))
    check_render_mode(None)
    check_render_mode("rgb_array")
    assert check_difficulty("hard") == "hard"
    assert check_whole("num_objects", np.int64(2), 1, 4) == 2
    assert check_image_size(16) == 16


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda: check_choice("camera", "side", ("front",)), "camera is 'side'; choose 'front'"),
        (lambda: check_choice("reward", 3, ("a", "b", "c")), "reward is 3; choose 'a', 'b' or 'c'"),
        (lambda: check_render_mode("human"), "render_mode is 'human'; choose 'rgb_array' or None"),
        (lambda: check_difficulty("extreme"), "difficulty is 'extreme'; choose 'easy', 'medium' or 'hard'"),
        (lambda: check_whole("steps", 0, 1), "steps is 0; choose a whole number, at least 1"),
        (lambda: check_whole("steps", True, 1), "steps is True; choose a whole number, at least 1"),
        (lambda: check_whole("steps", 1.5, 1), r"steps is 1\.5; choose a whole number"),
        (lambda: check_image_size(8), "image_size is 8; choose a whole number, from 16 to 1024"),
    ],
)
def test_other_values_are_named(check, message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        check()


def test_a_module_that_is_there_is_returned() -> None:
    assert import_optional("math", "env x", "pip install x") is math


def test_a_missing_module_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"^env x: no_such_module is not installed: pip install x$"):
        import_optional("no_such_module", "env x", "pip install x")
    monkeypatch.setitem(sys.modules, "math", None)  # a package that cannot be imported
    with pytest.raises(InputError, match=r"^env x: math (is not installed|cannot be imported)"):
        import_optional("math", "env x", "pip install x")
