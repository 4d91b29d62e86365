"""The motion prior."""

import math
from dataclasses import replace

import pytest
import torch
from f1_worlds import micro_config, micro_policy

from deft.models.f1.motion import MotionPrior, fit_sharpness, prior_cross_entropy, prior_logits
from deft.models.f1.vq import MultiScaleQuantizer


def test_the_prior_is_trusted_as_far_as_it_is_right():
    """Two codes 1 apart, the expected place on the first: p(first) = 1 / (1 + exp(−β / spread)), at best its share."""
    quantize = MultiScaleQuantizer(replace(micro_config().tokenizer, codebook_size=2, code_dim=1, scales=(1, 2)))
    with torch.no_grad():
        quantize.embedding.weight.copy_(torch.tensor([[0.0], [1.0]]))
    spread = 0.5  # variance of 0 and 1
    codes = torch.zeros(10, 5, dtype=torch.int64)
    codes[0, 0] = 1  # the coarse scale is wrong once in 10; the fine one half of the time
    codes[:5, 1:] = 1
    found = fit_sharpness(torch.zeros(10, 5, 1), codes, quantize, [1, 4], lambda slopes: slopes).exp()
    assert float(found[0]) == pytest.approx(spread * math.log(9.0), rel=1e-2)  # 0.9 : 0.1
    assert float(found[1]) == pytest.approx(0.4, rel=1e-2)  # the least there is: the prior knows nothing of it


def test_a_tail_lets_the_prior_be_sure_and_wrong_at_times():
    """The first of four codes is expected, and is right 8 times in 10; twice it is the far one, 100 away.

    ν = 1: p_k ~ 1 / (1 + β d_k), with 1 / s = Σ_k that, for d = 0, 1, 1, 100². The best β is found by trying all.
    """
    quantize = MultiScaleQuantizer(replace(micro_config().tokenizer, codebook_size=4, code_dim=1, scales=(1,)))
    with torch.no_grad():
        quantize.embedding.weight.copy_(torch.tensor([[0.0], [1.0], [-1.0], [100.0]]))
    spread = float(quantize.embedding.weight.detach().var())
    codes, residuals = torch.tensor([0] * 8 + [3] * 2)[:, None], torch.zeros(10, 1, 1)
    steps = torch.linspace(math.log(0.4), math.log(1e6), 4001)  # log β in units of the spread
    shares = 1 / (1 + (steps.exp() / spread)[:, None] * torch.tensor([0.0, 1.0, 1.0, 100.0**2]))
    losses = -0.8 * shares[:, 0].log() - 0.2 * shares[:, 3].log() + shares.sum(1).log()
    found = fit_sharpness(residuals, codes, quantize, [1], lambda slopes: slopes, tail=1.0)
    assert float(found) == pytest.approx(float(steps[losses.argmin()]), abs=0.01)
    with_tail = prior_cross_entropy(residuals, codes, found, quantize, [1], tail=1.0).mean()
    assert float(with_tail) == pytest.approx(float(losses.min()), abs=1e-4)
    without = fit_sharpness(residuals, codes, quantize, [1], lambda slopes: slopes)
    assert prior_cross_entropy(residuals, codes, without, quantize, [1]).mean() > with_tail + 0.05
    # near codes are weighed as without a tail
    near = torch.tensor([0.0, 1e-4])
    torch.testing.assert_close(prior_logits(near, torch.tensor(1.0), 1.5), prior_logits(near, torch.tensor(1.0)))


def test_motion_starts_as_a_copy_and_moves_the_way_it_says():
    torch.manual_seed(0)
    prior = MotionPrior(micro_config(motion_prior=True))
    history = torch.rand(1, 4, 3, 16, 16)
    robot = (torch.randn(1, 4, 32), torch.ones(1, dtype=torch.bool), torch.randn(1, 32))
    torch.testing.assert_close(prior(history, *robot), history[:, -1], atol=1e-5, rtol=0)
    with torch.no_grad():
        prior.camera.bias[0] = 2 / 16 * 3  # each pixel is taken from 3 px to its right (the picture is 2 wide)
        prior.head.bias[5] = -20.0  # and nothing stays
    moved = prior(history, *robot)
    torch.testing.assert_close(moved[..., :-3], history[:, -1][..., 3:], atol=1e-4, rtol=0)


def test_logits_begin_from_the_codes_of_the_copied_frame():
    """A still scene: the prior's likeliest codes are those of the last frame."""
    policy = micro_policy(motion_prior=True)
    picture = torch.rand(2, 3, 16, 16) * 2 - 1
    codes, expected = policy.tokenizer.encode(picture), policy.tokenizer.features(picture)
    missing = policy.tokenizer.residuals(expected, codes)
    output = torch.zeros(2, 21, 16)
    logits = policy.model.motion.logits(missing, policy.model.world_model.level[0], output, policy.tokenizer.quantize)
    assert torch.equal(logits.argmax(-1), codes)
