"""Validation of settings. The message for a wrong setting is one line: its path, its value and the allowed values.

The classes of `deft.config.settings` use the decorator `settings` and the number types below. `deft.config.loading`
formats its errors with `explain`.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Annotated, Any, TypeVar, dataclass_transform, get_type_hints

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, Strict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from deft.config.aliases import field_for, translate, translate_value
from deft.config.fields import nested_class, setting_names
from deft.errors import InputError, shown
from deft.ownership import check_output_path

Settings = TypeVar("Settings")

STRICT = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False, use_attribute_docstrings=True)


def _whole(value: Any) -> Any:
    """Convert whole numbers of other types (1e6, NumPy) to int; return other values, which validation rejects."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, Real) and float(value).is_integer() and not isinstance(value, bool):
        return int(float(value))
    return value


def _video_path(path: str) -> str:
    """Return the path if it ends in .mp4; an MP4 file must not replace a file of another format."""
    if not path.lower().endswith(".mp4"):
        raise InputError(f"{path!r} does not end in .mp4; videos are written as MP4")
    return path


def _real(value: Any) -> Any:
    """Convert real numbers of other types (NumPy) to float; return other values, which validation checks."""
    return float(value) if isinstance(value, Real) and not isinstance(value, int) else value


Count = Annotated[int, Strict(), Field(ge=1), BeforeValidator(_whole)]
Several = Annotated[int, Strict(), Field(ge=2), BeforeValidator(_whole)]
Seed = Annotated[int, Strict(), Field(ge=0, lt=2**63), BeforeValidator(_whole)]
Port = Annotated[int, Strict(), Field(ge=0, le=65_535), BeforeValidator(_whole)]
NonNegativeInt = Annotated[int, Strict(), Field(ge=0), BeforeValidator(_whole)]
Number = Annotated[float, Strict(), BeforeValidator(_real)]
Positive = Annotated[float, Strict(), Field(gt=0), BeforeValidator(_real)]
LEAST_NOISE = 0.01  # of an action: float32 cannot resolve probability ratios of narrower Gaussians to 1e-4
Noise = Annotated[float, Strict(), Field(ge=LEAST_NOISE), BeforeValidator(_real)]
NonNegative = Annotated[float, Strict(), Field(ge=0), BeforeValidator(_real)]
Fraction = Annotated[float, Strict(), Field(ge=0, le=1), BeforeValidator(_real)]
Share = Annotated[float, Strict(), Field(gt=0, le=1), BeforeValidator(_real)]
Switch = Annotated[bool, Strict()]
Place = Annotated[str, Field(min_length=1)]  # '' would mean the current directory
OutputPath = Annotated[str, AfterValidator(check_output_path)]
VideoPath = Annotated[str, AfterValidator(check_output_path), AfterValidator(_video_path)]


@dataclass_transform(field_specifiers=(Field,), kw_only_default=True)
def settings(cls: type[Settings]) -> type[Settings]:
    """Make a validated dataclass. Its constructor and its attributes also accept the names in `aliases`.

    A wrong value raises an `InputError` of one line, in the constructor and in assignments. A class may assign a
    setting of a base class without a type (`gamma = 0.95`): it has the type of the base class and this default.
    """
    _inherit_types(cls)
    is_derived = any(hasattr(base, "__pydantic_fields__") for base in cls.__mro__[1:])
    made: Any = dataclass(config=STRICT, kw_only=is_derived)(cls)  # a required setting may follow those of its base
    construct, assign = made.__init__, made.__setattr__

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **values: Any) -> None:
        translated, written = translate(type(self), {**dict(zip(setting_names(made), args, strict=False)), **values})
        try:
            construct(self, **translated)
        except ValidationError as error:
            raise InputError(explain(error, made, written=written)) from None

    def __setattr__(self: Any, name: str, value: Any) -> None:
        name = field_for(made, name) or name
        if name == "resume" and isinstance(value, bool):  # as in `translate`
            value = getattr(self, "output_dir", value) if value else None
        try:
            assign(self, name, translate_value(name, value))
        except ValidationError as error:
            raise InputError(explain(error, made)) from None

    def __getattr__(self: Any, name: str) -> Any:
        field = None if name.startswith("_") else field_for(type(self), name)
        if field in (None, name):
            raise AttributeError(f"{type(self).__name__} has no setting {name!r}")
        return getattr(self, field)

    made.__init__, made.__setattr__, made.__getattr__ = __init__, __setattr__, __getattr__
    return made


def _inherit_types(cls: type) -> None:
    """Annotate the settings of base classes that a class assigns with the types that the base classes declare."""
    bases = [base for base in cls.__mro__[1:] if hasattr(base, "__pydantic_fields__")]
    own = inspect.get_annotations(cls)
    for name in [name for name in vars(cls) if name not in own]:
        declared = next((base for base in bases if name in inspect.get_annotations(base)), None)
        if declared is not None and name in declared.__pydantic_fields__:
            own[name] = get_type_hints(declared, include_extras=True)[name]
    in_order = [*(name for name in own if name not in vars(cls)), *vars(cls)]  # settings without a default come first
    cls.__annotations__ = {name: own[name] for name in in_order if name in own}


def checked(
    cls: type[Settings],
    values: Mapping[str, Any],
    *,
    written: Mapping[str, str] | None = None,
    concrete: Mapping[type, type] | None = None,
    elsewhere: Mapping[str, str] | None = None,
) -> Settings:
    """Validate the user's values and return a settings object; the other arguments are those of `explain`."""
    root: Any = cls
    translated, renamed = translate(root, values, concrete)
    try:
        return _adapter(root).validate_python(translated)
    except ValidationError as error:
        spelled = {**renamed, **(written or {})}
        raise InputError(explain(error, cls, concrete=concrete, written=spelled, elsewhere=elsewhere)) from None


@functools.cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def explain(
    error: ValidationError,
    root: type,
    *,
    concrete: Mapping[type, type] | None = None,
    written: Mapping[str, str] | None = None,
    elsewhere: Mapping[str, str] | None = None,
) -> str:
    """Return a line with the first error and the number of further errors.

    `root` is the validated class. `concrete` maps a base class in it to the class in use, `written` a path to the
    user's spelling (an alias, a flag), and `elsewhere` a name to the path where it belongs.
    """
    problems = [problem for problem in error.errors() if problem["type"] != "default_factory_not_called"]
    unknown = [problem for problem in problems if problem["type"] == "unexpected_keyword_argument"]
    problem = (unknown or problems)[0]  # a misspelled name may also be why another one is missing
    path, owner = _located(root, problem["loc"], concrete or {})
    same = [other for other in problems if _located(root, other["loc"], concrete or {})[0] == path]
    if unknown:
        advice = suggestion(str(problem["loc"][-1]), setting_names(owner), elsewhere or {})
        reason = f"unknown setting; {advice}" if advice else "unknown setting"
    else:
        reason = "; and ".join(_reason(other) for other in same)  # several where a setting has alternatives
    line = f"{(written or {}).get(path, path)}: {reason}" if path else reason
    return line if len(problems) == len(same) else f"{line} (and {len(problems) - len(same)} more)"


def suggestion(name: str, known: Iterable[str], elsewhere: Mapping[str, str] | None = None) -> str:
    """Suggest a replacement of an unknown name: its correct path, else the nearest known name, else all names."""
    known = list(known)
    if elsewhere and name in elsewhere:
        return f"did you mean '{elsewhere[name]}'?"
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"did you mean '{near[0]}'?"
    return f"one of {quoted(known)}" if known else ""


def quoted(names: Iterable[str]) -> str:
    """Return names for a message: `'standard', 'vla'`."""
    return ", ".join(f"'{name}'" for name in names)


def dotted(location: Iterable[int | str]) -> str:
    """Return a location in a mapping as a dotted path: `policy.hidden_sizes[1]`."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _located(root: type, location: Iterable[int | str], concrete: Mapping[type, type]) -> tuple[str, type]:
    """Return the path of a setting from an error location, without the alternatives of a union type, and its class."""
    kept: list[int | str] = []
    owner = root
    nested: type | None = root
    for part in location:
        if isinstance(part, int):
            kept.append(part)
        elif nested is not None:
            kept.append(part)
            owner, found = nested, nested_class(nested, part)
            nested = None if found is None else concrete.get(found, found)
    return dotted(kept), owner


_BOUNDS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}
_KINDS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "dataclass_type": "a mapping of settings",
    "invalid_key": "the name of a setting",
}


def _reason(problem: Mapping[str, Any]) -> str:
    """Return the reason of an error: `1.5 is out of range; must be at most 1`."""
    kind, value = problem["type"], shown(problem["input"])
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        return f"{value} is out of range; must be {words} {problem['ctx'][key]:g}"
    if kind in _KINDS:
        return f"{value} is not {_KINDS[kind]}"
    if kind == "literal_error":
        return f"{value} is not allowed; one of {problem['ctx']['expected'].replace(' or ', ', ')}"
    if kind == "string_too_short":
        return "'' is empty"
    if kind == "missing":
        return "missing; it must be given"
    if kind == "value_error":
        return str(problem["ctx"]["error"])
    return f"{value}: {problem['msg'][0].lower()}{problem['msg'][1:]}"
