"""Spaces of the streams that the environments share."""

import numpy as np
from gymnasium import spaces

from deft.envs.spaces import LETTERS, action_space, image_space, text_space, vector_space


def test_shapes_bounds_and_types() -> None:
    assert image_space(64) == spaces.Box(0, 255, (3, 64, 64), np.uint8)
    assert image_space(4, 3, 32, 48) == spaces.Box(0, 255, (4, 3, 32, 48), np.uint8)
    assert vector_space(5, 2.0) == spaces.Box(-2, 2, (5,), np.float32)
    assert not vector_space(5).is_bounded()
    assert action_space(2) == spaces.Box(-1, 1, (2,), np.float32)
    assert text_space(8).contains("~ Aa 9!")
    assert text_space(8).contains("")
    assert not text_space(8, LETTERS).contains("A")
