"""Between the environments' arrays and the policies' TensorDicts."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from deft import schema
from deft.data.columns import to_device

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


def zero_rows(memory: Memory, index: np.ndarray) -> Memory:
    """Memory with the given rows at zero: an episode's first step."""
    if len(index):
        memory = memory.clone()
        parts = [memory] if isinstance(memory, Tensor) else memory.values(include_nested=True, leaves_only=True)
        for part in parts:
            part[torch.as_tensor(index, device=part.device)] = 0
    return memory
