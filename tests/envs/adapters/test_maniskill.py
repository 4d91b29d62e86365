"""The ManiSkill adapter against an exchange in its format (tests/simulators.py), and the real one where it is."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import simulators
import torch

from deft.config.settings import EnvConfig
from deft.envs import make_env, make_vector_env
from deft.envs.adapters.maniskill import INSTRUCTIONS, ManiSkillEnv, ManiSkillVectorEnv, without_visual
from deft.envs.adapters.sapien_gpu import VARIABLES
from deft.errors import InputError


@pytest.fixture
def robots(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
    return simulators.install_maniskill(monkeypatch, tmp_path)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs, as far as torch's answers go."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def still() -> np.ndarray:
    return np.zeros(8, np.float32)


def win() -> np.ndarray:
    return np.ones(8, np.float32)


@pytest.mark.usefixtures("robots")
def test_streams_of_one_environment() -> None:
    env = make_env(EnvConfig(id="maniskill", kwargs={"image_size": 16}))
    observation, info = env.reset(seed=3)
    assert env.observation_space.contains(observation)
    assert {name: part.shape for name, part in env.observation_space.items()} == {
        "head_rgb": (3, 16, 16),
        "wrist_rgb": (3, 16, 16),
        "state": (9 + 9 + 1 + 2,),
        "instruction": None,
    }
    assert observation["instruction"] == info["instruction"] == "pick up the red cube and hold it at the goal"
    # qpos 9, qvel 9, is_grasped, then [seed, step]
    assert observation["state"].tolist() == [0.5] * 9 + [0.0] * 9 + [0.0, 3.0, 0.0]
    for _ in range(2):
        observation, reward, terminated, truncated, info = env.step(still())
    assert observation["state"][-3:].tolist() == [1.0, 3.0, 2.0]
    assert (observation["head_rgb"][0] == 2).all()  # red is the step; channels come first
    assert (observation["head_rgb"][1:] == 0).all()
    assert (observation["wrist_rgb"][0] == 102).all()
    assert (reward, terminated, truncated, info["success"]) == (pytest.approx(0.2), False, False, False)
    *_, terminated, truncated, info = env.step(win())
    assert (terminated, truncated, info["success"]) == (True, False, True)
    env.close()
    assert env.unwrapped._simulation.env.is_closed


@pytest.mark.usefixtures("robots")
def test_time_limit_is_the_tasks_own() -> None:
    def length(**settings: Any) -> int:
        env = ManiSkillEnv(observation="state", **settings)
        env.reset(seed=0)
        for count in range(1, 20):
            if env.step(still())[3]:
                return count
        return 0

    assert length() == 5
    assert length(time_limit=3) == 3
    assert length(task="Endless-v1") == 0


@pytest.mark.usefixtures("robots")
def test_what_maniskill_is_asked_for() -> None:
    ManiSkillEnv(control_mode="delta_ee", reward="sparse", image_size=64)
    settings = simulators.ManiSkillTask.made[-1]
    assert settings["control_mode"] == "pd_ee_delta_pose"
    assert settings["reward_mode"] == "sparse"
    assert settings["sensor_configs"] == {"width": 64, "height": 64}
    assert (settings["sim_backend"], settings["render_backend"]) == ("physx_cpu", "cpu")
    assert settings["enhanced_determinism"] is True
    env = ManiSkillEnv(observation="state", control_mode="pd_joint_pos", robot="panda")
    settings = simulators.ManiSkillTask.made[-1]
    assert settings["control_mode"] == "pd_joint_pos"
    assert (settings["obs_mode"], settings["render_backend"]) == ("state_dict", "none")  # renders no images
    assert env.observation_space.shape == (21,)
    assert env.render() is None
    env = ManiSkillEnv(observation="state", render_mode="rgb_array", robot="panda")
    assert simulators.ManiSkillTask.made[-1]["render_backend"] == "cpu"
    assert env.render().shape == (32, 48, 3)
    env = ManiSkillEnv(robot="panda")
    assert "wrist_rgb" not in env.observation_space.spaces


@pytest.mark.usefixtures("robots", "on_gpu")
def test_devices_are_physical_for_vulkan_and_logical_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setenv("LOCAL_RANK", "1")
    ManiSkillEnv()
    assert [os.environ[name] for name in VARIABLES] == ["6"] * 3
    assert simulators.ManiSkillTask.made[-1]["render_backend"] == "cuda:1"


def test_chatter_is_not_heard(robots: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    class Chatty(simulators.ManiSkillTask):
        def __init__(self, **settings: Any) -> None:
            os.write(1, b"native chatter\n")
            super().__init__(**settings)

    sys.modules["mani_skill.utils.registration"].REGISTERED_ENVS["PickCube-v1"].make = Chatty
    ManiSkillEnv().close()
    assert "native" not in "".join(capfd.readouterr())


def test_wrist_camera_is_light_and_keeps_its_name(robots: ModuleType) -> None:
    ManiSkillEnv(light_wrist_camera=False)
    assert not hasattr(robots.REGISTERED_AGENTS["panda_wristcam"].agent_cls, "is_light")
    ManiSkillEnv()
    agent = robots.REGISTERED_AGENTS["panda_wristcam"].agent_cls
    assert agent.uid == "panda_wristcam"
    assert agent.is_light
    description = Path(agent.urdf_path)
    assert "d415" not in description.read_text()
    assert description.with_suffix(".srdf").is_file()
    ManiSkillEnv()
    assert robots.REGISTERED_AGENTS["panda_wristcam"].agent_cls is agent  # once is enough


def test_only_the_looks_of_one_link_are_dropped(tmp_path: Path) -> None:
    robot = ElementTree.fromstring(without_visual(simulators.URDF, "camera_link", tmp_path))
    links = {link.get("name"): link for link in robot.iter("link")}
    assert [child.tag for child in links["camera_link"]] == ["collision", "inertial"]  # weighs and collides as before
    assert [mesh.get("filename") for mesh in robot.iter("mesh")] == [str(tmp_path.resolve() / "meshes/hand.glb")]


@pytest.mark.usefixtures("robots")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "PickSingleYCB-v1"}, r"needs files .*: python -m mani_skill\.utils\.download_asset PickSingleYCB-v1"),
        (
            {"task": "TurnFaucet-v1"},
            "failed to find a rendering device; SAPIEN needs Vulkan, with observation: state too .*mesa-vulkan",
        ),
        ({"task": "TurnFaucet-v1", "observation": "state"}, "SAPIEN needs Vulkan, with observation: state too"),
        ({"task": "PickCubes"}, "ManiSkill does not have; without a download: .*StackCube-v1"),
        ({"observation": "both"}, "observation: 'both' is not allowed"),
        ({"reward": "none"}, "reward: 'none' is not allowed; one of 'dense', 'sparse'"),
        ({"image_size": 4}, "image_size: 4 is out of range"),
        ({"render_device": "gpu"}, "render_device: 'gpu': string should match pattern .*auto.cpu.cuda"),
        ({"render_mode": "human"}, "render_mode is 'human'"),
        ({"instruction": "x" * 65}, "instruction has 65 bytes"),
    ],
)
def test_what_cannot_be_made_is_said_in_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        ManiSkillEnv(**settings)
    assert "\n" not in str(caught.value)
    assert input.__name__ == "input"  # put back


def test_absent_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mani_skill", None)
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
    with pytest.raises(InputError, match=r'pip install "deft\[maniskill\]"; .*x86-64'):
        make_env(EnvConfig(id="maniskill"))


@pytest.mark.usefixtures("robots", "on_gpu")
def test_many_environments_on_the_gpu() -> None:
    config = EnvConfig(id="maniskill", vector="gpu", num_envs=3, kwargs={"image_size": 16}, max_episode_steps=4)
    env = make_vector_env(config)
    assert isinstance(env, ManiSkillVectorEnv)
    settings = simulators.ManiSkillTask.made[-1]
    assert (settings["num_envs"], settings["sim_backend"], settings["enhanced_determinism"]) == (3, "cuda:0", False)
    first = env.reset(seed=10)
    assert first["state"][:, -2].tolist() == [10, 11, 12]  # environment i has seed + i
    assert bytes(first["instruction"][2]).rstrip(b"\0").decode() == INSTRUCTIONS["PickCube-v1"]
    step = env.step(np.stack([still(), win(), still()]))
    assert step.terminated.tolist() == [False, True, False]
    assert step.done_index.tolist() == [1]
    assert step.final_observation["state"][0, -2:].tolist() == [11, 1]  # the true last one,
    assert step.observation["state"][1, -2:].tolist() == [111, 0]  # and the first of the next episode
    assert step.observation["state"][0, -2:].tolist() == [10, 1]
    assert (step.final_observation["head_rgb"][0, 0] == 1).all()
    (episode,) = step.episodes
    assert (episode.env_index, episode.length, episode.success) == (1, 1, True)
    assert episode.episode_return == pytest.approx(0.1)
    for _ in range(3):
        step = env.step(np.zeros((3, 8), np.float32))
    assert step.truncated.tolist() == [True, False, True]  # 4 steps; environment 1 began one later
    assert [episode.length for episode in step.episodes] == [4, 4]
    assert [episode.success for episode in step.episodes] == [False, False]
    assert env._simulation.env.resets[-1] == (None, [0, 2])
    assert env.get_state() is None
    assert "cannot be restored" in env.state_obstacle()
    with pytest.raises(InputError, match="no method"):
        env.call("fly")
    env.close()
    env.close()
    assert env._simulation.env.is_closed


@pytest.mark.usefixtures("robots", "on_gpu")
def test_state_alone_on_the_gpu() -> None:
    env = ManiSkillVectorEnv(2, observation="state")
    assert env.reset(seed=0)[:, -2].tolist() == [0, 1]
    step = env.step(np.stack([win(), still()]))
    assert step.final_observation[:, -2:].tolist() == [[0, 1]]
    assert step.observation[:, -2:].tolist() == [[100, 0], [1, 1]]


@pytest.mark.usefixtures("robots")
def test_what_the_gpu_cannot_do_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="needs CUDA"):
        make_vector_env(EnvConfig(id="maniskill", vector="gpu", num_envs=2))
    with pytest.raises(InputError, match=r"gpu is for env\.id maniskill"):
        make_vector_env(EnvConfig(id="CartPole-v1", vector="gpu"))
    with pytest.raises(InputError, match="chunk"):
        make_vector_env(EnvConfig(id="maniskill", vector="gpu"), chunk_length=2)
    with pytest.raises(InputError, match="unknown setting"):
        make_vector_env(EnvConfig(id="maniskill", vector="gpu", kwargs={"colour": 1}))


@pytest.mark.skipif(
    importlib.util.find_spec("mani_skill") is None or importlib.util.find_spec("sapien") is None,
    reason="ManiSkill or SAPIEN is not installed (SAPIEN has no build for Linux on aarch64)",
)
def test_the_real_simulator() -> None:
    try:
        env = make_env(EnvConfig(id="maniskill", kwargs={"image_size": 64}))
    except InputError as error:
        pytest.skip(str(error))  # no Vulkan here
    first, _ = env.reset(seed=1)
    assert env.observation_space.contains(first)
    assert first["head_rgb"].std() > 1
    assert first["wrist_rgb"].std() > 1
    rows = [env.step(env.action_space.sample())[0]["state"] for _ in range(5)]
    assert np.isfinite(rows).all()
    again, _ = env.reset(seed=1)
    np.testing.assert_array_equal(again["head_rgb"], first["head_rgb"])
    env.close()
