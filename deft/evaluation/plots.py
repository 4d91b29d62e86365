"""Images of a run and of several runs side by side, from `episode_metrics.jsonl`.

`deft train` draws a run's plots at its end; the benchmarks compare runs with `plot_comparison`.

`deft.evaluation.report` and the live view read curves with the same functions.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deft.errors import InputError, RunError
from deft.ownership import keep_foreign, record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curve = tuple[np.ndarray, np.ndarray]  # steps, values

METRICS_FILE = "episode_metrics.jsonl"
WINDOW = 100  # episodes in a running mean
MAX_POINTS = 5_000  # single episodes drawn; beyond that an even selection of them

# The measures of an update that are drawn, by the last part of their name, in this order; other losses follow.
UPDATE_PANELS = {
    "policy_loss": "Policy loss",
    "value_loss": "Value loss",
    "entropy": "Entropy",
    "approx_kl": "Approximate KL",
    "clip_fraction": "Clip fraction",
    "explained_variance": "Explained variance",
    "learning_rate": "Learning rate",
    "grad_norm": "Gradient norm",
}

# Charts of the phases of F1 by the names of their metrics, in this order; other metrics follow.
PHASE_PANELS: dict[str, tuple[str, ...]] = {
    "World model: cross-entropy, nats a code": ("train/wm_loss", "train/held_out_loss"),
    "Codes predicted": ("train/wm_acc_mean", "train/copy_acc"),
    "Motion prior: mean pixel error": ("train/motion_loss", "train/copy_loss"),
    "Reward, mean of a step": ("train/reward",),
    "World-model error on the explorer's frames": ("train/wm_error", "train/older_wm_error"),
    "Memory divergence ‖h student − h teacher‖": ("train/memory_divergence",),
    "PPO: entropy": ("ppo/entropy", "train/entropy"),
    "PPO: value loss": ("ppo/value_loss", "train/value_loss"),
    "PPO: approximate KL": ("ppo/approx_kl", "train/approx_kl"),
    "PPO: explained variance": ("ppo/explained_variance", "train/explained_variance"),
}

BLUE, ORANGE, GRAY = "#2a6fbb", "#e07b39", "#9aa5b1"
PALETTE = (BLUE, ORANGE, "#3a9d6e", "#b8478f", "#7a63c4", "#8c6d46", "#c9a227", "#4fb3bf")
STYLE = Path(__file__).with_name("plots.mplstyle")


def plot_run(run_dir: Path) -> list[Path]:
    """Draw the learning curve and the measures of the updates into `<run>/plots`; returns what there was data for."""
    run_dir = Path(run_dir)
    lines = read_lines(run_dir)
    drawn = []
    if lines["episode"] or lines["evaluation"]:
        drawn.append(_plot_learning_curve(run_dir.name, lines, run_dir / "plots" / "learning_curve.png"))
    if panels := _update_curves(lines["update"]):
        drawn.append(_plot_updates(run_dir.name, panels, run_dir / "plots" / "updates.png"))
    return drawn


def plot_metrics(run_dir: Path, panels: Mapping[str, str], file: str, x_label: str) -> Path | None:
    """Draw metrics of the updates, name → title, into `<run>/plots/<file>`; None if there are none."""
    updates = read_lines(Path(run_dir))["update"]
    curves = _curves(updates, {title: name for name, title in panels.items()})
    return _plot_updates(Path(run_dir).name, curves, Path(run_dir) / "plots" / file, x_label) if curves else None


def read_curve(run_dir: Path, window: int = WINDOW) -> Curve:
    """The running mean of a run's episode returns, as `plot_comparison` takes it."""
    steps, returns = metric_curve(read_lines(Path(run_dir))["episode"], "episode_return")
    return _last_of_each_step(steps, running_mean(returns, window))


def plot_comparison(
    curves: Mapping[str, Sequence[Curve]],
    path: Path,
    title: str = "",
    x_label: str = "Environment steps",
    y_label: str = "Episode return",
) -> Path:
    """Draw labelled groups of curves, one curve a seed: the mean of each group, its standard deviation around it.

    The curves of a group are brought to common steps, over the range that all of them cover.
    """
    groups = {label: on_common_steps(label, seeds) for label, seeds in curves.items()}
    with drawing(path, 7.2, 4.4) as figure:
        axes = figure.subplots()
        for index, (label, (steps, values)) in enumerate(groups.items()):
            count, mean, deviation = len(values), values.mean(0), values.std(0)
            color = PALETTE[index % len(PALETTE)]
            axes.plot(steps, mean, color=color, linewidth=2, label=f"{label} ({count} seeds)" if count > 1 else label)
            if count > 1:
                axes.fill_between(steps, mean - deviation, mean + deviation, color=color, alpha=0.18, linewidth=0)
        finish_axes(axes, title, y_label, x_label)
        axes.legend(loc="best")
    return Path(path)


def plot_bars(
    labels: Sequence[str],
    groups: Mapping[str, Sequence[float]],
    errors: Mapping[str, Sequence[float]],
    path: Path,
    title: str = "",
    y_label: str = "",
) -> Path:
    """Draw bars side by side: for each label one of every group, with its error."""
    with drawing(path, 7.2, 4.4) as figure:
        axes = figure.subplots()
        draw_bars(axes, labels, groups, errors)
        axes.axhline(0.0, color="black", linewidth=0.8)
        axes.set_title(title)
        axes.set_ylabel(y_label)
        axes.legend(loc="best")
    return Path(path)


def draw_bars(axes: Axes, labels: Sequence[str], groups: Mapping[str, Any], errors: Mapping[str, Any]) -> None:
    """Draw bars side by side: for each label one of every group, with its error."""
    width = 0.8 / len(groups)
    for index, (name, values) in enumerate(groups.items()):
        positions = np.arange(len(labels)) + (index - (len(groups) - 1) / 2) * width
        color = PALETTE[index % len(PALETTE)]
        axes.bar(positions, values, 0.96 * width, yerr=errors[name], capsize=2, color=color, label=name)
    axes.set_xticks(range(len(labels)), labels)


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the last `window` values at each index, or of all values so far if there are fewer."""
    total = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    end = np.arange(1, len(values) + 1)
    start = np.maximum(end - window, 0)
    return (total[end] - total[start]) / (end - start)


def read_lines(run_dir: Path) -> dict[str, list[dict[str, Any]]]:
    """The lines of the metrics file by type; half a line at the end belongs to a run still being written."""
    path = run_dir / METRICS_FILE
    if not path.is_file():
        raise InputError(f"{run_dir} has no {METRICS_FILE} to plot; give the folder of a run")
    lines: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with open(path, encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            if not text.endswith("\n"):
                break
            try:
                line = json.loads(text)
                lines[line["type"]].append(line)
            except (ValueError, KeyError, TypeError):
                raise InputError(f"{path} line {number} is not a line of metrics: {text[:60]!r}") from None
    return lines


def metric_curve(lines: Sequence[Mapping[str, Any]], name: str) -> Curve:
    """The steps and values of the lines that have a number under `name` (null stands for one that was not finite)."""
    points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
    table = np.array(points, np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _update_curves(updates: Sequence[Mapping[str, Any]]) -> dict[str, Curve]:
    """The curves to draw of the updates, by title."""
    names = list(dict.fromkeys(name for line in updates for name in line))
    by_last_part = {name.rsplit("/", 1)[-1]: name for name in names}
    panels = {title: by_last_part[part] for part, title in UPDATE_PANELS.items() if part in by_last_part}
    for part, name in by_last_part.items():
        if part not in UPDATE_PANELS and (part == "loss" or part.endswith("_loss")):
            panels[part.replace("_", " ").capitalize()] = name
    return _curves(updates, panels)


def _curves(updates: Sequence[Mapping[str, Any]], panels: Mapping[str, str]) -> dict[str, Curve]:
    """Return the curves of some metrics, title → name, that have values."""
    curves = {title: metric_curve(updates, name) for title, name in panels.items()}
    return {title: curve for title, curve in curves.items() if len(curve[0])}


def _plot_learning_curve(name: str, lines: Mapping[str, list[dict[str, Any]]], path: Path) -> Path:
    success_steps, success = metric_curve(lines["episode"], "success")
    evaluated_success = metric_curve(lines["evaluation"], "success_rate")
    with_success = len(success_steps) > 0 or len(evaluated_success[0]) > 0
    heights = [2, 1] if with_success else [1]
    with drawing(path, 7.2, 6.4 if with_success else 4.4) as figure:
        rows = figure.subplots(len(heights), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
        steps, returns = metric_curve(lines["episode"], "episode_return")
        if len(steps):
            chosen = np.linspace(0, len(steps) - 1, min(len(steps), MAX_POINTS)).round().astype(int)
            rows[0].plot(steps[chosen], returns[chosen], ".", color=GRAY, markersize=4, alpha=0.5, markeredgewidth=0)
            label = f"mean of the last {mean_window(len(steps))} episodes"
            rows[0].plot(*smoothed(steps, returns), color=BLUE, linewidth=2, label=label)
        _draw_evaluations(rows[0], lines["evaluation"])
        finish_axes(rows[0], name, "Episode return", "" if with_success else "Environment steps")
        rows[0].legend(loc="best")
        if with_success:
            rows[1].plot(*smoothed(success_steps, success), color=BLUE, linewidth=2)
            rows[1].plot(*evaluated_success, "o", color=ORANGE, markersize=5)
            rows[1].set_ylim(-0.03, 1.03)
            finish_axes(rows[1], "", "Success rate", "Environment steps")
    return path


def mean_window(count: int) -> int:
    """Episodes in the mean that is drawn: few in a short run, where a mean of 100 would lag far behind."""
    return min(max(count // 20, 10), WINDOW)


def smoothed(steps: np.ndarray, values: np.ndarray) -> Curve:
    """The running mean to draw, without its start, where the mean of a few episodes jumps."""
    window = mean_window(len(steps))
    start = max(0, min(window // 4, len(steps) - 1))
    return _last_of_each_step(steps[start:], running_mean(values, window)[start:])


def _last_of_each_step(steps: np.ndarray, values: np.ndarray) -> Curve:
    """One point a step: the episodes of a rollout are logged together at its end."""
    last = np.append(steps[1:] != steps[:-1], True)[: len(steps)]
    return steps[last], values[last]


def _draw_evaluations(axes: Axes, evaluations: Sequence[Mapping[str, Any]]) -> None:
    steps, means = metric_curve(evaluations, "mean_reward")
    if not len(steps):
        return
    deviations = [line.get("std_reward") or 0.0 for line in evaluations if line.get("mean_reward") is not None]
    style: dict[str, Any] = {"color": ORANGE, "linewidth": 1.2, "markersize": 5, "capsize": 2, "zorder": 3}
    axes.errorbar(steps, means, yerr=deviations, fmt="o-", elinewidth=1, label="evaluation (mean ± std)", **style)


def _plot_updates(name: str, panels: Mapping[str, Curve], path: Path, x_label: str = "Environment steps") -> Path:
    columns = min(len(panels), 4 if len(panels) in (4, 7, 8) else 3)
    rows = -(-len(panels) // columns)
    with drawing(path, 3.7 * columns, 2.5 * rows + 0.4) as figure:
        grid = figure.subplots(rows, columns, squeeze=False, sharex=True)
        figure.suptitle(name, x=0.01, ha="left", fontsize=12, fontweight="bold")
        for index, (axes, (title, (steps, values))) in enumerate(zip(grid.flat, panels.items(), strict=False)):
            if len(steps) > 2 * WINDOW:  # many updates: their course over the noise
                axes.plot(steps, values, color=GRAY, linewidth=0.6, alpha=0.6)
                axes.plot(steps, running_mean(values, len(steps) // 40), color=BLUE, linewidth=1.8)
            else:
                axes.plot(steps, values, color=BLUE, linewidth=1.6, marker="." if len(steps) < 3 else None)
            if title == "Explained variance":
                axes.set_ylim(max(-1.05, min(-0.05, values.min())), 1.05)
            lowest_in_column = index + columns >= len(panels)
            finish_axes(axes, title, "", x_label if lowest_in_column else "")
            axes.tick_params(labelbottom=lowest_in_column)
        for axes in list(grid.flat)[len(panels) :]:
            axes.set_visible(False)
    return path


def on_common_steps(label: str, seeds: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray]:
    """Return common steps of several curves, over the range that all of them cover, and the values [seeds, steps]."""
    if not seeds or any(len(steps) == 0 for steps, _ in seeds):
        raise InputError(f"comparison {label!r} has a run without points; each needs at least one")
    first = max(np.min(steps) for steps, _ in seeds)
    last = min(np.max(steps) for steps, _ in seeds)
    if first > last:
        raise InputError(f"the runs of comparison {label!r} have no steps in common")
    if all(np.array_equal(steps, seeds[0][0]) for steps, _ in seeds):
        return seeds[0][0], np.stack([values for _, values in seeds])
    grid = np.linspace(first, last, 400)
    return grid, np.stack([np.interp(grid, steps, curve) for steps, curve in seeds])


@contextmanager
def drawing(path: str | Path, width: float, height: float) -> Iterator[Figure]:
    """Yield a figure in Deft's style and write it to `path` as PNG afterwards; pyplot is not used."""
    from matplotlib import style
    from matplotlib.figure import Figure

    path = Path(path)
    with style.context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            keep_foreign(path)
            figure.savefig(path, dpi=150, format="png")
            record(path)
        except OSError as error:
            raise RunError(f"cannot write the plot {path}: {error.strerror or error}") from error


def finish_axes(axes: Axes, title: str, y_label: str, x_label: str) -> None:
    """Set title, labels and the format of the steps."""
    axes.set_title(title)
    axes.set_ylabel(y_label)
    axes.set_xlabel(x_label)
    axes.xaxis.set_major_formatter(lambda value, _: short_number(value))
    axes.margins(x=0.02)


def short_number(value: float) -> str:
    """1500 as 1.5k, 2,000,000 as 2M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"
