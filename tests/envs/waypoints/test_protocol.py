"""The waypoint protocol: errors by hand, episodes counted and reset, independent environments, saved states."""

import numpy as np
import pytest

from deft import schema
from deft.envs.waypoints.make import make_waypoint_env
from deft.envs.waypoints.protocol import WaypointEpisode, WaypointVectorEnv, displacement_errors
from deft.envs.waypoints.toy import ToySimulator, ToyWaypointEnv

SMALL = {"camera_size": 16, "num_waypoints": 4}


def test_displacement_errors_by_hand():
    target = np.array([[[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]]])
    waypoints = np.array([[[1.0, 3.0], [2.0, 0.0], [6.0, 4.0]]])
    # Distances 3, 0 and 5: their mean is 8/3, the last is 5.
    ade, fde = displacement_errors(waypoints, target)
    assert ade == pytest.approx([8 / 3])
    assert fde == pytest.approx([5.0])


def test_episodes_are_counted_and_reset_in_the_step_that_ends_them():
    env = WaypointVectorEnv(ToySimulator(2, horizon=2, **SMALL))
    env.reset(7)
    first_error = env.observation[schema.SFT_OFFSET].copy()
    off = env.simulator.target_waypoints() + np.array([3.0, 4.0], np.float32)  # 5 m from each waypoint
    assert env.step(off).reward == pytest.approx([-5.0, -5.0])
    step = env.step(env.simulator.target_waypoints())
    assert step.truncated.all()
    assert not step.terminated.any()
    assert step.done_index.tolist() == [0, 1]
    # The final observation is the ended episode's, the observation the next one's: their errors differ.
    np.testing.assert_array_equal(step.final_observation[schema.SFT_OFFSET], first_error)
    assert not np.allclose(step.observation[schema.SFT_OFFSET], first_error)
    episode = step.episodes[0]
    assert isinstance(episode, WaypointEpisode)
    assert episode.length == 2
    assert episode.ade == pytest.approx(2.5)  # 5 m, then 0
    assert episode.episode_return == pytest.approx(-5.0)
    assert episode.terms == {"accuracy": pytest.approx(-5.0)}
    assert episode.success is False
    assert step.reward_terms.shape == (2, 1)


def test_a_copy_depends_on_its_own_seed_alone():
    together, alone = WaypointVectorEnv(ToySimulator(3, **SMALL)), WaypointVectorEnv(ToySimulator(1, **SMALL))
    together.reset([5, 6, 7])
    alone.reset(6)
    for _ in range(7):  # beyond the first episode's end
        actions = together.simulator.target_waypoints()
        many, one = together.step(actions), alone.step(alone.simulator.target_waypoints())
        for name in many.observation:
            np.testing.assert_array_equal(many.observation[name][1], one.observation[name][0])


@pytest.mark.parametrize("names", [("toy",), ("toy", "driving")])
def test_a_saved_state_goes_on_as_it_would_have(names):
    env = make_waypoint_env(names, 4, kwargs=SMALL)
    other = make_waypoint_env(names, 4, kwargs=SMALL)
    env.reset(0)
    actions = np.tile(np.linspace(2, 8, 4, dtype=np.float32)[:, None] * np.array([1, 0], np.float32), (4, 1, 1))
    env.step(actions)
    state = env.get_state()
    other.reset(100)
    other.set_state(state)
    for name, stream in env.observation.items():
        np.testing.assert_array_equal(other.observation[name], stream)
    for _ in range(6):
        expected, found = env.step(actions), other.step(actions)
        np.testing.assert_array_equal(found.reward, expected.reward)
        for name, stream in expected.observation.items():
            np.testing.assert_array_equal(found.observation[name], stream)
    assert env.state_obstacle() is None


def test_the_gymnasium_environment_reports_errors_in_its_info():
    env = ToyWaypointEnv(**SMALL)
    observation, _ = env.reset(seed=3)
    assert env.observation_space.contains(observation)
    _, reward, _, _, info = env.step(env.simulator.target_waypoints()[0] + np.array([0, 2], np.float32))
    assert info["ade"] == pytest.approx(2.0)
    assert info["fde"] == pytest.approx(2.0)
    assert reward == pytest.approx(-2.0)
