"""The state of optimizers in checkpoints: the same whether parameters are sharded (FSDP), and among how many processes.

The algorithms and the phases of F1 training save and load by it. It is in torch's form, with full tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from deft.errors import InputError


def are_sharded(tensors: Iterable[Tensor]) -> bool:
    """Return whether any of the tensors is sharded."""
    return any(isinstance(tensor, DTensor) for tensor in tensors)


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a tensor that may be sharded; all processes call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(value: Tensor, parameter: Tensor) -> Tensor:
    """Shard a full tensor, which every process has, as a parameter of its shape is sharded."""
    if not isinstance(parameter, DTensor):
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(value.to(parameter.device), mesh, placements, src_data_rank=None)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return all parameters of an optimizer, in the order of their state."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def group_by_kind(parameters: Iterable[Tensor]) -> dict[Any, list[int]]:
    """Return the indices of the parameters of each type and device."""
    kinds: dict[Any, list[int]] = {}
    for index, parameter in enumerate(parameters):
        kinds.setdefault((parameter.dtype, parameter.device), []).append(index)
    return kinds


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state with full tensors on the CPU, None in all processes but the first; all processes call it."""
    state, is_first = optimizer.state_dict(), not distributed.is_initialized() or distributed.get_rank() == 0
    if not are_sharded(parameters_of(optimizer)):
        return state
    gathered: dict[int, dict[str, Any]] = {}
    for index, values in state["state"].items():
        gathered[index] = {}
        for name, value in values.items():
            full = full_tensor(value)  # one at a time: all of them together may not fit a device
            gathered[index][name] = full.cpu() if is_first else None
    return {**state, "state": gathered}


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], hyperparameters: bool = False
) -> None:
    """Load what `optimizer_state` returned, or the state of earlier versions of Deft; every process has the full state.

    `hyperparameters`: load those of the parameter groups too. Otherwise the settings' learning rate stays.
    """
    state, parameters = from_flat_state(state, optimizer), parameters_of(optimizer)
    check_state(state, parameters)
    shards = {
        index: {name: _shard(value, parameters[index]) for name, value in values.items()}
        for index, values in state["state"].items()
    }
    groups = state["param_groups"] if hyperparameters else optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({**state, "state": shards, "param_groups": groups})


def check_state(state: dict[str, Any], parameters: list[nn.Parameter]) -> None:
    """Raise an error if a state in torch's form is that of other parameters."""
    saved = {index: values["exp_avg"] for index, values in state["state"].items()}
    count = sum(len(group["params"]) for group in state["param_groups"])
    if count != len(parameters) or any(parameters[index].shape != value.shape for index, value in saved.items()):
        _raise_mismatch(sum(value.numel() for value in saved.values()), parameters)


def _raise_mismatch(saved: int, parameters: list[nn.Parameter]) -> None:
    own = sum(parameter.numel() for parameter in parameters)
    raise InputError(f"the optimizer state is for {saved} parameters; the policy trains {own}")


def _shard(value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, Tensor) or not value.ndim:  # such as a step count
        return value
    return shard_like(value, parameter)


def from_flat_state(
    state: dict[str, Any], optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter] | None = None
) -> dict[str, Any]:
    """Return a state in torch's form; translate one that an earlier version of Deft wrote as flat tensors.

    The flat tensors `first` and `second` hold the averages of all parameters of one type, one after the other.
    `parameters`: those that the state may cover, where they are not the optimizer's.
    """
    if "first" not in state:
        return state
    covered = parameters_of(optimizer) if parameters is None else parameters
    order = [index for indices in group_by_kind(covered).values() for index in indices]
    flat = [torch.cat([part.flatten() for part in _listed(state[name])]) for name in ("first", "second")]
    entries, start = {}, 0
    for index in order:
        shape, stop = covered[index].shape, start + covered[index].numel()
        if stop > len(flat[0]):
            break
        averages = [part[start:stop].view(shape) for part in flat]
        count = torch.tensor(float(state["count"]))
        entries[index] = {"step": count, "exp_avg": averages[0], "exp_avg_sq": averages[1]}
        start = stop
    if start != len(flat[0]) or (parameters is None and len(entries) != len(covered)):
        _raise_mismatch(len(flat[0]), covered)
    groups = optimizer.state_dict()["param_groups"]
    if "learning_rate" in state:
        groups = [{**group, "lr": state["learning_rate"]} for group in groups]
    return {"state": entries, "param_groups": groups}


def _listed(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)
