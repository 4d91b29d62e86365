"""Environments in worker processes: for environments that are slow to step, one worker a core.

Made by `deft.envs.make`. Arrays travel through shared memory, commands through a socket to each worker. The workers are
new interpreters, not forks, and do not run the main script: they hold no torch and no copy of the parent's memory, get
no Ctrl-C, and end by themselves when the parent is gone. The shared memory has no name, so nothing of it can be left.

A worker that hangs or dies is replaced by a new one whose environments start new episodes. The episodes that it was in
are lost, and said to be; the others go on.
"""

from __future__ import annotations

import logging
import mmap
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import cloudpickle
import gymnasium
import numpy as np

from deft import trust
from deft.envs.state import StateObstacle
from deft.envs.vector import (
    ActionLayout,
    Allocate,
    EnvSlot,
    Episode,
    Observation,
    ObservationLayout,
    StepArrays,
    VectorEnv,
    VectorStep,
    allocate_arrays,
    check_same_spaces,
    env_reward_terms,
    wrapper_attribute,
)
from deft.errors import DeftError, InputError, RunError, one_line
from deft.machine import available_cores

EnvFunction = Callable[[], gymnasium.Env]
_Failure = tuple[str, type[DeftError], str]  # message, kind of error, traceback

log = logging.getLogger(__name__)
START_TIMEOUT = 120.0  # seconds to import and construct; a step's own limit may be shorter
CLOSE_TIMEOUT = 1.0  # seconds for the environments to close before their worker is killed
PARENT_CHECK_INTERVAL = 1.0  # seconds
_SOFTWARE_RENDERER_THREADS = "LP_NUM_THREADS"  # Mesa's, where there is no GPU; 0: it draws in the worker's own thread
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_WORKER_CODE = (
    # A stop request is for the run, which ends its workers.
    "import signal; [signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)]; "
    "from deft.envs.process import run_worker; run_worker({connection}, {memory}, {parent})"
)
DEFAULT_RESTARTS = 3


# -------------------------------------------------------------------------------------------------------- shared memory


class _Arena:
    """Hands out arrays from one piece of memory, in the order of the calls; without memory it only counts the bytes."""

    def __init__(self, memory: mmap.mmap | None = None) -> None:
        self.size = 0
        self._memory = memory

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """The next array, on a cache line of its own."""
        offset = self.size
        count = int(np.prod(shape, dtype=np.int64))
        self.size += -(-count * dtype.itemsize // 64) * 64
        if self._memory is None:
            return np.zeros(shape, dtype)
        return np.frombuffer(self._memory, dtype, count, offset).reshape(shape)


@dataclass(slots=True)
class _Shared:
    """What parent and workers share, besides the arrays of `VectorEnv`."""

    actions: np.ndarray
    stepping: np.ndarray
    """int64 [workers]: the environment that each worker is busy with."""


def _allocate_shared(action_layout: ActionLayout, num_envs: int, num_workers: int, allocate: Allocate) -> _Shared:
    return _Shared(
        actions=allocate((num_envs, *action_layout.shape), action_layout.dtype),
        stepping=allocate((num_workers,), np.dtype(np.int64)),
    )


def _open_memory() -> int:
    """A file without a name, in memory: it is gone with the last process that has it open."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("deft-envs")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


# ----------------------------------------------------------------------------------------------------------- the parent


class _Worker:
    """A worker process as the parent sees it."""

    connection: Connection
    process: subprocess.Popen

    def __init__(self, number: int, first_env: int, num_envs: int) -> None:
        self.number = number
        self.first_env = first_env
        self.rows = slice(first_env, first_env + num_envs)
        self.functions = b""
        """What makes its environments, pickled."""
        self.num_restarts = 0
        """Since it last completed a step."""
        self.has_lost_episodes = False
        """Whether it was replaced since the last step: its environments are in episodes that nobody has seen yet."""

    def launch(self, memory_file: int) -> None:
        """Start the process; it makes its environments when it is told to."""
        self.connection, theirs = Pipe()
        code = _WORKER_CODE.format(connection=theirs.fileno(), memory=memory_file, parent=os.getpid())
        # Only its own socket is inherited, so that a worker whose parent is gone reads the end of the stream. A process
        # group of its own: signals from the terminal go to the parent, who decides.
        self.process = subprocess.Popen(
            trust.child_command(code),
            stdin=subprocess.DEVNULL,
            env={_SOFTWARE_RENDERER_THREADS: "0", **os.environ, **dict.fromkeys(_THREAD_VARIABLES, "1")},
            pass_fds=(theirs.fileno(), memory_file),
            process_group=0,
        )
        theirs.close()


def _kill(workers: Iterable[_Worker]) -> None:
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.process.wait()
        worker.connection.close()


def _free(workers: list[_Worker], memory_file: int) -> None:
    _kill(workers)
    os.close(memory_file)


class ProcessVectorEnv(VectorEnv):
    """N environments shared out among worker processes; gives what `SerialVectorEnv` gives, bit for bit.

    A worker that dies, or takes longer than `timeout` seconds, is replaced, up to `restart_workers` times without a
    completed step in between; 0: never. What an environment raises is no such failure: it ends all of them.
    """

    notices_hangs = True

    def __init__(
        self,
        env_functions: Sequence[EnvFunction],
        *,
        num_workers: int | None = None,
        timeout: float = 60.0,
        restart_workers: int = DEFAULT_RESTARTS,
    ) -> None:
        if os.name != "posix":
            raise InputError("env.vector: process needs Linux or macOS; use sync")
        num_envs = len(env_functions)
        if not num_envs:
            raise InputError("a vector environment needs at least one environment")
        num_workers = min(num_workers or available_cores(), num_envs)
        self._timeout = timeout
        self._most_restarts = restart_workers
        self._num_restarts = 0
        self._seed: int | Sequence[int] | None = None
        self._calls: dict[str, tuple[Any, ...]] = {}
        """What `call` has set on the environments, by method: new workers are told again."""
        self._request = 0
        self._failure: str | None = None
        self._shared: _Shared | None = None
        self._workers: list[_Worker] = []
        self._memory_file = _open_memory()
        self._finalizer = weakref.finalize(self, _free, self._workers, self._memory_file)
        try:
            bounds = [num_envs * worker // num_workers for worker in range(num_workers + 1)]
            for number, (first, last) in enumerate(pairwise(bounds)):
                worker = _Worker(number, first, last - first)
                worker.launch(self._memory_file)
                self._workers.append(worker)
            self._start(env_functions)
            self.num_workers = num_workers
        except BaseException:
            self._finalizer()
            raise

    def _start(self, env_functions: Sequence[EnvFunction]) -> None:
        """Have the workers make their environments, then lay out the memory by their spaces."""
        for worker in self._workers:
            try:
                worker.functions = cloudpickle.dumps(list(env_functions[worker.rows]))
            except Exception as error:
                raise InputError(
                    f"the environments cannot be sent to worker processes ({one_line(error)}); use env.vector: sync"
                ) from error
        descriptions = self._ask_once("make", [(worker.functions, worker.first_env) for worker in self._workers])
        for worker, other in zip(self._workers, descriptions, strict=True):
            for kind in ("observation_space", "action_space", "reward_terms"):
                if other[kind] != descriptions[0][kind]:
                    raise InputError(
                        f"environment {worker.first_env} has {kind} {other[kind]}, "
                        f"but environment 0 has {descriptions[0][kind]}"
                    )
        observation_layout = ObservationLayout(descriptions[0]["observation_space"])
        action_layout = ActionLayout(descriptions[0]["action_space"])
        num_envs, num_workers = len(env_functions), len(self._workers)
        reward_terms = descriptions[0]["reward_terms"]
        count = _Arena()
        allocate_arrays(observation_layout, num_envs, count.allocate, len(reward_terms))
        _allocate_shared(action_layout, num_envs, num_workers, count.allocate)
        try:
            os.ftruncate(self._memory_file, count.size)
            arena = _Arena(mmap.mmap(self._memory_file, count.size))
        except OSError as error:
            raise RunError(f"no {count.size} bytes of shared memory for the environments: {error}") from error
        super().__init__(
            num_envs,
            observation_layout,
            action_layout,
            descriptions[0]["action_mask"],
            descriptions[0]["chunk_length"],
            arena.allocate,
            reward_terms,
        )
        self._shared = _allocate_shared(action_layout, num_envs, num_workers, arena.allocate)
        self._shared.stepping[:] = [worker.first_env for worker in self._workers]
        self._memory_size = count.size
        self._ask_once("share", [self._share(worker) for worker in self._workers])

    @property
    def worker_pids(self) -> list[int]:
        """The process ids of the workers."""
        return [worker.process.pid for worker in self._workers]

    def reset(self, seed: int | Sequence[int] | None = None) -> Observation:
        """Start an episode in every environment; environment i gets `seed + i`, or the i-th of several seeds."""
        seeds = self._env_seeds(seed)
        arrays = self._next_arrays()
        self._seed = seed
        self._ask("reset", [(self._current, seeds[worker.rows]) for worker in self._workers])
        self._start_anew()
        return arrays.observation

    def step(self, actions: np.ndarray) -> VectorStep:
        """Step every environment with its row of `actions`."""
        prepared = self._prepare(actions)
        arrays = self._next_arrays()
        assert self._shared is not None
        self._shared.actions[...] = prepared
        going = {worker: (self._current,) for worker in self._workers if not worker.has_lost_episodes}
        replies, failures = self._exchange("step", going, self._timeout)
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

    def _lose_episodes(self, workers: list[_Worker], arrays: StepArrays) -> np.ndarray:
        """Have the episodes of replaced workers end where they were last seen; `arrays` hold the new beginnings."""
        seen = self._arrays[self._current ^ 1].observation
        for worker in workers:
            rows = worker.rows
            arrays.reward[rows], arrays.terminated[rows], arrays.truncated[rows] = 0.0, False, True
            if arrays.reward_terms is not None:
                arrays.reward_terms[rows] = 0.0
            if self.chunk_length > 1:
                arrays.num_steps[rows] = 0
            for name, stream in _streams(self._final).items():
                stream[rows] = _streams(seen)[name][rows]
            worker.has_lost_episodes = False
        return np.concatenate([np.arange(worker.rows.start, worker.rows.stop) for worker in workers])

    def get_state(self) -> list[dict[str, Any]] | None:
        """Plain data that `set_state` goes on from; None where `state_obstacle` says why."""
        replies = self._ask_all("get_state", self._current)
        # Where a worker was replaced, its episodes are gone and the new ones are not what the caller has seen.
        if any(worker.has_lost_episodes for worker in self._workers) or any(reply is None for reply in replies):
            return None
        return [state for reply in replies for state in reply]

    def set_state(self, states: list[dict[str, Any]]) -> None:
        """Go on from saved states."""
        self._check_states(states)
        self._next_arrays()
        self._ask("set_state", [(self._current, states[worker.rows]) for worker in self._workers])
        self._start_anew()

    def state_obstacle(self) -> str | None:
        """One line on what keeps the state from being saved; None if nothing does."""
        return next((reply for reply in self._ask_all("state_obstacle") if reply is not None), None)

    def call(self, name: str, *args: Any) -> list[Any]:
        """Call a method on every environment. A new worker's environments get the last call of every `set_…` too."""
        values = [value for reply in self._ask_all("call", name, *args) for value in reply]
        if name.startswith("set_"):
            self._calls[name] = args
        return values

    def render(self, index: int = 0) -> np.ndarray | None:
        """A picture of one environment; None where it was made without a render mode."""
        return next((reply for reply in self._ask_all("render", index) if reply is not None), None)

    def close(self) -> None:
        """End the workers, by force where they take longer than a second. Calling it again does nothing."""
        if not self._finalizer.alive:
            return
        self._failure = self._failure or "the environments are closed"
        for worker in self._workers:
            try:
                worker.connection.send((-1, "close", ()))
            except OSError:  # it is gone already
                continue
        deadline = time.monotonic() + CLOSE_TIMEOUT
        for worker in self._workers:
            try:
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                break
        self._finalizer()

    def _start_anew(self) -> None:
        """Every environment is where the caller put it: no episode is lost any more."""
        self._started = True
        for worker in self._workers:
            worker.has_lost_episodes = False

    def _share(self, worker: _Worker) -> tuple[int, int, int, int]:
        return worker.number, self.num_envs, len(self._workers), self._memory_size

    # -- talking to the workers ----------------------------------------------------------------------------------------

    def _ask_all(self, command: str, *args: Any) -> list[Any]:
        return self._ask(command, [args] * len(self._workers))

    def _ask(self, command: str, args: list[tuple[Any, ...]]) -> list[Any]:
        """Send a command to every worker and wait for all answers, in the workers' order; failed ones are replaced."""
        asked = dict(zip(self._workers, args, strict=True))
        answers, failures = self._exchange(command, asked, self._timeout)
        while failures:
            self._replace(failures, self._current ^ 1)  # the caller still acts on what the other arrays hold
            again, failures = self._exchange(command, {worker: asked[worker] for worker in failures}, self._timeout)
            answers |= again
        return [answers[worker] for worker in self._workers]

    def _ask_once(self, command: str, args: list[tuple[Any, ...]]) -> list[Any]:
        """As `_ask`, while the environments are made: a worker that fails then will not do better."""
        asked = dict(zip(self._workers, args, strict=True))
        answers, failures = self._exchange(command, asked, max(START_TIMEOUT, self._timeout))
        for message in failures.values():
            self._fail(message)
        return [answers[worker] for worker in self._workers]

    def _exchange(
        self, command: str, asked: dict[_Worker, tuple[Any, ...]], timeout: float
    ) -> tuple[dict[_Worker, Any], dict[_Worker, str]]:
        """Send a command to some workers: what they answered, and what befell those that gave no answer."""
        if self._failure is not None:
            raise RunError(self._failure)
        self._request += 1
        answers: dict[_Worker, Any] = {}
        failures: dict[_Worker, str] = {}
        waiting: dict[Any, _Worker] = {}
        for worker, args in asked.items():
            try:
                worker.connection.send((self._request, command, args))
                waiting[worker.connection] = worker
            except OSError:
                failures[worker] = self._cause_of_death(worker)
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                failures |= {worker: self._no_answer(worker, command, timeout) for worker in waiting.values()}
                break
            for connection in ready:
                worker = waiting[connection]
                try:
                    request, failure, answer = worker.connection.recv()
                except (EOFError, OSError):
                    failures[worker] = self._cause_of_death(worker)
                    del waiting[connection]
                    continue
                if request != self._request:  # the answer to a call that Ctrl-C cut short
                    continue
                if failure is not None:
                    self._raise(*failure)
                answers[worker] = answer
                del waiting[connection]
        return answers, failures

    def _replace(self, failures: dict[_Worker, str], into: int) -> None:
        """New processes for workers that failed; their environments begin new episodes in the given set of arrays."""
        try:
            while failures:
                for worker, message in failures.items():
                    worker.num_restarts += 1
                    if worker.num_restarts > self._most_restarts:
                        in_vain = f"; it was started again {self._most_restarts} times in vain"
                        self._fail(message + (in_vain if self._most_restarts else ""))
                    num_lost = worker.rows.stop - worker.rows.start if self._started else 0
                    lost = f"; {num_lost} unfinished episode(s) lost" if not worker.has_lost_episodes else ""
                    log.warning("%s%s; a new worker starts", message, lost)
                    _kill([worker])
                    worker.launch(self._memory_file)
                    worker.has_lost_episodes = True
                failures = self._prepare_new(list(failures), into)
        except BaseException:  # half-made workers cannot be asked anything
            self._failure = self._failure or "the environments were interrupted while a worker was started again"
            self._finalizer()
            raise

    def _prepare_new(self, workers: list[_Worker], into: int) -> dict[_Worker, str]:
        """Have new workers make and reset their environments; says what befell those that did not come so far."""
        self._num_restarts += 1
        seed = None
        if self._seed is not None:  # another one for every restart, the same in a run that is repeated
            given = [self._seed] if isinstance(self._seed, int | np.integer) else self._seed
            seed = int(np.random.SeedSequence([*given, self._num_restarts]).generate_state(1)[0]) >> 2
        seeds = self._env_seeds(seed)
        steps: list[tuple[str, Callable[[_Worker], tuple[Any, ...]]]] = [
            ("make", lambda worker: (worker.functions, worker.first_env)),
            ("share", self._share),
            *(("call", lambda worker, call=call: call) for call in self._settings_made()),
            ("reset", lambda worker: (into, seeds[worker.rows])),
        ]
        failures: dict[_Worker, str] = {}
        for command, arguments in steps:
            asked = {worker: arguments(worker) for worker in workers if worker not in failures}
            failures |= self._exchange(command, asked, max(START_TIMEOUT, self._timeout))[1]
        return failures

    def _settings_made(self) -> list[tuple[Any, ...]]:
        return [(name, *args) for name, args in self._calls.items()]

    def _busy_env(self, worker: _Worker) -> int:
        return worker.first_env if self._shared is None else int(self._shared.stepping[worker.number])

    def _cause_of_death(self, worker: _Worker) -> str:
        try:
            status = worker.process.wait(1.0)
            how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        except subprocess.TimeoutExpired:
            how = "it closed its connection"
        return f"the worker process of environment {self._busy_env(worker)} ended: {how}"

    def _no_answer(self, worker: _Worker, command: str, timeout: float) -> str:
        return (
            f"environment {self._busy_env(worker)} gave no answer to {command!r} within {timeout:g} s: it hangs, or "
            "env.timeout is too short for it"
        )

    def _raise(self, message: str, kind: type[DeftError], worker_traceback: str) -> NoReturn:
        """What a worker raised: a call that was wrong leaves the environments as they are, a failure ends them."""
        error = kind(message)
        error.add_note(worker_traceback)
        if kind is InputError:
            raise error
        self._failure = message
        self._finalizer()
        raise error

    def _fail(self, message: str) -> NoReturn:
        """Kill every worker and raise; nothing can be asked of them any more."""
        self._failure = message
        self._finalizer()
        raise RunError(message)


def _streams(observation: Observation) -> dict[str, np.ndarray]:
    return observation if isinstance(observation, dict) else {"": observation}


# ----------------------------------------------------------------------------------------------------------- the worker


def run_worker(connection_file: int, memory_file: int, parent: int) -> None:
    """The whole life of a worker process: answer commands until told to close, or until the parent is gone."""
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
            os._exit(0)  # at once: the environments are closed, and an interpreter's own end takes a while
        reply: tuple[int, _Failure | None, Any]
        try:
            reply = (request, None, getattr(worker, command)(*args))
        except BaseException as error:  # sys.exit() of an environment too
            reply = (request, worker.failure(error), None)
        try:
            connection.send(reply)
        except BrokenPipeError:
            os._exit(1)


def _watch_parent(parent: int) -> None:
    """End this process when the parent is gone, also while an environment hangs and no command is read."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_INTERVAL)
    os._exit(1)


class _WorkerEnvs:
    """The environments of one worker; each public method is a command."""

    def __init__(self, memory_file: int) -> None:
        self._memory_file = memory_file
        self._first_env = 0
        self._slots: list[EnvSlot] = []
        self._layout: ObservationLayout
        self._action_layout: ActionLayout
        self._reward_terms: tuple[str, ...] = ()
        self._arrays: tuple[StepArrays, StepArrays]
        self._final: Observation
        self._actions: np.ndarray
        self._stepping: np.ndarray = np.zeros(1, np.int64)

    def make(self, functions: bytes, first_env: int) -> dict[str, Any]:
        """Make the environments; tells the parent what they are like."""
        envs = [function() for function in pickle.loads(functions)]
        self._first_env = first_env
        for index, env in enumerate(envs):
            check_same_spaces(envs[0], env, first_env + index)
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
        """Open the shared memory, with the same arrays in it as the parent's."""
        arena = _Arena(mmap.mmap(self._memory_file, size))
        self._arrays, self._final = allocate_arrays(self._layout, num_envs, arena.allocate, len(self._reward_terms))
        shared = _allocate_shared(self._action_layout, num_envs, num_workers, arena.allocate)
        self._actions = shared.actions[self._first_env : self._first_env + len(self._slots)]
        self._stepping = shared.stepping[number : number + 1]

    def reset(self, current: int, seeds: list[int | None]) -> None:
        """Reset every environment into the given set of arrays."""
        for slot, seed in zip(self._slots, seeds, strict=True):
            self._stepping[0] = slot.index
            slot.reset(seed, self._arrays[current])

    def step(self, current: int) -> tuple[list[Episode], _Failure | None]:
        """Step every environment into the given set of arrays: the episodes that ended, and what an environment raised.

        After a failure the environments that follow are not stepped.
        """
        rows = self._action_layout.rows(self._action_layout.prepare(self._actions, len(self._slots)))
        arrays, final, stepping = self._arrays[current], self._final, self._stepping
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
        """The states of the environments; None where one cannot be saved."""
        try:
            return [slot.get_state(self._arrays[current]) for slot in self._slots]
        except StateObstacle:
            return None

    def set_state(self, current: int, states: list[dict[str, Any]]) -> None:
        """Go on from saved states."""
        for slot, state in zip(self._slots, states, strict=True):
            self._stepping[0] = slot.index
            slot.set_state(state, self._arrays[current])

    def state_obstacle(self) -> str | None:
        """The first environment's reason, if one has any."""
        return next((obstacle for slot in self._slots if (obstacle := slot.state_obstacle()) is not None), None)

    def call(self, name: str, *args: Any) -> list[Any]:
        """Call a method on every environment."""
        return [slot.call(name, *args) for slot in self._slots]

    def render(self, index: int) -> np.ndarray | None:
        """A picture, where the environment is one of this worker's."""
        own = index - self._first_env
        return self._slots[own].render() if 0 <= own < len(self._slots) else None

    def failure(self, error: BaseException) -> _Failure:
        """What was raised, for the parent; where the message names no environment, the one that was being worked on."""
        kind = InputError if isinstance(error, InputError) else RunError
        message = f"environment {int(self._stepping[0])}: {one_line(error)}"
        return str(error) if isinstance(error, DeftError) else message, kind, traceback.format_exc()

    def close(self) -> None:
        """Close the environments."""
        for slot in self._slots:
            slot.close()
