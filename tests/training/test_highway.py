"""PPO on highway-env: a table of vehicles in, one of five manoeuvres out."""

from pathlib import Path

import pytest

from deft.config.loading import resolve
from deft.training.run import train


def test_ppo_trains_in_highway(tmp_path: Path) -> None:
    pytest.importorskip("highway_env")
    mapping = {
        "env": {"id": "highway-fast-v0", "num_envs": 2, "kwargs": {"config": {"vehicles_count": 3, "duration": 3}}},
        "algorithm": {"name": "ppo", "cfg": {"batch_size": 8}},
        "trainer": {"buffer_size": 8, "total_timesteps": 32, "eval_freq": 0, "log_freq": 1},
        "logging": {"tensorboard": False, "progress_bar": False},
        "output_dir": str(tmp_path / "run"),
    }
    summary = train(resolve(mapping))
    assert summary["timesteps"] == 32
    assert summary["mean_reward"] > 0  # at most 1 a step, and never below 0
