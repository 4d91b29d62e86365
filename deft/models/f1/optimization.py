"""Selects the trainable weights of an F1 policy, with LoRA adapters or without, and creates optimizer and schedule.

LoRA through peft: adapters on chosen layers; the memory and other added parts are fully trained. `peft_adapter/` holds
all trained weights and is loaded on top of the base model; the policy's methods are unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, LRScheduler

from deft.config.validation import checked
from deft.errors import InputError
from deft.models.f1.model import ADDED_PARTS
from deft.models.f1.policy import F1Policy
from deft.models.lora import LoraSettings
from deft.models.vla.loading import check_fit, read_weights
from deft.ownership import verify

SCHEDULERS = ("cosine", "linear", "constant")
ADAPTER_FOLDER = "peft_adapter"
ADAPTER = "default"


def set_policy_requires_grad(
    policy: F1Policy,
    freeze_vision_encoder: bool = True,
    freeze_gen_expert: bool = False,
    train_act_expert_only: bool = False,
    train_gen_expert_only: bool = False,
) -> None:
    """Set which parameters are trained; the image tokenizer and unused language heads never are.

    `train_gen_expert_only`: the world model alone, with the memory, the conditioning on actions and the motion prior.
    `train_act_expert_only`: the action expert alone. `freeze_gen_expert`: all parts that predict frames are frozen,
    including the memory. `freeze_vision_encoder`: SigLIP is frozen. With LoRA the same choice applies to the adapters
    and the fully trained parts.
    """
    if train_act_expert_only and train_gen_expert_only:
        raise InputError("train_act_expert_only and train_gen_expert_only exclude each other")
    if freeze_gen_expert and train_gen_expert_only:
        raise InputError("freeze_gen_expert and train_gen_expert_only exclude each other")
    model = policy.model
    generation: list[nn.Module] = [model.experts.generation, model.world_model]
    generation += [part for name in ADDED_PARTS if (part := getattr(model, name)) is not None]
    action: list[nn.Module] = [model.experts.action, model.flow]
    if model.memory is not None:
        action.append(model.memory.to_action)
    understanding: list[nn.Module] = [model.words, model.experts.understanding, model.vision.projector]
    if not freeze_vision_encoder:
        understanding.append(model.vision)
    if train_gen_expert_only:
        learning = generation
    elif train_act_expert_only:
        learning = action
    else:
        learning = understanding + action + ([] if freeze_gen_expert else generation)
    chosen = {id(parameter) for part in learning for parameter in part.parameters()}
    chosen -= {id(parameter) for part in _without_gradient(policy, acts=action[0] in learning) for parameter in part}
    for name, parameter in policy.named_parameters():
        may_learn = not has_lora(policy) or ".lora_" in name or ".modules_to_save." in name
        parameter.requires_grad_(id(parameter) in chosen and may_learn)


def _without_gradient(policy: F1Policy, acts: bool) -> Iterator[Iterator[nn.Parameter]]:
    """Return parameters without a gradient: only keys and values of the understanding expert's last layer are used."""
    understanding = policy.model.experts.understanding
    last: Any = understanding.layers[-1]
    attention = last.self_attn
    for part in (understanding.norm, last.post_attention_layernorm, last.mlp, attention.q_proj, attention.o_proj):
        yield part.parameters()
    memory: Any = policy.model.memory
    if not acts and memory is not None:
        yield memory.to_action.parameters()


def setup_optimizer(policy: nn.Module, lr: float = 1e-4, weight_decay: float = 0.01) -> torch.optim.AdamW:
    """Create AdamW over the trainable weights; norms, biases, gates and position embeddings have no weight decay."""
    learning = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    if not learning:
        raise InputError("the policy has no trainable parameters; see set_policy_requires_grad")
    matrices = [parameter for parameter in learning if parameter.ndim in (2, 4)]
    others = [parameter for parameter in learning if parameter.ndim not in (2, 4)]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    fused = all(parameter.device.type == "cuda" for parameter in learning)
    return torch.optim.AdamW([group for group in groups if group["params"]], lr, betas=(0.9, 0.95), fused=fused or None)


def setup_scheduler(
    optimizer: torch.optim.Optimizer, scheduler_type: str = "cosine", T_max: int = 10_000, eta_min: float = 0.0
) -> LRScheduler:
    """Create a cosine, linear or constant schedule from the optimizer's learning rate to `eta_min` in `T_max` steps."""
    if scheduler_type == "cosine":
        return CosineAnnealingLR(optimizer, T_max, eta_min)
    if scheduler_type == "linear":
        highest = max(group["lr"] for group in optimizer.param_groups)
        return LinearLR(optimizer, 1.0, eta_min / highest, T_max)
    if scheduler_type == "constant":
        return LambdaLR(optimizer, lambda step: 1.0)
    raise InputError(f"scheduler_type is {scheduler_type!r}; choose {', '.join(SCHEDULERS)}")


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
