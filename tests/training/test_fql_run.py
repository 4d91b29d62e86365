"""Runs of FQL and Q-chunking: offline, online on a mix of data, exact resume, and what they continue with."""

from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from offline_worlds import TwoStep, two_step_dataset

from deft import FQLTrainer, OfflineRLConfig, cli
from deft.config.loading import resolve
from deft.training import replay_collection, run
from deft.training.offline_run import build_offline_trainer
from deft.training.run import build_trainer

QUIET = {"console_level": "CRITICAL", "tensorboard": False, "progress_bar": False}
TWO_STEP = "deft-test/TwoStep-v0"
QC = {"policy_extraction": "best_of_n", "num_candidates": 4}


@pytest.fixture(autouse=True)
def _worlds(monkeypatch):
    monkeypatch.setattr(run, "plot_run", lambda folder: [])
    monkeypatch.setattr(replay_collection, "load_dataset", lambda path: two_step_dataset())
    gymnasium.register(TWO_STEP, entry_point=TwoStep)
    yield
    del gymnasium.registry[TWO_STEP]


def config(folder: Path, algorithm: str, chunk_length: int = 2, run_settings: Any = None, **cfg: Any) -> Any:
    online = algorithm == "fql-online"
    cfg = {"batch_size": 32, "learning_rate": 3e-3, "tau": 0.05, "normalize_q": True, "alpha": 1.0, **cfg}
    if online:
        cfg = {"learning_starts": 40, "prior_data": "two-step", **cfg}
    trainer = {"total_timesteps": 120} if online else {"num_epochs": 4, "updates_per_epoch": 10}
    return resolve(
        {
            "algorithm": {"name": algorithm, "cfg": cfg},
            "env": {"id": TWO_STEP, **({"num_envs": 2} if online else {})},
            "policy": {"hidden_dim": 16, "chunk_length": chunk_length},
            "trainer": {**trainer, "eval_freq": 0, "save_freq": 0},
            "logging": QUIET,
            "threads": 1,
            "device": "cpu",
            "output_dir": str(folder),
            **(run_settings or {}),
        }
    )


def assert_same(whole: Any, second: Any) -> None:
    assert whole.algorithm.version == second.algorithm.version > 0
    for part in ("policy", "critics"):
        expected, got = (getattr(one.algorithm, part).state_dict() for one in (whole, second))
        assert [name for name, value in expected.items() if not torch.equal(value, got[name])] == []


@pytest.mark.parametrize("cfg", [{}, QC], ids=["qc-fql", "qc"])
def test_online_training_on_equals_training_twice(tmp_path, cfg):
    trainers = [build_trainer(config(tmp_path / name, "fql-online", **cfg)) for name in ("whole", "first", "second")]
    whole, first, second = trainers
    whole.train()
    first.train(66)
    second.load(first.save())
    second.train(120)
    assert_same(whole, second)
    for trainer in trainers:
        trainer.close()


def test_offline_training_on_equals_training_twice(tmp_path):
    data = two_step_dataset()
    trainers = [build_offline_trainer(config(tmp_path / name, "fql"), data) for name in ("whole", "first", "second")]
    whole, first, second = trainers
    whole.train()
    first.train(2)
    second.load(first.save())
    second.train(4)
    assert_same(whole, second)


def test_from_the_dataset_to_the_environment_by_chunks(tmp_path):
    """One chunk is a whole episode of two steps; the first of them decides the reward."""
    offline = build_offline_trainer(config(tmp_path / "offline", "fql"), two_step_dataset())
    offline.train()
    source = {"model_path": str(offline.run_dir)}
    online = build_trainer(config(tmp_path / "online", "fql-online", 1, source))
    assert online.policy.chunk_length == 2  # that of the run which it continues
    before = offline.algorithm.critics.state_dict()
    assert all(torch.equal(value, before[name]) for name, value in online.algorithm.critics.state_dict().items())
    online.train()
    assert online.evaluate(20)["mean_reward"] > 0.8  # 0.3 is that of the data
    online.close()


def test_the_commands_and_what_is_rejected_in_one_line(tmp_path, capsys):
    data = two_step_dataset()
    options = {"num_epochs": 1, "batch_size": 32, "hidden_dim": 16, "eval_freq": 0, "device": "cpu", **QUIET}
    trainer = FQLTrainer(2, 1, OfflineRLConfig(**options, output_dir=str(tmp_path / "fql")))
    trainer.train(data)
    few = ["--env", TWO_STEP, "--total-timesteps", "30", "--learning-starts", "20", "--batch-size", "8"]
    few += ["--eval-freq", "0", "--device", "cpu", "--console-level", "ERROR", "--model-path", str(tmp_path / "fql")]
    assert cli.main(["train", "fql-online", *few, "--output-dir", str(tmp_path / "online")]) == 0
    assert cli.main(["evaluate", str(tmp_path / "online"), "--episodes", "2", "--device", "cpu", "--json"]) == 0
    capsys.readouterr()
    assert cli.main(["train", "sac", *few, "--output-dir", str(tmp_path / "sac")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "a fql policy is a flow that acts by critics and cannot be trained with sac" in error
    assert cli.main(["train", "fql-online", *few, "--chunk-length", "3", "--output-dir", str(tmp_path / "other")]) == 2
    error = capsys.readouterr().err
    assert f"chunk_length: 3, but the policy of {tmp_path / 'fql'} was trained with 1; give --chunk_length 1" in error


def test_it_starts_from_a_cloned_flow(tmp_path):
    section = {"policy": {"hidden_dim": 16, "distribution": "flow", "chunk_length": 2}}
    cloned = build_offline_trainer(config_of_sft(tmp_path / "sft", section), two_step_dataset())
    cloned.train()
    source = {"model_path": str(cloned.run_dir)}
    trainer = build_offline_trainer(config(tmp_path / "fql", "fql", 2, source), two_step_dataset())
    weights = cloned.policy.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in trainer.policy.base.state_dict().items())
    trainer.train()


def config_of_sft(folder: Path, section: dict[str, Any]) -> Any:
    return resolve(
        {
            "algorithm": {"name": "sft", "cfg": {"batch_size": 32, "val_fraction": 0.0}},
            "trainer": {"num_epochs": 1, "updates_per_epoch": 5, "eval_freq": 0, "save_freq": 0},
            "logging": QUIET,
            "threads": 1,
            "device": "cpu",
            "output_dir": str(folder),
            **section,
        }
    )
