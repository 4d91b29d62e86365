"""Defaults of a VLA model from the spaces of an environment: sizes and stream names that the config does not set.

`load_vla_model_for` calls `model_defaults` before it builds the model of a policy with `name: vla`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from torch import nn

from deft.models.vla.interface import as_vla_class
from deft.models.vla.spec import model_keywords
from deft.schema import has_channels_last

OBJECT_POSITIONS = "places"  # stream of labels of object positions, used in training only


def model_defaults(
    model_class: type[nn.Module],
    given: Mapping[str, Any],
    observation_space: spaces.Dict,
    action_space: spaces.Box,
    chunk_length: int = 1,
) -> dict[str, Any]:
    """Return the keywords of `model_class` that `given` does not set and the spaces determine.

    `action_dim`, `chunk_length`, `image_keys` (every uint8 image with 3 channels), `image_size`, `proprio_key` and
    `proprio_dim` (a vector of floats), `instruction_key` and `max_instruction_length` (a row of bytes), `places_key`
    and `places_dim` (the vector of floats named `places`, which has no other use). A key is None where the environment
    has no such stream. Among several streams of one kind the default of the class is chosen; where it is not among
    them, or where images differ in size, the keyword is not set.
    """
    own, _ = model_keywords(model_class)
    streams = observation_space.spaces
    answers: dict[str, Any] = {"action_dim": int(action_space.shape[-1]), "chunk_length": chunk_length}

    images = [name for name, space in streams.items() if _image_sides(space)]
    if images:
        answers["image_keys"] = images
    chosen = given.get("image_keys", images)
    names = chosen if isinstance(chosen, list | tuple) else []
    sides = {side for name, space in streams.items() if name in names for side in _image_sides(space)}
    if len(sides) == 1:
        multiple = as_vla_class(model_class).image_multiple  # the model scales its images to its own size
        answers["image_size"] = max(multiple, sides.pop() // multiple * multiple)

    vectors, texts = _rows(streams, np.floating), _rows(streams, np.uint8)
    labels = {name: vectors.pop(name) for name in (OBJECT_POSITIONS,) if name in vectors}  # no policy reads them
    for keyword, size, lengths in (
        ("proprio_key", "proprio_dim", vectors),
        ("instruction_key", "max_instruction_length", texts),
        ("places_key", "places_dim", labels),
    ):
        if keyword in given:
            key = given[keyword]
        elif own.get(keyword) in lengths:
            key = own[keyword]
        elif len(lengths) < 2:
            key = next(iter(lengths), None)
        else:
            continue
        answers[keyword] = key
        if isinstance(key, str) and key in lengths:
            answers[size] = lengths[key]
    longest = own.get("max_instruction_length")
    if isinstance(longest, int) and "max_instruction_length" in answers:
        # A maximum: a model with a larger default keeps it, and with it the shape of its pretrained weights.
        answers["max_instruction_length"] = max(longest, answers["max_instruction_length"])
    return {name: value for name, value in answers.items() if name in own and name not in given}


def _image_sides(space: spaces.Space) -> tuple[int, ...]:
    """Height and width of a space of uint8 images with 3 channels, first or last; nothing for any other space."""
    if not isinstance(space, spaces.Box) or space.dtype != np.uint8 or len(space.shape) != 3:
        return ()
    if has_channels_last(space.shape, space.dtype):
        return space.shape[:2] if space.shape[-1] == 3 else ()
    return space.shape[1:] if space.shape[0] == 3 else ()


def _rows(streams: Mapping[str, spaces.Space], kind: type[np.generic]) -> dict[str, int]:
    """Return the streams that are vectors of this dtype, with their lengths."""
    boxes = {name: space for name, space in streams.items() if isinstance(space, spaces.Box) and len(space.shape) == 1}
    return {name: box.shape[0] for name, box in boxes.items() if np.issubdtype(box.dtype, kind)}
