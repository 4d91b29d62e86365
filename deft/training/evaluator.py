"""Evaluates policies in an environment of their own, in this process or in a background process.

With a GPU the trainer sends a copy of the weights and continues training, while CPU cores play the episodes.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import multiprocessing
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium
import torch

from deft import trust
from deft.envs.vector import VectorEnv
from deft.errors import InputError, RunError
from deft.evaluation.rollouts import evaluate_policy, record_video
from deft.models.policy import Policy
from deft.runs.random_state import separate_random_state
from deft.runs.signals import STOPPING, never

WATCH_INTERVAL = 0.2  # seconds between looks at the stop signal while waiting


class Evaluator:
    """Plays `episodes` episodes with each of the policies it is given, always from the same seeds."""

    def __init__(
        self,
        make_env: Callable[[], VectorEnv],
        seed: int,
        in_background: bool = False,
        deterministic: bool = True,
        video_env: Callable[[], gymnasium.Env] | None = None,
        separates_random_state: bool = True,
    ) -> None:
        """Without `separates_random_state` another thread draws from the generators, which cannot be restored then."""
        self._make_env, self._seed, self._deterministic = make_env, seed, deterministic
        self._video_env, self._separates = video_env, separates_random_state
        self.in_background = in_background
        self._env: VectorEnv | None = None
        self._pool: concurrent.futures.ProcessPoolExecutor | None = None
        self._pending: list[tuple[int, concurrent.futures.Future[list[dict[str, Any]]]]] = []

    def env(self) -> VectorEnv:
        """The environment, made when it is first needed."""
        if self._env is None:
            self._env = self._make_env()
        return self._env

    def evaluate(
        self,
        policies: list[Policy],
        episodes: int,
        watch: Callable[[int], None] | None = None,
        video: Path | None = None,
    ) -> list[dict[str, Any]]:
        """The results of each policy, now, with a `video` of the first; `watch` as in `play_episodes`."""
        seed, deterministic = self._seed, self._deterministic
        if video is not None and self._video_env is None:
            raise InputError("video: there is no environment to record")
        with separate_random_state(seed) if self._separates else contextlib.nullcontext():
            results = [
                evaluate_policy(policy, self.env(), episodes, seed, deterministic=deterministic, watch=watch)
                for policy in policies
            ]
            if video is not None and self._video_env is not None:
                written = record_video(policies[0], self._video_env(), video, 1, seed, deterministic, watch)
                results[0]["video"] = str(written)
        return results

    def start(
        self, step: int, policies: list[Policy], episodes: int, watch: Callable[[int], None] | None = None
    ) -> list[tuple[int, list[dict[str, Any]]]]:
        """Evaluate; return the results, or nothing if they come from `finished` later (in the background)."""
        if not self.in_background:
            return [(step, self.evaluate(policies, episodes, watch))]
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = concurrent.futures.ProcessPoolExecutor(1, context, _ignore_signals)
        copies = [copy.deepcopy(policy).cpu() for policy in policies]
        task = (trust.snapshot(), self._make_env, copies, episodes, self._seed, self._deterministic)
        self._pending.append((step, self._pool.submit(_evaluate_in_background, cloudpickle.dumps(task))))
        return []

    def finished(self, wait: bool = False, stop: Callable[[], bool] = never) -> list[tuple[int, list[dict[str, Any]]]]:
        """Results that arrived since the last call, in order; with `wait` all, unless `stop` becomes true first."""
        results = []
        while self._pending and (wait or self._pending[0][1].done()):
            if not self._pending[0][1].done():
                if stop():
                    break
                concurrent.futures.wait([self._pending[0][1]], WATCH_INTERVAL)
                continue
            step, future = self._pending.pop(0)
            try:
                results.append((step, future.result()))
            except concurrent.futures.BrokenExecutor as error:
                reason = "was it killed, or short of memory?"
                raise RunError(f"the process of the evaluation at step {step} died; {reason}") from error
        return results

    @property
    def pending(self) -> list[int]:
        """Steps whose results have not arrived yet."""
        return [step for step, _ in self._pending]

    def close(self) -> None:
        """Free the environment and the process."""
        if self._env is not None:
            self._env.close()
            self._env = None
        if self._pool is not None:
            # An evaluation whose results are not read would delay the end of this process.
            workers = list((self._pool._processes or {}).values()) if self._pending else []
            self._pool.shutdown(wait=not workers, cancel_futures=True)
            for worker in workers:
                worker.kill()
            self._pool, self._pending = None, []


def check_spaces(env: VectorEnv, policy_observation: Any, policy_action: Any, where: str, advice: str) -> None:
    """Raise an error if an environment's observations or actions are not the dataset's."""
    check_space("observation", env.observation_space, policy_observation, where, advice)
    check_space("action", env.action_space, policy_action, where, advice)


def check_space(kind: str, theirs: Any, own: Any, where: str, advice: str) -> None:
    """Raise an error if the space of an environment has other names or shapes than the dataset's."""
    if _shape(theirs) != _shape(own):
        raise InputError(f"{where}: the environment's {kind}s are {theirs}, the dataset's {own}; {advice}")


def _shape(space: Any) -> Any:
    nested = getattr(space, "spaces", None)
    if isinstance(nested, dict):
        return {name: _shape(part) for name, part in nested.items()}
    return tuple(space.shape) if space.shape is not None else str(space)


def _ignore_signals() -> None:
    """In the other process: a stop request is for the run, which then ends this."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)


def _evaluate_in_background(task: bytes) -> list[dict[str, Any]]:
    """In the other process."""
    torch.set_num_threads(1)
    state, make_env, policies, episodes, seed, deterministic = cloudpickle.loads(task)
    trust.restore(state)
    evaluator = Evaluator(make_env, seed, deterministic=deterministic)
    try:
        return evaluator.evaluate(policies, episodes)
    finally:
        evaluator.close()
