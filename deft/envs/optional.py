"""Imports of packages that Deft does not depend on: simulators and environment libraries."""

from __future__ import annotations

import importlib
from types import ModuleType

from deft.errors import InputError, one_line


def import_optional(module: str, user: str, remedy: str) -> ModuleType:
    """Import a module; without it raise InputError with the part of Deft that needs it and what to do."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == module
        reason = f"{module} is not installed" if is_missing else f"{module} cannot be imported ({one_line(error)})"
        raise InputError(f"{user}: {reason}: {remedy}") from error
