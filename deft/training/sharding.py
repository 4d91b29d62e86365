"""A policy whose weights, gradients and optimizer moments are shared out among processes (FSDP), for large models.

Each process keeps 1/n of every weight between two passes and gathers the whole for the time of a pass; gradients come
back averaged. Shard before the optimizer is made, on a policy that all processes have alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from deft.training.processes import Processes


def _whole(**changes: Any) -> StateDictOptions:
    """All of it on the CPU, from and to the first process."""
    together = torch.distributed.is_initialized()
    return StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=together, **changes)


def shard(policy: nn.Module, processes: Processes, device: torch.device, bf16: bool = False) -> nn.Module:
    """Share out the weights of a policy, in place; `bf16`: passes compute in it, the weights stay float32."""
    if processes.count == 1:
        return policy
    mesh = init_device_mesh(device.type, (processes.count,))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    return policy


def is_sharded(policy: nn.Module) -> bool:
    """Whether the policy's weights are shared out."""
    return any(isinstance(parameter, DTensor) for parameter in policy.parameters())


def whole_weights(policy: nn.Module) -> dict[str, Any]:
    """All weights on the CPU, in the first process; the others call it too, and get nothing."""
    return dict(get_model_state_dict(policy, options=_whole()))


def load_whole_weights(policy: nn.Module, weights: dict[str, Any]) -> None:
    """Share out weights that the first process has; the number of processes they were saved by does not matter."""
    set_model_state_dict(policy, weights, options=_whole())


def whole_moments(policy: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state, as `whole_weights`."""
    return dict(get_optimizer_state_dict(policy, optimizer, options=_whole()))


def load_whole_moments(policy: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """The inverse of `whole_moments`; weights that got no gradient yet have none."""
    set_optimizer_state_dict(policy, optimizer, state, options=_whole(strict=False))


def local_bytes(policy: nn.Module) -> int:
    """What the weights take in this process between two passes."""
    parts = (p.to_local() if isinstance(p, DTensor) else p for p in policy.parameters())
    return sum(part.numel() * part.element_size() for part in parts)
