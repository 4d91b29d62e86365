"""Charts show what they are given; a report holds what is in a run folder, and says what is missing."""

import base64
import json
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from deft.errors import InputError
from deft.evaluation.plots import bar_chart, line_chart
from deft.evaluation.report import write_report


def points(svg: str, kind: str = "line") -> list[list[tuple[float, float]]]:
    """The points of every curve or bar of a kind, in the coordinates of the chart: y grows downwards."""
    groups = re.findall(rf'<g class="{kind}-\d+"><path d="([^"]*)"', svg)
    return [[tuple(map(float, pair)) for pair in re.findall(r"[ML] (\S+) (\S+)", group)] for group in groups]


def test_a_line_chart_draws_its_points_in_place():
    svg = line_chart("Loss", {"a": (np.array([0, 5, 10]), np.array([1.0, 0.0, 0.5]))}, "steps")
    (line,) = points(svg)
    # The middle point half-way between the edges, and higher values higher up.
    assert line[1][0] == pytest.approx((line[0][0] + line[2][0]) / 2, abs=0.1)
    assert line[0][1] < line[2][1] < line[1][1]
    assert line[2][1] == pytest.approx((line[0][1] + line[1][1]) / 2, abs=0.1)
    assert ">steps</text>" in svg
    ElementTree.fromstring(svg)  # well-formed


def test_several_curves_have_a_legend_and_values_that_are_not_finite_are_left_out():
    svg = line_chart("A < B", {"x": ([1, 2], [1.0, 2.0]), "y & z": ([1, 2, 3], [1.0, np.nan, 3.0])})
    assert "y &amp; z</text>" in svg
    assert [len(line) for line in points(svg)] == [2, 2]
    ElementTree.fromstring(svg)
    assert line_chart("nothing", {"x": ([1], [np.nan])}) == ""


def test_long_curves_are_drawn_as_their_running_mean_over_all_points():
    values = np.tile([0.0, 1.0], 300)
    svg = line_chart("Noise", {"x": (np.arange(600), values)})
    (raw,), (mean,) = points(svg, "raw"), points(svg)
    whole = max(y for _, y in raw) - min(y for _, y in raw)
    middle = (mean[0][0] + mean[-1][0]) / 2
    heights = [y for x, y in mean if x > middle]
    assert max(heights) - min(heights) < whole / 5  # the mean is near 0.5 everywhere
    assert len(mean) <= 300


def test_bars_are_means_with_a_dot_for_each_seed():
    svg = bar_chart("Cells", {"random": [2.0, 4.0], "explorer": 6.0})
    heights = [max(y for _, y in bar) - min(y for _, y in bar) for bar in points(svg, "bar")]
    assert heights[1] == pytest.approx(2 * heights[0], abs=0.2)  # 6 against a mean of 3
    seeds = re.findall(r'<g class="seeds-0">(.*?)</g></g>', svg, re.DOTALL)
    assert len(seeds) == 1
    assert seeds[0].count("<use") == 2
    assert ">3</text>" in svg
    assert ">6</text>" in svg
    ElementTree.fromstring(svg)


def test_charts_take_their_colours_from_the_page():
    """So that they are readable in dark mode too: no colour of theirs is fixed."""
    svg = line_chart("Loss", {"a": ([0, 1], [1.0, 0.0]), "b": ([0, 1], [0.0, 1.0])}, "steps")
    svg += bar_chart("Cells", {"random": [2.0, 4.0], "explorer": 6.0})
    assert {"var(--c0)", "var(--c1)", "var(--ink)", "var(--soft)", "var(--line)"} <= set(
        re.findall(r"var\(--\w+\)", svg)
    )
    assert not re.findall(r"#[0-9a-f]{6}", svg)
    assert not re.findall(r' id="(?![pm][0-9a-f]{10}")', svg)


def test_more_curves_and_bars_than_colours_repeat_them():
    assert len(points(line_chart("Many", {str(index): ([0, 1], [0.0, index]) for index in range(9)}))) == 9
    assert len(points(bar_chart("Many", {str(index): 1.0 + index for index in range(9)}), "bar")) == 9


def test_a_report_of_a_run_that_has_only_begun(tmp_path):
    (tmp_path / "config.yaml").write_text("phase: teacher\n")
    text = write_report(tmp_path).read_text()
    assert "Phase 1 · Teacher" in text
    assert "<svg" not in text
    lines = [
        {"type": "update", "step": step, "time": float(step), "train/wm_loss": 5.0 - step, "train/odd": 1.0}
        for step in range(3)
    ]
    (tmp_path / "episode_metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ablations = {"images_masked": {"wm_acc": 0.1}}
    (tmp_path / "evaluation.json").write_text(json.dumps({"wm_acc": 0.4, "copy_acc": 0.2, "ablations": ablations}))
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "episode_2.png").write_bytes(picture := b"\x89PNG picture")
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / "episode_2.mp4").write_bytes(b"video")
    text = write_report(tmp_path).read_text()
    assert "World model: cross-entropy" in text
    assert "All other metrics (1)" in text  # train/odd
    assert "images masked" in text
    assert "40 %" in text
    assert f'src="data:image/png;base64,{base64.b64encode(picture).decode()}"' in text
    assert 'src="data:video/mp4;base64,dmlkZW8="' in text


def test_names_of_files_are_text_in_the_page(tmp_path):
    (tmp_path / "config.yaml").write_text("phase: teacher\n")
    for name in ('samples/x" onload="alert(1).png', "videos/<img src=x onerror=alert(1)>.mp4"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"content")
    text = write_report(tmp_path).read_text()
    assert "&lt;img src=x onerror=alert(1)&gt;.mp4" in text
    assert "x&quot; onload=&quot;alert(1).png" in text
    assert "<img src=x" not in text


def test_what_is_wrong_is_said(tmp_path):
    with pytest.raises(
        InputError, match="no run in it to report on; `deft report` writes a page about runs of teacher"
    ):
        write_report(tmp_path)
    (tmp_path / "config.yaml").write_text("phase: student\n")
    (tmp_path / "evaluation.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read as JSON"):
        write_report(tmp_path)


def test_of_another_run_it_says_what_there_is(tmp_path):
    (tmp_path / "config.yaml").write_text("algorithm:\n  name: ppo\n")
    (tmp_path / "episode_metrics.jsonl").write_text("")
    with pytest.raises(InputError, match=r"a run of ppo; `deft report` .*`tensorboard --logdir .*`deft evaluate"):
        write_report(tmp_path)
    (tmp_path / "config.yaml").unlink()  # waypoint-ppo writes config.json
    with pytest.raises(InputError, match="a run of another kind"):
        write_report(tmp_path)
