"""Similarity of images: PSNR and SSIM, for the evaluation of tokenizers and world models."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from deft.errors import InputError

WINDOW, DEVIATION = 11, 1.5  # SSIM's Gaussian window, in pixels
K1, K2 = 0.01, 0.03
MOST_DECIBELS = 100.0  # of equal images, whose PSNR is infinite


def psnr(images: Tensor, others: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in dB of uint8 images [B, C, h, w], each: 10 log10(255² / MSE)."""
    error = (images.float() - others.float()).square().mean((-3, -2, -1))
    return (10 * torch.log10(255.0**2 / error)).clamp(max=MOST_DECIBELS)


def ssim(images: Tensor, others: Tensor) -> Tensor:
    """Structural similarity of uint8 images [B, C, h, w], each: mean over channels and pixels of

    (2 μx μy + C1) (2 σxy + C2) / ((μx² + μy² + C1) (σx² + σy² + C2)), with μ, σ in Gaussian windows of 11 × 11 pixels
    that lie wholly inside, C1 = (0.01 · 255)², C2 = (0.03 · 255)².
    """
    if min(images.shape[-2:]) < WINDOW:
        raise InputError(f"SSIM needs images of {WINDOW} pixels a side or more; these are {list(images.shape)}")
    x, y = images.double(), others.double()
    mean_x, mean_y = _windows(x), _windows(y)
    variance_x = _windows(x * x) - mean_x**2
    variance_y = _windows(y * y) - mean_y**2
    covariance = _windows(x * y) - mean_x * mean_y
    c1, c2 = (K1 * 255) ** 2, (K2 * 255) ** 2
    likeness = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
    likeness = likeness / ((mean_x**2 + mean_y**2 + c1) * (variance_x + variance_y + c2))
    return likeness.mean((-3, -2, -1)).float()


def _windows(x: Tensor) -> Tensor:
    """Weighted means in all windows of [B, C, h, w]; the Gaussian is a product, hence a column and a row."""
    offsets = torch.arange(WINDOW, dtype=x.dtype, device=x.device) - WINDOW // 2
    weights = torch.exp(-(offsets**2) / (2 * DEVIATION**2))
    weights = weights / weights.sum()
    flat = x.flatten(0, 1).unsqueeze(1)
    flat = functional.conv2d(functional.conv2d(flat, weights.view(1, 1, -1, 1)), weights.view(1, 1, 1, -1))
    return flat.reshape(*x.shape[:2], *flat.shape[-2:])
