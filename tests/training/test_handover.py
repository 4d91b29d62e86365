"""A policy from one run to the next: cloned from a robot's recordings, trained on in an environment of that robot."""

import json

import numpy as np
import pytest
import torch
from lerobot_worlds import ENV_ID, LIMIT, PickAndPlace
from shared_data import shared_data
from tensordict import TensorDict

from deft import cli, schema
from deft.envs.make import wrap
from deft.evaluation.evaluate import find_run, load_policy
from deft.models.vla.actor import VLAActor
from deft.training import run

DATASET = "lerobot_v2/robot_sim_picknplace"
ENV = f"lerobot_worlds:{ENV_ID}"
SMALL = ["--vla-model-config", "image_size=32", "width=32", "cell=4"]
COMMON = ["--eval-freq", 0, "--threads", 1, "--device", "cpu", "--json"]
ONLINE = [*COMMON, "--env", ENV, "--num-envs", 2]


@pytest.fixture(autouse=True)
def _no_plots(monkeypatch):
    monkeypatch.setattr(run, "plot_run", lambda folder: [])


@pytest.fixture
def deft(capsys, tmp_path, monkeypatch):
    """Runs a command that must succeed; what it prints as JSON."""
    monkeypatch.chdir(tmp_path)

    def command(*arguments):
        status = cli.main([str(argument) for argument in arguments])
        output = capsys.readouterr()
        assert status == 0, output.err
        return json.loads(output.out.splitlines()[-1])

    return command


def clone(deft, folder, *more):
    options = ["skip_missing=true", "image_size=64", "episodes=[0]"]
    data = ["--dataset", shared_data(DATASET), "--dataset-options", *options]
    short = ["--num-epochs", 1, "--updates-per-epoch", 2, "--batch-size", 4, "--val-fraction", 0]
    return deft("train", "sft", *data, "--model", "vla-tiny", *SMALL, *short, *COMMON, "--output-dir", folder, *more)


def play(folder):
    """The policy of a run, and what it draws in an environment."""
    checkpoint, config = find_run(folder)
    env = wrap([PickAndPlace()], chunk_length=config.policy.chunk_length)
    policy = load_policy(checkpoint, config, env, "cpu")
    env.close()
    torch.manual_seed(0)
    streams = {
        "state": torch.randn(3, 44),
        "ego_view": torch.randint(0, 256, (3, 3, 256, 256), dtype=torch.uint8),
        "instruction": torch.randint(97, 123, (3, 40), dtype=torch.uint8),
    }
    with torch.no_grad():
        return policy, policy.act(TensorDict({schema.OBSERVATION: TensorDict(streams, [3])}, [3]))


def test_a_policy_cloned_from_a_lerobot_dataset_continues_with_ppo_grpo_and_sac(deft, tmp_path):
    """The dataset's actions have ranges of their own, such as -4 to -2; the environment's Box is that of the robot."""
    clone(deft, "sft")
    clone(deft, "single", "--chunk-length", 1)
    short = ["--rollout-steps", 4, "--batch-size", 8, "--n-epochs", 1, "--total-timesteps", 32, "--learning-rate", 1e-30]
    deft("train", "ppo", "--model-path", "sft", *ONLINE, *short, "--output-dir", "ppo")
    deft("train", "ppo", "--model", "vla-tiny", "--model-path", "sft", *ONLINE, *short, "--output-dir", "named")
    short = ["--group-size", 2, "--batch-size", 8, "--n-epochs", 1, "--num-iterations", 1, "--learning-rate", 1e-30]
    deft("train", "grpo", "--model-path", "sft", *ONLINE, *short, "--output-dir", "grpo")
    short = ["--learning-starts", 4, "--batch-size", 4, "--total-timesteps", 8, "--buffer-size", 8]
    deft("train", "sac", "--model-path", "single", *ONLINE, *short, "--policy-learning-rate", 1e-30, "--output-dir", "sac")

    # With a learning rate of 1e-30 each is still the cloned policy: one action distribution in the robot's units.
    for source, names in (("sft", ["ppo", "named", "grpo"]), ("single", ["sac"])):
        policy, cloned = play(tmp_path / source)
        assert policy.center[11].item() == pytest.approx(-3)  # a joint that never moves: -3 ± 1
        for name in names:
            other, acted = play(tmp_path / name)
            assert isinstance(other, VLAActor) == (name != "named")
            assert torch.equal(acted[schema.ACTION], cloned[schema.ACTION]), name
            assert torch.equal(acted[schema.LOG_PROB], cloned[schema.LOG_PROB]), name
            assert other.model.image_size == 32
    assert np.abs(cloned[schema.ACTION].numpy()).max() > 1  # not the unit actions
    assert LIMIT == PickAndPlace().action_space.high[0]


def test_the_handed_over_policy_learns_and_is_resumed_and_evaluated(deft, tmp_path):
    clone(deft, "sft")
    short = ["--rollout-steps", 4, "--batch-size", 8, "--n-epochs", 1, "--learning-rate", 1e-3]
    deft("train", "ppo", "--model-path", "sft", *ONLINE, *short, "--total-timesteps", 32, "--output-dir", "ppo")
    deft("train", "ppo", "--resume", "ppo", "--config", "ppo/config.yaml", "--total-timesteps", 64, "--json")
    before, after = (play(tmp_path / name)[0] for name in ("sft", "ppo"))
    assert torch.equal(after.center, before.center)
    assert any(not torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))
    results = deft("evaluate", "ppo", "--env", ENV, "--episodes", 2, "--device", "cpu", "--json")
    assert results["episodes"] == 2
