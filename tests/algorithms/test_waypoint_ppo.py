"""Waypoint PPO: GAE by hand, the penalty and its gradient, the opening bound, and updates that are taken back."""

import copy
import dataclasses

import pytest
import torch
from tensordict import TensorDict

from deft import schema
from deft.algorithms.waypoint_ppo import WaypointPPO
from deft.config.algorithm_settings import PPOSettings
from deft.models.waypoint import PPOPolicy, WaypointSFT, WaypointShape

SETTINGS = PPOSettings(batch_size=8, n_epochs=2, learning_rate=1e-2)


def make_policy(**settings):
    torch.manual_seed(0)
    sft = WaypointSFT(WaypointShape(camera_size=16, motion_dim=2, num_waypoints=4, encoder_dim=4, hidden_sizes=()))
    return PPOPolicy(sft, hidden_sizes=(8,), residual_modes=2, **settings)


def make_rollout(policy, steps=8, num_envs=2, target=None):
    """Rewards for waypoints near `target` metres to the left of the supervised ones."""
    rows = []
    for _ in range(steps):
        streams = {
            schema.CAMERA: torch.randint(0, 256, (num_envs, 3, 16, 16), dtype=torch.uint8),
            schema.MOTION: torch.randn(num_envs, 2),
            schema.SFT_OFFSET: torch.zeros(num_envs, 4, 2),
        }
        td = TensorDict({schema.OBSERVATION: TensorDict(streams, batch_size=[num_envs])}, batch_size=[num_envs])
        with torch.no_grad():
            policy.act(td)
        moved = (td[schema.ACTION] - td[schema.SAMPLE][schema.SFT_WAYPOINTS])[..., 1].mean(-1)
        td[schema.NEXT_REWARD] = -(moved - (0.5 if target is None else target)).square()
        td[schema.NEXT_TERMINATED] = torch.ones(num_envs, dtype=torch.bool)
        td[schema.NEXT_TRUNCATED] = torch.zeros(num_envs, dtype=torch.bool)
        td[schema.NEXT_VALUE] = torch.zeros(num_envs)
        td[schema.POLICY_VERSION] = torch.zeros(num_envs, dtype=torch.int64)
        rows.append(td)
    return torch.stack(rows)


def test_gae_by_hand():
    """γ = 0.5 and λ = 0.5, three steps; the second is a time limit, whose successor is worth 4.

    δ₂ = 3 + 0.5·2 − 1 = 3,                         A₂ = 3           (the rollout's end: V(next) = 2)
    δ₁ = 2 + 0.5·4 − 1 = 3,                         A₁ = 3           (cut: bootstrapped, nothing from beyond)
    δ₀ = 1 + 0.5·1 − 1 = 0.5,                       A₀ = 0.5 + 0.25·3 = 1.25
    """
    policy = make_policy(normalize_reward=False)
    algorithm = WaypointPPO(policy, PPOSettings(gamma=0.5, gae_lambda=0.5))
    rollout = make_rollout(policy, steps=3, num_envs=1)
    column = {
        schema.NEXT_REWARD: [1.0, 2.0, 3.0],
        schema.VALUE: [1.0, 1.0, 1.0],
        schema.NEXT_VALUE: [0.0, 4.0, 2.0],
        schema.NEXT_TERMINATED: [False] * 3,
        schema.NEXT_TRUNCATED: [False, True, False],
    }
    for key, values in column.items():
        rollout[key] = torch.tensor(values)[:, None]
    found = algorithm._with_advantages(rollout)
    torch.testing.assert_close(found[schema.ADVANTAGE][:, 0], torch.tensor([1.25, 3.0, 3.0]))
    torch.testing.assert_close(found[schema.VALUE_TARGET][:, 0], torch.tensor([2.25, 4.0, 4.0]))


def test_the_penaltys_gradient_is_autograds():
    policy = make_policy()
    with torch.no_grad():
        policy.delta_head.direct[0].weight.normal_(0, 0.1)
    algorithm = WaypointPPO(policy, PPOSettings(entropy_coef=0.02), kl_coef=0.3)
    plain = WaypointPPO(policy, PPOSettings(entropy_coef=0.02))
    batch = algorithm._with_advantages(make_rollout(policy)).flatten(0, 1)
    scored = policy.evaluate_actions(batch)
    parameters = list(policy.delta_head.parameters())
    difference = algorithm._loss(scored, batch)[0] - plain._loss(scored, batch)[0]
    found = torch.autograd.grad(difference, parameters, retain_graph=True)
    expected = torch.autograd.grad(0.3 * scored["reference_kl"].mean(), parameters)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_coefficient_follows_the_target():
    algorithm = WaypointPPO(make_policy(), SETTINGS, kl_coef=0.1, kl_target=1.0)
    for kl, expected in ((2.0, 0.2), (1.2, 0.2), (0.5, 0.1), (0.8, 0.1)):  # ×2 above 1.5, ÷2 below 1/1.5
        algorithm._adapt_kl_coef(kl)
        assert algorithm.kl_coef == pytest.approx(expected)
    fixed = WaypointPPO(make_policy(), SETTINGS, kl_coef=0.1)
    fixed._adapt_kl_coef(100.0)
    assert fixed.kl_coef == 0.1


def test_the_penalty_keeps_the_policy_near_the_supervised_one():
    moved = {}
    for coefficient in (0.0, 1.0):
        policy = make_policy()
        algorithm = WaypointPPO(policy, SETTINGS, kl_coef=coefficient)
        for _ in range(15):
            metrics = algorithm.update(iter([make_rollout(policy, steps=16, num_envs=4, target=3.0)]))
        moved[coefficient] = float(metrics["reference_kl"])
    assert moved[1.0] < 0.2 * moved[0.0]


def test_the_bound_opens_with_training():
    policy = make_policy()
    algorithm = WaypointPPO(policy, SETTINGS, residual_start=0.2, residual_open_at=0.5)
    assert float(policy.residual_scale) == pytest.approx(0.2)
    for progress, expected in ((0.0, 0.2), (0.25, 0.6), (0.5, 1.0), (0.9, 1.0)):
        algorithm.progress = progress
        metrics = algorithm.update(iter([make_rollout(policy)]))
        assert float(metrics["residual_scale"]) == pytest.approx(expected)


def test_an_update_that_is_rejected_leaves_nothing_behind():
    policy = make_policy()
    answers = iter([True, False, True])
    algorithm = WaypointPPO(policy, SETTINGS, kl_coef=0.1, kl_target=1e-9, accept=lambda policy: next(answers))
    algorithm.update(iter([make_rollout(policy)]))
    weights = copy.deepcopy(policy.state_dict())
    state = copy.deepcopy(algorithm.state_dict())
    metrics = algorithm.update(iter([make_rollout(policy)]))
    assert float(metrics["rolled_back"]) == 1.0
    for name, value in policy.state_dict().items():
        assert torch.equal(value, weights[name]), name
    after = algorithm.state_dict()
    assert after["version"] == 2  # the update counts: the run continues
    assert after["kl_coef"] == state["kl_coef"]
    _equal(after["optimizer"], state["optimizer"])
    assert torch.equal(after["running_return"], state["running_return"])
    # What follows is as if the rejected update had never been.
    metrics = algorithm.update(iter([make_rollout(policy)]))
    assert float(metrics["rolled_back"]) == 0.0
    assert not torch.equal(policy.delta_head.direct[0].weight, weights["delta_head.direct.0.weight"])


def test_the_supervised_weights_are_bit_equal_after_updates_and_the_heads_are_not():
    policy = make_policy()
    before = copy.deepcopy(policy.state_dict())
    algorithm = WaypointPPO(policy, SETTINGS)
    for _ in range(3):
        algorithm.update(iter([make_rollout(policy)]))
    for name, value in policy.state_dict().items():
        if name.startswith("sft."):
            assert torch.equal(value, before[name]), name
    assert not torch.equal(policy.delta_head.direct[0].weight, before["delta_head.direct.0.weight"])


def test_at_first_the_value_head_learns_alone():
    policy = make_policy()
    before = copy.deepcopy(policy.state_dict())
    algorithm = WaypointPPO(policy, dataclasses.replace(SETTINGS, value_warmup=2), kl_coef=0.1)
    for moves in (False, False, True):
        algorithm.update(iter([make_rollout(policy)]))
        changed = {name for name, value in policy.state_dict().items() if not torch.equal(value, before[name])}
        assert any(name.startswith("value_head") for name in changed)
        assert any(name.startswith(("delta_head", "distribution")) for name in changed) == moves


def test_pictures_do_not_travel_to_the_minibatches():
    policy = make_policy()
    algorithm = WaypointPPO(policy, SETTINGS)
    seen = []
    algorithm._evaluate = lambda batch: (
        seen.append(set(batch[schema.OBSERVATION].keys())) or policy.evaluate_actions(batch)
    )
    algorithm.update(iter([make_rollout(policy)]))
    assert seen
    assert all(schema.CAMERA not in names for names in seen)


def _equal(found, expected):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            _equal(found[name], expected[name])
    elif isinstance(expected, list | tuple):
        for one, other in zip(found, expected, strict=True):
            _equal(one, other)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    else:
        assert found == expected
