"""The curves of the live view: bounded in length, and grouped into the charts of the page."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deft.evaluation.plots import PHASE_PANELS, UPDATE_PANELS

MOST_POINTS = 600
TRAINING, EVALUATION = "training", "evaluation"
# Charts at the top of the page: title, and metric → label.
FIRST_PANELS: dict[str, dict[str, str]] = {
    "Return": {"rollout/mean_reward": TRAINING, "evaluation/mean_reward": EVALUATION},
    "Success rate": {"rollout/success_rate": TRAINING, "evaluation/success_rate": EVALUATION},
    "Normalised score": {"evaluation/normalized_score": EVALUATION},
    "Episode length": {"rollout/mean_length": TRAINING, "evaluation/mean_length": EVALUATION},
}
FRACTIONS = ("Success rate", "Success rate by task")  # charts from 0 to 1


class Curve:
    """Points of one metric. Where there are too many, neighbours are averaged, so that memory is bounded."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.values: list[float] = []
        self._width = 1  # values in a point
        self._held = 0  # values in the last point

    def add(self, step: int, value: float) -> None:
        """Add a value at a step that is not before the last one."""
        if 0 < self._held < self._width:
            self._held += 1
            self.values[-1] += (value - self.values[-1]) / self._held
            self.steps[-1] = step
            return
        if len(self.steps) == MOST_POINTS:
            self.steps = self.steps[1::2]
            self.values = [(one + other) / 2 for one, other in zip(self.values[::2], self.values[1::2], strict=True)]
            self._width *= 2
        self.steps.append(step)
        self.values.append(value)
        self._held = 1


def panels(curves: Mapping[str, Curve], tasks: Mapping[str, Curve]) -> list[dict[str, Any]]:
    """Return the charts in the order of the page; those that are shown on request have `more`."""
    used: set[str] = set()
    found = []
    for title, labels in _groups(list(curves)):
        names = [name for name in labels if name in curves and name not in used]
        used |= set(names)
        if names:
            shown = [labels[name] for name in names]
            is_clear = len(set(shown)) == len(shown)
            found.append(_panel(title, {labels[name] if is_clear else name: curves[name] for name in names}))
        if title == "Success rate" and len(tasks) > 1:
            found.append(_panel("Success rate by task", tasks))
    others = [name for name in curves if name not in used]
    return found + [_panel(name, {label(name): curves[name]}) | {"more": True} for name in others]


def _groups(names: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the title of a chart, and its metrics with their labels."""
    yield from FIRST_PANELS.items()
    for title, metrics in PHASE_PANELS.items():
        yield title, {name: label(name) for name in metrics}
    for part, title in UPDATE_PANELS.items():
        yield title, {name: label(name) for name in names if name.rpartition("/")[2] == part}
    losses = [name for name in names if re.search(r"(^|[/_])loss$", name) and not name.startswith("evaluation/")]
    for last in dict.fromkeys(map(label, losses)):
        yield last.capitalize(), {name: last for name in losses if label(name) == last}


def _panel(title: str, curves: Mapping[str, Curve]) -> dict[str, Any]:
    series = [{"label": name, "steps": curve.steps, "values": curve.values} for name, curve in curves.items()]
    return {"title": title, "series": series, **({"range": [0, 1]} if title in FRACTIONS else {})}


def label(name: str) -> str:
    """Return the last part of a metric's name in words."""
    return name.rpartition("/")[2].replace("_", " ")
