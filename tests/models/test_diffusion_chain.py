"""The schedule of a diffusion: levels of noise, times, and one step of the chain by hand."""

import math

import pytest
import torch

from deft.errors import InputError
from deft.models.diffusion_chain import DiffusionUpdate, cosine_signal, diffused, diffusion_times, signal_of

NOW, THEN = torch.tensor(0.36), torch.tensor(0.64)  # √ᾱ = 0.6, √(1 − ᾱ) = 0.8; √ᾱ' = 0.8, √(1 − ᾱ') = 0.6


def test_the_cosine_schedule():
    # T = 2: cos²(0.008/1.008 · π/2) = 0.999845, at ½ 0.493844, at 1 0; the last factor is at least 0.001
    signal = cosine_signal(2)
    start, middle = (math.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2 for time in (0.0, 0.5))
    assert signal.tolist() == pytest.approx([1.0, middle / start, middle / start * 0.001], rel=1e-5)


def test_linear_schedules():
    # β = 0.1, 0.25, 0.4: ᾱ = 0.9, 0.9 · 0.75, 0.9 · 0.75 · 0.6
    assert signal_of("linear", 3, 0.1, 0.4).tolist() == pytest.approx([1.0, 0.9, 0.675, 0.405])
    # √β = 0.2, 0.4, 0.6
    assert signal_of("scaled_linear", 3, 0.04, 0.36).tolist() == pytest.approx([1.0, 0.96, 0.8064, 0.516096])
    assert torch.equal(signal_of("squaredcos_cap_v2", 5, 0.1, 0.4), cosine_signal(5))
    with pytest.raises(InputError, match="beta_schedule 'sigmoid' is none of"):
        signal_of("sigmoid", 3, 0.1, 0.4)


def test_times_are_evenly_spaced_and_end_at_0():
    assert diffusion_times(100, 5) == [81, 61, 41, 21, 1, 0]
    assert diffusion_times(10, 4) == [7, 5, 3, 1, 0]
    assert diffusion_times(3, 3) == [3, 2, 1, 0]


def test_noise_is_added_by_level():
    x = diffused(torch.ones(2, 1, 1), torch.full((2, 1, 1), 2.0), torch.stack([NOW, THEN]))
    assert x.flatten().tolist() == pytest.approx([0.6 + 1.6, 0.8 + 1.2])


def test_a_step_with_and_without_noise():
    """x = 0.5, ε̂ = 0.25: â = (0.5 − 0.8 · 0.25) / 0.6 = 0.5."""
    x, predicted = torch.tensor([[[0.5]]]), torch.tensor([[[0.25]]])
    mean, deviation = DiffusionUpdate(0.01)(x, predicted, NOW, THEN, False)  # 0.8 · 0.5 + 0.6 · 0.25
    assert mean.item() == pytest.approx(0.55)
    assert deviation.item() == pytest.approx(0.01)
    mean, deviation = DiffusionUpdate(0.01)(x, predicted, NOW, THEN, True)
    variance = 0.36 / 0.64 * (1 - 0.36 / 0.64)
    assert mean.item() == pytest.approx(0.4 + math.sqrt(0.36 - variance) * 0.25)
    assert deviation.item() == pytest.approx(math.sqrt(variance))
    # The mean of DDPM's posterior: â √ᾱ' β / (1 − ᾱ) + x √(1 − β) (1 − ᾱ') / (1 − ᾱ), with 1 − β = ᾱ / ᾱ' = 0.5625
    assert mean.item() == pytest.approx(0.5 * 0.8 * 0.4375 / 0.64 + 0.5 * 0.75 * 0.36 / 0.64)


def test_dims_may_differ_in_noise():
    x, predicted = torch.full((1, 2, 1), 0.5), torch.full((1, 2, 1), 0.25)
    update = DiffusionUpdate(0.01)
    mixed, deviation = update(x, predicted, NOW, THEN, torch.tensor([True, False]).view(1, 2, 1))
    alone = [update(x[:, :1], predicted[:, :1], NOW, THEN, one)[0].item() for one in (True, False)]
    assert mixed.flatten().tolist() == pytest.approx(alone)
    assert deviation.flatten().tolist() == pytest.approx([math.sqrt(0.5625 * 0.4375), 0.01])


def test_a_clipped_action_changes_the_noise_in_ddpm_but_not_in_ddim():
    """x = 2, ε̂ = 0.25: â = 1.8 / 0.6 = 3, clipped to 1; then ε̂ = (2 − 0.6) / 0.8 = 1.75."""
    x, predicted = torch.tensor([[[2.0]]]), torch.tensor([[[0.25]]])
    again, kept = (DiffusionUpdate(0.01, recompute=one)(x, predicted, NOW, THEN, False)[0] for one in (True, False))
    assert again.item() == pytest.approx(0.8 + 0.6 * 1.75)
    assert kept.item() == pytest.approx(0.8 + 0.6 * 0.25)
    free, _ = DiffusionUpdate(0.01, clip=None)(x, predicted, NOW, THEN, False)
    assert free.item() == pytest.approx(0.8 * 3 + 0.6 * 0.25)


def test_a_network_may_predict_the_action():
    x, action = torch.tensor([[[0.5]]]), torch.tensor([[[0.5]]])  # ε̂ = (0.5 − 0.3) / 0.8 = 0.25
    mean, _ = DiffusionUpdate(0.01, predicts_action=True)(x, action, NOW, THEN, False)
    assert mean.item() == pytest.approx(0.8 * 0.5 + 0.6 * 0.25)
