"""The plots are drawn from what `episode_metrics.jsonl` holds, and the numbers in them are right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib.figure
import numpy as np
import pytest
from matplotlib.figure import Figure

from deft.errors import InputError, RunError
from deft.evaluation.plots import plot_bars, plot_comparison, plot_run, read_curve, running_mean


def write_lines(run_dir: Path, lines: list[dict[str, Any]], tail: str = "") -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run_dir / "episode_metrics.jsonl").write_text(text + tail)


def episode(step: int, episode_return: float | None, success: bool | None = None) -> dict[str, Any]:
    return {"type": "episode", "step": step, "episode_return": episode_return, "length": 1, "success": success}


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were saved."""
    saved: list[Figure] = []
    savefig = matplotlib.figure.Figure.savefig

    def keep(figure: Figure, *arguments: Any, **options: Any) -> None:
        saved.append(figure)
        savefig(figure, *arguments, **options)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", keep)
    return saved


def test_a_run_gives_its_learning_curve_and_its_updates(tmp_path: Path, figures: list[Figure]) -> None:
    lines = [episode(step, float(step), success=step > 5) for step in range(1, 11)]
    lines += [
        {"type": "update", "step": 5, "train/policy_loss": 0.5, "train/approx_kl": 0.01, "train/q_loss": None},
        {"type": "update", "step": 10, "train/policy_loss": None, "train/approx_kl": 0.02, "train/critic_loss": 3.0},
        {"type": "evaluation", "step": 10, "mean_reward": 9.0, "std_reward": 1.0, "success_rate": 1.0},
    ]
    write_lines(tmp_path, lines, tail='{"type": "epis')  # a run that is being written
    paths = plot_run(tmp_path)
    assert [path.name for path in paths] == ["learning_curve.png", "updates.png"]
    assert all(path.parent == tmp_path / "plots" and path.read_bytes().startswith(b"\x89PNG") for path in paths)

    returns, success = figures[0].axes
    dots, mean, evaluation = returns.lines[0], returns.lines[1], returns.lines[2]
    np.testing.assert_array_equal(dots.get_xydata(), [[step, step] for step in range(1, 11)])
    # Ten episodes: the mean of the last 10, from the third on; (1 + 2 + 3) / 3 there, (1 + … + 10) / 10 at the end.
    np.testing.assert_allclose(mean.get_xydata()[[0, -1]], [[3, 2.0], [10, 5.5]])
    np.testing.assert_array_equal(evaluation.get_xydata(), [[10, 9]])
    np.testing.assert_allclose(success.lines[0].get_ydata()[-1], 0.5)  # 6 … 10 of ten

    # What has no number at all (q_loss) has no panel; a null leaves its point out.
    panels = {axes.get_title("left"): axes.lines[0].get_xydata().tolist() for axes in figures[1].axes}
    assert panels == {
        "Policy loss": [[5, 0.5]],
        "Approximate KL": [[5, 0.01], [10, 0.02]],
        "Critic loss": [[10, 3.0]],
    }


def test_a_run_without_episodes_gives_what_it_has(tmp_path: Path) -> None:
    write_lines(tmp_path, [{"type": "update", "step": 5, "loss": 0.5}])
    assert [path.name for path in plot_run(tmp_path)] == ["updates.png"]
    write_lines(tmp_path, [])
    assert plot_run(tmp_path) == []


def test_long_runs_are_drawn_by_a_selection_of_their_episodes(tmp_path: Path, figures: list[Figure]) -> None:
    write_lines(tmp_path, [episode(step, 1.0) for step in range(12_000)])
    plot_run(tmp_path)
    dots = figures[0].axes[0].lines[0].get_xdata()
    assert (len(dots), dots[0], dots[-1]) == (5_000, 0, 11_999)


def test_running_mean() -> None:
    # Windows of 2: 1, (1+3)/2, (3+8)/2, (8+0)/2.
    np.testing.assert_allclose(running_mean(np.array([1.0, 3.0, 8.0, 0.0]), 2), [1.0, 2.0, 5.5, 4.0])
    assert len(running_mean(np.array([]), 2)) == 0


def test_comparison_draws_mean_and_deviation_over_the_common_steps(tmp_path: Path, figures: list[Figure]) -> None:
    seeds = [
        (np.array([0.0, 10.0, 20.0]), np.array([0.0, 10.0, 20.0])),
        (np.array([5.0, 25.0]), np.array([9.0, 29.0])),
    ]
    path = plot_comparison({"two": seeds, "one": seeds[:1]}, tmp_path / "plots" / "both.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    (axes,) = figures[0].axes
    steps, mean = axes.lines[0].get_data()
    assert (steps[0], steps[-1]) == (5.0, 20.0)
    # At step s the seeds have s and s + 4: mean s + 2, standard deviation 2.
    np.testing.assert_allclose(mean, steps + 2)
    (band,) = axes.collections  # one seed has no deviation
    edge = band.get_paths()[0].vertices
    np.testing.assert_allclose([edge[:, 1].min(), edge[:, 1].max()], [5.0, 24.0])  # 7 − 2 and 22 + 2
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["two (2 seeds)", "one"]


def test_bars_stand_side_by_side_with_their_errors(tmp_path: Path, figures: list[Figure]) -> None:
    values, errors = {"plain": [1.0, 2.0], "noise": [-1.0, 0.5]}, {"plain": [0.1, 0.2], "noise": [0.3, 0.4]}
    path = plot_bars(["seed 0", "seed 1"], values, errors, tmp_path / "bars.png", "Noise", "Reward")
    assert path.read_bytes().startswith(b"\x89PNG")
    (axes,) = figures[0].axes
    bars = [(bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in axes.patches]
    # Two bars of width 0.4 to each label: 0.2 to its left and to its right.
    np.testing.assert_allclose(bars, [(-0.2, 1.0), (0.8, 2.0), (0.2, -1.0), (1.2, 0.5)])
    ends = axes.collections[0].get_segments()[0][:, 1]
    np.testing.assert_allclose(ends, [0.9, 1.1])  # 1 ± 0.1
    assert [label.get_text() for label in axes.get_xticklabels()] == ["seed 0", "seed 1"]


def test_comparison_refuses_runs_that_cannot_be_compared(tmp_path: Path) -> None:
    point = (np.array([1.0]), np.array([1.0]))
    with pytest.raises(InputError, match="'ppo' has a run without points"):
        plot_comparison({"ppo": [point, (np.array([]), np.array([]))]}, tmp_path / "x.png")
    with pytest.raises(InputError, match="'ppo' have no steps in common"):
        plot_comparison({"ppo": [point, (np.array([2.0]), np.array([1.0]))]}, tmp_path / "x.png")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write the plot"):
        plot_comparison({"ppo": [point]}, tmp_path / "file" / "x.png")


def test_read_curve_is_the_running_mean_of_the_returns(tmp_path: Path) -> None:
    write_lines(tmp_path, [episode(3, 1.0), episode(4, None), episode(7, 2.0), episode(7, 6.0)])
    steps, values = read_curve(tmp_path)
    assert (steps.tolist(), values.tolist()) == ([3, 7], [1.0, 3.0])  # one point a step, its last
    write_lines(tmp_path, [])
    assert [part.tolist() for part in read_curve(tmp_path)] == [[], []]


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no episode_metrics\.jsonl"):
        plot_run(tmp_path)
    (tmp_path / "episode_metrics.jsonl").write_text("not json\n")
    with pytest.raises(InputError, match=r"line 1 is not a line of metrics: 'not json"):
        plot_run(tmp_path)


def test_importing_plots_and_video_is_light() -> None:
    heavy = "[name for name in ('torch', 'matplotlib', 'imageio_ffmpeg') if name in sys.modules]"
    code = f"import sys, deft.evaluation.plots, deft.evaluation.video; print({heavy})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
