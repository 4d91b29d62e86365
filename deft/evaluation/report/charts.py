"""Charts of `report.html`: inline SVG without a drawing library, in the colours of the page.

Title and legend are HTML, so that they wrap on a phone. `report.js` shows the values under the pointer; it reads them
from the paths and from `data-box` and `data-range`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np

from deft.evaluation.plots import Curve, running_mean, short_number

WIDTH, HEIGHT = 360, 190
TOP, RIGHT, BOTTOM = 8, 12, 34
MAX_POINTS, PALE_POINTS = 300, 120  # of a line, and of one behind it
SMOOTHED = 60  # points from which a curve is drawn as its running mean over a pale line of all points
NUM_COLORS = 6
CHARACTER = 6.2  # width of one in a label of an axis
BAR, ROW = 12, 20  # heights of a horizontal bar and of its row


@dataclass
class Series:
    """A curve of a chart. `low` and `high`: its interval, drawn as a band, or as error bars with `marks`.

    `members` are pale lines behind it, such as single seeds or the values that a running mean is of, with dots where
    the curve has `marks`.
    """

    name: str
    curve: Curve
    color: int = 0
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    members: Sequence[Curve] = ()
    marks: bool = False


@dataclass
class Bar:
    """A bar, with an interval or with the values that it is the mean of."""

    label: str
    value: float
    color: int = 0
    interval: Sequence[float] | None = None
    values: Sequence[float] = field(default_factory=tuple)


def smooth(name: str, curve: Curve, color: int = 0) -> Series:
    """Return a series of a curve: its running mean over a pale line where it has many points."""
    steps, values = _finite(curve)
    if len(values) <= SMOOTHED:
        return Series(name, (steps, values), color)
    return Series(name, (steps, running_mean(values, len(values) // 30)), color, members=[(steps, values)])


def line_chart(
    title: str, series: Sequence[Series], x_label: str = "", limits: tuple[float, float] | None = None
) -> str:
    """Return curves over common axes; empty if no value is finite. `limits` are those of the values."""
    drawn = [one for one in series if np.isfinite(np.asarray(one.curve[1], float)).any()]
    if not drawn:
        return ""
    curves = [_finite(curve) for one in drawn for curve in (one.curve, *one.members)]
    steps, values = (np.concatenate([curve[part] for curve in curves]) for part in (0, 1))
    bars = [bound for one in drawn if one.marks for bound in (one.low, one.high) if bound is not None]
    values = np.concatenate([values, *(bound[np.isfinite(bound)] for bound in bars)])
    axes = _Axes(steps, values, limits)
    # Behind: bands and pale lines; then the curves.
    behind = "".join(axes.band(one) + "".join(axes.path(curve, "pale", one) for curve in one.members) for one in drawn)
    front = "".join((axes.marks(one) if one.marks else "") + axes.path(one.curve, "line", one) for one in drawn)
    ends = "; ".join(f"{one.name}: {_finite(one.curve)[1][-1]:.4g} at the end" for one in drawn)
    legend = "".join(f'<span><i class="c{one.color % NUM_COLORS}"></i>{escape(one.name)}</span>' for one in drawn)
    return _figure(title, legend if len(drawn) > 1 else "", axes.svg(f"{title}. {ends}", behind + front, x_label))


def bar_chart(title: str, bars: Sequence[Bar], limits: tuple[float, float] | None = None) -> str:
    """Return horizontal bars with their values beside them; empty if no value is finite."""
    bars = [bar for bar in bars if math.isfinite(bar.value)]
    if not bars:
        return ""
    found = [bound for bar in bars for bound in (bar.value, *(bar.interval or ()), *bar.values) if math.isfinite(bound)]
    low, high = limits or (min(0.0, *found), max(0.0, *found))
    high = high if high > low else low + 1.0
    left = min(150.0, 8 + CHARACTER * max(len(bar.label) for bar in bars))
    right = WIDTH - 50.0

    def place(value: float) -> float:
        return left + (right - left) * (min(max(value, low), high) - low) / (high - low)

    parts = []
    for index, bar in enumerate(bars):
        middle, color = ROW * index + ROW / 2 + 2, bar.color % NUM_COLORS
        start, end = sorted((place(0.0), place(bar.value)))
        parts.append(
            f'<text x="{left - 6:.1f}" y="{middle + 4:.1f}" text-anchor="end">{escape(_shortened(bar.label))}</text>'
            f'<rect class="bar c{color}" x="{start:.2f}" y="{middle - BAR / 2:.1f}" height="{BAR}" '
            f'width="{max(end - start, 0.5):.2f}"><title>{escape(bar.label)}: {bar.value:.4g}</title></rect>'
        )
        outermost = end
        if bar.interval is not None:
            first, last = (place(bound) for bound in bar.interval)
            parts.append(f'<path class="whisker" d="M {first:.2f} {middle:.1f} L {last:.2f} {middle:.1f}"/>')
            outermost = max(outermost, last)
        for value in bar.values:
            parts.append(f'<circle class="seed" cx="{place(value):.2f}" cy="{middle:.1f}" r="2.6"/>')
            outermost = max(outermost, place(value))
        number = f"{bar.value:.3g}"
        parts.append(f'<text class="value" x="{outermost + 7:.1f}" y="{middle + 4:.1f}">{number}</text>')
    height = ROW * len(bars) + 4
    words = "; ".join(f"{bar.label} {bar.value:.4g}" for bar in bars)
    svg = f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(f"{title}: {words}")}">'
    return _figure(title, "", f"{svg}{''.join(parts)}</svg>")


class _Axes:
    """The scales of a chart: from values to places in the image, y downwards."""

    def __init__(self, steps: np.ndarray, values: np.ndarray, limits: tuple[float, float] | None) -> None:
        self.x = _padded(steps.min(), steps.max(), 0.0)
        self.y = limits or _padded(values.min(), values.max(), 0.05)
        self.x_ticks = [(tick, short_number(tick)) for tick in ticks(*self.x, 5)]
        self.y_ticks = [(tick, short_number(tick)) for tick in ticks(*self.y, 4)]
        self.left = 10 + CHARACTER * max((len(label) for _, label in self.y_ticks), default=1)
        self.right, self.bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def place(self, steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the places of points; far outside they are cut off, as browsers do not draw to 10⁹."""
        x = self.left + (self.right - self.left) * (steps - self.x[0]) / (self.x[1] - self.x[0])
        y = self.bottom - (self.bottom - TOP) * (values - self.y[0]) / (self.y[1] - self.y[0])
        return x, np.clip(y, -HEIGHT, 2 * HEIGHT)

    def path(self, curve: Curve, kind: str, series: Series) -> str:
        """Return a line of class `kind`; a single point is a dot."""
        steps, values = _thinned(*_finite(curve), MAX_POINTS if kind == "line" else PALE_POINTS)
        x, y = self.place(steps, values)
        color, name = series.color % NUM_COLORS, escape(series.name)
        if len(x) == 1 and not series.marks:
            dot = f'<circle class="dot c{color}" cx="{x[0]:.2f}" cy="{y[0]:.2f}" r="3"/>' if kind == "line" else ""
            return dot + f'<path class="{kind} c{color}" data-name="{name}" d="{_d(x, y)}"/>'
        return f'<path class="{kind} c{color}" data-name="{name}" d="{_d(x, y)}"/>'

    def band(self, series: Series) -> str:
        """Return the area between `low` and `high` of a series without marks."""
        if series.marks or series.low is None or series.high is None:
            return ""
        steps = np.asarray(series.curve[0], float)
        there = np.isfinite(series.low) & np.isfinite(series.high)
        if there.sum() < 2:
            return ""
        (x, high), (_, low) = (self.place(*_thinned(steps[there], bound[there])) for bound in (series.high, series.low))
        outline = _d(np.concatenate([x, x[::-1]]), np.concatenate([high, low[::-1]]))
        return f'<path class="band c{series.color % NUM_COLORS}" d="{outline} Z"/>'

    def marks(self, series: Series) -> str:
        """Return dots, with error bars where there are intervals, and smaller dots of the members."""
        steps, values = (np.asarray(part, float) for part in series.curve)
        parts, color = [], series.color % NUM_COLORS
        for x, y in [point for curve in series.members for point in zip(*self.place(*_finite(curve)), strict=True)]:
            parts.append(f'<circle class="point c{color}" cx="{x:.2f}" cy="{y:.2f}" r="2"/>')
        for index in range(len(steps)):
            if not math.isfinite(values[index]):
                continue
            x, y = (float(place[0]) for place in self.place(steps[[index]], values[[index]]))
            if series.low is not None and series.high is not None and math.isfinite(series.low[index]):
                bounds = np.array([series.low[index], series.high[index]])
                _, (low, high) = self.place(steps[[index, index]], bounds)
                parts.append(f'<path class="error c{color}" d="M {x:.2f} {low:.2f} L {x:.2f} {high:.2f}"/>')
            parts.append(f'<circle class="dot c{color}" cx="{x:.2f}" cy="{y:.2f}" r="3"/>')
        return "".join(parts)

    def svg(self, description: str, content: str, x_label: str) -> str:
        """Return the image: grid, labels of the axes, and the content, cut to the area between the axes."""
        grid = []
        for tick, label in self.y_ticks:
            y = float(self.place(np.array([0.0]), np.array([tick]))[1][0])
            grid.append(f'<path class="grid" d="M {self.left:.1f} {y:.1f} L {self.right} {y:.1f}"/>')
            grid.append(f'<text x="{self.left - 5:.1f}" y="{y + 3.5:.1f}" text-anchor="end">{label}</text>')
        for tick, label in self.x_ticks:
            x = float(self.place(np.array([tick]), np.array([0.0]))[0][0])
            grid.append(f'<text x="{x:.1f}" y="{self.bottom + 14}" text-anchor="middle">{label}</text>')
        middle = (self.left + self.right) / 2
        grid.append(f'<text x="{middle:.1f}" y="{HEIGHT - 5}" text-anchor="middle">{escape(x_label)}</text>')
        box = f"{self.left:.2f} {TOP} {self.right} {self.bottom}"
        span = " ".join(f"{bound:.9g}" for bound in (*self.x, *self.y))
        width, height = self.right - self.left + 8, self.bottom - TOP + 8  # a dot at the edge is drawn whole
        area = f'x="{self.left - 4:.2f}" y="{TOP - 4}" width="{width:.2f}" height="{height}"'
        inner = f'viewBox="{self.left - 4:.2f} {TOP - 4} {width:.2f} {height}"'
        return (
            f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(description)}" '
            f'data-box="{box}" data-range="{span}">{"".join(grid)}<svg {area} {inner}>{content}</svg></svg>'
        )


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round values between two, in steps of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _padded(low: float, high: float, share: float) -> tuple[float, float]:
    """Return a range with some space at both ends; of a single value a range around it."""
    low, high = float(low), float(high)
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-30):
        half = abs(low) * 0.1 or 1.0
        return low - half, high + half
    return low - share * (high - low), high + share * (high - low)


def _finite(curve: Curve) -> Curve:
    steps, values = (np.asarray(part, float) for part in curve)
    there = np.isfinite(values)
    return steps[there], values[there]


def _thinned(steps: np.ndarray, values: np.ndarray, count: int = MAX_POINTS) -> Curve:
    """Return an even selection of the points, with the first and the last."""
    chosen = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), count)).round().astype(int))
    return steps[chosen], values[chosen]


def _d(x: np.ndarray, y: np.ndarray) -> str:
    """Return the points as SVG has them."""
    return "M " + " L ".join(f"{one:.2f} {other:.2f}" for one, other in zip(x, y, strict=True))


def _shortened(text: str) -> str:
    return text if len(text) <= 23 else f"{text[:22]}…"


def _figure(title: str, legend: str, svg: str) -> str:
    shown = f"<div class=legend>{legend}</div>" if legend else ""
    return f"<figure class=plot><figcaption>{escape(title)}</figcaption>{shown}{svg}</figure>"
