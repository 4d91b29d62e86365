"""Runs of Cal-QL: offline and then online on a mix of both data, and that they resume exactly."""

from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from offline_worlds import TwoStep, first_action, two_step_dataset

from deft import CalQLTrainer, CQLTrainer, OfflineRLConfig, cli, schema
from deft.config.loading import resolve
from deft.training import replay_collection, run
from deft.training.run import build_trainer

QUIET = {"console_level": "CRITICAL", "tensorboard": False, "progress_bar": False}
TWO_STEP = "deft-test/TwoStep-v0"


@pytest.fixture(autouse=True)
def _worlds(monkeypatch):
    monkeypatch.setattr(run, "plot_run", lambda folder: [])
    monkeypatch.setattr(replay_collection, "load_dataset", lambda path: two_step_dataset())
    gymnasium.register(TWO_STEP, entry_point=TwoStep)
    yield
    del gymnasium.registry[TWO_STEP]


def config(folder: Path, steps: int = 120, **run_settings: Any) -> Any:
    cfg = {"batch_size": 32, "learning_starts": 20, "cql_alpha": 0.5, "cql_samples": 2, "prior_data": "two-step"}
    cfg |= {"learning_rate": 3e-3, "policy_learning_rate": 3e-3, "tau": 0.05, **run_settings.pop("cfg", {})}
    return resolve(
        {
            "algorithm": {"name": "cal-ql", "cfg": cfg},
            "env": {"id": TWO_STEP, "num_envs": 2},
            "policy": {"hidden_dim": 16, "num_layers": 2},
            "trainer": {"total_timesteps": steps, "eval_freq": 0, "save_freq": 0},
            "logging": QUIET,
            "threads": 1,
            "output_dir": str(folder),
            **run_settings,
        }
    )


def test_batches_mix_returns_of_the_dataset_and_of_episodes(tmp_path):
    trainer = CalQLTrainer(config=config(tmp_path, 40, cfg={"gamma": 0.9, "prior_fraction": 0.25})).trainer
    trainer.train()
    batch = trainer.collection.sample(400)
    # Both the dataset and the environment pay 1 at the second step of a good episode: 0.9 from the first, 1 from the
    # second. The first action's sign, at the second step that in the observation, shows a good one.
    second = batch[schema.OBSERVATION][:, 0] == 1
    good = torch.where(second, batch[schema.OBSERVATION][:, 1], batch[schema.ACTION][:, 0]) > 0
    torch.testing.assert_close(batch[schema.VALUE_TARGET], good * torch.where(second, 1.0, 0.9))
    trainer.close()


def test_training_on_equals_training_twice(tmp_path):
    trainers = [build_trainer(config(tmp_path / name)) for name in ("whole", "first", "second")]
    whole, first, second = trainers
    whole.train()
    first.train(66)
    second.load(first.save())
    second.train(120)
    assert whole.algorithm.version == second.algorithm.version > 0
    for part in ("policy", "critics"):
        expected, got = (getattr(one.algorithm, part).state_dict() for one in (whole, second))
        assert [name for name, value in expected.items() if not torch.equal(value, got[name])] == []
    for trainer in trainers:
        trainer.close()


def test_from_the_dataset_to_the_environment_it_finds_the_good_action(tmp_path):
    options = {"num_epochs": 1, "batch_size": 32, "hidden_dim": 16, "eval_freq": 0, "device": "cpu", **QUIET}
    settings = {"cql_alpha": 0.5, "cql_samples": 2, "cal_ql": True}
    offline = CQLTrainer(2, 1, OfflineRLConfig(**options, output_dir=str(tmp_path / "offline")), **settings)
    offline.train(two_step_dataset())
    trainer = build_trainer(config(tmp_path / "online", 300, model_path=str(offline.run_dir)))
    trainer.train()
    # Most of the data acts badly, with −0.6; the good actions of the rest are above 0.
    assert first_action(trainer.policy) > 0.2
    trainer.close()


def test_the_command(tmp_path):
    arguments = ["train", "cal-ql", "--env", TWO_STEP, "--prior-data", "two-step", "--total-timesteps", "30"]
    arguments += ["--learning-starts", "20", "--batch-size", "8", "--cql-samples", "2", "--eval-freq", "0"]
    assert cli.main([*arguments, "--device", "cpu", "--output-dir", str(tmp_path), "--console-level", "ERROR"]) == 0
