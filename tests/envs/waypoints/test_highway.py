"""highway-env behind the waypoint protocol; skipped where the package is not installed."""

import sys

import numpy as np
import pytest

from deft import schema
from deft.envs.waypoints.make import make_waypoint_simulator
from deft.envs.waypoints.protocol import WaypointVectorEnv
from deft.errors import InputError


def make(**kwargs):
    pytest.importorskip("highway_env")
    simulator = make_waypoint_simulator("highway", 1, "easy", {"camera_size": 32, **kwargs})
    simulator.reset(np.arange(1), [0])
    return simulator


def test_its_own_waypoints_stay_unharmed():
    simulator = make()
    env = WaypointVectorEnv(simulator)
    env.reset(0)
    episodes = []
    while not episodes:
        episodes += env.step(simulator.target_waypoints()).episodes
    assert episodes[0].success
    assert not episodes[0].collision
    env.close()


@pytest.mark.parametrize("side", [1.0, -1.0])
def test_left_is_left_and_right_is_right(side):
    simulator = make()
    start = simulator._envs[0].vehicle.position[1]
    path = np.stack([np.arange(1, 9) * 10.0, side * np.arange(1, 9) * 0.3], 1)[None].astype(np.float32)
    simulator.follow(path)
    # The package's y points to the right.
    assert np.sign(start - simulator._envs[0].vehicle.position[1]) == side


def test_leaving_the_road_ends_the_episode():
    simulator = make()
    away = np.stack([np.arange(1, 9) * 8.0, np.arange(1, 9) * 4.0], 1)[None].astype(np.float32)
    outcomes = [simulator.follow(away) for _ in range(6)]
    first = next(outcome for outcome in outcomes if outcome.terminated[0])
    assert first.off_road[0] or first.collision[0]
    assert not first.success[0]


def test_the_observation_fits_its_space_and_shows_the_vehicle():
    simulator = make(measure_ade=True)
    observation = {name: stream[0] for name, stream in simulator.observe().items()}
    assert simulator.observation_space.contains(observation)
    yellow = (observation[schema.CAMERA].transpose(1, 2, 0) == (250, 214, 60)).all(-1)
    assert yellow.any()
    assert simulator.follow(simulator.target_waypoints()).ade == pytest.approx([0.0], abs=1e-5)


def test_without_the_package_it_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "highway_env", None)
    with pytest.raises(InputError, match=r"pip install \"deft\[highway\]\""):
        make_waypoint_simulator("highway")
