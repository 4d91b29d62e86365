"""Closed roads: their tables agree, and none leaves the map."""

import numpy as np
from driving_simulators import new_simulator

from deft.envs.driving.road import MAP_RADIUS
from deft.envs.driving.simulator import (
    EDGE,
    MAX_STEERING,
    WHEELBASE,
    DrivingSimulator,
)


def test_a_road_closes_and_its_tables_agree() -> None:
    simulator = new_simulator(8, "hard")
    roads = simulator.roads
    arcs = np.linspace(0, 1, 2000, endpoint=False) * roads.length[:, None]
    line = roads.at(arcs)
    # Once around, the heading turns by 2π: ∫ κ ds = ±2π, left positive.
    turned = line[..., 3].mean(axis=1) * roads.length
    np.testing.assert_allclose(turned, 2 * np.pi * roads.direction, rtol=1e-4)
    assert {-1.0, 1.0} == set(roads.direction)
    # The points are as far apart as the arc says, in the direction of the heading.
    steps = np.roll(line[..., :2], -1, axis=1) - line[..., :2]
    np.testing.assert_allclose(
        np.hypot(steps[..., 0], steps[..., 1]), (roads.length / 2000)[:, None] * np.ones(2000), rtol=0.01
    )
    middle = roads.at(roads.wrap(arcs + roads.length[:, None] / 4000))[..., 2]
    np.testing.assert_allclose(np.cos(np.arctan2(steps[..., 1], steps[..., 0]) - middle), 1.0, atol=1e-4)


def test_no_road_leaves_the_map() -> None:
    simulator = DrivingSimulator(64, "hard")
    for seed in range(0, 640, 64):
        simulator.reset(seeds=range(seed, seed + 64))
        reach = np.hypot(simulator.roads.points[..., 0], simulator.roads.points[..., 1]).max() + EDGE
        assert reach < MAP_RADIUS
        assert np.abs(simulator.roads.points[..., 3]).max() < np.tan(MAX_STEERING) / WHEELBASE  # it can be driven
