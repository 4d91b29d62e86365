"""One environment and its row: episodes are counted, ended ones reset, and faults named."""

from collections.abc import Callable

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from deft.envs.layout import EnvArrays, ObservationLayout
from deft.envs.slot import EnvSlot, check_same_spaces
from deft.errors import InputError, RunError

MakeEnv = Callable[..., gymnasium.Env]


def make_slot(env: gymnasium.Env, index: int = 1, num_terms: int = 0) -> tuple[EnvSlot, EnvArrays]:
    layout = ObservationLayout(env.observation_space)
    return EnvSlot(env, index, layout), EnvArrays.allocate(layout, 3, num_terms)


def test_only_its_own_row_is_written(make_counting_env: MakeEnv) -> None:
    slot, arrays = make_slot(make_counting_env(length=2))
    step = arrays.steps[0]
    slot.reset(5, step)
    assert slot.step(0, step, arrays.final) is None
    episode = slot.step(0, step, arrays.final)
    assert (episode.env_index, episode.length, episode.episode_return, episode.success) == (1, 2, 3.0, True)
    assert episode.terms == {"time": 3.0, "one": 2.0}
    assert arrays.final[1, :2].tolist() == [0, 2]  # the last observation of episode 0
    assert step.observation[1, :2].tolist() == [1, 0]  # the first of episode 1
    assert step.terminated.tolist() == [False, True, False]
    assert not step.observation[[0, 2]].any()
    assert not arrays.final[[0, 2]].any()


def test_a_state_continues_in_another_slot(make_counting_env: MakeEnv) -> None:
    slot, arrays = make_slot(make_counting_env())
    slot.reset(5, arrays.steps[0])
    slot.step(0, arrays.steps[0], arrays.final)
    other, other_arrays = make_slot(make_counting_env())
    other.reset(9, other_arrays.steps[0])
    other.set_state(slot.get_state(arrays.steps[0]), other_arrays.steps[0])
    np.testing.assert_array_equal(other_arrays.steps[0].observation, arrays.steps[0].observation)
    for _ in range(2):
        assert other.step(1, other_arrays.steps[0], other_arrays.final) == slot.step(1, arrays.steps[0], arrays.final)


def test_the_episode_of_a_failed_reset_is_kept(make_counting_env: MakeEnv) -> None:
    env = make_counting_env(length=1)
    slot, arrays = make_slot(env)
    slot.reset(0, arrays.steps[0])
    env.reset = lambda **_: (_ for _ in ()).throw(ValueError("jammed"))  # type: ignore[method-assign]
    with pytest.raises(RunError, match=r"environment 1 \(CountingEnv\), reset\(\) raised ValueError: jammed"):
        slot.step(0, arrays.steps[0], arrays.final)
    assert slot.finished.length == 1


def test_different_spaces_are_rejected(make_counting_env: MakeEnv) -> None:
    other = make_counting_env(action_space=spaces.Discrete(3))
    check_same_spaces([make_counting_env(), make_counting_env()])
    with pytest.raises(
        InputError, match=r"environment 5 has action_space Discrete.3., but environment 4 has Discrete.2."
    ):
        check_same_spaces([make_counting_env(), other], 4)
