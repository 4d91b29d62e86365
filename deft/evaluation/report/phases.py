"""What a report shows of the phases of F1 beside what it shows of every run: predictions and comparisons."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from deft.config.rl_yaml import CONFIG_FILE, PHASES, phase_of_file
from deft.evaluation.report.charts import Bar, Series, bar_chart, line_chart
from deft.evaluation.report.markup import grid, heading, table

TITLES = {
    "teacher": ("Phase 1 · Teacher", "A world model learns to predict the wrist camera from random exploration."),
    "student": (
        "Phase 2 · Student",
        "An explorer with the wrist camera alone learns by PPO where the frozen world model is unsure.",
    ),
    "adversarial": (
        "Phase 3 · Adversarial",
        "World model against explorer: one finds what the other cannot predict yet, the other learns it.",
    ),
}
FACTS = (
    ("wm_acc", "codes predicted", 100.0, " %"),
    ("copy_acc", "by copying", 100.0, " %"),
    ("psnr", "PSNR", 1.0, " dB"),
    ("copy_psnr", "by copying (PSNR)", 1.0, " dB"),
    ("cross_entropy", "cross-entropy", 1.0, " nats"),
)


def phase_folders(folder: Path) -> dict[str, Path]:
    """Return the phases' run directories in the folder of `deft train all`; empty for another folder."""
    return {phase: folder / phase for phase in PHASES if phase_of_file(folder / phase / CONFIG_FILE) == phase}


def phase_facts(evaluation: Mapping[str, Any]) -> dict[str, str]:
    """Return the figures of a phase's evaluation on held-out scenes."""
    facts = {} if not evaluation.get("checkpoint") else {"evaluated": Path(evaluation["checkpoint"]).name}
    for name, label, scale, unit in FACTS:
        if evaluation.get(name) is not None:
            facts[label] = f"{scale * evaluation[name]:.3g}{unit}"
    return facts


def evaluation_charts(evaluation: Mapping[str, Any]) -> list[str]:
    """Return ablations, horizons and comparisons out of `evaluation.json`."""
    charts = []
    ablations = evaluation.get("ablations") or {}
    if ablations:
        bars = {"whole": 100 * evaluation["wm_acc"]}
        bars |= {name.replace("_", " "): 100 * found["wm_acc"] for name, found in ablations.items()}
        charts.append(bar_chart("Codes predicted without …, %", named_bars(bars)))
    horizon = evaluation.get("open_loop") or {}
    for title, own, copy in (
        ("Open loop: codes predicted", "wm_acc", "copy_acc"),
        ("Open loop: PSNR, dB", "psnr", "copy_psnr"),
    ):
        if horizon.get(own):
            ahead = np.arange(1, len(horizon[own]) + 1)
            curves = [
                Series(name, (ahead, np.array(horizon[key], float)), index)
                for index, (name, key) in enumerate((("world model", own), ("last frame seen", copy)))
            ]
            charts.append(line_chart(title, curves, "frames ahead"))
    charts += interaction_charts(evaluation.get("interaction") or {})
    charts += [bar_chart(title, named_bars(bars)) for title, bars in (evaluation.get("bars") or {}).items()]
    return charts


def interaction_charts(found: Mapping[str, Any]) -> list[str]:
    """Return the open-loop predictions of moved objects and of all else on held-out interaction."""
    charts = []
    for part, title in (("moved", "Interaction, moved objects"), ("rest", "Interaction, all else")):
        curves = []
        for index, (name, key) in enumerate((("world model", "psnr"), ("last frame seen", "copy_psnr"))):
            known = [(int(ahead), one[part][key]) for ahead, one in (found.get("open_loop") or {}).items()]
            points = [(ahead, value) for ahead, value in known if value is not None]
            if points:
                ahead, values = (np.array(column, float) for column in zip(*points, strict=True))
                curves.append(Series(name, (ahead, values), index))
        if curves:
            charts.append(line_chart(f"{title}: PSNR, dB", curves, "steps ahead"))
    return charts


def phase_comparison(found: Mapping[str, Any]) -> str:
    """Return the comparison of world models on the held-out episodes of another explorer."""
    rows = found["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row["values"]))
    body = [[row["name"], *(row["values"].get(name) for name in names)] for row in rows]
    charts = grid(bar_chart(title, named_bars(bars)) for title, bars in (found.get("bars") or {}).items())
    return f"{heading(found['title'], found.get('note') or '')}{table(['', *names], body)}{charts}"


def named_bars(bars: Mapping[str, Any]) -> list[Bar]:
    """Return bars of a mapping; of several values (seeds) the mean, with each of them."""
    found = []
    for index, (name, value) in enumerate(bars.items()):
        values = [one for one in (value if isinstance(value, list) else [value]) if one is not None]
        if values:
            found.append(Bar(name, sum(values) / len(values), index, values=values if len(values) > 1 else ()))
    return found
