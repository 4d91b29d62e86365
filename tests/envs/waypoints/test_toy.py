"""The toy: the lane's polynomial, and the supervised policy's error in the observation."""

import numpy as np
import pytest

from deft import schema
from deft.envs.waypoints.toy import LEVELS, ToySimulator


def test_the_lane_is_its_polynomial():
    simulator = ToySimulator(1, num_waypoints=2)
    simulator.reset(np.array([0]), [0])
    simulator._amplitude[:], simulator._wavelength[:], simulator._phase[:] = 0.02, 100.0, np.pi / 2
    # κ = 0.02 sin(π/2) = 0.02 and κ′ = 0.02 · 2π/100 · cos(π/2) = 0: y(2.5) = ½ · 0.02 · 6.25, y(5) = ½ · 0.02 · 25
    np.testing.assert_allclose(simulator.target_waypoints()[0], [[2.5, 0.0625], [5.0, 0.25]], atol=1e-6)


def test_the_error_is_drawn_for_each_episode_and_is_in_the_observation():
    simulator = ToySimulator(200)
    rows = np.arange(200)
    simulator.reset(rows, list(range(200)))
    first = simulator.observe()[schema.SFT_OFFSET].copy()
    simulator.follow(simulator.target_waypoints())
    np.testing.assert_array_equal(simulator.observe()[schema.SFT_OFFSET], first)  # the same through the episode
    simulator.reset(rows, [None] * 200)
    second = simulator.observe()[schema.SFT_OFFSET]
    assert not np.isclose(first[:, 0, 1], second[:, 0, 1]).any()
    # The error cannot be seen in the picture: only its own stream contains it.
    correlation = np.corrcoef(second[:, -1, 1], simulator.observe()[schema.CAMERA].reshape(200, -1).mean(1))[0, 1]
    assert abs(correlation) < 0.2


def test_the_picture_shows_the_lane():
    simulator = ToySimulator(20, camera_size=64)
    simulator.reset(np.arange(20), list(range(20)))
    nearest, farthest, rightmost, leftmost = simulator.view
    line = simulator.observe()[schema.CAMERA][:, 2].astype(float)  # blue: the lane, and hardly the vehicle
    ahead, left = np.linspace(farthest, nearest, 64), np.linspace(leftmost, rightmost, 64)
    row = int(np.abs(ahead - 10.0).argmin())
    middle = (line[:, row] * left).sum(1) / line[:, row].sum(1)
    np.testing.assert_allclose(middle, simulator._lateral(np.arange(20), ahead)[:, row], atol=0.1)


@pytest.mark.parametrize("level", LEVELS)
def test_difficulty_is_the_size_of_the_error(level):
    simulator = ToySimulator(500)
    simulator.set_difficulty(level)
    simulator.reset(np.arange(500), list(range(500)))
    # At the last of 8 waypoints, 20 m ahead: sideways 0.5 and heading 0.05 rad · 20 m, √(0.5² + 1²) at size 1.
    deviation = simulator.observe()[schema.SFT_OFFSET][:, -1, 1].std()
    assert deviation == pytest.approx(LEVELS[level][1] * np.sqrt(1.25), rel=0.1)
