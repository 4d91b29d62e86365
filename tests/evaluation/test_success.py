"""Intervals of success rates, tables by task and instruction, and differences on the same episodes."""

import pytest

from deft.envs.vector import Episode
from deft.evaluation.success import (
    difference,
    measured,
    paired_difference,
    reward_interval,
    success_lines,
    success_tables,
    t_interval,
    t_quantile,
    wilson_interval,
)


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
    tables = success_tables([played])
    assert {name: (row["episodes"], row["success_rate"]) for name, row in tables["tasks"].items()} == {
        "pick": (2, 0.5),
        "push": (1, 1.0),
    }
    assert list(tables["instructions"]) == ["pick up the red cube", "push it"]
    assert tables["success_interval"] == [round(bound, 4) for bound in wilson_interval(2, 3)]
    assert success_tables([[episode(None)]]) == {}


def test_the_lines_for_a_person_have_a_row_a_task() -> None:
    played = [episode(True), episode(True, "push")]
    lines = success_lines({"episodes": 2, "success_rate": 1.0, **success_tables([played])}).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["together", "pick", "push"]
    assert lines[1].split()[1:3] == ["2", "100.0%"]


def test_differences_of_single_runs_are_paired_by_episode() -> None:
    # Won 2 of 4, lost none; with the four halves n = 6: 2/6 ± 1.96 √(3 − 4/6) / 6 = 0.3333 ± 0.4990
    found = difference([[False, True, False, False]], [[True, True, False, True]])
    assert (found["difference"], found["difference_over"]) == (0.5, "episodes")
    assert found["difference_interval"] == pytest.approx([-0.1657, 0.8323], abs=1e-3)
    # 100 episodes with the same rates: agreement is more informative, ± 1.96 √(changed + 1) / 102.
    assert paired_difference([True, False] * 50, [True, False] * 50) == pytest.approx((-0.0192, 0.0192), abs=1e-4)
    assert paired_difference([True, False] * 50, [False, True] * 50) == pytest.approx((-0.1931, 0.1931), abs=1e-4)
    # Returns: differences 1 and 3, mean 2, s = √2; t = 12.706 for one degree of freedom: ± 12.706 · √2 / √2
    assert difference([[1.0, 2.0]], [[2.0, 5.0]])["difference_interval"] == pytest.approx([-10.706, 14.706], abs=1e-3)


@pytest.mark.parametrize(
    ("freedom", "t"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (99, 1.9842)]
)
def test_quantiles_of_students_t(freedom: int, t: float) -> None:
    assert t_quantile(freedom) == pytest.approx(t, abs=1e-4)  # the tables' values of t(0.975)


def rates(*wanted: float) -> list[list[bool]]:
    """The episodes of runs with these success rates, 200 each."""
    return [[index < round(200 * rate) for index in range(200)] for rate in wanted]


def test_intervals_are_over_seeds_where_there_are_several() -> None:
    # Mean 0.42333; deviations 0.05667, −0.11833, 0.06167: s = √(0.021017 / 2) = 0.10251; t(2) = 4.3027;
    # half = 4.3027 · 0.10251 / √3 = 0.25465. Pooled as 600 independent episodes it would be 0.384 to 0.463.
    found = measured(rates(0.48, 0.305, 0.485))
    assert found["success_rate"] == pytest.approx(0.42333, abs=1e-5)
    assert found["success_interval"] == pytest.approx([0.1687, 0.6780], abs=2e-4)
    assert (found["interval_over"], found["success_rates"]) == ("seeds", [0.48, 0.305, 0.485])
    one = measured(rates(0.48))
    assert one["interval_over"] == "episodes"
    assert one["success_interval"] == pytest.approx(wilson_interval(96, 200), abs=1e-4)


def test_seeds_that_agree_leave_the_uncertainty_of_their_episodes() -> None:
    # The t interval is 1 to 1; 600 of 600 is 600 / (600 + 1.96²) = 0.9936 to 1.
    assert measured(rates(1.0, 1.0, 1.0))["success_interval"] == [0.9936, 1.0]
    # Two seeds far apart, t(1) = 12.706: wider than what a rate can be.
    assert measured(rates(0.2, 0.8))["success_interval"] == [0.0, 1.0]


def test_tables_by_task_are_over_seeds_too() -> None:
    won = [(True, True, False, False), (True, False, True, False), (False, True, True, True)]
    runs = [[episode(success, task) for task, success in zip("aabb", run, strict=True)] for run in won]
    tables = success_tables(runs)
    assert tables["tasks"]["a"]["success_rates"] == [1.0, 0.5, 0.5]
    assert tables["tasks"]["b"]["success_rates"] == [0.0, 0.5, 1.0]
    assert tables["success_rates"] == [0.5, 0.5, 0.75]
    assert tables["tasks"]["a"]["interval_over"] == tables["interval_over"] == "seeds"


def test_differences_are_over_seeds_where_there_are_several() -> None:
    # Pairs of runs: 0.465, 0.625, 0.425; mean 0.505, s = √((0.0016 + 0.0144 + 0.0064) / 2) = 0.10583;
    # half = 4.3027 · 0.10583 / √3 = 0.26290
    sft, ppo = rates(0.48, 0.305, 0.485), rates(0.945, 0.93, 0.91)
    found = difference(sft, ppo)
    assert found["difference"] == pytest.approx(0.505)
    assert found["differences"] == pytest.approx([0.465, 0.625, 0.425])
    assert found["difference_interval"] == pytest.approx([0.2421, 0.7679], abs=2e-4)
    assert found["difference_over"] == "seeds"
    # One policy that has no seeds against three: the three differences to it.
    against_one = difference(rates(0.5), ppo, trained=(False, True))
    assert against_one["differences"] == pytest.approx([0.445, 0.43, 0.41])
    assert against_one["difference_over"] == "seeds"


def test_a_difference_to_a_single_trained_run_is_over_the_seeds_of_the_other_side() -> None:
    one, three = rates(0.5), rates(0.945, 0.93, 0.91)
    assert difference(one, three)["difference_over"] == "seeds of the other side only"
    assert difference(three, one)["difference_over"] == "seeds of the other side only"
    assert difference(three, one, trained=(True, False))["difference_over"] == "seeds"
    assert difference(one, one)["difference_over"] == "episodes"
    assert difference(three, rates(0.5, 0.6))["difference_over"] == "seeds"


def test_independent_runs_of_other_numbers_are_compared_by_welch() -> None:
    # Means 2 and 9, variances 1 and 2, n 3 and 2: Δ = 7, error √(1/3 + 1) = 1.1547;
    # freedom (4/3)² / ((1/3)²/2 + 1²/1) = 1.684, rounded down 1: t = 12.706, half = 14.672
    found = difference([[1.0], [2.0], [3.0]], [[8.0], [10.0]])
    assert found["difference"] == 7.0
    assert found["difference_interval"] == pytest.approx([7 - 14.672, 7 + 14.672], abs=1e-3)


def test_intervals_of_returns() -> None:
    def run(*returns: float) -> list[Episode]:
        return [Episode(0, value, 1, None, {}) for value in returns]

    # One seed, episodes 1, 2, 3: 2 ± 4.3027 · 1 / √3 = 2 ± 2.4842
    one = reward_interval([run(1.0, 2.0, 3.0)])
    assert one["mean_reward_interval"] == pytest.approx([-0.4842, 4.4842], abs=1e-4)
    assert one["interval_over"] == "episodes"
    # Three seeds with means 1, 5, 9: 5 ± 4.3027 · 4 / √3 = 5 ± 9.9367
    three = reward_interval([run(0.5, 1.5), run(5.0, 5.0), run(8.5, 9.5)])
    assert three["mean_reward_interval"] == pytest.approx([-4.9367, 14.9367], abs=1e-3)
    assert (three["interval_over"], three["mean_rewards"]) == ("seeds", [1.0, 5.0, 9.0])
    assert reward_interval([run(1.0)]) == {}
    assert t_interval([2.0, 2.0]) == (2.0, 2.0)
