"""Buffers of on-policy training: one rollout (`RolloutBuffer`), and a ring for background collection (`VLABuffer`).

Both store time-major rows, [capacity, N, …] for each key, with one column for each of the N environments. Advantages
are computed along a column, never across environments.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from deft import schema
from deft.data.tensors import Key, Row, to_numpy
from deft.errors import InputError
from deft.machine import physical_memory


class Columns:
    """One preallocated tensor for each key; the first row determines the keys, shapes and types.

    Without a `device` the tensors are in main memory, and rows are written through NumPy views: for the small rows of a
    collection loop this is several times faster than an indexed tensor copy.
    """

    def __init__(self, capacity: int, device: torch.device | None = None) -> None:
        self.capacity = capacity
        self.device = device
        self.tensors: dict[Key, Tensor] = {}
        self._writers: list[tuple[Key, tuple[int, ...], np.ndarray | None, Tensor]] = []

    def write(self, position: int, row: Row) -> None:
        """Copy one row, {key: [N, …]}, to a position; its keys and shapes must be those of the first row."""
        if not self._writers:
            self._allocate(row)
        if len(row) != len(self._writers):
            raise self._changed_keys(row)
        for key, shape, array, tensor in self._writers:
            value = row.get(key)
            if value is None:
                raise self._changed_keys(row)
            if value.shape != shape:
                raise InputError(f"{key}: shape {tuple(value.shape)} does not match the buffer's shape {shape}")
            if array is None:
                tensor[position].copy_(torch.as_tensor(value))
            else:
                array[position] = value if isinstance(value, np.ndarray) else to_numpy(value)

    def read(self, start: int, stop: int) -> TensorDict:
        """Return rows start … stop − 1 as a TensorDict [stop − start, N] of views."""
        num_envs = next(iter(self.tensors.values())).shape[1]
        td = TensorDict({}, batch_size=[stop - start, num_envs])
        for key, tensor in self.tensors.items():
            td.set(key, tensor[start:stop])
        return td

    def nbytes(self) -> int:
        """Return the size of the tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @torch.inference_mode(False)  # collectors write in inference mode; training needs ordinary tensors
    def _allocate(self, row: Row) -> None:
        unit = "steps of all environments"
        advice = "use smaller rollout_steps, or fewer environments"
        size = sum(value.nbytes for value in row.values())
        check_memory("rollout_steps", self.capacity, size, unit, advice, self.device)
        for key, value in row.items():
            example = torch.as_tensor(value)
            tensor = torch.zeros((self.capacity, *example.shape), dtype=example.dtype, device=self.device)
            array: np.ndarray | None = None
            if self.device is None:
                with contextlib.suppress(TypeError):  # NumPy does not have all types, for example bfloat16
                    array = tensor.numpy()
            self.tensors[key] = tensor
            self._writers.append((key, tuple(example.shape), array, tensor))

    def _changed_keys(self, row: Row) -> InputError:
        missing, extra = self.tensors.keys() - row.keys(), row.keys() - self.tensors.keys()
        return InputError(
            f"the keys of a transition changed: missing {sorted(map(str, missing))}, new {sorted(map(str, extra))}"
        )


def check_memory(
    setting: str, count: int, size: int, unit: str, advice: str, device: torch.device | None = None
) -> None:
    """Raise InputError if `count` rows of `size` bytes exceed the main memory, or the free memory of a GPU.

    The operating system would grant the memory now and kill the process when it is used.
    """
    where, present = "this machine has", physical_memory()
    if device is not None and device.type == "cuda":
        where, present = f"free on {device} are", torch.cuda.mem_get_info(device)[0]
    if count * size > present:
        raise InputError(
            f"{setting}: {count} {unit} need {count * size / 2**30:,.1f} GiB; {where} {present / 2**30:,.1f} GiB: "
            f"{advice}"
        )


class RolloutBuffer:
    """Stores one rollout of `buffer_size` steps of each environment: fill it, train on it once, fill it again.

    It is in main memory, or on a `device`.
    """

    def __init__(self, buffer_size: int = 2048, device: torch.device | None = None) -> None:
        self.columns = Columns(buffer_size, device)
        self._written = self._read = 0  # counts of steps (of each environment)

    def __len__(self) -> int:
        """Return the number of steps (of each environment) that `get` has not returned yet."""
        return self._written - self._read

    @property
    def capacity(self) -> int:
        """The number of steps that fit."""
        return self.columns.capacity

    def write(self, row: Row) -> None:
        """Append one step of all environments, {key: [N, …]}."""
        if self._written == self.columns.capacity:
            raise InputError(f"the rollout buffer is full ({len(self)} steps); call get() first")
        self.columns.write(self._written, row)
        self._written += 1

    def add(self, data: TensorDictBase) -> None:
        """Append several steps [T, N], one step [N], or one step of a single environment []."""
        for row in _rows(data):
            self.write(row)

    def is_full(self) -> bool:
        """Return whether the buffer holds `buffer_size` steps."""
        return len(self) == self.capacity

    def get(self, flatten: bool = False) -> TensorDict:
        """Return the rollout [T, N] (flattened: [T·N]) and clear the buffer.

        The tensors are views of the buffer: they are valid until the next write.
        """
        if not self._written:
            raise InputError("the rollout buffer is empty: each transition is returned once")
        rollout = self.columns.read(0, self._written)
        self.clear()
        return rollout.flatten(0, 1) if flatten else rollout

    def clear(self) -> None:
        """Discard the steps; the memory stays allocated."""
        self._written = 0

    def batches(self, num_steps: int | None = None) -> Iterator[TensorDict]:
        """Yield the rollout once, for `Algorithm.update`; `num_steps` must be its length."""
        if num_steps is not None and num_steps != len(self):
            raise InputError(f"a rollout of {num_steps} steps was requested; the buffer holds {len(self)}")
        yield self.get()

    def state_dict(self) -> dict[str, Any]:
        """Return the steps that `get` has not returned yet."""
        return {"rollout": self._copy(len(self)).cpu().to_dict()} if len(self) else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self.clear()
        if state:
            rollout = state["rollout"]
            self.add(TensorDict(rollout, batch_size=rollout["next"]["reward"].shape[:2]))

    def _copy(self, count: int) -> TensorDict:
        """Return a copy of the oldest `count` steps, in order; a ring continues at its beginning."""
        start = self._read % self.capacity
        stop = start + count
        if stop <= self.capacity:
            return self.columns.read(start, stop).clone()
        return torch.cat([self.columns.read(start, self.capacity), self.columns.read(0, stop - self.capacity)])


class VLABuffer(RolloutBuffer):
    """A ring of `buffer_size` steps of each environment that one thread writes while another one trains.

    New steps overwrite the oldest. Capacity 4: [T0,T1,T2,T3] → [T4,T1,T2,T3] → [T4,T5,T2,T3]. `get` returns each step
    once, oldest first. Steps that were overwritten before are counted; the collector waits to avoid this.
    """

    def __init__(self, buffer_size: int = 2048) -> None:
        super().__init__(buffer_size)
        self._overwritten = 0
        self._lock = threading.Lock()

    def write(self, row: Row) -> None:
        """Append one step of all environments, {key: [N, …]}."""
        with self._lock:
            self.columns.write(self._written % self.capacity, row)
            self._written += 1
            if len(self) > self.capacity:
                self._read += 1
                self._overwritten += 1

    def get(self, flatten: bool = False, num_steps: int | None = None) -> TensorDict:
        """Return a copy of the oldest `num_steps` new steps (default: all), [T, N] or flattened [T·N]."""
        with self._lock:
            count = len(self) if num_steps is None else num_steps
            if not 0 < count <= len(self):
                raise InputError(
                    f"{count} steps were requested from a VLA buffer with {len(self)} new ones: each is returned once"
                )
            steps = self._copy(count)
            self._read += count
        return steps.flatten(0, 1) if flatten else steps

    def clear(self) -> None:
        """Discard the steps that `get` has not returned; the memory stays allocated."""
        with self._lock:
            self._read = self._written

    def batches(self, num_steps: int | None = None) -> Iterator[TensorDict]:
        """Yield the new steps once, for `Algorithm.update`."""
        yield self.get(num_steps=num_steps)

    def statistics(self) -> dict[str, int]:
        """Return counts of steps (of each environment) and the size of the ring in bytes."""
        return {
            "capacity": self.capacity,
            "new": len(self),
            "written": self._written,
            "handed_out": self._read - self._overwritten,
            "overwritten": self._overwritten,
            "bytes": self.columns.nbytes(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the steps that `get` has not returned yet."""
        with self._lock:
            return super().state_dict()


def _rows(data: TensorDictBase) -> Iterator[dict[Key, Tensor]]:
    """Yield the steps of a rollout [T, N], of one step [N], or of one step of a single environment []."""
    schema.check_scalars(data)
    if data.batch_dims > 2:
        raise InputError(f"a buffer accepts transitions [T, N] or [N], not {tuple(data.batch_size)}")
    steps = data if data.batch_dims == 2 else data.unsqueeze(0) if data.batch_dims == 1 else data.reshape(1, 1)
    flat = dict(steps.items(include_nested=True, leaves_only=True))
    for t in range(steps.batch_size[0]):
        yield {key: value[t] for key, value in flat.items()}
