"""The processes that train one model together, as `accelerate launch` or `torchrun` start them.

All have the same weights, and each has its own episodes. Gradients are averaged after every backward pass, whichever
method of the model was called, so that the weights stay equal.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from deft.machine import available_cores
from deft.models.normalization import RunningNormalizer, normalizers

# How long processes wait for each other, as for the first one's evaluation; a launcher ends them where one dies.
PATIENCE = timedelta(hours=12)


class Processes:
    """This process and the others of its run; there are none unless a launcher started several."""

    def __init__(self) -> None:
        self.count = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0")) if self.count > 1 else 0
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0")) if self.count > 1 else 0
        self._opened = False
        self._device = torch.device("cpu")
        self._merged: dict[str, Tensor] = {}  # by normaliser, the sums after the last merge

    @property
    def is_first(self) -> bool:
        """Whether this process writes the files."""
        return self.rank == 0

    def device(self, device: torch.device) -> torch.device:
        """Return the device of this process: on a machine with several GPUs each process has its own."""
        if self.count > 1 and device.type == "cuda" and device.index is None:
            return torch.device("cuda", self.local_rank)
        return device

    @property
    def cores(self) -> int:
        """The cores that each process of this machine may use."""
        return max(1, available_cores() // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))

    def open(self, device: torch.device) -> None:
        """Initialise the process group."""
        self._device = device
        if self.count > 1 and not distributed.is_initialized():
            distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
            self._opened = True

    def close(self) -> None:
        """Destroy the process group."""
        if self._opened and distributed.is_initialized():
            distributed.destroy_process_group()
            self._opened = False

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor, in place, by its mean over the processes."""
        if self.count > 1:
            for tensor in tensors:
                distributed.all_reduce(tensor)
                tensor /= self.count

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the processes, in place."""
        if self.count > 1:
            distributed.all_reduce(tensor)
        return tensor

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

    def maximum(self, value: float, device: torch.device) -> float:
        """Return the maximum of the processes' values."""
        if self.count == 1:
            return value
        tensor = torch.tensor(float(value), dtype=torch.float64, device=device)
        distributed.all_reduce(tensor, distributed.ReduceOp.MAX)
        return float(tensor)

    def total(self, value: float, device: torch.device) -> float:
        """Return the sum of the processes' values."""
        return float(self.sum(torch.tensor(float(value), dtype=torch.float64, device=device)))

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, by rank."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        distributed.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait until all processes are here."""
        if self.count > 1:
            distributed.barrier()

    @torch.no_grad()
    def broadcast_module(self, module: nn.Module) -> None:
        """Broadcast the first process's weights and statistics; sharded parameters are left as they are."""
        if self.count > 1:
            for tensor in module.state_dict().values():
                if not isinstance(tensor, DTensor):
                    distributed.broadcast(tensor, 0)
            self.remember_statistics(module)

    def remember_statistics(self, module: nn.Module) -> None:
        """Note that all processes have these statistics: `merge_statistics` adds what each observes from here on."""
        if self.count > 1:
            self._merged |= {name: _sums(part) for name, part in normalizers(module)}

    @torch.no_grad()
    def merge_statistics(self, module: nn.Module) -> None:
        """Merge running statistics over what all processes observed.

        The sums of a normaliser (n, Σx, Σx²) are those of the last merge, plus what each process has added since.
        Frozen statistics are equal in all processes, and do not change.
        """
        if self.count == 1:
            return
        for name, part in normalizers(module):
            if part.frozen:
                continue
            sums = _sums(part)
            before = self._merged.get(name, torch.zeros_like(sums))
            sums = before + self.sum((sums - before).to(self._device)).to(before)
            self._merged[name] = sums
            if sums[0] > 0:
                mean, squares = (sums[1:] / sums[0]).view(2, *part.mean.shape)
                part.set_statistics(mean, (squares - mean.square()).clamp(min=0), sums[0])

    def broadcast(self, value: Any) -> Any:
        """Return the first process's value."""
        if self.count == 1:
            return value
        box = [value]
        distributed.broadcast_object_list(box, 0)
        return box[0]


class SilentLogger(contextlib.AbstractContextManager):
    """The logger of the processes that write nothing."""

    mean_reward: float | None = None

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""

    def log_metrics(self, step: int, metrics: Any) -> None:
        """Nothing."""

    def log_episode(self, step: int, episode: Any) -> None:
        """Nothing."""

    def log_evaluation(self, step: int, results: Any) -> None:
        """Nothing."""

    def progress(self, step: int, **shown: float) -> None:
        """Nothing."""

    def expect(self, total_timesteps: int) -> None:
        """Nothing."""

    def flush(self) -> None:
        """Nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing was logged."""
        return {"window": []}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""


def _sums(part: RunningNormalizer) -> Tensor:
    """Return n, Σx and Σx² of all observations."""
    mean, count = part.mean.flatten(), part.count
    return torch.cat([count.view(1), count * mean, count * (part.variance.flatten() + mean.square())])
