"""Runs with `--vector warp` on Warp's CPU device: a resumed run continues as an uninterrupted one."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from deft.cli import main
from deft.evaluation.evaluate import FIRST_HELD_OUT_SEED

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


def test_runs_are_recorded_and_compared_on_warp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = "--env tabletop --env-kwargs task=reach observation=state --max-episode-steps 3 --device cpu"
    small = "--chunk-length 2 --batch-size 4 --no-tensorboard --console-level ERROR --eval-freq 0"
    run, data = tmp_path / "run", tmp_path / "played-v0"
    online = f"--vector warp --num-envs 2 --rollout-steps 2 --total-timesteps 8 --n-epochs 1 {small} --seed 5"
    assert main(f"train ppo {world} {online} --output-dir {run}".split()) == 0
    capsys.readouterr()
    played = f"collect --policy {run} --vector warp --device cpu --num-envs 3 --steps 8 --seed 1 --out {data} --json"
    assert main(played.split()) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["total_steps"] == 8
    compared = f"compare {run} --vector warp --device cpu --episodes 3 --split train --out {tmp_path} --json"
    assert main(compared.split()) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["columns"]["train"]
    assert [one["episodes"] for one in found.values()] == [3]
    assert main(f"evaluate {run} --vector warp --device cpu --episodes 3 --split train --json".split()) == 0
    alone = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert alone["first_seed"] == FIRST_HELD_OUT_SEED  # of episodes that no training starts from
    assert [alone["mean_reward"]] == [one["mean_reward"] for one in found.values()]


def test_the_expert_is_not_recorded_on_warp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"collect --env tabletop --policy expert --vector warp --steps 4 --out {tmp_path / 'expert-v0'}"
    assert main(words.split()) == 2
    assert "use --vector process" in capsys.readouterr().err
