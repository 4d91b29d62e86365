"""From a name to a waypoint environment."""

import pytest

from deft.envs.waypoints.make import env_kwargs_of, make_waypoint_simulator
from deft.errors import InputError


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
