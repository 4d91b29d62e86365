"""The student's world with a tally of where the hand has been and what it touched, for evaluation.

`deft.training.phases.explorer_evaluation` counts with it what an explorer finds; nothing of it is shown to a policy.
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
TURNS = 2.0  # cells along each axis of the unit vector in which the hand points, a half each
STATE_CELLS = 10.0  # of worlds that tell no pose: cells along each dim of the state, a unit each


class WatchedEnv(StudentEnv):
    """`StudentEnv` that also shows the head camera (to the world model beside the student) and keeps a tally."""

    def __init__(self, task_config: Mapping[str, Any] | None = None, **arguments: Any) -> None:
        """The arguments of `StudentEnv`."""
        super().__init__({**(task_config or {}), "need_head_camera": True}, **arguments)
        self._cells: list[tuple[int, ...]] = []
        self._contacts = 0

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Act, and note where that led."""
        result = super().step(action)
        world = self.world.unwrapped
        if isinstance(world, TabletopEnv):
            simulation = world.simulation
            place, direction = simulation.tcp / CELL, simulation.tcp_rotation[:, 2] * TURNS
            self._cells.append((*map(int, np.floor(place)), *map(int, np.rint(direction))))
            bits = simulation.model.geom_contype[simulation.data.contact.geom]
            self._contacts += bool(((bits == ROBOT_BIT).any(1) & (bits == OBJECT_BIT).any(1)).any())
        else:
            self._cells.append(tuple(map(int, np.floor(result[0][schema.STATE] * STATE_CELLS))))
        return result

    def tally(self) -> tuple[list[tuple[int, ...]], int]:
        """The cell of the hand's pose after each step so far, and the steps in which the robot touched an object."""
        return self._cells, self._contacts
