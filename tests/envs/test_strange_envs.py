"""Environments that break the contract end a run in one line that names what is wrong, never in silence."""

import logging
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from deft.cli import main
from deft.envs.adapters.gymnasium_vector import GymnasiumVectorEnv
from deft.envs.layout import ActionLayout, ObservationLayout
from deft.envs.process import ProcessVectorEnv
from deft.envs.serial import SerialVectorEnv
from deft.errors import InputError, RunError
from deft.models.encoders import ObservationEncoder


class Strange(gymnasium.Env):
    """One step returns a given value; `leaves` instead of returning."""

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
        ({"reward": "1.0"}, "returned the reward '1.0'; it must be one number"),
        ({"reward": b"1"}, "it must be one number"),
        ({"terminated": "False"}, "returned terminated = 'False'; it must be True or False"),
        ({"truncated": None}, "returned truncated = None"),
        ({"truncated": 0.5}, "returned truncated = 0.5"),
        ({"info": []}, r"returned the info \[\]; it must be a dict"),
        ({"info": 7}, "returned the info 7"),
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


class LeavesIn(gymnasium.Env):
    """Episodes of 2 steps; the method `where` leaves as `how` says: calls sys.exit(how), or raises it."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, where="", how=0, render_mode=None):
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
        self.where, self.how, self.render_mode, self.count = where, how, render_mode, 0

    def leave(self, where):
        if where == self.where:
            raise self.how if isinstance(self.how, BaseException) else SystemExit(self.how)

    def reset(self, *, seed=None, options=None):
        self.count = 0
        self.leave("reset")
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.count += 1
        return np.zeros(2, np.float32), 1.0, self.count == 2, False, {}

    def render(self):
        self.leave("render")
        return np.zeros((32, 32, 3), np.uint8)

    def close(self):
        self.leave("close")


gymnasium.register("strange/LeavesIn-v0", LeavesIn)
WAYS = [(0, "SystemExit: 0"), ("bye", "SystemExit: bye"), (Abandoned("gone"), "Abandoned: gone")]


@pytest.mark.parametrize(("how", "words"), WAYS)
@pytest.mark.parametrize("where", ["reset", "render"])
def test_leaving_in_any_method_is_an_error_that_names_the_environment(where, how, words):
    env = SerialVectorEnv([LeavesIn(where, how, "rgb_array")])
    with pytest.raises(RunError, match=rf"environment 0 \(LeavesIn\).*{words}"):
        (env.reset if where == "reset" else env.render)()


@pytest.mark.parametrize(("how", "words"), WAYS)
def test_leaving_in_close_is_a_warning_that_names_the_environment(how, words, caplog):
    with caplog.at_level(logging.WARNING):
        SerialVectorEnv([LeavesIn("close", how)]).close()
        vector = gymnasium.vector.SyncVectorEnv(
            [lambda: LeavesIn("close", how)], autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP
        )
        GymnasiumVectorEnv(vector).close()
    first, second = caplog.messages
    assert first == f"environment 0 (LeavesIn), close() raised {words}; the results so far are kept"
    assert second == f"the vector environment, close() raised {words}; the results so far are kept"


@pytest.mark.parametrize("how", ["0", "bye"])
def test_results_survive_a_close_that_leaves(tmp_path, monkeypatch, capsys, how):
    monkeypatch.chdir(tmp_path)
    arguments = f"--policy random --env strange/LeavesIn-v0 --env-kwargs where=close how={how} --episodes 2"
    assert main(["collect", *arguments.split(), "--out", "data-v0"]) == 0
    assert "total_episodes: 2" in capsys.readouterr().out


def test_a_render_that_leaves_fails_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = "--policy random --env strange/LeavesIn-v0 --env-kwargs where=render --episodes 1 --video v.mp4"
    assert main(["play", *arguments.split()]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.splitlines()[-1].startswith("deft: environment 0 (strange/LeavesIn-v0)")
    assert not Path("v.mp4").exists()


@pytest.mark.parametrize("body", ["import sys; sys.exit(0)", "import sys; sys.exit('bye')", "raise BaseException"])
@pytest.mark.parametrize("given", ["--env {}:X-v0", "--env reach --env-kwargs observation=vla --model {}.X"])
def test_a_module_that_leaves_while_it_is_imported_is_named(tmp_path, monkeypatch, capsys, given, body):
    monkeypatch.chdir(tmp_path)
    module = f"leaves_{abs(hash((given, body)))}"  # one that this process has not imported
    Path(f"{module}.py").write_text(body)
    assert main(["train", "ppo", *given.format(module).split(), "--output-dir", "run"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert f"'{module}" in lines[0]


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
