"""ManiSkill and RoboTwin as their adapters meet them: the same calls and the same formats, without a simulation.

Neither can run where the tests do. What is written here follows their sources (ManiSkill 3.0.1, RoboTwin 2.0).
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

# ----------------------------------------------------------------------------------------------------------- ManiSkill

URDF = """<robot name="panda">
  <link name="panda_hand"><visual><geometry><mesh filename="meshes/hand.glb"/></geometry></visual></link>
  <link name="camera_link">
    <visual><geometry><mesh filename="realsense/d415.stl"/></geometry></visual>
    <collision><geometry><box size="0.02 0.1 0.02"/></geometry></collision>
    <inertial><mass value="0.564"/></inertial>
  </link>
</robot>"""


class ManiSkillTask:
    """A BaseEnv: batched tensors everywhere. An environment succeeds in the step whose first action dim is above 0.9.

    Each environment returns its episode seed and step count in `extra/counters`, and in the red channel of its images.
    """

    made: list[dict[str, Any]] = []  # noqa: RUF012 (looked at by tests)

    def __init__(self, **settings: Any) -> None:
        print("[svulkan2] chatter")
        self.settings = settings
        self.made.append(settings)
        self.num_envs = settings["num_envs"]
        self.device = torch.device("cpu")
        if settings["sim_backend"] == "physx_cpu" and self.num_envs > 1:
            raise RuntimeError("Cannot set the sim backend to 'cpu' and have multiple environments.")
        self.single_action_space = spaces.Box(-1, 1, (8,), np.float32)
        self.seeds = torch.zeros(self.num_envs)
        self.steps = torch.zeros(self.num_envs)
        self.resets: list[Any] = []
        self.is_closed = False

    def reset(self, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        chosen = (options or {}).get("env_idx", torch.arange(self.num_envs))
        assert isinstance(chosen, torch.Tensor)
        self.resets.append((seed, chosen.tolist()))
        given = [seed] if isinstance(seed, int) else seed
        self.seeds[chosen] = self.seeds[chosen] + 100 if given is None else torch.tensor(given, dtype=torch.float32)
        self.steps[chosen] = 0
        return self._observe(), {"reconfigure": False}

    def step(self, action: np.ndarray) -> tuple[dict, torch.Tensor, torch.Tensor, torch.Tensor, dict]:
        actions = torch.as_tensor(action)
        assert actions.shape == (self.num_envs, 8)
        self.steps += 1
        success = actions[:, 0] > 0.9
        no = torch.zeros(self.num_envs, dtype=torch.bool)
        return self._observe(), self.steps / 10, success.clone(), no, {"success": success}

    def render(self) -> torch.Tensor:
        return torch.full((self.num_envs, 32, 48, 3), 7, dtype=torch.uint8)

    def close(self) -> None:
        self.is_closed = True

    def _observe(self) -> dict[str, Any]:
        rows = self.num_envs
        observation: dict[str, Any] = {
            "agent": {"qpos": torch.full((rows, 9), 0.5), "qvel": torch.zeros(rows, 9), "controller": {}},
            "extra": {"is_grasped": self.steps > 1, "counters": torch.stack([self.seeds, self.steps], dim=1)},
        }
        if self.settings["obs_mode"] == "rgb":
            size = (self.settings["sensor_configs"]["height"], self.settings["sensor_configs"]["width"])
            pictures = torch.zeros(rows, *size, 3, dtype=torch.uint8)
            pictures[..., 0] = self.steps[:, None, None].byte()
            cameras = {"base_camera": pictures}
            if self.settings["robot_uids"] == "panda_wristcam":
                cameras["hand_camera"] = pictures + 100
            observation |= {"sensor_param": {}, "sensor_data": {name: {"rgb": rgb} for name, rgb in cameras.items()}}
        return observation


class NeedsDownload(ManiSkillTask):
    def __init__(self, **settings: Any) -> None:
        if input("(y|n): ") == "n":
            raise SystemExit
        super().__init__(**settings)


class NoVulkan(ManiSkillTask):
    def __init__(self, **settings: Any) -> None:
        raise RuntimeError("failed to find a rendering device")


def install_maniskill(monkeypatch: Any, folder: Path) -> ModuleType:
    """Put modules of ManiSkill's names where `import` finds them; returns the one of the robots."""

    def register_agent(override: bool = False) -> Any:
        def register(agent: Any) -> Any:
            assert override or agent.uid not in agents
            agents[agent.uid] = SimpleNamespace(agent_cls=agent)
            return agent

        return register

    (folder / "panda_v3.urdf").write_text(URDF)
    (folder / "panda_v3.srdf").write_text("<robot/>")
    camera_robot = type("PandaWristCam", (), {"uid": "panda_wristcam", "urdf_path": str(folder / "panda_v3.urdf")})
    agents = {"panda_wristcam": SimpleNamespace(agent_cls=camera_robot)}
    tasks: dict[str, tuple[type, int | None]] = {
        "PickCube-v1": (ManiSkillTask, 5),
        "PickSingleYCB-v1": (NeedsDownload, 50),
        "TurnFaucet-v1": (NoVulkan, 50),
        "Endless-v1": (ManiSkillTask, None),
    }
    registered = {name: SimpleNamespace(make=task, max_episode_steps=limit) for name, (task, limit) in tasks.items()}
    contents: dict[str, dict[str, Any]] = {
        "mani_skill": {},
        "mani_skill.envs": {},
        "mani_skill.utils": {},
        "mani_skill.utils.registration": {"REGISTERED_ENVS": registered},
        "mani_skill.agents": {},
        "mani_skill.agents.registration": {"REGISTERED_AGENTS": agents, "register_agent": register_agent},
        "mani_skill.agents.robots": {},
        "mani_skill.agents.robots.panda": {},
        "mani_skill.agents.robots.panda.panda_wristcam": {"PandaWristCam": camera_robot},
    }
    for name, content in contents.items():
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    ManiSkillTask.made.clear()
    return sys.modules["mani_skill.agents.registration"]


# ------------------------------------------------------------------------------------------------------------ RoboTwin

ROBOTWIN_TASK = '''
import os

import numpy as np
import torch


class UnStableError(Exception):
    pass


class push_button:
    """Succeeds when the first left joint is past 0.25. Scenes with a seed that 7 divides are not stable."""

    calls = []

    def setup_demo(self, **settings):
        print("curobo chatter")
        assert os.path.isdir("assets"), "RoboTwin reads its files by relative paths"
        np.random.seed(settings["seed"] % 2**32)
        torch.manual_seed(settings["seed"])
        push_button.calls.append(("setup_demo", settings["seed"]))
        self.settings = settings
        self.is_open = True
        if settings["seed"] and settings["seed"] % 7 == 0:
            raise UnStableError("Objects is unstable")
        if settings["seed"] == 13:
            raise RuntimeError("CUDA error")
        self.joints = [0.0] * 6
        self.grippers = [1.0, 1.0]
        self.draw = float(np.random.rand())
        self.take_action_cnt, self.eval_success = 0, False

    def get_obs(self):
        observation = {name: {"intrinsic_cv": np.eye(3)} for name in ("head_camera", "left_camera", "right_camera")}
        if self.settings["data_type"]["rgb"]:
            for number, camera in enumerate(observation.values()):
                size = (self.settings["head_camera_h"], self.settings["head_camera_w"], 3)
                camera["rgb"] = np.full(size, 10 * number, np.uint8)
                camera["rgb"][:, :, 0] = self.take_action_cnt
        left, right = self.joints[:3], self.joints[3:]
        return {
            "observation": observation,
            "joint_action": {
                "left_arm": left, "left_gripper": self.grippers[0], "right_arm": right,
                "right_gripper": self.grippers[1],
                "vector": np.array([*left, self.grippers[0], *right, self.grippers[1]]),
            },
            "endpose": {},
        }

    def take_action(self, action, action_type="qpos"):
        print("step:", self.take_action_cnt, end="\\r")
        assert action_type == "qpos" and action.shape == (8,)
        push_button.calls.append(("take_action", action.tolist()))
        self.take_action_cnt += 1
        stuck = self.settings.get("is_stuck", False)
        self.joints = self.joints if stuck else [*action[:3], *action[4:7]]
        self.grippers = [action[3], action[7]]
        self.draw = float(np.random.rand())
        if self.check_success():
            self.eval_success = True

    def check_success(self):
        return self.joints[0] > 0.25

    def close_env(self, clear_cache=False):
        push_button.calls.append(("close_env", clear_cache))
        self.is_open = False
'''


def write_robotwin(root: Path, configs: str = "task_config") -> Path:
    """A repository as RoboTwin's, with one task and a robot of 3 joints an arm; `configs` is where its configs are."""
    files = {
        "envs/__init__.py": "",
        "envs/push_button.py": ROBOTWIN_TASK,
        "envs/_base_task.py": "",
        "envs/broken.py": "import no_such_module_anywhere",
        f"{configs}/_embodiment_config.yml": """
            tiny-arm: {file_path: ./assets/embodiments/tiny-arm}
            long-arm: {file_path: ./assets/embodiments/long-arm}""",
        f"{configs}/_camera_config.yml": "D435: {fovy: 37, w: 32, h: 24}",
        f"{configs}/demo_clean.yml": """
            render_freq: 20
            embodiment: [tiny-arm]
            domain_randomization: {random_background: false, cluttered_table: false, random_light: false}
            camera: {head_camera_type: D435, wrist_camera_type: D435}
            data_type: {rgb: true, qpos: false, endpose: true}
            clear_cache_freq: 2
            eval_video_log: true""",
        "assets/embodiments/tiny-arm/config.yml": "arm_joints_name: [[a, b, c], [d, e, f]]",
        "assets/embodiments/long-arm/config.yml": "arm_joints_name: [[a], [b]]",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return root
