"""The one parser: every command's flags are made from its settings classes, and `parse` turns them into settings.

Names and types come from the classes, other names from `deft.config.aliases`; argparse splits the command line;
pydantic checks the values. `deft.cli` calls `parse` for every command.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, get_args, get_origin

import yaml

from deft import trust
from deft.config.algorithm_settings import ALGORITHM_SETTINGS, AlgorithmSettings
from deft.config.aliases import MOVED, aliases_of
from deft.config.fields import (
    alternatives,
    annotation_of,
    default_of,
    description_of,
    is_required,
    nested_class,
    sections_of,
    setting_names,
)
from deft.config.loading import parse_yaml, set_path, value_at
from deft.config.settings import run_class
from deft.config.validation import checked, suggestion
from deft.errors import CommandExit, InputError, shown

# Flags whose name is not the last part of their path.
_NAMES = {
    "dataset.path": "dataset",
    "dataset.options": "dataset_options",
    "env.id": "env",
    "env.kwargs": "env_kwargs",
    "env.training_kwargs": "training_env_kwargs",
    "env.timeout": "env_timeout",
    "env.curriculum.levels": "curriculum_levels",
    "env.curriculum.at_steps": "curriculum_at_steps",
    "env.curriculum.success_rate": "curriculum_success_rate",
    "env.curriculum.window": "curriculum_window",
    "policy.name": "policy",
    "policy.vla_config.model_class": "vla_model_class",
    "policy.vla_config.model_path": "vla_model_path",
    "policy.vla_config.model_config": "vla_model_config",
    "policy.advantage.guidance": "guidance",
    "reward_model.path": "reward_model",
    "reward_model.output": "reward_model_output",
    "reward_model.threshold": "reward_model_threshold",
    "reward_model.terminates": "reward_model_terminates",
    "policy.residual.scale": "residual_scale",
    "policy.residual.horizon": "residual_horizon",
    "policy.residual.hidden_sizes": "residual_hidden_sizes",
    "policy.residual.log_std_init": "residual_log_std_init",
}
MODEL_CLASS = "policy.vla_config.model_class"
OPPOSITES = {"deterministic": "stochastic", "eval_deterministic": "eval_stochastic"}
"""Switches that have another name for off, besides `--no-…`."""
CODE_NAMES = (
    *("env.id", "env.kwargs", "env.training_kwargs", MODEL_CLASS),
    *("cluster.ray_address", "ray_address", "environment"),
)
"""Flags that may name code; a name on the command line is the user's own (`deft.trust`)."""
_SECTION_ORDER = (
    *(
        "dataset",
        "env",
        "env.curriculum",
        "algorithm.cfg",
        "policy",
        "policy.vla_config",
        "policy.residual",
        "policy.advantage",
    ),
    *("reward_model", "trainer", "cluster", "logging", ""),
)


@dataclass(frozen=True)
class Flag:
    """One setting as a flag: the path of its value, its names, its type and its help."""

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
        return get_origin(alternatives(self.annotation)[0][0]) in (tuple, dict)

    @property
    def spellings(self) -> list[str]:
        """Every way to write it, with dashes."""
        names = [self.name, *self.aliases]
        if self.is_switch:
            names += [f"no_{name}" for name in names] + [OPPOSITES[name] for name in names if name in OPPOSITES]
        return [dashed(name) for name in names]


@dataclass(frozen=True)
class FlagGroup:
    """The flags of one settings class."""

    title: str
    help: str
    flags: tuple[Flag, ...]


@dataclass(frozen=True)
class Parsed:
    """A command line: the settings, whether to print JSON, and which flags were given (by path)."""

    config: Any
    as_json: bool
    given: dict[str, Any]


WORDS = {
    "path": ("RUN|CHECKPOINT", "one run folder or checkpoint"),
    "run": ("RUN", "one run folder"),
    "directories": ("RUN …", "the directories of runs"),
    "name": ("NAME", "one dataset's name"),
    "directory": ("[DIR]", "one directory"),
    "shell": ("bash|zsh|fish", "one shell: bash, zsh or fish"),
    "recipe": ("NAME", "one recipe's name (`deft recipes` lists them)"),
    "suite": ("NAME", "one suite's name; `deft suite list` shows them"),
    "runs": ("RUN RUN …", "the runs to compare (or --sft-checkpoint and --rl-checkpoint, for waypoint policies)"),
}
"""Settings that are given without a flag: how the usage shows them, and what an error asks for."""
FILE_FLAGS = (
    Flag("recipe", "recipe", (), str | None, "Name of a recipe to start from; `deft recipes` lists them."),
    Flag("config", "config", (), str | None, "JSON or YAML file with settings, or the name of a recipe."),
)
OUTPUT_FLAGS = (
    Flag("json", "json", (), bool, "Print the results as one JSON object on the last line."),
    Flag("debug", "debug", (), bool, "Show the traceback of an error."),
    Flag("trust_remote_code", "trust_remote_code", (), bool, "Allow code that files name; see docs/security.md."),
)


def parse(
    command: str,
    cls: type,
    arguments: Sequence[str],
    *,
    groups: Sequence[FlagGroup] | None = None,
    base: Mapping[str, Any] | None = None,
    make: Callable[..., Any] | None = None,
    word: str | None = None,
    prepare: Callable[[dict[str, Any], dict[str, Any]], None] | None = None,
) -> Parsed:
    """Return the settings of a command: those of `base` (a file; else the defaults), overridden by flags.

    `groups` are its flags (by default the settings of `cls`), `make` checks the mapping (by default as `cls`), `word`
    is the setting that is given without a flag, and `prepare` may change the mapping, given what the flags set.
    """
    title, doc = command.split()[-1], " ".join((cls.__doc__ or "").split())
    groups = groups or [FlagGroup(title, "", tuple(flag for flag in class_flags(cls) if flag.path != word))]
    defaults = base if base is not None else {name: default_of(cls, name) for name in setting_names(cls)}
    usage = " ".join(["deft", command, *([WORDS[word][0]] if word else []), "[flags]"])
    given, written, words = read_flags(groups, defaults, arguments, usage=usage, description=doc)
    as_json = given.pop("json", False)
    for name in ("recipe", "config", "debug", "trust_remote_code"):
        given.pop(name, None)
    trust.name([given.get(path) for path in CODE_NAMES])
    mapping = dict(base or {})
    for path, value in given.items():
        before = value_at(mapping, path)  # a flag changes the entries of a mapping that it names
        merges = isinstance(before, Mapping) and isinstance(value, Mapping)
        set_path(mapping, path, {**before, **value} if merges else value)
    if word is not None and (words or is_required(cls, word)):
        mapping[word] = _words_of(word, words, command.split()[0])
    elif words and word is None:
        first = ", and the algorithm comes first" if command.startswith("train") else ""
        raise InputError(f"{command.split()[0]}: unexpected '{words[0]}'; a value follows its flag{first}")
    if prepare is not None:
        prepare(mapping, given)
    # In a file a setting has its own name; that of a section which the file lacks, only a flag can give.
    spelled = {
        flag.path: dashed(flag.name)
        for group in groups
        for flag in group.flags
        if base is None or ("." in flag.path and value_at(base, flag.path.rpartition(".")[0]) is None)
    }
    make = make or (lambda values, written: checked(cls, values, written=written))
    return Parsed(make(mapping, written=spelled | written), as_json, given)


def _words_of(word: str, words: list[str], command: str) -> Any:
    """Return the value of the setting that is given without a flag; one that the usage shows with … has several."""
    has_several = WORDS[word][0].endswith("…")
    if not words or (len(words) > 1 and not has_several):
        raise InputError(f"{command}: give {WORDS[word][1]}; got {' '.join(words) or 'none'}")
    return tuple(words) if has_several else words[0]


def run_flags(algorithm: str) -> list[FlagGroup]:
    """Return every setting of a run of this algorithm. Where two have one name, the algorithm's own has it."""
    algorithm_class = ALGORITHM_SETTINGS[algorithm]
    others: dict[str, list[str]] = {MODEL_CLASS: ["model"]}
    for place, target in MOVED.items():
        others.setdefault(target, []).append(place.rpartition(".")[2])
    sections = sections_of(run_class(algorithm_class), {AlgorithmSettings: algorithm_class})
    own_first = sorted(sections, key=lambda section: section[0] != "algorithm.cfg")
    titles = {"": "run", "algorithm.cfg": algorithm.replace("-", "_")}
    unused = {"algorithm.name"}  # it is the command's first word
    unused |= {f"algorithm.cfg.{name}" for name in algorithm_class.NOT_OFFERED}
    if algorithm_class.LEARNS_FROM != "rollouts":
        unused.add("policy.normalize_reward")
    groups = section_flags(own_first, titles, unused, others)
    return [groups[section] for section in sorted(groups, key=_SECTION_ORDER.index)]


def section_flags(
    sections: Iterable[tuple[str, type]],
    titles: Mapping[str, str],
    unused: Collection[str],
    others: Mapping[str, Sequence[str]],
) -> dict[str, FlagGroup]:
    """Return the settings of sections, given by path and class, as flags without those in `unused`.

    Where two settings have one name, the name of the later one starts with its section's. `others` are further names.
    """
    taken: set[str] = set()
    groups: dict[str, FlagGroup] = {}
    for section, cls in sections:
        last, flags = section.rpartition(".")[2], []
        for flag in class_flags(cls, section):
            if flag.path in unused:
                continue
            name = f"{last}_{flag.name}" if flag.name in taken else flag.name
            known = dict.fromkeys([*flag.aliases, *others.get(flag.path, ())])
            aliases = tuple(alias for alias in known if alias not in {name, *taken})
            taken |= {name, *aliases}
            flags.append(dataclasses.replace(flag, name=name, aliases=aliases))
        if flags:
            groups[section] = FlagGroup(titles.get(section, last), cls.__doc__ or "", tuple(flags))
    return groups


def class_flags(cls: type, prefix: str = "") -> Iterator[Flag]:
    """Yield the settings of one class as flags, without its sections."""
    for name in setting_names(cls):
        if nested_class(cls, name) is None:
            path = f"{prefix}.{name}" if prefix else name
            aliases = tuple(aliases_of(cls, name))
            yield Flag(path, _NAMES.get(path, name), aliases, annotation_of(cls, name), description_of(cls, name))


def peek(arguments: Sequence[str], name: str) -> str | None:
    """Return the value of a flag that decides which flags there are; None where it is not given or has no value."""
    for flag, following in zip(arguments, [*arguments[1:], "--"], strict=False):
        spelled, equals, value = flag.partition("=")
        if spelled.replace("_", "-") == dashed(name):
            return value if equals else None if following.startswith("--") else following
    return None


# -------------------------------------------------------------------------------------------------- the command line


def read_flags(
    groups: Sequence[FlagGroup], defaults: Mapping[str, Any], arguments: Sequence[str], *, usage: str, description: str
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Return the values of the given flags by path, how each was written, and the words that belong to no flag.

    `--help` prints all flags, with `defaults`, and raises `HelpShown`.
    """
    parser = argparse.ArgumentParser(
        usage=usage,
        description=description,
        allow_abbrev=False,
        exit_on_error=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=40, width=120),
    )
    # `--resume` may stand alone, as the documents write it: it then means the run in `output_dir`.
    bare = "resume" if defaults.get("output_dir") is not None and "algorithm" not in defaults else None
    for group in [*groups, FlagGroup("output", "", OUTPUT_FLAGS)]:
        section = parser.add_argument_group(f"{group.title} options", " ".join(group.help.split()))
        for flag in group.flags:
            default = _shown_default(value_at(defaults, flag.path), flag)
            section.add_argument(
                *flag.spellings,
                dest=flag.path,
                action=Given,
                default=argparse.SUPPRESS,
                nargs=0 if flag.is_switch else "?" if flag.path == bare else "+" if flag.takes_several else None,
                metavar=metavar(flag.annotation).replace(" ...", ""),
                flag=flag,
                help=f"{flag.help}{default}".replace("%", "%%"),
            )
    if {"-h", "--help"} & set(arguments):
        print(parser.format_help(), end="")
        raise HelpShown(parser)
    flags = [*(flag for group in groups for flag in group.flags), *OUTPUT_FLAGS]
    written: dict[str, str] = {}
    try:
        namespace, rest = parser.parse_known_args(_normalized(arguments), argparse.Namespace(_written=written))
    except argparse.ArgumentError as error:
        raise InputError(_explain(error, flags, arguments)) from None
    known = {spelling[2:].replace("-", "_"): flag for flag in flags for spelling in flag.spellings}
    words = []
    for extra in rest:
        spelled = extra.partition("=")[0]
        if re.match(r"--?[A-Za-z]", spelled):
            raise InputError(f"{spelled}: unknown flag; {_advice(spelled, known)}")
        words.append(extra)
    given = vars(namespace)
    values = {flag.path: _value(flag, given[flag.path], written[flag.path]) for flag in flags if flag.path in written}
    return values, written, words


class HelpShown(CommandExit):
    """The end of `--help`, with the parser that it describes; `deft.completion` completes by that."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__(0)
        self.parser = parser


class Given(argparse.Action):
    """Keep the words of a flag and how it was written; a setting has one spelling on one command line."""

    def __init__(self, *arguments: Any, flag: Flag, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.flag = flag

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Store the words, or for a switch whether it is on."""
        assert option_string is not None
        written, spelled = namespace._written, option_string
        previous = written.setdefault(self.dest, spelled)
        if previous != spelled:
            raise InputError(f"{spelled}: the same setting as {previous}; give one of them")
        if self.nargs == "+" and hasattr(namespace, self.dest):
            raise InputError(f"{spelled}: given twice; write all of its values after one")
        if self.nargs == 0:
            opposites = {dashed(name) for name in OPPOSITES.values()}
            values = not spelled.startswith("--no-") and spelled not in opposites
        setattr(namespace, self.dest, values)


def _normalized(arguments: Sequence[str]) -> list[str]:
    """Return the words with dashes in flags, and negative numbers as argparse recognizes them (-1e-3 as -0.001)."""
    normalized = []
    for word in arguments:
        if re.fullmatch(r"-\d*\.?\d+[eE][-+]?\d+", word):
            word = f"{Decimal(word):f}"
        elif word.startswith("--"):
            name, equals, value = word.partition("=")
            word = name.replace("_", "-") + equals + value
        normalized.append(word)
    return normalized


def _explain(error: argparse.ArgumentError, flags: Sequence[Flag], arguments: Sequence[str]) -> str:
    """Return what argparse rejects as one line of ours: a missing value, or a value after a switch."""
    flag = next(flag for flag in flags if "/".join(flag.spellings) == error.argument_name)
    names = [word.partition("=")[0].replace("_", "-") for word in arguments]
    spelled = next(name for name in reversed(names) if name in flag.spellings)
    if flag.is_switch:
        return f"{spelled}: takes no value; write {dashed(flag.name)} or {dashed(f'no_{flag.name}')}"
    return f"{spelled}: needs a value ({metavar(flag.annotation)})"


def _advice(spelled: str, known: Mapping[str, Flag]) -> str:
    """Return what to do about an unknown flag: in training whose it is, else the nearest one here."""
    if any(flag.path.startswith("algorithm.") for flag in known.values()):
        owners = [algorithm for algorithm in ALGORITHM_SETTINGS if _has_flag(algorithm, spelled)]
        if owners:
            return f"it is a setting of {', '.join(owners)}"
    near = suggestion(spelled, (dashed(other) for other in known))
    return near if near.startswith("did you") else "see --help"


def _has_flag(algorithm: str, spelled: str) -> bool:
    return any(spelled in flag.spellings for group in run_flags(algorithm) for flag in group.flags)


def dashed(name: str) -> str:
    """Return the flag of a name: `--num-envs`."""
    return "--" + name.replace("_", "-")


def _shown_default(value: Any, flag: Flag) -> str:
    if flag in OUTPUT_FLAGS or value in (None, {}, ()):
        return ""
    words = [str(element) for element in value] if isinstance(value, list | tuple) else [str(value)]
    return f" (default: {json.dumps(value) if isinstance(value, dict) else ' '.join(words)})"


def metavar(annotation: Any) -> str:
    """Return what stands for a value in help: `INT`, `FLOAT|none`, `{a,b}`."""
    kinds, may_be_none = alternatives(annotation)
    return "|".join([*map(_kind_name, kinds), *(["none"] if may_be_none else [])])


def _kind_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "{" + ",".join(str(choice) for choice in get_args(kind)) + "}"
    if get_origin(kind) is tuple:
        return f"{metavar(get_args(kind)[0])} ..."
    if get_origin(kind) is dict:
        return "JSON|KEY=VALUE ..."
    return {int: "INT", float: "FLOAT"}.get(kind, "TEXT")


def _value(flag: Flag, words: Any, written: str) -> Any:
    """Return the words after a flag as a value. What is not of its type stays text, which validation rejects."""
    if words is None or flag.is_switch:
        return words is not False  # None: --resume alone
    kinds, may_be_none = alternatives(flag.annotation)
    if get_origin(kinds[0]) is dict:
        return _mapping(words, written, of_texts=get_args(kinds[0])[1] is str)
    if get_origin(kinds[0]) is tuple:
        if may_be_none and [word.lower() for word in words] in (["none"], ["null"]):
            return None
        return [_scalar(word, get_args(kinds[0])[0]) for word in words]
    return _scalar(words, flag.annotation)


def _scalar(word: str, annotation: Any) -> Any:
    kinds, may_be_none = alternatives(annotation)
    if may_be_none and word.lower() in ("none", "null"):
        return None
    for kind in kinds:
        for convert in {int: (int, float), float: (float,)}.get(kind, ()):
            with contextlib.suppress(ValueError):
                return convert(word)
    return word


def _mapping(words: list[str], written: str, of_texts: bool) -> dict[str, Any]:
    """Return a mapping written as one JSON object, or as KEY=VALUE words with values as in YAML.

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
