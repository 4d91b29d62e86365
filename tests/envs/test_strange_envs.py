"""Environments that break the contract end a run in one line that names what is wrong, never in silence."""

import sys

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from deft.envs.process import ProcessVectorEnv
from deft.envs.serial import SerialVectorEnv
from deft.envs.vector import ActionLayout, ObservationLayout
from deft.errors import InputError, RunError
from deft.models.encoders import ObservationEncoder


class Strange(gymnasium.Env):
    """One step returns what it was told to; `leaves` instead of returning."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, reward=0.0, terminated=False, truncated=False, info=None, leaves=None, **_):
        self.answer = reward, terminated, truncated, {} if info is None else info
        self.leaves, self.actions = leaves, []

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.actions.append(action)
        if self.leaves is not None:
            raise self.leaves
        return np.zeros(2, np.float32), *self.answer


class Abandoned(BaseException):
    pass


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"reward": "1.0"}, "gave the reward '1.0'; it must be one number"),
        ({"reward": b"1"}, "it must be one number"),
        ({"terminated": "False"}, "gave terminated as 'False'; it must be True or False"),
        ({"truncated": None}, "gave truncated as None"),
        ({"truncated": 0.5}, "gave truncated as 0.5"),
        ({"info": []}, r"gave the info \[\]; it must be a dict"),
        ({"info": 7}, "gave the info 7"),
        ({"leaves": SystemExit(0)}, "raised SystemExit: 0"),
        ({"leaves": Abandoned("gone")}, "raised Abandoned: gone"),
    ],
)
def test_a_step_that_breaks_the_contract_is_named(arguments, words):
    env = SerialVectorEnv([Strange(**arguments)])
    env.reset(0)
    with pytest.raises(RunError, match=rf"environment 0 \(Strange\).* {words}"):
        env.step(np.zeros((1, 2)))


@pytest.mark.parametrize("flag", [np.bool_(False), 0, 1, np.array(True), np.int64(0)])
def test_flags_of_other_types_are_taken(flag):
    env = SerialVectorEnv([Strange(terminated=flag)])
    env.reset(0)
    assert env.step(np.zeros((1, 2))).terminated.tolist() == [bool(flag)]


class Leaves(Strange):
    """Ends its process in every step."""

    def step(self, action):
        sys.exit(0)


def test_sys_exit_in_a_worker_process_is_named():
    env = ProcessVectorEnv([Leaves, Leaves], num_workers=1)
    try:
        env.reset(0)
        with pytest.raises(RunError, match="raised SystemExit: 0"):
            env.step(np.zeros((2, 2)))
    finally:
        env.close()


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (spaces.Box(-1, 1, ()), r"the observation has the shape \(\)"),
        (spaces.Box(-1, 1, (3, 0)), r"the observation has the shape \(3, 0\)"),
        (spaces.Dict({"": spaces.Box(-1, 1, (1,))}), "a stream named ''"),
        (spaces.Dict({"a//b": spaces.Box(-1, 1, (1,))}), "a stream named 'a//b'"),
        (spaces.Dict({7: spaces.Box(-1, 1, (1,))}), "a stream named 7"),
        (spaces.Dict({"text": spaces.Text(10**6)}), "observation 'text' is Text of up to 1,000,000 bytes"),
        # 10⁸ numbers of 4 bytes are 381 MiB
        (spaces.Dict({"big": spaces.Box(0, 1, (10**8,), np.float32)}), "one observation takes 381 MiB"),
    ],
)
def test_observation_spaces_that_cannot_be_used_are_named(space, words):
    with pytest.raises(InputError, match=words):
        ObservationLayout(space)


@pytest.mark.parametrize("space", [spaces.Box(-1, 1, ()), spaces.Box(-1, 1, (0,)), spaces.MultiDiscrete([])])
def test_action_spaces_without_a_number_are_named(space):
    with pytest.raises(InputError, match="hold no number"):
        ActionLayout(space)


# torch rejects dots in the names of modules, and names of attributes that a ModuleDict has: type, keys, training.
@pytest.mark.parametrize("names", [("a.b", "type"), ("..", "keys"), ("training", "a/b"), ("a\nb", "next")])
def test_streams_of_any_name_are_encoded_under_it(names):
    names = sorted(names)  # as Dict sorts them
    space = spaces.Dict({name: spaces.Box(-1, 1, (1,)) for name in names})
    encoder = ObservationEncoder(space, normalize=False)
    inputs = TensorDict({name: torch.full((1, 1), number / 4) for number, name in enumerate(names)}, [1])
    assert encoder(inputs).tolist() == [[0.0, 0.25]]
    assert sorted(encoder.state_dict()) == sorted(ObservationEncoder(space, normalize=False).state_dict())


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_actions_that_are_not_finite_reach_no_environment(bad):
    envs = [Strange(), Strange()]
    env = SerialVectorEnv(envs)
    env.reset(0)
    with pytest.raises(RunError, match="the policy's action for environment 1 is infinite or not a number"):
        env.step(np.array([[0.0, 0.0], [0.0, bad]], np.float32))
    assert [one.actions for one in envs] == [[], []]
