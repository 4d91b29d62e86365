"""Between the environments' arrays and the policies' TensorDicts."""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from deft import schema
from deft.data.columns import to_device
from deft.errors import NOT_FINITE, RunError

Arrays = np.ndarray | dict[str, np.ndarray]
Memory = TypeVar("Memory", Tensor, TensorDictBase)


def policy_inputs(
    observation: Arrays,
    device: torch.device,
    memory: Memory | None = None,
    mask: Tensor | None = None,
    previous_reward: np.ndarray | None = None,
) -> TensorDict:
    """What `Policy.act` and `get_value` read: the observation, the memory before it, the mask of padded action dims,
    and, for a policy that `needs_reward`, what its last action earned.
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


def check_drawn(log_prob: Tensor | np.ndarray | None) -> None:
    """Raise RunError where the log-prob of a drawn action is not a number.

    NaN logits become valid choices and tokens: they show in the log-prob alone. None: of a policy that has none.
    """
    if log_prob is None or not math.isnan(float(log_prob.sum())):
        return
    bad = np.isnan(log_prob.numpy(force=True) if isinstance(log_prob, Tensor) else log_prob)
    if bad.any():  # else the sum of infinities
        row = int(np.argwhere(bad)[0][0])
        raise RunError(f"the policy's output for environment {row} is not a number, {NOT_FINITE}")


def zero_rows(memory: Memory, index: np.ndarray) -> Memory:
    """Memory with the given rows at zero: an episode's first step."""
    if len(index):
        memory = memory.clone()
        parts = [memory] if isinstance(memory, Tensor) else memory.values(include_nested=True, leaves_only=True)
        for part in parts:
            part[torch.as_tensor(index, device=part.device)] = 0
    return memory
