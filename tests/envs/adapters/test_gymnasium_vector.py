"""A user's gymnasium vector environment gives what our own gives."""

from collections.abc import Callable

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from deft.envs import ActionChunk, SerialVectorEnv
from deft.envs.adapters.gymnasium_vector import GymnasiumVectorEnv
from deft.errors import InputError, RunError

MakeEnv = Callable[..., gymnasium.Env]


def test_equals_serial(make_counting_env: MakeEnv) -> None:
    # Copies of the observation, because Gymnasium keeps final_obs by reference and this environment reuses its array.
    class Copied(gymnasium.ObservationWrapper):
        def observation(self, observation: np.ndarray) -> np.ndarray:
            return observation.copy()

    functions = [
        lambda: Copied(make_counting_env(length=2)),
        lambda: Copied(make_counting_env(length=3, ends="truncated")),
    ]
    serial = SerialVectorEnv(functions)
    adapter = GymnasiumVectorEnv(SyncVectorEnv(functions, autoreset_mode=AutoresetMode.SAME_STEP))
    assert adapter.observation_space == serial.observation_space
    assert adapter.reset(seed=4).tolist() == serial.reset(seed=4).tolist()
    for _ in range(12):
        expected, found = serial.step(np.zeros(2, np.int64)), adapter.step(np.zeros(2, np.int64))
        for name in ("observation", "reward", "terminated", "truncated", "num_steps", "done_index"):
            assert getattr(found, name).tolist() == getattr(expected, name).tolist(), name
            assert getattr(found, name).dtype == getattr(expected, name).dtype, name
        assert found.episodes == expected.episodes
        assert (found.final_observation is None) == (expected.final_observation is None)
        if expected.final_observation is not None:
            assert found.final_observation.tolist() == expected.final_observation.tolist()
    assert adapter.call("add", 5) == serial.call("add", 5)
    adapter.close()
    adapter.close()


def test_arrays_stay_valid_until_the_call_after_next(make_counting_env: MakeEnv) -> None:
    functions = [lambda: make_counting_env(length=9)]
    env = GymnasiumVectorEnv(SyncVectorEnv(functions, autoreset_mode=AutoresetMode.SAME_STEP))
    env.reset()
    one = env.step(np.zeros(1, np.int64))
    env.step(np.zeros(1, np.int64))
    assert one.observation[0, 1] == 1


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
def test_other_reset_modes_are_refused_with_the_way_out(make_counting_env: MakeEnv, mode: AutoresetMode) -> None:
    with pytest.raises(InputError, match=r"AutoresetMode\.SAME_STEP") as caught:
        GymnasiumVectorEnv(SyncVectorEnv([make_counting_env], autoreset_mode=mode))
    assert mode.name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_state_is_refused_with_a_reason(make_counting_env: MakeEnv) -> None:
    env = GymnasiumVectorEnv(SyncVectorEnv([make_counting_env], autoreset_mode=AutoresetMode.SAME_STEP))
    assert env.get_state() is None
    assert "list of environments" in env.state_obstacle()
    with pytest.raises(InputError, match="list of environments"):
        env.set_state([{}])


def test_faults(make_counting_env: MakeEnv) -> None:
    class Failing(gymnasium.Wrapper):
        def step(self, action):
            raise ValueError("joint 3 is broken")

    env = GymnasiumVectorEnv(
        SyncVectorEnv([lambda: Failing(make_counting_env())], autoreset_mode=AutoresetMode.SAME_STEP)
    )
    with pytest.raises(InputError, match="before reset"):
        env.step(np.zeros(1, np.int64))
    env.reset()
    with pytest.raises(RunError, match="raised ValueError: joint 3 is broken"):
        env.step(np.zeros(1, np.int64))
    with pytest.raises(InputError, match="no method 'fly'"):
        env.call("fly")


def test_chunks_inside_are_rejected(make_counting_env: MakeEnv) -> None:
    env = GymnasiumVectorEnv(
        SyncVectorEnv([lambda: ActionChunk(make_counting_env(), 2, 1.0)], autoreset_mode=AutoresetMode.SAME_STEP)
    )
    env.reset()
    with pytest.raises(InputError, match="ActionChunk does not work in a"):
        env.step(np.zeros((1, 2), np.int64))
