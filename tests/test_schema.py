"""The schema: scalars without a trailing dimension, renamed streams, image layouts, text as bytes."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from deft import schema
from deft.errors import InputError


def test_a_scalar_with_a_trailing_dimension_is_rejected() -> None:
    schema.check_scalars(TensorDict({schema.VALUE: torch.zeros(3), "observation": torch.zeros(3, 2)}, batch_size=[3]))
    wrong = TensorDict({"next": TensorDict({"reward": torch.zeros(3, 1)}, batch_size=[3])}, batch_size=[3])
    with pytest.raises(InputError, match=r"reward.* has shape \(3, 1\); a per-step scalar must have \(3,\)"):
        schema.check_scalars(wrong)


def test_streams_are_renamed_by_their_own_name() -> None:
    renamed = schema.renamed_streams(["top", "wrist"], {"front": "top"}, "the dataset")
    assert renamed == {"top": "front", "wrist": "wrist"}


@pytest.mark.parametrize(
    ("names", "rename", "message"),
    [
        (["top", "wrist"], {"a": "top", "b": "top"}, "gives one stream two names"),
        ([""], {"a": "top"}, "has one unnamed observation"),
        (["top", "wrist"], {"front": "head"}, "has no stream 'head'; it has top, wrist"),
        (["top", "wrist"], {"wrist": "top"}, "has another stream 'wrist' already"),
    ],
)
def test_renaming_that_cannot_be_is_an_error(names: list[str], rename: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=f"^rename_streams: .*{message}"):
        schema.renamed_streams(names, rename, "the dataset")


@pytest.mark.parametrize(
    ("shape", "dtype", "last"),
    [
        ((8, 8, 3), np.uint8, True),
        ((4, 8, 8, 1), np.uint8, True),  # a history of 4 images
        ((4, 3, 8, 1), np.uint8, False),  # a history of 4 images with channels first, 8 × 1 pixels
        ((5, 8, 8, 3), np.uint8, True),
        ((3, 8, 8), np.uint8, False),
        ((8, 8), np.uint8, False),
        ((8, 8, 3), np.float32, False),
    ],
)
def test_which_arrays_have_their_channels_last(shape: tuple[int, ...], dtype: type, last: bool) -> None:
    assert schema.has_channels_last(shape, np.dtype(dtype)) is last


def test_layouts_are_views_of_each_other() -> None:
    images = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)
    first = schema.channels_first(images)
    assert first.shape == (2, 3, 4, 5)
    assert np.shares_memory(first, images)
    assert first[1, 2, 3, 4] == images[1, 3, 4, 2]
    assert np.array_equal(schema.channels_last(first), images)


@pytest.mark.parametrize("text", ["", "reach the red target", "größer → 0"])
def test_text_comes_back_from_its_bytes(text: str) -> None:
    row = schema.encode_text(text, 32)
    assert row.dtype == np.uint8
    assert row.shape == (32,)
    assert schema.decode_text(row) == text


def test_text_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(InputError, match="instruction of 3 bytes does not fit its space of 2"):
        schema.encode_text("abc", 2)
