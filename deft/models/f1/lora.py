"""LoRA on an F1 policy through peft: adapters on chosen layers; the memory and other added parts are fully trained.

`peft_adapter/` holds all trained weights and is loaded on top of the base model; the policy's methods are unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from deft.config.validation import checked
from deft.errors import InputError
from deft.models.f1.optimization import ADDED_PARTS
from deft.models.f1.policy import F1Policy
from deft.models.lora import LoraSettings
from deft.models.vla.loading import check_fit, read_weights
from deft.ownership import verify

ADAPTER_FOLDER = "peft_adapter"
ADAPTER = "default"


def has_lora(policy: F1Policy) -> bool:
    """Whether the policy has adapters."""
    return hasattr(policy.model, "peft_config")


def add_lora(policy: F1Policy, lora_config: Mapping[str, Any] | LoraSettings | None = None) -> None:
    """Add new adapters to the policy's model, initially without effect; only they and the added parts are trained."""
    peft = _peft()
    _check_bare(policy)
    chosen = lora_config if isinstance(lora_config, LoraSettings) else checked(LoraSettings, dict(lora_config or {}))
    added = [name for name in ADDED_PARTS if getattr(policy.model, name) is not None]
    config = peft.LoraConfig(
        r=chosen.r,
        lora_alpha=chosen.lora_alpha,
        target_modules=list(chosen.target_modules),
        lora_dropout=chosen.lora_dropout,
        modules_to_save=added or None,
    )
    try:
        policy.model = peft.get_peft_model(policy.model, config)
    except ValueError as error:
        raise InputError(f"lora: {str(error).strip().splitlines()[0]}") from None


def save_adapter(policy: F1Policy, folder: str | Path) -> None:
    """Write the adapters and the fully trained parts to a folder in peft's layout."""
    if not has_lora(policy):
        raise InputError("the policy has no LoRA adapters to save")
    wrapped: Any = policy.model
    wrapped.save_pretrained(str(folder))


def load_adapter(policy: F1Policy, folder: str | Path) -> None:
    """Load saved adapters on a policy without adapters; all names and shapes must fit."""
    folder = Path(folder)
    if not (folder / "adapter_config.json").is_file():
        raise InputError(f"{folder} holds no adapter: adapter_config.json is not there")
    verify(folder / "adapter_config.json")
    peft = _peft()
    _check_bare(policy)
    config = peft.PeftConfig.from_pretrained(str(folder))
    if getattr(config, "megatron_config", None) is not None:  # peft would import the module `megatron_core` names
        raise InputError(
            f"{folder / 'adapter_config.json'}: megatron_config is set, and F1 has no such layers: remove it"
        )
    wrapped = peft.get_peft_model(policy.model, config)
    weights = read_weights(folder / "adapter_model.safetensors")
    try:
        check_fit(peft.get_peft_model_state_dict(wrapped), weights, folder, "the adapters of this model")
    except InputError:
        policy.model = wrapped.unload()
        raise
    peft.set_peft_model_state_dict(wrapped, weights)
    policy.model = wrapped


def merge_lora(policy: F1Policy) -> None:
    """Merge the low-rank changes into the weights and remove the adapters."""
    if not has_lora(policy):
        raise InputError("the policy has no LoRA adapters to merge")
    wrapped: Any = policy.model
    policy.model = wrapped.merge_and_unload()


def base_state_dict(policy: F1Policy) -> dict[str, Tensor]:
    """Return the policy's tensors under the names without adapters: base weights and fully trained parts."""
    found = {}
    for name, tensor in policy.state_dict().items():
        if ".lora_" in name or ".original_module." in name:
            continue
        plain = name.replace("model.base_model.model.", "model.", 1)
        found[plain.replace(".base_layer.", ".").replace(f".modules_to_save.{ADAPTER}.", ".")] = tensor
    return found


def _check_bare(policy: F1Policy) -> None:
    if has_lora(policy):
        raise InputError("lora: the policy has adapters already; merge them first (merge_lora)")


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise InputError('LoRA needs peft: pip install "deft[vla]"') from None
    return peft
