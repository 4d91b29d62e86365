"""Intervals of success rates, tables by task and instruction, and differences on the same episodes."""

import pytest

from deft.envs.vector import Episode
from deft.evaluation.success import paired_difference, success_lines, success_tables, wilson_interval


def episode(success: bool | None, task: str = "pick", words: str = "pick up the red cube") -> Episode:
    return Episode(0, 0.0, 1, success, {}, labels={"task": task, "instruction": words})


def test_wilson_interval_against_the_formula() -> None:
    # 8 of 10, z² = 3.8415: centre 0.8 + 0.19207 = 0.99207; half 1.96 √(0.016 + 0.0096036) = 0.31362; over 1.38415
    assert wilson_interval(8, 10) == pytest.approx((0.49016, 0.94332), abs=1e-4)
    # none of n: the upper bound is z² / (n + z²)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 3.8415 / 23.8415), abs=1e-4)
    assert wilson_interval(20, 20) == pytest.approx((20 / 23.8415, 1.0), abs=1e-4)
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_tables_count_by_task_and_by_instruction() -> None:
    played = [episode(True), episode(False), episode(True, "push", "push it"), episode(None, "explore", "look")]
    tables = success_tables(played)
    assert {name: (row["episodes"], row["success_rate"]) for name, row in tables["tasks"].items()} == {
        "pick": (2, 0.5),
        "push": (1, 1.0),
    }
    assert list(tables["instructions"]) == ["pick up the red cube", "push it"]
    assert tables["success_interval"] == [round(bound, 4) for bound in wilson_interval(2, 3)]
    assert success_tables([episode(None)]) == {}


def test_the_lines_for_a_person_have_a_row_a_task() -> None:
    played = [episode(True), episode(True, "push")]
    lines = success_lines({"episodes": 2, "success_rate": 1.0, **success_tables(played)}).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["together", "pick", "push"]
    assert lines[1].split()[1:3] == ["2", "100.0%"]


def test_differences_are_paired() -> None:
    # Won 2 of 4, lost none; with the four halves n = 6: 2/6 ± 1.96 √(3 − 4/6) / 6 = 0.3333 ± 0.4990
    found = paired_difference([False, True, False, False], [True, True, False, True])
    assert found["difference"] == 0.5
    assert found["difference_interval"] == pytest.approx([-0.1657, 0.8323], abs=1e-3)
    # 100 episodes with the same rates: agreement tells more, ± 1.96 √(changed + 1) / 102.
    same = paired_difference([True, False] * 50, [True, False] * 50)
    other = paired_difference([True, False] * 50, [False, True] * 50)
    assert (same["difference"], same["difference_interval"]) == (0.0, [-0.0192, 0.0192])
    assert (other["difference"], other["difference_interval"]) == (0.0, [-0.1931, 0.1931])
