"""The worker process of `ProcessVectorEnv`, and the memory that it shares with its parent.

A worker makes some of the environments, as a `SerialVectorEnv` whose arrays are its rows of the shared memory, and
answers commands until it is closed. It does not import torch, and ends when its parent process has ended. A worker of
a suite runs in the suite's interpreter: this module needs no other packages than Gymnasium and NumPy.
"""

from __future__ import annotations

import mmap
import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from gymnasium import Space

from deft.envs.layout import ActionLayout, EnvArrays, ObservationLayout
from deft.envs.serial import EnvSlot, SerialVectorEnv
from deft.envs.vector import Episode
from deft.errors import DeftError, InputError, RunError, one_line

PARENT_CHECK_INTERVAL = 1.0  # seconds
PROTOCOL = 2
"""Version of the commands, their answers and the layout of the shared memory; both processes must have the same."""
Failure = tuple[str, type[DeftError], str]  # message, kind of error, traceback


def open_memory() -> int:
    """Return the descriptor of an unnamed file in memory, which disappears with the last process that has it open."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("deft-envs")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class SharedArrays:
    """Arrays allocated one after another in a mapped file; without a file they only give the `size` in bytes."""

    def __init__(
        self,
        observation_space: Space,
        action_space: Space,
        num_terms: int,
        num_envs: int,
        num_workers: int,
        memory: mmap.mmap | None = None,
    ) -> None:
        self.size = 0
        self._memory = memory
        self.env = EnvArrays.allocate(ObservationLayout(observation_space), num_envs, num_terms, self._allocate)
        actions = ActionLayout(action_space)
        self.actions = self._allocate((num_envs, *actions.shape), actions.dtype)
        self.busy = self._allocate((num_workers,), np.dtype(np.int64))
        """int64 [workers]: the environment that each worker is stepping."""

    def _allocate(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return the next array, aligned to a cache line."""
        offset = self.size
        count = int(np.prod(shape, dtype=np.int64))
        self.size += -(-count * dtype.itemsize // 64) * 64
        if self._memory is None:
            return np.zeros(shape, dtype)
        return np.frombuffer(self._memory, dtype, count, offset).reshape(shape)


class WorkerEnv(SerialVectorEnv):
    """The environments of one worker. Its parent calls the public methods, most of them those of `SerialVectorEnv`."""

    busy = np.zeros(1, np.int64)
    """int64 [1], in the shared memory: the environment that is reset or stepped."""

    def _in_turn(self) -> Iterator[EnvSlot]:
        for slot in self._slots:
            self.busy[0] = slot.index
            yield slot

    def share(self, memory_file: int, number: int, num_envs: int, num_workers: int, size: int) -> None:
        """Map the shared memory, with the same arrays in it as in the parent; use the rows of these environments."""
        sizes = (len(self.reward_terms), num_envs, num_workers)
        memory = mmap.mmap(memory_file, size)
        shared = SharedArrays(self.observation_space, self.action_space, *sizes, memory)
        rows = slice(self.first_index, self.first_index + self.num_envs)
        own = shared.env.rows(rows)
        self._arrays, self._final, self._actions = own.steps, own.final, shared.actions[rows]
        self.busy = shared.busy[number : number + 1]

    def reset_into(self, current: int, seeds: list[int | None]) -> None:
        """Reset every environment into the given set of arrays."""
        self._current = current ^ 1
        self.reset(seeds)

    def set_state_into(self, current: int, states: list[dict[str, Any]]) -> None:
        """Continue from saved states, with the observations in the given set of arrays."""
        self._current = current ^ 1
        self.set_state(states)

    def step_into(self, current: int) -> tuple[list[Episode], Failure | None]:
        """Step every environment into the given set of arrays; return the ended episodes and the first failure."""
        self._current = current ^ 1
        episodes, error = self._advance(self._action_layout.prepare(self._actions, self.num_envs))
        return episodes, None if error is None else describe_failure(error, int(self.busy[0]))


def run_worker(connection_file: int, parent: int) -> None:
    """Answer commands until "close" arrives or the parent process ends."""
    threading.Thread(target=watch_parent, args=(parent,), daemon=True).start()
    connection = Connection(connection_file)
    env: WorkerEnv | None = None
    first_index = 0
    while True:
        try:
            request, command, args = connection.recv()
        except (EOFError, OSError):
            os._exit(1)
        if command == "close":
            if env is not None:
                env.close()
            sys.stdout.flush()
            os._exit(0)  # immediately: the environments are closed, and interpreter shutdown takes a while
        reply: tuple[int, Failure | None, Any]
        try:
            if env is None:  # the first command is "make"
                protocol, functions, first_index = args
                check_protocol(protocol)
                env = WorkerEnv(pickle.loads(functions), first_index)
                reply = (request, None, env.description)
            else:
                reply = (request, None, getattr(env, command)(*args))
        except BaseException as error:  # including sys.exit() of an environment
            reply = (request, describe_failure(error, first_index if env is None else int(env.busy[0])), None)
        try:
            connection.send(reply)
        except BrokenPipeError:
            os._exit(1)


def check_protocol(protocol: int) -> None:
    """Raise an error if the parent process speaks another version of the protocol."""
    if protocol != PROTOCOL:
        raise InputError(
            f"the worker process speaks version {PROTOCOL} of the worker protocol, its parent version {protocol}: Deft "
            "was replaced by another version while it ran; start the command again"
        )


def watch_parent(parent: int) -> None:
    """End this process when the parent has ended, even while an environment hangs."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_INTERVAL)
    os._exit(1)


def describe_failure(error: BaseException, env_index: int) -> Failure:
    """Describe an exception for the parent; a message that names no environment gets the index of the present one."""
    kind = InputError if isinstance(error, InputError) else RunError
    message = str(error) if isinstance(error, DeftError) else f"environment {env_index}: {one_line(error)}"
    return message, kind, "".join(traceback.format_exception(error))
