"""A suite for tests: it is imported in this process, and in worker processes of an interpreter made for the test.

`make_interpreter` stands for pip: a virtual environment that finds this module, NumPy and Gymnasium by a path file.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from deft.envs.suites import Suite

TASKS = {"near": "Go to 2", "far": "Go to 5", "never": "Go to 1000"}
FOLDER = Path(os.environ.get("FAKE_SUITE_FOLDER", "."))
DRIFT = "drift.txt"  # in FOLDER: a number that is added to the first position
CHAOS = "chaos.txt"  # in FOLDER: how much the first position of the task far changes per relative change of gravity


class CountingEnv(gymnasium.Env):
    """A position that actions add to; the goal is a number. Position and time start at the seed's last digit / 10."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012 (declared by Gymnasium)

    def __init__(
        self,
        task: str = "both",
        stride: int = 1,
        reports: bool = True,
        suite_path: str | None = None,
        render_mode: str | None = None,
    ):
        self.suite_path = suite_path
        self.tasks = SUITE.tasks_of(f"fake/{task}")
        self.render_mode, self._stride, self._reports = render_mode, stride, reports
        self._index, self._position, self._gravity = 0, 0.0, 1.0
        self.action_space = spaces.Box(-1, 1, (1,), np.float32)
        self.observation_space = spaces.Dict(
            {"state": spaces.Box(-np.inf, np.inf, (1,), np.float32), "instruction": spaces.Text(16)}
        )

    @property
    def instruction(self) -> str:
        return TASKS[self.tasks[self._index]]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._index = (self._index + self._stride if seed is None else seed) % len(self.tasks)
        drift = FOLDER / DRIFT
        self._position = (0 if seed is None else seed % 10) / 10 + (float(drift.read_text()) if drift.exists() else 0)
        chaos = FOLDER / CHAOS
        if chaos.exists() and self.tasks[self._index] == "far":
            self._position += float(chaos.read_text()) * (self._gravity - 1)
        return self._observe(), {}

    def scale_gravity(self, scale: float) -> None:
        self._gravity = scale

    def step(self, action: np.ndarray) -> Any:
        self._position += float(action[0])
        goal = float(self.instruction.split()[-1])
        is_there = self._position >= goal
        info = {"task": self.tasks[self._index], "instruction": self.instruction}
        if self._reports:
            info["success"] = is_there
        return self._observe(), float(is_there), is_there, False, info

    def _observe(self) -> dict[str, Any]:
        return {"state": np.array([self._position], np.float32), "instruction": self.instruction}

    def expert_action(self) -> np.ndarray:
        return np.ones(1, np.float32)

    def render(self) -> np.ndarray:
        return np.full((4, 4, 3), 7, np.uint8)

    def where(self) -> tuple[str, bool]:
        """The interpreter that runs this environment, and whether torch is imported in it."""
        return sys.executable, "torch" in sys.modules

    def set_folder(self, folder: str) -> None:
        global FOLDER
        FOLDER = Path(folder)


SUITE = Suite(
    name="fake",
    entry_point="fake_suite:CountingEnv",
    package="fake-suite",
    tasks=TASKS,
    groups={"both": ("near", "far"), "all": ("near", "far", "never")},
    max_episode_steps=8,
    protocol="as tests do",
    fingerprint_task="all",
)


def distribution(folder: Path, version: str = "1.0") -> None:
    """Write this module as an installed package, with its metadata."""
    (folder / "fake_suite.py").write_text(Path(__file__).read_text())
    info = folder / "fake_suite-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fake-suite\nVersion: {version}\n")
    (info / "RECORD").write_text("fake_suite.py,,\nfake_suite-1.0.dist-info/METADATA,,\n")


def lock_text() -> str:
    return f"# of the test\nfake-suite==1.0\nnumpy=={np.__version__}\ngymnasium=={gymnasium.__version__}\n"


def make_interpreter(folder: Path) -> None:
    """Make a virtual environment without pip that finds the packages of this one, and this module."""
    import subprocess

    subprocess.run([sys.executable, "-I", "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    distribution(packages)
    others = {str(Path(module.__file__).parents[1]) for module in (np, gymnasium)}
    (packages / "packages.pth").write_text("\n".join(sorted(others)) + "\n")
