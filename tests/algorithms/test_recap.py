"""RECAP: labels by hand, a dataset where plain imitation fails, rounds in an environment, and exact resume."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from offline_worlds import ACTIONS, make_linear, schema_row, two_step_dataset

from deft import DatasetWriter, load_policy, schema
from deft.algorithms.recap import RecapOffline
from deft.config.algorithm_settings import RecapOfflineSettings
from deft.config.groups import AdvantageConfig
from deft.config.settings import DatasetPolicyConfig
from deft.data.datasets.dataset import box
from deft.errors import InputError
from deft.models.advantage import NEGATIVE, NONE, POSITIVE, conditioned_space
from deft.models.building import make_policy
from deft.runs.checkpoint import load_tensors
from deft.runs.policies import checkpoint_folder

ENV = "deft-test/Bandit-v0"
COMMON = ["--threads", 1, "--device", "cpu", "--eval-freq", 0, "--save-freq", 0, "--no-progress-bar", "--json"]
SMALL = ["--hidden-dim", 32, "--batch-size", 64, "--learning-rate", "1e-2"]

pytestmark = pytest.mark.usefixtures("no_plots")


class Bandit(gymnasium.Env):
    """Two steps of reward −|a − 0.5|."""

    def __init__(self):
        self.observation_space, self.action_space = box(1, -1.0, 1.0), box(1, -1.0, 1.0)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(1, np.float32), -abs(float(action[0]) - 0.5), self.steps == 2, False, {}


@pytest.fixture(autouse=True)
def _world():
    gymnasium.register(ENV, entry_point=Bandit)
    yield
    del gymnasium.registry[ENV]


def conditioned(observation=None, guidance=1.0, **config):
    settings = DatasetPolicyConfig(
        **{"hidden_dim": 32, "normalize_observation": False, "distribution": "gaussian", **config},
        advantage=AdvantageConfig(guidance=guidance),
    )
    return make_policy(settings, observation or box(1), ACTIONS)


def test_labels_by_hand():
    policy = conditioned()
    make_linear(policy.returns.network, 0, [[1.0]], [0.0])  # V(o) = o, in returns of mean 0 and deviation 1
    training = RecapOffline(policy, RecapOfflineSettings(positive_fraction=0.5, indicator_dropout=0.0, gamma=0.5))
    batch = {
        schema.OBSERVATION: torch.tensor([[0.0], [1.0], [2.0], [3.0]]),
        schema.NEXT_OBSERVATION: torch.tensor([[1.0], [2.0], [3.0], [0.0]]),
        schema.VALUE_TARGET: torch.tensor([3.0, 2.0, 2.0, 0.0]),
        schema.NEXT_REWARD: torch.tensor([0.0, 1.0, 1.0, 0.0]),
        schema.NEXT_TERMINATED: torch.tensor([0.0, 0.0, 0.0, 1.0]),
    }
    # R − V = 3, 1, 0, −3; the median is 0.5, so the first two are positive
    assert training.advantage(batch).tolist() == pytest.approx([3.0, 1.0, 0.0, -3.0])
    indicator, share = training._indicator(batch)
    assert indicator.tolist() == [POSITIVE, POSITIVE, NEGATIVE, NEGATIVE]
    assert float(share) == 0.5
    # An intervention is positive whatever its return
    marked, _ = training._indicator({**batch, schema.INTERVENTION: torch.tensor([False, False, False, True])})
    assert marked.tolist() == [POSITIVE, POSITIVE, NEGATIVE, POSITIVE]
    # r + γ V(o') − V(o) = 0 + ½ − 0, 1 + 1 − 1, 1 + 1.5 − 2, 0 − 3
    training.settings.advantage = "step"
    assert training.advantage(batch).tolist() == pytest.approx([0.5, 1.0, 0.5, -3.0])
    training.settings.indicator_dropout = 0.999
    assert (training._indicator(batch)[0] == NONE).sum() >= 3


def test_the_value_of_returns_has_their_scale():
    policy = conditioned()
    policy.returns.statistics.observe(torch.tensor([2.0, 6.0]))  # mean 4, deviation 2
    make_linear(policy.returns.network, 0, [[1.0]], [0.0])
    assert policy.returns(torch.tensor([[0.0], [1.5]])).tolist() == pytest.approx([4.0, 7.0], abs=1e-5)


def test_guidance_exaggerates_the_indicator():
    # mean(o, I) = tanh(0.5 I): guidance 2 gives 0 + 2 · tanh(0.5) = 0.92423, guidance 1 gives 0.46212
    for guidance, expected in ((1.0, 0.46212), (2.0, 0.92423), (5.0, 1.0)):
        policy = conditioned(guidance=guidance)
        make_linear(policy.base.actor, 0, [[0.0], [0.5]], [0.0])
        with torch.no_grad():
            acted = policy.act(schema_row(torch.zeros(1, 1)), deterministic=True)
        assert float(acted[schema.ACTION]) == pytest.approx(expected, abs=1e-4)


def test_the_indicator_is_the_last_word_of_an_instruction():
    space = spaces.Dict(
        {schema.INSTRUCTION: spaces.Box(0, 255, (6,), np.uint8), schema.STATE: spaces.Box(-1, 1, (2,), np.float32)}
    )
    policy = conditioned(space)
    rows = {
        schema.INSTRUCTION: torch.as_tensor(np.stack([schema.encode_text("pick", 6)] * 3)),
        schema.STATE: torch.zeros(3, 2),
    }
    texts = policy.conditioned(rows, torch.tensor([POSITIVE, NEGATIVE, NONE]))[schema.INSTRUCTION]
    assert [bytes(row.tolist()).rstrip(b"\0") for row in texts] == [b"pick positive", b"pick negative", b"pick"]
    assert texts.shape[1:] == conditioned_space(space, True)[schema.INSTRUCTION].shape == (15,)


@pytest.mark.parametrize("distribution", ["gaussian", "flow"])
def test_a_policy_of_a_vector_starts_as_it_was(distribution):
    """Weights without an indicator get a row of zeros for it: none changes an action before the first update."""
    plain = make_policy(
        DatasetPolicyConfig(hidden_dim=32, normalize_observation=True, distribution=distribution), box(2), ACTIONS
    )
    plain.observe(schema_row(torch.tensor([[1.0, 2.0], [3.0, -2.0], [5.0, 0.0]])))
    policy = conditioned(box(2), normalize_observation=True, distribution=distribution)
    policy.load_state_dict(policy.complete_weights(plain.state_dict()))
    rows = torch.tensor([[0.5, 1.0], [4.0, -1.0]])
    for indicator in (POSITIVE, NEGATIVE, NONE):
        actions = []
        for one, observation in ((plain, rows), (policy.base, policy.conditioned(rows, indicator))):
            torch.manual_seed(0)
            actions.append(one.act(schema_row(observation), deterministic=True)[schema.ACTION])
        torch.testing.assert_close(*actions, rtol=0, atol=1e-6)
    assert torch.equal(policy.base.actor.weights[0][:, 2], torch.zeros(1, 32))


def test_it_finds_the_better_actions_of_a_dataset():
    """3 of 10 first actions are about 0.6 and lead to reward 1; plain imitation finds the mean, −0.24."""
    dataset = two_step_dataset()
    policy = conditioned(box(2))
    settings = RecapOfflineSettings(positive_fraction=0.2, value_warmup=50, learning_rate=1e-2, gamma=1.0)
    training = RecapOffline(policy, settings)
    sampler = training.make_sampler(dataset, 0, torch.device("cpu"), 0)
    training.prepare(dataset, sampler, fresh=True)
    for _ in range(250):
        training.update(sampler.batches(128))
    with torch.no_grad():
        best = float(policy.act(schema_row(torch.zeros(1, 2)), deterministic=True)[schema.ACTION])
        plain = float(policy.base.mean(policy.base.encode(policy.conditioned(torch.zeros(1, 2), NONE))))
    assert best > 0.4
    assert plain < 0.1


def test_rounds_in_an_environment_improve_the_policy(deft, tmp_path):
    words = ["--env", ENV, "--num-envs", 8, "--rollout-steps", 16, "--updates-per-round", 40, "--value-warmup", 20]
    words += ["--log-std-init", -0.7, "--gamma", 0.5, *SMALL, *COMMON]
    deft("train", "recap", *words, "--total-timesteps", 512, "--output-dir", "run")
    action = float(load_policy(tmp_path / "run", device="cpu").get_action(np.zeros(1, np.float32))[0])
    assert action == pytest.approx(0.5, abs=0.25)  # it starts at 0
    # The episodes that it collected are a dataset, which an offline run starts from.
    data = ["--dataset", "run/episodes-v0", "--num-epochs", 1, "--updates-per-epoch", 3, "--value-warmup", 1]
    deft("train", "recap-offline", *data, *SMALL, *COMMON, "--output-dir", "offline")
    deft("evaluate", "offline", "--env", ENV, "--episodes", 2, "--json")
    ppo = ["--env", ENV, "--model-path", "run", "--total-timesteps", 32, "--rollout-steps", 16, *COMMON]
    deft("train", "ppo", *ppo, "--output-dir", "ppo")


def test_training_on_equals_training_twice(deft, tmp_path):
    with DatasetWriter(
        tmp_path / "prior-v0", action_space=box(1, -1.0, 1.0), observation_space=box(1, -1.0, 1.0)
    ) as one:
        for action in (-0.5, 0.5):
            one.add_episode(np.zeros((3, 1)), np.full((2, 1), action), [-abs(action - 0.5)] * 2)
    words = ["--env", ENV, "--num-envs", 2, "--rollout-steps", 5, "--updates-per-round", 4, "--value-warmup", 2]
    words += ["--prior-data", "prior-v0", *SMALL, *COMMON]
    deft("train", "recap", *words, "--total-timesteps", 40, "--output-dir", "whole")
    deft("train", "recap", *words, "--total-timesteps", 20, "--output-dir", "half")
    deft("train", "recap", *words, "--total-timesteps", 40, "--output-dir", "half", "--auto-resume")
    data = ["--dataset", "prior-v0", "--updates-per-epoch", 3, "--value-warmup", 2, *SMALL, *COMMON]
    deft("train", "recap-offline", *data, "--num-epochs", 4, "--output-dir", "data_whole")
    deft("train", "recap-offline", *data, "--num-epochs", 2, "--output-dir", "data_half")
    deft("train", "recap-offline", *data, "--num-epochs", 4, "--output-dir", "data_half", "--auto-resume")
    for names in (("whole", "half"), ("data_whole", "data_half")):
        whole, twice = (load_tensors(checkpoint_folder(tmp_path / name) / "model.pt") for name in names)
        for name, value in whole.items():
            assert torch.equal(value, twice[name]), name


def test_observations_without_a_place_for_the_indicator_are_rejected():
    with pytest.raises(InputError, match="adds an indicator"):
        conditioned_space(spaces.Box(0, 255, (3, 8, 8), np.uint8), False)
    with pytest.raises(InputError, match="in its instruction"):
        conditioned_space(spaces.Dict({schema.STATE: box(2)}), True)
