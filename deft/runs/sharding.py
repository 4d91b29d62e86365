"""A policy whose weights, gradients and optimizer moments are shared out among processes (FSDP), for large models.

Each process keeps 1/n of every weight between two passes and gathers the whole for the time of a pass; gradients come
back averaged. `deft.training.phases.base` and the builders of runs shard where `fsdp` says so, before the optimizer is
made, a policy that all processes have alike.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from deft.algorithms.sharded_optimization import are_sharded, part_of, whole
from deft.errors import InputError
from deft.models.policy import Policy
from deft.runs.processes import Processes

log = logging.getLogger(__name__)
ONE_PROCESS = "fsdp: one process has nothing to share out; start several: accelerate launch --multi_gpu, or torchrun"
NOT_SAVED = "nothing was saved after the failure: the weights are shared out, and other processes may be gone"
NOT_COMPILED = "fsdp: not with compile, which wants the weights whole; leave one of them out"
WHO_CAN = "`deft train ppo`, `sft` and `teacher` have it"
PASSES = ("evaluate_actions", "imitation")  # of a policy, by which algorithms use its weights


def asks_for_shards(fsdp: bool, name: str, can_shard: bool, processes: Processes) -> bool:
    """Whether the weights of a run are to be shared out; refuses an algorithm that cannot train them so."""
    if fsdp and not can_shard:
        raise InputError(f"fsdp: {name} keeps its weights whole; {WHO_CAN}")
    if fsdp and processes.count == 1:
        log.warning(ONE_PROCESS)
    return fsdp and processes.count > 1


def shard_policy(policy: Policy, processes: Processes, device: torch.device, acts: bool = True) -> WholeCopy:
    """Share out a policy's weights, those of the first process; returns the copy that acts in its place.

    The layers that a VLA model names (`gathered_layers`) are gathered one at a time, all else together. `acts`: whether
    this process needs the copy.
    """
    learning = {str(parameter.dtype) for parameter in policy.parameters() if parameter.requires_grad}
    if len(learning) > 1:
        kinds = " and ".join(sorted(learning)).replace("torch.", "")
        raise InputError(f"fsdp: weights of one type learn together, here {kinds}; use dtype float32, or lora")
    if any(module._compiled_call_impl is not None for module in policy.modules()):
        raise InputError(NOT_COMPILED)
    acting = WholeCopy(policy, device, acts)
    weights = dict(policy.state_dict()) if processes.is_first else {}
    layers = getattr(getattr(policy, "model", None), "gathered_layers", None)
    passes = [name for name in PASSES if hasattr(policy, name)]
    # FSDP warns of changing in place what a policy returns; algorithms do not.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    shard(policy, processes, device, passes=passes, modules=() if layers is None else layers())
    load_whole_weights(policy, weights)
    return acting


class WholeCopy:
    """A copy of a policy that is shared out, with whole weights: it acts without a word to the other processes.

    They may act a different number of times. Between `take` and `free` it holds all weights; all processes call these.
    """

    def __init__(self, policy: Policy, device: torch.device, keeps: bool = True) -> None:
        """Of a policy that is still whole; where it does not `keeps`, this process only gives its part."""
        empty = {
            id(parameter): nn.Parameter(torch.empty(0, dtype=parameter.dtype, device=device), requires_grad=False)
            for parameter in policy.parameters()
        }
        self.learner, self.keeps = policy, keeps
        self.policy: Policy = copy.deepcopy(policy, dict(empty)).to(device)

    @torch.no_grad()
    def take(self) -> None:
        """The learner's weights and statistics of now."""
        reshard(self.learner)
        for own, source in zip(self.policy.parameters(), self.learner.parameters(), strict=True):
            gathered = whole(source.detach())
            if self.keeps:
                own.data = gathered
        for statistic, latest in zip(self.policy.buffers(), self.learner.buffers(), strict=True):
            statistic.copy_(latest)
        for module, learned in zip(self.policy.modules(), self.learner.modules(), strict=True):
            if hasattr(learned, "is_unit"):  # which follows from the buffers `center` and `width`
                module.is_unit = learned.is_unit

    def free(self) -> None:
        """Give back the memory of the weights."""
        for parameter in self.policy.parameters():
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)


def shard(
    policy: nn.Module,
    processes: Processes,
    device: torch.device,
    units: tuple[type[nn.Module], ...] = (),
    ignored: Iterable[nn.Parameter] = (),
    passes: Iterable[str] = (),
    modules: Iterable[nn.Module] = (),
) -> nn.Module:
    """Share out the weights of a policy, in place; alone, it stays as it is.

    Modules of the types `units`, and `modules`, are gathered one at a time, all else together. `ignored` stay whole in
    all processes. `passes`: the methods beside `forward` that use the weights.
    """
    if processes.count == 1:
        return policy
    mesh = init_device_mesh(device.type, (processes.count,))
    left = set(ignored)
    for part in [*(module for module in policy.modules() if isinstance(module, units)), *modules]:
        fully_shard(part, mesh=mesh)
    fully_shard(policy, mesh=mesh, ignored_params=left)
    for name in passes:
        register_fsdp_forward_method(policy, name)
    return policy


def reshard(policy: nn.Module) -> None:
    """Let go of what a pass without gradients gathered: until then changes of a weight would be lost."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def is_sharded(policy: nn.Module) -> bool:
    """Whether the policy's weights are shared out."""
    return are_sharded(policy.parameters())


def local_parts(policy: nn.Module) -> Iterator[Tensor]:
    """What this process has of every weight."""
    for parameter in policy.parameters():
        yield parameter.to_local() if isinstance(parameter, DTensor) else parameter


def are_finite(policy: nn.Module, processes: Processes, device: torch.device) -> bool:
    """Whether all weights are numbers; where they are shared out all processes call it, and look at their parts."""
    finite = all(bool(torch.isfinite(part).all()) for part in local_parts(policy))
    return not processes.largest(float(not finite), device) if is_sharded(policy) else finite


def local_bytes(policy: nn.Module) -> int:
    """What the weights take in this process between two passes."""
    return sum(part.numel() * part.element_size() for part in local_parts(policy))


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
    if not isinstance(value, Tensor) or not value.ndim:  # such as a step count
        return value
    return part_of(value, parameter)


def _whole() -> StateDictOptions:
    """All of it on the CPU, from and to the first process."""
    together = torch.distributed.is_initialized()
    return StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=together)
