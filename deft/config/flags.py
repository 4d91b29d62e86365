"""Every setting as a flat flag, made from the settings classes: names, help, and parsing by tyro.

`deft.cli` parses with it; `deft.config.rl_config` uses the flat names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml

from deft.config.algorithm_settings import ALGORITHM_SETTINGS, AlgorithmSettings
from deft.config.aliases import MOVED, aliases_of
from deft.config.fields import annotation_of, description_of, nested_class, sections_of, setting_names
from deft.config.loading import parse_yaml
from deft.config.settings import run_class
from deft.config.validation import shown, suggestion
from deft.errors import CommandExit, InputError

# Flags whose name is not the last part of their path.
_NAMES = {
    "dataset.path": "dataset",
    "dataset.options": "dataset_options",
    "env.id": "env",
    "env.kwargs": "env_kwargs",
    "env.timeout": "env_timeout",
    "env.curriculum.levels": "curriculum_levels",
    "env.curriculum.at_steps": "curriculum_at_steps",
    "env.curriculum.success_rate": "curriculum_success_rate",
    "env.curriculum.window": "curriculum_window",
    "policy.name": "policy",
    "policy.vla_config.model_class": "vla_model_class",
    "policy.vla_config.model_path": "vla_model_path",
    "policy.vla_config.model_config": "vla_model_config",
}


MODEL_CLASS = "policy.vla_config.model_class"
OPPOSITES = {"deterministic": "stochastic", "eval_deterministic": "eval_stochastic"}
"""Switches that can also be turned off by a name of its own, beside `--no-…`."""


@dataclass(frozen=True)
class Flag:
    """One setting as a flag: where its value goes, what it is called, which type it has."""

    path: str
    name: str
    aliases: tuple[str, ...]
    annotation: Any
    help: str

    @property
    def is_switch(self) -> bool:
        """Whether it is given without a value: `--compile`, `--no-compile`."""
        return self.annotation is bool

    @property
    def takes_several(self) -> bool:
        """Whether several values may follow it: `--hidden-sizes 64 64`."""
        return get_origin(_alternatives(self.annotation)[0][0]) in (tuple, dict)


@dataclass(frozen=True)
class FlagGroup:
    """The flags of one settings class."""

    title: str
    help: str
    flags: tuple[Flag, ...]


CONFIG_FLAG = Flag("config", "config", (), str | None, "A JSON or YAML file, or the name of a preset.")
OUTPUT_FLAGS = (
    Flag("json", "json", (), bool, "End the output with one line that is a JSON object."),
    Flag("debug", "debug", (), bool, "Show the traceback of an error."),
    Flag("trust_remote_code", "trust_remote_code", (), bool, "Run code that files name; see docs/security.md."),
)
OUTPUT_DEFAULTS = {flag.path: False for flag in OUTPUT_FLAGS}


def run_flags(algorithm: str) -> list[FlagGroup]:
    """Every setting of a run of this algorithm. Where two have one name, the algorithm's own gets it."""
    algorithm_class = ALGORITHM_SETTINGS[algorithm]
    aliases: dict[str, list[str]] = {MODEL_CLASS: ["model"]}
    for place, target in MOVED.items():
        aliases.setdefault(target, []).append(place.rpartition(".")[2])
    concrete: dict[type, type] = {AlgorithmSettings: algorithm_class}
    sections = sorted(
        sections_of(run_class(algorithm_class), concrete), key=lambda section: section[0] != "algorithm.cfg"
    )
    taken: set[str] = set()
    groups = []
    for prefix, cls in sections:
        flags = []
        for flag in class_flags(cls, prefix):
            if flag.path == "algorithm.name":  # the command's first word
                continue
            name = flag.name if flag.name not in taken else f"{prefix}_{flag.name}".replace(".", "_")
            known = [*flag.aliases, *aliases.get(flag.path, [])]
            others = tuple(dict.fromkeys(alias for alias in known if alias not in {name, *taken}))
            taken |= {name, *others}
            flags.append(dataclasses.replace(flag, name=name, aliases=others))
        title = {"": "run", "algorithm.cfg": algorithm.replace("-", "_")}.get(prefix, prefix.rpartition(".")[2])
        groups.append(FlagGroup(title, cls.__doc__ or "", tuple(flags)))
    own = algorithm.replace("-", "_")
    order = ("dataset", "env", "curriculum", own, "policy", "vla_config", "trainer", "cluster", "logging", "run")
    return sorted((group for group in groups if group.flags), key=lambda group: order.index(group.title))


def class_flags(cls: type, prefix: str = "") -> Iterator[Flag]:
    """Yield the settings of one class as flags, without its sections."""
    for name in setting_names(cls):
        if nested_class(cls, name) is None:
            path = f"{prefix}.{name}" if prefix else name
            aliases = tuple(aliases_of(cls, name))
            yield Flag(path, _NAMES.get(path, name), aliases, annotation_of(cls, name), description_of(cls, name))


@dataclass(frozen=True)
class ParsedFlags:
    """What the command line said: values by path, how each flag was written, and words that belong to no flag."""

    values: dict[str, Any]
    written: dict[str, str]
    words: list[str]


def parse_flags(
    groups: Sequence[FlagGroup], defaults: Mapping[str, Any], arguments: Sequence[str], *, usage: str, description: str
) -> ParsedFlags:
    """The flags that were given. `--help` prints them all, with `defaults`, and raises SystemExit."""
    flags = [flag for group in groups for flag in group.flags]
    help_wanted = bool({"-h", "--help"} & set(arguments))
    written = {} if help_wanted else _scan(flags, arguments)
    negated = {opposite: _dashed(f"no_{name}") for name, opposite in OPPOSITES.items()}
    arguments = [negated.get(word.removeprefix("--").replace("-", "_"), word) for word in arguments]
    parsed, words = _parse_with_tyro(groups, defaults, ["--help"] if help_wanted else arguments, usage, description)
    values = {
        flag.path: parsed[flag.name] if flag.is_switch else _value(flag, parsed[flag.name], written[flag.path])
        for flag in flags
        if flag.path in written
    }
    return ParsedFlags(values, written, words)


def _advice(spelled: str, name: str, known: Mapping[str, Flag]) -> str:
    """What to do about an unknown flag: in training whose it is, else the nearest one here."""
    owners = [algorithm for algorithm, owner in ALGORITHM_SETTINGS.items() if name in setting_names(owner)]
    if owners and any(flag.path.startswith("algorithm.") for flag in known.values()):
        return f"it is a setting of {', '.join(owners)}"
    near = suggestion(spelled, (_dashed(other) for other in known))
    return near if near.startswith("did you") else "see --help"


def _scan(flags: Sequence[Flag], arguments: Sequence[str]) -> dict[str, str]:
    """How each given flag was written, by path; refuses unknown ones, missing values and what is said twice."""
    known = {name: flag for flag in flags for name in (flag.name, *flag.aliases)}
    known |= {f"no_{flag.name}": flag for flag in flags if flag.is_switch}
    known |= {OPPOSITES[flag.name]: flag for flag in flags if flag.name in OPPOSITES}
    written: dict[str, str] = {}
    for index, argument in enumerate(arguments):
        if not re.match(r"--?[A-Za-z]", argument):
            continue
        spelled, equals, _ = argument.partition("=")
        name = spelled[2:].replace("-", "_") if spelled.startswith("--") else spelled
        if name not in known:
            raise InputError(f"{spelled}: unknown flag; {_advice(spelled, name, known)}")
        flag = known[name]
        following = arguments[index + 1] if index + 1 < len(arguments) else "--"
        if flag.is_switch and equals:
            raise InputError(f"{spelled}: takes no value; write {_dashed(flag.name)} or {_dashed(f'no_{flag.name}')}")
        if not flag.is_switch and not equals and following.startswith("--"):
            raise InputError(f"{spelled}: needs a value ({_metavar(flag.annotation)})")
        if flag.takes_several and written.get(flag.path) == _dashed(name):  # the last of them would count alone
            raise InputError(f"{spelled}: given twice; write all of its values after one")
        previous = written.setdefault(flag.path, _dashed(name))
        if previous != _dashed(name):
            raise InputError(f"{spelled}: the same setting as {previous}; give one of them")
    return written


def _parse_with_tyro(
    groups: Sequence[FlagGroup], defaults: Mapping[str, Any], arguments: Sequence[str], usage: str, description: str
) -> tuple[dict[str, Any], list[str]]:
    """Values by flag name (words as they were written; switches as bool), and the words that belong to no flag."""
    import tyro  # only where a command line is parsed

    def field(flag: Flag) -> tuple[str, Any, Any]:
        argument = tyro.conf.arg(name=flag.name, aliases=[_dashed(alias) for alias in flag.aliases], help=flag.help)
        if flag.is_switch:
            return flag.name, Annotated[bool, argument], dataclasses.field(default=defaults[flag.path])
        words = tyro.constructors.PrimitiveConstructorSpec(
            nargs="*" if flag.takes_several else 1,
            metavar=_metavar(flag.annotation),
            instance_from_str=list,
            is_instance=lambda value: True,
            str_from_instance=lambda value: _words(defaults[flag.path]),
        )
        return flag.name, Annotated[Any, words, argument], dataclasses.field(default=None)

    fields: list[tuple[str, Any, Any]] = []
    for group in groups:
        section: Any = dataclasses.make_dataclass(group.title, [field(flag) for flag in group.flags])
        section.__doc__ = group.help
        fields.append((group.title, section, dataclasses.field(default_factory=section)))
    root: Any = dataclasses.make_dataclass("Flags", fields)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            parsed, words = tyro.cli(
                root,
                prog=usage,
                description=description,
                args=arguments,
                config=(tyro.conf.OmitArgPrefixes,),
                return_unknown_args=True,
            )
    except SystemExit as stop:
        if stop.code in (None, 0):
            raise CommandExit(0) from None  # after --help
        raise InputError(" ".join(re.sub("[─│╭╮╰╯]", " ", complaint.getvalue()).split())) from None
    sections = (getattr(parsed, group.title) for group in groups)
    return {name: value for section in sections for name, value in vars(section).items()}, words


def _dashed(name: str) -> str:
    return "--" + name.replace("_", "-")


def _words(value: Any) -> list[str]:
    """A default as the words that would give it."""
    if isinstance(value, list | tuple):
        return [str(element) for element in value]
    return [json.dumps(value) if isinstance(value, dict) else "none" if value is None else str(value)]


def _alternatives(annotation: Any) -> tuple[list[Any], bool]:
    """The types that a setting may have, without None, and whether it may be None."""
    if get_origin(annotation) in (Union, types.UnionType):
        inner = [member for member in get_args(annotation) if member is not type(None)]
        return [_bare(member) for member in inner], len(inner) < len(get_args(annotation))
    return [_bare(annotation)], False


def _bare(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _metavar(annotation: Any) -> str:
    kinds, may_be_none = _alternatives(annotation)
    return "|".join([*map(_kind_name, kinds), *(["none"] if may_be_none else [])])


def _kind_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "{" + ",".join(str(choice) for choice in get_args(kind)) + "}"
    if get_origin(kind) is tuple:
        return f"{_metavar(get_args(kind)[0])} ..."
    if get_origin(kind) is dict:
        return "JSON|KEY=VALUE ..."
    return {int: "INT", float: "FLOAT"}.get(kind, "TEXT")


def _value(flag: Flag, words: list[str], written: str) -> Any:
    """The words after a flag as a value. What cannot be read as its type stays text, for the validation to refuse."""
    kinds, may_be_none = _alternatives(flag.annotation)
    if get_origin(kinds[0]) is dict:
        return _mapping(words, written, of_texts=get_args(kinds[0])[1] is str)
    if get_origin(kinds[0]) is tuple:
        if may_be_none and [word.lower() for word in words] in (["none"], ["null"]):
            return None
        return [_scalar(word, get_args(kinds[0])[0]) for word in words]
    return _scalar(words[0], flag.annotation)


def _scalar(word: str, annotation: Any) -> Any:
    kinds, may_be_none = _alternatives(annotation)
    if may_be_none and word.lower() in ("none", "null"):
        return None
    for kind in kinds:
        for convert in {int: (int, float), float: (float,)}.get(kind, ()):
            with contextlib.suppress(ValueError):
                return convert(word)
    return word


def _mapping(words: list[str], written: str, of_texts: bool) -> dict[str, Any]:
    """A mapping written as one JSON object, or as KEY=VALUE words with values as in YAML.

    In a mapping of texts values stay text, spaces around keys and values are removed, and commas may separate entries
    too: `top=z_top, wrist=a_wrist`.
    """
    if words and words[0].startswith("{"):
        try:
            return json.loads(" ".join(words))
        except json.JSONDecodeError as error:
            raise InputError(f"{written}: not valid JSON: {error.msg} (column {error.colno})") from None
    if of_texts:
        words = [part for word in words for part in word.split(",") if part.strip()]
    mapping: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if of_texts:
            key, text = key.strip(), text.strip()
        if not equals or not key:
            raise InputError(f"{written}: {shown(word)} is not KEY=VALUE, nor a JSON object")
        if key in mapping:
            raise InputError(f"{written}: {shown(key)} is given twice; give each key one value")
        try:
            mapping[key] = text if of_texts else parse_yaml(text)
        except yaml.YAMLError:
            mapping[key] = text
    return mapping
