"""Closed-loop driving: good waypoints arrive, bad ones do not, and what is measured is the scripted driver's plan."""

import numpy as np
import pytest

from deft import schema
from deft.envs.driving.expert import expert_waypoints
from deft.envs.waypoints.driving import DrivingWaypointSimulator
from deft.envs.waypoints.protocol import MAX_GAP, WaypointVectorEnv


def drive(waypoints, episodes=12, **kwargs):
    env = WaypointVectorEnv(DrivingWaypointSimulator(episodes, "medium", camera_size=16, **kwargs))
    env.reset(0)
    ended = {}
    while len(ended) < episodes:
        for episode in env.step(waypoints(env)).episodes:
            ended.setdefault(episode.env_index, episode)
    return list(ended.values())


def test_the_scripted_drivers_waypoints_arrive():
    episodes = drive(lambda env: env.simulator.target_waypoints())
    assert np.mean([episode.success for episode in episodes]) > 0.9
    assert not any(episode.collision for episode in episodes)


def test_driving_straight_on_does_not():
    ahead = np.stack([np.arange(1, 9) * 4.0, np.zeros(8)], 1).astype(np.float32)
    episodes = drive(lambda env: np.tile(ahead, (env.num_envs, 1, 1)))
    assert not any(episode.success for episode in episodes)
    assert all(episode.collision or episode.off_road for episode in episodes)
    # A crash costs 100, scaled by 0.1; each episode ends with one of the two.
    for episode in episodes:
        assert episode.terms["collision"] + episode.terms["off_road"] == pytest.approx(-10.0)


def test_errors_are_against_the_scripted_drivers_plan():
    simulator = DrivingWaypointSimulator(2, camera_size=16, measure_ade=True)
    simulator.reset(np.arange(2), [0, 1])
    plan = expert_waypoints(simulator.simulator, 8, 0.4)
    outcome = simulator.follow((plan + [0.0, 1.5]).astype(np.float32))
    assert outcome.ade == pytest.approx([1.5, 1.5], rel=1e-5)
    assert outcome.fde == pytest.approx([1.5, 1.5], rel=1e-5)


def test_without_measuring_there_is_no_error():
    simulator = DrivingWaypointSimulator(1, camera_size=16)
    simulator.reset(np.arange(1), [0])
    assert simulator.follow(simulator.target_waypoints()).ade is None


def test_the_distance_sensor_reads_the_vehicle_in_the_lane():
    simulator = DrivingWaypointSimulator(1, camera_size=16)
    simulator.reset(np.arange(1), [0])
    inner = simulator.simulator
    inner.other_active[:] = False
    assert simulator.observe()[schema.MOTION][0, 3] == MAX_GAP
    inner.other_active[0, 0] = True
    inner.other_arc[0, 0], inner.other_offset[0, 0] = inner.arc[0] + 20.0, inner.road_offset[0]
    inner.other_speed[0, 0], inner.speed[0] = 3.0, 8.0
    # 20 m from centre to centre, less one length of 4.5 m; 8 − 3 m/s nearer.
    assert simulator.observe()[schema.MOTION][0, 3:] == pytest.approx([15.5, 5.0])
    inner.other_offset[0, 0] += 3.5  # the next lane
    assert simulator.observe()[schema.MOTION][0, 3] == MAX_GAP


def test_an_episode_that_ends_between_two_decisions_counts_no_further():
    simulator = DrivingWaypointSimulator(1, camera_size=16, steps_per_decision=10)
    simulator.reset(np.arange(1), [0])
    simulator.simulator.other_active[:] = False
    side = np.tile(np.array([0.0, 1.0], np.float32), (1, 8, 1)) * np.arange(1, 9)[None, :, None] * 2
    side[..., 0] = np.arange(1, 9) * 2.0
    outcomes = [simulator.follow(side.astype(np.float32)) for _ in range(3)]
    first = next(outcome for outcome in outcomes if outcome.terminated[0])
    assert first.off_road[0]
    assert first.terms["off_road"][0] == pytest.approx(-10.0)  # once, though more steps were beside the road
