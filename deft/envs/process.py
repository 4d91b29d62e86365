"""Environments in worker processes: for environments that are slow to step, with one worker per core.

Made by `deft.envs.make`. Arrays travel through shared memory, commands through a socket to each worker (`worker.py`).
The workers are new interpreters, not forks, and do not run the main script: they do not import torch, have no copy of
the parent's memory, ignore Ctrl-C, and end when the parent ends.

A worker that hangs or dies is replaced by a new one, whose environments start new episodes. Its unfinished episodes
are reported as lost; the others continue.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import signal
import subprocess
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle
import gymnasium
import numpy as np

import deft
from deft import trust
from deft.envs.layout import Observation, StepArrays, copy_rows
from deft.envs.vector import ArrayVectorEnv, VectorStep
from deft.envs.worker import PROTOCOL, SharedArrays, open_memory
from deft.errors import DeftError, InputError, RunError, one_line
from deft.machine import available_cores

EnvFunction = Callable[[], gymnasium.Env]

log = logging.getLogger(__name__)
START_TIMEOUT = 120.0  # seconds for imports and constructors; the limit of a step may be shorter
CLOSE_TIMEOUT = 1.0  # seconds for the environments to close before their worker is killed
_SOFTWARE_RENDERER_THREADS = "LP_NUM_THREADS"  # of Mesa, without a GPU; 0: it renders in the worker's own thread
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# Stop signals are for the run, which ends its workers.
_IGNORE_SIGNALS = (
    "import signal; [signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)]; "
)
DEFAULT_RESTARTS = 3
_PACKAGE = Path(deft.__file__).parent


class _Worker:
    """A worker process, seen from the parent."""

    connection: Connection
    process: subprocess.Popen

    def __init__(self, number: int, rows: slice, interpreter: Interpreter | None) -> None:
        self.number = number
        self.rows = rows
        self.interpreter = interpreter
        self.functions = b""
        """The functions that make its environments, pickled."""
        self.num_restarts = 0
        """Restarts since the last completed step."""
        self.has_lost_episodes = False
        """Whether it was replaced since the last step: the caller has not seen its present episodes."""

    def launch(self, memory_file: int) -> None:
        """Start the process; the command "make" makes its environments."""
        self.connection, self.process = launch(
            "deft.envs.worker", "run_worker", memory_file, interpreter=self.interpreter
        )

    def make_arguments(self) -> tuple[int, bytes, int]:
        """Return the arguments of its command "make"."""
        return PROTOCOL, self.functions, self.rows.start


Arguments = Callable[[_Worker], tuple[Any, ...]]


@dataclass(frozen=True)
class Interpreter:
    """Another Python interpreter for worker processes: that of a suite, with packages of other versions.

    A worker imports Deft's own modules from where this process has them, and everything else from its interpreter.
    """

    python: str
    """Path of the executable."""
    remedy: str
    """What to do if its workers cannot start, for the error message."""

    def command(self, code: str) -> list[str]:
        """Return the command that runs `code` in it."""
        setup = (
            "import importlib.util, sys; "
            f"spec = importlib.util.spec_from_file_location('deft', {str(_PACKAGE / '__init__.py')!r}, "
            f"submodule_search_locations=[{str(_PACKAGE)!r}]); "
            "sys.modules['deft'] = package = importlib.util.module_from_spec(spec); spec.loader.exec_module(package); "
        )
        return [self.python, "-I", "-c", setup + code]  # -I: without PYTHONPATH and the user's packages


def launch(
    module: str, function: str, *files: int, interpreter: Interpreter | None = None
) -> tuple[Connection, subprocess.Popen]:
    """Start a worker that calls `function(connection file, parent's process id)` and inherits open files.

    Return the connection to it, and the process.
    """
    connection, theirs = Pipe()
    arguments = (theirs.fileno(), os.getpid())
    # Of all sockets only its own is inherited, so that a worker without a parent reads the end of the stream. A
    # separate process group: signals from the terminal go to the parent only.
    process = subprocess.Popen(
        (interpreter.command if interpreter else trust.child_command)(
            f"{_IGNORE_SIGNALS}from {module} import {function}; {function}{arguments}"
        ),
        stdin=subprocess.DEVNULL,
        env={_SOFTWARE_RENDERER_THREADS: "0", **os.environ, **dict.fromkeys(_THREAD_VARIABLES, "1")},
        pass_fds=(theirs.fileno(), *files),
        process_group=0,
    )
    theirs.close()
    return connection, process


def kill(workers: Iterable[tuple[Connection, subprocess.Popen]]) -> None:
    """End processes at once, and close the connections to them."""
    workers = list(workers)
    for _, process in workers:
        process.kill()
    for connection, process in workers:
        process.wait()
        connection.close()


def _free(workers: list[_Worker], memory_file: int) -> None:
    kill((worker.connection, worker.process) for worker in workers)
    os.close(memory_file)


class ProcessVectorEnv(ArrayVectorEnv):
    """N environments distributed over worker processes; the results equal those of `SerialVectorEnv` bit for bit.

    A worker that dies, or takes longer than `timeout` seconds, is replaced, up to `restart_workers` times in a row
    without a completed step; 0: never. An exception raised by an environment ends all workers. The workers run in this
    interpreter, or in another one.
    """

    notices_hangs = True

    def __init__(
        self,
        env_functions: Sequence[EnvFunction],
        *,
        num_workers: int | None = None,
        timeout: float = 60.0,
        restart_workers: int = DEFAULT_RESTARTS,
        interpreter: Interpreter | None = None,
    ) -> None:
        if os.name != "posix":
            raise InputError("env.vector: process needs Linux or macOS; use sync")
        num_envs = len(env_functions)
        if not num_envs:
            raise InputError("a vector environment needs at least one environment")
        self.num_workers = min(num_workers or available_cores(), num_envs)
        self._timeout = timeout
        self._start_timeout = max(START_TIMEOUT, timeout)
        self._most_restarts = restart_workers
        self._num_restarts = 0
        self._seed: int | Sequence[int] | None = None
        self._calls: dict[str, tuple[Any, ...]] = {}
        """The last call of each `set_…` method, with its name; repeated in new workers."""
        self._request = 0
        self._failure: str | None = None
        self._shared: SharedArrays | None = None
        self._workers: list[_Worker] = []
        self._memory_file = open_memory()
        self._finalizer = weakref.finalize(self, _free, self._workers, self._memory_file)
        try:
            bounds = [num_envs * worker // self.num_workers for worker in range(self.num_workers + 1)]
            for number, (first, last) in enumerate(pairwise(bounds)):
                worker = _Worker(number, slice(first, last), interpreter)
                worker.launch(self._memory_file)
                self._workers.append(worker)
            self._start(env_functions)
        except BaseException:
            self._finalizer()
            raise

    def _start(self, env_functions: Sequence[EnvFunction]) -> None:
        """Let the workers make their environments, then allocate the shared memory for their spaces."""
        for worker in self._workers:
            try:
                worker.functions = cloudpickle.dumps(list(env_functions[worker.rows]))
            except Exception as error:
                raise InputError(
                    f"the environments cannot be sent to worker processes ({one_line(error)}); use env.vector: sync"
                ) from error
        first, *others = self._ask_once("make", _Worker.make_arguments)
        for worker, other in zip(self._workers[1:], others, strict=True):
            for kind in ("observation_space", "action_space", "reward_terms"):
                if other[kind] != first[kind]:
                    raise InputError(
                        f"environment {worker.rows.start} has {kind} {other[kind]}; environment 0 has {first[kind]}"
                    )
        num_envs, spaces = len(env_functions), (first["observation_space"], first["action_space"])
        sizes = (len(first["reward_terms"]), num_envs, self.num_workers)
        self._memory_size = SharedArrays(*spaces, *sizes).size
        try:
            os.ftruncate(self._memory_file, self._memory_size)
            memory = mmap.mmap(self._memory_file, self._memory_size)
        except OSError as error:
            raise RunError(f"cannot allocate {self._memory_size} bytes of shared memory: {error}") from error
        shared = self._shared = SharedArrays(*spaces, *sizes, memory)
        description = {name: first[name] for name in ("action_mask", "chunk_length", "reward_terms", "has_splits")}
        super().__init__(num_envs, *spaces, shared.env, **description)
        shared.busy[:] = [worker.rows.start for worker in self._workers]
        self._ask_once("share", self._share_arguments)

    def _share_arguments(self, worker: _Worker) -> tuple[int, ...]:
        return self._memory_file, worker.number, self.num_envs, self.num_workers, self._memory_size

    @property
    def worker_pids(self) -> list[int]:
        """The process ids of the workers."""
        return [worker.process.pid for worker in self._workers]

    def reset(self, seed: int | Sequence[int] | None = None) -> Observation:
        """Start an episode in every environment; environment i gets `seed + i`, or the i-th of several seeds."""
        seeds = self._env_seeds(seed)
        arrays = self._next_arrays()
        self._seed = seed
        self._ask("reset_into", lambda worker: (self._current, seeds[worker.rows]))
        self._start_anew()
        return arrays.observation

    def step(self, actions: np.ndarray) -> VectorStep:
        """Step every environment with its row of `actions`."""
        prepared = self._prepare(actions)
        arrays = self._next_arrays()
        assert self._shared is not None
        self._shared.actions[...] = prepared
        asked = [worker for worker in self._workers if not worker.has_lost_episodes]
        replies, failures = self._exchange("step_into", asked, lambda _: (self._current,), self._timeout)
        episodes = [episode for worker in self._workers if worker in replies for episode in replies[worker][0]]
        if errors := [error for _, error in replies.values() if error is not None]:
            self.finished = self._result(arrays, episodes)
            self._raise(*errors[0])
        if failures:
            self._replace(failures, self._current)
        for worker in replies:
            worker.num_restarts = 0
        if lost := [worker for worker in self._workers if worker.has_lost_episodes]:
            return self._result(arrays, episodes, self._lose_episodes(lost, arrays))
        return self._result(arrays, episodes)

    def suspend(self, indices: Sequence[int]) -> None:
        """Do not step these environments until the next `reset`; a worker that is replaced steps them again."""

        def own(worker: _Worker) -> list[int]:
            first, end = worker.rows.start, worker.rows.stop
            return [index - first for index in indices if first <= index < end]

        if concerned := [worker for worker in self._workers if own(worker)]:
            self._ask("suspend", lambda worker: (own(worker),), concerned)

    def _lose_episodes(self, workers: list[_Worker], arrays: StepArrays) -> np.ndarray:
        """Truncate the episodes of replaced workers at their last observation; `arrays` hold the first of the next."""
        seen = self._arrays[self._current ^ 1].observation
        for worker in workers:
            rows = worker.rows
            arrays.reward[rows], arrays.terminated[rows], arrays.truncated[rows] = 0.0, False, True
            if arrays.reward_terms is not None:
                arrays.reward_terms[rows] = 0.0
            if self.chunk_length > 1:
                arrays.num_steps[rows] = 0
            copy_rows(seen, self._final, rows)
            worker.has_lost_episodes = False
        return np.concatenate([np.arange(worker.rows.start, worker.rows.stop) for worker in workers])

    def get_state(self) -> list[dict[str, Any]] | None:
        """Return plain data for `set_state`; None if `state_obstacle` gives a reason."""
        replies = self._ask_all("get_state")
        # The caller has not seen the new episodes of a replaced worker.
        if any(worker.has_lost_episodes for worker in self._workers) or None in replies:
            return None
        return [state for reply in replies for state in reply]

    def set_state(self, states: list[dict[str, Any]]) -> None:
        """Continue from saved states."""
        self._check_states(states)
        self._next_arrays()
        self._ask("set_state_into", lambda worker: (self._current, states[worker.rows]))
        self._start_anew()

    def state_obstacle(self) -> str | None:
        """Explain in one line why the state cannot be saved; None if it can."""
        return next((reply for reply in self._ask_all("state_obstacle") if reply is not None), None)

    def call(self, name: str, *args: Any) -> list[Any]:
        """Call a method of every environment. The last call of every `set_…` method is repeated in a new worker."""
        values = [value for reply in self._ask_all("call", name, *args) for value in reply]
        if name.startswith("set_"):
            self._calls[name] = (name, *args)
        return values

    def render(self, index: int = 0) -> np.ndarray | None:
        """Return an image of one environment; None if it has no render mode."""
        owner = next(worker for worker in self._workers if index < worker.rows.stop)
        return self._ask("render", lambda worker: (index - worker.rows.start,), [owner])[0]

    def close(self) -> None:
        """End the workers, and kill those that take longer than a second. Further calls do nothing."""
        if not self._finalizer.alive:
            return
        self._failure = self._failure or "the environments are closed"
        for worker in self._workers:
            with contextlib.suppress(OSError):  # it has ended already
                worker.connection.send((-1, "close", ()))
        deadline = time.monotonic() + CLOSE_TIMEOUT
        with contextlib.suppress(subprocess.TimeoutExpired):
            for worker in self._workers:
                worker.process.wait(max(0.0, deadline - time.monotonic()))
        self._finalizer()

    def _start_anew(self) -> None:
        """Mark all environments as reset or restored by the caller: no episode is lost any more."""
        self._started = True
        for worker in self._workers:
            worker.has_lost_episodes = False

    # -- requests to the workers ---------------------------------------------------------------------------------------

    def _ask_all(self, command: str, *args: Any) -> list[Any]:
        return self._ask(command, lambda _: args)

    def _ask(self, command: str, arguments: Arguments, workers: list[_Worker] | None = None) -> list[Any]:
        """Send a command to all (or some) workers; return the answers in their order. Failed workers are replaced."""
        workers = workers or self._workers
        answers, failures = self._exchange(command, workers, arguments, self._timeout)
        while failures:
            self._replace(failures, self._current ^ 1)  # the caller still uses the other arrays
            again, failures = self._exchange(command, failures, arguments, self._timeout)
            answers |= again
        return [answers[worker] for worker in workers]

    def _ask_once(self, command: str, arguments: Arguments) -> list[Any]:
        """As `_ask`, while the environments are made: a failed worker is not replaced, since it would fail again."""
        answers, failures = self._exchange(command, self._workers, arguments, self._start_timeout)
        for worker, message in failures.items():
            remedy = f"; {worker.interpreter.remedy}" if worker.interpreter else ""
            self._fail(RunError(message + remedy))
        return [answers[worker] for worker in self._workers]

    def _exchange(
        self, command: str, workers: Iterable[_Worker], arguments: Arguments, timeout: float
    ) -> tuple[dict[_Worker, Any], dict[_Worker, str]]:
        """Send a command to some workers; return their answers, and a message for each worker that failed."""
        if self._failure is not None:
            raise RunError(self._failure)
        self._request += 1
        answers: dict[_Worker, Any] = {}
        failures: dict[_Worker, str] = {}
        waiting: dict[Any, _Worker] = {}
        for worker in workers:
            try:
                worker.connection.send((self._request, command, arguments(worker)))
                waiting[worker.connection] = worker
            except OSError:
                failures[worker] = self._cause_of_death(worker)
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                name = command.removesuffix("_into")
                for worker in waiting.values():
                    failures[worker] = (
                        f"environment {self._busy_env(worker)} did not answer {name!r} within {timeout:g} s: it hangs, "
                        "or env.timeout is too short"
                    )
                break
            for connection in ready:
                worker = waiting[connection]
                try:
                    request, failure, answer = worker.connection.recv()
                except (EOFError, OSError):
                    failures[worker] = self._cause_of_death(worker)
                    del waiting[connection]
                    continue
                if request != self._request:  # the answer to a call that Ctrl-C interrupted
                    continue
                if failure is not None:
                    self._raise(*failure)
                answers[worker] = answer
                del waiting[connection]
        return answers, failures

    def _replace(self, failures: dict[_Worker, str], into: int) -> None:
        """Start new processes for failed workers; their environments start new episodes in the given set of arrays."""
        try:
            while failures:
                for worker, message in failures.items():
                    worker.num_restarts += 1
                    if worker.num_restarts > self._most_restarts:
                        restarts = f"; {self._most_restarts} restarts did not help" if self._most_restarts else ""
                        self._fail(RunError(message + restarts))
                    num_lost = worker.rows.stop - worker.rows.start if self._started else 0
                    lost = f"; {num_lost} unfinished episode(s) lost" if not worker.has_lost_episodes else ""
                    log.warning("%s%s; starting a new worker", message, lost)
                    kill([(worker.connection, worker.process)])
                    worker.launch(self._memory_file)
                    worker.has_lost_episodes = True
                failures = self._prepare_new(list(failures), into)
        except BaseException:  # the new workers are incomplete
            self._failure = self._failure or "the environments were interrupted while a worker was restarted"
            self._finalizer()
            raise

    def _prepare_new(self, workers: list[_Worker], into: int) -> dict[_Worker, str]:
        """Let new workers make and reset their environments; return a message for each that failed."""
        self._num_restarts += 1
        seed = None
        if self._seed is not None:  # different for every restart, equal in a repeated run
            given = [self._seed] if isinstance(self._seed, int | np.integer) else self._seed
            seed = int(np.random.SeedSequence([*given, self._num_restarts]).generate_state(1)[0]) >> 2
        seeds = self._env_seeds(seed)
        steps: list[tuple[str, Arguments]] = [
            ("make", _Worker.make_arguments),
            ("share", self._share_arguments),
            *(("call", lambda worker, call=call: call) for call in self._calls.values()),
            ("reset_into", lambda worker: (into, seeds[worker.rows])),
        ]
        failures: dict[_Worker, str] = {}
        for command, arguments in steps:
            asked = [worker for worker in workers if worker not in failures]
            failures |= self._exchange(command, asked, arguments, self._start_timeout)[1]
        return failures

    def _busy_env(self, worker: _Worker) -> int:
        return worker.rows.start if self._shared is None else int(self._shared.busy[worker.number])

    def _cause_of_death(self, worker: _Worker) -> str:
        try:
            status = worker.process.wait(1.0)
            how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        except subprocess.TimeoutExpired:
            how = "it closed its connection"
        return f"the worker process of environment {self._busy_env(worker)} ended: {how}"

    def _raise(self, message: str, kind: type[DeftError], worker_traceback: str) -> NoReturn:
        """Raise a worker's error: an InputError leaves the environments usable, any other error ends them."""
        error = kind(message)
        error.add_note(worker_traceback)
        if kind is InputError:
            raise error
        self._fail(error)

    def _fail(self, error: DeftError) -> NoReturn:
        """Kill every worker and raise the error."""
        self._failure = str(error)
        self._finalizer()
        raise error
