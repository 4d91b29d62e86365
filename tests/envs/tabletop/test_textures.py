"""Procedural textures: always equal, read-only, and without a seam."""

import numpy as np
import pytest

from deft.envs.tabletop import textures


def test_all_textures_are_there_and_read_only() -> None:
    atlas = textures.atlas()
    assert atlas.shape == (textures.COUNT, textures.SIZE, textures.SIZE, 3)
    assert atlas.dtype == np.uint8
    with pytest.raises(ValueError, match="read-only"):
        atlas[0] = 0


def test_they_are_computed_from_a_fixed_seed() -> None:
    again = (np.clip(np.stack(textures._textures()), 0, 1) * 255 + 0.5).astype(np.uint8)
    np.testing.assert_array_equal(again, textures.atlas())


def test_noise_is_periodic() -> None:
    noise = textures._noise(np.random.default_rng(0), 4, 4)
    assert noise.min() == 0
    assert noise.max() == 1
    across, within = np.abs(noise[:, 0] - noise[:, -1]), np.abs(np.diff(noise, axis=1)).max(axis=1)
    assert (across <= 2 * within).all()  # the step over the edge is like those inside
