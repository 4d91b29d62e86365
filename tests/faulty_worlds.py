"""What the tests of faults share: environments with a fault, small runs, and checks of messages and files."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Callable
from pathlib import Path

import gymnasium
import numpy as np
from gymnasium import spaces
from worlds import Counting

from deft.cli import main
from deft.runs import checkpoint

# A run of two rollouts with a checkpoint after each; --console-level leaves stderr to the one line of an error.
TINY = (
    "--total-timesteps 64 --rollout-steps 32 --batch-size 32 --ppo-epochs 1 --hidden-sizes 8 --save-freq 32 "
    "--eval-freq 0 --device cpu --no-tensorboard --no-enable-file-logging --console-level CRITICAL"
)
NEVER = 10**9


class Faulty(Counting):
    """Episodes of 5 steps; from step `at` of its life on it has the named fault. `size`: of its observation."""

    def __init__(self, fault: str = "", at: int = 0, size: int = 2) -> None:
        super().__init__(length=5)
        self.fault, self.at, self.size, self.life = fault, at, size, 0
        self.observation_space = spaces.Box(-1e6, 1e6, (size,), np.float32)
        if fault == "tuple observation":
            self.observation_space = spaces.Tuple((spaces.Discrete(2), spaces.Discrete(3)))
        if fault == "dict action":
            self.action_space = spaces.Dict({"arm": spaces.Discrete(2)})
        if fault == "constructor":
            raise RuntimeError("the robot\nis switched off")

    def reset(self, *, seed=None, options=None):
        observation, info = super().reset(seed=seed)
        observation = np.resize(observation, self.size)
        if self.has("reset raises"):
            raise RuntimeError("the arm\nis stuck")
        return self.spoiled(observation, "reset "), info

    def step(self, action):
        self.life += 1
        observation, reward, terminated, truncated, info = super().step(action)
        if self.has("raises"):
            raise ValueError("the gripper\nfell off")
        if self.has("four values"):
            return observation, reward, terminated, info
        reward = {"nan reward": np.nan, "no reward": None}.get(self.fault, reward) if self.is_due() else reward
        return self.spoiled(np.resize(observation, self.size)), reward, terminated, truncated, info

    def is_due(self) -> bool:
        return self.life >= self.at

    def has(self, fault: str) -> bool:
        return self.fault == fault and self.is_due()

    def spoiled(self, observation: np.ndarray, when: str = "") -> np.ndarray:
        if self.has(f"{when}nan"):
            return np.full_like(observation, np.nan)
        if self.has(f"{when}shape"):
            return np.zeros(7, np.float32)
        if self.has(f"{when}broadcast"):
            return np.zeros(1, np.float32)
        return observation


class Seeing(gymnasium.Env):
    """What a VLA model reads: a picture, joint positions and an instruction; two action dims."""

    def __init__(self) -> None:
        self.observation_space = spaces.Dict(
            {
                "image": spaces.Box(0, 255, (16, 16, 3), np.uint8),
                "proprio": spaces.Box(-1, 1, (3,), np.float32),
                "instruction": spaces.Text(8),
            }
        )
        self.action_space = spaces.Box(-1, 1, (2,), np.float32)


Command = Callable[[str], tuple[int, list[str]]]


def run_once(folder: Path, flags: str = "") -> Path:
    """A finished run of `Faulty`, with the checkpoints of 32 and 64 steps."""
    assert main(shlex.split(f"train ppo --env bad/Faulty-v0 {TINY} --output-dir {folder} {flags}")) == 0
    assert [path.name for path in checkpoint.list_checkpoints(folder)] == ["checkpoint-32", "checkpoint-64"]
    return folder


def contents(folder: Path) -> dict[str, str]:
    """Every file below a folder, by a digest of its bytes."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def assert_one_line(lines: list[str], *named: str) -> None:
    """One line, from Deft, that names what is wrong."""
    assert len(lines) == 1, lines
    assert lines[0].startswith("deft: ")
    assert "raceback" not in lines[0]
    for words in named:
        assert words in lines[0]


def cut(path: Path, keep: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


OFFLINE = (
    "--num-epochs 1 --batch-size 20 --hidden-dim 8 --eval-freq 0 --device cpu --no-tensorboard "
    "--no-enable-file-logging --console-level CRITICAL"
)
