"""Charts as inline SVG: lines over steps, and bars. `deft.evaluation.report` puts them into its page.

Colours and fonts come from the page's style sheet (classes `c0` … `c5`, `axis`, …): they follow its theme.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from deft.evaluation.plots import Curve, running_mean

WIDTH, HEIGHT = 360, 220
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 30, 34
MAX_POINTS = 300
NUM_COLOURS = 6


def line_chart(title: str, curves: Mapping[str, Curve], x_label: str = "") -> str:
    """Curves over common axes; long ones as their running mean over a pale line of all points."""
    drawn = {name: (np.asarray(steps, float), np.asarray(values, float)) for name, (steps, values) in curves.items()}
    finite = {
        name: (steps[np.isfinite(values)], values[np.isfinite(values)]) for name, (steps, values) in drawn.items()
    }
    finite = {name: curve for name, curve in finite.items() if len(curve[0])}
    if not finite:
        return ""
    all_steps = np.concatenate([steps for steps, _ in finite.values()])
    all_values = np.concatenate([values for _, values in finite.values()])
    low, high = float(all_values.min()), float(all_values.max())
    y_ticks = ticks(low, high)
    x_ticks = ticks(float(all_steps.min()), float(all_steps.max()), 5)
    axes = _Axes((float(all_steps.min()), float(all_steps.max())), (min(low, y_ticks[0]), max(high, y_ticks[-1])))
    parts = [_grid(axes, x_ticks, y_ticks, x_label)]
    for index, (name, (steps, values)) in enumerate(finite.items()):
        colour = f"c{index % NUM_COLOURS}"
        smooth = running_mean(values, max(1, len(values) // 30))
        if len(values) > 60:
            parts.append(_polyline(axes, steps, values, f"raw {colour}"))
        shown = smooth if len(values) > 60 else values
        if len(steps) == 1:
            parts.append(
                f'<circle class="dot {colour}" cx="{axes.x(steps[0]):.1f}" cy="{axes.y(shown[0]):.1f}" r="3" />'
            )
        parts.append(_polyline(axes, steps, shown, f"line {colour}"))
        if len(finite) > 1:
            parts.append(_legend(index, name))
    last = ", ".join(f"{name} {values[-1]:.4g}" for name, (_, values) in finite.items())
    return _svg(title, "".join(parts), last)


def bar_chart(title: str, bars: Mapping[str, float | Sequence[float]], unit: str = "", from_zero: bool = True) -> str:
    """A bar each; where there are several values (seeds), the bar is their mean and each is a dot."""
    values = {name: np.atleast_1d(np.asarray(value, float)) for name, value in bars.items()}
    values = {name: found[np.isfinite(found)] for name, found in values.items()}
    values = {name: found for name, found in values.items() if len(found)}
    if not values:
        return ""
    everything = np.concatenate(list(values.values()))
    low, high = float(everything.min()), float(everything.max())
    if from_zero:
        low, high = min(0.0, low), max(0.0, high)
    else:
        low -= 0.25 * (high - low or abs(high) or 1.0)
    y_ticks = ticks(low, high + 0.08 * (high - low))  # room for the numbers above the bars
    axes = _Axes((0.0, float(len(values))), (min(low, y_ticks[0]), max(high, y_ticks[-1])))
    parts = [_grid(axes, [], y_ticks, "")]
    base = axes.y(max(0.0, axes.y_range[0]) if from_zero else axes.y_range[0])
    for index, (name, found) in enumerate(values.items()):
        mean, middle = float(found.mean()), axes.x(index + 0.5)
        width = 0.56 * (axes.x(1) - axes.x(0))
        top = axes.y(mean)
        place = (
            f'x="{middle - width / 2:.1f}" y="{min(top, base):.1f}" width="{width:.1f}" height="{abs(base - top):.1f}"'
        )
        parts.append(f'<rect class="bar c{index % NUM_COLOURS}" {place} />')
        if len(found) > 1:
            spread = np.linspace(-width / 5, width / 5, len(found))
            parts += [
                f'<circle class="seed" cx="{middle + shift:.1f}" cy="{axes.y(value):.1f}" r="2.6" />'
                for shift, value in zip(spread, found, strict=True)
            ]
        text_y = min(top, base, *(axes.y(value) for value in found)) - 6
        parts.append(f'<text class="value" x="{middle:.1f}" y="{text_y:.1f}">{mean:.3g}{escape(unit)}</text>')
        parts.append(_wrapped(name, middle, HEIGHT - BOTTOM + 13, 48 // len(values)))
    return _svg(title, "".join(parts), ", ".join(f"{name} {found.mean():.4g}{unit}" for name, found in values.items()))


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers that span low … high, about `count` of them."""
    if not high > low:
        size = abs(low) or 1.0
        low, high = low - 0.5 * size, high + 0.5 * size
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


class _Axes:
    """From data to places in the picture."""

    def __init__(self, x_range: tuple[float, float], y_range: tuple[float, float]) -> None:
        self.x_range, self.y_range = x_range, y_range

    def x(self, value: float) -> float:
        first, last = self.x_range
        return LEFT + (WIDTH - LEFT - RIGHT) * ((value - first) / (last - first) if last > first else 0.5)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low)


def _grid(axes: _Axes, x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str) -> str:
    parts = []
    for value in y_ticks:
        y = axes.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" />')
        parts.append(f'<text class="tick end" x="{LEFT - 6}" y="{y + 3.5:.1f}">{_short(value)}</text>')
    for value in x_ticks:
        if axes.x_range[0] <= value <= axes.x_range[1]:
            x = axes.x(value)
            parts.append(f'<text class="tick mid" x="{x:.1f}" y="{HEIGHT - BOTTOM + 14}">{_short(value)}</text>')
    base = HEIGHT - BOTTOM
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}" />')
    if x_label:
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(f'<text class="tick mid" x="{middle}" y="{HEIGHT - 5}">{escape(x_label)}</text>')
    return "".join(parts)


def _polyline(axes: _Axes, steps: np.ndarray, values: np.ndarray, names: str) -> str:
    chosen = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), MAX_POINTS)).round().astype(int))
    points = " ".join(f"{axes.x(steps[place]):.1f},{axes.y(values[place]):.1f}" for place in chosen)
    return f'<polyline class="{names}" points="{points}" />'


def _legend(index: int, name: str) -> str:
    y = TOP + 6 + 14 * index
    right = WIDTH - RIGHT - 4
    return (
        f'<text class="legend end" x="{right - 16}" y="{y + 3.5}">{escape(name)}</text>'
        f'<line class="line c{index % NUM_COLOURS}" x1="{right - 12}" x2="{right}" y1="{y}" y2="{y}" />'
    )


def _wrapped(text: str, x: float, y: float, width: int) -> str:
    """Words under a bar, in at most two lines."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + len(word) >= width and len(lines) < 2:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "".join(
        f'<text class="tick mid" x="{x:.1f}" y="{y + 12 * place:.1f}">{escape(line)}</text>'
        for place, line in enumerate(lines)
    )


def _svg(title: str, content: str, description: str) -> str:
    heading = f'<text class="title" x="4" y="16">{escape(title)}</text>'
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(f'{title}: {description}')}</title>{heading}{content}</svg>"
    )


def _short(value: float) -> str:
    """1500 as 1.5k; small numbers with as many digits as tell them apart."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"
