"""A camera's images as Deft's own models read them: uint8 [B, 3, size, size]. Called by `vla-tiny` and `gpt-vla`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from deft.errors import InputError


def square_images(images: Tensor, size: int, key: str) -> Tensor:
    """Images [B, 3, h, w] scaled to size × size by area averaging, height and width each by itself.

    That is what the option `image_size` of the LeRobot loader does: a model sees the same, whether images are scaled
    when they are read or here.
    """
    if images.ndim == 4 and images.shape[1] != 3 and images.shape[-1] == 3:  # of a caller that does not turn them
        images = images.permute(0, 3, 1, 2)
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
        raise InputError(
            f"observation {key!r} is {str(images.dtype).removeprefix('torch.')} {list(images.shape)}; images are uint8 "
            "[B, 3, h, w]: give 3 channels, first, with values of 0 to 255"
        )
    if images.shape[2:] == (size, size):
        return images
    return functional.interpolate(images.float(), size=(size, size), mode="area").round_().to(torch.uint8)
