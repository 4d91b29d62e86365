"""Read, resolve, change and write the settings of a run, from config files and mappings.

`deft.cli` and the trainers read settings with these functions. A wrong setting raises an `InputError` of one line.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import yaml

from deft import trust
from deft.config.algorithm_settings import ALGORITHM_SETTINGS, AlgorithmSettings
from deft.config.aliases import MOVED, SHORTHANDS, field_for, translate
from deft.config.fields import nested_class, sections_of, setting_names
from deft.config.settings import OfflineRunConfig, RunConfig, run_class
from deft.config.validation import checked, suggestion
from deft.errors import InputError, shown
from deft.ownership import keep_foreign, record
from deft.plain_data import MAX_DEPTH, NESTS_TOO_DEEP, parse_bounded, read_bounded

PRESETS = Path(__file__).parent / "presets"
HEADER = "recipe"  # the section of a preset that describes it; see `deft.config.recipes`
FORMER_NAMES = {
    "demo": "reach-ppo",
    "phases-demo": "phases",
    "ppo-cartpole": "cartpole-ppo",
    "ppo-halfcheetah": "halfcheetah-ppo",
    "vla-reach": "reach-vla-ppo",
}
"""Names of recipes in earlier versions, which still work."""
AnyRunConfig: TypeAlias = RunConfig | OfflineRunConfig
Config = TypeVar("Config", bound=RunConfig | OfflineRunConfig)


def load_config(path: str | Path) -> Any:
    """Return the settings in a JSON or YAML file, or in the recipe of this name."""
    config = resolve(read_mapping(find_config(path)))
    reject_overwrite(config.overwrite, path)
    return config


def reject_overwrite(is_set: bool, path: str | Path | None) -> None:
    """Raise an error if a file sets `overwrite`: only the flag may replace a run."""
    if is_set:
        raise InputError(f"{path}: overwrite: true is not accepted in a file; remove it, and use the flag --overwrite")


def find_config(path: str | Path) -> Path:
    """Return the file for `--config`, which is a path or the name of a recipe of Deft."""
    path = Path(path)
    if path.exists():
        return path
    if path.name != str(path) or path.suffix in _READERS:
        raise InputError(f"{path}: no such config file")
    return find_preset(str(path), "config file or recipe", preset_names)


def preset_names() -> list[str]:
    """Return the names of all presets, of recipes and others."""
    return sorted(file.stem for file in PRESETS.glob("*.yaml"))


def find_preset(name: str, kind: str, names: Callable[[], Iterable[str]]) -> Path:
    """Return the preset of this name; `kind` and `names` are for the message if there is none."""
    file = PRESETS / f"{FORMER_NAMES.get(name, name)}.yaml"
    if file.parent == PRESETS and file.is_file():
        return file
    advice = suggestion(name, names())
    raise InputError(f"{name}: no such {kind}" + (f"; {advice}" if advice else ""))


def read_mapping(path: str | Path) -> dict[str, Any]:
    """Return the settings in a config file, without the header of a recipe."""
    settings = read_file(path)
    settings.pop(HEADER, None)
    return settings


def read_file(path: str | Path) -> dict[str, Any]:
    """Return the content of a config file: JSON (with comments and trailing commas) or YAML, by its suffix."""
    path = Path(path)
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise InputError(f"{path}: the ending '{path.suffix}' is not one of {', '.join(_READERS)}")
    try:
        text = read_bounded(path)
    except FileNotFoundError:
        raise InputError(f"{path}: no such config file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as text: {error}") from None
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip().rstrip(",") == "...":
            raise InputError(f"{path}, line {number}: '...' is a placeholder; replace or remove it")
    try:
        mapping = parse_bounded(text, reader)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}, line {error.lineno}: not valid JSON: {error.msg}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line_number = mark.line + 1 if mark else 1
        raise InputError(f"{path}, line {line_number}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise InputError(f"{path}: {' '.join(str(error).split())}") from None
    if mapping is None:
        raise InputError(f"{path}: the file is empty")
    if not isinstance(mapping, dict):
        raise InputError(f"{path}: {shown(mapping)} is not a mapping of settings")
    trust.read_from(path, mapping)
    return mapping


def resolve(mapping: Mapping[str, Any], written: Mapping[str, str] | None = None) -> Any:
    """Return the `RunConfig` or `OfflineRunConfig` of a mapping, depending on its algorithm, with defaults.

    Aliases and shorthands are accepted. `written` maps a path to the user's spelling, for messages.
    """
    if not isinstance(mapping, Mapping):
        raise InputError(f"{shown(mapping)} is not a mapping of settings")
    canonical, spelled = _canonical(mapping)
    algorithm_class = _algorithm_class(canonical)
    return checked(
        run_class(algorithm_class),
        canonical,
        concrete={AlgorithmSettings: algorithm_class},
        written={**spelled, **(written or {})},
        elsewhere={path.rpartition(".")[2]: path for path in setting_paths(algorithm_class)},
    )


def to_dict(config: Any) -> dict[str, Any]:
    """Return a settings object as plain dicts, lists and scalars, as in its config file."""
    return {name: _plain(getattr(config, name)) for name in setting_names(type(config))}


def write_config(config: AnyRunConfig, path: str | Path) -> None:
    """Write the resolved settings and the command that repeats the run; loading the file gives an equal config."""
    write_settings(to_dict(config), Path(path), has_directory=config.output_dir is not None)


def write_settings(settings: dict[str, Any], path: Path, has_directory: bool) -> None:
    """Write the settings of a run with the command that repeats it; `has_directory`: they name its run directory."""
    try:
        body = yaml.dump(settings, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    except yaml.YAMLError as error:
        raise InputError(f"{path}: the settings cannot be written: {' '.join(str(error).split())}") from None
    # The named directory already contains this run.
    command = f"deft train --config {shlex.quote(str(path))}" + " --output-dir ANOTHER_FOLDER" * has_directory
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(f"# The settings of this run. To repeat it:\n#   {command}\n{body}", encoding="utf-8")
    keep_foreign(path)
    record(unfinished.replace(path))


def replace(config: Config, **settings: Any) -> Config:
    """Return a copy with changed settings, by dotted path: `replace(config, **{"env.num_envs": 8, "seed": 1})`."""
    mapping = to_dict(config)
    for path, value in settings.items():
        _replace_path(mapping, path, value, type(config.algorithm.cfg))
    return resolve(mapping)


def _replace_path(mapping: dict[str, Any], path: str, value: Any, algorithm_class: type[AlgorithmSettings]) -> None:
    """Set one value by its path or an alias of it."""
    path = MOVED.get(path, path)
    section, _, name = path.rpartition(".")
    concrete: dict[type, type] = {AlgorithmSettings: algorithm_class}
    cls = dict(sections_of(run_class(algorithm_class), concrete)).get(section)
    own = None if cls is None else field_for(cls, name)
    set_path(mapping, f"{section}.{own}" if section and own else own or path, value)


def set_path(mapping: dict[str, Any], path: str, value: Any) -> None:
    """Set one value in a nested mapping; missing sections (or None) are created."""
    *sections, name = path.split(".")
    for depth, section in enumerate(sections, start=1):
        if mapping.get(section) is None:
            mapping[section] = {}
        if not isinstance(mapping[section], dict):
            raise InputError(f"{'.'.join(sections[:depth])}: {shown(mapping[section])} is not a mapping of settings")
        mapping = mapping[section]
    mapping[name] = value


def value_at(mapping: Mapping[str, Any], path: str) -> Any:
    """Return one value of a nested mapping; None if a section or the value is missing."""
    value: Any = mapping
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def setting_paths(algorithm_class: type[AlgorithmSettings]) -> Iterator[str]:
    """Yield the dotted path of every setting of a run, in the order of the classes."""
    concrete: dict[type, type] = {AlgorithmSettings: algorithm_class}
    for prefix, cls in sections_of(run_class(algorithm_class), concrete):
        for name in setting_names(cls):
            if nested_class(cls, name) is None:
                yield f"{prefix}.{name}" if prefix else name


def _algorithm_class(mapping: Mapping[str, Any]) -> type[AlgorithmSettings]:
    """Return the settings class of a mapping's algorithm; that of PPO if the name is missing or wrong."""
    section = mapping.get("algorithm")
    name = section.get("name") if isinstance(section, Mapping) else None
    return ALGORITHM_SETTINGS.get(str(name), ALGORITHM_SETTINGS["ppo"])


def _canonical(mapping: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the mapping with canonical sections and names, and the user's spelling of each path."""
    plain = {
        name: {SHORTHANDS[name]: value} if name in SHORTHANDS and isinstance(value, str) else _plain(value)
        for name, value in mapping.items()
    }
    algorithm_class = _algorithm_class(plain)
    canonical, written = translate(run_class(algorithm_class), plain, {AlgorithmSettings: algorithm_class})
    own_paths = set(setting_paths(algorithm_class))
    for place, target in MOVED.items():
        section, name = _section_of(canonical, place)
        if place in own_paths or name not in section:
            continue
        target_section, target_name = _section_of(canonical, target)
        if target_name in target_section:
            raise InputError(f"{place}: the same setting as '{written.get(target, target)}'; give one of them")
        set_path(canonical, target, section.pop(name))
        written[target] = place
    return canonical, written


def _section_of(mapping: dict[str, Any], path: str) -> tuple[dict[str, Any], str]:
    """Return the section of a path (empty if missing) and the last name of the path."""
    *sections, name = path.split(".")
    for section in sections:
        nested = mapping.get(section)
        mapping = nested if isinstance(nested, dict) else {}
    return mapping, name


def _plain(value: Any) -> Any:
    """Convert settings objects and mappings to dicts and tuples to lists; return other values unchanged."""
    if hasattr(value, "__pydantic_fields__"):
        return to_dict(value)
    if isinstance(value, Mapping):
        return {key: _plain(nested) for key, nested in value.items()}
    return [_plain(nested) for nested in value] if isinstance(value, list | tuple) else value


def _without_comments(text: str) -> str:
    """Remove `//` and `/* */` comments and trailing commas from JSON; strings and line numbers are unchanged."""
    text = _COMMENT_OR_STRING.sub(lambda match: match[0] if match[0][0] == '"' else _blank(match[0]), text)
    return _TRAILING_COMMA_OR_STRING.sub(lambda match: match[0] if match[0][0] == '"' else f" {match[0][1:]}", text)


def _blank(comment: str) -> str:
    if comment.startswith("/*") and not comment.endswith("*/"):
        raise ValueError("a comment that '/*' opens is not closed")
    return " " + "\n" * comment.count("\n")


MAX_MERGED = 10_000
_STRING = r'"(?:\\.|[^"\\\n])*"'
_COMMENT_OR_STRING = re.compile(_STRING + r"|//[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL)
_TRAILING_COMMA_OR_STRING = re.compile(_STRING + r"|,\s*(?=[}\]])")


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    section: dict[str, Any] = {}
    for name, value in pairs:
        if name in section:
            raise ValueError(f"'{name}' is given twice in one section")
        section[name] = value
    return section


def _read_json(text: str) -> Any:
    text = _without_comments(text)
    return json.loads(text, object_pairs_hook=_without_doubles) if text.strip() else None


class _Loader(yaml.SafeLoader):
    """YAML in which 3e-4 is a number (YAML 1.1 reads it as text), and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Construct a mapping; a duplicate key raises an error."""
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # not a name; the constructor raises an error
            if key.value in seen:
                problem = f"'{key.value}' is given twice in one section"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Merge the mappings of `<<` up to a limit: nested merges grow exponentially."""
        super().flatten_mapping(node)
        if len(node.value) > MAX_MERGED:
            raise yaml.constructor.ConstructorError(
                None, None, f"'<<' merges more than {MAX_MERGED:,} settings", node.start_mark
            )

    def fetch_flow_collection_start(self, token: type) -> None:
        """Open a `[` or `{`. Raise an error if they nest too deeply: PyYAML would scan for seconds."""
        if self.flow_level >= MAX_DEPTH:
            raise ValueError(NESTS_TOO_DEEP)
        super().fetch_flow_collection_start(token)


class _Dumper(yaml.SafeDumper):
    """Dumper whose output `_Loader` reads back unchanged: the text "3e-4" is quoted."""


_EXPONENT_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT_FLOAT, list("-+.0123456789"))


def parse_yaml(text: str) -> Any:
    """Parse YAML text as plain data; 3e-4 is a number."""
    return yaml.load(text, Loader=_Loader)  # a SafeLoader: plain data only


_READERS: dict[str, Callable[[str], Any]] = {
    ".json": _read_json,
    ".jsonc": _read_json,
    ".yaml": parse_yaml,
    ".yml": parse_yaml,
}
