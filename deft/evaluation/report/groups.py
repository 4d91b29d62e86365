"""Groups of runs: those that differ in their seed alone are repetitions, and their curves have intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deft.errors import InputError
from deft.evaluation.plots import Curve, on_common_steps
from deft.evaluation.report.charts import Series, smooth
from deft.evaluation.report.run_data import ReportedRun, is_place, is_seed
from deft.evaluation.success import FEWEST_SEEDS, t_quantile

MISSING = "–"  # a setting that a run does not have
NUMBERS = "_-. 0123456789"  # characters between the word of a name and its number, and of the number


@dataclass
class Group:
    """Runs of one setting, and what they are called."""

    label: str
    runs: list[ReportedRun]

    @property
    def first(self) -> ReportedRun:
        """The run whose settings stand for all."""
        return self.runs[0]

    @property
    def end(self) -> int:
        """The last step that all runs have reached, at which their results are compared."""
        return min(run.step for run in self.runs)

    def series(self, read: Callable[[ReportedRun], Curve], name: str, color: int) -> Series | None:
        """Return a curve of the runs: of several the mean, its 95 % interval (of two their range), and pale lines."""
        curves = [curve for run in self.runs if len((curve := read(run))[0])]
        if not curves:
            return None
        if len(curves) == 1:
            return smooth(name, curves[0], color)
        try:
            steps, values = on_common_steps(self.label, curves)
        except InputError:  # no steps in common: one of them was killed at its start
            return Series(name, curves[0], color, members=curves[1:])
        low, high = values.min(0), values.max(0)
        mean, count = values.mean(0), len(values)
        if count >= FEWEST_SEEDS:
            half = t_quantile(count - 1) * values.std(0, ddof=1) / np.sqrt(count)
            low, high = mean - half, mean + half
        return Series(name, (steps, mean), color, low, high, members=curves)


def group_runs(runs: Sequence[ReportedRun]) -> list[Group]:
    """Return the runs in groups that differ in seed and place alone, named by their directories."""
    found: dict[str, list[ReportedRun]] = {}
    for run in runs:
        found.setdefault(repr(sorted(_identity(run).items())), []).append(run)
    groups = [Group(_common_name([run.name for run in members]), members) for members in found.values()]
    labels = [group.label for group in groups]
    for group in groups:
        if labels.count(group.label) > 1:
            group.label = group.first.name
    labels = [group.label for group in groups]
    for index, group in enumerate(groups):  # directories of the same name
        if labels.count(group.label) > 1:
            group.label = f"{labels[index]} ({index + 1})"
    return groups


def differences(groups: Sequence[Group]) -> dict[str, list[Any]]:
    """Return the settings in which groups differ: a value of each."""
    every = [{"training": group.first.kind, **group.first.settings} for group in groups]
    names = dict.fromkeys(name for settings in every for name in settings if not is_seed(name) and not is_place(name))
    rows = {name: [settings.get(name, MISSING) for settings in every] for name in names}
    return {name: values for name, values in rows.items() if any(value != values[0] for value in values)}


def _identity(run: ReportedRun) -> dict[str, Any]:
    settings = {name: value for name, value in run.settings.items() if not is_seed(name) and not is_place(name)}
    return {"training": run.kind, **settings}


def _common_name(names: Sequence[str]) -> str:
    """Return what names begin with: `ppo` for `ppo_1` and `ppo_2`; the first name if no word is common to them."""
    if len(names) == 1:
        return names[0]
    same = [len(set(letters)) == 1 for letters in zip(*names, strict=False)]
    common = names[0][: same.index(False) if False in same else len(same)]
    stem = common.rstrip(NUMBERS).removesuffix("seed").rstrip(NUMBERS)
    is_word = len(stem) < len(common) or all(name[len(common) :][:1] in ("", *NUMBERS) for name in names)
    return stem if stem and is_word else names[0]
