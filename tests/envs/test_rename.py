"""Streams of an environment under other names."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from deft.config.settings import EnvConfig
from deft.envs.make import make_vector_env, wrap
from deft.envs.wrappers import RenamedStreams, rename
from deft.errors import InputError
from deft.schema import renamed_streams


class Nested(gymnasium.Env):
    """An image with channels last among nested streams."""

    def __init__(self) -> None:
        cameras = spaces.Dict({"top": spaces.Box(0, 255, (8, 10, 3), np.uint8)})
        self.observation_space = spaces.Dict({"cameras": cameras, "state": spaces.Box(-9, 9, (1,), np.float32)})
        self.action_space = spaces.Discrete(2)
        self.t = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._observe(), {}

    def step(self, action):
        self.t += 1
        return self._observe(), 0.0, self.t == 3, False, {}

    def _observe(self):
        image = np.full((8, 10, 3), self.t, np.uint8)
        return {"cameras": {"top": image}, "state": np.array([self.t], np.float32)}


gymnasium.register(id="deft-tests/Nested-v0", entry_point=Nested)


@pytest.mark.parametrize("vector", ["sync", "process"])
def test_streams_have_the_given_names(vector):
    names = {"view": "cameras/top"}
    config = EnvConfig(id="deft-tests/Nested-v0", num_envs=2, vector=vector, num_workers=1, rename_streams=names)
    env = make_vector_env(config)
    try:
        assert {name: space.shape for name, space in env.observation_space.items()} == {
            "state": (1,),
            "view": (3, 8, 10),
        }
        env.reset(0)
        for t in (1, 2):
            observation = env.step(np.zeros(2, np.int64)).observation
            assert observation["state"].tolist() == [[t], [t]]
            assert (observation["view"] == t).all()
        assert (env.step(np.zeros(2, np.int64)).final_observation["view"] == 3).all()
    finally:
        env.close()


def test_a_renamed_environment_is_saved_and_restored():
    first, second = (wrap(rename(Nested(), {"view": "cameras/top"})) for _ in range(2))
    first.reset(0)
    first.step(np.zeros(1, np.int64))
    second.set_state(first.get_state())
    assert second.observation["state"].tolist() == [[1.0]]
    assert second.step(np.zeros(1, np.int64)).observation["state"].tolist() == [[2.0]]


def test_two_streams_may_swap_their_names():
    assert renamed_streams(["a", "b", "c"], {"a": "b", "b": "a"}, "here") == {"a": "b", "b": "a", "c": "c"}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"view": "top"}, r"has no stream 'top'; it has cameras/top, state: write NEW_NAME=STREAM"),
        ({"state": "cameras/top"}, "has another stream 'state' already; rename that one too"),
        ({"a": "state", "b": "state"}, "gives one stream two names"),
    ],
)
def test_names_that_cannot_be(names, message):
    with pytest.raises(InputError, match=message):
        RenamedStreams(Nested(), names)


def test_what_has_no_streams_cannot_be_renamed():
    with pytest.raises(InputError, match=r"CartPole.* has one unnamed observation, nothing to rename; leave it out"):
        rename(gymnasium.make("CartPole-v1"), {"state": "x"})
    with pytest.raises(InputError, match="cannot be renamed; pass a list"):
        rename(wrap(Nested()), {"view": "cameras/top"})
    with pytest.raises(InputError, match=r"not with env\.vector envpool"):
        make_vector_env(EnvConfig(id="CartPole-v1", vector="envpool", rename_streams={"a": "b"}))
