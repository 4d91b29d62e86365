"""Conversion between the arrays of environments and the tensors of policies."""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from deft import schema
from deft.errors import NOT_FINITE, RunError

Key: TypeAlias = str | tuple[str, ...]
Row: TypeAlias = Mapping[Key, Tensor | np.ndarray]
Batch: TypeAlias = dict[Key, Any]
Arrays = np.ndarray | dict[str, np.ndarray]
Memory = TypeVar("Memory", Tensor, TensorDictBase)

log = logging.getLogger(__name__)


def to_numpy(tensor: Tensor) -> np.ndarray:
    """Return a tensor's values as an array, without a copy if they are in main memory."""
    if tensor.is_cpu and not tensor.requires_grad:
        return tensor.numpy()  # several times faster than with force=True
    if tensor.is_cuda:
        return _copy_from_gpu(tensor.detach()).numpy()
    return tensor.numpy(force=True)


def _copy_from_gpu(tensor: Tensor) -> Tensor:
    """Copy to main memory; the thread sleeps while it waits, whereas `Tensor.cpu` keeps a core busy."""
    values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    values.copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event(blocking=True)
    copied.record(torch.cuda.current_stream(tensor.device))
    copied.synchronize()
    return values


def to_device(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Return the values on a device: without a copy where they are there, with an asynchronous copy to a GPU."""
    tensor = torch.as_tensor(values)
    if device.type == "cpu" or not tensor.is_cpu:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all values are finite; one number is copied to the host."""
    # A sum of float32 in float64 does not overflow: it is finite only if all its terms are.
    sums = [tensor.sum(dtype=torch.float64) for tensor in tensors if tensor.is_floating_point()]
    return not sums or bool(torch.stack(sums).isfinite().all())


def policy_inputs(
    observation: Arrays,
    device: torch.device,
    memory: Memory | None = None,
    mask: Tensor | None = None,
    previous_reward: np.ndarray | None = None,
) -> TensorDict:
    """Return the input of `Policy.act` and `get_value`; the observation may consist of tensors.

    `mask` marks the action dimensions that are not padding. `previous_reward` is for policies with `needs_reward`.
    """
    tensors: Tensor | dict[str, Tensor]
    if isinstance(observation, dict):
        tensors = {name: to_device(stream, device) for name, stream in observation.items()}
        num_rows = len(next(iter(observation.values())))
    else:
        tensors = to_device(observation, device)
        num_rows = len(observation)
    td = TensorDict({schema.OBSERVATION: tensors}, batch_size=[num_rows])
    if memory is not None:
        td.set(schema.MEMORY, memory)
    if mask is not None:
        td.set(schema.ACTION_MASK, mask)
    if previous_reward is not None:
        td.set(schema.PREVIOUS_REWARD, to_device(previous_reward, device))
    return td


def check_log_prob(log_prob: Tensor | np.ndarray | None) -> None:
    """Raise RunError if the log-prob of a sampled action is NaN; None is allowed.

    Sampling from NaN logits still returns valid discrete actions and tokens, so only the log-prob shows the NaN.
    """
    if log_prob is None or not math.isnan(float(log_prob.sum())):
        return
    bad = np.isnan(log_prob.numpy(force=True) if isinstance(log_prob, Tensor) else log_prob)
    if bad.any():  # otherwise the sum is NaN because of infinities of both signs
        row = int(np.argwhere(bad)[0][0])
        raise RunError(f"the policy's output for environment {row} is not a number, {NOT_FINITE}")


def zero_rows(memory: Memory, index: np.ndarray | Tensor) -> Memory:
    """Return the recurrent memory with the given rows set to zero, for the first step of an episode."""
    if len(index):
        memory = memory.clone()
        parts = [memory] if isinstance(memory, Tensor) else memory.values(include_nested=True, leaves_only=True)
        for part in parts:
            part[torch.as_tensor(index, device=part.device)] = 0
    return memory


def restore_generator(generator: torch.Generator, state: Tensor) -> None:
    """Restore the state of a generator; that of another type of device, which has another size, becomes its seed."""
    if state.numel() == generator.get_state().numel():
        generator.set_state(state)
        return
    log.warning(
        "the checkpoint was saved on another type of device than %s: the resumed run draws other batches than an "
        "uninterrupted one; use the --device of the first run to draw the same",
        generator.device.type,
    )
    generator.manual_seed(zlib.crc32(state.numpy().tobytes()))
