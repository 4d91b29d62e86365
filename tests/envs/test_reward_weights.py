"""A reward that is the weighted sum of its terms: in one environment, in chunks, and in vector environments."""

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from deft.config.settings import EnvConfig
from deft.envs import Episode, SerialVectorEnv, make_vector_env
from deft.envs.adapters.gymnasium_vector import GymnasiumVectorEnv
from deft.envs.make import make_another
from deft.envs.reach import ReachEnv
from deft.envs.wrappers import RewardWeights, weigh
from deft.errors import InputError, RunError

MakeEnv = Callable[..., gymnasium.Env]
WEIGHTS = {"time": 10.0}  # the counting environment's terms are time = t and one = 1: reward 10 t + 1


class Silent(gymnasium.Env):
    """Reports no terms."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return np.zeros(1, np.float32), 1.0, False, False, {}


def test_reward_and_return_are_weighted_and_terms_are_not(make_counting_env: MakeEnv) -> None:
    env = SerialVectorEnv([RewardWeights(make_counting_env(length=2), WEIGHTS)])
    env.reset(seed=0)
    assert env.step(np.zeros(1, np.int64)).reward.tolist() == [11.0]  # 10 · 1 + 1
    step = env.step(np.zeros(1, np.int64))
    assert step.reward.tolist() == [21.0]  # 10 · 2 + 1
    assert step.episodes == [Episode(0, 32.0, 2, True, {"time": 3.0, "one": 2.0})]


def test_weights_come_before_the_discount_of_a_chunk() -> None:
    config = EnvConfig(id="reach", num_envs=2, reward_weights={"distance": 3.0, "control": 0.0})
    plain = make_vector_env(config)
    chunked = make_vector_env(config, chunk_length=2, gamma=0.5)
    actions = np.full((2, 2), 0.5, np.float32)
    plain.reset(seed=3), chunked.reset(seed=3)
    first, second = plain.step(actions), plain.step(actions)
    both = chunked.step(np.stack([actions, actions], axis=1))
    assert not len(second.done_index)
    assert both.reward == pytest.approx(first.reward + 0.5 * second.reward)
    assert both.reward_terms == pytest.approx(first.reward_terms + second.reward_terms)  # not discounted, no weights
    columns = dict(zip(plain.reward_terms, first.reward_terms.T, strict=True))
    assert first.reward == pytest.approx(columns["success"] + 3 * columns["distance"] + columns["wrong_target"])


def test_a_batched_environment_gives_what_single_ones_give(make_counting_env: MakeEnv) -> None:
    class Naming(gymnasium.ObservationWrapper):
        reward_terms = ("one", "time")

        def observation(self, observation: np.ndarray) -> np.ndarray:
            return observation.copy()

    functions = [lambda: Naming(make_counting_env(length=2)), lambda: Naming(make_counting_env(length=3))]
    single = SerialVectorEnv([RewardWeights(function(), WEIGHTS) for function in functions])
    batched = weigh(SyncVectorEnv(functions, autoreset_mode=AutoresetMode.SAME_STEP), WEIGHTS)
    assert isinstance(batched, GymnasiumVectorEnv)
    assert batched.reward_terms == single.reward_terms == ("one", "time")
    assert batched.reset([5, 1]).tolist() == single.reset([5, 1]).tolist()
    for _ in range(7):
        expected, found = single.step(np.zeros(2, np.int64)), batched.step(np.zeros(2, np.int64))
        assert found.reward.tolist() == expected.reward.tolist()
        assert found.reward.dtype == np.float32
        assert found.reward_terms.tolist() == expected.reward_terms.tolist()
        assert found.episodes == expected.episodes
    assert batched.call("add", 5) == single.call("add", 5)
    assert batched.observation.tolist() == single.observation.tolist()
    batched.close()


def test_unknown_terms_are_refused_with_the_known_ones(make_counting_env: MakeEnv) -> None:
    with pytest.raises(InputError, match=r"no reward term 'speed'; the terms are success, distance, control, wrong_"):
        make_vector_env(EnvConfig(id="reach", reward_weights={"speed": 1.0}))
    undeclared = RewardWeights(make_counting_env(), {"speed": 1.0})  # names are known from the first step on
    undeclared.reset()
    with pytest.raises(InputError, match=r"no reward term 'speed'; the terms are time, one$"):
        undeclared.step(0)


def test_an_environment_without_terms_is_rejected() -> None:
    env = RewardWeights(Silent(), WEIGHTS)
    env.reset()
    with pytest.raises(InputError, match=r"Silent.* reports no reward terms"):
        env.step(0)
    with pytest.raises(InputError, match="SerialVectorEnv declares no reward terms"):
        weigh(SerialVectorEnv([Silent()]), WEIGHTS)


def test_without_weights_nothing_is_wrapped() -> None:
    env = Silent()
    assert weigh(env, {}) is env
    vector = SerialVectorEnv([ReachEnv()])
    assert weigh(vector, {"control": 2.0}) is vector
    assert vector.reward_weights.tolist() == [1.0, 1.0, 2.0, 1.0]
    assert weigh(vector, {}).reward_weights is None  # weights of an earlier trainer are removed
    assert [type(item) for item in weigh([env], WEIGHTS)] == [RewardWeights]


def test_a_copy_for_evaluation_has_the_weights_too() -> None:
    env = weigh(gymnasium.make("deft/Reach-v0"), {"control": -100.0})
    other = make_another(env)
    env.reset(seed=0), other.reset(seed=0)
    action = np.ones(2, np.float32)
    reward = env.step(action)[1]
    assert reward == other.step(action)[1] > 0.9  # −100 · (−0.005 · 2) = 1, and a little progress


def test_resumed_state_has_the_new_weights(make_counting_env: MakeEnv) -> None:
    saved = SerialVectorEnv([RewardWeights(make_counting_env(length=9), WEIGHTS)])
    saved.reset(seed=0)
    saved.step(np.zeros(1, np.int64))
    other = SerialVectorEnv([RewardWeights(make_counting_env(length=9), {"time": 0.0})])
    other.set_state(saved.get_state())
    assert other.step(np.zeros(1, np.int64)).reward.tolist() == [1.0]


def test_declared_terms_must_come(make_counting_env: MakeEnv) -> None:
    class Promising(Silent):
        reward_terms = ("a",)

    env = SerialVectorEnv([Promising()])
    env.reset()
    with pytest.raises(RunError, match='declares reward_terms, but the info of a step has no "reward_terms"'):
        env.step(np.zeros(1, np.int64))
