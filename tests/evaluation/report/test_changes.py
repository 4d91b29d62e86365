"""Before and after: what is compared, the intervals, and the verdict."""

import pytest

from deft.evaluation.report.changes import Change, Measure, changes, common_end
from deft.evaluation.report.run_data import ReportedRun
from deft.evaluation.success import wilson_interval


def run(tmp_path, episodes=(), evaluations=(), updates=()):
    lines = {"episode": list(episodes), "evaluation": list(evaluations), "update": list(updates)}
    return ReportedRun(tmp_path, "ppo", {}, {}, lines)


def episode(step, value, success=None):
    return {"type": "episode", "step": step, "episode_return": value, "success": success}


def evaluation(step, mean, deviation=1.0, episodes=10, **more):
    return {"step": step, "mean_reward": mean, "std_reward": deviation, "episodes": episodes, **more}


def test_an_untrained_policy_that_was_evaluated_is_what_the_trained_one_is_compared_with(tmp_path):
    lines = [evaluation(0, 1.0, success_rate=0.2), evaluation(50, 3.0), evaluation(100, 9.0, success_rate=0.9)]
    success, returns = changes([run(tmp_path, evaluations=lines)])
    assert (success.name, success.before.mean, success.after.mean) == ("Success rate", 0.2, 0.9)
    assert success.after.interval == pytest.approx(wilson_interval(9, 10), abs=1e-4)
    assert success.verdict == "better"  # 5.7 to 51 % before, 59.6 to 98.2 % after
    assert success.where == "evaluation at 0 → 100 steps, 10 episodes"
    # 10 episodes, deviation 1 with divisor n: x̄ ± t₉ · 1 / √9 = 1 ± 2.2622 / 3.
    assert returns.before.interval == pytest.approx((1 - 0.75405, 1 + 0.75405), abs=1e-4)


def test_without_it_the_first_and_last_training_episodes_are_compared_first(tmp_path):
    played = [episode(step, float(step < 20), success=step >= 20) for step in range(40)]
    found = changes([run(tmp_path, played, [evaluation(20, 5.0), evaluation(40, 6.0)])])
    success, returns, evaluated = found
    # 40 episodes: windows of 10.
    assert (success.where, success.before.mean, success.after.mean) == ("first → last 10 training episodes", 0.0, 1.0)
    assert (returns.verdict, evaluated.verdict) == ("worse", "unclear")
    assert evaluated.source == "evaluation"


def test_several_runs_have_intervals_over_seeds(tmp_path):
    runs = [run(tmp_path, evaluations=[evaluation(0, 0.0), evaluation(9, mean)]) for mean in (1.0, 2.0, 3.0)]
    (returns,) = changes(runs)
    # x̄ = 2, s = 1, t₂ = 4.3027: 2 ± 4.3027 / √3.
    assert returns.after.interval == pytest.approx((2 - 2.48414, 2 + 2.48414), abs=1e-4)
    assert returns.after.over == "seeds"
    seeds_at_once = [evaluation(9, 2.0, mean_rewards=[1.0, 2.0, 3.0])]
    (same,) = changes([run(tmp_path, evaluations=seeds_at_once)])
    assert same.after.interval == pytest.approx(returns.after.interval)
    assert same.before is None


def test_two_runs_have_no_interval(tmp_path):
    """That of Student's t would be 9 times as wide as they are apart, and end far outside of what is possible."""
    runs = [run(tmp_path, evaluations=[evaluation(0, 0.0), evaluation(9, mean)]) for mean in (1.0, 3.0)]
    (returns,) = changes(runs)
    assert (returns.after.mean, returns.after.interval, returns.after.over) == (2.0, None, None)


def test_runs_of_unequal_length_are_measured_at_the_last_common_step(tmp_path):
    played = [episode(step, float(step)) for step in range(80)]
    short = run(tmp_path, played[:40], [evaluation(0, 0.0), evaluation(39, 4.0)])
    long = run(tmp_path, played, [evaluation(0, 0.0), evaluation(39, 6.0), evaluation(79, 100.0)])
    assert common_end([short, long]) == 39
    assert common_end([short, short]) is None
    evaluated, trained = changes([short, long])
    assert (evaluated.after.mean, evaluated.where) == (5.0, "evaluation at 0 → 39 steps, 10 episodes of each run")
    # 40 episodes: windows of 10, of both runs the returns 30 … 39.
    assert (trained.before.mean, trained.after.mean) == (4.5, 34.5)
    assert trained.where == "first → last 10 training episodes of each run"


def test_a_run_that_plays_nothing_is_judged_by_its_validation_loss(tmp_path):
    lines = [{"step": step, "bc_loss": 9.0, "val_loss": 8.0 - step} for step in range(5)]
    (loss,) = changes([run(tmp_path, updates=lines)])
    assert (loss.name, loss.before.mean, loss.after.mean, loss.verdict) == ("val loss", 8.0, 4.0, "")
    assert changes([run(tmp_path)]) == []
    assert changes([run(tmp_path, updates=[{"step": 1, "loss": None}, {"step": 2, "loss": None}])]) == []


def test_fewer_of_a_bad_thing_is_better():
    before, after = Measure(5.0, (4.0, 6.0)), Measure(1.0, (0.5, 1.5))
    assert Change("loss", before, after, "", "", higher_is_better=False).verdict == "better"
    assert Change("return", before, after, "", "").verdict == "worse"
