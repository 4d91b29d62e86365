"""Pictures into the model and out of it: the one place where they are scaled.

uint8 [0, 255] outside, float [-1, 1] inside. A picture that is not uint8 was scaled already, and is refused.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from deft.errors import InputError


def to_model(pictures: Tensor, size: int, name: str) -> Tensor:
    """uint8 […, 3, h, w] → float32 […, 3, size, size] in -1 … 1; resized whole, with black at top and left."""
    if pictures.dtype != torch.uint8 or pictures.ndim < 4 or pictures.shape[-3] != 3:
        raise InputError(
            f"{name} is {str(pictures.dtype).removeprefix('torch.')} {list(pictures.shape)}; "
            "pictures are uint8 [..., 3, h, w], 0 to 255: the model scales them"
        )
    scaled = pictures.flatten(0, -4).float() / 127.5 - 1.0
    height, width = scaled.shape[-2:]
    if (height, width) != (size, size):
        ratio = max(height, width) / size
        shape = (max(1, int(height / ratio)), max(1, int(width / ratio)))
        scaled = functional.interpolate(scaled, size=shape, mode="bilinear", align_corners=False)
        scaled = functional.pad(scaled, (size - shape[1], 0, size - shape[0], 0), value=-1.0)
    return scaled.reshape(*pictures.shape[:-2], size, size)


def to_pictures(frames: Tensor) -> Tensor:
    """float in -1 … 1 → uint8, same shape."""
    return ((frames.clamp(-1, 1) + 1.0) * 127.5).round().to(torch.uint8)
