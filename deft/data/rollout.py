"""The buffer of standard mode: one rollout [T, N], handed to training once, then cleared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tensordict import TensorDict, TensorDictBase

from deft.data.columns import Columns, Row, rows_of
from deft.errors import InputError


class RolloutBuffer:
    """`buffer_size` steps of each environment. Add, train once, clear."""

    def __init__(self, buffer_size: int = 2048) -> None:
        self.columns = Columns(buffer_size)
        self._size = 0

    def __len__(self) -> int:
        """Steps held (of each environment)."""
        return self._size

    @property
    def capacity(self) -> int:
        """Steps that fit."""
        return self.columns.capacity

    def write(self, row: Row) -> None:
        """Take one step of all environments, {key: [N, …]}: the collector's way in."""
        if self._size == self.columns.capacity:
            raise InputError(f"the rollout buffer is full ({self._size} steps); get() hands it out and clears it")
        self.columns.write(self._size, row)
        self._size += 1

    def add(self, data: TensorDictBase) -> None:
        """Take a rollout [T, N], or one step [N]."""
        for row in rows_of(data):
            self.write(row)

    def is_full(self) -> bool:
        """Whether a whole rollout is there."""
        return self._size == self.columns.capacity

    def get(self, flatten: bool = False) -> TensorDict:
        """Hand out what is there, [T, N] (or [T·N] when flattened), and clear.

        The tensors are the buffer's own: they hold until the next write.
        """
        if not self._size:
            raise InputError("the rollout buffer is empty: each transition is handed out once")
        rollout = self.columns.read(0, self._size)
        self.clear()
        return rollout.flatten(0, 1) if flatten else rollout

    def clear(self) -> None:
        """Forget what is there; the memory stays."""
        self._size = 0

    def batches(self, num_steps: int | None = None) -> Iterator[TensorDict]:
        """What `Algorithm.update` draws from: the rollout, once. `num_steps` must be what is there."""
        if num_steps is not None and num_steps != self._size:
            raise InputError(f"a rollout of {num_steps} steps was asked for; {self._size} are there")
        yield self.get()

    def state_dict(self) -> dict[str, Any]:
        """What was collected and not yet handed out."""
        return {"rollout": self.columns.read(0, self._size).clone().to_dict()} if self._size else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.clear()
        if state:
            rollout = state["rollout"]
            self.add(TensorDict(rollout, batch_size=rollout["next"]["reward"].shape[:2]))
