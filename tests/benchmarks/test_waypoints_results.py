"""The waypoint comparison over seeds reports intervals as `deft compare` does."""


def test_means_and_changes_come_with_intervals_over_seeds(load_benchmark):
    """t = 12.71 with one degree of freedom, times half the difference of two seeds; 200 episodes a seed."""
    module = load_benchmark("waypoints_results")
    seeds = [
        {"before": {"ade": 1.0, "success_rate": 0.5}, "after": {"ade": 0.25, "success_rate": 0.5}},
        {"before": {"ade": 1.02, "success_rate": 0.5}, "after": {"ade": 0.25, "success_rate": 0.5}},
    ]
    assert module.interval_rows(seeds, ("success_rate", "ade")) == [
        # Wilson's of 200 in 400: 50 ± 4.9
        ["success_rate", "50.0 % (45.1 to 54.9)", "50.0 % (45.1 to 54.9)", "+0.000 (+0.000 to +0.000)"],
        # 1.01 ± 12.706 · 0.01, and −0.76 ± 12.706 · 0.01
        ["ade", "1.010 (0.883 to 1.137)", "0.250 (0.250 to 0.250)", "-0.760 (-0.887 to -0.633)"],
    ]
