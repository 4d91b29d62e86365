"""The RoboTwin adapter against an exchange in RoboTwin's format (tests/simulators.py)."""

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simulators
import torch

from deft.config.settings import EnvConfig
from deft.envs import make_env, make_vector_env
from deft.envs.adapters.robotwin import RoboTwinEnv
from deft.envs.adapters.sapien_gpu import VARIABLES
from deft.errors import InputError, RunError


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("ROBOTWIN_ROOT", str(simulators.write_robotwin(tmp_path / "RoboTwin")))
    path = sys.path[:]
    yield tmp_path / "RoboTwin"
    sys.path[:] = path
    for name in [name for name in sys.modules if name == "envs" or name.startswith("envs.")]:
        del sys.modules[name]


def calls(env: Any, name: str) -> list[Any]:
    return [argument for called, argument in env.unwrapped._task.calls if called == name]


def action(**dims: float) -> np.ndarray:
    """An action in the 32-dim layout, from names as `left2` or `right_gripper`."""
    row = np.zeros(32, np.float32)
    for name, value in dims.items():
        dims = {"left_gripper": 8, "right_gripper": 17}
        row[dims[name] if name in dims else (0 if name.startswith("left") else 9) + int(name[-1])] = value
    return row


def test_layout_of_streams_and_actions(root: Path) -> None:
    env = make_env(EnvConfig(id="robotwin", kwargs={"task": "push_button"}))
    observation, info = env.reset(seed=3)
    assert env.observation_space.contains(observation)
    assert {name: stream.shape for name, stream in observation.items() if name != "instruction"} == {
        "state": (32,),
        "head_rgb": (3, 24, 32),
        "wrist_rgb": (3, 24, 32),
        "right_wrist_rgb": (3, 24, 32),
    }
    assert observation["instruction"] == info["instruction"] == "push button"
    assert [int(observation[name][1, 0, 0]) for name in ("head_rgb", "wrist_rgb", "right_wrist_rgb")] == [0, 10, 20]
    assert np.flatnonzero(env.unwrapped.action_mask).tolist() == [0, 1, 2, 8, 9, 10, 11, 17]  # 3 joints an arm here
    # ±0.1 rad onto the last target; grippers move to the commanded opening, 1 open and -1 closed
    env.step(action(left0=0.5, right2=-1.0, left_gripper=1.0, right_gripper=-1.0))
    observation, reward, terminated, truncated, info = env.step(action(left0=1.0, left1=7.0, left_gripper=0.0))
    first, second = calls(env, "take_action")
    np.testing.assert_allclose(first, [0.05, 0, 0, 1.0, 0, 0, -0.1, 0.0])
    np.testing.assert_allclose(second, [0.15, 0.1, 0, 0.5, 0, 0, -0.1, 0.5])  # 7 is clipped to 1
    assert observation["state"][[0, 8, 11, 17]].tolist() == pytest.approx([0.15, 0.5, -0.1, 0.5])
    assert (observation["head_rgb"][0] == 2).all()
    assert (reward, terminated, truncated, info["success"]) == (0.0, False, False, False)
    env.step(action(left0=1.0))
    _, reward, terminated, truncated, info = env.step(action(left0=1.0))  # to 0.35
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)


def test_single_arm_leaves_the_other_where_it_is(root: Path) -> None:
    env = RoboTwinEnv("push_button", single_arm=True, action_scale=2.0, image_size=16)
    observation, _ = env.reset(seed=1)
    assert "right_wrist_rgb" not in observation
    assert observation["head_rgb"].shape == (3, 16, 16)
    assert np.flatnonzero(env.action_mask).tolist() == [0, 1, 2, 8]
    env.step(np.ones(32, np.float32))
    np.testing.assert_allclose(calls(env, "take_action")[-1], [0.2, 0.2, 0.2, 1.0, 0, 0, 0, 1.0])


def test_target_does_not_run_away_from_a_joint_that_is_stuck(root: Path) -> None:
    config = simulators_config(root) | {"is_stuck": True}
    env = RoboTwinEnv("push_button", config=config)
    env.reset(seed=1)
    for _ in range(10):
        env.step(action(left1=1.0))
    assert calls(env, "take_action")[-1][1] == pytest.approx(0.3)


def simulators_config(root: Path) -> dict[str, Any]:
    import yaml

    return yaml.safe_load((root / "task_config" / "demo_clean.yml").read_text())


def test_config_is_robotwins_own(root: Path) -> None:
    env = RoboTwinEnv(
        "push_button",
        embodiment=["tiny-arm", "long-arm", 0.8],
        domain_randomization={"random_light": True, "crazy_random_light_rate": 0.02, "random_appearance": False},
        observation="state",
    )
    settings = env._task.settings
    assert settings["domain_randomization"] == {
        "random_background": False,
        "cluttered_table": False,
        "random_light": True,
        "crazy_random_light_rate": 0.02,
    }
    assert settings["left_robot_file"] == "./assets/embodiments/tiny-arm"
    assert settings["right_embodiment_config"] == {"arm_joints_name": [["a"], ["b"]]}
    assert (settings["dual_arm_embodied"], settings["embodiment_dis"]) == (False, 0.8)
    assert (settings["head_camera_h"], settings["head_camera_w"]) == (24, 32)
    assert settings["data_type"] == {"rgb": False, "qpos": True, "endpose": True}
    assert (settings["render_freq"], settings["task_name"]) == (0, "push_button")
    assert env.observation_space.shape == (32,)


def test_configs_below_env_cfg(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The repository's present layout; the former one is that of the other tests."""
    monkeypatch.setenv("ROBOTWIN_ROOT", str(simulators.write_robotwin(tmp_path / "Now", "env_cfg/task_config")))
    env = RoboTwinEnv("push_button")
    assert env._task.settings["left_robot_file"] == "./assets/embodiments/tiny-arm"
    assert env.reset(seed=1)[0]["head_rgb"].shape == (3, 24, 32)
    env.close()


def test_unstable_scenes_are_drawn_anew(root: Path) -> None:
    env = RoboTwinEnv("push_button")
    env.reset(seed=14)  # 7 divides it
    seeds = calls(env, "setup_demo")
    assert seeds[:2] == [0, 14]
    assert len(seeds) >= 3
    assert seeds[-1] % 7
    env.reset(seed=14)
    assert calls(env, "setup_demo")[-1] == seeds[-1]  # drawn from the environment's own seed
    with pytest.raises(RunError, match="push_button cannot be set up: RuntimeError: CUDA error"):
        env.reset(seed=13)


def test_no_stable_scene_at_all(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = RoboTwinEnv("push_button")

    class UnStableError(Exception):
        pass

    def never(**settings: Any) -> None:
        raise UnStableError

    monkeypatch.setattr(env._task, "setup_demo", never)
    with pytest.raises(RunError, match="no stable scene in 100 tries"):
        env.reset(seed=1)


def test_old_scene_is_closed_and_the_cache_now_and_then(root: Path) -> None:
    env = RoboTwinEnv("push_button")
    for seed in range(1, 5):
        env.reset(seed=seed)
    # One scene to learn the sizes from, then 4 of which each closes the one before; the cache goes at every 2nd.
    assert calls(env, "close_env") == [False, True, False, True]
    env.close()
    env.close()
    assert not env._task.is_open
    assert len(calls(env, "close_env")) == 5


def test_global_generators_are_left_alone(root: Path) -> None:
    env = RoboTwinEnv("push_button")

    def draws(plays: bool) -> list[float]:
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)
        if plays:
            env.reset(seed=1)
            env.step(action())
        return [torch.rand(()).item(), np.random.rand(), random.random()]

    assert draws(True) == draws(False)
    # and what RoboTwin draws follows from its own seed, whatever is drawn around it
    seen = []
    for outside in (1, 2):
        np.random.seed(outside)
        env.reset(seed=1)
        np.random.rand(outside)
        env.step(action())
        seen.append(env._task.draw)
    assert seen[0] == seen[1]


def test_steps_are_silent(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    env = RoboTwinEnv("push_button")
    env.reset(seed=1)
    capfd.readouterr()
    env.step(action())
    assert capfd.readouterr().out == ""


def test_vector_env_has_a_time_limit(root: Path) -> None:
    config = EnvConfig(id="robotwin", num_envs=2, max_episode_steps=3, kwargs={"task": "push_button"})
    env = make_vector_env(config)
    env.reset(seed=1)
    assert env.action_mask.sum() == 8
    for _ in range(3):
        step = env.step(np.zeros((2, 32), np.float32))
    assert step.truncated.tolist() == [True, True]
    assert [episode.success for episode in step.episodes] == [False, False]
    env.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"root": "/nowhere"}, "not a RoboTwin repository"),
        ({"task": "fly"}, "task is 'fly', which RoboTwin does not have; it has broken, push_button"),
        ({"task": "../envs"}, "RoboTwin does not have"),
        ({"task": "broken"}, "cannot be imported .*no_such_module_anywhere"),
        ({"config": "other"}, "other.yml cannot be read"),
        ({"embodiment": ["tiny-arm", "tiny-arm"]}, r"RoboTwin takes \[robot\], or \[left, right, distance\]"),
        ({"embodiment": ["arm"]}, "RoboTwin has no 'arm'; it has tiny-arm, long-arm"),
        ({"domain_randomization": {"random_colour": True}}, "RoboTwin has no 'random_colour'"),
        ({"domain_randomization": {"random_appearance": True}}, "RoboTwin has no random_appearance"),
        ({"control_mode": "delta_ee"}, "control_mode: 'delta_ee' is not allowed; one of 'delta_qpos'"),
        ({"observation": "both"}, "observation: 'both' is not allowed"),
        ({"action_scale": 0.0}, "action_scale: 0.0 is out of range"),
    ],
)
def test_what_cannot_be_made_is_said_in_one_line(root: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        RoboTwinEnv(**{"task": "push_button", **settings})
    assert "\n" not in str(caught.value)


def test_absent_repository_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROBOTWIN_ROOT", raising=False)
    with pytest.raises(InputError, match="set ROBOTWIN_ROOT"):
        make_env(EnvConfig(id="robotwin"))
