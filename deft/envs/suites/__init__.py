"""Benchmark suites whose packages need versions of their own: each runs in its own interpreter.

`deft suite install NAME` makes a virtual environment for a suite with the exact versions of its lock file
(`install.py`). The environments run in worker processes of that interpreter, with the protocol of `ProcessVectorEnv`.

To add a suite, write one module with its environment and a `SUITE`, a lock file `NAME.lock` beside it, and a line in
`SUITES`. The module is imported in both interpreters: it imports the suite's own packages when an environment is made,
and otherwise only Gymnasium and NumPy. `deft suite check NAME --update` writes `NAME.fingerprint.json`.
"""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gymnasium.envs.registration import EnvSpec

from deft.errors import InputError

if TYPE_CHECKING:
    from deft.envs.process import Interpreter

SUITES = {
    "metaworld": "deft.envs.suites.metaworld",
    "pusht": "deft.envs.suites.pusht",
    "aloha": "deft.envs.suites.aloha",
    "gym-hil": "deft.envs.suites.gym_hil",
    "libero": "deft.envs.suites.libero",
}
"""The module of each suite."""
NUM_NEAREST = 3  # names in an error message


@dataclass(frozen=True)
class Suite:
    """A benchmark suite: its tasks and how its papers evaluate them."""

    name: str
    entry_point: str
    """`module:class` of its environment. The constructor takes `task`, and for groups of tasks `stride`."""
    package: str
    """The distribution whose version is that of the suite."""
    tasks: Mapping[str, str]
    """The instruction of each task."""
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names of several tasks: each episode plays one of them, in turn."""
    default_task: str | None = None
    """The task of the id `NAME` alone; None: the id must name a task."""
    max_episode_steps: int = 500
    horizons: Mapping[str, int] = field(default_factory=dict)
    """Time limits of tasks and groups that have their own."""
    numbers_episodes: bool = False
    """Whether environments of single tasks take `stride` too, because episodes are numbered."""
    protocol: str = ""
    """How its papers evaluate; `deft evaluate --suite` prints it, with the number and the length of the episodes."""
    scripted_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for policies that read no observation: without cameras, episodes take less time."""
    evaluation_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that every evaluation has, in place of those of the policy's training."""
    path_variable: str | None = None
    """The environment variable of the folder with files that no package contains, which `--suite-path` also names.

    The constructor of the environment takes it as `suite_path`. None: the packages are complete.
    """
    fingerprint_task: str | None = None
    """The group that `deft suite check` plays in one environment; by default each task in an environment of its own."""
    fingerprint_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of its environment."""
    fingerprint_expert: bool = True
    """Whether the scripted expert plays its episodes, if there is one; an expert may amplify rounding."""
    lock_file: Path | None = None
    """By default `NAME.lock` in this package."""
    fingerprint_file: Path | None = None
    """By default `NAME.fingerprint.json` in this package."""

    @cached_property
    def lock(self) -> Path:
        """The file of exact versions, in pip's format for requirements."""
        return self.lock_file or Path(__file__).parent / f"{self.name}.lock"

    @cached_property
    def fingerprint(self) -> Path:
        """The file of expected initial states, images and returns."""
        return self.fingerprint_file or Path(__file__).parent / f"{self.name}.fingerprint.json"

    def find(self, env_id: str) -> str:
        """Return the task or group that an id `NAME/TASK` names; raise InputError with the nearest names."""
        task = env_id.partition("/")[2] or self.default_task
        known = [*self.groups, *self.tasks]
        if task in known:
            return str(task)
        if task is None:
            raise InputError(f"{env_id}: names no task; use for example {self.name}/{known[0]}")
        lower = {name.lower(): name for name in known}
        nearest = difflib.get_close_matches(task.lower(), lower, n=NUM_NEAREST, cutoff=0.4)
        names = [lower[match] for match in nearest] or known[:NUM_NEAREST]
        raise InputError(f"{env_id}: {self.name} has no task {task!r}; the nearest are {', '.join(names)}")

    def tasks_of(self, env_id: str) -> list[str]:
        """Return the tasks that an id names: one, or those of a group."""
        task = self.find(env_id)
        return list(self.groups.get(task, (task,)))

    def time_limit(self, env_id: str) -> int:
        """Return the time limit of the episodes of a task or group."""
        return self.horizons.get(self.find(env_id), self.max_episode_steps)

    def spec(self, env_id: str, num_envs: int = 1, path: str | None = None) -> EnvSpec:
        """Return the Gymnasium spec of one of `num_envs` environments; `path` is the folder of further files."""
        task = self.find(env_id)
        kwargs: dict[str, Any] = {"task": task}
        if self.path_variable is None and path is not None:
            raise InputError(f"suite_path {path}: the packages of {self.name} are complete; leave it out")
        if folder := path or os.environ.get(self.path_variable or ""):
            kwargs["suite_path"] = str(Path(folder).expanduser().absolute())
        if task in self.groups or self.numbers_episodes:
            # Environment i of N plays the tasks i, i + N, i + 2N, … of the group: each equally often over all of them.
            kwargs["stride"] = num_envs
        return EnvSpec(
            f"{self.name}/{task}",
            self.entry_point,
            max_episode_steps=self.time_limit(env_id),
            order_enforce=False,
            kwargs=kwargs,
        )

    def check_installed(self, user: str) -> None:
        """Raise InputError with the remedy unless the suite is completely installed; `user` is what needs it."""
        from deft.envs.suites.install import INSTALLED, state_of

        state = state_of(self)
        if state != INSTALLED:
            raise InputError(f"{user}: the suite {self.name} is {state}: deft suite install {self.name}")

    def interpreter(self) -> Interpreter:
        """Return the interpreter in which its environments run."""
        from deft.envs.process import Interpreter
        from deft.envs.suites.install import python_of

        return Interpreter(str(python_of(self)), f"deft suite install {self.name} repairs a damaged installation")


def suite_of(env_id: str | None) -> Suite | None:
    """Return the suite that an environment's id starts with; None for any other environment."""
    name = (env_id or "").partition("/")[0]
    return find_suite(name) if name in SUITES else None


def find_suite(name: str) -> Suite:
    """Return a suite by its name."""
    if name not in SUITES:
        raise InputError(f"{name}: there is no suite of this name; the suites are {', '.join(SUITES)}")
    suite: Suite = importlib.import_module(SUITES[name]).SUITE
    return suite
