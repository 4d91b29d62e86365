"""RoboTwin and ManiSkill behind the F1 environments, against exchanges in their formats (tests/simulators.py)."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simulators
from robot_worlds import WORLD_ID

from deft.envs.adapters.sapien_gpu import VARIABLES
from deft.envs.f1 import StudentEnv, TeacherEnv
from deft.envs.robot_env import RobotEnv, TaskConfig
from deft.errors import InputError


@pytest.fixture
def quiet_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")


@pytest.fixture
def robotwin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quiet_variables: None) -> Iterator[None]:
    monkeypatch.setenv("ROBOTWIN_ROOT", str(simulators.write_robotwin(tmp_path / "RoboTwin")))
    path = sys.path[:]
    yield
    sys.path[:] = path
    for name in [name for name in sys.modules if name == "envs" or name.startswith("envs.")]:
        del sys.modules[name]


@pytest.mark.usefixtures("robotwin")
@pytest.mark.parametrize(
    ("single_arm", "dims"), [(True, [0, 1, 2, 8]), (False, [0, 1, 2, 8, 9, 10, 11, 17])]
)  # its robot has 3 joints an arm
def test_robotwin(single_arm: bool, dims: list[int]) -> None:
    config = {"world": "robotwin", "task_name": "push_button", "embodiment": ["tiny-arm"], "image_size": 16}
    env = TeacherEnv(config, single_arm=single_arm, action_scale=0.5)
    observation, _ = env.reset(seed=3)
    assert env.observation_space.contains(observation)
    assert np.flatnonzero(env.action_mask).tolist() == dims
    assert observation["wrist_rgb"].shape == (4, 3, 16, 16)
    assert observation["instruction"] == "push button"
    observation, *_ = env.step(np.ones(32))
    # 0.1 rad x 0.5, applied once; joints of an unknown robot count from -π to π, the open gripper is 1
    assert observation["state"][0] == pytest.approx(0.05 / np.pi)
    assert observation["state"][8] == 1
    assert np.flatnonzero(observation["action_history"][-1]).tolist() == dims
    assert observation["wrist_rgb"][:, 0, 0, 0].tolist() == [0, 0, 0, 1]  # red counts the actions there


@pytest.mark.usefixtures("quiet_variables")
def test_maniskill(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    simulators.install_maniskill(monkeypatch, tmp_path)
    env = StudentEnv(
        {"world": "maniskill", "task_name": "PickCube-v1", "image_size": 16, "max_steps": 9}, action_scale=0.5
    )
    observation, _ = env.reset(seed=3)
    assert np.flatnonzero(env.action_mask).tolist() == [0, 1, 2, 3, 4, 5, 6, 8]
    # all joints and both fingers at 0.5: the first joint goes to 2.8973; 0.5 m / 0.04 m = 12.5 openings → 24
    assert observation["state"][0] == pytest.approx(0.5 / 2.8973)
    assert observation["state"][8] == pytest.approx(24)
    # success at 0.9 of the first dim: the scaled action does not reach it
    observation, _, terminated, _, _ = env.step(np.ones(32))
    assert not terminated
    assert observation["wrist_rgb"][:, 0, 0, 0].tolist() == [100, 100, 100, 101]
    with pytest.raises(InputError, match="have none"):
        StudentEnv({"world": "maniskill", "task_name": "PickCube-v1", "domain_randomization": {"random_light": True}})


@pytest.mark.usefixtures("gl")
def test_a_world_by_its_id() -> None:
    for name in ("tabletop", "deft/Tabletop-v0"):
        world = RobotEnv(TaskConfig(world=name, image_size=32), needs_head=False)
        assert world.frame_shape == (3, 32, 32)
        observation, _ = world.env.reset(seed=0)
        assert set(world.frames(observation)) == {"wrist_rgb"}


def test_an_environment_without_the_streams_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    from robot_worlds import NumberedWorld

    def without(self: Any, *args: Any) -> None:
        original(self, *args)
        del self.observation_space.spaces["head_rgb"]

    original = NumberedWorld.__init__
    monkeypatch.setattr(NumberedWorld, "__init__", without)
    StudentEnv({"world": WORLD_ID})
    with pytest.raises(InputError, match="has no head_rgb"):
        TeacherEnv({"world": WORLD_ID})
