"""Checks of constructor arguments that several environments have in common, and imports of optional packages."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from deft.errors import InputError, one_line

DIFFICULTIES = ("easy", "medium", "hard")


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Raise InputError for a value that is not one of `choices`."""
    if not any(value is choice or value == choice for choice in choices):
        *others, last = map(repr, choices)
        allowed = f"{', '.join(others)} or {last}" if others else last
        raise InputError(f"{name} is {value!r}; choose {allowed}")


def check_render_mode(render_mode: str | None) -> None:
    """Raise InputError for a render mode other than "rgb_array"."""
    check_choice("render_mode", render_mode, ("rgb_array", None))


def check_difficulty(level: str) -> str:
    """Return a difficulty; raise InputError for another value."""
    check_choice("difficulty", level, DIFFICULTIES)
    return level


def check_whole(name: str, value: Any, smallest: int, largest: int | None = None) -> int:
    """Return a whole number; raise InputError for another type or outside the range."""
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_whole or value < smallest or (largest is not None and value > largest):
        allowed = f"at least {smallest}" if largest is None else f"from {smallest} to {largest}"
        raise InputError(f"{name} is {value!r}; choose a whole number, {allowed}")
    return int(value)


def check_image_size(value: Any, largest: int = 1024) -> int:
    """Return the side of an image in pixels; raise InputError for one that is too small or too large."""
    return check_whole("image_size", value, 16, largest)


def import_optional(module: str, user: str, remedy: str) -> ModuleType:
    """Import a module; without it raise InputError with the part of Deft that needs it and what to do."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == module
        reason = f"{module} is not installed" if is_missing else f"{module} cannot be imported ({one_line(error)})"
        raise InputError(f"{user}: {reason}: {remedy}") from error
