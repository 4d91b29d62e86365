"""Reads the documents' `rl_config.yaml`, and makes the flags of `deft train teacher`.

`load_rl_config`, `get_training_config` and `get_environment_config` are for users (exported from `deft`);
`parse_phase` is what `deft.cli` calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deft.config.aliases import ALIASES
from deft.config.f1_settings import PhaseConfig, RecordedVideo, TrainingConfig, WorldModelTraining
from deft.config.fields import nested_class, sections_of, setting_names
from deft.config.flags import FILE_FLAGS, Flag, FlagGroup, parse, section_flags
from deft.config.loading import find_config, read_mapping, reject_overwrite, to_dict, write_settings
from deft.config.output_base import below_output_base
from deft.config.validation import checked
from deft.errors import InputError, RunError

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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_settings(settings, path, has_directory=True)
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror or error}") from error


def phase_of_file(path: Path) -> str | None:
    """The phase that a run's settings file is of; None where it is of another kind of run."""
    if not path.is_file():
        return None
    phase = read_mapping(path).get("phase")
    return phase if phase in (*PHASES, ALL_PHASES) else None


# Settings of each phase that do not apply to it; their flags are left out.
UNUSED = {
    "student": {f"training.{name}" for name in setting_names(WorldModelTraining)},
    "adversarial": {
        *(f"training.{name}" for name in setting_names(RecordedVideo)),
        *(f"training.{name}" for name in ("num_episodes", "learning_rate", "sequential_training", "motion_warmup")),
        *(f"training.{name}" for name in ("memory_warmup", "motion_learning_rate", "overlap", "buffer_capacity")),
        "training.learning_starts",
        "student.explorer.learning_rate",
    },
    ALL_PHASES: {
        "training.num_episodes",
        "training.max_minutes",
        "adversarial.output_dir",
        "adversarial.teacher_checkpoint",
        "adversarial.student_checkpoint",
    },
}
MORE_SECTIONS = {
    "adversarial": ("student.explorer",),
    ALL_PHASES: ("student.rewards", "student.explorer", "adversarial"),
}
PHASE_TRAINING = {
    "teacher": "Train an F1 world model on random exploration, or on recorded video.",
    "student": "Train an explorer with PPO to find what a teacher's world model cannot predict.",
    "adversarial": "Train world model and explorer against each other.",
    "all": "Train the three phases in order, and write a report.",
}


def phase_flags(phase: str) -> list[FlagGroup]:
    """Return every setting of a phase as a flag, and the environment's as one mapping."""
    about = "Settings of the environment, added to those of the file."
    environment = Flag("environment", "environment", (), dict[str, Any], about)
    own = [f"{phase}.{name}" for name in setting_names(_section(phase)) if nested_class(_section(phase), name)]
    paths = ("training", "model", phase, *own, *MORE_SECTIONS.get(phase, ()), "run", "logging")
    groups = section_flags(((path, _section(path)) for path in paths), {}, UNUSED.get(phase, ()), {})
    return [FlagGroup("file", "", (*FILE_FLAGS, environment)), *groups.values()]


def _section(path: str) -> type:
    """Return the settings class of a section of `PhaseConfig`."""
    return dict(sections_of(PhaseConfig, {}))[path]


def parse_phase(phase: str, arguments: Sequence[str], base_file: Path | str | None) -> tuple[PhaseConfig, bool]:
    """Return the phase's settings (defaults, then the file, then the flags), and whether to print JSON."""
    mapping = read_mapping(find_config(base_file)) if base_file is not None else {}
    if mapping.get("phase") not in (None, phase):
        raise InputError(f"train {phase}: {base_file} is of phase {mapping['phase']!r}; give one of them")
    in_file = phase_config(mapping)
    reject_overwrite(in_file.run.overwrite, base_file)
    parsed = parse(
        f"train {phase}",
        _section(phase),
        arguments,
        groups=phase_flags(phase),
        base=_based(to_dict(in_file)),
        make=lambda values, written: phase_config({**values, "phase": phase}, written),
    )
    return parsed.config, parsed.as_json
