"""What `deft train` trains: chosen by its first word, by `--recipe` or `--config`, or by the run that `--resume` names.

`parse_training` returns the settings of that run: defaults, overridden by the file, overridden by flags.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deft.config.algorithm_settings import ALGORITHM_SETTINGS, AlgorithmSettings
from deft.config.aliases import field_for, translate
from deft.config.f1_settings import TokenizerTrainingConfig
from deft.config.fields import default_of, setting_names
from deft.config.flags import FILE_FLAGS, MODEL_CLASS, FlagGroup, class_flags, parse, peek, run_flags
from deft.config.loading import (
    PRESETS,
    find_config,
    read_mapping,
    reject_overwrite,
    resolve,
    set_path,
    to_dict,
    value_at,
)
from deft.config.output_base import below_output_base
from deft.config.recipes import find_recipe, recipe_names
from deft.config.rl_yaml import PHASE_TRAINING, PHASES, parse_phase
from deft.config.settings import MODEL_CHUNKS, TIME_LIMIT
from deft.config.validation import quoted
from deft.config.waypoint_settings import PPOConfig, WaypointSFTConfig
from deft.errors import CommandExit, InputError

FLAT_TRAINING: dict[str, type] = {
    "waypoint-sft": WaypointSFTConfig,
    "waypoint-ppo": PPOConfig,
    "tokenizer": TokenizerTrainingConfig,
}
"""Training whose settings are one flat class, kept in `config.json`."""
START = ("output_dir", "resume", "auto_resume", "overwrite")
HELP = """usage: deft train [ALGORITHM] [--recipe NAME | --config FILE] [flags]

Train a policy. Settings come from the defaults, then from the recipe or FILE, then from flags; - and _ in flags are the
same. `deft recipes` lists the recipes. FILE is JSON or YAML; the config.yaml of a run repeats that run."""


class Training(NamedTuple):
    """What a command line of `deft train` asks for; `source` is the file that its settings start from."""

    name: str
    config: Any
    as_json: bool
    source: Path | None


def parse_training(arguments: Sequence[str]) -> Training:
    """Return the name of the training, its settings, whether to print JSON, and the file of settings."""
    name, source, flags = _choose(list(arguments))
    if name in FLAT_TRAINING:
        return Training(name, *_parse_flat(name, flags, source), source)
    if name in PHASE_TRAINING:
        config, as_json = parse_phase(name, flags, source or "rl_config")
        if source is not None and name in PHASES and peek(flags, "resume") and not peek(flags, "output_dir"):
            getattr(config, name).output_dir = str(source.parent)
        return Training(name, config, as_json, source)
    config, as_json = _parse_run(name, flags, source)
    return Training(config.algorithm.name, config, as_json, source)


def config_of_run(path: Path) -> Path | None:
    """Return the settings file of the run that a run directory, or a checkpoint in it, belongs to."""
    names = ("config.yaml", "config.json")
    candidates = [folder / name for name in names for folder in (path, path.parent)]
    return next((file for file in candidates if os.path.isfile(file)), None)  # unlike Path, not an error of a long name


def kind_of_file(path: Path) -> str | None:
    """Return which training a settings file is of: a phase, a flat training, or None for an algorithm."""
    mapping = read_mapping(path)
    if mapping.get("phase") in PHASE_TRAINING:
        return str(mapping["phase"])
    if "algorithm" in mapping or path.suffix != ".json":
        return None
    return next((name for name, cls in FLAT_TRAINING.items() if all(field_for(cls, key) for key in mapping)), None)


def _choose(arguments: list[str]) -> tuple[str, Path | None, list[str]]:
    """Return the training that is asked for, the settings file it starts from, and its flags."""
    known = ", ".join([*ALGORITHM_SETTINGS, *FLAT_TRAINING, *PHASE_TRAINING])
    named = arguments[0] if arguments and not arguments[0].startswith("-") else None
    flags = arguments[1:] if named else arguments
    if named is not None and named not in {**ALGORITHM_SETTINGS, **FLAT_TRAINING, **PHASE_TRAINING}:
        raise InputError(f"train {named}: no such algorithm; one of {known}")
    config_file, recipe, resume = (peek(flags, name) for name in ("config", "recipe", "resume"))
    if config_file and recipe:
        raise InputError(f"--recipe {recipe}: a recipe is a config file; give --recipe or --config, one of them")
    if recipe and resume:
        raise InputError(
            f"--recipe {recipe}: a resumed run has its own settings; leave --recipe out (--auto-resume continues the "
            "run of a recipe)"
        )
    if recipe:
        return _choose_recipe(recipe, named, flags)
    source = find_config(config_file) if config_file else config_of_run(Path(resume)) if resume else None
    if named in FLAT_TRAINING or named in PHASE_TRAINING:
        return str(named), source, flags
    if source is None:
        if named is not None:
            return named, None, flags
        if {"-h", "--help"} & set(flags):
            print(f"{HELP}\n\nAlgorithms: {known}. `deft train ppo --help` shows the flags of PPO.")
            raise CommandExit(0)
        if any(word.replace("_", "-") == "--recipe" for word in flags):
            raise InputError(f"--recipe: needs a name; one of {quoted(recipe_names())}")
        if resume:
            raise InputError(f"--resume {resume}: no run: there is no config.yaml in it, nor in the folder above")
        raise InputError(f"train: give an algorithm ({known}), --recipe NAME or --config FILE")
    kind = kind_of_file(source) if named is None else None
    return kind or named or "", source, flags


def _choose_recipe(recipe: str, named: str | None, flags: list[str]) -> tuple[str, Path, list[str]]:
    """Return what a recipe trains, which a name before it may repeat, its file, and the flags."""
    source = find_recipe(recipe)
    trained = kind_of_file(source) or resolve(read_mapping(source)).algorithm.name
    if named not in (None, trained):
        raise InputError(f"train {named}: recipe {recipe} trains {trained}; use `deft train --recipe {recipe}`")
    return trained, source, flags


def _parse_run(algorithm: str, flags: Sequence[str], source: Path | None) -> tuple[Any, bool]:
    """Return the settings of a run of an algorithm; an empty name means the one of the file."""
    mapping = read_mapping(source) if source else {}
    if source is not None and source.parent == PRESETS:
        _place_below_output_base(mapping)
    elif peek(flags, "config") is None:
        mapping.pop("output_dir", None)  # where the run was when it was written; it may have been moved since
    if algorithm and "algorithm" not in mapping:
        mapping["algorithm"] = algorithm
    base = resolve(mapping)
    reject_overwrite(base.overwrite, source)
    name = base.algorithm.name
    if algorithm not in ("", name):
        raise InputError(f"train {algorithm}: {source} sets the algorithm to '{name}'; use `deft train {name}`")
    groups = [FlagGroup("file", "", FILE_FLAGS), *run_flags(name)]
    parsed = parse(
        f"train {name}",
        ALGORITHM_SETTINGS[name],
        flags,
        groups=groups,
        base=to_dict(base),
        make=resolve,
        prepare=_complete_run,
    )
    config = parsed.config
    if not (config.model_path or config.resume or config.auto_resume):  # else another run decides the kind of policy
        config.policy.reject_unused(config.policy.changed(), config.algorithm.cfg)
    return config, parsed.as_json


def _place_below_output_base(mapping: dict[str, Any]) -> None:
    """Replace `outputs` in the paths of a recipe by the environment variable `OUTPUT_BASE`, if it is set."""
    for path in ("output_dir", "model_path", "dataset.path", "algorithm.cfg.prior_data"):
        value = value_at(mapping, path)
        if isinstance(value, str):
            set_path(mapping, path, below_output_base(value))


def _complete_run(settings: dict[str, Any], given: dict[str, Any]) -> None:
    """Make the policy that of a model that is named, and flags replace the same value under another name in the file.

    These are the file's iterations (`--total-timesteps`) and the time limit, a setting or an argument of the
    environment.
    """
    model = given.get(MODEL_CLASS)
    if model is not None and "policy.name" not in given:
        settings["policy"]["name"] = "vla"
        algorithm: type[AlgorithmSettings] = ALGORITHM_SETTINGS[settings["algorithm"]["name"]]
        is_open = "policy.chunk_length" not in given and "chunk_length" in settings["policy"]
        if model in MODEL_CHUNKS and algorithm.LEARNS_FROM != "replay" and is_open:
            settings["policy"]["chunk_length"] = MODEL_CHUNKS[model]
    if "trainer.total_timesteps" in given:
        if "trainer.iterations" in given:
            raise InputError("--iterations: says how long to train, as --total-timesteps does; give one of them")
        if "iterations" in settings["trainer"]:
            settings["trainer"]["iterations"] = None
    sets_limit, names_limit = "env.max_episode_steps" in given, TIME_LIMIT in (given.get("env.kwargs") or {})
    if sets_limit and not names_limit:
        settings["env"]["kwargs"].pop(TIME_LIMIT, None)
    if names_limit and not sets_limit:
        settings["env"]["max_episode_steps"] = None


def _parse_flat(name: str, flags: Sequence[str], source: Path | None) -> tuple[Any, bool]:
    """Return the settings of a waypoint or tokenizer training; a resumed run has those of its `config.json`."""
    cls = FLAT_TRAINING[name]
    file: dict[str, Any] = {}
    if source is not None:
        file, _ = translate(cls, read_mapping(source))
        reject_overwrite(bool(file.get("overwrite")), source)
        file = {key: value for key, value in file.items() if key not in START}
        if peek(flags, "resume"):
            file["output_dir"] = str(source.parent)
    groups = [FlagGroup(name.replace("-", "_"), "", (*FILE_FLAGS, *class_flags(cls)))]
    optional = {key: default_of(cls, key) for key in setting_names(cls) if default_of(cls, key) is not None}
    parsed = parse(f"train {name}", cls, flags, groups=groups, base={**optional, **file} if file else None)
    if name == "tokenizer" and "output_dir" not in {**parsed.given, **file}:
        parsed.config.output_dir = below_output_base(parsed.config.output_dir)
    return parsed.config, parsed.as_json
