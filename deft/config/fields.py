"""What a settings class declares: names, types, defaults and help of its fields, and its sections.

The parser, the aliases, the messages and the reference pages read the classes through here.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator
from typing import Annotated, Any, Union, get_args, get_origin


def setting_names(cls: type) -> list[str]:
    """Return the names of a class's settings: its own first, then those of its base classes."""
    return list(_setting_names(cls))


@functools.cache
def _setting_names(cls: type) -> tuple[str, ...]:
    declared = (name for base in cls.__mro__ for name in inspect.get_annotations(base))
    fields = cls.__pydantic_fields__  # type: ignore[attr-defined]
    return tuple(dict.fromkeys(name for name in declared if name in fields))


def annotation_of(cls: type, name: str) -> Any:
    """Return the type of a setting."""
    return cls.__pydantic_fields__[name].annotation  # type: ignore[attr-defined]


def default_of(cls: type, name: str) -> Any:
    """Return the default of a setting; None where it is required."""
    field = cls.__pydantic_fields__[name]  # type: ignore[attr-defined]
    return (
        None
        if field.is_required() or field.default_factory_takes_validated_data
        else field.get_default(call_default_factory=True)
    )


def is_required(cls: type, name: str) -> bool:
    """Return whether a setting has no default."""
    return bool(cls.__pydantic_fields__[name].is_required())  # type: ignore[attr-defined]


def description_of(cls: type, name: str) -> str:
    """Return the docstring under a setting, inherited from a base class where it is not repeated.

    `{unit}` in it becomes the class's `UNIT`: what its frequencies count.
    """
    fields = (getattr(base, "__pydantic_fields__", {}).get(name) for base in cls.__mro__)
    found = next((field.description for field in fields if field is not None and field.description), "")
    return " ".join(found.split()).replace("{unit}", getattr(cls, "UNIT", "steps"))


def nested_class(cls: type, name: str) -> type | None:
    """Return the settings class behind a setting that is a section (also where it may be None)."""
    field = cls.__pydantic_fields__.get(name)  # type: ignore[attr-defined]
    if field is None:
        return None
    for candidate in (field.annotation, *get_args(field.annotation)):
        if hasattr(candidate, "__pydantic_fields__"):
            return candidate
    return None


def sections_of(cls: type, concrete: dict[type, type], prefix: str = "") -> Iterator[tuple[str, type]]:
    """Yield the dotted path and the class of a settings class and of all its sections, in order.

    `concrete` maps a base class to the class that replaces it, such as an algorithm's own settings.
    """
    yield prefix, cls
    for name in setting_names(cls):
        nested = nested_class(cls, name)
        if nested is not None:
            yield from sections_of(concrete.get(nested, nested), concrete, f"{prefix}.{name}" if prefix else name)


def alternatives(annotation: Any) -> tuple[list[Any], bool]:
    """Return the types that a setting may have, without None, and whether it may be None."""
    if get_origin(annotation) in (Union, types.UnionType):
        inner = [member for member in get_args(annotation) if member is not type(None)]
        return [_bare(member) for member in inner], len(inner) < len(get_args(annotation))
    return [_bare(annotation)], False


def _bare(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
