"""A policy whose weights, gradients and optimizer moments are shared out among processes (FSDP), for large models.

Each process keeps 1/n of every weight between two passes and gathers the whole for the time of a pass; gradients come
back averaged. `deft.training.phases.base` shards where `training.fsdp` says so, before the optimizer is made, a policy
that all processes have alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from deft.training.processes import Processes


def shard(
    policy: nn.Module,
    processes: Processes,
    device: torch.device,
    units: tuple[type[nn.Module], ...] = (),
    ignored: Iterable[nn.Parameter] = (),
    passes: Iterable[str] = (),
) -> nn.Module:
    """Share out the weights of a policy, in place; alone, it stays as it is.

    Modules of the types `units` are gathered one at a time, all else together. `ignored` stay whole in all processes.
    `passes`: the methods beside `forward` that use the weights.
    """
    if processes.count == 1:
        return policy
    mesh = init_device_mesh(device.type, (processes.count,))
    left = set(ignored)
    for part in [module for module in policy.modules() if isinstance(module, units)]:
        fully_shard(part, mesh=mesh)
    fully_shard(policy, mesh=mesh, ignored_params=left)
    for name in passes:
        register_fsdp_forward_method(policy, name)
    return policy


def is_sharded(policy: nn.Module) -> bool:
    """Whether the policy's weights are shared out."""
    return any(isinstance(parameter, DTensor) for parameter in policy.parameters())


def local_parts(policy: nn.Module) -> Iterator[Tensor]:
    """What this process has of every weight."""
    for parameter in policy.parameters():
        yield parameter.to_local() if isinstance(parameter, DTensor) else parameter


def local_bytes(policy: nn.Module) -> int:
    """What the weights take in this process between two passes."""
    return sum(part.numel() * part.element_size() for part in local_parts(policy))


def whole(tensor: Tensor) -> Tensor:
    """A tensor that may be shared out, whole; all processes call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_weights(policy: nn.Module) -> dict[str, Any]:
    """All weights on the CPU, in the first process; the others call it too, and get nothing."""
    return dict(get_model_state_dict(policy, options=_whole()))


def load_whole_weights(policy: nn.Module, weights: dict[str, Any]) -> None:
    """Share out weights that the first process has; the number of processes they were saved by does not matter."""
    set_model_state_dict(policy, weights, options=_whole())


def whole_moments(optimizer: torch.optim.Optimizer, is_first: bool) -> dict[str, Any]:
    """The optimizer's state as one process would have it, on the CPU of the first; all call it."""
    state = optimizer.state_dict()
    gathered: dict[int, dict[str, Any]] = {}
    for index, values in state["state"].items():
        gathered[index] = {}
        for name, value in values.items():
            value = whole(value)  # one at a time: all of them together may not fit a device
            gathered[index][name] = value.cpu() if is_first else None
    return {**state, "state": gathered}


def load_whole_moments(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """The inverse of `whole_moments`: each process has the whole state and keeps its part."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    parts = {
        index: {name: _part(value, parameters[index]) for name, value in values.items()}
        for index, values in state["state"].items()
        if index < len(parameters)
    }
    optimizer.load_state_dict({**state, "state": parts})


def _part(value: Any, parameter: Tensor) -> Any:
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or not value.ndim:  # such as a step count
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(value.to(parameter.device), mesh, placements, src_data_rank=None)


def _whole() -> StateDictOptions:
    """All of it on the CPU, from and to the first process."""
    together = torch.distributed.is_initialized()
    return StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=together)
