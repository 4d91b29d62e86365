"""Images to the model's format and back."""

import pytest
import torch

from deft.errors import InputError
from deft.models.f1 import frames


def test_pictures_are_scaled_once_and_back():
    pictures = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(1, 3, -1, -1)
    scaled = frames.to_model(pictures, 16, "image0")
    assert scaled.min() == -1
    assert scaled.max() == 1
    assert torch.equal(frames.to_images(scaled), pictures)
    with pytest.raises(InputError, match=r"image0 is float32 \[1, 3, 16, 16\]"):
        frames.to_model(scaled, 16, "image0")


def test_pictures_keep_their_shape():
    """8×16 made 4×4: the picture is 2×4, with black above it."""
    scaled = frames.to_model(torch.full((1, 3, 8, 16), 255, dtype=torch.uint8), 4, "image0")
    assert scaled[0, 0].tolist() == [[-1.0] * 4] * 2 + [[1.0] * 4] * 2
