"""Waypoint models: the residual starts at zero, is bounded and smooth, its log-prob exact, and the rest frozen."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.distributions import Independent, Normal, kl_divergence

from deft import schema
from deft.models.waypoint import DeltaHead, PPOPolicy, ValueHead, WaypointSFT, WaypointShape, smooth_modes

SHAPE = WaypointShape(camera_size=16, motion_dim=5, num_waypoints=6, encoder_dim=8, hidden_sizes=(8,))


def make_policy(**settings):
    torch.manual_seed(0)
    sft = WaypointSFT(SHAPE)
    sft.fit_scales(torch.randn(50, 5), 4 * torch.randn(50, 6, 2))
    policy = PPOPolicy(sft, hidden_sizes=(16,), **settings)
    return policy


def disturb(policy):
    """Heads away from their start, as training leaves them."""
    with torch.no_grad():
        for parameter in [*policy.delta_head.parameters(), policy.distribution.log_std]:
            parameter.add_(0.3 * torch.randn_like(parameter))
    return policy


def observation(rows=7, offset=0.0):
    streams = {
        schema.CAMERA: torch.randint(0, 256, (rows, 3, 16, 16), dtype=torch.uint8),
        schema.MOTION: torch.randn(rows, 5),
        schema.SFT_OFFSET: torch.full((rows, 6, 2), offset),
    }
    return TensorDict({schema.OBSERVATION: TensorDict(streams, batch_size=[rows])}, batch_size=[rows])


def test_untrained_it_drives_as_the_supervised_policy_with_the_episodes_error():
    policy = make_policy()
    td = observation(offset=0.7)
    expected = policy.sft(td[schema.OBSERVATION]) + 0.7
    torch.testing.assert_close(policy.act(td, deterministic=True)[schema.ACTION], expected)


def test_final_waypoints_are_the_supervised_ones_plus_the_delta_head():
    policy = disturb(make_policy())
    td = observation()
    base = policy.sft(td[schema.OBSERVATION])
    latent = policy.sft.encode(td[schema.OBSERVATION])
    z = policy._inputs(latent, base)
    final = policy.act(td, deterministic=True)[schema.ACTION]
    torch.testing.assert_close(final, base + policy.delta_head(z, policy.residual_bound))
    assert (final - base).abs().max() > 0.01


def test_acting_samples_and_scores_as_a_gaussian_over_the_coefficients():
    policy = disturb(make_policy())
    td = policy.act(observation(rows=4000))
    mean = policy.delta_head.coefficients(policy._inputs(*policy._frozen(td)), policy.residual_bound)
    drawn = policy.delta_head.project(td[schema.ACTION] - td[schema.SAMPLE][schema.SFT_WAYPOINTS])
    deviation = policy.distribution.log_std.exp().reshape(3, 2)
    exact = Independent(Normal(mean, deviation.expand_as(mean)), 2).log_prob(drawn)
    torch.testing.assert_close(td[schema.LOG_PROB], exact, atol=2e-3, rtol=1e-4)
    standard = ((drawn - mean) / deviation).detach()
    assert abs(float(standard.mean())) < 0.03  # 24,000 draws: their mean's deviation is 0.006
    assert abs(float(standard.std()) - 1) < 0.03


def test_scoring_agrees_with_acting_with_and_without_what_was_kept():
    policy = disturb(make_policy())
    td = policy.act(observation())
    kept = policy.evaluate_actions(td)
    anew = policy.evaluate_actions(td.exclude(schema.SAMPLE))
    for scored in (kept, anew):
        torch.testing.assert_close(scored["log_prob"], td[schema.LOG_PROB], atol=1e-3, rtol=1e-4)
        torch.testing.assert_close(scored["value"], td[schema.VALUE])
        assert scored["log_prob"].shape == scored["entropy"].shape == scored["value"].shape == (7,)
    torch.testing.assert_close(policy.get_value(td), td[schema.VALUE])


def test_entropy_and_kl_are_those_of_the_gaussians():
    policy = disturb(make_policy(log_std_init=-0.5))
    td = policy.act(observation())
    scored = policy.evaluate_actions(td)
    mean = policy.delta_head.coefficients(policy._inputs(*policy._frozen(td)), policy.residual_bound).flatten(1)
    own = Independent(Normal(mean, policy.distribution.log_std.exp().expand_as(mean)), 1)
    supervised = Independent(Normal(torch.zeros_like(mean), torch.full_like(mean, -0.5).exp()), 1)
    torch.testing.assert_close(scored["entropy"], own.entropy())
    torch.testing.assert_close(scored["reference_kl"], kl_divergence(own, supervised))


def test_an_untrained_policy_has_no_kl_to_the_supervised_one():
    policy = make_policy()
    scored = policy.evaluate_actions(policy.act(observation()))
    torch.testing.assert_close(scored["reference_kl"], torch.zeros(7))


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_the_residual_is_bounded(share):
    policy = make_policy(residual_bound=2.0)
    with torch.no_grad():
        for parameter in policy.delta_head.parameters():
            parameter.normal_(0, 5)
    policy.set_residual_scale(share)
    td = policy.act(observation(rows=200), deterministic=True)
    residual = td[schema.ACTION] - td[schema.SAMPLE][schema.SFT_WAYPOINTS]
    assert residual.abs().max() <= 2.0 * share + 1e-4
    assert residual.abs().max() > 1.9 * share


def test_opening_the_bound_hardly_changes_a_small_residual():
    head = DeltaHead(4, 6, (8,))
    with torch.no_grad():
        head.direct[0].weight.normal_(0, 0.01)
    z = torch.randn(5, 4)
    torch.testing.assert_close(head(z, 1.0), head(z, 100.0), atol=1e-4, rtol=0.01)


def test_modes_are_orthogonal_of_unit_mean_square_and_the_first_is_a_shift():
    modes = smooth_modes(8, 3)
    torch.testing.assert_close(modes.T @ modes / 8, torch.eye(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(modes[:, 0], torch.ones(8))
    assert (modes[1:, 1] > modes[:-1, 1]).all()  # the second grows along the path
    full = DeltaHead(4, 8, (8,), num_modes=8)
    correction = torch.randn(5, 8, 2)
    torch.testing.assert_close(full.expand(full.project(correction)), correction, atol=1e-4, rtol=1e-4)


def test_only_the_heads_and_the_deviation_are_trained():
    policy = make_policy()
    trained = {name.split(".")[0] for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert trained == {"delta_head", "value_head", "distribution"}
    policy.train()
    assert not policy.sft.training
    scored = policy.evaluate_actions(policy.act(observation()))
    sum(value.sum() for value in scored.values()).backward()
    assert all(parameter.grad is None for parameter in policy.sft.parameters())
    assert all(parameter.grad is not None for parameter in policy.delta_head.parameters())


def test_value_head_gives_one_number_a_row():
    assert ValueHead(4, (8,))(torch.randn(5, 4)).shape == (5,)


def test_scales_are_the_recordings():
    model = WaypointSFT(SHAPE)
    waypoints = torch.tensor(np.random.default_rng(0).normal(3.0, 2.0, (2000, 6, 2)), dtype=torch.float32)
    model.fit_scales(torch.zeros(2000, 5), waypoints)
    torch.testing.assert_close(model.target_mean, waypoints.mean(0))
    torch.testing.assert_close(model.target_deviation, waypoints.std(0))
    latent = torch.zeros(1, model.latent_dim)
    with torch.no_grad():
        model.head[-1].weight.zero_()
        model.head[-1].bias.fill_(1.0)
    # A head that says 1 everywhere gives mean + 1 deviation.
    torch.testing.assert_close(model.decode(latent)[0], waypoints.mean(0) + waypoints.std(0))
