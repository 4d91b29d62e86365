"""Spaces of the streams that Deft's environments and adapters have in common."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces

LETTERS = "abcdefghijklmnopqrstuvwxyz "
PRINTABLE = "".join(chr(code) for code in range(32, 127))


def image_space(*shape: int) -> spaces.Box:
    """RGB images, uint8 [..., 3, h, w]; one number is the side of a square image."""
    return spaces.Box(0, 255, (3, shape[0], shape[0]) if len(shape) == 1 else shape, np.uint8)


def vector_space(size: int, limit: float = np.inf) -> spaces.Box:
    """float32 [size] within ± `limit`."""
    return spaces.Box(-limit, limit, (size,), np.float32)


def text_space(length: int, charset: str = PRINTABLE) -> spaces.Text:
    """Text of up to `length` characters."""
    return spaces.Text(length, min_length=0, charset=charset)


def action_space(size: int) -> spaces.Box:
    """Actions in [-1, 1], float32 [size]."""
    return vector_space(size, 1.0)
