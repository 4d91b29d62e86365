"""Specifications of VLA models: the keywords of `model_config`, with their defaults and checks.

A model takes one as `spec`, or its fields as keywords: `TinyVLAModel(head="flow")`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from deft.errors import InputError


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
            if (size := getattr(self, name)) < number:
                raise InputError(f"{name} {size} must be {number} or more")


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


def model_keywords(model_class: type[nn.Module]) -> dict[str, Any]:
    """Return the keywords that a model's constructor names and their defaults.

    If it has the parameter `spec`, the fields of the specification count as keywords.
    """
    parameters = dict(inspect.signature(model_class).parameters)
    spec_class: Any = getattr(model_class, "spec_class", None)
    takes_spec = spec_class is not None and parameters.pop("spec", None) is not None
    fields_of_spec = {field.name: field.default for field in fields(spec_class)} if takes_spec else {}
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return fields_of_spec | {name: one.default for name, one in parameters.items() if one.kind not in variable}


def takes_any_keyword(model_class: type[nn.Module]) -> bool:
    """Return whether a model's constructor accepts keywords that it does not name."""
    parameters = inspect.signature(model_class).parameters
    return "spec" not in parameters and any(one.kind is one.VAR_KEYWORD for one in parameters.values())
