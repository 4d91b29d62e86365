"""Specifications of VLA models: the keywords of `model_config`, with their checks and defaults.

A model takes one as `spec`, or its fields as keywords: `TinyVLAModel(head="flow")`. `model_defaults` derives keywords
that a config does not set from the spaces of an environment.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from gymnasium import spaces
from torch import nn

from deft.errors import InputError
from deft.models.vla.interface import as_vla_class, keywords_of
from deft.schema import LABELS, has_channels_last


@dataclass(kw_only=True)
class StreamSpec:
    """The observation streams that a model reads, and the size of its actions."""

    action_dim: int = 7
    chunk_length: int = 1
    image_keys: Sequence[str] = ("rgb",)
    instruction_key: str | None = "instruction"

    def __post_init__(self) -> None:
        """Check the values."""
        if isinstance(self.image_keys, str) or not self.image_keys:
            raise InputError(f"image_keys {self.image_keys!r} must be a list of one or more observation keys")
        self.check_least(action_dim=1, chunk_length=1)

    def check_least(self, **least: int) -> None:
        """Raise an error if a field is less than the given number."""
        for name, number in least.items():
            if (size := vars(self)[name]) < number:
                raise InputError(f"{name} {size} must be {number} or more")

    def check_choice(self, **choices: Iterable[str]) -> None:
        """Raise an error if a field is none of the given names."""
        for name, known in choices.items():
            if (chosen := vars(self)[name]) not in known:
                raise InputError(f"{name} {chosen!r} is none of {', '.join(known)}")


@dataclass(kw_only=True)
class ProprioSpec(StreamSpec):
    """A `StreamSpec` with a vector of proprioception."""

    proprio_key: str | None = "state"
    proprio_dim: int = 7

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        self.check_least(proprio_dim=1)


@dataclass(kw_only=True)
class FolderSpec(StreamSpec):
    """A pretrained model: its folder or architecture, and how it is trained."""

    folder: str | None = None
    architecture: Mapping[str, Any] | None = None
    load_weights: bool = True
    statistics: Mapping[str, Any] | str | None = None
    lora: Mapping[str, Any] | None = None
    freeze_vision: bool = False
    value_gradient: bool = False


@dataclass(kw_only=True)
class PretrainedSpec(FolderSpec):
    """A pretrained vision-language model."""

    prompt_length: int = 32
    tokenizer: str | None = None
    dtype: str = "float32"
    gradient_checkpointing: bool = False


@dataclass(kw_only=True)
class PromptedSpec(PretrainedSpec):
    """A `PretrainedSpec` with a prompt, for models that `torch.compile` can compile."""

    prompt: str = ""
    compile: bool = False


def model_keywords(model_class: type[nn.Module]) -> tuple[dict[str, Any], bool]:
    """Return the keywords that a model's constructor names, with their defaults, and whether it accepts any other.

    If it has the parameter `spec`, the fields of the specification count as keywords.
    """
    parameters, named = keywords_of(model_class), {}
    spec_class = as_vla_class(model_class).spec_class
    if spec_class is not None and parameters.pop("spec", None) is not None:
        named = {field.name: field.default for field in fields(spec_class)}
        parameters.pop("given", None)
    accepts_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    named |= {name: one.default for name, one in parameters.items() if one.kind not in variable}
    return named, accepts_any


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
    and `places_dim` (the labels `places` or `keyframes`, which have no other use). A key is None where the environment
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
    labels = {name: vectors.pop(name) for name in LABELS if name in vectors}  # no policy reads them
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
