"""Several processes that train one model, as `accelerate launch` or `torchrun` start them: equal weights in all.

Each process has its own episodes. Gradients are averaged after every backward pass, whatever was called to make them,
so that no way of calling the model can leave them apart.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import distributed, nn


class Processes:
    """This process among those of the run; alone where nothing launched it with others."""

    def __init__(self) -> None:
        self.count = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0")) if self.count > 1 else 0
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0")) if self.count > 1 else 0
        self._opened = False

    @property
    def is_first(self) -> bool:
        """Whether this process writes the files."""
        return self.rank == 0

    def device(self, device: torch.device) -> torch.device:
        """The device of this process: on a machine with several GPUs each has its own."""
        if self.count > 1 and device.type == "cuda" and device.index is None:
            return torch.device("cuda", self.local_rank)
        return device

    def open(self, device: torch.device) -> None:
        """Meet the others."""
        if self.count > 1 and not distributed.is_initialized():
            distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
            self._opened = True

    def close(self) -> None:
        """Part from them."""
        if self._opened and distributed.is_initialized():
            distributed.destroy_process_group()
            self._opened = False

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace each gradient by its mean over the processes, all in one transfer."""
        if self.count == 1:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        distributed.all_reduce(flat)
        flat /= self.count
        start = 0
        for gradient in gradients:
            gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
            start += gradient.numel()

    def largest(self, value: float, device: torch.device) -> float:
        """The largest of the processes' values."""
        if self.count == 1:
            return value
        tensor = torch.tensor(float(value), dtype=torch.float64, device=device)
        distributed.all_reduce(tensor, distributed.ReduceOp.MAX)
        return float(tensor)

    def share(self, value: Any) -> Any:
        """The first process's value, in all."""
        if self.count == 1:
            return value
        box = [value]
        distributed.broadcast_object_list(box, 0)
        return box[0]
