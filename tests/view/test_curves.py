from deft.view.curves import MOST_POINTS, Curve, panels


def curve(*points):
    made = Curve()
    for step, value in points:
        made.add(step, value)
    return made


def test_a_curve_averages_neighbours_when_it_is_full():
    made = curve(*((step, float(step)) for step in range(MOST_POINTS + 3)))
    # 600 points become 300 of two values each: (0 + 1) / 2, (2 + 3) / 2, …; 600 and 601 are one point, 602 half of one.
    assert len(made.steps) == MOST_POINTS // 2 + 2
    assert made.values[:2] == [0.5, 2.5]
    assert made.steps[:2] == [1, 3]
    assert (made.steps[-2:], made.values[-2:]) == ([601, 602], [600.5, 602.0])


def test_memory_is_bounded_and_the_mean_is_kept():
    made = curve(*((step, float(step % 2)) for step in range(10_000)))
    assert len(made.steps) <= MOST_POINTS
    assert made.steps[-1] == 9_999
    assert set(made.values[:-1]) == {0.5}


def test_charts_are_grouped_and_every_metric_has_one():
    names = ("rollout/mean_reward", "evaluation/mean_reward", "train/wm_loss", "policy_loss", "critic_loss", "odd/one")
    found = panels({name: curve((1, 1.0)) for name in names}, {})
    shown = {panel["title"]: [series["label"] for series in panel["series"]] for panel in found}
    assert shown == {
        "Return": ["training", "evaluation"],
        "World model: cross-entropy, nats a code": ["wm loss"],
        "Policy loss": ["policy loss"],
        "Critic loss": ["critic loss"],
        "odd/one": ["one"],
    }
    assert [panel["title"] for panel in found if panel.get("more")] == ["odd/one"]


def test_metrics_of_one_name_share_a_chart_and_have_their_whole_names():
    names = ("wm/loss", "explorer/loss", "a/policy_loss", "b/policy_loss")
    found = panels({name: curve((1, 1.0)) for name in names}, {})
    shown = {panel["title"]: [series["label"] for series in panel["series"]] for panel in found}
    assert shown == {"Policy loss": ["a/policy_loss", "b/policy_loss"], "Loss": ["wm/loss", "explorer/loss"]}


def test_tasks_have_a_chart_beside_the_success_rate():
    curves = {"rollout/success_rate": curve((1, 0.5))}
    found = panels(curves, {"reach": curve((1, 1.0)), "push": curve((1, 0.0))})
    assert [panel["title"] for panel in found] == ["Success rate", "Success rate by task"]
    assert found[1]["range"] == [0, 1]
    assert len(panels(curves, {"reach": curve((1, 1.0))})) == 1  # of one task it would be the same curve
