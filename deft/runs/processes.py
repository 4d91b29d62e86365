"""Several processes that train one model, as `accelerate launch` or `torchrun` start them: equal weights in all.

Each process has its own episodes. Gradients are averaged after every backward pass, whatever was called to make them,
so that no way of calling the model can leave them apart.
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
    """This process among those of the run; alone where nothing launched it with others."""

    def __init__(self) -> None:
        self.count = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0")) if self.count > 1 else 0
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0")) if self.count > 1 else 0
        self._opened = False
        self._device = torch.device("cpu")
        self._seen: dict[str, Tensor] = {}  # by normaliser, the sums that all processes had after the last merge

    @property
    def is_first(self) -> bool:
        """Whether this process writes the files."""
        return self.rank == 0

    def device(self, device: torch.device) -> torch.device:
        """The device of this process: on a machine with several GPUs each has its own."""
        if self.count > 1 and device.type == "cuda" and device.index is None:
            return torch.device("cuda", self.local_rank)
        return device

    @property
    def cores(self) -> int:
        """The cores that each process of this machine may use."""
        return max(1, available_cores() // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))

    def open(self, device: torch.device) -> None:
        """Meet the others."""
        self._device = device
        if self.count > 1 and not distributed.is_initialized():
            distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
            self._opened = True

    def close(self) -> None:
        """Part from them."""
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
        """The sum of the processes' tensors, in place."""
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

    def largest(self, value: float, device: torch.device) -> float:
        """The largest of the processes' values."""
        if self.count == 1:
            return value
        tensor = torch.tensor(float(value), dtype=torch.float64, device=device)
        distributed.all_reduce(tensor, distributed.ReduceOp.MAX)
        return float(tensor)

    def total(self, value: float, device: torch.device) -> float:
        """The sum of the processes' values."""
        return float(self.sum(torch.tensor(float(value), dtype=torch.float64, device=device)))

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, by rank, in all."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        distributed.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        """Until all are here."""
        if self.count > 1:
            distributed.barrier()

    @torch.no_grad()
    def equalize(self, module: nn.Module) -> None:
        """Give every process the first one's weights and statistics; weights that are shared out are its already."""
        if self.count > 1:
            for tensor in module.state_dict().values():
                if not isinstance(tensor, DTensor):
                    distributed.broadcast(tensor, 0)
            self.remember_statistics(module)

    def remember_statistics(self, module: nn.Module) -> None:
        """That all processes have these statistics now: what each observes from here on is added to them."""
        if self.count > 1:
            self._seen = {name: _sums(part) for name, part in normalizers(module)}

    @torch.no_grad()
    def merge_statistics(self, module: nn.Module) -> None:
        """Give every process the running statistics over what all of them observed.

        A normaliser's sums (n, Σx, Σx²) are those that all had after the last merge, plus what each has added since.
        Frozen statistics are equal in all processes, and stay bit for bit.
        """
        if self.count == 1:
            return
        for name, part in normalizers(module):
            if part.frozen:
                continue
            sums = _sums(part)
            before = self._seen.get(name, torch.zeros_like(sums))
            sums = before + self.sum((sums - before).to(self._device)).to(before)
            self._seen[name] = sums
            if sums[0] > 0:
                mean, squares = (sums[1:] / sums[0]).view(2, *part.mean.shape)
                part.set_statistics(mean, (squares - mean.square()).clamp(min=0), sums[0])

    def share(self, value: Any) -> Any:
        """The first process's value, in all."""
        if self.count == 1:
            return value
        box = [value]
        distributed.broadcast_object_list(box, 0)
        return box[0]


class SilentLogger(contextlib.AbstractContextManager):
    """A run's logger in the processes that write nothing."""

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
        """Nothing was seen."""
        return {"window": []}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""


def _sums(part: RunningNormalizer) -> Tensor:
    """n, Σx and Σx² of all that was observed."""
    mean, count = part.mean.flatten(), part.count
    return torch.cat([count.view(1), count * mean, count * (part.variance.flatten() + mean.square())])
