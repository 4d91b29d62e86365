"""Flow matching and the sampling of codes."""

import math

import pytest
import torch

from deft.models import flow_chain
from deft.models.f1.heads import choose, sample_time, time_embedding


def test_time_follows_its_distribution():
    """P(t ≤ x) = ((x − 0.001) / 0.999)^1.5, that of Beta(1.5, 1): its mean is 0.6."""
    torch.manual_seed(0)
    times = sample_time(20_000, torch.device("cpu"))
    assert times.min() >= 0.001
    assert times.max() <= 1.0
    assert times.mean().item() == pytest.approx(0.6 * 0.999 + 0.001, abs=0.01)
    assert (times <= 0.5).float().mean().item() == pytest.approx(((0.5 - 0.001) / 0.999) ** 1.5, abs=0.01)


def test_integration_of_the_true_velocity_gives_the_actions():
    actions, noise = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    seen = []

    def velocity(noisy, time):
        seen.append(time[0].item())
        torch.testing.assert_close(noisy, flow_chain.noised(actions, noise, time), atol=1e-5, rtol=0)
        return noise - actions

    torch.testing.assert_close(flow_chain.integrate(velocity, noise, 10), actions, atol=1e-5, rtol=0)
    assert seen == pytest.approx([1 - step / 10 for step in range(10)])


def test_time_embedding_of_known_periods():
    """The first pair has period 0.004, the last 4: at t = 1 the angles are 2π·250 and π/2."""
    embedding = time_embedding(torch.tensor([1.0]), 4)[0]
    expected = [math.sin(500 * math.pi), 1.0, math.cos(500 * math.pi), 0.0]
    assert embedding.tolist() == pytest.approx(expected, abs=1e-6)


def test_choices():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05])).expand(1, 4000, 4)
    torch.manual_seed(0)

    def shares(top_k, top_p):
        return torch.bincount(choose(logits, top_k, top_p).flatten(), minlength=4) / 4000

    assert shares(1, 1.0).tolist() == [1, 0, 0, 0]
    assert shares(0, 1.0).tolist() == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)
    assert shares(2, 1.0).tolist() == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)  # 5/8 and 3/8
    assert shares(0, 0.8).tolist() == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)  # 0.5 + 0.3 hold 0.8
    assert shares(0, 0.81)[2] > 0.1  # and no more than they
