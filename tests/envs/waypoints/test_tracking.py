"""Pure pursuit and the speed law, on paths whose answer is known."""

import numpy as np
import pytest

from deft.envs.waypoints.tracking import point_at, pursue, to_ego, to_map


def test_a_point_of_the_path_at_a_distance():
    path = np.array([[[0.0, 0.0], [3.0, 0.0], [3.0, 4.0]]])
    # 5 m from the origin is the path's end; 4 m is where 3² + y² = 16 by the chord between distances 3 and 5: half-way.
    np.testing.assert_allclose(point_at(path, np.array([5.0])), [[3.0, 4.0]])
    np.testing.assert_allclose(point_at(path, np.array([4.0])), [[3.0, 2.0]])
    np.testing.assert_allclose(point_at(path, np.array([9.0])), [[3.0, 4.0]])  # its last, where none is so far


def test_a_straight_path_at_the_right_speed_needs_nothing():
    path = np.stack([np.arange(9) * 4.0, np.zeros(9)], 1)[None]  # 4 m each 0.4 s: 10 m/s
    acceleration, curvature = pursue(path, np.array([10.0]), 0.4, 0.0)
    assert acceleration == pytest.approx([0.0])
    assert curvature == pytest.approx([0.0])
    acceleration, _ = pursue(path, np.array([8.0]), 0.4, 0.0)
    assert acceleration == pytest.approx([4.0])  # 2 · (10 − 8)


def test_a_circle_is_followed_at_its_curvature():
    angle = np.arange(60) * 0.02  # radius 25 to the left, 0.5 m a point
    path = np.stack([25 * np.sin(angle), 25 * (1 - np.cos(angle))], 1)[None]
    _, curvature = pursue(path, np.array([10.0]), 0.05, 0.0)
    assert curvature == pytest.approx([1 / 25], rel=1e-3)


def test_a_path_without_length_asks_to_stop():
    acceleration, curvature = pursue(np.zeros((1, 9, 2)), np.array([5.0]), 0.4, 0.0)
    assert acceleration == pytest.approx([-10.0])
    assert curvature == pytest.approx([0.0])


def test_points_come_back_from_the_map():
    points, pose = np.array([[10.0, 2.0], [-3.0, 1.0]]), (np.array([5.0, -2.0]), 0.3)
    np.testing.assert_allclose(to_ego(to_map(points, *pose), *pose), points)
    right = np.array([[5.0, -1.0]])  # y of the map points to the right: one metre further is one metre to the right
    np.testing.assert_allclose(to_ego(right, np.array([5.0, -2.0]), 0.0), [[0.0, -1.0]], atol=1e-12)
