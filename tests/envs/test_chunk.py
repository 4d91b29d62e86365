"""Action chunks: discounting, ends of episodes, and what the bookkeeping sees."""

from collections.abc import Callable

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from deft.envs import ActionChunk, Episode, SerialVectorEnv
from deft.errors import InputError

MakeEnv = Callable[..., gymnasium.Env]


def test_spaces() -> None:
    pendulum = ActionChunk(gymnasium.make("Pendulum-v1"), 4, 0.9)
    assert pendulum.action_space == spaces.Box(-2, 2, (4, 1))
    assert pendulum.chunk_length == 4


def test_discrete_chunk_counts_from_the_start_of_its_space(make_counting_env: MakeEnv) -> None:
    env = ActionChunk(make_counting_env(length=9, action_space=spaces.Discrete(3, start=1)), 2, 1.0)
    assert env.action_space == spaces.MultiDiscrete([3, 3], start=[1, 1])
    vector = SerialVectorEnv([env])
    assert vector.action_space == spaces.MultiDiscrete([3, 3])
    vector.reset()
    vector.step(np.array([[0, 2]]))
    received = vector.call("get_received")[0]
    assert received == [1, 3]
    assert type(received[0]) is int


def test_reward_is_discounted_and_the_return_is_not(make_counting_env: MakeEnv) -> None:
    # Rewards are 1, 2, 3, 4, 5 and the episode ends there: a chunk of 3 takes three steps, the next takes two.
    vector = SerialVectorEnv([ActionChunk(make_counting_env(length=5, ends="truncated"), 3, 0.5)])
    assert vector.chunk_length == 3
    vector.reset(seed=0)
    actions = np.zeros((1, 3), np.int64)

    step = vector.step(actions)
    assert step.reward.tolist() == [1 + 0.5 * 2 + 0.25 * 3]
    assert step.num_steps.tolist() == [3]
    assert step.observation[0, :2].tolist() == [0, 3]

    step = vector.step(actions)
    assert step.reward.tolist() == [4 + 0.5 * 5]
    assert step.num_steps.tolist() == [2]
    assert step.truncated.tolist() == [True]
    assert step.final_observation[0, :2].tolist() == [0, 5]
    assert step.observation[0, :2].tolist() == [1, 0]  # the rest of the chunk is not executed in the next episode
    assert step.episodes == [Episode(0, 15.0, 5, True, {"time": 15.0, "one": 5.0})]


def test_box_rows_are_executed_in_order(make_counting_env: MakeEnv) -> None:
    vector = SerialVectorEnv([ActionChunk(make_counting_env(length=9, action_space=spaces.Box(-1, 1, (1,))), 2, 1.0)])
    vector.reset()
    vector.step(np.array([[[0.5], [-7.0]]]))
    assert [action.tolist() for action in vector.call("get_received")[0]] == [[0.5], [-1.0]]


class Watched(gymnasium.Env):
    """Counts how often it looks at its world; an episode has five steps."""

    observation_space = spaces.Box(0, 9, (1,))
    action_space = spaces.Box(-1, 1, (1,))

    def __init__(self) -> None:
        self.observes = True
        self.looks, self.time = 0, 0

    def observe(self) -> np.ndarray:
        self.looks += 1
        return np.array([self.time], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.observe(), {}

    def step(self, action):
        self.time += 1
        return self.observe() if self.observes else None, 1.0, self.time == 5, False, {}


def test_the_world_is_looked_at_where_a_chunk_ends() -> None:
    env = Watched()
    vector = SerialVectorEnv([ActionChunk(gymnasium.wrappers.TimeLimit(env, 100), 3, 1.0)])
    vector.reset(seed=0)
    assert env.looks == 1
    actions = np.zeros((1, 3, 1), np.float32)
    assert vector.step(actions).observation.tolist() == [[3.0]]
    assert env.looks == 2
    step = vector.step(actions)  # ends after two of its steps: the final observation, and that of the new episode
    assert step.final_observation.tolist() == [[5.0]]
    assert step.observation.tolist() == [[0.0]]
    assert env.looks == 4
    assert env.observes  # for whoever steps it himself


def test_a_wrapper_that_may_read_observations_sees_every_one() -> None:
    env = Watched()
    seen = gymnasium.wrappers.TransformObservation(env, lambda observation: observation + 1, env.observation_space)
    chunk = ActionChunk(seen, 3, 1.0)
    chunk.reset()
    assert chunk.step(np.zeros((3, 1)))[0].tolist() == [4.0]
    assert env.looks == 4


def test_what_cannot_be_chunked_is_rejected(make_counting_env: MakeEnv) -> None:
    with pytest.raises(InputError, match="Box or Discrete"):
        ActionChunk(make_counting_env(action_space=spaces.MultiBinary(2)), 2, 1.0)
    with pytest.raises(InputError, match="at least 1"):
        ActionChunk(make_counting_env(), 0, 1.0)
