"""The commands of a worker process, called in this process: the results are those of `SerialVectorEnv`."""

import mmap
import os
from collections.abc import Callable

import cloudpickle
import gymnasium
import numpy as np
import pytest

from deft.envs import SerialVectorEnv
from deft.envs.layout import ActionLayout, ObservationLayout
from deft.envs.shared_memory import SharedArrays, open_memory
from deft.envs.worker import _WorkerEnvs
from deft.errors import InputError, RunError

MakeEnv = Callable[..., gymnasium.Env]


@pytest.fixture
def worker(make_counting_env: MakeEnv):
    """A worker with the last two of three environments, and the arrays that it shares."""
    file = open_memory()
    envs = _WorkerEnvs(file)
    described = envs.make(cloudpickle.dumps([make_counting_env] * 2), 1)
    sizes = (ObservationLayout(described["observation_space"]), ActionLayout(described["action_space"]), 0, 3, 2)
    size = SharedArrays(*sizes).size
    os.ftruncate(file, size)
    envs.share(1, 3, 2, size)
    yield envs, SharedArrays(*sizes, mmap.mmap(file, size))
    os.close(file)


def test_steps_equal_those_of_a_serial_vector_environment(worker, make_counting_env: MakeEnv) -> None:
    envs, shared = worker
    serial = SerialVectorEnv([make_counting_env] * 3)
    serial.reset(7)
    envs.reset(0, [8, 9])
    for count in range(4):
        actions = np.array([0, 1, 0])
        shared.actions[:] = actions
        expected = serial.step(actions)
        episodes, failure = envs.step(count % 2)
        found = shared.env.steps[count % 2]
        assert failure is None
        np.testing.assert_array_equal(found.observation[1:], expected.observation[1:])
        np.testing.assert_array_equal(found.reward[1:], expected.reward[1:])
        assert episodes == [one for one in expected.episodes if one.env_index > 0]
    assert shared.stepping[1] == 2  # the environment that was stepped last
    assert envs.call("add", 10) == serial.call("add", 10)[1:]


def test_failures_name_the_environment(worker) -> None:
    envs, _ = worker
    envs.reset(0, [1, 2])
    assert envs.failure(ValueError("joint 3"))[:2] == ("environment 2: ValueError: joint 3", RunError)
    assert envs.failure(InputError("no such thing"))[:2] == ("no such thing", InputError)
    with pytest.raises(InputError, match=r"environment 1 .* has no method 'fly'"):
        envs.call("fly")
    assert envs.render(0) is None  # an environment of another worker
