"""Selects the trainable weights of an F1 policy, and creates their optimizer and schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, LRScheduler

from deft.errors import InputError
from deft.models.f1.policy import F1Policy

SCHEDULERS = ("cosine", "linear", "constant")
ADDED_PARTS = ("memory", "conditioning", "motion")


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
    has_adapters = hasattr(model, "peft_config")
    for name, parameter in policy.named_parameters():
        may_learn = not has_adapters or ".lora_" in name or ".modules_to_save." in name
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
    matrices = [parameter for parameter in learning if parameter.ndim == 2 or parameter.ndim == 4]
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
