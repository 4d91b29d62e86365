"""Offline training from Python: the document's example, continuing, saving, loading, evaluating, and errors."""

from __future__ import annotations

import json
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import h5py
import numpy as np
import pytest
import torch
from gymnasium import spaces
from offline_worlds import TwoStep, two_step_dataset

from deft import (
    CQLTrainer,
    DecisionTransformerTrainer,
    IQLTrainer,
    OfflineReplayBuffer,
    OfflineRLConfig,
    PPOTrainer,
    ReBRACTrainer,
    RLConfig,
    TD3BCTrainer,
)
from deft.cli import main
from deft.config.algorithm_settings import DTSettings
from deft.config.loading import load_config
from deft.data.datasets.dataset import box
from deft.envs.make import wrap
from deft.errors import InputError
from deft.evaluation.evaluate import evaluate_run
from deft.evaluation.rollouts import evaluate_policy

TRAINERS: list[Any] = [IQLTrainer, CQLTrainer, TD3BCTrainer, ReBRACTrainer, DecisionTransformerTrainer]
ENV = "deft-test/TwoStep-v0"

# The document's example; its two import lines from `train.offline_rl` are what changes.
EXAMPLE = """
from deft import IQLTrainer
from deft import OfflineRLConfig, OfflineReplayBuffer

# Configuration
config = OfflineRLConfig(
    num_epochs=100,
    batch_size=256,
    learning_rate=3e-4,
    output_dir="./output/iql",
)

# Create trainer
trainer = IQLTrainer(
    obs_dim=11,
    action_dim=3,
    config=config,
    expectile=0.7,      # Expectile for value regression
    temperature=3.0,    # Temperature for advantage weighting
)

# Load dataset (D4RL format)
import d4rl
import gymnasium as gym

env = gym.make("hopper-medium-v2")
dataset = env.get_dataset()

buffer = OfflineReplayBuffer(obs_dim=11, action_dim=3)
buffer.load_dataset(dataset)

# Train
trainer.train(buffer)
"""
OWN = {
    "IQLTrainer": "expectile=0.7,      # Expectile for value regression\n    temperature=3.0,",
    "CQLTrainer": "cql_alpha=5.0, cql_samples=10, min_q_weight=1.0,",
    "TD3BCTrainer": "alpha=2.5, noise_clip=0.5, policy_delay=2,",
    "ReBRACTrainer": "policy_bc_coef=0.01, critic_bc_coef=0.001,",
    "DecisionTransformerTrainer": "context_length=20, n_layer=3, n_head=1, embed_dim=128,",
}


class HopperMedium(gymnasium.Env):
    """What D4RL's environments add: `get_dataset`. Hopper's sizes, three episodes of noise."""

    def __init__(self) -> None:
        self.observation_space, self.action_space = box(11), box(3, -1.0, 1.0)

    def get_dataset(self) -> dict[str, np.ndarray]:
        generator = np.random.default_rng(0)
        return {
            "observations": generator.normal(size=(90, 11)).astype(np.float32),
            "actions": generator.uniform(-1, 1, (90, 3)).astype(np.float32),
            "rewards": generator.normal(size=90).astype(np.float32),
            "terminals": np.arange(90) % 30 == 29,
            "timeouts": np.zeros(90, bool),
        }


@pytest.fixture(autouse=True)
def _environments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A stand-in for d4rl, which registers its environments; and the two-step world under an id."""
    monkeypatch.setitem(sys.modules, "d4rl", types.ModuleType("d4rl"))
    gymnasium.register("hopper-medium-v2", HopperMedium, order_enforce=False, disable_env_checker=True)
    gymnasium.register(ENV, entry_point="offline_worlds:TwoStep")
    yield
    del gymnasium.registry["hopper-medium-v2"], gymnasium.registry[ENV]


@pytest.mark.parametrize("name", OWN)
def test_the_example_of_the_document_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = EXAMPLE.replace("IQLTrainer", name).replace(OWN["IQLTrainer"], OWN[name])
    names: dict[str, Any] = {}
    exec(re.sub("num_epochs=100", "num_epochs=2", example), names)
    trainer = names["trainer"]
    # 90 transitions in batches of 256: an epoch is one update.
    assert trainer.global_step == 2
    assert (tmp_path / "output" / "iql" / "checkpoint-2").is_dir()
    assert trainer.run_dir.resolve() == (tmp_path / "output" / "iql").resolve()
    assert all(bool(torch.isfinite(value).all()) for value in trainer.policy.state_dict().values())


def config(folder: Path, **changes: Any) -> OfflineRLConfig:
    """Epochs of ⌈400 / 100⌉ = 4 updates on the two-step dataset."""
    quiet = {"console_level": "CRITICAL", "tensorboard": False, "enable_file_logging": False}
    small = {"hidden_dim": 8, "batch_size": 100, "num_epochs": 1, "eval_freq": 0, "device": "cpu", "threads": 1}
    return OfflineRLConfig(**{"output_dir": str(folder), **quiet, **small, **changes})


def own(trainer_class: Any) -> dict[str, Any]:
    """What keeps an algorithm small."""
    return {
        "IQLTrainer": {"learning_rate_schedule": "constant"},
        "CQLTrainer": {"cql_samples": 2},
        "DecisionTransformerTrainer": {"embed_dim": 8, "n_layer": 1, "context_length": 2},
    }.get(trainer_class.__name__, {})


def make(trainer_class: Any, folder: Path, env: Any = None, **changes: Any) -> Any:
    return trainer_class(2, 1, config(folder, **changes), env=env, **own(trainer_class))


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.policy.state_dict().items()}


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("trainer_class", TRAINERS)
def test_train_called_again_goes_on(trainer_class: Any, tmp_path: Path) -> None:
    dataset = two_step_dataset()
    whole = make(trainer_class, tmp_path / "whole")
    whole.train(dataset, num_epochs=2)
    parts = make(trainer_class, tmp_path / "parts")
    assert parts.train(OfflineReplayBuffer(2, 1).load_dataset(dataset))["updates"] == 4
    assert parts.train(dataset, num_epochs=2)["updates"] == 8
    assert parts.global_step == 8
    assert_same(weights(whole), weights(parts))


def columns(num_episodes: int = 200) -> dict[str, np.ndarray]:
    """The two-step dataset as D4RL has it."""
    dataset = two_step_dataset(num_episodes)
    episodes = [dataset.episode(index) for index in range(num_episodes)]
    return {
        "observations": np.concatenate([episode.observation[:-1] for episode in episodes]),
        "actions": np.concatenate([episode.action for episode in episodes]),
        "rewards": np.concatenate([episode.reward for episode in episodes]),
        "terminals": np.concatenate([episode.terminated for episode in episodes]),
        "timeouts": np.zeros(len(dataset), bool),
    }


def test_a_path_given_again_is_the_same_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "own.hdf5"
    with h5py.File(path, "w") as file:
        for name, values in columns().items():
            file[name] = values
    monkeypatch.chdir(tmp_path)
    trainer = make(IQLTrainer, tmp_path / "run")
    assert trainer.train(str(path))["updates"] == 4
    assert trainer.train("own.hdf5", num_epochs=2)["updates"] == 8
    assert trainer.train(path, num_epochs=3)["updates"] == 12
    assert main(["train", "--resume", str(tmp_path / "run"), "--num-epochs", "4"]) == 0  # the run knows its dataset
    assert (tmp_path / "run" / "checkpoint-16").is_dir()


def test_weights_alone_are_loaded_to_act_with(tmp_path: Path) -> None:
    trainer = make(IQLTrainer, tmp_path / "run")
    trainer.train(two_step_dataset())
    torch.save(trainer.policy.state_dict(), tmp_path / "weights.pt")
    other = make(IQLTrainer, tmp_path / "other", seed=5)
    other.load(tmp_path / "weights.pt")
    assert_same(weights(trainer), weights(other))
    assert other.global_step == 0


def test_what_a_buffer_was_loaded_from_and_a_checkpoint_saved_alone_serve_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own.hdf5"
    with h5py.File(path, "w") as file:
        for name, values in columns().items():
            file[name] = values
    trainer = make(IQLTrainer, tmp_path / "run", env=ENV)
    trainer.train(OfflineReplayBuffer(2, 1).load_dataset(path))
    alone = trainer.save(tmp_path / "kept" / "policy")
    trainer.close()
    assert main(["train", "--resume", str(tmp_path / "run"), "--num-epochs", "2"]) == 0
    assert (tmp_path / "run" / "checkpoint-8").is_dir()
    capsys.readouterr()
    assert main(["evaluate", str(alone), "--episodes", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["episodes"] == 3


def test_another_dataset_needs_another_trainer(tmp_path: Path) -> None:
    trainer, dataset = make(TD3BCTrainer, tmp_path), two_step_dataset()
    trainer.train(dataset)
    with pytest.raises(InputError, match=r"^train: this TD3BCTrainer trains on two-step; make another one for arrays"):
        trainer.train(OfflineReplayBuffer(2, 1).load_dataset(columns(10)))
    assert trainer.train(dataset, num_epochs=2)["updates"] == 8


@pytest.mark.parametrize("trainer_class", TRAINERS)
def test_saved_and_loaded_it_goes_on_as_if_it_had_not_stopped(trainer_class: Any, tmp_path: Path) -> None:
    dataset = two_step_dataset()
    whole = make(trainer_class, tmp_path / "whole")
    whole.train(dataset, num_epochs=2)

    first = make(trainer_class, tmp_path / "first")
    first.train(dataset)
    saved = first.save(tmp_path / "kept" / "halfway")
    assert saved == tmp_path / "kept" / "halfway"
    second = make(trainer_class, tmp_path / "second", seed=5)
    second.load(saved)
    assert second.global_step == 4
    assert_same(weights(first), weights(second))  # at once, for whoever wants to act
    assert second.train(dataset, num_epochs=2)["updates"] == 8
    assert_same(weights(whole), weights(second))
    second.load(saved)  # a trainer that is under way goes back
    assert second.global_step == 4
    assert_same(weights(first), weights(second))


@pytest.mark.parametrize("trainer_class", TRAINERS)
@pytest.mark.parametrize("env", [ENV, TwoStep()], ids=["id", "environment"])
def test_evaluate_plays_in_the_given_environment(trainer_class: Any, env: Any, tmp_path: Path) -> None:
    trainer = make(trainer_class, tmp_path, env=env)
    trainer.train(two_step_dataset())
    results = trainer.evaluate(num_episodes=3)
    assert results["episodes"] == 3
    assert results["mean_length"] == 2.0
    assert results["mean_reward"] in (0.0, 1.0)  # the policy acts without exploring, and every episode is the same
    assert results["normalized_score"] == 100 * results["mean_reward"]  # its references are 0 and 1
    trainer.close()


def test_evaluation_while_training_uses_the_given_environment(tmp_path: Path) -> None:
    trainer = make(TD3BCTrainer, tmp_path, env=TwoStep(), eval_freq=1, num_epochs=2)
    assert trainer.train(two_step_dataset())["best_reward"] in (0.0, 1.0)
    assert (tmp_path / "best").exists()
    trainer.close()


def test_without_an_environment_or_a_dataset_it_says_what_is_missing(tmp_path: Path) -> None:
    trainer = make(IQLTrainer, tmp_path)
    for call in (trainer.evaluate, trainer.save, lambda: trainer.run_dir):
        with pytest.raises(InputError, match="IQLTrainer has no dataset yet"):
            call()
    assert trainer.global_step == 0
    trainer.train(two_step_dataset())
    with pytest.raises(InputError, match=r"env="):
        trainer.evaluate()


def test_settings_may_be_given_in_their_order(tmp_path: Path) -> None:
    assert IQLTrainer(2, 1, config(tmp_path), 0.9, 10.0).config.algorithm.cfg.expectile == 0.9  # type: ignore[attr-defined]
    cfg: Any = CQLTrainer(2, 1, config(tmp_path), 1.0, 4, 0.75).config.algorithm.cfg
    assert (cfg.cql_alpha, cfg.cql_samples, cfg.min_q_weight) == (1.0, 4, 0.75)
    cfg = TD3BCTrainer(2, 1, config(tmp_path), 1.0, 0.3, 3, policy_noise=0.1).config.algorithm.cfg
    assert (cfg.alpha, cfg.noise_clip, cfg.policy_delay, cfg.policy_noise) == (1.0, 0.3, 3, 0.1)
    cfg = DecisionTransformerTrainer(2, 1, config(tmp_path), 5, 2, 2, 16).config.algorithm.cfg
    assert (cfg.context_length, cfg.n_layer, cfg.n_head, cfg.embed_dim) == (5, 2, 2, 16)


def test_a_default_that_an_algorithm_has_no_use_for_may_be_given_to_it() -> None:
    # As the document's whole block is: `tau` means nothing to a transformer, and another value raises an error.
    assert DecisionTransformerTrainer(2, 1, OfflineRLConfig(tau=0.005, num_critics=2)).config.algorithm.name == "dt"
    with pytest.raises(InputError, match=r"tau: 0\.1 is given, but dt has no such setting"):
        DecisionTransformerTrainer(2, 1, OfflineRLConfig(tau=0.1))


def test_without_a_config_the_algorithm_has_its_own_defaults() -> None:
    assert DecisionTransformerTrainer(2, 1).config.algorithm.cfg == DTSettings()
    assert DecisionTransformerTrainer(2, 1).config.output_dir == "./output/offline_rl"


@pytest.mark.parametrize(
    ("make_trainer", "line"),
    [
        (lambda: IQLTrainer(2, 1, expectile=1.5), "expectile: 1.5 is out of range"),
        (lambda: IQLTrainer(2, 1, expectil=0.5), "did you mean 'expectile'?"),
        (lambda: IQLTrainer(2, 1, OfflineRLConfig(), expectil=0.5), "did you mean 'expectile'?"),
        (lambda: IQLTrainer(2, 1, OfflineRLConfig(), num_epochs=5), "num_epochs: is a setting of OfflineRLConfig"),
        (lambda: IQLTrainer(action_dim=1), "obs_dim: missing"),
        (lambda: IQLTrainer(obs_dim=2), "action_dim: missing"),
        (lambda: IQLTrainer("11", 3), "obs_dim: '11' is not a size"),
        (lambda: IQLTrainer(11, 0), "action_dim: 0 is not a size"),
        (lambda: CQLTrainer(2, 1, OfflineRLConfig().to_run_config("iql")), "CQLTrainer trains with 'cql'"),
        (lambda: DecisionTransformerTrainer(2, 1, OfflineRLConfig(num_seeds=3)), "num_seeds: dt trains one"),
        (lambda: TD3BCTrainer(2, action_space=spaces.Discrete(3)), "bounded Box"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(make_trainer: Any, line: str) -> None:
    with pytest.raises(InputError) as error:
        make_trainer()
    assert line in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"obs_dim": 3, "action_dim": 1}, "obs_dim: the policy was made for Box(-inf, inf, (3,)"),
        ({"obs_dim": 2, "action_dim": 2}, "action_dim: the policy acts in Box(-1.0, 1.0, (2,)"),
        # Half the range of the data's actions: it would act on another scale than it learned from.
        ({"obs_dim": 2, "action_space": box(1, -0.5, 0.5)}, "give that as action_space"),
    ],
)
def test_a_dataset_that_does_not_fit_is_refused_in_one_line(options: Any, line: str, tmp_path: Path) -> None:
    trainer = TD3BCTrainer(config=config(tmp_path / "run"), **options)
    with pytest.raises(InputError) as error:
        trainer.train(two_step_dataset())
    assert line in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_policy_that_was_trained_keeps_its_normalisation(tmp_path: Path) -> None:
    first = make(TD3BCTrainer, tmp_path / "first")
    first.train(two_step_dataset())
    before = weights(first)
    second = TD3BCTrainer(config=config(tmp_path / "second"), policy=first.policy)
    second.prepare(two_step_dataset(10))
    assert_same(before, weights(second))


def test_a_policy_keeps_its_distribution_whatever_trains_it(tmp_path: Path) -> None:
    gaussian, squashed = make(IQLTrainer, tmp_path / "a").policy, make(CQLTrainer, tmp_path / "b").policy
    for name, kind, policy in (("c", CQLTrainer, gaussian), ("d", TD3BCTrainer, squashed)):
        trainer = kind(config=config(tmp_path / name), policy=policy)
        trainer.train(two_step_dataset(env_id=ENV))
        written = load_config(trainer.run_dir / "config.yaml")
        assert written.policy.distribution == policy.policy_config.distribution  # so that it can be rebuilt
        assert "mean_reward" in evaluate_run(trainer.run_dir, episodes=2, env=f"offline_worlds:{ENV}")
        trainer.close()


@pytest.mark.parametrize(("env", "has_score"), [("deft-test/TwoStep-v0", True), ("deft-test/Other-v0", False)])
def test_a_score_is_of_the_datasets_own_environment(env: str, has_score: bool, tmp_path: Path) -> None:
    gymnasium.register("deft-test/Other-v0", entry_point="offline_worlds:TwoStep")
    try:
        trainer = make(TD3BCTrainer, tmp_path / "a", env=gymnasium.make(env))
        trainer.train(two_step_dataset(env_id=ENV))
        assert ("normalized_score" in trainer.evaluate(2)) == has_score
        # And likewise from the command line, in the environment given there.
        own = make(TD3BCTrainer, tmp_path / "b")
        own.train(two_step_dataset(env_id=ENV))
        assert ("normalized_score" in evaluate_run(tmp_path / "b", episodes=2, env=env)) == has_score
        assert "normalized_score" in evaluate_run(tmp_path / "b", episodes=2, env=f"offline_worlds:{ENV}")
        # And in a resumed run.
        resumed = make(TD3BCTrainer, tmp_path / "b", env=env, num_epochs=2, resume=str(tmp_path / "b"))
        resumed.train(two_step_dataset(env_id=ENV))
        assert ("normalized_score" in resumed.evaluate(2)) == has_score
    finally:
        del gymnasium.registry["deft-test/Other-v0"]


def test_the_episodes_of_a_transformer_are_kept_too(tmp_path: Path) -> None:
    settings = own(DecisionTransformerTrainer) | {"target_return": [1.0, 0.5]}
    trainer = DecisionTransformerTrainer(2, 1, config(tmp_path), **settings)
    trainer.train(two_step_dataset())
    played: list[Any] = []
    results = evaluate_policy(trainer.policy, wrap([TwoStep()]), 3, played=played)
    assert len(played) == 3  # of the target that leads
    assert np.mean([episode.episode_return for episode in played]) == results["mean_reward"]


def test_what_is_no_dataset_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a name or a path is trained on, not dict"):
        make(TD3BCTrainer, tmp_path).train({"observations": np.zeros((4, 2))})


def test_offline_and_then_online(tmp_path: Path) -> None:
    """The document's second step: PPO continues with the policy that IQL trained."""
    offline = make(IQLTrainer, tmp_path / "iql")
    offline.train(two_step_dataset())
    before = weights(offline)
    online = RLConfig(
        total_timesteps=64,
        rollout_steps=32,
        learning_rate=1e-3,
        output_dir=str(tmp_path / "ppo"),
        console_level="CRITICAL",
        eval_freq=0,
        device="cpu",
    )
    trainer = PPOTrainer(TwoStep(), policy=offline.policy, config=online)
    trainer.train()
    after = dict(trainer.policy.state_dict())
    assert trainer.policy is offline.policy
    assert any(not torch.equal(value, after[name]) for name, value in before.items() if "actor" in name)
    trainer.close()
