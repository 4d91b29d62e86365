"""Random exploration: whole episodes of random actions in `TeacherEnv`, in this process or in worker processes.

Episode n of a seed does not depend on the process that collects it or on timing: its scene and its actions follow
from (seed, n) alone. The trainers of the phases call `Explorer`; worker processes run `work`, without torch. Held-out
episodes are also collected here: half of them by an explorer that no phase trains with, scripted pushes and grasps.
"""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from deft import schema
from deft.data.augmentation import recolor_episode
from deft.data.robot_episode import RobotEpisode
from deft.envs.f1 import F1RLEnv, TeacherEnv, read_task_config
from deft.envs.process import kill, launch
from deft.envs.worker import watch_parent
from deft.errors import DeftError, InputError, RunError
from deft.runs.rollout import rollout
from deft.runs.signals import raise_if_stopped

if TYPE_CHECKING:  # workers import neither
    from deft.config.f1_settings import PhaseConfig
    from deft.models.f1.policy import F1Policy

log = logging.getLogger(__name__)
SCENES = 2**31  # training's scenes have seeds below it, held-out ones from it on
NICENESS = 5  # collecting takes what training leaves of a core
WAIT_INTERVAL = 0.2  # seconds between looks at a stop request
SCRIPTS = ("push", "pick")  # tasks whose experts push and grasp
SCRIPTED_WORLDS = ("tabletop", "deft/Tabletop-v0")
JITTER = 0.2  # noise of scripted actions, relative to the largest action


@dataclass
class Exploration:
    """What is explored: environment, seeds and colour augmentation."""

    environment: dict[str, Any]  # a task_config
    seed: int = 0
    colour_augmentation: float = 0.0
    held_out: bool = False
    scenes_kept: int = 1  # episodes a scene

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

    def choose(self, env: F1RLEnv, generator: np.random.Generator, step: int) -> np.ndarray:
        """The action at a step: uniformly random."""
        return generator.uniform(-1.0, 1.0, len(env.action_mask))

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


@dataclass
class ScriptedExploration(Exploration):
    """The environment's scripted expert, with noise."""

    def choose(self, env: F1RLEnv, generator: np.random.Generator, step: int) -> np.ndarray:
        """The expert's action, and noise."""
        action = env.expert_action()
        return (action + JITTER * generator.uniform(-1.0, 1.0, len(action)) * env.action_mask).clip(-1.0, 1.0)


def make_exploration(config: PhaseConfig, policy: F1Policy, held_out: bool = False) -> Exploration:
    """Return the exploration of a run, with frames in the model's size; held-out scenes have colours of their own."""
    model, training = policy.config, config.training
    environment = {
        "image_size": model.tokenizer.image_size,
        "n_obs_img_steps": model.n_obs_img_steps,
        "obs_img_stride": model.obs_img_stride,
        "max_steps": training.steps_per_episode,
        **config.environment,
    }
    task = read_task_config(environment, {})  # checks the settings before anything is started
    if held_out:
        return Exploration(environment, training.seed, held_out=True)
    return Exploration(environment, training.seed, training.colour_augmentation, False, task.scene_reset_interval)


def has_scripts(config: PhaseConfig) -> bool:
    """Whether the environment has scripted experts that push and grasp."""
    return config.environment.get("world", SCRIPTED_WORLDS[0]) in SCRIPTED_WORLDS


def held_out_episodes(config: PhaseConfig, policy: F1Policy, count: int, seed: int = 0) -> list[RobotEpisode]:
    """Half of the episodes scripted, pushes and grasps in turn, half random; in scenes that are never trained on.

    They measure what a world model has learned from other episodes. In an environment without such scripts all are
    random, with a warning.
    """
    scripts = SCRIPTS if has_scripts(config) else ()
    num_scripted = count // 2 if scripts else 0
    if not scripts:
        world = config.environment["world"]
        log.warning("world %s has no scripted pushes and grasps: all held-out episodes are random", world)
    environment = make_exploration(config, policy, held_out=True).environment
    found = InlineExplorer(Exploration(environment, seed, held_out=True)).take_all(count - num_scripted)
    for place, task in enumerate(scripts):
        exploration = ScriptedExploration(environment | {"task_name": task}, seed, held_out=True)
        found += InlineExplorer(exploration).take_all(len(range(place, num_scripted, len(scripts))))
    return found


class Explorer(ABC):
    """The source of a trainer's episodes: on demand, unless `ready` and `allow` are defined."""

    @abstractmethod
    def take(self, count: int) -> list[RobotEpisode]:
        """The next `count` episodes; waits for them."""

    def ready(self) -> list[RobotEpisode]:
        """Episodes that are ready, without waiting."""
        return []

    def allow(self, count: int) -> None:  # noqa: B027 (a default, not abstract)
        """Allow `count` episodes to be collected ahead."""

    @abstractmethod
    def close(self) -> None:
        """Free the environments."""


class InlineExplorer(Explorer):
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

    def take_all(self, count: int) -> list[RobotEpisode]:
        """The next `count` episodes, the last ones that are needed."""
        found = self.take(count)
        self.close()
        return found

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


class ProcessExplorer(Explorer):
    """Worker processes that explore one scene after the other, as many ahead as `allow` permits.

    A thread for each takes in what it sends, so that no worker waits while this process trains.
    """

    def __init__(self, exploration: Exploration, num_workers: int, first: int = 0, every: int = 1) -> None:
        try:
            pickle.dumps(exploration)
        except Exception as error:
            raise InputError(f"environment: cannot be sent to another process: {error}") from error
        self._next, self._every, self._kept = first, every, exploration.scenes_kept
        self._scenes: list[Future[list[RobotEpisode]]] = []  # that are being collected
        self._waiting: deque[RobotEpisode] = deque()
        self._idle: SimpleQueue[Connection] = SimpleQueue()
        self._threads = ThreadPoolExecutor(num_workers)
        self._workers: list[tuple[Connection, subprocess.Popen]] = []
        self._finalizer = weakref.finalize(self, kill, self._workers)
        for _ in range(num_workers):
            connection, process = launch("deft.training.phases.exploration", "work")
            self._workers.append((connection, process))
            connection.send(exploration)
            self._idle.put(connection)

    def allow(self, count: int) -> None:
        """Allow `count` episodes to be collected ahead."""
        while len(self._waiting) + len(self._scenes) * self._kept < count:
            self._scenes.append(self._threads.submit(self._collect, self._next))
            self._next += self._every

    def take(self, count: int) -> list[RobotEpisode]:
        """The next `count` episodes; waits for them."""
        while len(self._waiting) < count:
            raise_if_stopped()
            self.allow(count)
            wait(self._scenes, WAIT_INTERVAL, FIRST_COMPLETED)
            self._receive()
        return [self._waiting.popleft() for _ in range(count)]

    def ready(self) -> list[RobotEpisode]:
        """Episodes that are ready."""
        self._receive()
        return [self._waiting.popleft() for _ in range(len(self._waiting))]

    def close(self) -> None:
        """End the workers."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._finalizer()

    def _receive(self) -> None:
        for scene in [scene for scene in self._scenes if scene.done()]:
            self._scenes.remove(scene)
            self._waiting.extend(scene.result())

    def _collect(self, index: int) -> list[RobotEpisode]:
        """Let an idle worker collect the episodes of a scene."""
        connection = self._idle.get()
        try:
            connection.send(index)
            found = [connection.recv()]
            while isinstance(found[-1], RobotEpisode) and len(found) < self._kept:
                found.append(connection.recv())
        except (EOFError, OSError):
            found = [RunError("a process that collects episodes ended: it was killed, or its simulator crashed")]
        finally:
            self._idle.put(connection)
        if isinstance(found[-1], DeftError):
            raise found[-1]
        return found


def work(connection_number: int, parent: int) -> None:
    """Run a worker: collect the scenes that it receives, until the connection closes."""
    threading.Thread(target=watch_parent, args=(parent,), daemon=True).start()
    os.nice(NICENESS)
    connection = Connection(connection_number)
    try:
        exploration: Exploration = connection.recv()
        env = exploration.make_env()
        while True:
            for episode in exploration.block(env, connection.recv()):
                connection.send(episode)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    except DeftError as error:
        connection.send(error)
    except Exception as error:
        connection.send(RunError(f"collecting episodes failed: {type(error).__name__}: {error}"))
