"""Runs that differ in their seed alone are one group; the others stand side by side with their differences."""

from pathlib import Path

import numpy as np
import pytest

from deft.evaluation.plots import metric_curve
from deft.evaluation.report.groups import Group, differences, group_runs
from deft.evaluation.report.run_data import ReportedRun


def run(name: str, seed: int, rate: float = 0.1, values=(1.0, 2.0), kind: str = "ppo") -> ReportedRun:
    settings = {"seed": seed, "output_dir": name, "algorithm.cfg.learning_rate": rate, "logging.tensorboard": seed > 1}
    lines = {"update": [{"step": step, "loss": value} for step, value in enumerate(values)]}
    return ReportedRun(Path("runs") / name, kind, settings, {}, {**lines, "episode": [], "evaluation": []})


def loss(one: ReportedRun):
    return metric_curve(one.lines["update"], "loss")


def test_seeds_are_grouped_and_settings_are_not():
    groups = group_runs([run("ppo_1", 1), run("slow_1", 1, 0.01), run("ppo_2", 2), run("sac", 1, kind="sac")])
    assert [(group.label, len(group.runs)) for group in groups] == [("ppo", 2), ("slow_1", 1), ("sac", 1)]
    assert differences(groups) == {
        "training": ["ppo", "ppo", "sac"],
        "algorithm.cfg.learning_rate": [0.1, 0.01, 0.1],
    }


@pytest.mark.parametrize(
    ("names", "label"),
    [
        (["a_seed1", "a_seed2"], "a"),
        (["run-10", "run-11"], "run"),
        (["x", "y"], "x"),
        (["ppo_3"], "ppo_3"),
        (["cartpole", "cp1"], "cartpole"),
    ],
)
def test_a_group_is_called_what_its_directories_have_in_common(names, label):
    (group,) = group_runs([run(name, seed) for seed, name in enumerate(names)])
    assert group.label == label


def test_groups_of_the_same_name_are_told_apart():
    groups = group_runs([run("a", 1), run("a", 1, 0.5)])
    assert [group.label for group in groups] == ["a (1)", "a (2)"]


def test_a_curve_of_seeds_is_their_mean_with_a_t_interval():
    group = Group("ppo", [run(str(seed), seed, values=(0.0, float(seed))) for seed in (1, 2, 3)])
    series = group.series(loss, "loss", 0)
    np.testing.assert_allclose(series.curve, [[0, 1], [0.0, 2.0]])
    # At step 1: x̄ = 2, s = 1, t₂ = 4.3027, so ± 4.3027 / √3 = 2.4841.
    assert (series.low[1], series.high[1]) == pytest.approx((2 - 2.48414, 2 + 2.48414), abs=1e-4)
    assert len(series.members) == 3


def test_two_seeds_have_their_range_and_one_without_points_is_left_out():
    runs = [run("1", 1, values=(0.0, 1.0)), run("2", 2, values=(2.0, 4.0)), run("3", 3, values=())]
    series = Group("ppo", runs).series(loss, "loss", 0)
    np.testing.assert_allclose([series.low, series.curve[1], series.high], [[0, 1], [1, 2.5], [2, 4]])
    assert Group("ppo", runs[2:]).series(loss, "loss", 0) is None
