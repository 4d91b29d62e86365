"""Charts show what they are given; a report holds what is in a run folder, and says what is missing."""

import base64
import json
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from deft.errors import InputError
from deft.evaluation.charts import HEIGHT, LEFT, RIGHT, WIDTH, bar_chart, line_chart, ticks
from deft.evaluation.report import write_report


def points(svg: str) -> list[list[tuple[float, float]]]:
    lines = re.findall(r'<polyline class="line[^"]*" points="([^"]*)"', svg)
    return [[tuple(map(float, pair.split(","))) for pair in line.split()] for line in lines]


def test_ticks_are_round_and_span_the_data():
    assert ticks(0.0, 1.0) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert ticks(3.1, 4.9) == [3.0, 3.5, 4.0, 4.5, 5.0]
    assert ticks(-2.0, 7.0)[0] <= -2.0
    assert ticks(5.0, 5.0)[0] < 5.0 < ticks(5.0, 5.0)[-1]  # one value alone has axes too


def test_a_line_chart_draws_its_points_in_place():
    svg = line_chart("Loss", {"a": (np.array([0, 5, 10]), np.array([1.0, 0.0, 0.5]))}, "steps")
    (line,) = points(svg)
    # From the left edge to the right one, the middle point half-way, and higher values higher up.
    assert [x for x, _ in line] == [LEFT, (LEFT + WIDTH - RIGHT) / 2, WIDTH - RIGHT]
    assert line[0][1] < line[2][1] < line[1][1] < HEIGHT
    assert line[2][1] == pytest.approx((line[0][1] + line[1][1]) / 2, abs=0.1)
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
    assert svg.count("polyline") == 2
    heights = [y for _, y in points(svg)[0][60:]]
    assert max(heights) - min(heights) < 20  # the mean is near 0.5 everywhere, the points go from edge to edge
    assert len(points(svg)[0]) <= 300


def test_bars_are_means_with_a_dot_for_each_seed():
    svg = bar_chart("Cells", {"random": [2.0, 4.0], "explorer": 6.0})
    heights = [float(value) for value in re.findall(r'<rect class="bar[^>]*height="([\d.]+)"', svg)]
    assert heights[1] == pytest.approx(2 * heights[0], abs=0.2)  # 6 against a mean of 3
    assert svg.count('class="seed"') == 2
    assert ">3<" in svg
    assert ">6<" in svg
    ElementTree.fromstring(svg)


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
    with pytest.raises(InputError, match="not JSON"):
        write_report(tmp_path)


def test_of_another_run_it_says_what_there_is(tmp_path):
    (tmp_path / "config.yaml").write_text("algorithm:\n  name: ppo\n")
    (tmp_path / "episode_metrics.jsonl").write_text("")
    with pytest.raises(InputError, match=r"a run of ppo; `deft report` .*`tensorboard --logdir .*`deft evaluate"):
        write_report(tmp_path)
    (tmp_path / "config.yaml").unlink()  # waypoint-ppo writes config.json
    with pytest.raises(InputError, match="a run of another kind"):
        write_report(tmp_path)
