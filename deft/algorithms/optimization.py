"""Adam on flat memory, how algorithms compute gradients and apply them, and the state of optimizers in checkpoints.

All trainable parameters are views of one tensor, and so are their gradients: clipping and stepping then cost a handful
of operations instead of several for each parameter, which is a third of an update of a small network on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from deft.errors import InputError, RunError

ALIGNMENT = 64  # bytes, that of torch's own allocations on a CPU


class SharedTraining(Protocol):
    """What an algorithm asks of the processes that train with it (`deft.runs.processes`)."""

    count: int

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor, in place, by its mean over the processes."""

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the processes, in place."""
        ...

    def maximum(self, value: float, device: Any) -> float:
        """Return the maximum of the processes' values."""
        ...

    def merge_statistics(self, module: nn.Module) -> None:
        """Give every process the running statistics of all."""


def make_optimizer(
    parameters: Iterable[nn.Parameter],
    learning_rate: float,
    *,
    epsilon: float = 1e-8,
    weight_decay: float = 0.0,
    capturable: bool = False,
) -> torch.optim.Optimizer:
    """Return AdamW over the trainable parameters: a `FlatAdam`, or torch's where the parameters are sharded (FSDP)."""
    trainable = _trainable(parameters)
    if not are_sharded(trainable):
        return FlatAdam(trainable, learning_rate, eps=epsilon, weight_decay=weight_decay, capturable=capturable)
    # Gradients start at zero and are never None: the state of all parameters then has the same number of steps.
    for parameter in trainable:
        parameter.grad = torch.zeros_like(parameter)
    fused = all(parameter.device.type == "cuda" for parameter in trainable)
    return torch.optim.AdamW(trainable, learning_rate, eps=epsilon, weight_decay=weight_decay, fused=fused or None)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the learning rate of all parameter groups; in place where it is a tensor, as CUDA graphs need it."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(learning_rate)
        else:
            group["lr"] = learning_rate


@torch.no_grad()
def restart(optimizer: torch.optim.Optimizer) -> None:
    """Forget the averages of the gradients and the number of steps, in place.

    For parameters that had no gradient so far: their averages are 0, and divided by 1 − β^t of the steps that others
    took they would move by a multiple of the learning rate.
    """
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()


def backward(loss: Tensor, *optimizers: torch.optim.Optimizer, accumulate: bool = False) -> None:
    """Compute the gradients of a loss for the parameters of the optimizers; `accumulate`: add them to the present ones.

    Only one optimizer of sharded parameters is supported, since FSDP needs a full backward pass.
    """
    flat = [optimizer for optimizer in optimizers if isinstance(optimizer, FlatAdam)]
    if len(flat) == 1 or len(flat) < len(optimizers):
        if not accumulate:
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=False)
        loss.backward()
        return
    parameters = [parameter for optimizer in flat for parameter in optimizer.parameters]
    gradients = iter(torch.autograd.grad(loss, parameters, allow_unused=True))
    for optimizer in flat:
        optimizer.set_gradients([next(gradients) for _ in optimizer.parameters], accumulate)


def apply_gradients(
    optimizer: torch.optim.Optimizer, max_grad_norm: float | None = None, processes: SharedTraining | None = None
) -> Tensor:
    """Average the gradients over the processes, clip them to a global norm, step; return the norm before clipping."""
    gradients = gradients_of(optimizer)
    if processes is not None and not are_sharded(gradients):  # FSDP has averaged those of sharded parameters
        processes.average(gradients)
    norm = clip_gradients(gradients, max_grad_norm)
    if isinstance(optimizer, FlatAdam):
        optimizer.update_parameters()
    else:
        optimizer.step()
    return norm


def gradients_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the tensors that hold the gradients: the flat ones of a `FlatAdam`, or one for each parameter."""
    if isinstance(optimizer, FlatAdam):
        return [flat.gradient for flats in optimizer.flats for flat in flats]
    return [parameter.grad for parameter in parameters_of(optimizer) if parameter.grad is not None]


def clip_gradients(gradients: Sequence[Tensor], max_norm: float | None = None) -> Tensor:
    """Scale gradients in place to a total norm of at most `max_norm`; return the norm before.

    Raises an error if it is not finite, so that it does not reach the weights; on a GPU nothing waits for the norm.
    """
    if len(gradients) == 1:
        norm = torch.linalg.vector_norm(gradients[0])
    else:
        norm = full_tensor(torch.nn.utils.get_total_norm(gradients))
    if not norm.is_cuda:
        size = float(norm)
        if not math.isfinite(size):
            raise RunError(
                "the gradient is no longer finite, so the update was not applied: lower learning_rate, or check the "
                "rewards and observations for extreme values"
            )
        if max_norm is None or size <= max_norm:
            return norm
    if max_norm is not None:
        excess = torch.clamp(norm / max_norm, min=1.0)
        for gradient in gradients:
            (gradient.to_local() if isinstance(gradient, DTensor) else gradient).div_(excess)
    return norm


class FlatAdam(torch.optim.Optimizer):
    """AdamW over one flat tensor for each parameter type of a group: θ ← (1 − α λ) θ − α m̂ / (√v̂ + ε).

    The parameters stay where they are in their module; their storage moves into the flat tensor, so the optimizer is
    made after the module is on its device. Frozen parameters are left out. Gradients are views too: `zero_grad` never
    sets them to None, and a parameter without a gradient has the gradient zero.

    `capturable`: the learning rate and the step count are tensors on the device, so that a CUDA graph can hold a step.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        capturable: bool = False,
    ) -> None:
        self.flats: list[list[_Flat]] = []  # for each group, one for each type and device
        self.parameters: list[nn.Parameter] = []  # in the order of the flat tensors
        given: list[Any] = list(params)
        groups = given if given and isinstance(given[0], dict) else [{"params": _trainable(given)}]
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "capturable": capturable}
        super().__init__(groups, defaults)

    def __getstate__(self) -> dict[str, Any]:
        """For copies, together with their module: the flat tensors belong to the state."""
        return {**super().__getstate__(), "flats": self.flats, "parameters": self.parameters}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, and move its parameters into flat memory."""
        super().add_param_group({**param_group, "params": _trainable(param_group["params"])})
        group = self.param_groups[-1]
        if group["capturable"]:
            group["lr"] = torch.tensor(float(group["lr"]), device=group["params"][0].device)
        kinds = group_by_kind(group["params"]).values()
        self.flats.append([_Flat([group["params"][index] for index in kind], group["capturable"]) for kind in kinds])
        for flat in self.flats[-1]:
            self.parameters += flat.parameters
            for parameter, average, square in zip(flat.parameters, *map(flat.views, flat.averages), strict=True):
                self.state[parameter] = {"step": flat.count, "exp_avg": average, "exp_avg_sq": square}

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Set all gradients to zero, in place."""
        for gradient in gradients_of(self):
            gradient.zero_()

    @torch.no_grad()
    def set_gradients(self, gradients: Sequence[Tensor | None], accumulate: bool = False) -> None:
        """Copy one gradient for each of `parameters`, zero for None; one operation instead of an addition for each."""
        start = 0
        for flat in (flat for flats in self.flats for flat in flats):
            stop = start + len(flat.parameters)
            parts, start = flat.parts(gradients[start:stop]), stop
            if accumulate:
                flat.gradient += torch.cat(parts)
            else:
                torch.cat(parts, out=flat.gradient)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with the gradients of the parameters, also those that replaced the views."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for flat in (flat for flats in self.flats for flat in flats):
            flat.restore_gradients()
        self.update_parameters()
        return loss

    def update_parameters(self) -> None:
        """Do what `step` does, without the hooks and profiling of torch, which take as long for a small network."""
        for group, flats in zip(self.param_groups, self.flats, strict=True):
            for flat in flats:
                flat.count += 1
                (_fused_step if group["capturable"] else _step)(flat, group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's form; the tensors are on the CPU, and views of one copy of each flat tensor."""
        packed, state = super().state_dict(), {}
        index = {id(parameter): number for number, parameter in enumerate(parameters_of(self))}
        for flat in (flat for flats in self.flats for flat in flats):
            count = flat.count.cpu()
            copies = [average.cpu().clone() for average in flat.averages]
            for parameter, average, square in zip(flat.parameters, *map(flat.views, copies), strict=True):
                state[index[id(parameter)]] = {"step": count.clone(), "exp_avg": average, "exp_avg_sq": square}
        for group in packed["param_groups"]:
            group["lr"] = float(group["lr"])
            del group["capturable"]  # which is no state
        return {**packed, "state": state}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state in torch's form, or one of earlier versions of Deft, into the flat tensors."""
        state, parameters = from_flat_state(state_dict, self), parameters_of(self)
        check_state(state, parameters)
        for index, parameter in enumerate(parameters):
            saved = state["state"].get(index)  # None: it never had a gradient in another optimizer
            for name, value in self.state[parameter].items():
                value.zero_() if saved is None else value.copy_(saved[name])
        for group, values in zip(self.param_groups, state["param_groups"], strict=True):
            rate = group["lr"]
            group.update({name: value for name, value in values.items() if name not in ("params", "capturable")})
            if group["capturable"]:
                group["lr"] = rate.fill_(float(values["lr"]))


class _Flat:
    """Parameters of one type, their gradients, and the averages of Adam, each as one tensor.

    Each part starts at a multiple of `ALIGNMENT`, and zeros fill the gaps. On some processors the last bit of a matrix
    product depends on the alignment of its operands: a copy of the policy, whose parameters are tensors of their own
    and aligned, then acts exactly as the policy does.
    """

    def __init__(self, parameters: list[nn.Parameter], capturable: bool) -> None:
        self.parameters = parameters
        unit = ALIGNMENT // parameters[0].element_size()
        self._gaps = [parameter.new_zeros(-parameter.numel() % unit) for parameter in parameters]
        self.value = torch.cat(self.parts(parameters))
        self.gradient = torch.zeros_like(self.value)
        self.averages = torch.zeros_like(self.value), torch.zeros_like(self.value)
        self.count = torch.zeros((), device=self.value.device if capturable else "cpu")
        for parameter, value, gradient in zip(
            parameters, self.views(self.value), self.views(self.gradient), strict=True
        ):
            parameter.data, parameter.grad = value, gradient

    def parts(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """Return what to concatenate so that it has one tensor for each parameter, zero for None, and the gaps."""
        parts = []
        for tensor, parameter, gap in zip(tensors, self.parameters, self._gaps, strict=True):
            parts.append(parameter.new_zeros(parameter.numel()) if tensor is None else tensor.detach().reshape(-1))
            if len(gap):
                parts.append(gap)
        return parts

    def restore_gradients(self) -> None:
        """Copy gradients that replaced the views into the flat tensor (None: zero), and make them views again."""
        for parameter, view in zip(self.parameters, self.views(self.gradient), strict=True):
            gradient = parameter.grad
            if gradient is None or gradient.data_ptr() != view.data_ptr():
                view.zero_() if gradient is None else view.copy_(gradient)
                parameter.grad = view

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the part of each parameter, in its shape."""
        sizes = [parameter.numel() for parameter in self.parameters]
        parts = flat.split([size + len(gap) for size, gap in zip(sizes, self._gaps, strict=True)])
        return [
            part[:size].view(parameter.shape)
            for part, size, parameter in zip(parts, sizes, self.parameters, strict=True)
        ]


def _step(flat: _Flat, group: dict[str, Any]) -> None:
    """θ − α/c₁ · m / (√v/√c₂ + ε)  =  θ − α√c₂/c₁ · m / (√v + ε√c₂),  with c = 1 − β^t."""
    (average, square), (beta_1, beta_2), count = flat.averages, group["betas"], int(flat.count)
    root_2 = math.sqrt(1 - beta_2**count)
    if group["weight_decay"]:
        flat.value.mul_(1 - group["lr"] * group["weight_decay"])
    average.lerp_(flat.gradient, 1 - beta_1)
    square.lerp_(flat.gradient.square(), 1 - beta_2)
    denominator = square.sqrt().add_(group["eps"] * root_2)
    flat.value.addcdiv_(average, denominator, value=-group["lr"] * root_2 / (1 - beta_1**count))


def _fused_step(flat: _Flat, group: dict[str, Any]) -> None:
    """Take the same step in one pass over memory."""
    average, square = flat.averages
    torch._fused_adamw_(
        [flat.value],
        [flat.gradient],
        [average],
        [square],
        [],
        [flat.count],
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )


def _trainable(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if not trainable:
        raise InputError("nothing to train: every parameter is frozen")
    return trainable


# -- the state in checkpoints: in torch's form, with full tensors, whether parameters are sharded (FSDP) or not ------


def are_sharded(tensors: Iterable[Tensor]) -> bool:
    """Return whether any of the tensors is sharded."""
    return any(isinstance(tensor, DTensor) for tensor in tensors)


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a tensor that may be sharded; all processes call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(value: Tensor, parameter: Tensor) -> Tensor:
    """Shard a full tensor, which every process has, as a parameter of its shape is sharded; not a step count."""
    if not isinstance(parameter, DTensor) or not value.ndim:
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
        index: {name: shard_like(value, parameters[index]) for name, value in values.items()}
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
    listed = [[state[name]] if isinstance(state[name], Tensor) else state[name] for name in ("first", "second")]
    flat = [torch.cat([part.flatten() for part in parts]) for parts in listed]
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
