"""Preallocated time-major storage, [capacity, N, …] a key: the memory behind the rollout buffer and the VLA ring."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from deft import schema
from deft.errors import InputError
from deft.machine import physical_memory

Key: TypeAlias = str | tuple[str, ...]
Row: TypeAlias = Mapping[Key, Tensor | np.ndarray]


class Columns:
    """One tensor a key in main memory, allocated once, when the first row shows the keys, shapes and types.

    Rows are written through numpy views: for the small rows of a collection loop that is several times quicker than
    an indexed tensor copy.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.tensors: dict[Key, Tensor] = {}
        self._writers: list[tuple[Key, tuple[int, ...], np.ndarray | None, Tensor]] = []

    def write(self, position: int, row: Row) -> None:
        """Copy one row, {key: [N, …]}, into place; its keys and shapes must be those of the first."""
        if not self._writers:
            self._allocate(row)
        if len(row) != len(self._writers):
            self._refuse_keys(row)
        for key, shape, array, tensor in self._writers:
            value = row.get(key)
            if value is None:
                self._refuse_keys(row)
            elif value.shape != shape:
                raise InputError(f"{key}: shape {tuple(value.shape)} does not fit the buffer's {shape}")
            elif array is None:
                tensor[position] = torch.as_tensor(value)
            else:
                array[position] = value if isinstance(value, np.ndarray) else to_numpy(value)

    def read(self, start: int, stop: int) -> TensorDict:
        """Rows start … stop − 1 as a TensorDict [stop − start, N] of views."""
        num_envs = next(iter(self.tensors.values())).shape[1]
        td = TensorDict({}, batch_size=[stop - start, num_envs])
        for key, tensor in self.tensors.items():
            td.set(key, tensor[start:stop])
        return td

    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @torch.inference_mode(False)  # a collector writes in inference mode; what it wrote must still be fit to train on
    def _allocate(self, row: Row) -> None:
        self._check_memory(row)
        for key, value in row.items():
            example = torch.as_tensor(value)
            tensor = torch.zeros((self.capacity, *example.shape), dtype=example.dtype)
            try:
                array: np.ndarray | None = tensor.numpy()
            except TypeError:  # a type that numpy lacks, such as bfloat16
                array = None
            self.tensors[key] = tensor
            self._writers.append((key, tuple(example.shape), array, tensor))

    def _check_memory(self, row: Row) -> None:
        """Refuse what the machine cannot hold: the system would grant it now, and kill the process when it is used."""
        needed = self.capacity * sum(value.nbytes for value in row.values())
        present = physical_memory()
        if needed > present:
            raise InputError(
                f"buffer_size: {self.capacity} steps of all environments take {needed / 2**30:,.1f} GiB, this machine "
                f"has {present / 2**30:,.1f}: use a smaller buffer_size (rollout_steps), or fewer environments"
            )

    def _refuse_keys(self, row: Row) -> None:
        expected = set(self.tensors)
        missing, extra = expected - set(row), set(row) - expected
        raise InputError(
            f"a transition's keys changed: missing {sorted(map(str, missing))}, new {sorted(map(str, extra))}"
        )


def to_numpy(tensor: Tensor) -> np.ndarray:
    """A tensor's values in main memory; without a copy where they are there already."""
    if tensor.is_cpu and not tensor.requires_grad:
        return tensor.numpy()  # several times quicker than with force=True
    if tensor.is_cuda:
        return _fetch(tensor.detach()).numpy()
    return tensor.numpy(force=True)


def _fetch(tensor: Tensor) -> Tensor:
    """From a GPU, asleep until it is there: torch's own way spins, and takes the core from who else needs it."""
    values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    values.copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event(blocking=True)
    arrived.record(torch.cuda.current_stream(tensor.device))
    arrived.synchronize()
    return values


def to_device(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Values on a device: on the CPU they themselves, on a GPU a copy that waits for nothing it still computes.

    The copy starts from memory that the device reads by itself; torch keeps that until it has.
    """
    tensor = torch.as_tensor(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def rows_of(data: TensorDictBase) -> Iterator[dict[Key, Tensor]]:
    """The rows of a rollout [T, N], of one step [N], or of one step of one environment []."""
    schema.check_scalars(data)
    if data.batch_dims > 2:
        raise InputError(f"a buffer takes [T, N] or [N] transitions, not {tuple(data.batch_size)}")
    steps = data if data.batch_dims == 2 else data.unsqueeze(0) if data.batch_dims == 1 else data.reshape(1, 1)
    flat = dict(steps.items(include_nested=True, leaves_only=True))
    for t in range(steps.batch_size[0]):
        yield {key: value[t] for key, value in flat.items()}
