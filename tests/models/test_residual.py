"""A residual policy: its actions, log-probs and gate by hand, and what it keeps of the policy that it freezes."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from offline_worlds import make_linear, schema_row, small_actor
from policies import vla_policy
from tensordict import TensorDict
from vla_worlds import PlainModel

from deft import schema
from deft.config.groups import ResidualConfig
from deft.config.settings import DatasetPolicyConfig, PolicyConfig, VLAConfig
from deft.errors import InputError
from deft.models.building import make_policy
from deft.models.residual import ResidualPolicy

OBSERVATION = spaces.Box(-np.inf, np.inf, (1,), np.float32)
ACTION = spaces.Box(-2.0, 4.0, (1,), np.float32)  # centre 1, half width 3


def residual(scale=0.25, horizon=0, **config):
    """On a frozen policy whose unit action is tanh(x)."""
    base = small_actor(action_space=ACTION, normalize_observation=False)
    make_linear(base.actor, 0, [[1.0]], [0.0])
    section = ResidualConfig(scale=scale, horizon=horizon, hidden_sizes=(8,))
    settings = DatasetPolicyConfig(hidden_dim=16, normalize_observation=False, residual=section, **config)
    return ResidualPolicy(base, OBSERVATION, ACTION, settings)


@torch.no_grad()
def with_output(policy, mean, log_std):
    """The residual before tanh is N(mean, exp(log_std)²) everywhere."""
    policy.residual.weights[-1].zero_()
    policy.residual.biases[-1].copy_(torch.tensor([[[mean, log_std]]]))
    return policy


def test_the_action_of_the_frozen_policy_is_kept_at_the_start():
    # tanh(0.5) = 0.46212 in unit actions, 1 + 3 · 0.46212 = 2.38635 in the environment's units
    acted = residual().act(schema_row(torch.tensor([[0.5]])), deterministic=True)
    assert acted[schema.ACTION].tolist() == [[pytest.approx(2.38635, abs=1e-5)]]


def test_the_frozen_policy_acts_without_the_labels_that_its_training_read(monkeypatch):
    policy, calls = residual(), []
    acting = policy.base.encode_to_act
    monkeypatch.setattr(policy.base, "encode_to_act", lambda observation: calls.append(1) or acting(observation))
    td = policy.act(schema_row(torch.tensor([[0.5]])))
    policy.evaluate_actions(td)
    policy.encode(torch.tensor([[0.5]]))
    assert len(calls) == 3


def test_the_correction_is_bounded_and_the_sum_is_clipped():
    policy = with_output(residual(scale=0.25), 30.0, -5.0)  # tanh(30) = 1
    acted = policy.act(schema_row(torch.tensor([[0.5], [10.0]])), deterministic=True)
    # 1 + 3 · (0.46212 + 0.25) = 3.13635; the unit action tanh(10) + 0.25 is clipped to 1: 4
    assert acted[schema.ACTION].flatten().tolist() == pytest.approx([3.13635, 4.0], abs=1e-4)


def test_log_prob_and_entropy_by_hand():
    policy = with_output(residual(), 0.5, math.log(2.0))
    td = policy.act(schema_row(torch.tensor([[0.0]])))
    td[schema.SAMPLE][schema.BEFORE_TANH] = torch.tensor([[1.0]])
    with torch.no_grad():
        scored = policy.evaluate_actions(td)
    # N(1; 0.5, 2²): −½ (0.5 / 2)² − log 2 − ½ log 2π = −0.03125 − 0.693147 − 0.918939 = −1.643336
    # −log(1 − tanh²(1)) = −log 0.419974 = 0.867562;  entropy before tanh: log 2 + ½ + ½ log 2π = 2.112086
    assert float(scored["log_prob"]) == pytest.approx(-1.643336 + 0.867562, abs=1e-5)
    assert float(scored["entropy"]) == pytest.approx(2.112086, abs=1e-5)
    # log_prob of unit actions: u = b + 0.25 tanh(1), b = tanh(0) = 0
    unit = torch.full((1, 1, 1), 0.25 * math.tanh(1.0))
    with torch.no_grad():
        log_prob = policy.log_prob(policy.encode(torch.zeros(1, 1)), unit)
    assert float(log_prob) == pytest.approx(-0.775774, abs=1e-4)


def test_acting_and_scoring_agree_also_where_the_residual_is_left_out():
    policy = residual(horizon=100)
    policy.set_env_steps(50)
    td = policy.act(schema_row(torch.randn(64, 1)))
    used = td[schema.SAMPLE][schema.USES_RESIDUAL]
    assert 16 < int(used.sum()) < 48  # half of 64
    scored = policy.evaluate_actions(td)
    assert torch.allclose(scored["log_prob"], td[schema.LOG_PROB], atol=1e-6)
    assert (scored["log_prob"][~used] == 0).all()
    assert (scored["entropy"][~used] == 0).all()
    base = policy.from_unit(td[schema.OBSERVATION].tanh())
    assert torch.allclose(td[schema.ACTION][~used], base[~used], atol=1e-6)
    assert not torch.isclose(td[schema.ACTION][used], base[used], atol=1e-6).any()


@pytest.mark.parametrize(("steps", "expected"), [(0, 0.0), (25, 0.25), (100, 1.0), (1000, 1.0)])
def test_the_residual_is_used_more_and_more(steps, expected):
    policy = residual(horizon=100)
    policy.set_env_steps(steps)
    assert float(policy.probability) == expected


def test_samples_have_gradients_for_the_residual_alone():
    policy = residual()
    samples, log_prob = policy.sample(policy.encode(torch.zeros(3, 1)), 2)
    assert samples.shape == (2, 1, 3, 1)
    (samples.sum() + log_prob.sum()).backward()
    assert all(parameter.grad is None for parameter in policy.base.parameters())
    assert any(parameter.grad is not None for parameter in policy.actor_parameters())
    assert not {id(one) for one in policy.base.parameters()} & {id(one) for one in policy.actor_parameters()}


def test_padded_dims_enter_no_log_prob():
    policy = make_residual(spaces.Box(-1.0, 1.0, (2,), np.float32))
    td = schema_row(torch.zeros(4, 1))
    td[schema.ACTION_MASK] = torch.tensor([True, False]).expand(4, 2)
    td = policy.act(td)
    assert (td[schema.ACTION][:, 1] == 0).all()
    before = policy.evaluate_actions(td)
    td[schema.SAMPLE][schema.BEFORE_TANH][:, 1] += 1.0
    assert torch.equal(before["log_prob"], policy.evaluate_actions(td)["log_prob"])
    assert torch.allclose(before["log_prob"], td[schema.LOG_PROB], atol=1e-6)


def make_residual(action=ACTION, observation=OBSERVATION, weights_follow=True, **config):
    section = ResidualConfig(scale=0.1, hidden_sizes=(8,))
    settings = DatasetPolicyConfig(hidden_dim=16, **{"residual": section, **config})
    return make_policy(settings, observation, action, weights_follow=weights_follow)


def test_weights_of_a_policy_become_those_of_the_frozen_one():
    base, policy = small_actor(action_space=ACTION), make_residual()
    policy.load_state_dict(policy.complete_weights(base.state_dict()))
    for name, value in base.state_dict().items():
        assert torch.equal(policy.state_dict()[f"base.{name}"], value), name
    again = make_residual()
    again.load_state_dict(again.complete_weights(policy.state_dict()))
    rows = schema_row(torch.randn(3, 1))
    assert torch.equal(*(one.act(rows.clone(), deterministic=True)[schema.ACTION] for one in (policy, again)))


def test_a_vla_model_with_chunks_is_corrected_on_its_own_features():
    observation = spaces.Dict(
        {
            schema.STATE: spaces.Box(-1, 1, (4,), np.float32),
            schema.WRIST_RGB: spaces.Box(0, 255, (3, 32, 32), np.uint8),
            schema.INSTRUCTION: spaces.Box(0, 255, (16,), np.uint8),
        }
    )
    action = spaces.Box(-1.0, 1.0, (2, 3), np.float32)
    model = VLAConfig(model_class="vla-tiny", model_config={"image_size": 32, "width": 16, "cell": 4, "head": "flow"})
    policy = make_residual(action, observation, name="vla", chunk_length=2, vla_config=model)
    rows = TensorDict({name: torch.as_tensor(np.stack([one.sample()] * 3)) for name, one in observation.items()}, [3])
    td = policy.act(TensorDict({schema.OBSERVATION: rows}, [3]))
    assert policy.encoder is None
    assert policy.feature_dim == policy.base.feature_dim > 0
    assert td[schema.ACTION].shape == (3, 2, 3)
    assert torch.allclose(policy.evaluate_actions(td)["log_prob"], td[schema.LOG_PROB], atol=1e-5)
    moved = policy.to_unit(td[schema.ACTION]) - td[schema.SAMPLE][schema.BASE_ACTION]
    assert float(moved.detach().abs().max()) <= 0.1 + 1e-6


def test_a_model_without_features_gets_an_encoder_of_the_residuals_own():
    space = spaces.Dict({"proprio": spaces.Box(-1, 1, (8,), np.float32)})
    action, config = spaces.Box(-1.0, 1.0, (2,), np.float32), PolicyConfig(unit_actions=True)
    base = vla_policy(PlainModel(), space, action, config)
    config = dataclasses.replace(config, residual=ResidualConfig(scale=0.1))
    policy = ResidualPolicy(base, space, action, config)
    assert policy.encoder is not None
    assert policy.feature_dim == 8
    td = TensorDict({schema.OBSERVATION: TensorDict({"proprio": torch.randn(5, 8)}, [5])}, [5])
    td = policy.act(td)
    assert torch.allclose(policy.evaluate_actions(td)["log_prob"], td[schema.LOG_PROB], atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"weights_follow": False}, "give one with --model_path"),
        ({"action": spaces.Discrete(3), "name": "actor_critic"}, "corrects continuous actions"),
        ({"action": spaces.Box(-np.inf, np.inf, (1,)), "name": "actor_critic"}, "has no bounds"),
        ({"name": "actor_critic", "memory_hidden": 4}, "recurrent memory"),
    ],
)
def test_policies_that_cannot_be_corrected_are_rejected(settings, words):
    with pytest.raises(InputError, match=words):
        make_residual(**settings)
