"""Policies whose parameters, gradients and optimizer state are sharded among processes (FSDP), for large models.

Each process keeps 1/n of every parameter between two passes and gathers the whole during a pass. Gradients
are averaged. The builders of runs shard a policy, equal in all processes, where `fsdp` is set, before they create the
optimizer.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from deft.algorithms.optimization import are_sharded, full_tensor
from deft.errors import InputError
from deft.models.policy import Policy
from deft.runs.processes import Processes

log = logging.getLogger(__name__)
ONE_PROCESS = "fsdp: one process has nothing to shard; start several: accelerate launch --multi_gpu, or torchrun"
NOT_SAVED = "nothing was saved after the failure: the parameters are sharded, and other processes may be gone"
NOT_COMPILED = "fsdp: not with compile, which needs whole weights; leave one of them out"
WHO_CAN = "`deft train ppo`, `sft` and `teacher` support it"
PASSES = ("evaluate_actions", "imitation")  # the methods of a policy by which algorithms use its weights


def should_shard(fsdp: bool, name: str, can_shard: bool, processes: Processes) -> bool:
    """Whether the parameters of a run are sharded; an error if the algorithm cannot train them so."""
    if fsdp and not can_shard:
        raise InputError(f"fsdp: {name} does not support it; {WHO_CAN}")
    if fsdp and processes.count == 1:
        log.warning(ONE_PROCESS)
    return fsdp and processes.count > 1


def shard_policy(policy: Policy, processes: Processes, device: torch.device, acts: bool = True) -> WholeCopy:
    """Shard a policy with the weights of the first process; return the copy that acts in its place.

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
    load_full_weights(policy, weights)
    return acting


class WholeCopy:
    """A copy of a sharded policy with whole weights: it acts without the other processes.

    They may act a different number of times. Between `take` and `free` it holds all weights; all processes call these.
    """

    def __init__(self, policy: Policy, device: torch.device, keeps: bool = True) -> None:
        """Copy a policy that is not sharded yet; without `keeps` this process only contributes its shards."""
        empty = {
            id(parameter): nn.Parameter(torch.empty(0, dtype=parameter.dtype, device=device), requires_grad=False)
            for parameter in policy.parameters()
        }
        self.learner, self.keeps = policy, keeps
        self.policy: Policy = copy.deepcopy(policy, dict(empty)).to(device)

    @torch.no_grad()
    def take(self) -> None:
        """Gather the current weights and statistics of the sharded policy."""
        reshard(self.learner)
        for own, source in zip(self.policy.parameters(), self.learner.parameters(), strict=True):
            gathered = full_tensor(source.detach())
            if self.keeps:
                own.data = gathered
        for statistic, latest in zip(self.policy.buffers(), self.learner.buffers(), strict=True):
            statistic.copy_(latest)
        for module, learned in zip(self.policy.modules(), self.learner.modules(), strict=True):
            if hasattr(learned, "is_unit"):  # which follows from the buffers `center` and `width`
                module.is_unit = learned.is_unit

    def free(self) -> None:
        """Free the memory of the weights."""
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
    """Shard the parameters of a policy, in place; with one process it stays as it is.

    Modules of the types `units`, and `modules`, are gathered one at a time, all else together. Parameters in `ignored`
    are not sharded. `passes`: the methods beside `forward` that use the weights.
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
    """Free what a pass without gradients gathered: until then changes of a parameter would be lost."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def is_sharded(policy: nn.Module) -> bool:
    """Whether the policy's parameters are sharded."""
    return are_sharded(policy.parameters())


def local_parts(policy: nn.Module) -> Iterator[Tensor]:
    """Yield this process's shard of every parameter."""
    for parameter in policy.parameters():
        yield parameter.to_local() if isinstance(parameter, DTensor) else parameter


def are_finite(policy: nn.Module, processes: Processes, device: torch.device) -> bool:
    """Whether all weights are finite; with sharded parameters all processes call it, and check their shards."""
    finite = all(bool(torch.isfinite(part).all()) for part in local_parts(policy))
    return not processes.maximum(float(not finite), device) if is_sharded(policy) else finite


def local_bytes(policy: nn.Module) -> int:
    """Return the bytes of the parameters in this process between two passes."""
    return sum(part.numel() * part.element_size() for part in local_parts(policy))


def full_weights(policy: nn.Module) -> dict[str, Any]:
    """Return all weights on the CPU, in the first process; the others call it too, and get nothing."""
    from torch.distributed.checkpoint import state_dict  # a quarter of a second, which other runs need not wait for

    return dict(state_dict.get_model_state_dict(policy, options=_whole()))


def load_full_weights(policy: nn.Module, weights: dict[str, Any]) -> None:
    """Shard weights that the first process has; they may have been saved by another number of processes."""
    from torch.distributed.checkpoint import state_dict

    state_dict.set_model_state_dict(policy, weights, options=_whole())


def _whole() -> Any:
    """Return options for a full state on the CPU, from and to the first process."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    together = torch.distributed.is_initialized()
    return StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=together)
