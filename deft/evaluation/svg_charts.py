"""Charts of `report.html`: drawn by matplotlib as SVG that is part of the page and follows its colours."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from deft.evaluation import plots
from deft.evaluation.plots import PALETTE, Curve, finish_axes, running_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_POINTS = 300
COLORS = PALETTE[:6]
SMOOTHED = 60  # points from which a curve is drawn as its running mean over a pale line of all points
INK, SOFT, LINE, CARD = "#1c2530", "#5c6874", "#dfe4ea", "#fefefe"
# Colours that are drawn, and the variables of the page's style sheet that replace them.
VARIABLES = {INK: "--ink", SOFT: "--soft", LINE: "--line", CARD: "--card"} | {
    color: f"--c{index}" for index, color in enumerate(COLORS)
}
STYLE = Path(__file__).with_name("svg_charts.mplstyle")


def line_chart(title: str, curves: Mapping[str, Curve], x_label: str = "") -> str:
    """Curves over common axes, as SVG; empty if no value is finite."""
    finite = {}
    for name, (steps, values) in curves.items():
        is_finite = np.isfinite(np.asarray(values, float))
        if is_finite.any():
            finite[name] = np.asarray(steps, float)[is_finite], np.asarray(values, float)[is_finite]
    if not finite:
        return ""

    def draw(axes: Axes) -> None:
        for index, (name, (steps, values)) in enumerate(finite.items()):
            color = COLORS[index % len(COLORS)]
            chosen = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), MAX_POINTS)).round().astype(int))
            if len(values) > SMOOTHED:
                axes.plot(steps[chosen], values[chosen], color=color, linewidth=0.6, alpha=0.35, gid=f"raw-{index}")
                values = running_mean(values, len(values) // 30)
            marker = "o" if len(steps) == 1 else None
            axes.plot(steps[chosen], values[chosen], color=color, marker=marker, label=name, gid=f"line-{index}")
        finish_axes(axes, title, "", x_label)
        if len(finite) > 1:
            axes.legend(loc="best")

    last = ", ".join(f"{name} {values[-1]:.4g}" for name, (_, values) in finite.items())
    return _svg(title, draw, last)


def bar_chart(title: str, bars: Mapping[str, float | Sequence[float]]) -> str:
    """Bars as SVG; of several values (seeds) the bar is their mean and each is a dot."""
    finite = {name: np.atleast_1d(np.asarray(value, float)) for name, value in bars.items()}
    finite = {name: values[np.isfinite(values)] for name, values in finite.items()}
    finite = {name: values for name, values in finite.items() if len(values)}
    if not finite:
        return ""

    def draw(axes: Axes) -> None:
        for index, values in enumerate(finite.values()):
            mean = values.mean()
            (bar,) = axes.bar([index], [mean], 0.56, color=COLORS[index % len(COLORS)])
            bar.set_gid(f"bar-{index}")
            if len(values) > 1:
                positions = index + np.linspace(-0.1, 0.1, len(values))
                axes.plot(positions, values, "o", color=CARD, markeredgecolor=INK, markersize=4, gid=f"seeds-{index}")
            top = max(mean, values.max())
            axes.annotate(f"{mean:.3g}", (index, top), (0, 4), textcoords="offset points", ha="center", fontsize=8)
        axes.set_title(title)
        axes.set_xticks(range(len(finite)), [_two_lines(name, 48 // len(finite)) for name in finite])
        axes.margins(y=0.15)

    return _svg(title, draw, ", ".join(f"{name} {values.mean():.4g}" for name, values in finite.items()))


def _two_lines(text: str, width: int) -> str:
    """Words under a bar, in at most two lines."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + len(word) >= width and len(lines) < 2:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def _svg(title: str, draw: Callable[[Axes], None], description: str) -> str:
    from matplotlib import style
    from matplotlib.figure import Figure

    file = io.StringIO()
    with style.context([plots.STYLE, STYLE]):
        figure = Figure(figsize=(3.6, 2.2), layout="constrained")
        draw(figure.subplots())
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = text.replace("xlink:href", "href")  # which inline SVG knows without a namespace
    view, content = re.findall(r'<svg [^>]*viewBox="([^"]*)"[^>]*>(.*)</svg>', text, re.DOTALL)[0]
    content = re.sub(r"<metadata>.*?</metadata>", "", content, flags=re.DOTALL)
    content = re.sub(r' id="((?:line|raw|bar|seeds)-\d+)"', r' class="\1"', content)  # ids are unique in a page
    content = re.sub(r' id="[\w.]+_\d+"', "", content)
    for color, variable in VARIABLES.items():
        content = content.replace(color, f"var({variable})")
    content = re.sub(r">\s+<", "><", content).strip()
    label = escape(title)
    return (
        f'<svg class="chart" viewBox="{view}" role="img" aria-label="{label}">'
        f"<title>{escape(f'{title}: {description}')}</title>{content}</svg>"
    )
