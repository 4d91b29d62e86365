"""Saved states continue bit for bit in a new environment, or the error names the obstacle."""

import io
import threading
from collections import deque
from typing import Any

import gymnasium
import mujoco
import numpy as np
import pytest
import torch
from gymnasium import spaces

from deft.config.settings import EnvConfig
from deft.envs import make_env
from deft.envs.state import StateObstacle, decode, encode, restore_state, save_state, state_obstacle
from deft.errors import InputError, RunError


def through_a_checkpoint(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def roll(env: gymnasium.Env, actions: list) -> list[tuple]:
    """What an environment gives for these actions, across resets."""
    record = []
    for action in actions:
        observation, reward, terminated, truncated, _ = env.step(action)
        record.append((np.asarray(observation).tobytes(), float(reward), terminated, truncated))
        if terminated or truncated:
            record.append((np.asarray(env.reset()[0]).tobytes(),))
    return record


@pytest.mark.parametrize(
    "env_id",
    [
        "CartPole-v1",
        "Pendulum-v1",
        "MountainCar-v0",
        "HalfCheetah-v5",
        "Hopper-v5",
        "Ant-v5",  # its reward compares body positions before and after a step, which mj_forward would change
        "FrozenLake-v1",
        "Taxi-v4",
    ],
)
def test_goes_on_bit_for_bit(env_id: str) -> None:
    config = EnvConfig(id=env_id, max_episode_steps=70)
    env = make_env(config)
    env.reset(seed=3)
    env.action_space.seed(1)
    actions = [env.action_space.sample() for _ in range(400)]
    roll(env, actions[:100])  # in the middle of an episode, and of its time limit
    assert state_obstacle(env) is None
    state = through_a_checkpoint(save_state(env))
    expected = roll(env, actions[100:])
    assert sum(len(row) == 1 for row in expected) >= 4  # the comparison crosses resets
    fresh = make_env(config)
    restore_state(fresh, state)
    assert roll(fresh, actions[100:]) == expected


def test_values_survive() -> None:
    shared = [1, 2]
    value = {
        "plain": [None, True, 1, -2.5, "text", b"bytes\xff", b"", (1, (2, 3))],
        "wide": 2**100,
        3: np.float32(0.1),
        "array": np.array([[1.5, np.nan]]),
        "flags": np.array([True, False]),
        "empty": np.zeros((0, 3)),
        "names": np.array(["a", "bc"]),
        "window": deque([1, 2, 3], maxlen=3),
        "set": {3, 1},
        "shared": (shared, shared),
    }
    found = decode(through_a_checkpoint(encode(value)))
    assert found["plain"] == value["plain"]
    assert type(found["plain"][1]) is bool
    assert found["wide"] == 2**100
    assert found[3] == np.float32(0.1)
    assert type(found[3]) is np.float32
    assert found["array"].tobytes() == value["array"].tobytes()
    assert found["array"].shape == (1, 2)
    assert found["array"].flags.writeable
    assert found["flags"].tolist() == [True, False]
    assert found["empty"].shape == (0, 3)
    assert found["names"].tolist() == ["a", "bc"]
    assert found["window"] == value["window"]
    assert found["window"].maxlen == 3
    assert found["set"] == {1, 3}
    assert found["shared"][0] is found["shared"][1]


class TinyEnv(gymnasium.Env):
    """An environment to hang attributes on."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, 1, (2,))
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        return self.observation_space.sample(), float(self.np_random.random()), False, False, {}


def test_generators_of_spaces_go_on_too() -> None:
    env = TinyEnv()
    env.reset(seed=0)
    env.observation_space.seed(4)
    state = save_state(env)
    expected = roll(env, [0, 0])
    fresh = TinyEnv()
    restore_state(fresh, state)
    assert roll(fresh, [0, 0]) == expected


def test_generator_that_something_else_holds_stays_the_same_object() -> None:
    class Holding(TinyEnv):
        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
            result = super().reset(seed=seed)
            self.draw = self.np_random.random  # a function that draws from the generator
            return result

    env, fresh = Holding(), Holding()
    env.reset(seed=5)
    restore_state(fresh, save_state(env))
    assert fresh.draw() == env.draw()
    assert fresh.np_random.random() == env.np_random.random()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (object(), "builtins.object"),
        (threading.Lock(), "_thread.lock"),
        ([1, {"deep": object()}], "builtins.object"),
        (np.array([object()]), "numpy.ndarray"),
        (np.frombuffer(bytearray(8)), "memory that a memoryview owns"),
        (mujoco.MjData(mujoco.MjModel.from_xml_string("<mujoco/>")).xpos, "memory that a PyCapsule owns"),
    ],
)
def test_obstacle_names_layer_and_attribute(value: Any, reason: str) -> None:
    env = TinyEnv()
    env.world = value
    wrapped = gymnasium.wrappers.TimeLimit(env, 5)
    wrapped.reset(seed=0)
    obstacle = state_obstacle(wrapped)
    assert obstacle is not None
    assert obstacle.startswith("attribute 'world' of TinyEnv holds a")
    assert reason in obstacle
    assert "get_state() and set_state(state)" in obstacle
    assert "\n" not in obstacle
    with pytest.raises(StateObstacle):
        save_state(wrapped)


def test_array_that_shares_memory_is_an_obstacle() -> None:
    env = TinyEnv()
    env.positions = np.zeros((2, 3))
    env.target = env.positions[1]
    env.reset(seed=0)
    assert "shares its memory" in state_obstacle(env)


def test_what_is_no_state_is_no_obstacle() -> None:
    env = TinyEnv()
    env.reward_function = lambda: 0
    env.module = np
    env.kind = TinyEnv
    env.handlers = [print, len]
    env.reset(seed=0)
    assert state_obstacle(env) is None


class OwnState(TinyEnv):
    """Saves an object that nobody else could."""

    def __init__(self) -> None:
        super().__init__()
        self.world = threading.local()
        self.world.height = 0

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.world.height += 1
        return np.zeros(2, np.float32), self.world.height + float(self.np_random.random()), False, False, {}

    def get_state(self) -> dict[str, int]:
        return {"height": self.world.height}

    def set_state(self, state: dict[str, int]) -> None:
        self.world.height = state["height"]


def test_own_get_state_is_used_and_the_layers_around_it_saved() -> None:
    env = gymnasium.wrappers.TimeLimit(OwnState(), 5)
    env.reset(seed=0)
    roll(env, [0, 0])
    state = through_a_checkpoint(save_state(env))
    expected = roll(env, [0, 0, 0])
    fresh = gymnasium.wrappers.TimeLimit(OwnState(), 5)
    restore_state(fresh, state)
    assert roll(fresh, [0, 0, 0]) == expected
    assert expected[2][3] is True  # truncated: 2 steps before, 3 after


def test_state_of_another_environment_is_rejected() -> None:
    env = make_env(EnvConfig(id="CartPole-v1"))
    env.reset()
    with pytest.raises(InputError, match="saved state is of TimeLimit<CartPoleEnv, the environment is TinyEnv"):
        restore_state(TinyEnv(), save_state(env))


def test_changed_mujoco_model_is_not_passed_over() -> None:
    env = make_env(EnvConfig(id="Hopper-v5"))
    env.reset(seed=0)
    env.unwrapped.model.opt.gravity[2] = -1.0
    state = save_state(env)
    with pytest.raises(RunError, match="changes its MuJoCo model"):
        restore_state(make_env(EnvConfig(id="Hopper-v5")), state)
