"""Random exploration: whole episodes of random actions in `TeacherEnv`, in this process or in worker processes.

Episode n of a seed does not depend on the process that collects it or on timing: its scene and its actions follow
from (seed, n) alone. The trainers of the phases call `Explorer`; worker processes run `work`, without torch.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import numpy as np

from deft import schema, trust
from deft.data.augmentation import recolor_episode
from deft.data.robot_episode import RobotEpisode
from deft.envs.f1 import F1RLEnv, TeacherEnv
from deft.errors import DeftError, InputError, RunError
from deft.runs.rollout import rollout
from deft.runs.signals import raise_if_stopped

SCENES = 2**31  # training's scenes have seeds below it, held-out ones from it on
NICENESS = 5  # collecting takes what training leaves of a core
WAIT_INTERVAL = 0.2  # seconds between looks at a stop request
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
WORKER_CODE = (
    # A stop request is for the run, which ends its workers.
    "import signal; [signal.signal(n, signal.SIG_IGN) for n in (signal.SIGHUP, signal.SIGUSR1)]; "
    "from deft.training.phases.exploration import work; work({connection}, {parent})"
)


@dataclass
class Exploration:
    """What is explored: environment, seeds and colour augmentation."""

    environment: dict[str, Any]  # a task_config
    seed: int = 0
    colour_augmentation: float = 0.0
    held_out: bool = False
    scenes_kept: int = field(default=1)  # episodes a scene

    def make_env(self) -> F1RLEnv:
        """Make an environment."""
        return TeacherEnv(self.environment)

    def block(self, env: F1RLEnv, index: int) -> Iterator[RobotEpisode]:
        """The episodes of one scene."""
        for number in range(self.scenes_kept):
            yield self.episode(env, index * self.scenes_kept + number, None if number else self.scene_seed(index))

    def scene_seed(self, index: int) -> int:
        """The seed of a scene; held-out scenes never occur in training, for any seed."""
        seed = (self.seed * 1_000_003 + index) % SCENES
        return seed + SCENES if self.held_out else seed

    def action(self, generator: np.random.Generator, step: int, size: int) -> np.ndarray:
        """The action at a step: uniformly random."""
        return generator.uniform(-1.0, 1.0, size)

    def choose(self, env: F1RLEnv, generator: np.random.Generator, step: int) -> np.ndarray:
        """The action, for explorers that use the environment's state."""
        return self.action(generator, step, len(env.action_mask))

    def episode(self, env: F1RLEnv, number: int, scene_seed: int | None) -> RobotEpisode:
        """An episode of random actions."""
        generator = np.random.default_rng([self.seed, number, int(self.held_out)])
        observation, _ = env.reset(seed=scene_seed)
        observations = [observation]
        actions: list[np.ndarray] = []

        def choose(_: Any) -> np.ndarray:
            raise_if_stopped()
            return self.choose(env, generator, len(actions)).astype(np.float32)

        def sink(_: Any, __: Any, answer: tuple[Any, ...]) -> bool:
            observations.append(answer[0])
            actions.append(answer[4]["executed_action"])
            return bool(answer[2] or answer[3])

        rollout(env, choose, sink, observation)

        def frames(camera: str) -> np.ndarray | None:
            return np.stack([seen[camera][-1] for seen in observations]) if camera in observation else None

        found = RobotEpisode(
            wrist=frames(schema.WRIST_RGB),
            state=np.stack([seen[schema.STATE] for seen in observations]).astype(np.float32),
            action=np.stack(actions).astype(np.float32),
            head=frames(schema.HEAD_RGB),
            number=number,
        )
        return recolor_episode(found, generator, self.colour_augmentation)


class Explorer(Protocol):
    """Where a trainer gets its episodes from."""

    def take(self, count: int) -> list[RobotEpisode]:
        """The next `count` episodes; waits for them."""

    def ready(self) -> list[RobotEpisode]:
        """Episodes that are ready, without waiting."""

    def allow(self, count: int) -> None:
        """Allow `count` episodes to be collected ahead."""

    def close(self) -> None:
        """Free the environments."""


class InlineExplorer:
    """Collects on demand: always the same episodes in the same order.

    `first` and `every` split the scenes among processes.
    """

    def __init__(self, exploration: Exploration, first: int = 0, every: int = 1) -> None:
        self.exploration = exploration
        self._env: F1RLEnv | None = None
        self._next, self._every = first, every
        self._waiting: deque[RobotEpisode] = deque()

    def take(self, count: int) -> list[RobotEpisode]:
        """The next `count` episodes."""
        if self._env is None:
            self._env = self.exploration.make_env()
        while len(self._waiting) < count:
            self._waiting.extend(self.exploration.block(self._env, self._next))
            self._next += self._every
        return [self._waiting.popleft() for _ in range(count)]

    def ready(self) -> list[RobotEpisode]:
        """Nothing: episodes are collected on demand."""
        return []

    def allow(self, count: int) -> None:
        """Nothing: episodes are collected on demand."""

    def skip(self, count: int) -> None:
        """Skip the first `count` episodes, as if they had been taken."""
        kept = self.exploration.scenes_kept
        self._waiting.clear()
        self._next += count // kept * self._every
        if count % kept:
            self.take(count % kept)

    def close(self) -> None:
        """Free the simulation."""
        if self._env is not None:
            self._env.close()
            self._env = None


class ProcessExplorer:
    """Worker processes that explore one scene after the other, and are held back when they are too far ahead.

    A thread takes in what they send, so that they need not wait while this process trains.
    """

    def __init__(self, exploration: Exploration, num_workers: int, first: int = 0, every: int = 1) -> None:
        check_exploration(exploration)
        self._next, self._every = first, every
        self._kept = exploration.scenes_kept
        self._allowed = 0  # episodes that may still be started
        self._waiting: deque[RobotEpisode] = deque()
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._workers = [_launch(exploration) for _ in range(num_workers)]
        self._idle: list[Connection] = []
        self._starting = {connection for connection, _ in self._workers}
        self._busy: set[Connection] = set()
        self._finalizer = weakref.finalize(self, _kill, list(self._workers))
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def allow(self, count: int) -> None:
        """Allow `count` episodes to be collected ahead."""
        with self._changed:
            self._allowed = max(0, count - len(self._waiting) - len(self._busy) * self._kept)
            self._give_work()

    def take(self, count: int) -> list[RobotEpisode]:
        """The next `count` episodes; waits for them."""
        with self._changed:
            while len(self._waiting) < count and self._failure is None:
                raise_if_stopped()
                under_way = len(self._busy) * self._kept
                self._allowed = max(self._allowed, count - len(self._waiting) - under_way)
                self._give_work()
                self._changed.wait(WAIT_INTERVAL)
            self._check()
            return [self._waiting.popleft() for _ in range(count)]

    def ready(self) -> list[RobotEpisode]:
        """Episodes that are ready."""
        with self._changed:
            self._check()
            found = list(self._waiting)
            self._waiting.clear()
            return found

    def close(self) -> None:
        """End the workers."""
        with self._changed:
            self._closed = True
        self._listener.join(5.0)
        self._finalizer()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _give_work(self) -> None:
        while self._idle and self._allowed > 0:
            connection = self._idle.pop()
            connection.send(self._next)
            self._next += self._every
            self._allowed -= self._kept
            self._busy.add(connection)

    def _listen(self) -> None:
        while True:
            with self._changed:
                if self._closed or self._failure is not None:
                    return
                listening = [*self._busy, *self._starting]
            if not listening:
                time.sleep(0.01)
            for connection in wait(listening, 0.1) if listening else ():
                self._receive(connection)

    def _receive(self, connection: Any) -> None:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            message = RunError("a process that collects episodes ended: it was killed, or its simulator crashed")
        with self._changed:
            if isinstance(message, BaseException):
                self._failure = message
            elif isinstance(message, RobotEpisode):
                self._waiting.append(message)
            else:  # done with its scene, or ready for the first
                self._busy.discard(connection)
                self._starting.discard(connection)
                self._idle.append(connection)
                self._give_work()
            self._changed.notify_all()


def _launch(exploration: Exploration) -> tuple[Connection, subprocess.Popen]:
    ours, theirs = Pipe()
    code = WORKER_CODE.format(connection=theirs.fileno(), parent=os.getpid())
    process = subprocess.Popen(
        trust.child_command(code),
        stdin=subprocess.DEVNULL,
        env={"LP_NUM_THREADS": "0", **os.environ, **dict.fromkeys(ONE_THREAD, "1")},
        pass_fds=(theirs.fileno(),),
        process_group=0,  # Ctrl-C goes to the parent, who decides
    )
    theirs.close()
    ours.send(exploration)
    return ours, process


def _kill(workers: list[tuple[Connection, subprocess.Popen]]) -> None:
    for _, process in workers:
        process.kill()
    for connection, process in workers:
        process.wait()
        connection.close()


def work(connection_number: int, parent: int) -> None:
    """Run a worker: collect the scenes that it receives, until the connection closes."""
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    os.nice(NICENESS)
    connection = Connection(connection_number)
    try:
        exploration: Exploration = connection.recv()
        env = exploration.make_env()
        connection.send(None)
        while True:
            for episode in exploration.block(env, connection.recv()):
                connection.send(episode)
            connection.send(None)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    except DeftError as error:
        connection.send(error)
    except Exception as error:
        connection.send(RunError(f"collecting episodes failed: {type(error).__name__}: {error}"))


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def check_exploration(exploration: Exploration) -> None:
    """Raise an error for what cannot be sent to a worker."""
    try:
        pickle.dumps(exploration)
    except Exception as error:
        raise InputError(f"environment: cannot be sent to another process: {error}") from error
