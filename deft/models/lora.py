"""The settings of LoRA adapters, the same for F1 (`models/f1/optimization.py`) and pretrained VLA models."""

from __future__ import annotations

from deft.config.validation import Count, Fraction, settings


@settings
class LoraSettings:
    """The `model.lora` section of a config."""

    r: Count = 8
    lora_alpha: Count = 32
    target_modules: tuple[str, ...] = ("q_proj", "v_proj")
    lora_dropout: Fraction = 0.0
