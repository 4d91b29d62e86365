"""The success classifier: its loss by hand, a task that it labels right, and runs that learn from it."""

import math

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from offline_worlds import batch_of, make_linear

from deft import DatasetWriter, load_policy
from deft.algorithms.reward_model import RewardModelTraining
from deft.config.algorithm_settings import RewardModelSettings
from deft.config.groups import RewardModelConfig
from deft.config.settings import DatasetPolicyConfig
from deft.data.datasets.dataset import box
from deft.envs.make import wrap
from deft.models.reward_model import RewardModel
from deft.runs.checkpoint import load_tensors
from deft.runs.policies import checkpoint_folder
from deft.training.reward_model import RewardModelEnv

ENV = "deft-test/Blind-v0"
COMMON = ["--threads", 1, "--device", "cpu", "--eval-freq", 0, "--save-freq", 0, "--no-progress-bar", "--json"]

pytestmark = pytest.mark.usefixtures("no_plots")


class Blind(gymnasium.Env):
    """x ← x + a in [-1, 1], five steps; the goal is x > 0.5, and the reward is always 0."""

    def __init__(self):
        self.observation_space = spaces.Box(-10, 10, (1,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.steps = 0.0, 0
        return np.array([self.x], np.float32), {}

    def step(self, action):
        self.x = float(np.clip(self.x + float(action[0]), -1, 1))
        self.steps += 1
        done = self.steps == 5
        return np.array([self.x], np.float32), 0.0, False, done, {"success": self.x > 0.5} if done else {}


@pytest.fixture(autouse=True)
def _world():
    gymnasium.register(ENV, entry_point=Blind)
    yield
    del gymnasium.registry[ENV]


def classifier(slope, bias):
    """sigmoid(slope · x + bias)."""
    model = RewardModel(box(1), DatasetPolicyConfig(hidden_dim=4, normalize_observation=False))
    make_linear(model.network, 0, [[slope]], [bias])
    return model


def test_the_loss_by_hand():
    training = RewardModelTraining(classifier(2.0, 0.0))
    training.positive_weight = 3.0
    batch = batch_of([0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [1.0, 0.5], [1.0, 0.0])
    losses, labels, logits = training._losses(batch)
    # Logits 2 and 1. Positive: 3 · log(1 + e^−2) = 3 · 0.126928; negative: log(1 + e^1) = 1.313262
    assert logits.tolist() == [2.0, 1.0]
    assert labels.tolist() == [1.0, 0.0]
    assert losses.tolist() == pytest.approx([3 * 0.126928, 1.313262], abs=1e-5)
    metrics = training.validate([batch])
    assert float(metrics["bc_loss"]) == pytest.approx((3 * 0.126928 + 1.313262) / 2, abs=1e-5)
    assert (float(metrics["positive_accuracy"]), float(metrics["negative_accuracy"])) == (1.0, 0.0)
    by_reward = RewardModelTraining(classifier(1.0, 0.0), RewardModelSettings(label="reward", reward_threshold=0.5))
    assert by_reward._labels(batch_of([0.0] * 2, [0.0] * 2, [0.6, 0.4], [0.0] * 2, [0.0, 1.0])).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("terminates", [False, True])
def test_the_environment_gets_the_reward_of_the_classifier(terminates):
    settings = RewardModelConfig(path="run", output="probability", threshold=0.5, terminates=terminates)
    env = RewardModelEnv(wrap([Blind(), Blind()]), classifier(4.0, -2.0), settings)
    env.reset(0)
    step = env.step(np.array([[1.0], [0.25]], np.float32))
    # p(x) = sigmoid(4 x − 2): x = 1 gives sigmoid(2), x = 0.25 gives sigmoid(−1)
    assert step.reward.tolist() == pytest.approx([1 / (1 + math.exp(-2)), 1 / (1 + math.exp(1))], abs=1e-6)
    assert step.terminated.tolist() == [terminates, False]
    assert step.done_index.tolist() == ([0] if terminates else [])
    if terminates:
        assert step.final_observation.tolist() == [[1.0]]
    for _ in range(4):
        step = env.step(np.array([[-1.0], [0.25]], np.float32))
    # The fifth step ends both episodes: x = −1 and 1, classified before the reset. Of env 1, x = 1 is a success.
    assert step.observation.tolist() == [[0.0], [0.0]]
    assert step.reward.tolist() == pytest.approx([1 / (1 + math.exp(6)), 1 / (1 + math.exp(-2))], abs=1e-6)
    assert step.done_index.tolist() == [0, 1]
    assert step.terminated.tolist() == [False, terminates]
    assert step.truncated.tolist() == [True, True]


@pytest.fixture
def dataset(tmp_path):
    """Random walks that end with success where x > 0.5, and are marked so."""
    generator = np.random.default_rng(0)
    with DatasetWriter(tmp_path / "frames-v0") as writer:
        for _ in range(40):
            x = generator.uniform(-1, 0.4, (6, 1)).astype(np.float32)
            is_success = generator.random() < 0.5
            x[-1] = generator.uniform(0.6, 1.0) if is_success else x[-1]
            terminations = np.array([False] * 4 + [is_success])
            writer.add_episode(x, np.zeros((5, 1), np.float32), terminations=terminations)
    return tmp_path / "frames-v0"


def train_model(deft, dataset, *more):
    words = ["--dataset", dataset, "--hidden-dim", 16, "--batch-size", 32, "--learning-rate", "1e-2", *COMMON]
    return deft("train", "reward-model", *words, *more)


def test_a_policy_learns_from_the_classifier_alone(deft, dataset, tmp_path):
    train_model(deft, dataset, "--num-epochs", 12, "--output-dir", "model")
    ppo = ["train", "ppo", "--env", ENV, "--num-envs", 4, "--reward-model", "model", "--hidden-sizes", 16, *COMMON]
    ppo += ["--rollout-steps", 25, "--batch-size", 50, "--learning-rate", "1e-2", "--gamma", 0.9]
    deft(*ppo, "--total-timesteps", 1500, "--output-dir", "ppo")
    # The goal is x > 0.5, which the environment never rewards.
    assert deft("evaluate", "ppo", "--episodes", 5, "--json")["success_rate"] == 1.0
    assert load_policy(tmp_path / "ppo", device="cpu").get_action(np.zeros(1, np.float32))[0] > 0.3


def test_training_on_equals_training_twice(deft, dataset, tmp_path):
    train_model(deft, dataset, "--num-epochs", 4, "--output-dir", "whole")
    train_model(deft, dataset, "--num-epochs", 2, "--output-dir", "half")
    train_model(deft, dataset, "--num-epochs", 4, "--output-dir", "half", "--auto-resume")
    ppo = ["train", "ppo", "--env", ENV, "--num-envs", 2, "--reward-model", "whole", "--hidden-sizes", 8, *COMMON]
    ppo += [
        "--rollout-steps",
        10,
        "--batch-size",
        20,
        "--reward-model-terminates",
        "--reward-model-output",
        "probability",
    ]
    deft(*ppo, "--total-timesteps", 80, "--output-dir", "ppo_whole")
    deft(*ppo, "--total-timesteps", 40, "--output-dir", "ppo_half")
    deft(*ppo, "--total-timesteps", 80, "--output-dir", "ppo_half", "--auto-resume")
    for first, second in (("whole", "half"), ("ppo_whole", "ppo_half")):
        whole, twice = (load_tensors(checkpoint_folder(tmp_path / name) / "model.pt") for name in (first, second))
        for name, value in whole.items():
            assert torch.equal(value, twice[name]), name


def test_errors(deft_or_error, dataset, tmp_path):
    train = ["train", "reward-model", *COMMON]
    assert "has no positive frame by the rule 'reward'" in deft_or_error(
        *train, "--dataset", dataset, "--label", "reward"
    )
    ppo = ["train", "ppo", "--env", ENV, *COMMON]
    assert "nothing does not exist; give a run directory" in deft_or_error(*ppo, "--reward-model", tmp_path / "nothing")
    assert "is not a run of `deft train reward-model`" in deft_or_error(*ppo, "--reward-model", dataset)
    error = deft_or_error(*ppo, "--reward-model-threshold", 0.7)
    assert "--reward-model: missing; it must be given" in error


def test_errors_of_a_run(deft, deft_or_error, dataset):
    train_model(deft, dataset, "--num-epochs", 1, "--output-dir", "model")
    no_policy = "model: a run of reward-model does not act; give it to --reward_model of a training run"
    assert no_policy in deft_or_error("evaluate", "model")  # before an environment is asked for
    assert f"model_path: {no_policy}" in deft_or_error("train", "sac", "--env", ENV, *COMMON, "--model-path", "model")
    error = deft_or_error("train", "sac", "--env", "Pendulum-v1", *COMMON, "--reward-model", "model")
    assert (
        "reward_model: model reads the observations vector of shape (1,), and the environment has vector of shape (3,)"
        in error
    )
    assert "recordings of this environment" in error
    error = deft_or_error("train", "dagger", "--env", ENV, *COMMON, "--reward-model", "model")
    assert "reward_model: dagger learns from no reward; leave it out" in error
