"""Charts draw what they are given in place, in the colours of the page, and nothing that is not finite."""

import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from deft.evaluation.report.charts import Bar, Series, bar_chart, line_chart, smooth, ticks


def points(svg: str, kind: str = "line") -> list[list[tuple[float, float]]]:
    """The points of every path of a kind, in the coordinates of the chart: y grows downwards."""
    groups = re.findall(rf'<path class="{kind} c\d"[^>]* d="M ([^"]*)"', svg)
    return [[tuple(map(float, pair.split()[:2])) for pair in group.split(" L ")] for group in groups]


def parsed(chart: str) -> ElementTree.Element:
    """The chart as XML: it is well-formed."""
    return ElementTree.fromstring(re.sub(r"class=(\w+)", r'class="\1"', chart))


def test_a_line_chart_draws_its_points_in_place():
    chart = line_chart("Loss", [Series("a", (np.array([0, 5, 10]), np.array([1.0, 0.0, 0.5])))], "steps")
    (line,) = points(chart)
    # The middle point is half-way between the edges, and higher values are higher up.
    assert line[1][0] == pytest.approx((line[0][0] + line[2][0]) / 2, abs=0.02)
    assert line[0][1] < line[2][1] < line[1][1]
    assert line[2][1] == pytest.approx((line[0][1] + line[1][1]) / 2, abs=0.02)
    assert ">steps</text>" in chart
    assert "a: 0.5 at the end" in parsed(chart).find("svg").get("aria-label")


def test_the_scales_of_a_chart_give_its_values_back():
    """`report.js` computes values from places by `data-box` and `data-range`."""
    values = np.array([3.0, -1.0, 7.5])
    chart = line_chart("x", [Series("a", (np.array([10, 20, 40]), values))])
    left, top, right, bottom = map(float, re.search(r'data-box="([^"]*)"', chart)[1].split())
    x0, x1, y0, y1 = map(float, re.search(r'data-range="([^"]*)"', chart)[1].split())
    (line,) = points(chart)
    assert [x0 + (x - left) / (right - left) * (x1 - x0) for x, _ in line] == pytest.approx([10, 20, 40], abs=0.01)
    assert [y0 + (bottom - y) / (bottom - top) * (y1 - y0) for _, y in line] == pytest.approx(values, abs=0.01)


def test_several_curves_have_a_legend_and_values_that_are_not_finite_are_left_out():
    chart = line_chart(
        "A < B",
        [Series("x", ([1, 2], [1.0, 2.0])), Series("y & z", ([1, 2, 3], [1.0, np.nan, np.inf]), 1)],
    )
    assert "A &lt; B" in chart
    assert "y &amp; z</span>" in chart
    assert [len(line) for line in points(chart)] == [2, 1]
    parsed(chart)
    assert line_chart("nothing", [Series("x", ([1], [np.nan])), Series("empty", ([], []))]) == ""


def test_long_curves_are_drawn_as_their_running_mean_over_a_pale_line():
    series = smooth("x", (np.arange(600), np.tile([0.0, 1.0], 300)))
    chart = line_chart("Noise", [series])
    (pale,), (mean,) = points(chart, "pale"), points(chart)
    whole = max(y for _, y in pale) - min(y for _, y in pale)
    heights = [y for _, y in mean[len(mean) // 2 :]]
    assert max(heights) - min(heights) < whole / 5  # the mean is near 0.5 everywhere
    assert len(mean) <= 300


def test_an_interval_is_a_band_and_with_marks_error_bars():
    curve = (np.array([0, 1]), np.array([1.0, 2.0]))
    low, high = np.array([0.0, 1.0]), np.array([2.0, 3.0])
    assert "band" in line_chart("x", [Series("a", curve, 0, low, high)])
    marked = line_chart("x", [Series("a", curve, 0, low, high, marks=True)])
    assert "band" not in marked
    assert marked.count("<circle") == 2
    (first, second) = points(marked, "error")
    assert first[0][1] - first[1][1] == pytest.approx(second[0][1] - second[1][1])  # both intervals are 2 wide
    unknown = Series("a", curve, 0, np.full(2, np.nan), np.full(2, np.nan), marks=True)
    assert not points(line_chart("x", [unknown]), "error")


def test_bars_have_their_lengths_their_seeds_and_their_intervals():
    bars = [Bar("random", 3.0, values=[2.0, 4.0]), Bar("explorer", 6.0, 1, interval=(5.0, 7.0)), Bar("x", np.nan)]
    chart = bar_chart("Cells", bars)
    widths = [float(width) for width in re.findall(r'<rect class="bar[^>]*width="([^"]*)"', chart)]
    assert widths[1] == pytest.approx(2 * widths[0], abs=0.02)  # 6 against 3
    assert len(widths) == 2
    assert chart.count('class="seed"') == 2
    assert chart.count('class="whisker"') == 1
    assert ">3</text>" in chart
    parsed(chart)
    assert bar_chart("nothing", [Bar("x", np.nan)]) == ""


def test_charts_have_no_colours_of_their_own():
    """So that they are readable in dark mode too: the style sheet colours them."""
    chart = line_chart("Loss", [Series(str(index), ([0, 1], [0.0, index]), index) for index in range(9)])
    chart += bar_chart("Cells", [Bar(str(index), 1.0 + index, index) for index in range(9)])
    assert len(points(chart)) == 9
    assert not re.findall(r"#[0-9a-f]{3,6}\b|fill=|stroke=|style=", chart)
    assert set(re.findall(r'class="line (c\d)"', chart)) == {f"c{index}" for index in range(6)}


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (-0.3, 9.7, [0, 2, 4, 6, 8]),
        (1e-5, 5e-5, [1e-5, 2e-5, 3e-5, 4e-5, 5e-5]),
    ],
)
def test_ticks_are_round_numbers_inside_the_range(low, high, wanted):
    assert ticks(low, high, 5) == pytest.approx(wanted)


@pytest.mark.parametrize("value", [0.0, 5.0, -1e30, 1e-300])
def test_a_constant_and_an_extreme_curve_can_be_drawn(value):
    assert len(points(line_chart("x", [Series("a", ([0, 1], [value, value]))]))[0]) == 2
