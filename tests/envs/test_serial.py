"""The contract of a step: auto-reset, true last observations, episodes, double buffers."""

from collections.abc import Callable

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from deft.config.settings import EnvConfig
from deft.envs import Episode, SerialVectorEnv, make_env
from deft.envs.layout import EnvArrays, ObservationLayout
from deft.envs.serial import EnvSlot, check_same_spaces
from deft.errors import InputError, RunError

MakeEnv = Callable[..., gymnasium.Env]


@pytest.mark.parametrize("ends", ["terminated", "truncated"])
def test_final_observation_is_the_one_before_the_reset(make_counting_env: MakeEnv, ends: str) -> None:
    # Lengths 2 and 3; the environment overwrites its own array in reset, which must not reach final_observation.
    env = SerialVectorEnv([make_counting_env(length=2, ends=ends), make_counting_env(length=3, ends=ends)])
    first = env.reset(seed=0)
    offsets = first[:, 2].copy()
    actions = np.zeros(2, np.int64)

    step = env.step(actions)
    assert step.observation[:, :2].tolist() == [[0, 1], [0, 1]]
    assert step.reward.tolist() == [1, 1]
    assert step.reward.dtype == np.float32
    assert step.num_steps.tolist() == [1, 1]
    assert step.done_index.tolist() == []
    assert step.final_observation is None
    assert step.episodes == []

    step = env.step(actions)
    assert step.observation[:, :2].tolist() == [[1, 0], [0, 2]]  # environment 0 has begun its second episode
    assert step.terminated.tolist() == [ends == "terminated", False]
    assert step.truncated.tolist() == [ends == "truncated", False]
    assert step.done_index.tolist() == [0]
    assert step.final_observation.tolist() == [[0, 2, offsets[0]]]
    # return 1 + 2; one = 1 + 1; success: the episode number 0 is even
    assert step.episodes == [Episode(0, 3.0, 2, True, {"time": 3.0, "one": 2.0})]

    step = env.step(actions)
    assert step.done_index.tolist() == [1]
    assert step.final_observation.tolist() == [[0, 3, offsets[1]]]
    assert step.episodes == [Episode(1, 6.0, 3, True, {"time": 6.0, "one": 3.0})]

    step = env.step(actions)
    assert step.done_index.tolist() == [0]
    assert step.episodes == [Episode(0, 3.0, 2, False, {"time": 3.0, "one": 2.0})]  # counted anew


def test_suspended_environments_are_not_stepped_until_the_next_reset(make_counting_env: MakeEnv) -> None:
    env = SerialVectorEnv([make_counting_env(length=3) for _ in range(3)])
    env.reset(seed=0)
    actions = np.zeros(3, np.int64)
    env.step(actions)
    env.suspend([1])
    for time in (2, 0, 1):  # the third step ends the episodes of the others
        step = env.step(actions)
        assert step.observation[:, 1].tolist() == [time, 1, time]
        assert step.reward[1] == 0.0
        assert [step.terminated[1], step.truncated[1]] == [False, False]
        assert 1 not in step.done_index
    assert [len(received) for received in env.call("get_received")] == [4, 1, 4]
    env.reset(seed=0)
    assert env.step(actions).observation[:, 1].tolist() == [1, 1, 1]


def test_all_done_at_once_ascend(make_counting_env: MakeEnv) -> None:
    env = SerialVectorEnv([make_counting_env(length=1) for _ in range(3)])
    env.reset(seed=0)
    step = env.step(np.zeros(3, np.int64))
    assert step.done_index.tolist() == [0, 1, 2]
    assert step.done_index.dtype == np.int64
    assert [episode.env_index for episode in step.episodes] == [0, 1, 2]
    assert step.final_observation[:, 1].tolist() == [1, 1, 1]


def test_arrays_stay_valid_until_the_call_after_next(make_counting_env: MakeEnv) -> None:
    env = SerialVectorEnv([make_counting_env(length=10)])
    env.reset(seed=0)
    actions = np.zeros(1, np.int64)
    one = env.step(actions)
    two = env.step(actions)
    assert one.observation[0, 1] == 1
    assert one.reward[0] == 1
    assert two.observation[0, 1] == 2
    assert env.observation is two.observation


def test_environment_i_gets_seed_plus_i(make_counting_env: MakeEnv) -> None:
    together = SerialVectorEnv([make_counting_env() for _ in range(3)]).reset(seed=7)
    for index in range(3):
        alone = SerialVectorEnv([make_counting_env()]).reset(seed=7 + index)
        assert together[index].tolist() == alone[0].tolist()
    assert len(set(together[:, 2])) == 3


def test_same_as_stepping_gymnasium_by_hand() -> None:
    env = SerialVectorEnv([make_env(EnvConfig(id="CartPole-v1", max_episode_steps=15))])
    plain = gymnasium.make("CartPole-v1", max_episode_steps=15)
    expected, _ = plain.reset(seed=3)
    assert env.reset(seed=3)[0].tolist() == expected.tolist()
    rng = np.random.default_rng(0)
    num_terminated = num_truncated = 0
    for _ in range(300):
        action = int(rng.integers(2))
        expected, _, terminated, truncated, _ = plain.step(action)
        step = env.step(np.array([action]))
        assert (step.terminated[0], step.truncated[0]) == (terminated, truncated)
        if terminated or truncated:
            num_terminated += terminated
            num_truncated += truncated
            assert step.final_observation[0].tolist() == expected.tolist()
            expected, _ = plain.reset()
        assert step.observation[0].tolist() == expected.tolist()
    assert num_terminated > 0
    assert num_truncated > 0


def test_actions_reach_the_environment_clipped_and_are_not_overwritten(make_counting_env: MakeEnv) -> None:
    env = SerialVectorEnv([make_counting_env(action_space=spaces.Box(-1, 1, (2,)))])
    env.reset()
    env.step(np.array([[5.0, 0.25]]))
    env.step(np.array([[-5.0, 0.5]]))
    received = env.call("get_received")[0]
    assert [action.tolist() for action in received] == [[1, 0.25], [-1, 0.5]]


def test_call_reaches_every_environment(make_counting_env: MakeEnv) -> None:
    env = SerialVectorEnv([make_counting_env(), gymnasium.wrappers.TimeLimit(make_counting_env(), 5)])
    env.reset()
    env.step(np.zeros(2, np.int64))
    assert env.call("add", 10) == [11, 11]
    with pytest.raises(InputError, match="no method 'fly'"):
        env.call("fly")


def test_action_mask_comes_from_the_environment(make_counting_env: MakeEnv) -> None:
    env = make_counting_env()
    env.action_mask = [True, False]
    vector = SerialVectorEnv([gymnasium.wrappers.TimeLimit(env, 5)])
    assert vector.action_mask.tolist() == [True, False]
    assert vector.action_mask.dtype == bool
    assert SerialVectorEnv([make_counting_env()]).action_mask is None


def test_wrong_use_is_rejected(make_counting_env: MakeEnv) -> None:
    with pytest.raises(InputError, match="at least one"):
        SerialVectorEnv([])
    env = make_counting_env()
    with pytest.raises(InputError, match="given twice"):
        SerialVectorEnv([env, env])
    with pytest.raises(InputError, match="environment 1 has action_space"):
        SerialVectorEnv([env, make_counting_env(action_space=spaces.Discrete(3))])
    with pytest.raises(InputError, match="before reset"):
        SerialVectorEnv([env]).step(np.zeros(1, np.int64))


def test_observation_outside_its_space_is_refused_at_the_first_reset(make_counting_env: MakeEnv) -> None:
    env = make_counting_env()
    env.observation_space = spaces.Box(-1, 1, (4,))  # the environment gives (3,)
    with pytest.raises(InputError, match=r"environment 0 \(CountingEnv\): the observation is float64 \(3,\)"):
        SerialVectorEnv([env]).reset()


def test_exception_of_an_environment_names_it(make_counting_env: MakeEnv) -> None:
    class Failing(gymnasium.Wrapper):
        def step(self, action):
            raise ValueError("joint 3\nis broken")

    env = SerialVectorEnv([make_counting_env(), Failing(make_counting_env())])
    env.reset()
    with pytest.raises(RunError, match=r"environment 1 \(CountingEnv\) raised ValueError: joint 3 is broken"):
        env.step(np.zeros(2, np.int64))


def test_state_goes_on_with_the_same_bits(make_counting_env: MakeEnv) -> None:
    config = EnvConfig(id="CartPole-v1", max_episode_steps=30)
    rng = np.random.default_rng(0)
    actions = rng.integers(2, size=(200, 2))
    env = SerialVectorEnv([make_env(config) for _ in range(2)])
    env.reset(seed=1)
    for row in actions[:25]:
        env.step(row)
    states, observation = env.get_state(), env.observation.copy()
    other = SerialVectorEnv([make_env(config) for _ in range(2)])
    other.set_state(states)
    assert other.observation.tobytes() == observation.tobytes()
    for row in actions[25:]:
        expected, found = env.step(row), other.step(row)
        assert found.observation.tobytes() == expected.observation.tobytes()
        assert found.episodes == expected.episodes  # the running episode's return and length continued too
    with pytest.raises(InputError, match="2 saved environment states do not fit 1"):
        SerialVectorEnv([make_env(config)]).set_state(states)


def test_obstacle_names_the_environment(make_counting_env: MakeEnv) -> None:
    env = make_counting_env()
    env.world = object()
    vector = SerialVectorEnv([make_counting_env(), env])
    vector.reset()
    assert vector.get_state() is None
    assert vector.state_obstacle().startswith("environment 1 (CountingEnv): attribute 'world'")


def test_render_and_close(make_counting_env: MakeEnv) -> None:
    env = SerialVectorEnv([make_counting_env()])
    env.reset()
    assert env.render() is None
    env.close()
    env.close()


# One environment and its row: episodes are counted, ended ones reset, and faults named.


def make_slot(env: gymnasium.Env, index: int = 1, num_terms: int = 0) -> tuple[EnvSlot, EnvArrays]:
    layout = ObservationLayout(env.observation_space)
    return EnvSlot(env, index, index, layout), EnvArrays.allocate(layout, 3, num_terms)


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


def test_measures_are_those_of_the_last_step(make_counting_env: MakeEnv) -> None:
    class Measured(gymnasium.Wrapper):
        count = 0

        def step(self, action):
            *result, info = self.env.step(action)
            self.count += 1
            return *result, {**info, "measures": {"count": np.int64(self.count)}}

    slot, arrays = make_slot(Measured(make_counting_env(length=2)))
    slot.reset(5, arrays.steps[0])
    episodes = [slot.step(0, arrays.steps[0], arrays.final) for _ in range(4)]
    assert [episode and episode.measures for episode in episodes] == [None, {"count": 2.0}, None, {"count": 4.0}]


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
