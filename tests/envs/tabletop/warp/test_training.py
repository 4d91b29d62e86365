"""Runs with `--vector warp` on Warp's CPU device: a resumed run continues as an uninterrupted one."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from deft.cli import main

pytestmark = pytest.mark.usefixtures("compiled_kernels")
# Two updates of two environments, each saved; episodes of 3 steps, so that checkpoint-8 is in the middle of one.
RUN = (
    "--env tabletop --env-kwargs task=all observation=images image_size=16 --max-episode-steps 3 --vector warp "
    "--device cpu --num-envs 2 --rollout-steps 4 --total-timesteps 16 --save-freq 8 --eval-freq 0 --seed 5 "
    "--model vla-tiny --chunk-length 1 --batch-size 4 --n-epochs 1 --no-tensorboard --console-level ERROR"
)


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """The places at which two training states are not equal bit for bit."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        return [place for key in one for place in differences(one[key], other[key], f"{path}/{key}")]
    if isinstance(one, list | tuple):
        assert len(one) == len(other), path
        return [
            place
            for number, pair in enumerate(zip(one, other, strict=True))
            for place in differences(*pair, f"{path}/{number}")
        ]
    is_equal = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    return [] if is_equal else [path]


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert main(f"train ppo {RUN} --output-dir {whole}".split()) == 0
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoint-16")
    torch.manual_seed(123)  # whatever this process has drawn before must not matter
    assert main(["train", "ppo", "--resume", str(resumed / "checkpoint-8")]) == 0
    for file in ("model.pt", "training_state.pt"):
        saved = (torch.load(folder / "checkpoint-16" / file, weights_only=True) for folder in (whole, resumed))
        # Weights, optimizer, statistics, counters, and the state of the simulation.
        assert set(differences(*saved)) <= {"/config/output_dir", "/config/resume"}
