"""Transitions that a person decided, added to the data that every batch is mixed with (HIL-SERL, RLPD)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from deft import schema
from deft.data.tensors import Key, Row, to_numpy
from deft.data.transition_ring import TransitionRing


class Interventions:
    """Writes every step into the replay buffer, and segments that a person decided into the prior data too.

    A segment is added when it ends: when the person releases the controls, or the episode ends. `marks` are those of
    the transitions that are there already; marked ones are sampled `weight` times as often as others.
    """

    def __init__(self, buffer: TransitionRing, prior: TransitionRing, weight: float, marks: np.ndarray) -> None:
        self._buffer, self.prior, self._weight, self._marks = buffer, prior, weight, marks
        self._open: dict[int, list[dict[Key, Any]]] = {}
        self.count = 0
        """Transitions that a person decided."""

    def write(self, row: Row) -> None:
        """Store one step of all environments."""
        marks = row.get(schema.INTERVENTION)
        self._buffer.write(row)
        if marks is None and not self._open:
            return
        ended = _array(row[schema.NEXT_TERMINATED]) | _array(row[schema.NEXT_TRUNCATED])
        now = set() if marks is None else set(np.flatnonzero(_array(marks)).tolist())
        for env in sorted(now | set(self._open)):
            if env in now:
                self._open.setdefault(env, []).append(_copied(row, env))
            if env not in now or ended[env]:
                self._close(env)

    def _close(self, env: int) -> None:
        """Add a whole segment."""
        before = len(self.prior)
        for step in self._open.pop(env, []):
            self.prior.write(step, [env])
        self.prior.cut([env])
        added = len(self.prior) - before
        self.count += added
        self._marks = np.concatenate([self._marks, np.ones(added, bool)])[-len(self.prior) :]
        self._weigh()

    def _weigh(self) -> None:
        if self._weight != 1.0 and self._marks.any():
            self.prior.weight_interventions(self._marks, self._weight)
            self.prior.num_moves += 1  # a CUDA graph that samples by the former weights must be captured again

    def state_dict(self) -> dict[str, Any] | None:
        """Return the prior data with the interventions; None if there are none. Open segments are lost."""
        if not self.count:
            return None
        return {"ring": self.prior.state_dict(), "marks": torch.from_numpy(self._marks), "count": self.count}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Load what `state_dict` returned."""
        if state is not None:
            self.prior.load_state_dict(state["ring"])
            self._marks, self.count = state["marks"].numpy(), state["count"]
            self._weigh()


def _copied(row: Row, env: int) -> dict[Key, Any]:
    """One environment's row of a step, [1, …]; environments write their next one to the same memory."""
    return {
        key: value[env : env + 1].clone() if isinstance(value, Tensor) else np.array(value[env : env + 1])
        for key, value in row.items()
    }


def _array(values: Any) -> np.ndarray:
    return to_numpy(values) if isinstance(values, Tensor) else np.asarray(values)
