"""PPO and GRPO of policies that denoise: from cloned demonstrations, 3 of 10 good, to good actions; resume."""

import gymnasium
import pytest
import torch
from offline_worlds import TwoStep, two_step_dataset

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
    """Runs of sft with a flow and with a diffusion policy."""
    folder = tmp_path_factory.mktemp("sft")
    for distribution in ("flow", "diffusion"):
        config = resolve(
            {
                "algorithm": {"name": "sft", "cfg": {"batch_size": 128, "learning_rate": 1e-2, "val_fraction": 0}},
                "policy": {"distribution": distribution, "hidden_dim": 32},
                "trainer": {"num_epochs": 1, "updates_per_epoch": 150, "eval_freq": 0, "save_freq": 0},
                "logging": QUIET,
                "threads": 1,
                "output_dir": str(folder / distribution),
            }
        )
        trainer = build_offline_trainer(config, two_step_dataset())
        trainer.train()
        trainer.close()
    return folder


def config(tmp_path, source, name="run", algorithm="ppo", steps=2048, policy=(), **cfg):
    rollout = {"rollout_steps": 16} if algorithm == "ppo" else {}
    cfg = {"batch_size": 64, "learning_rate": 5e-3, "entropy_coef": 0.0, **cfg}
    return resolve(
        {
            "algorithm": {"name": algorithm, "cfg": cfg},
            "env": {"id": ENV, "num_envs": 8},
            "policy": dict(policy),
            "trainer": {"total_timesteps": steps, "eval_freq": 0, "save_freq": 0, **rollout},
            "logging": QUIET,
            "threads": 1,
            "model_path": str(source),
            "output_dir": str(tmp_path / name),
        }
    )


DPPO = {"ratio": "token", "denoising_discount": 0.95}


@pytest.mark.parametrize(
    ("source", "policy", "cfg"),
    [
        ("flow", {"noise_network": True}, {}),
        ("diffusion", {"trained_steps": 3, "noise_min": 0.1}, DPPO),
    ],
)
def test_ppo_learns_the_good_mode(tmp_path, cloned, source, policy, cfg):
    """The first action must be positive: 3 of 10 are after cloning, more than 8 of 10 after PPO."""
    trainer = build_trainer(config(tmp_path, cloned / source, policy=policy, **cfg))
    before = trainer.evaluate(40)["mean_reward"]
    trainer.train()
    after = trainer.evaluate(40)["mean_reward"]
    trainer.save()
    trainer.close()
    assert before < 0.6
    assert after > 0.8
    assert evaluate_run(str(tmp_path / "run"), episodes=20)["mean_reward"] > 0.7


@pytest.mark.parametrize(
    ("algorithm", "source", "policy", "cfg"),
    [
        ("ppo", "flow", {"noise_network": True}, {}),
        ("ppo", "diffusion", {"trained_steps": 2}, DPPO),
        ("grpo", "diffusion", {}, {"ratio": "token"}),
    ],
)
def test_every_ratio_is_one_before_the_first_update(tmp_path, cloned, monkeypatch, algorithm, source, policy, cfg):
    trainer = build_trainer(config(tmp_path, cloned / source, "run", algorithm, 64, policy, n_epochs=1, **cfg))
    seen, loss = [], trainer.algorithm._loss

    def recorded(*given):
        result = loss(*given)
        seen.append(result[1]["log_ratio"])
        return result

    monkeypatch.setattr(trainer.algorithm, "_loss", recorded)
    trainer.train()
    trainer.close()
    assert float(seen[0].abs().max()) < 1e-4
    assert seen[0].ndim == (2 if "ratio" in cfg else 1)


@pytest.mark.parametrize(
    ("source", "policy", "cfg"), [("flow", {"noise_network": True}, {}), ("diffusion", {"trained_steps": 2}, DPPO)]
)
def test_training_on_equals_training_twice(tmp_path, cloned, source, policy, cfg):
    def trainer(name):
        return build_trainer(config(tmp_path, cloned / source, name, "ppo", 512, policy, **cfg))

    whole, first, second = trainer("whole"), trainer("first"), trainer("second")
    whole.train()
    first.train(256)
    second.load(first.save())
    second.train(512)
    states = [one.policy.state_dict() for one in (whole, second)]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    for one in (whole, first, second):
        one.close()


def test_settings_that_the_policy_does_not_use_are_errors(tmp_path, cloned):
    with pytest.raises(InputError, match=r"policy.noise_max: 0.5 has no effect: policy 'actor' has no use for it"):
        build_trainer(config(tmp_path, cloned / "diffusion", policy={"noise_max": 0.5}))
    with pytest.raises(InputError, match="denoising_discount: weighs single denoising steps; give ratio token"):
        config(tmp_path, cloned / "flow", denoising_discount=0.9)
