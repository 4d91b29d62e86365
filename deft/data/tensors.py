"""Between the environments' arrays and the policies' TensorDicts."""

from __future__ import annotations

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from deft import schema

Arrays = np.ndarray | dict[str, np.ndarray]


def policy_inputs(
    observation: Arrays, device: torch.device, memory: Tensor | None = None, mask: Tensor | None = None
) -> TensorDict:
    """What `Policy.act` and `get_value` read: the observation, the memory before it, the mask of padded action dims."""
    tensors: Tensor | dict[str, Tensor]
    if isinstance(observation, dict):
        tensors = {name: torch.from_numpy(stream).to(device) for name, stream in observation.items()}
        num_rows = len(next(iter(observation.values())))
    else:
        tensors = torch.from_numpy(observation).to(device)
        num_rows = len(observation)
    td = TensorDict({schema.OBSERVATION: tensors}, batch_size=[num_rows])
    if memory is not None:
        td.set(schema.MEMORY, memory)
    if mask is not None:
        td.set(schema.ACTION_MASK, mask)
    return td


def zero_rows(memory: Tensor, index: np.ndarray) -> Tensor:
    """Memory with the given rows at zero: an episode's first step."""
    if len(index):
        memory = memory.clone()
        memory[torch.as_tensor(index, device=memory.device)] = 0.0
    return memory
