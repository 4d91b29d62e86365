import math

import numpy as np
import pytest
import torch

from deft.errors import InputError
from deft.evaluation.image_quality import psnr, ssim


def test_psnr_by_hand():
    """An error of 10 in every pixel: 10 log10(255² / 100) = 28.13 dB. Equal pictures are capped at 100."""
    black = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    others = torch.stack([torch.full((3, 4, 4), 10, dtype=torch.uint8), black[1]])
    torch.testing.assert_close(psnr(black, others), torch.tensor([10 * math.log10(650.25), 100.0]))


def test_ssim_of_flat_pictures_by_hand():
    """Without variance the second factor is C2 / C2 = 1: (2 · 50 · 100 + C1) / (50² + 100² + C1), C1 = 2.55²."""
    fifty, hundred = (torch.full((1, 3, 16, 16), value, dtype=torch.uint8) for value in (50, 100))
    expected = (10000 + 2.55**2) / (12500 + 2.55**2)
    torch.testing.assert_close(ssim(fifty, hundred), torch.tensor([expected], dtype=torch.float32))
    torch.testing.assert_close(ssim(hundred, hundred), torch.ones(1))


def test_ssim_of_one_window_by_its_formula():
    """A picture of 11 × 11 pixels has one window: the sums are written out, pixel by pixel."""
    random = np.random.default_rng(0)
    x, y = random.integers(0, 256, (2, 11, 11))
    weight = np.array([[math.exp(-((i - 5) ** 2 + (j - 5) ** 2) / 4.5) for j in range(11)] for i in range(11)])
    weight /= weight.sum()
    mean_x, mean_y = (weight * x).sum(), (weight * y).sum()
    variance_x, variance_y = (weight * (x - mean_x) ** 2).sum(), (weight * (y - mean_y) ** 2).sum()
    covariance = (weight * (x - mean_x) * (y - mean_y)).sum()
    c1, c2 = 2.55**2, 7.65**2
    expected = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
    expected /= (mean_x**2 + mean_y**2 + c1) * (variance_x + variance_y + c2)
    pictures = [torch.from_numpy(values.astype(np.uint8)).view(1, 1, 11, 11) for values in (x, y)]
    assert float(ssim(*pictures)) == pytest.approx(expected, abs=1e-6)
    assert expected < 0.5  # noise is not like other noise


def test_ssim_needs_room_for_its_window():
    small = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    with pytest.raises(InputError, match="11 pixels a side"):
        ssim(small, small)
