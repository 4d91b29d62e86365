"""Runs of DSRL: from a cloned flow with a bad and a good mode to the good one, resume, deployment, and errors."""

import gymnasium
import pytest
import torch
from offline_worlds import TwoStep, two_step_dataset

import deft
from deft.config.loading import resolve
from deft.errors import InputError
from deft.evaluation.evaluate import evaluate_run
from deft.training import run
from deft.training.offline_run import build_offline_trainer
from deft.training.run import build_trainer

QUIET = {"console_level": "CRITICAL", "tensorboard": False, "progress_bar": False}
ENV = "deft-test/TwoStep-v0"


@pytest.fixture(autouse=True)
def _worlds(monkeypatch):
    monkeypatch.setattr(run, "plot_run", lambda folder: [])
    gymnasium.register(ENV, entry_point=TwoStep)
    yield
    del gymnasium.registry[ENV]


@pytest.fixture(scope="module")
def cloned(tmp_path_factory):
    """A flow policy of demonstrations of which 3 of 10 act well."""
    folder = tmp_path_factory.mktemp("sft") / "run"
    config = resolve(
        {
            "algorithm": {"name": "sft", "cfg": {"batch_size": 128, "learning_rate": 1e-2, "val_fraction": 0}},
            "policy": {"distribution": "flow", "hidden_dim": 32},
            "trainer": {"num_epochs": 1, "updates_per_epoch": 150, "eval_freq": 0, "save_freq": 0},
            "logging": QUIET,
            "threads": 1,
            "output_dir": str(folder),
        }
    )
    trainer = build_offline_trainer(config, two_step_dataset())
    trainer.train()
    trainer.close()
    return folder


def config(tmp_path, cloned, name="run", steps=240, **cfg):
    cfg = {"batch_size": 64, "learning_starts": 60, "learning_rate": 1e-2, "tau": 0.1, "critic_warmup": 20, **cfg}
    return resolve(
        {
            "algorithm": {"name": "dsrl", "cfg": cfg},
            "env": {"id": ENV, "num_envs": 2},
            "trainer": {"total_timesteps": steps, "eval_freq": 0, "save_freq": 0},
            "logging": QUIET,
            "threads": 1,
            "model_path": str(cloned),
            "output_dir": str(tmp_path / name),
        }
    )


@pytest.mark.parametrize("critic", ["noise", "action"])
def test_it_selects_the_noise_of_the_good_mode(tmp_path, cloned, critic):
    """Cloning acts well in about 3 of 10 episodes; the noise that leads there is all that is learned."""
    trainer = build_trainer(config(tmp_path, cloned, critic=critic))
    frozen = {name: value.clone() for name, value in trainer.policy.base.state_dict().items()}
    trainer.train()
    assert all(torch.equal(value, frozen[name]) for name, value in trainer.policy.base.state_dict().items())
    assert trainer.evaluate(10)["mean_reward"] == 1.0
    trainer.save()
    trainer.close()
    results = evaluate_run(str(tmp_path / "run"), episodes=5)
    assert results["mean_reward"] == 1.0
    assert results["action_selection"] == "mode"
    loaded = deft.load_policy(tmp_path / "run")
    assert 0.2 < float(loaded.get_action([0.0, 0.0])[0]) < 1.0  # near the demonstrated 0.6
    with pytest.raises(InputError, match=r"a dsrl policy is a frozen policy .* cannot be trained with sac"):
        build_trainer(resolve({"algorithm": {"name": "sac"}, "env": {"id": ENV}, "model_path": str(tmp_path / "run")}))


@pytest.mark.parametrize("cfg", [{}, {"critic": "action", "n_step": 2}])
def test_training_on_equals_training_twice(tmp_path, cloned, cfg):
    whole = build_trainer(config(tmp_path, cloned, "whole", 90, **cfg))
    whole.train()
    first = build_trainer(config(tmp_path, cloned, "first", 90, **cfg))
    first.train(74)
    folder = first.save()
    second = build_trainer(config(tmp_path, cloned, "second", 90, **cfg))
    second.load(folder)
    second.train(90)
    assert whole.algorithm.version == second.algorithm.version > 0
    states = [{**one.policy.state_dict(), **one.algorithm.critics.state_dict()} for one in (whole, second)]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    for trainer in (whole, first, second):
        trainer.close()


def test_a_resumed_run_keeps_the_bound_of_its_noise(tmp_path, cloned):
    first = build_trainer(config(tmp_path, cloned, "first", 80))
    first.train()
    folder = first.save()
    first.close()
    for start in (folder, tmp_path / "first"):  # its weights contain the bound
        with pytest.raises(
            InputError, match=r"noise_bound: 2\.0, and the weights .* with 1\.5; give --noise_bound 1\.5"
        ):
            build_trainer(config(tmp_path, start, "continued", noise_bound=2.0))
    second = build_trainer(config(tmp_path, cloned, "second", 80, noise_bound=2.0))
    with pytest.raises(
        InputError, match=r"noise_bound: 2, and the checkpoint was trained with 1.5; give --noise_bound"
    ):
        second.load(folder)
    second.close()


def test_critics_of_something_else_are_not_loaded(tmp_path, cloned):
    first = build_trainer(config(tmp_path, cloned, "first", 80))
    first.train()
    first.save()
    first.close()
    with pytest.raises(InputError, match=r"critics of .*first judge noise, and those of dsrl judge actions; use --no-"):
        build_trainer(config(tmp_path, tmp_path / "first", "second", critic="action", keep_critics=True))
    build_trainer(config(tmp_path, tmp_path / "first", "third", keep_critics=True)).close()


def test_a_policy_to_steer_is_required(tmp_path):
    settings = {"algorithm": {"name": "dsrl"}, "env": {"id": ENV}, "logging": QUIET, "output_dir": str(tmp_path / "a")}
    with pytest.raises(InputError, match=r"give --model_path a run of sft with --distribution flow"):
        build_trainer(resolve(settings))
