"""The one table of other names: what the documents, old files and other commands call a setting.

Names are translated here and nowhere else, for flags, config files and keyword arguments alike. A name of the table is
accepted wherever a class has no setting of that name but the one that the table gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deft.config.fields import default_of, nested_class, setting_names
from deft.errors import InputError

ALIASES: dict[str, str] = {
    "out_dir": "output_dir",
    "lr": "learning_rate",
    "wm_lr": "wm_learning_rate",
    "explorer_lr": "explorer_learning_rate",
    "save_every": "save_freq",
    "save_interval": "save_freq",
    "eval_interval": "eval_freq",
    "log_every": "log_freq",
    "log_interval": "log_freq",
    "video_save_every": "video_freq",
    "sample_save_every": "sample_freq",
    "num_iterations": "iterations",
    "total_iterations": "iterations",
    "discount_gamma": "gamma",
    "ppo_gae_lambda": "gae_lambda",
    "ppo_epochs": "n_epochs",
    "ppo_clip_range": "clip_range",
    "clip_epsilon": "clip_range",
    "ppo_clip_range_vf": "clip_range_vf",
    "ppo_value_coef": "value_coef",
    "ppo_entropy_coef": "entropy_coef",
    "utd_ratio": "updates_per_step",
    "teacher_path": "teacher_checkpoint",
    "sight": "position_source",
    "val_fraction": "holdout",
    "curriculum_success_rate": "curriculum_success",
}
"""Other name → the name of the setting, in every class that has it and not the other."""

CLASS_ALIASES: dict[str, dict[str, str]] = {
    "PPOConfig": {"num_epochs": "n_epochs"},
    "TrainerConfig": {"buffer_size": "rollout_steps"},  # of replay algorithms it is the size of the replay buffer
    "ViewConfig": {"port": "view_port"},
    "OfflineRLConfig": {"gamma": "discount_gamma"},
    "RLConfig": {
        "gamma": "discount_gamma",
        "gae_lambda": "ppo_gae_lambda",
        "n_epochs": "ppo_epochs",
        "clip_range": "ppo_clip_range",
        "clip_epsilon": "ppo_clip_range",
        "clip_range_vf": "ppo_clip_range_vf",
        "value_coef": "ppo_value_coef",
        "entropy_coef": "ppo_entropy_coef",
    },
}
"""The same for the settings of one class and of those derived from it."""

VALUES: dict[str, dict[str, str]] = {"precision": {"float32": "fp32", "bfloat16": "bf16"}}
"""Other spellings of the values of a setting."""


MOVED: dict[str, str] = {
    "algorithm.cfg.rollout_steps": "trainer.rollout_steps",
    "algorithm.cfg.num_iterations": "trainer.iterations",
    "trainer.batch_size": "algorithm.cfg.batch_size",
}
"""Settings of a run that may also be written in another section of a file: there → where they belong."""

SHORTHANDS: dict[str, str] = {"env": "id", "policy": "name", "algorithm": "name", "dataset": "path"}
"""Sections that may be written as a plain string, and the setting that the string is."""


def field_for(cls: type, name: str) -> str | None:
    """Return the setting of a class that a name means; None where the class has none."""
    names = setting_names(cls)
    if name in names:
        return name
    return next((table[name] for table in _tables(cls) if table.get(name) in names), None)


def aliases_of(cls: type, name: str) -> list[str]:
    """Return the other names that a class accepts for one of its settings."""
    others = dict.fromkeys(alias for table in reversed(_tables(cls)) for alias in table)
    return [alias for alias in others if alias != name and field_for(cls, alias) == name]


def _tables(cls: type) -> list[dict[str, str]]:
    """Return the tables of aliases of a class: those of its own, of its bases, and that of all classes."""
    return [*(CLASS_ALIASES[base.__name__] for base in cls.__mro__ if base.__name__ in CLASS_ALIASES), ALIASES]


def translate_value(name: str, value: Any) -> Any:
    """Return the value of a setting, in the spelling that the setting has."""
    spellings = VALUES.get(name)
    return spellings.get(value, value) if spellings and isinstance(value, str) else value


def translate(
    cls: type, values: Mapping[Any, Any], concrete: Mapping[type, type] | None = None, prefix: str = ""
) -> tuple[dict[Any, Any], dict[str, str]]:
    """Return the values under the names of the class's settings, and how each renamed path was written.

    `resume: true`, as waypoint and tokenizer runs were resumed, becomes a path: that of `output_dir`.
    """
    translated: dict[Any, Any] = {}
    written: dict[str, str] = {}
    for key, given in values.items():
        name = (field_for(cls, key) if isinstance(key, str) else None) or key
        if name in translated:
            both = f"{prefix}{key}", written.get(f"{prefix}{name}", f"{prefix}{name}")
            alias, other = both if key != name else reversed(both)
            raise InputError(f"{alias}: the same setting as '{other}'; give one of them")
        value = translate_value(name, given)
        nested = nested_class(cls, name) if isinstance(name, str) else None
        if nested is not None and isinstance(value, dict):
            nested = (concrete or {}).get(nested, nested)
            value, inner = translate(nested, value, concrete, f"{prefix}{name}.")
            written |= inner
        if name != key:
            written[f"{prefix}{name}"] = f"{prefix}{key}"
        translated[name] = value
    if isinstance(translated.get("resume"), bool):
        default = default_of(cls, "output_dir") if field_for(cls, "output_dir") else None
        folder = translated.get("output_dir") or default
        if folder or not translated["resume"]:
            translated["resume"] = folder if translated["resume"] else None
    return translated, written
