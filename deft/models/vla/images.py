"""Scale camera images to uint8 [B, 3, size, size]. Called by `vla-tiny` and `gpt-vla`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from deft.errors import InputError


def square_images(images: Tensor, size: int, key: str) -> Tensor:
    """Scale images [B, 3, h, w] to size × size by area averaging; the aspect ratio may change.

    The option `image_size` of the LeRobot loader scales images in the same way.
    """
    if images.ndim == 4 and images.shape[1] != 3 and images.shape[-1] == 3:  # channels last
        images = images.permute(0, 3, 1, 2)
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
        raise InputError(
            f"observation {key!r} is {str(images.dtype).removeprefix('torch.')} {list(images.shape)}; images are uint8 "
            "[B, 3, h, w]: give 3 channels, first, with values of 0 to 255"
        )
    if images.shape[2:] == (size, size):
        return images
    return functional.interpolate(images.float(), size=(size, size), mode="area").round_().to(torch.uint8)
