"""Environments of a suite run in worker processes of its interpreter, with the results of this process."""

import dataclasses
import os
import signal
import subprocess
import sys

import fake_suite
import numpy as np
import pytest

from deft.cli import main
from deft.config.settings import EnvConfig
from deft.envs import ActionChunk, SerialVectorEnv, make_env, make_vector_env, process
from deft.envs.build import build_env
from deft.envs.make import check_id
from deft.envs.suites import SUITES, find_suite, install, metaworld
from deft.errors import InputError, RunError

WORKER_MODULES = (
    "deft.envs.worker, deft.envs.build, deft.envs.suites.remote, deft.envs.suites.metaworld, "
    "deft.envs.suites.metaworld_images, deft.envs.suites.aloha, deft.envs.suites.gym_hil, deft.envs.suites.pusht, "
    "deft.envs.suites.libero"
)


def test_worker_modules_need_only_numpy_and_gymnasium():
    """The packages that Deft needs besides, and the suite's own, are not imported."""
    blocked = [
        "torch",
        "tensordict",
        "pydantic",
        "yaml",
        "rich",
        "tyro",
        "PIL",
        "mujoco",
        "imageio",
        "tensorboard",
        "metaworld",
    ]
    code = (
        "import sys, importlib.abc\n"
        "class Block(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name.split('.')[0] in {blocked}: raise ImportError(name)\n"
        f"sys.meta_path.insert(0, Block())\nimport {WORKER_MODULES}\n"
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_results_equal_those_of_this_process(installed):
    config = EnvConfig(id="fake/both", num_envs=3, num_workers=2)
    actions = np.linspace(-0.5, 1.0, 60).reshape(20, 3, 1).astype(np.float32)
    spec = dataclasses.replace(installed.spec("fake/both", 3), entry_point=fake_suite.CountingEnv)
    here = SerialVectorEnv([lambda: build_env(process_recipe(spec))] * 3)
    env = make_vector_env(config)
    try:
        assert set(env.call("where")) == {(str(install.python_of(installed)), False)}
        first, second = env.reset(7), here.reset(7)
        assert all(np.array_equal(first[name], second[name]) for name in second)
        ended = 0
        for action in actions:
            one, two = env.step(action), here.step(action)
            for name in two.observation:
                assert np.array_equal(one.observation[name], two.observation[name])
            assert np.array_equal(one.reward, two.reward)
            assert one.episodes == two.episodes
            ended += len(one.episodes)
        assert ended
    finally:
        env.close()


def process_recipe(spec):
    from deft.envs.build import EnvRecipe

    return EnvRecipe(spec)


def test_each_environment_plays_its_tasks_in_turn(installed):
    """Environment i of N starts with task (seed + i) mod T and continues N further: T = 2, N = 3 alternates."""
    env = make_vector_env(EnvConfig(id="fake/both", num_envs=3, num_workers=1))
    try:
        env.reset(0)
        played = {0: [], 1: [], 2: []}
        for _ in range(24):
            for episode in env.step(np.ones((3, 1), np.float32)).episodes:
                played[episode.env_index].append(episode.labels["task"])
    finally:
        env.close()
    assert played[0][:4] == ["near", "far", "near", "far"]
    assert played[1][:4] == ["far", "near", "far", "near"]
    assert played[2][:4] == ["near", "far", "near", "far"]


def test_a_worker_that_dies_is_restarted(installed, caplog):
    env = make_vector_env(EnvConfig(id="fake/near", num_envs=2, num_workers=2))
    try:
        env.reset(0)
        os.kill(env.worker_pids[1], signal.SIGKILL)
        step = env.step(np.zeros((2, 1), np.float32))
        assert step.lost_index.tolist() == [1]
        assert "killed by SIGKILL; 1 unfinished episode(s) lost; starting a new worker" in caplog.text
        assert not len(env.step(np.zeros((2, 1), np.float32)).lost_index)
    finally:
        env.close()


def test_another_version_of_the_protocol_is_rejected(installed, monkeypatch):
    monkeypatch.setattr(process, "PROTOCOL", 99)
    with pytest.raises(InputError, match="speaks version 2 of the worker protocol, its parent version 99"):
        make_vector_env(EnvConfig(id="fake/near"))


def test_a_damaged_interpreter_is_one_line(installed):
    """Without NumPy the worker cannot start."""
    next(install.folder_of(installed).glob("lib/python*/site-packages/packages.pth")).unlink()
    with pytest.raises(RunError, match=r"ended: exit status 1; deft suite install fake repairs a damaged installation"):
        make_vector_env(EnvConfig(id="fake/near"))


def test_one_environment_in_this_process(installed):
    env = make_env(EnvConfig(id="fake/far"), render_mode="rgb_array")
    try:
        assert env.observation_space.spaces.keys() == {"state", "instruction"}
        assert env.metadata["render_fps"] == 5
        assert env.render().tolist() == np.full((4, 4, 3), 7).tolist()
        observation, _ = env.reset(seed=3)
        assert observation["state"][0] == np.float32(0.3)
        assert env.instruction == "Go to 5"
        assert env.has_wrapper_attr("expert_action")
        assert not env.has_wrapper_attr("split")
        for _ in range(5):  # 0.3 + 5 ≥ 5
            observation, _, terminated, truncated, info = env.step(env.get_wrapper_attr("expert_action")())
        assert (terminated, truncated, info["success"]) == (True, False, True)
    finally:
        env.close()
    chunked = make_env(EnvConfig(id="fake/far"), chunk_length=2)
    assert isinstance(chunked, ActionChunk)
    chunked.close()


def test_the_spec_has_the_arguments_that_were_given_and_no_others(installed):
    """Datasets record the spec; task and stride come from the id and the number of environments."""
    env = make_env(EnvConfig(id="fake/far", kwargs={"reports": False}))
    assert env.spec.kwargs == {"reports": False}
    env.close()


def test_the_folder_of_further_files(installed, monkeypatch, tmp_path):
    suite = dataclasses.replace(installed, path_variable="FAKE_SUITE_PATH")
    monkeypatch.setattr(fake_suite, "SUITE", suite)
    monkeypatch.setenv("FAKE_SUITE_PATH", "/of/the/variable")
    monkeypatch.chdir(tmp_path)

    def found(**settings):
        env = make_env(EnvConfig(id="fake/far", **settings))
        try:
            return env.suite_path, env.spec.kwargs
        finally:
            env.close()

    assert found() == ("/of/the/variable", {})
    assert found(suite_path="scenes") == (str(tmp_path / "scenes"), {})  # the flag takes precedence
    monkeypatch.delenv("FAKE_SUITE_PATH")
    assert suite.spec("fake/far").kwargs == {"task": "far"}


@pytest.mark.parametrize(
    ("env_id", "complaint"),
    [
        ("fake/far", "suite_path scenes: the packages of fake are complete; leave it out"),
        ("reach", "suite_path scenes: reach is of no suite; leave it out"),
    ],
)
def test_a_folder_that_nothing_reads_is_an_error(env_id, complaint, installed):
    for make in (make_env, make_vector_env):
        with pytest.raises(InputError, match=complaint):
            make(EnvConfig(id=env_id, suite_path="scenes"))


@pytest.mark.parametrize(
    ("env_id", "complaint"),
    [
        ("fake/nearr", "fake has no task 'nearr'; the nearest are near"),
        ("fake/NEAR", "the nearest are near"),
        ("fake", "names no task; use for example fake/both"),
        ("metaworld/raech-v3", "the nearest are reach-v3"),
    ],
)
def test_a_wrong_task_is_one_line(env_id, complaint, fake):
    with pytest.raises(InputError, match=complaint):
        check_id(EnvConfig(id=env_id))


def test_a_suite_that_is_not_installed_is_one_line(fake, capsys):
    assert main(["evaluate", "--suite", "fake/near", "--policy", "expert"]) == 2
    assert capsys.readouterr().err == "deft: fake/near: the suite fake is not installed: deft suite install fake\n"
    assert main(["suite", "install", "fakee"]) == 2
    assert "there is no suite of this name; the suites are metaworld" in capsys.readouterr().err
    assert main(["suite", "instal", "fake"]) == 2
    assert "no such command" in capsys.readouterr().err


def test_a_vector_kind_that_cannot_run_a_suite(installed):
    with pytest.raises(InputError, match=r"env\.vector: warp does not run fake/near"):
        make_vector_env(EnvConfig(id="fake/near", vector="warp"))


def test_metaworld_is_described_without_being_installed():
    """The sizes of the groups are those of the benchmark; every instruction fits its stream."""
    sizes = {"MT10": 10, "MT25": 25, "MT50": 50, "easy": 28, "medium": 11, "hard": 6, "very-hard": 5}
    assert {name: len(tasks) for name, tasks in metaworld.GROUPS.items()} == sizes
    assert all(set(tasks) <= set(metaworld.TASKS) for tasks in metaworld.GROUPS.values())
    assert max(map(len, metaworld.TASKS.values())) <= metaworld.INSTRUCTION_LENGTH


@pytest.mark.parametrize("name", SUITES)
def test_lock_files_have_exact_versions(name):
    suite = find_suite(name)
    packages = install.locked_packages(suite)
    assert suite.package in packages
    assert {"numpy", "gymnasium", "cloudpickle"} <= packages.keys()
    assert all(version[0].isdigit() and "*" not in version for version in packages.values())
