"""Makes the environments harder while a policy learns: by env steps, or when enough episodes succeed.

The trainer makes one from `env.curriculum`, starts it with the run, and passes on every finished episode.
"""

from __future__ import annotations

import contextlib
import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from deft.config.settings import CurriculumConfig
from deft.envs.vector import Episode, VectorEnv
from deft.errors import InputError, user_code

log = logging.getLogger(__name__)
Level: TypeAlias = str | int | float
METHOD = "set_difficulty"


class Curriculum:
    """The level that the environments are at; it only ever rises.

    `paused` is entered while a new level is set: a collector in another thread must not step the environments then.
    """

    def __init__(
        self,
        config: CurriculumConfig,
        env: VectorEnv,
        paused: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self.config = config
        self._env = env
        self._paused = paused
        self._index = 0
        self._resumed = False
        self._successes: deque[bool] = deque(maxlen=config.window)
        self._num_silent = 0  # episodes in a row that did not report success or failure
        self._started_before: set[int] = set()  # environments whose episode started at the previous level

    @property
    def level(self) -> Level:
        """The present level."""
        return self.config.levels[self._index]

    def start(self) -> None:
        """Set the present level. In a new run every later level is set first, so that a wrong one raises now."""
        later = () if self._resumed else range(len(self.config.levels) - 1, self._index, -1)
        for index in (*later, self._index):
            self._set(self.config.levels[index])
        log.info("curriculum: the environments are at level %r", self.level)

    def update(self, num_timesteps: int, episodes: list[Episode]) -> Level | None:
        """Update from the env steps so far and the episodes since the last call; return a new level, or None."""
        index = self._index_by_steps(num_timesteps) if self.config.at_steps else self._index_by_success(episodes)
        if index <= self._index:
            return None
        with self._paused():
            self._set(self.config.levels[index])
        self._index = index
        self._successes.clear()
        self._started_before = set(range(self._env.num_envs))
        log.info("curriculum: level %r from %d steps on", self.level, num_timesteps)
        return self.level

    def state_dict(self) -> dict[str, Any]:
        """Which level, and what was seen at it, for the checkpoint."""
        return {"level": self._index, "successes": list(self._successes), "begun_before": sorted(self._started_before)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back; `start` then sets the level."""
        self._index = min(int(state["level"]), len(self.config.levels) - 1)
        self._successes.clear()
        self._successes.extend(bool(success) for success in state["successes"])
        self._started_before = set(state.get("begun_before", ()))
        self._resumed = True

    def _index_by_steps(self, num_timesteps: int) -> int:
        """Number of `at_steps` that have passed."""
        return bisect_right(self.config.at_steps or (), num_timesteps)

    def _index_by_success(self, episodes: list[Episode]) -> int:
        """One further where the window is full and enough of it succeeded."""
        assert self.config.success_rate is not None
        for episode in episodes:
            if episode.success is None:  # cut before its end, or not reported
                self._num_silent += 1
                if self._num_silent >= self.config.window:
                    raise InputError(
                        'env.curriculum.success_rate: the environment reports no success; put "success" into its info '
                        "in an episode's last step, or give at_steps"
                    )
                continue
            self._num_silent = 0
            if episode.env_index in self._started_before:  # at the level before
                self._started_before.discard(episode.env_index)
            else:
                self._successes.append(episode.success)
        is_full = len(self._successes) == self.config.window
        is_enough = sum(self._successes) >= self.config.success_rate * self.config.window
        return min(self._index + (is_full and is_enough), len(self.config.levels) - 1)

    def _set(self, level: Level) -> None:
        with user_code(f"env.curriculum: {METHOD}({level!r}) raised", InputError):
            try:
                self._env.call(METHOD, level)
            except InputError as error:
                advice = f"; give the environment {METHOD}(level), or leave env.curriculum out"
                raise InputError(f"env.curriculum: {error}{advice if METHOD in str(error) else ''}") from error
