"""Specifications of VLA models: the keywords of `model_config`, with their defaults and checks.

A model takes one as `spec`, or its fields as keywords: `TinyVLAModel(head="flow")`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from deft.errors import InputError
from deft.models.vla.interface import as_vla_class, keywords_of


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
class PretrainedSpec(StreamSpec):
    """A pretrained vision-language model: its folder or architecture, and how it is trained."""

    folder: str | None = None
    architecture: Mapping[str, Any] | None = None
    load_weights: bool = True
    prompt_length: int = 32
    tokenizer: str | None = None
    statistics: Mapping[str, Any] | str | None = None
    dtype: str = "float32"
    lora: Mapping[str, Any] | None = None
    freeze_vision: bool = False
    gradient_checkpointing: bool = False
    value_gradient: bool = False


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
