"""The commands of a worker process, called in this process: the results are those of `SerialVectorEnv`."""

import mmap
import os
from collections.abc import Callable

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from deft.envs import SerialVectorEnv
from deft.envs.worker import SharedArrays, WorkerEnv, describe_failure, open_memory
from deft.errors import InputError, RunError

MakeEnv = Callable[..., gymnasium.Env]


@pytest.fixture
def worker(make_counting_env: MakeEnv):
    """A worker with the last two of three environments, and the arrays that it shares."""
    file = open_memory()
    env = WorkerEnv([make_counting_env] * 2, 1)
    sizes = (env.observation_space, env.action_space, 0, 3, 2)
    size = SharedArrays(*sizes).size
    os.ftruncate(file, size)
    env.share(file, 1, 3, 2, size)
    yield env, SharedArrays(*sizes, mmap.mmap(file, size))
    os.close(file)


def test_steps_equal_those_of_a_serial_vector_environment(worker, make_counting_env: MakeEnv) -> None:
    env, shared = worker
    serial = SerialVectorEnv([make_counting_env] * 3)
    serial.reset(7)
    env.reset_into(0, [8, 9])
    for count in range(4):
        actions = np.array([0, 1, 0])
        shared.actions[:] = actions
        expected = serial.step(actions)
        episodes, failure = env.step_into(count % 2)
        found = shared.env.steps[count % 2]
        assert failure is None
        np.testing.assert_array_equal(found.observation[1:], expected.observation[1:])
        np.testing.assert_array_equal(found.reward[1:], expected.reward[1:])
        assert episodes == [one for one in expected.episodes if one.env_index > 0]
    assert shared.busy[1] == 2  # the environment that was stepped last
    assert env.call("add", 10) == serial.call("add", 10)[1:]


def test_failures_name_the_environment(worker) -> None:
    env, _ = worker
    env.reset_into(0, [1, 2])
    assert describe_failure(ValueError("joint 3"), 2)[:2] == ("environment 2: ValueError: joint 3", RunError)
    assert describe_failure(InputError("no such thing"), 2)[:2] == ("no such thing", InputError)
    with pytest.raises(InputError, match=r"environment 1 .* has no method 'fly'"):
        env.call("fly")


def test_an_exception_in_a_step_keeps_the_episodes_before_it(worker, make_counting_env: MakeEnv) -> None:
    env, shared = worker
    env.reset_into(0, [1, 2])
    env.envs[1].step = lambda _: (_ for _ in ()).throw(ValueError("jammed"))  # type: ignore[method-assign]
    shared.actions[:] = 0
    episodes, failure = env.step_into(1)
    assert episodes == []
    assert failure is not None
    assert failure[:2] == ("environment 2 (CountingEnv) raised ValueError: jammed", RunError)
    assert "Traceback" in failure[2]


def test_two_mappings_of_one_file_are_the_same_arrays() -> None:
    observations = spaces.Dict({"a": spaces.Box(-1, 1, (3,)), "b": spaces.Discrete(5)})
    sizes = (observations, spaces.Box(-1, 1, (2,)), 2, 4, 3)
    file, size = open_memory(), SharedArrays(*sizes).size
    os.ftruncate(file, size)
    one, other = (SharedArrays(*sizes, mmap.mmap(file, size)) for _ in range(2))
    os.close(file)
    arrays = [one.actions, one.busy, *one.env.final.values()]
    for step in one.env.steps:
        arrays += [step.reward, step.terminated, step.truncated, step.num_steps, step.reward_terms]
        arrays += step.observation.values()
    for number, array in enumerate(arrays):
        array[...] = number % 2
    assert all((array == number % 2).all() for number, array in enumerate(arrays)), "two arrays overlap"
    np.testing.assert_array_equal(other.actions, one.actions)
    np.testing.assert_array_equal(other.env.steps[1].observation["a"], one.env.steps[1].observation["a"])
    assert one.size == size
    assert one.busy.shape == (3,)
    assert one.actions.shape == (4, 2)
