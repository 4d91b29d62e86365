"""Runs that correct a frozen policy: a known answer, exact resume, evaluation, and what is rejected."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from offline_worlds import schema_row

from deft import DatasetWriter, cli, load_policy, schema
from deft.runs.checkpoint import load_tensors
from deft.runs.policies import checkpoint_folder

ENV = "deft-test/Offset-v0"
COMMON = ["--threads", 1, "--device", "cpu", "--eval-freq", 0, "--save-freq", 0, "--no-progress-bar", "--json"]
SAC = ["--batch-size", 64, "--learning-starts", 40, "--learning-rate", "1e-2", "--gamma", "0", "--tau", "0.05"]
RESIDUAL = ["--residual-hidden-sizes", 32]

pytestmark = pytest.mark.usefixtures("no_plots")


class Offset(gymnasium.Env):
    """Reward −|a − x − 0.3| for observation x, five steps: a policy that copies x loses 0.3 a step."""

    def __init__(self):
        self.observation_space = spaces.Box(-0.5, 0.5, (1,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._draw(), {}

    def step(self, action):
        reward = -abs(float(action[0]) - self.x - 0.3)
        self.steps += 1
        return self._draw(), reward, False, self.steps == 5, {}

    def _draw(self):
        self.x = float(self.np_random.uniform(-0.5, 0.5))
        return np.array([self.x], np.float32)


@pytest.fixture(autouse=True)
def _world():
    gymnasium.register(ENV, entry_point=Offset)
    yield
    del gymnasium.registry[ENV]


@pytest.fixture(scope="module")
def cloned(tmp_path_factory):
    """A run of sft that copies x."""
    folder = tmp_path_factory.mktemp("cloned")
    x = np.random.default_rng(0).uniform(-0.5, 0.5, (200, 6, 1)).astype(np.float32)
    with DatasetWriter(folder / "copy-v0") as writer:
        for episode in x:
            writer.add_episode(episode, episode[:5])
    arguments = ["train", "sft", "--dataset", folder / "copy-v0", "--output-dir", folder / "sft", *COMMON]
    small = ["--hidden-dim", 32, "--num-epochs", 8, "--batch-size", 32, "--learning-rate", "3e-3", "--loss", "mse"]
    assert cli.main([str(word) for word in (*arguments, *small, "--val-fraction", 0)]) == 0
    return folder / "sft"


def weights(folder):
    return load_tensors(checkpoint_folder(folder) / "model.pt")


def action(folder, x=0.0):
    return float(load_policy(folder, device="cpu").get_action(np.array([x], np.float32))[0])


def test_sac_learns_the_known_correction(deft, cloned, tmp_path):
    assert action(cloned, 0.2) == pytest.approx(0.2, abs=0.05)
    base = ["--env", ENV, "--num-envs", 4, "--model-path", cloned, *SAC, *RESIDUAL, *COMMON]
    result = deft("train", "sac", *base, "--residual-scale", 0.5, "--total-timesteps", 320, "--output-dir", "wide")
    assert action(tmp_path / "wide", 0.2) == pytest.approx(0.5, abs=0.07)
    # At most 0.1 may be added where 0.3 is missing: the residual is at its bound.
    deft("train", "sac", *base, "--residual-scale", 0.1, "--total-timesteps", 160, "--output-dir", "narrow")
    assert action(tmp_path / "narrow", 0.2) - action(cloned, 0.2) == pytest.approx(0.1, abs=0.02)
    assert result["timesteps"] == 320
    frozen, before = weights(tmp_path / "wide"), weights(cloned)
    for name, value in before.items():
        assert torch.equal(frozen[f"base.{name}"], value), name
    # 5 steps of 0.3 before, and nearly nothing after
    assert deft("evaluate", cloned, "--env", ENV, "--episodes", 5, "--json")["mean_reward"] < -1.2
    assert deft("evaluate", "wide", "--env", ENV, "--episodes", 5, "--json")["mean_reward"] > -0.5


@pytest.mark.parametrize("algorithm", ["sac", "ppo"])
def test_training_on_equals_training_twice(deft, cloned, tmp_path, algorithm):
    own = {"sac": SAC, "ppo": ["--rollout-steps", 30, "--batch-size", 60, "--n-epochs", 2]}[algorithm]
    words = ["train", algorithm, "--env", ENV, "--num-envs", 2, "--model-path", cloned, *own, *RESIDUAL, *COMMON]
    words += ["--residual-scale", 0.2, "--residual-horizon", 100]
    deft(*words, "--total-timesteps", 120, "--output-dir", "whole")
    deft(*words, "--total-timesteps", 60, "--output-dir", "half")
    deft(*words, "--total-timesteps", 120, "--output-dir", "half", "--auto-resume")
    whole, twice = weights(tmp_path / "whole"), weights(tmp_path / "half")
    assert whole.keys() == twice.keys()
    for name, value in whole.items():
        assert torch.equal(value, twice[name]), name
    assert float(whole["probability"]) == 1.0
    assert not torch.equal(whole["residual.weights.1"], torch.zeros_like(whole["residual.weights.1"]))


def test_before_the_horizon_the_frozen_policy_mostly_acts(deft, cloned, tmp_path):
    words = ["train", "ppo", "--env", ENV, "--num-envs", 2, "--model-path", cloned, *RESIDUAL, *COMMON]
    deft(*words, "--rollout-steps", 30, "--residual-scale", 0.2, "--residual-horizon", 600, "--total-timesteps", 60)
    (run,) = (tmp_path / "outputs").iterdir()
    policy = load_policy(run, device="cpu", deterministic=False).policy
    assert float(policy.probability) == pytest.approx(0.1)  # 60 of 600 env steps
    with torch.no_grad():
        td = policy.act(schema_row(torch.zeros(400, 1)))
    assert 15 <= int(td[schema.SAMPLE][schema.USES_RESIDUAL].sum()) <= 70


def test_a_residual_needs_a_policy_to_correct(deft_or_error):
    error = deft_or_error("train", "sac", "--env", ENV, "--residual-scale", 0.1, *COMMON)
    assert "residual_scale: corrects a trained policy; give one with --model_path" in error
    error = deft_or_error("train", "sac", "--env", ENV, "--residual-horizon", 10, *COMMON)
    assert "scale" in error
