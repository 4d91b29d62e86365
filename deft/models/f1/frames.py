"""Conversion of images to the model's format and back. Images are scaled nowhere else.

Images are uint8 in [0, 255] outside of the model and float in [-1, 1] inside. Images of another dtype raise an error.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from deft.errors import InputError


def to_model(images: Tensor, size: int, name: str) -> Tensor:
    """Convert uint8 […, 3, h, w] to float32 […, 3, size, size] in -1 … 1.

    The aspect ratio is kept; black padding is added at the top and on the left.
    """
    if images.dtype != torch.uint8 or images.ndim < 4 or images.shape[-3] != 3:
        raise InputError(
            f"{name} is {str(images.dtype).removeprefix('torch.')} {list(images.shape)}; "
            "images must be uint8 [..., 3, h, w], 0 to 255: pass them unscaled"
        )
    scaled = images.flatten(0, -4).float() / 127.5 - 1.0
    height, width = scaled.shape[-2:]
    if (height, width) != (size, size):
        ratio = max(height, width) / size
        shape = (max(1, int(height / ratio)), max(1, int(width / ratio)))
        scaled = functional.interpolate(scaled, size=shape, mode="bilinear", align_corners=False)
        scaled = functional.pad(scaled, (size - shape[1], 0, size - shape[0], 0), value=-1.0)
    return scaled.reshape(*images.shape[:-2], size, size)


def to_images(frames: Tensor) -> Tensor:
    """Convert float in -1 … 1 to uint8 of the same shape."""
    return ((frames.clamp(-1, 1) + 1.0) * 127.5).round().to(torch.uint8)
