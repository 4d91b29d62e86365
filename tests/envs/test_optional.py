"""Packages that Deft does not depend on: a missing one is named with the command that installs it."""

import math
import sys

import pytest

from deft.envs.checks import import_optional
from deft.errors import InputError


def test_a_module_that_is_there_is_returned() -> None:
    assert import_optional("math", "env x", "pip install x") is math


def test_a_missing_module_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"^env x: no_such_module is not installed: pip install x$"):
        import_optional("no_such_module", "env x", "pip install x")
    monkeypatch.setitem(sys.modules, "math", None)  # a package that cannot be imported
    with pytest.raises(InputError, match=r"^env x: math (is not installed|cannot be imported)"):
        import_optional("math", "env x", "pip install x")
