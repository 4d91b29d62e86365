"""Reads the documents' `rl_config.yaml`, and makes the flags of `deft train teacher`.

`load_rl_config`, `get_training_config` and `get_environment_config` are for users (exported from `deft`);
`parse_phase` is what `deft.cli` calls.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from deft import trust
from deft.config.aliases import ALIASES
from deft.config.f1_settings import PhaseConfig, TrainingConfig
from deft.config.fields import nested_class, setting_names
from deft.config.flags import CONFIG_FLAG, OUTPUT_DEFAULTS, OUTPUT_FLAGS, Flag, FlagGroup, class_flags, parse_flags
from deft.config.loading import find_config, read_mapping, reject_overwrite, set_path, to_dict, value_at
from deft.config.output_base import below_output_base
from deft.config.validation import checked
from deft.errors import InputError, RunError
from deft.ownership import keep_foreign, record

CONFIG_FILE = "config.yaml"
PHASES = ("teacher", "student", "adversarial")
ALL_PHASES = "all"


class ConfigMapping(dict[str, Any]):
    """A config as a mapping whose entries are attributes too, also under other names: `config.training.save_every`."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(
            {name: ConfigMapping(value) if isinstance(value, dict) else value for name, value in values.items()}
        )

    def __missing__(self, name: str) -> Any:
        if ALIASES.get(name) in self:
            return self[ALIASES[name]]
        raise KeyError(name)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the config has no {name!r}; it has {', '.join(self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name if name in self else ALIASES.get(name, name)] = value


def load_rl_config(config_path: str | Path = "rl_config") -> ConfigMapping:
    """An `rl_config.yaml` with the defaults for what it leaves out; `rl_config` by itself is the one of the package."""
    return ConfigMapping(to_dict(read_phase_config(config_path)))


def get_training_config(config: Mapping[str, Any]) -> TrainingConfig:
    """The section `training` of a config, checked."""
    section = dict(config.get("training") or {})
    return checked(TrainingConfig, section, written={name: f"training.{name}" for name in section})


def get_environment_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The section `environment` of a config, with the episode's length from `training`: a `task_config`."""
    environment = dict(config.get("environment") or {})
    environment.setdefault("max_steps", get_training_config(config).steps_per_episode)
    return environment


def read_phase_config(path: str | Path) -> PhaseConfig:
    """The settings in a file, checked; run directories in `outputs` are below `OUTPUT_BASE`."""
    config = phase_config(read_mapping(find_config(path)))
    reject_overwrite(config.run.overwrite, path)
    return phase_config(_based(to_dict(config)))


def _based(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a file with each phase's `output_dir` below `OUTPUT_BASE`."""
    for phase in (*PHASES, ALL_PHASES):
        settings[phase]["output_dir"] = below_output_base(settings[phase]["output_dir"])
    return settings


def phase_config(mapping: Mapping[str, Any], written: Mapping[str, str] | None = None) -> PhaseConfig:
    """The settings that a mapping holds, checked; sections that it leaves out have their defaults."""
    values = {name: value for name, value in mapping.items() if value is not None}
    return checked(PhaseConfig, values, written=written)


def write_phase_config(config: PhaseConfig, path: Path) -> None:
    """Write a run's settings with the command that repeats it; not those of how this process came to the run."""
    settings = {name: value for name, value in to_dict(config).items() if name != "run" and value is not None}
    body = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    command = f"deft train --config {shlex.quote(str(path))} --output-dir ANOTHER_FOLDER"
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(f"# The settings of this run. To repeat it:\n#   {command}\n{body}", encoding="utf-8")
        keep_foreign(path)
        record(unfinished.replace(path))
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror or error}") from error


def phase_of_file(path: Path) -> str | None:
    """The phase that a run's settings file is of; None where it is of another kind of run."""
    if not path.is_file():
        return None
    phase = read_mapping(path).get("phase")
    return phase if phase in (*PHASES, ALL_PHASES) else None


# Settings of `training` that only the training of a world model reads; the student's flags leave them out.
WORLD_MODEL_TRAINING = (
    "batch_size",
    "gradient_accumulation",
    "compile",
    "learning_rate",
    "weight_decay",
    "scheduler",
    "min_learning_rate",
    "max_grad_norm",
    "sequential_training",
    "bptt_length",
    "memory_backprop",
    "motion_warmup",
    "memory_warmup",
    "motion_learning_rate",
    "train_understanding",
    "freeze_vision_encoder",
    "colour_augmentation",
    "shift_augmentation",
    "head_dropout",
    "overlap",
    "buffer_capacity",
    "learning_starts",
    "dataset",
    "dataset_options",
    "wrist_camera",
    "head_camera",
    "frame_skip",
    "holdout",
)
# Of phase 3: its own settings say how long, how fast and on what it trains.
GAME_SETTINGS = (
    "training.num_episodes",
    "training.learning_rate",
    "training.sequential_training",
    "training.motion_warmup",
    "training.memory_warmup",
    "training.motion_learning_rate",
    "training.overlap",
    "training.buffer_capacity",
    "training.learning_starts",
    "training.dataset",
    "training.dataset_options",
    "training.wrist_camera",
    "training.head_camera",
    "training.shift_augmentation",
    "training.frame_skip",
    "training.holdout",
    "student.explorer.learning_rate",
)
UNUSED = {
    "student": tuple(f"training.{name}" for name in WORLD_MODEL_TRAINING),
    "adversarial": GAME_SETTINGS,
    ALL_PHASES: (
        "training.num_episodes",
        "training.max_minutes",
        "adversarial.output_dir",
        "adversarial.teacher_checkpoint",
        "adversarial.student_checkpoint",
    ),
}
MORE_SECTIONS = {
    "adversarial": ("student.explorer",),
    ALL_PHASES: ("student.rewards", "student.explorer", "adversarial"),
}


def phase_flags(phase: str) -> list[FlagGroup]:
    """Every setting of a phase as a flag; the environment's as one mapping. Where two have one name, the later is led
    by its section's.
    """
    environment = Flag(
        "environment", "environment", (), dict[str, Any], "Settings of the world, over those of --config."
    )
    groups = [FlagGroup("command", "The command itself.", (CONFIG_FLAG, *OUTPUT_FLAGS, environment))]
    nested = [f"{phase}.{name}" for name in setting_names(_section(phase)) if nested_class(_section(phase), name)]
    nested += MORE_SECTIONS.get(phase, ())
    taken: set[str] = set()
    for section in ("training", "model", phase, *nested, "run", "logging"):
        cls, title = _section(section), section.rpartition(".")[2]
        flags = []
        for flag in class_flags(cls, section):
            if flag.path in UNUSED.get(phase, ()):
                continue
            name = f"{title}_{flag.name}" if flag.name in taken else flag.name
            taken.add(name)
            others = tuple(alias for alias in flag.aliases if alias not in taken)
            taken.update(others)
            flags.append(dataclasses.replace(flag, name=name, aliases=others))
        groups.append(FlagGroup(title, cls.__doc__ or "", tuple(flags)))
    return groups


def _section(path: str) -> type:
    """The settings class of a section, by its place in `PhaseConfig`."""
    found: type | None = PhaseConfig
    for name in path.split("."):
        found = nested_class(found, name) if found is not None else None
    assert found is not None, path
    return found


def parse_phase(phase: str, arguments: Sequence[str], base_file: Path | str | None) -> tuple[PhaseConfig, bool]:
    """The phase's settings (defaults, then the file, then the flags), and whether to print JSON."""
    mapping = read_mapping(find_config(base_file)) if base_file is not None else {}
    if mapping.get("phase") not in (None, phase):
        raise InputError(f"train {phase}: {base_file} is of phase {mapping['phase']!r}; give one of them")
    in_file = phase_config(mapping)
    reject_overwrite(in_file.run.overwrite, base_file)
    settings = _based(to_dict(in_file))
    groups = phase_flags(phase)
    defaults = {flag.path: value_at(settings, flag.path) for group in groups for flag in group.flags}
    given = parse_flags(
        groups,
        {**defaults, "config": base_file, **OUTPUT_DEFAULTS},
        arguments,
        usage=f"deft train {phase}",
        description=f"Train phase {phase}. Settings: defaults, then --config, then flags (- and _ alike).",
    )
    if given.words:
        raise InputError(f"train {phase}: unexpected '{given.words[0]}'; a value follows its flag")
    for path, value in given.values.items():
        if path == "environment":
            settings["environment"] |= value
            trust.name(value)
        elif path not in ("config", *OUTPUT_DEFAULTS):
            set_path(settings, path, value)
    return phase_config({**settings, "phase": phase}, given.written), given.values.get("json", False)
