"""`critic_observation` in runs: training, resuming, handing over, and playing where the stream does not exist."""

import json

import pytest
import torch
from worlds import SecretSign

import deft
from deft import cli
from deft.config.loading import resolve
from deft.evaluation.evaluate import evaluate_run
from deft.runs.policy_spaces import PolicySpaces
from deft.training import run
from deft.training.run import build_trainer

ENV = "worlds:deft-tests/SecretSign-v0"
QUIET = {"console_level": "CRITICAL", "tensorboard": False}
SMALL = {"hidden_sizes": [16], "hidden_dim": 16, "encoder_dim": 8}
COMMON = ["--threads", 1, "--device", "cpu", "--eval-freq", 0, "--json"]
PPO = ["--env", ENV, "--rollout-steps", 8, "--batch-size", 8, "--n-epochs", 1, *COMMON]
SHORT = ["--hidden-sizes", 8, "--hidden-dim", 8, "--encoder-dim", 8, "--total-timesteps", 16]


@pytest.fixture(autouse=True)
def _no_plots(monkeypatch):
    monkeypatch.setattr(run, "plot_run", lambda folder: [])


@pytest.fixture
def command(capsys, tmp_path, monkeypatch):
    """Run a command, which must succeed; return its JSON."""
    monkeypatch.chdir(tmp_path)

    def execute(*arguments):
        status = cli.main([str(argument) for argument in arguments])
        output = capsys.readouterr()
        assert status == 0, output.err
        return json.loads(output.out.splitlines()[-1])

    return execute


def trainer(folder, names=("secret",), **changes):
    config = {
        "algorithm": {"name": "ppo", "cfg": {"batch_size": 64, "n_epochs": 4, "learning_rate": 3e-3, "gamma": 0.9}},
        "env": {"id": ENV, "num_envs": 4},
        "policy": {**SMALL, "critic_observation": list(names)},
        "trainer": {"rollout_steps": 64, "eval_freq": 0, "save_freq": 0, "log_freq": 1},
        "logging": QUIET,
        "output_dir": str(folder),
        "threads": 1,
        "device": "cpu",
    }
    return build_trainer(resolve({**config, **changes}))


def explained_variance(folder, names, **env):
    made = trainer(folder, names, env={"id": ENV, "num_envs": 4, "kwargs": env})
    made.train(2048)
    made.close()
    return float(made.run.last_metrics["explained_variance"])


def test_only_the_privileged_stream_predicts_the_return(tmp_path):
    # The return is ± Σ γ^k: its sign is in `secret` alone, so that without it no V is better than a constant (0).
    seeing = explained_variance(tmp_path / "seeing", ["secret"])
    blind = explained_variance(tmp_path / "blind", [], offers_secret=False)
    assert seeing > 0.8
    assert blind < 0.3


@pytest.mark.parametrize("memory", [0, 4])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, memory):
    policy = {**SMALL, "critic_observation": ["secret"], "memory_hidden": memory}
    whole = trainer(tmp_path / "whole", policy=policy)
    whole.train(768)
    half = trainer(tmp_path / "half", policy=policy)
    half.train(256)
    half.close()
    resumed = trainer(tmp_path / "half", policy=policy, resume=str(tmp_path / "half"))
    resumed.train(768)
    assert whole.global_step == resumed.global_step == 768
    expected = whole.policy.state_dict()
    assert any(name.startswith("critic.") for name in expected)
    for name, value in resumed.policy.state_dict().items():
        assert torch.equal(value, expected[name]), name
    for made in (whole, resumed):
        made.close()


def test_a_run_is_played_recorded_and_loaded_without_the_stream(command, tmp_path):
    command("train", "ppo", *PPO, *SHORT, "--critic_observation", "secret", "--output-dir", "run")
    folder = next((tmp_path / "run").glob("checkpoint-*"))
    assert list(PolicySpaces.read(folder).observation) == ["image", "state"]
    seeing = command("evaluate", "run", "--episodes", 2, "--device", "cpu", "--json")
    blind = command(
        "evaluate", "run", "--episodes", 2, "--env-kwargs", "offers_secret=false", "--device", "cpu", "--json"
    )
    assert seeing["episodes"] == blind["episodes"] == 2
    record = ["--policy", "run", "--env-kwargs", "offers_secret=false", "--episodes", 2, "--out", "data/secret/own-v0"]
    command("collect", *record, "--device", "cpu", "--json")
    assert list(deft.load_dataset("data/secret/own-v0").observation_space) == ["image", "state"]
    policy = deft.load_policy("run", device="cpu", trust_remote_code=True)
    env = SecretSign(offers_secret=False)
    observation, _ = env.reset(seed=0)
    assert policy.streams == ["image", "state"]
    assert env.action_space.contains(policy.get_action(observation))
    assert evaluate_run("run", episodes=1, device="cpu", trust_remote_code=True)["episodes"] == 1


@pytest.mark.parametrize(
    "model", [[], ["--model", "vla-tiny", "--vla-model-config", "image_size=32", "width=32", "cell=4"]]
)
def test_supervised_then_ppo_then_grpo(command, tmp_path, model):
    """A policy cloned where the stream does not exist keeps its actions, and gets a value that reads the stream."""
    blind = ["--env", ENV, "--env-kwargs", "offers_secret=false"]
    command("collect", *blind, "--policy", "random", "--episodes", 2, "--out", "data/secret/random-v0", "--json")
    sft = ["--num-epochs", 1, "--updates-per-epoch", 1, "--batch-size", 4, "--val-fraction", 0, *COMMON]
    size = model or ["--hidden-dim", 8, "--encoder-dim", 8]
    command("train", "sft", "--dataset", "data/secret/random-v0", *size, *sft, "--output-dir", "sft")
    more = ["--critic_observation", "secret", "--env-kwargs", "offers_secret=true"]
    still = ["--learning-rate", 1e-30, "--total-timesteps", 16, "--trust-remote-code"]
    command("train", "ppo", *PPO, *still, "--model-path", "sft", *more, "--output-dir", "ppo")
    before, after = (deft.load_policy(name, device="cpu", trust_remote_code=True) for name in ("sft", "ppo"))
    observation, _ = SecretSign(offers_secret=False).reset(seed=0)
    assert before.get_action(observation) == pytest.approx(after.get_action(observation))
    weights = torch.load(next((tmp_path / "ppo").glob("checkpoint-*")) / "model.pt", weights_only=True)
    assert any(name.startswith("critic.") for name in weights)
    grpo = ["--env", ENV, "--group-size", 2, "--batch-size", 8, "--n-epochs", 1, "--num-iterations", 1, *COMMON]
    command("train", "grpo", *grpo, "--model-path", "ppo", "--trust-remote-code", "--output-dir", "grpo")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ppo", "--critic_observation", "goal"], "has no stream 'goal'; it has image, secret, state"),
        (["ppo", "--critic_observation", "image"], "'image' is an image or a text"),
        (["ppo", "--critic_observation", "secret", "secret"], "named twice"),
        (["grpo", "--critic_observation", "secret"], "grpo trains no value function that reads privileged streams"),
    ],
)
def test_bad_input(arguments, message, capsys, tmp_path):
    output = ["--output-dir", tmp_path / "run"]
    assert cli.main([str(one) for one in ["train", *arguments, "--env", ENV, *COMMON, *output]]) == 2
    assert message in capsys.readouterr().err
