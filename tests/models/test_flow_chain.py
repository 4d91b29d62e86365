"""The noised denoising chain against formulas, and against plain Euler."""

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from deft.models.flow_chain import chain_entropy, chain_log_prob, draw_chain, flow_matching_error, integrate

DEVIATION = torch.tensor([0.3, 0.2, 0.1, 0.05])


def velocity(x: Tensor, time: Tensor) -> Tensor:
    return 0.5 * x + time[:, None, None]


def test_without_noise_it_is_euler() -> None:
    x = noise = torch.randn(2, 3, 2)
    for step in range(4):  # t = 1, 0.75, 0.5, 0.25; dt = −1/4
        x = x - (0.5 * x + (1 - step / 4)) / 4
    chain, _ = draw_chain(velocity, noise, DEVIATION, deterministic=True)
    torch.testing.assert_close(integrate(velocity, noise, 4), x)
    assert chain.shape == (2, 5, 3, 2)
    torch.testing.assert_close(chain[:, -1], x)
    torch.testing.assert_close(chain[:, 0], noise)


def test_log_probs_are_those_of_the_gaussian_steps() -> None:
    torch.manual_seed(0)
    chain, drawn = draw_chain(velocity, torch.randn(2, 3, 2), DEVIATION)
    for step in range(4):
        mean = chain[:, step] - velocity(chain[:, step], torch.full((2,), 1 - step / 4)) / 4
        expected = Normal(mean, DEVIATION[step]).log_prob(chain[:, step + 1]).sum((1, 2))
        torch.testing.assert_close(drawn[:, step], expected)
    # Scored again it is the same to the bit: every ratio starts at 1.
    assert torch.equal(chain_log_prob(velocity, chain, DEVIATION), drawn)


def test_masked_dims_enter_neither_log_prob_nor_entropy() -> None:
    chain, _ = draw_chain(velocity, torch.randn(2, 3, 2), DEVIATION)
    mask = torch.tensor([True, False]).view(1, 1, 2)
    other = chain.clone()
    other[:, :, :, 1] += 5.0
    # The velocity of a dim depends on that dim alone here, so what stands in the masked one changes nothing.
    first, second = (chain_log_prob(velocity, one, DEVIATION, mask) for one in (chain, other))
    assert torch.equal(first, second)
    # Σ over 4 steps of (log σ + ½ log 2πe), times 3 real numbers
    expected = 3 * sum(math.log(s) + 0.5 * math.log(2 * math.pi * math.e) for s in DEVIATION.tolist())
    assert chain_entropy(DEVIATION, (2, 3, 2), mask).tolist() == pytest.approx([expected] * 2, rel=1e-5)
    assert chain_entropy(DEVIATION, (2, 3, 2)).tolist() == pytest.approx([2 * expected] * 2, rel=1e-5)


def test_the_policy_gradient_reaches_dims_that_are_not_executed() -> None:
    """Dim 0 is executed, dim 1 is not, and dim 0 moves with it: v = (−θ x₁, −φ), S = 2 steps of noise σ.

    x₁ after the first step is x₁(0) + φ/2, so a = x₀(0) + θ x₁(0)/2 + θ (x₁(0) + φ/2)/2 + noise, and
    d E[a] / dφ = θ/4. REINFORCE, E[a · d log p / dφ], must give the same.
    """
    torch.manual_seed(0)
    theta, phi = 2.0, torch.tensor(0.3, requires_grad=True)
    deviation, mask = torch.tensor([0.5, 0.5]), torch.tensor([True, False]).view(1, 1, 2)

    def coupled(x: Tensor, time: Tensor) -> Tensor:
        return torch.stack([-theta * x[..., 1], -phi.expand_as(x[..., 1])], -1)

    with torch.no_grad():
        chain, drawn = draw_chain(coupled, torch.randn(100_000, 1, 2), deviation, mask=mask)
        # Dim 1 has no noise: it moves by φ/2 in each step.
        torch.testing.assert_close(chain[:, 2, 0, 1], chain[:, 0, 0, 1] + 0.3)
    scored = chain_log_prob(coupled, chain, deviation, mask)
    torch.testing.assert_close(scored, drawn)
    surrogate = (chain[:, -1, 0, 0] * scored.sum(1)).mean()
    (gradient,) = torch.autograd.grad(surrogate, phi)
    # One sample, a · ε₂ θ / 4σ, has a deviation of about 2; the mean of 100,000 one of 0.006.
    assert float(gradient) == pytest.approx(theta / 4, abs=0.03)


def test_a_deviation_may_differ_by_step_and_dim_and_learns() -> None:
    deviation = torch.full((4, 3, 2), 0.2, requires_grad=True)
    chain, _ = draw_chain(velocity, torch.randn(2, 3, 2), deviation.detach())
    chain_log_prob(velocity, chain, deviation).sum().backward()
    # d/dσ log N = (z² − 1) / σ
    mean = chain[:, 0] - velocity(chain[:, 0], torch.ones(2)) / 4
    expected = (((chain[:, 1] - mean) / 0.2).square() - 1).sum(0) / 0.2
    assert deviation.grad is not None
    torch.testing.assert_close(deviation.grad[0], expected, rtol=1e-4, atol=1e-4)


def test_the_flow_matching_error_of_the_true_velocity_is_0() -> None:
    actions, noise, time = torch.randn(2, 3, 2), torch.randn(2, 3, 2), torch.tensor([0.2, 0.9])
    assert flow_matching_error(lambda x, t: noise - actions, actions, noise, time).tolist() == [0.0, 0.0]
    # Off by 1 in every number: a mean of 1, also where a mask leaves some out.
    mask = torch.tensor([True, True, False]).view(1, 3, 1)
    for one in (None, mask):
        found = flow_matching_error(lambda x, t: noise - actions + 1, actions, noise, time, one)
        torch.testing.assert_close(found, torch.ones(2))
