"""How collection and training take turns: one after the other (standard mode), or side by side (VLA mode).

The trainer sees one contract: `start`, `gather` a rollout's worth of steps, `publish` new weights, `close`.

In VLA mode a thread collects with a snapshot of the policy that changes only between two steps. It is held back, never
made to throw data away: it steps only while the weights that act are at most `max_staleness` versions older than those
that will train on the step, and while nothing unread would be overwritten.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDict

from deft.algorithms.algorithm import Algorithm, Metrics
from deft.data.rollout import RolloutBuffer, VLABuffer
from deft.errors import RunError
from deft.models.policy import Policy
from deft.models.targets import frozen_copy
from deft.training.collector import Collector

log = logging.getLogger(__name__)
WATCH_INTERVAL = 0.2  # seconds between looks at the clock and the stop signal while waiting


# Saved where the environments' state is not known: on resume they start new episodes, and no half rollout is kept.
UNKNOWN_COLLECTOR: dict[str, Any] = {"env": None, "memory": None, "started": True, "step_counts": []}


class Collection:
    """What the trainer sees: steps are gathered, then learned from, then the new weights act."""

    max_rounds: int = 1
    """How often a rollout's steps are gathered at most before an update."""

    def __init__(self, collector: Collector, buffer: Any) -> None:
        self.collector = collector
        self.buffer = buffer
        self.in_update = 0
        """Vector steps of an update that was stopped before it was complete; 0 where there is none."""

    def check_length(self, num_env_steps: int, planned: int) -> None:
        """Raise an error if a run of `planned` env steps makes no update; warn if its first part makes none."""

    def start(self, rollout_steps: int, total_steps: int | None) -> None:
        """Called once, before the first `gather`. Nothing runs by itself."""

    def gather(self, num_vector_steps: int, stop: Callable[[], bool]) -> bool:
        """Collect until `num_vector_steps` wait to be learned from; False if `stop` came first."""
        raise TypeError(f"{type(self).__name__} does not define gather")

    def batches(self, num_vector_steps: int) -> Iterator[Any]:
        """What the algorithm learns from."""
        return self.buffer.batches(num_vector_steps)

    def update(self, algorithm: Algorithm, num_vector_steps: int, stop: Callable[[], bool]) -> Metrics | None:
        """Let the algorithm learn from them; None if `stop` came first, and the rest of the update is left to do."""
        algorithm.should_stop = stop
        metrics = algorithm.update(self.batches(num_vector_steps))
        self.in_update = 0 if algorithm.unfinished is None else num_vector_steps
        return None if self.in_update else metrics

    def counts_in_update(self) -> list[int]:
        """Env steps of each vector step of an update that was stopped."""
        return list(itertools.islice(self.collector.step_counts, self.in_update))

    @property
    def pending(self) -> int:
        """Vector steps that wait to be learned from."""
        return len(self.collector.step_counts)

    def steps_under_way(self, most_per_step: int) -> int:
        """Env steps that wait, at most so many in a vector step; for the progress bar."""
        return self.pending * most_per_step

    def drop(self) -> int:
        """Forget the steps that wait; how many they were."""
        count = self.pending
        self.buffer.clear()
        self.collector.step_counts.clear()
        return count

    def publish(self, version: int) -> None:
        """The collector acts with the learner's weights already; only their number changes."""
        self.collector.set_version(version)

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Nothing to hold."""
        return contextlib.nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """The collector's state; call it while `paused`."""
        return self.collector.state_dict()

    def unknown_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The states of collector and buffer to save where the environments' is not known."""
        return UNKNOWN_COLLECTOR, {}

    def load_state_dict(self, state: dict[str, Any], buffer: dict[str, Any], same_rollout: bool) -> bool:
        """Go on from there; False where the environments' state is not known and they begin new episodes.

        Without `same_rollout` a rollout has another length now, and the steps of a begun one are dropped.
        """
        known = self.collector.load_state_dict(state)
        if known and buffer and not same_rollout:
            log.warning("%d collected steps are dropped: buffer_size changed", self.pending)
            self.collector.step_counts.clear()
        elif known:
            self.buffer.load_state_dict(buffer)
        return known

    def close(self) -> None:
        """Stop what collects by itself."""
        self.collector.close()


class InlineCollection(Collection):
    """Standard mode: collect when asked, with the learner's own weights."""

    buffer: RolloutBuffer

    def gather(self, num_vector_steps: int, stop: Callable[[], bool]) -> bool:
        """Fill the buffer to `num_vector_steps`; False if `stop` came first."""
        wanted = num_vector_steps - len(self.buffer)
        return self.collector.collect(self.buffer, wanted, stop) == wanted


class BackgroundCollection(Collection):
    """VLA mode: a thread writes the ring while the main thread trains."""

    buffer: VLABuffer

    def __init__(
        self, collector: Collector, buffer: VLABuffer, learner: Policy, max_staleness: int, timeout: float
    ) -> None:
        super().__init__(collector, buffer)
        self.learner = learner
        self.max_staleness = max_staleness
        self.timeout = timeout
        collector.policy = frozen_copy(learner)
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._stopping = False
        self._pauses = 0
        self._idle = True
        self._rollout_steps = 1
        self._total_steps: int | None = None
        self._position = 0  # steps since the first unread one at the start
        self._published = 0  # updates since the start

    def start(self, rollout_steps: int, total_steps: int | None) -> None:
        """Begin to collect, in rollouts of `rollout_steps`, `total_steps` in all (what the buffer holds counted in)."""
        self._rollout_steps, self._total_steps = rollout_steps, total_steps
        # An update that was stopped is still to be published: the steps here are those of the next ones.
        self._position, self._published = len(self.buffer), -1 if self.in_update else 0
        self._stopping, self._error, self.collector.stepping_since = False, None, None
        self.collector.policy.load_state_dict(self.learner.state_dict())
        self._thread = threading.Thread(target=self._run, name="deft-collector", daemon=True)
        self._thread.start()

    def gather(self, num_vector_steps: int, stop: Callable[[], bool]) -> bool:
        """Wait until `num_vector_steps` are there; False if `stop` came first. The collector's errors surface here."""
        with self._condition:
            while len(self.buffer) < num_vector_steps:
                self._check()
                if stop():
                    return False
                self._condition.wait(WATCH_INTERVAL)
        return True

    def batches(self, num_vector_steps: int) -> Iterator[TensorDict]:
        """What the algorithm learns from; the ring has room again as soon as it is taken out."""
        for batch in self.buffer.batches(num_vector_steps):
            with self._condition:
                self._condition.notify_all()
            yield batch

    def publish(self, version: int) -> None:
        """Give the collector the learner's weights, between two of its steps."""
        with self.paused():
            self.collector.policy.load_state_dict(self.learner.state_dict())
            self.collector.set_version(version)
            self._published += 1

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Hold the collector between two steps."""
        with self._condition:
            self._pauses += 1
        try:
            with self._condition:
                while not self._idle:
                    self._check()
                    self._condition.wait(WATCH_INTERVAL)
            yield
        finally:
            with self._condition:
                self._pauses -= 1
                self._condition.notify_all()

    def close(self) -> None:
        """Stop the thread after the step under way; one that hangs is left behind and ends with the process."""
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        while self._thread is not None and self._thread.is_alive() and not self._is_hung():
            self._thread.join(WATCH_INTERVAL)
        self._thread = None

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._wait_for_turn():
                    following = self._position + 1
                    ends_segment = following % self._rollout_steps == 0 or following == self._total_steps
                    self.collector.step(self.buffer, ends_segment)
                    self._position = following
        except BaseException as error:
            # Raised in the main thread when it next waits; said now, for an update may be long.
            self._error = error
            log.error("the collector stopped: %s: %s", type(error).__name__, error)
        finally:
            with self._condition:
                self._idle = True
                self._condition.notify_all()

    def _wait_for_turn(self) -> bool:
        """Between two steps: wait until the next may begin. False when the thread is to end."""
        with self._condition:
            self._idle = True
            self._condition.notify_all()
            while not self._stopping and (self._pauses or not self._admitted()):
                self._condition.wait()
            self._idle = False
            return not self._stopping

    def _admitted(self) -> bool:
        if self._position == self._total_steps or len(self.buffer) == self.buffer.capacity:
            return False
        # Step p belongs to rollout p // T, which trains when that many updates are published.
        return self._position // self._rollout_steps - self._published <= self.max_staleness

    # -- in the main thread --------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._is_hung():
            raise RunError(f"the environment did not answer for {self.timeout:g} s (env.timeout); it is taken for hung")

    def _is_hung(self) -> bool:
        if self.collector.env.notices_hangs:
            return False
        since = self.collector.stepping_since
        return since is not None and time.monotonic() - since > self.timeout
