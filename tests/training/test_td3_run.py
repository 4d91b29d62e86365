"""Runs of TD3: that they learn, resume exactly, and continue with policies of td3-bc and rebrac."""

from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from offline_worlds import TwoStep, two_step_dataset
from worlds import Target

from deft import OfflineRLConfig, ReBRACTrainer, TD3BCTrainer, TD3Trainer, cli
from deft.config.loading import resolve
from deft.training import run
from deft.training.run import build_trainer

QUIET = {"console_level": "CRITICAL", "tensorboard": False, "progress_bar": False}
TARGET, TWO_STEP = "deft-test/Target-v0", "deft-test/TwoStep-v0"


@pytest.fixture(autouse=True)
def _worlds(monkeypatch):
    monkeypatch.setattr(run, "plot_run", lambda folder: [])
    gymnasium.register(TARGET, entry_point=Target)
    gymnasium.register(TWO_STEP, entry_point=TwoStep)
    yield
    del gymnasium.registry[TARGET], gymnasium.registry[TWO_STEP]


def config(folder: Path, steps: int = 300, **cfg: Any) -> Any:
    cfg = {"batch_size": 32, "learning_starts": 100, "learning_rate": 3e-3, **cfg}
    return resolve(
        {
            "algorithm": {"name": "td3", "cfg": cfg},
            "env": {"id": TARGET, "num_envs": 2},
            "policy": {"hidden_dim": 16, "num_layers": 2},
            "trainer": {"total_timesteps": steps, "eval_freq": 0, "save_freq": 0},
            "logging": QUIET,
            "threads": 1,
            "output_dir": str(folder),
        }
    )


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    algorithm = trainer.algorithm
    parts = {"policy": trainer.policy, "critics": algorithm.critics, "target": algorithm.target_policy}
    return {f"{part}.{name}": value for part, own in parts.items() for name, value in own.state_dict().items()}


def test_it_learns(tmp_path):
    # Random actions are off by 2.2 on average (per step), the best constant by 1.25; a learner by less than 0.5.
    trainer = TD3Trainer(config=config(tmp_path, 800, gamma=0.5, tau=0.05, exploration_noise=0.2))
    trainer.train()
    assert trainer.evaluate(20)["mean_reward"] > -5.0
    trainer.close()


@pytest.mark.parametrize("cfg", [{}, {"n_step": 3, "policy_delay": 3, "train_freq": 3}])
def test_training_on_equals_training_twice(tmp_path, cfg):
    whole = build_trainer(config(tmp_path / "whole", **cfg))
    whole.train()
    first = build_trainer(config(tmp_path / "first", **cfg))
    first.train(174)
    folder = first.save()
    second = build_trainer(config(tmp_path / "second", **cfg))
    second.load(folder)
    second.train(300)
    assert whole.algorithm.version == second.algorithm.version > 0
    expected, got = weights(whole), weights(second)
    assert [name for name, value in expected.items() if not torch.equal(value, got[name])] == []
    for trainer in (whole, first, second):
        trainer.close()


@pytest.mark.parametrize(
    ("kind", "flags", "settings"),
    [(TD3BCTrainer, [], {}), (ReBRACTrainer, ["--critic-layer-norm"], {"policy_bc_coef": 0.1})],
)
def test_it_continues_with_an_offline_run_on_the_command_line(tmp_path, kind, flags, settings):
    options = {"num_epochs": 1, "batch_size": 32, "hidden_dim": 16, "eval_freq": 0, "device": "cpu", **QUIET}
    offline = kind(2, 1, OfflineRLConfig(**options, output_dir=str(tmp_path / "offline")), **settings)
    offline.train(two_step_dataset())
    source = offline.save(tmp_path / "saved")
    arguments = ["train", "td3", "--model-path", str(source), "--env", TWO_STEP, "--total-timesteps", "40", *flags]
    arguments += ["--learning-starts", "40", "--batch-size", "8", "--eval-freq", "0", "--device", "cpu"]
    assert cli.main([*arguments, "--output-dir", str(tmp_path / "online"), "--console-level", "ERROR"]) == 0
    checkpoint = next((tmp_path / "online").glob("checkpoint-*"))
    state = torch.load(checkpoint / "training_state.pt", weights_only=True)["algorithm"]
    before = offline.algorithm.state_dict()["critics"]
    # The one update that is due after 40 steps moved the trained critics by a small step each (Adam: by 3e-4).
    moved = [float((value - state["critics"][name]).abs().max()) for name, value in before.items() if "online" in name]
    assert 0 < max(moved) < 0.02
