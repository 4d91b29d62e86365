import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from policies import actor_policy
from tensordict import TensorDict

from deft import schema
from deft.config.settings import DatasetPolicyConfig
from deft.errors import InputError
from deft.models.distributions import LOG_STD_RANGE
from deft.models.policy import Encoded

OBSERVATION = spaces.Box(-np.inf, np.inf, (3,), np.float32)
ACTION = spaces.Box(np.array([-2, 0], np.float32), np.array([2, 1], np.float32))
SMALL = DatasetPolicyConfig(hidden_dim=8)


def rows(count: int = 6) -> TensorDict:
    return TensorDict({schema.OBSERVATION: torch.randn(count, 3)}, batch_size=[count])


@pytest.mark.parametrize("distribution", ["gaussian", "tanh_gaussian"])
def test_a_stored_action_scores_what_it_scored_when_it_was_drawn(distribution):
    torch.manual_seed(0)
    policy = actor_policy(OBSERVATION, ACTION, SMALL, distribution)
    td = policy.act(rows())
    scored = policy.evaluate_actions(td)
    torch.testing.assert_close(scored["log_prob"], td[schema.LOG_PROB])
    torch.testing.assert_close(scored["value"], td[schema.VALUE])
    assert scored["entropy"].shape == scored["value"].shape == (6,)


def test_the_squashed_density_integrates_to_one():
    # ∫ p(a) da over the Box, one dim; a midpoint sum is exact to the grid.
    torch.manual_seed(0)
    space = spaces.Box(-2.0, 2.0, (1,), np.float32)
    policy = actor_policy(OBSERVATION, space, SMALL, "tanh_gaussian")
    grid = (torch.arange(4000) + 0.5) / 1000 - 2.0
    td = TensorDict({schema.OBSERVATION: torch.ones(4000, 3), schema.ACTION: grid[:, None]}, batch_size=[4000])
    assert float(policy.evaluate_actions(td)["log_prob"].detach().exp().sum() * 0.001) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("count", [1, 3])
def test_samples_and_their_gradients_are_torchs(count):
    # The closed forms of `sample` beside torch's own distribution and autograd, in float64. One deviation is beyond its
    # bound (and so gets no gradient), and one action far out, where tanh is 1 in float64 too.
    torch.manual_seed(0)
    policy = actor_policy(
        spaces.Box(-1, 1, (3,)), spaces.Box(-1, 1, (2,)), DatasetPolicyConfig(hidden_dim=8), "tanh_gaussian"
    )
    output = torch.randn(1, 5, 4, dtype=torch.float64)
    output[0, 0, 2], output[0, 1, 0] = LOG_STD_RANGE[1] + 1, 25.0
    output.requires_grad_()
    policy.actor.forward = lambda features: output
    noise = torch.randn(count, 1, 5, 2, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randn", lambda *shape, **_: noise)
        unit, log_prob = policy.sample(Encoded(None, torch.zeros(1, 5, 3)), count)
    mean, log_std = output.chunk(2, -1)
    gaussian = torch.distributions.Normal(mean, log_std.clamp(*LOG_STD_RANGE).exp())
    before = mean + gaussian.stddev * noise
    # log π(tanh x) = log p(x) − log(1 − tanh² x), which is −2 log cosh x
    wanted = (gaussian.log_prob(before) + 2 * (before.abs() + torch.log1p(torch.exp(-2 * before.abs())))).sum(-1)
    wanted = wanted - 2 * 2 * math.log(2.0)
    torch.testing.assert_close(unit, before.tanh())
    torch.testing.assert_close(log_prob, wanted)
    weight, other = torch.randn_like(unit), torch.randn_like(log_prob)
    own, theirs = (
        torch.autograd.grad((weight * action).sum() + (other * density).sum(), output)[0]
        for action, density in ((unit, log_prob), (before.tanh(), wanted))
    )
    torch.testing.assert_close(own, theirs, rtol=1e-6, atol=1e-7)
    assert own[0, 0, 2] == 0.0


def test_the_gaussian_is_hand_computed():
    policy = actor_policy(OBSERVATION, ACTION, SMALL, "gaussian")
    with torch.no_grad():
        for parameter in policy.actor.parameters():
            parameter.zero_()
        policy.head.log_std.fill_(math.log(0.5))
    action = torch.tensor([[1.0, 0.75]])
    td = TensorDict({schema.OBSERVATION: torch.zeros(1, 3), schema.ACTION: action}, batch_size=[1])
    # The mean is tanh 0 = 0, in Box units (0, 0.5); unit actions (0.5, 0.5); widths 2 and 0.5, so log width sums to 0.
    # Each dim: −½ (0.5 / 0.5)² − log 0.5 − ½ log 2π.
    expected = 2 * (-0.5 - math.log(0.5) - 0.5 * math.log(2 * math.pi))
    assert float(policy.evaluate_actions(td)["log_prob"].detach()) == pytest.approx(expected, abs=1e-6)
    deterministic = policy.act(td.exclude(schema.ACTION), deterministic=True)
    assert torch.equal(deterministic[schema.ACTION], torch.tensor([[0.0, 0.5]]))


def test_members_are_independent_policies():
    torch.manual_seed(0)
    policy = actor_policy(OBSERVATION, ACTION, SMALL, "gaussian", num_members=3)
    policy.observe({schema.OBSERVATION: torch.randn(100, 3) * 5 + 2})
    observation = torch.randn(3, 4, 3)
    state = policy.encode(observation)
    means, values = policy.mean(state), policy.state_value(state.features)
    for index in range(3):
        alone = policy.member(index)
        own = alone.encode(observation[index])
        torch.testing.assert_close(alone.mean(own)[0], means[index])
        torch.testing.assert_close(alone.state_value(own.features)[0], values[index])
    assert not torch.allclose(means[0], policy.mean(policy.encode(observation[:1].expand(3, -1, -1)))[1])
    with pytest.raises(InputError, match="member"):
        policy.act(rows())


def test_the_normalisation_is_saved_and_applied_when_acting():
    torch.manual_seed(0)
    policy = actor_policy(OBSERVATION, ACTION, SMALL)
    data = torch.randn(1000, 3) * torch.tensor([1.0, 10.0, 0.0]) + 4.0
    policy.observe({schema.OBSERVATION: data})
    copied = actor_policy(OBSERVATION, ACTION, SMALL)
    copied.load_state_dict(policy.state_dict())
    td = rows()
    assert torch.equal(copied.act(td.clone(), True)[schema.ACTION], policy.act(td.clone(), True)[schema.ACTION])
    features = policy.encode(data).features[0]
    assert features[:, :2].mean(0).abs().max() < 1e-3
    assert (features[:, :2].std(0) - 1).abs().max() < 1e-2
    assert features[:, 2].abs().max() < 1.0  # a dim that never moves is not blown up


def test_actor_and_value_share_an_encoder_of_pixels_and_both_train_it():
    space = spaces.Box(0, 255, (9, 64, 64), np.uint8)
    policy = actor_policy(space, ACTION, DatasetPolicyConfig(hidden_dim=8, encoder_dim=16))
    state = policy.encode(torch.randint(0, 255, (2, 9, 64, 64), dtype=torch.uint8))
    # An algorithm whose critics train the encoder detaches the features itself.
    detached = state._replace(features=state.features.detach())
    policy.log_prob(detached, torch.zeros(1, 2, 2)).sum().backward()
    assert all(parameter.grad is None for parameter in policy.encoder.parameters())
    for loss in (policy.log_prob(state, torch.zeros(1, 2, 2)), policy.state_value(state.features)):
        policy.zero_grad()
        loss.sum().backward(retain_graph=True)
        assert all(bool(parameter.grad.any()) for parameter in policy.encoder.parameters())
    with pytest.raises(InputError, match="num_seeds"):
        actor_policy(space, ACTION, num_members=2)


def test_an_unbounded_or_discrete_action_space_raises_an_error():
    for space in (spaces.Discrete(3), spaces.Box(-np.inf, np.inf, (2,), np.float32)):
        with pytest.raises(InputError, match="bounded Box"):
            actor_policy(OBSERVATION, space)
