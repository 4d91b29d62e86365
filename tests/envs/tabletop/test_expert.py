"""Waypoints of the scripted experts, by hand."""

import numpy as np
import pytest

from deft.envs.tabletop import expert
from deft.envs.tabletop.scene import DomainRandomization, draw_scene
from deft.envs.tabletop.tasks import Goal, View


def view(tcp: list[float], opening: float = 0.04, squeeze: float = 0.0) -> View:
    scene = draw_scene(3, 2, False, DomainRandomization())
    assert scene is not None
    positions = np.array([[*item.place, item.half_height] for item in scene.objects])
    return View(scene, np.array(tcp), opening, squeeze, positions, np.zeros((2, 3)), 0.0)


def target_of(seen: View, task: str) -> expert.Waypoint:
    return expert.waypoint(task, seen, Goal(0, 1, ""), np.zeros(2), 0.3)


def test_reach_goes_up_then_over_the_object_then_down() -> None:
    x, y, z = view([0, 0, 0]).positions[0]
    low = target_of(view([x + 0.1, y, 0.02]), "reach")
    assert low.position.tolist() == pytest.approx([x + 0.1, y, expert.HOVER])  # up, at the same x and y
    high = target_of(view([x + 0.1, y, expert.HOVER]), "reach")
    assert high.position.tolist() == pytest.approx([x, y, expert.HOVER])
    above = target_of(view([x, y, expert.HOVER]), "reach")
    assert above.position.tolist() == pytest.approx([x, y, z])
    assert above.gripper == expert.OPEN


def test_pick_closes_at_the_object_and_lifts_what_it_holds() -> None:
    x, y, z = view([0, 0, 0]).positions[0]
    at_object = target_of(view([x, y, z]), "pick")
    assert at_object.gripper == expert.CLOSED
    half_width = view([0, 0, 0]).scene.objects[0].half_width
    held = target_of(view([x, y, z], opening=half_width, squeeze=0.03), "pick")
    assert held.position.tolist() == pytest.approx([x, y, z + 0.03])
    assert held.yaw == 0.3  # as the hand is turned


def test_exploration_keeps_a_waypoint_for_twelve_steps() -> None:
    first, same, other = (expert.exploring_waypoint(5, step, 0.0) for step in (0, 11, 12))
    np.testing.assert_array_equal(first.position, same.position)
    assert not np.array_equal(first.position, other.position)
    lower = expert.exploring_waypoint(5, 0, -0.02)
    assert lower.position[2] == pytest.approx(first.position[2] - 0.02)
