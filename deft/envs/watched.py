"""The student's environment with counts of visited hand poses and touched objects, for evaluation.

`deft.evaluation.explorer` measures exploration with it; a policy does not see the counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from deft import schema
from deft.envs.f1 import StudentEnv
from deft.envs.tabletop.env import TabletopEnv

ROBOT_BIT, OBJECT_BIT = 2, 4  # the collision bits of `deft.envs.tabletop.model`
CELL = 0.05  # metres
TURNS = 2.0  # cells per unit along each axis of the direction of the hand
STATE_CELLS = 10.0  # for simulators without a pose: cells per unit along each dim of the state


class WatchedEnv(StudentEnv):
    """`StudentEnv` with the head camera (for the world model, not for the student) and counts."""

    def __init__(self, task_config: Mapping[str, Any] | None = None, **arguments: Any) -> None:
        """The arguments of `StudentEnv`."""
        super().__init__({**(task_config or {}), "need_head_camera": True}, **arguments)
        self._cells: list[tuple[int, ...]] = []
        self._contacts = 0

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Execute an action, and count the new hand pose and contacts."""
        result = super().step(action)
        simulator = self.simulator.unwrapped
        if isinstance(simulator, TabletopEnv):
            simulation = simulator.simulation
            position, direction = simulation.tcp / CELL, simulation.tcp_rotation[:, 2] * TURNS
            self._cells.append((*map(int, np.floor(position)), *map(int, np.rint(direction))))
            bits = simulation.model.geom_contype[simulation.data.contact.geom]
            self._contacts += bool(((bits == ROBOT_BIT).any(1) & (bits == OBJECT_BIT).any(1)).any())
        else:
            self._cells.append(tuple(map(int, np.floor(result[0][schema.STATE] * STATE_CELLS))))
        return result

    def tally(self) -> tuple[list[tuple[int, ...]], int]:
        """Return the cell of the hand's pose after each step, and the number of steps with a touched object."""
        return self._cells, self._contacts
