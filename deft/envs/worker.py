"""The worker process of `ProcessVectorEnv`: it makes some of the environments and answers commands until it is closed.

A worker does not import torch. It ends when its parent process has ended.
"""

from __future__ import annotations

import mmap
import os
import pickle
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from deft.envs.layout import ActionLayout, ObservationLayout
from deft.envs.shared_memory import SharedArrays
from deft.envs.slot import EnvSlot, check_same_spaces
from deft.envs.state import StateObstacle
from deft.envs.vector import Episode
from deft.envs.wrappers import env_reward_terms, wrapper_attribute
from deft.errors import DeftError, InputError, RunError, one_line

PARENT_CHECK_INTERVAL = 1.0  # seconds
Failure = tuple[str, type[DeftError], str]  # message, kind of error, traceback


def run_worker(connection_file: int, memory_file: int, parent: int) -> None:
    """Answer commands until "close" arrives or the parent process ends."""
    threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()
    connection = Connection(connection_file)
    worker = _WorkerEnvs(memory_file)
    while True:
        try:
            request, command, args = connection.recv()
        except (EOFError, OSError):
            os._exit(1)
        if command == "close":
            worker.close()
            sys.stdout.flush()
            os._exit(0)  # immediately: the environments are closed, and interpreter shutdown takes a while
        reply: tuple[int, Failure | None, Any]
        try:
            reply = (request, None, getattr(worker, command)(*args))
        except BaseException as error:  # including sys.exit() of an environment
            reply = (request, worker.failure(error), None)
        try:
            connection.send(reply)
        except BrokenPipeError:
            os._exit(1)


def _watch_parent(parent: int) -> None:
    """End this process when the parent has ended, even while an environment hangs."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_INTERVAL)
    os._exit(1)


class _WorkerEnvs:
    """The environments of one worker; each public method is a command."""

    _layout: ObservationLayout
    _action_layout: ActionLayout
    _shared: SharedArrays

    def __init__(self, memory_file: int) -> None:
        self._memory_file = memory_file
        self._first_env = 0
        self._slots: list[EnvSlot] = []
        self._reward_terms: tuple[str, ...] = ()
        self._stepping: np.ndarray = np.zeros(1, np.int64)

    def make(self, functions: bytes, first_env: int) -> dict[str, Any]:
        """Make the environments and return their description."""
        envs = [function() for function in pickle.loads(functions)]
        self._first_env = first_env
        check_same_spaces(envs, first_env)
        self._layout = ObservationLayout(envs[0].observation_space)
        self._action_layout = ActionLayout(envs[0].action_space)
        self._slots = [EnvSlot(env, first_env + index, self._layout) for index, env in enumerate(envs)]
        self._reward_terms = env_reward_terms(envs[0])
        return {
            "observation_space": self._layout.space,
            "action_space": self._action_layout.space,
            "action_mask": wrapper_attribute(envs[0], "action_mask"),
            "chunk_length": wrapper_attribute(envs[0], "chunk_length", 1),
            "reward_terms": self._reward_terms,
        }

    def share(self, number: int, num_envs: int, num_workers: int, size: int) -> None:
        """Map the shared memory, with the same arrays in it as in the parent."""
        memory = mmap.mmap(self._memory_file, size)
        self._shared = SharedArrays(
            self._layout, self._action_layout, len(self._reward_terms), num_envs, num_workers, memory
        )
        self._stepping = self._shared.stepping[number : number + 1]

    def reset(self, current: int, seeds: list[int | None]) -> None:
        """Reset every environment into the given set of arrays."""
        for slot, seed in zip(self._slots, seeds, strict=True):
            self._stepping[0] = slot.index
            slot.reset(seed, self._shared.env.steps[current])

    def step(self, current: int) -> tuple[list[Episode], Failure | None]:
        """Step every environment into the given set of arrays; return the ended episodes and the first failure.

        The environments after a failed one are not stepped.
        """
        actions = self._shared.actions[self._first_env : self._first_env + len(self._slots)]
        rows = self._action_layout.rows(self._action_layout.prepare(actions, len(self._slots)))
        arrays, final, stepping = self._shared.env.steps[current], self._shared.env.final, self._stepping
        episodes: list[Episode] = []
        for slot, action in zip(self._slots, rows, strict=True):
            stepping[0] = slot.index
            try:
                episode = slot.step(action, arrays, final)
            except BaseException as error:
                return episodes + ([slot.finished] if slot.finished else []), self.failure(error)
            if episode is not None:
                episodes.append(episode)
        return episodes, None

    def get_state(self, current: int) -> list[dict[str, Any]] | None:
        """Return the state of every environment; None if one cannot be saved."""
        try:
            return [slot.get_state(self._shared.env.steps[current]) for slot in self._slots]
        except StateObstacle:
            return None

    def set_state(self, current: int, states: list[dict[str, Any]]) -> None:
        """Continue from saved states."""
        for slot, state in zip(self._slots, states, strict=True):
            self._stepping[0] = slot.index
            slot.set_state(state, self._shared.env.steps[current])

    def state_obstacle(self) -> str | None:
        """Return the first environment's obstacle, if there is one."""
        return next((obstacle for slot in self._slots if (obstacle := slot.state_obstacle()) is not None), None)

    def call(self, name: str, *args: Any) -> list[Any]:
        """Call a method of every environment."""
        return [slot.call(name, *args) for slot in self._slots]

    def render(self, index: int) -> np.ndarray | None:
        """Return an image of an environment of this worker; None for those of others."""
        own = index - self._first_env
        return self._slots[own].render() if 0 <= own < len(self._slots) else None

    def failure(self, error: BaseException) -> Failure:
        """Describe an exception for the parent; a message that names no environment gets the current one."""
        kind = InputError if isinstance(error, InputError) else RunError
        message = f"environment {int(self._stepping[0])}: {one_line(error)}"
        return str(error) if isinstance(error, DeftError) else message, kind, traceback.format_exc()

    def close(self) -> None:
        """Close the environments."""
        for slot in self._slots:
            slot.close()
