"""The tabletop as it is recorded to measure a world model on interaction: which pixels changed because objects moved.

`deft.training.phases.interaction` collects episodes of it; `deft.evaluation.interaction` measures a world model there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from deft.envs.f1 import TeacherEnv
from deft.envs.tabletop.env import TabletopEnv
from deft.envs.tabletop.simulation import StillObjects
from deft.errors import InputError

HORIZONS = (1, 5, 10, 20)  # steps ahead
CHANGED = 8  # grey levels, in any channel, by which a pixel must differ
LIFTED = 0.01  # metres above its first position


class InteractionEnv(TeacherEnv):
    """`TeacherEnv` that records, for every step, which pixels of the wrist image are due to moved objects.

    After a step the wrist camera is rendered again with the robot as it is and the objects as they were h steps before,
    for every h in `horizons`. Pixels that differ from the true image changed for another reason than the motion of the
    arm and of its camera. An object in the gripper counts: it would have stayed on the table. Flickering lights and a
    patch of noise do not count: both images have the same.

    An episode does not end with the success of its task.
    """

    def __init__(
        self, task_config: Mapping[str, Any] | None = None, horizons: Sequence[int] = HORIZONS, **arguments: Any
    ) -> None:
        """`horizons`: steps; the other arguments are those of `TeacherEnv`."""
        super().__init__(task_config, **arguments)
        if not isinstance(self.simulator.unwrapped, TabletopEnv):
            raise InputError(f"world is {self.config.world!r}; interaction is recorded on the tabletop only")
        self.horizons = tuple(horizons)
        self._still: StillObjects | None = None
        self._poses: list[np.ndarray] = []
        self._moved: list[np.ndarray] = []
        self._touched: list[bool] = []

    @property
    def tabletop(self) -> TabletopEnv:
        """The simulator."""
        simulator = self.simulator.unwrapped
        assert isinstance(simulator, TabletopEnv)
        return simulator

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode and its recording."""
        found = super().reset(seed=seed, options=options)
        simulation = self.tabletop.simulation
        self._still = StillObjects(simulation)
        self._poses, self._moved, self._touched = [simulation.all_poses], [], []
        return found

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Execute an action, and record what moved."""
        observation, reward, _, truncated, info = super().step(action)
        simulation = self.tabletop.simulation
        wrist = observation["wrist_rgb"][-1].astype(np.int16)
        size = wrist.shape[-1]
        moved = np.zeros((len(self.horizons), size, size), bool)
        now = simulation.all_poses
        for place, steps in enumerate(self.horizons):
            if steps > len(self._poses):
                continue
            before = self._poses[-steps]
            if not np.array_equal(before, now):  # else both images are equal
                assert self._still is not None
                image = self._still.images(before, ("wrist",), size)[0].astype(np.int16)
                moved[place] = np.abs(wrist - image.transpose(2, 0, 1)).max(0) > CHANGED
        self._poses.append(now)
        self._moved.append(moved)
        self._touched.append(simulation.touches_object())
        return observation, reward, False, truncated, info

    def recording(self) -> dict[str, np.ndarray]:
        """Return `moved` [T, horizons, h, w], and whether an object was `touched` or `lifted` after each step [T]."""
        heights = np.stack(self._poses)[:, :, 2]
        return {
            "moved": np.stack(self._moved),
            "touched": np.array(self._touched),
            "lifted": (heights[1:] - heights[0] > LIFTED).any(1),
        }
