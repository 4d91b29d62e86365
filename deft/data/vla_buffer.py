"""The buffer of VLA mode: a preallocated ring that a background collector writes while the main thread trains.

One row an environment: advantages are computed along a row, never across environments.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from deft.data.columns import Columns, Row, rows_of
from deft.errors import InputError


class VLABuffer:
    """`buffer_size` steps of each environment in a ring; the newest overwrites the oldest.

    Capacity 4: [T0,T1,T2,T3] → [T4,T1,T2,T3] → [T4,T5,T2,T3]. Each transition is handed to training once, oldest
    first; what was overwritten before that is counted, and the trainer's collector waits rather than let it happen.
    """

    def __init__(self, buffer_size: int = 2048) -> None:
        self.columns = Columns(buffer_size)
        self._written = self._read = self._overwritten = 0  # counts since the start, in steps of each environment
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Steps not yet handed out (of each environment)."""
        return self._written - self._read

    @property
    def capacity(self) -> int:
        """Steps that fit."""
        return self.columns.capacity

    def write(self, row: Row) -> None:
        """Take one step of all environments, {key: [N, …]}: the collector's way in."""
        with self._lock:
            self.columns.write(self._written % self.capacity, row)
            self._written += 1
            if self._written - self._read > self.capacity:
                self._read += 1
                self._overwritten += 1

    def add(self, data: TensorDictBase) -> None:
        """Take one transition [N] (or [] of a single environment), or several [T, N]."""
        for row in rows_of(data):
            self.write(row)

    def is_full(self) -> bool:
        """Whether a whole ring of new transitions is there."""
        return len(self) == self.capacity

    def get(self, flatten: bool = False, num_steps: int | None = None) -> TensorDict:
        """Hand out the oldest `num_steps` new steps (all by default), oldest first, as a copy [T, N] or [T·N]."""
        with self._lock:
            count = len(self) if num_steps is None else num_steps
            if not 0 < count <= len(self):
                raise InputError(
                    f"{count} steps were asked of a VLA buffer with {len(self)} new ones: each is handed out once"
                )
            steps = self._copy(count)
            self._read += count
        return steps.flatten(0, 1) if flatten else steps

    def clear(self) -> None:
        """Forget what was not handed out; the memory stays."""
        with self._lock:
            self._read = self._written

    def batches(self, num_steps: int | None = None) -> Iterator[TensorDict]:
        """What `Algorithm.update` draws from: the new steps, once."""
        yield self.get(num_steps=num_steps)

    def statistics(self) -> dict[str, int]:
        """Counts in steps of each environment, and the bytes of the ring."""
        return {
            "capacity": self.capacity,
            "new": len(self),
            "written": self._written,
            "handed_out": self._read - self._overwritten,
            "overwritten": self._overwritten,
            "bytes": self.columns.nbytes(),
        }

    def state_dict(self) -> dict[str, Any]:
        """What was collected and not yet handed out."""
        with self._lock:
            return {"rollout": self._copy(len(self)).to_dict()} if len(self) else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.clear()
        if state:
            rollout = state["rollout"]
            self.add(TensorDict(rollout, batch_size=rollout["next"]["reward"].shape[:2]))

    def _copy(self, count: int) -> TensorDict:
        start = self._read % self.capacity
        stop = start + count
        if stop <= self.capacity:
            return self.columns.read(start, stop).clone()
        return torch.cat([self.columns.read(start, self.capacity), self.columns.read(0, stop - self.capacity)])
