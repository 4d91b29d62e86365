"""The ways and pushes of PushT's expert, on a square block; its simulator is tested with the suite."""

from types import SimpleNamespace

import numpy as np
import pytest

from deft.envs.suites.pusht_expert import PushPlanner, approach, distance, inside, is_free, straight

SQUARE = np.array([[200.0, 200.0], [300.0, 200.0], [300.0, 300.0], [200.0, 300.0]])


@pytest.mark.parametrize(
    ("point", "gap"),
    [((250, 250), 0.0), ((250, 180), 20.0), ((330, 340), 50.0), ((199, 250), 1.0)],  # 50² = 30² + 40²
)
def test_distance_from_a_polygon(point, gap):
    assert distance(np.array(point, float), SQUARE) == pytest.approx(gap)
    assert inside(np.array(point, float), SQUARE) == (gap == 0)


def test_positions_on_a_way_are_at_most_the_speed_apart():
    points = straight([np.zeros(2), np.array([0.0, 25.0]), np.array([10.0, 25.0])], 10.0)
    assert np.allclose(points, [[0, 25 / 3], [0, 50 / 3], [0, 25], [10, 25]])


def test_a_way_leads_around_the_block():
    left, right = np.array([150.0, 250.0]), np.array([350.0, 250.0])
    assert not is_free([left, right], SQUARE)
    way = approach(left, right, SQUARE)
    assert way is not None
    assert len(way) > 2
    assert np.array_equal(way[0], left)
    assert np.array_equal(way[-1], right)
    assert min(distance(place, SQUARE) for place in straight(way, 2.0)) >= 15.0  # the radius of the disc
    assert len(approach(left, np.array([150.0, 100.0]), SQUARE) or ()) == 2  # straight, 50 beside the block


def test_a_disc_that_touches_the_block_may_only_move_off():
    touching = np.array([185.0, 250.0])
    assert is_free([touching, np.array([100.0, 250.0])], SQUARE)
    assert not is_free([touching, np.array([185.0, 250.0]) + [10.0, 0.0]], SQUARE)


def test_a_push_is_planned_again_if_another_action_was_executed(monkeypatch):
    plans = iter([[np.array([1.0, 0.0]), np.array([2.0, 0.0])], [np.array([3.0, 0.0])], [np.array([4.0, 0.0])]])
    simulator = SimpleNamespace(_last_action=None)
    planner = PushPlanner(simulator, make=None)
    monkeypatch.setattr(planner, "_plan", lambda: next(plans))

    def play(executed=None):
        action = planner.action()
        simulator._last_action = action if executed is None else executed
        return action[0]

    assert [play(), play()] == [1, 2]
    assert play(executed=np.array([300.0, 0.0])) == 3  # the plan had ended
    assert play() == 4
