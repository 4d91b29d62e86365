"""The runs that `deft compare` and `deft report` are given: single ones, or seeds of a method (`ppo=RUN,RUN,RUN`)."""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from pathlib import Path

from deft.errors import InputError
from deft.evaluation.rollouts import EXPERT, RANDOM

SCRIPTED = (RANDOM, EXPERT)  # policies that are no run


def named_groups(words: Sequence[str]) -> dict[str, list[str]]:
    """What each row of the table is made of, by its label: a run, or the seeds of a method.

    `ppo=RUN,RUN,RUN`, `ppo=RUN ppo=RUN` and `ppo=runs/ppo_*` are all one row.
    """
    single = [word for word in words if "=" not in word or Path(word).exists()]
    labels = _labels([word for word in single if word not in SCRIPTED])
    groups: dict[str, list[str]] = {}
    for word in words:
        label, _, runs = word.partition("=")
        if word in single:
            label, runs = labels.get(word, word), word
        names = [word] if word in single else [run for name in runs.split(",") if name for run in _matches(name)]
        if word in single and list(words).count(word) > 1:
            raise InputError(f"{word}: is named twice; give each run once")
        if not label or not names or (word in single and label in groups):
            raise InputError(f"{word}: give a label of its own and its runs, as in ppo=RUN,RUN,RUN")
        groups.setdefault(label, []).extend(names)
    for label, names in groups.items():
        paths = [Path(name).resolve() for name in names]
        twice = [name for name, path in zip(names, paths, strict=True) if paths.count(path) > 1]
        if twice:
            raise InputError(f"{label}: {twice[0]} is named twice; give each run once")
    return groups


def _matches(name: str) -> list[str]:
    """The run folders that a pattern such as `runs/ppo_*` means, by number; the name itself where it is no pattern."""
    if name in SCRIPTED or Path(name).exists() or not glob.has_magic(name):
        return [name]
    found = [path for path in glob.glob(name) if Path(path).is_dir()]
    if not found:
        raise InputError(f"{name}: matches no run folder")
    return sorted(found, key=lambda path: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path)])


def _labels(names: list[str]) -> dict[str, str]:
    """The last parts of the paths, as many as distinguish them."""
    parts = {name: Path(name).resolve().parts for name in names}
    for count in range(1, max((len(part) for part in parts.values()), default=0) + 1):
        labels = {name: "/".join(part[-count:]) for name, part in parts.items()}
        if len(set(labels.values())) == len(names):
            return labels
    return {name: name for name in names}
