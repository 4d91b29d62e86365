"""From names to a waypoint environment, and several of them as one."""

import numpy as np
import pytest

from deft import schema
from deft.envs.waypoints.make import MixedVectorEnv, env_kwargs_of, make_waypoint_env, make_waypoint_simulator
from deft.envs.waypoints.protocol import WaypointVectorEnv
from deft.envs.waypoints.toy import ToySimulator
from deft.errors import InputError

SMALL = {"camera_size": 16, "num_waypoints": 4}


def test_unknown_names_and_arguments_are_one_line():
    with pytest.raises(InputError, match="'tooy' is not a waypoint environment; choose one of toy, driving, high"):
        make_waypoint_simulator("tooy")
    with pytest.raises(InputError, match=r"do not fit toy: TypeError.*'size'"):
        make_waypoint_simulator("toy", kwargs={"size": 3})
    with pytest.raises(InputError, match="difficulty is 'extreme'; choose 'easy', 'medium' or 'hard'"):
        make_waypoint_simulator("toy", difficulty="extreme")


def test_arguments_are_for_all_or_for_one():
    names = ("toy", "driving")
    kwargs = {"camera_size": 32, "toy": {"horizon": 3}}
    assert env_kwargs_of("toy", names, kwargs) == {"camera_size": 32, "horizon": 3}
    assert env_kwargs_of("driving", names, kwargs) == {"camera_size": 32}
    assert env_kwargs_of("toy", ("toy",), None) == {}


def test_mixed_rows_are_those_of_the_parts():
    env = make_waypoint_env(("toy", "driving"), 5, kwargs=SMALL)
    assert isinstance(env, MixedVectorEnv)
    assert [part.num_envs for part in env.parts] == [3, 2]
    env.reset(3)
    toy = WaypointVectorEnv(ToySimulator(3, **SMALL))
    toy.reset(3)
    np.testing.assert_array_equal(env.observation[schema.CAMERA][:3], toy.observation[schema.CAMERA])
    actions = np.zeros((5, 4, 2), np.float32)
    ended = [episode.env_index for _ in range(5) for episode in env.step(actions).episodes]
    assert sorted(ended)[:3] == [0, 1, 2]  # the toy's horizon is 5


def test_mixed_parts_need_the_same_images():
    with pytest.raises(InputError, match="same observation_space"):
        make_waypoint_env(("toy", "driving"), 2, kwargs={"toy": {"camera_size": 32}})
