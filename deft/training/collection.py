"""Collection: a policy acts in a vector environment, transitions go into a buffer, and an algorithm learns from them.

The trainer sees one contract, `Collection`: `start`, `gather` a rollout's worth of steps, `update`, `publish` new
weights, `close`. In standard mode collecting and learning take turns.

In VLA mode a thread collects with a snapshot of the policy that changes only between two steps. It is held back and
never discards data: it steps only while the weights that act are at most `max_staleness` versions older than those that
will train on the step, and while no unread data would be overwritten.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from deft import schema
from deft.algorithms.algorithm import Algorithm, Metrics
from deft.data.rollout import RolloutBuffer, VLABuffer
from deft.data.tensors import Key, Row, are_finite, check_log_prob, policy_inputs, to_numpy, zero_rows
from deft.envs.layout import Observation, first_not_finite, take_rows
from deft.envs.vector import Episode, VectorEnv, VectorStep
from deft.errors import InputError, RunError
from deft.models.policy import Policy
from deft.models.targets import frozen_copy
from deft.runs.rollout import rollout
from deft.runs.signals import never
from deft.training.takeover import Takeover

log = logging.getLogger(__name__)
WATCH_INTERVAL = 0.2  # seconds between looks at the clock and the stop signal while waiting
# Saved where the environments' state is not known: on resume they start new episodes, and no half rollout is kept.
UNKNOWN_COLLECTOR: dict[str, Any] = {"env": None, "memory": None, "started": True, "step_counts": []}


class StepBuffer(Protocol):
    """A buffer that a collector writes to."""

    def write(self, row: Row) -> None:
        """Store one step of all environments."""


class Collector:
    """Steps a vector environment with a policy and writes transitions into a buffer.

    Where a segment of a rollout ends without its next row (truncation, the rollout's last step) the transition carries
    V(true final observation). With `next_observation=True` it carries the next observation instead, for algorithms
    that learn from single transitions. With `reward_terms=True` it carries the reward's named terms, where the
    environment has any.
    """

    def __init__(
        self,
        env: VectorEnv,
        policy: Policy,
        seed: int = 0,
        next_observation: bool = False,
        reward_terms: bool = False,
    ) -> None:
        self.env = env
        self.policy = policy
        self.seed = seed
        self.version = 0
        self.episodes: deque[Episode] = deque()
        """Episodes that finished since `take_episodes`."""
        self.num_lost_episodes = 0
        """Episodes lost with a worker process that failed; they are not in `episodes`."""
        self.stepping_since: float | None = None
        """Start time of the environment step under way; a watchdog in another thread reads it."""
        self.step_counts: deque[int] = deque()
        """Env steps of each vector step that was written and not yet counted by `take_step_count`."""
        self.steps_left: int | None = None
        """Env steps to the end of the run, if known; workers may have collected more."""
        self.explore: Callable[[], np.ndarray | None] | None = None
        """Called before the policy acts: returns actions [N, …] that replace the policy's, or None."""
        self.before_stepping: Callable[[], None] | None = None
        """Called when the actions are known: it may start GPU work that runs while the environments step."""
        self.takeover: Takeover | None = None
        """Lets a person act in an environment; their actions replace the policy's."""
        self.device = next(iter(policy.parameters())).device
        self._next_observation = next_observation
        self._reward_terms = reward_terms and len(env.reward_terms) > 0
        self._versions: Any = np.zeros(env.num_envs, np.int64)
        self._no_values: Any = np.zeros(env.num_envs, np.float32)
        if env.device is not None:
            self._versions, self._no_values = (
                torch.as_tensor(zeros, device=env.device) for zeros in (self._versions, self._no_values)
            )
        self._mask: Tensor | None = None
        if env.action_mask is not None:
            self._mask = torch.as_tensor(env.action_mask, device=self.device).expand(env.num_envs, -1)
        self._observation: Observation | None = None
        self._memory: Tensor | None = None
        self._row: dict[Key, Any] = {}  # the step under way
        self._next_memory: Tensor | None = None

    @torch.inference_mode()
    def collect(self, buffer: StepBuffer, num_vector_steps: int, stop: Callable[[], bool] = never) -> int:
        """Write `num_vector_steps` steps of every environment, the last one as a segment's end; return their number.

        It is smaller if `stop` became true first.
        """
        made = 0

        def sink(_: Any, __: Any, step: VectorStep) -> None:
            nonlocal made
            made += 1
            self._write(buffer, step, ends_segment=made == num_vector_steps)

        rollout(self.env, self._choose, sink, None, num_vector_steps, stop)
        return made

    def collect_steps(self, num_steps: int) -> TensorDict:
        """Collect `num_steps` transitions in total over all environments, as a rollout [num_steps / N, N]."""
        rows, rest = divmod(num_steps, self.env.num_envs)
        if rest or not rows:
            raise InputError(
                f"collect_steps({num_steps}): steps are counted over all {self.env.num_envs} environments together "
                "and must be a multiple of their number"
            )
        buffer = RolloutBuffer(rows, self.env.device)
        self.collect(buffer, rows)
        return buffer.get()

    def step(self, buffer: StepBuffer, ends_segment: bool) -> None:
        """Make one step of every environment; the caller is in inference mode."""
        rollout(self.env, self._choose, lambda _, __, step: self._write(buffer, step, ends_segment), None, 1)

    def _write(self, buffer: StepBuffer, step: VectorStep, ends_segment: bool) -> None:
        row, next_memory = self._row, self._next_memory
        self._complete(step)
        if self._next_observation:
            _flat_observation(row, step.next_observation(), schema.NEXT_OBSERVATION)
            if len(step.lost_index):  # steps that failed led nowhere
                row[schema.STEP_MASK] = self._no_values == 0  # all True
                row[schema.STEP_MASK][step.lost_index] = False
        else:
            row[schema.NEXT_VALUE] = self._bootstrap(step, next_memory, ends_segment)
        # Count before writing: a trainer in another thread reads the count of the steps that it finds in the buffer.
        self.episodes.extend(step.episodes)
        self.num_lost_episodes += len(step.lost_index)
        self.step_counts.append(int(step.num_steps.sum()) if self.env.chunk_length > 1 else self.env.num_envs)
        buffer.write(row)

    @property
    def observation(self) -> Observation | None:
        """The latest observation; None before the first episode starts."""
        return self._observation

    def take_episodes(self) -> list[Episode]:
        """Return the episodes that finished since the last call."""
        return [self.episodes.popleft() for _ in range(len(self.episodes))]

    def take_step_count(self, num_vector_steps: int) -> int:
        """Return the env steps, over all environments, of the oldest `num_vector_steps` that were not yet counted."""
        return sum(self.step_counts.popleft() for _ in range(num_vector_steps))

    def close(self) -> None:
        """Stop collecting; a collector in this process has only the offer to take over."""
        if self.takeover is not None:
            self.takeover.close()

    def set_version(self, version: int) -> None:
        """Set the version of the weights that act from here on."""
        self.version = version
        self._versions = self._versions * 0 + version

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all environments; `env` is None if it cannot be saved."""
        started = self._observation is not None
        return {
            "env": self.env.get_state() if started else None,
            "memory": None if self._memory is None else self._memory.clone().cpu(),
            "started": started,
            "step_counts": list(self.step_counts),
        }

    @torch.inference_mode()  # as in `collect`: environments with tensors may have allocated them there
    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restore the state; return False if the environments' state is unknown and they start new episodes."""
        self.step_counts.clear()
        if state["env"] is None:
            self._observation = None
            return not state["started"]
        self.step_counts.extend(state["step_counts"])
        self.env.set_state(state["env"])
        self._observation = self.env.observation
        self._memory = None if state["memory"] is None else state["memory"].to(self.device)
        return True

    def _start(self) -> None:
        self._observation = self.env.reset(self.seed)
        self._check_finite(self._observation)
        self._memory = self.policy.initial_memory(self.env.num_envs)

    def _act(self) -> tuple[dict[Key, Any], Tensor | None]:
        """The policy's part of a transition as {key: [N, …]}, and the memory after it."""
        assert self._observation is not None
        row: dict[Key, Any] = {}
        _flat_observation(row, self._observation, schema.OBSERVATION)
        if self.explore is not None and (action := self.explore()) is not None:
            row[schema.ACTION] = action
            return row, None
        on_host = self.env.device is None
        if on_host and self._mask is None and (acted := self.policy.act_arrays(self._observation)) is not None:
            check_log_prob(acted[schema.LOG_PROB])
            row.update(acted)
            return row, None
        td = self.policy.act(policy_inputs(self._observation, self.device, self._memory, self._mask))
        check_log_prob(td.get(schema.LOG_PROB, None))
        for key in set(td.keys()) - {schema.OBSERVATION, schema.NEXT}:
            if key == schema.SAMPLE:
                row |= {(schema.SAMPLE, *_path(name)): part for name, part in td[key].items(True, True)}
            else:
                row[key] = td[key]
        row[schema.ACTION] = to_numpy(td[schema.ACTION]) if on_host else td[schema.ACTION]
        return row, td.get(schema.NEXT_MEMORY, None)

    def _choose(self, _: Any) -> Any:
        """The actions of the next step; the rest of the policy's output waits in the row for the outcome."""
        if self._observation is None:
            self._start()
        self._row, self._next_memory = self._act()
        if self.takeover is not None:
            self._let_intervene(self.takeover)
        if self.before_stepping is not None:
            self.before_stepping()
        self.stepping_since = time.monotonic()
        return self._row[schema.ACTION]

    def _let_intervene(self, takeover: Takeover) -> np.ndarray | None:
        """Replace actions by a person's; return the environments in which they act, bool [N], or None."""
        return takeover.intervene(self._row)

    def _complete(self, step: VectorStep) -> None:
        """Add the environment's part of the transition to the row, and continue from the next observation."""
        self.stepping_since = None
        if self.takeover is not None:
            self.takeover.after(step)
        self._check_finite(step.observation, step.reward)
        if step.final_observation is not None:
            self._check_finite(step.final_observation)
        self._observation = step.observation
        memory, row = self._next_memory, self._row
        self._memory = None if memory is None else zero_rows(memory, step.done_index)
        row[schema.POLICY_VERSION] = self._versions
        row[schema.NEXT_REWARD] = step.reward
        row[schema.NEXT_TERMINATED] = step.terminated
        row[schema.NEXT_TRUNCATED] = step.truncated
        if self.env.chunk_length > 1:
            row[schema.NEXT_NUM_STEPS] = step.num_steps
        if self._reward_terms:
            assert step.reward_terms is not None
            self._check_finite({"reward terms": step.reward_terms})
            row[schema.NEXT_REWARD_TERMS] = step.reward_terms

    def _bootstrap(self, step: VectorStep, next_memory: Tensor | None, ends_segment: bool) -> Any:
        """V(final observation) where an episode was truncated, V(next observation) at a segment's end, 0 elsewhere."""
        if not ends_segment and not len(step.done_index):
            return self._no_values
        wanted: Any = ~step.terminated if ends_segment else step.truncated & ~step.terminated
        if not wanted.any():
            return self._no_values
        index = np.flatnonzero(wanted) if self.env.device is None else wanted.nonzero().squeeze(1)
        memory = None if next_memory is None else next_memory[torch.as_tensor(index, device=self.device)]
        values = self._no_values * 0
        values[index] = self._values(index, take_rows(step.next_observation(), index), memory)
        return values

    def _values(self, index: np.ndarray, observation: Observation, memory: Tensor | None) -> Any:
        """V of these environments' observations, by the policy."""
        values = self.policy.get_value(policy_inputs(observation, self.device, memory)).float()
        return to_numpy(values) if self.env.device is None else values

    def _check_finite(self, observation: Observation, reward: np.ndarray | None = None) -> None:
        streams = observation if isinstance(observation, dict) else {"observation": observation}
        named: list[tuple[str, Any]] = [*streams.items(), *(() if reward is None else (("reward", reward),))]
        on_host = self.env.device is None
        if not on_host and are_finite(stream for _, stream in named):
            return
        for name, stream in named:
            bad = first_not_finite(stream if on_host else to_numpy(stream))
            if bad is not None:
                raise RunError(
                    f"environment {bad} gave, as its {name}, a value that is infinite or not a number: a policy cannot "
                    "learn from it; look at the environment or wrap it"
                )


def _path(name: str | tuple[str, ...]) -> tuple[str, ...]:
    return (name,) if isinstance(name, str) else name


def _flat_observation(row: dict[Key, Any], observation: Observation, key: str | tuple[str, ...]) -> None:
    if isinstance(observation, dict):
        row.update({(*_path(key), name): stream for name, stream in observation.items()})
    else:
        row[key] = observation


class Collection:
    """The contract with the trainer: gather steps, update the algorithm, act with the new weights.

    This one is the standard mode: it collects between updates, with the learner's own weights.
    """

    memory_advice: str = "smaller rollout_steps"
    """What to use where the steps do not fit into memory, beside fewer environments."""
    max_rounds: int = 1
    """Largest number of rollouts that are gathered before an update."""

    def __init__(self, collector: Collector, buffer: Any) -> None:
        self.collector = collector
        self.buffer = buffer
        self.in_update = 0
        """Vector steps of an update that was stopped before it was complete; 0 if there is none."""

    def check_length(self, num_env_steps: int, planned: int) -> None:
        """Raise an error if a run of `planned` env steps makes no update; warn if its first part makes none."""

    def num_updates(self, rounds: int, num_env_steps: int) -> int:
        """Estimate the updates of a run of so many rounds and env steps."""
        return rounds

    def start(self, rollout_steps: int, total_steps: int | None) -> None:
        """Prepare; called once, before the first `gather`."""

    def gather(self, num_vector_steps: int, stop: Callable[[], bool]) -> bool:
        """Collect until the buffer holds `num_vector_steps`; return False if `stop` became true first."""
        wanted = num_vector_steps - len(self.buffer)
        return self.collector.collect(self.buffer, wanted, stop) == wanted

    def batches(self, num_vector_steps: int) -> Iterator[Any]:
        """Yield the batches of an update."""
        return self.buffer.batches(num_vector_steps)

    def update(self, algorithm: Algorithm, num_vector_steps: int, stop: Callable[[], bool]) -> Metrics | None:
        """Update the algorithm; return None if `stop` became true first and a part of the update remains."""
        algorithm.should_stop = stop
        metrics = algorithm.update(self.batches(num_vector_steps))
        self.in_update = 0 if algorithm.unfinished is None else num_vector_steps
        return None if self.in_update else metrics

    def counts_in_update(self) -> list[int]:
        """Env steps of each vector step of an update that was stopped."""
        return list(itertools.islice(self.collector.step_counts, self.in_update))

    @property
    def pending(self) -> int:
        """Vector steps that were collected and not trained on yet."""
        return len(self.collector.step_counts)

    def steps_under_way(self, most_per_step: int) -> int:
        """Env steps that were collected and not trained on, `most_per_step` a vector step; for the progress bar."""
        return self.pending * most_per_step

    def drop(self) -> int:
        """Discard the steps that were not trained on; return their number."""
        count = self.pending
        self.buffer.clear()
        self.collector.step_counts.clear()
        return count

    def publish(self, version: int) -> None:
        """Set the version; the collector acts with the learner's weights already."""
        self.collector.set_version(version)

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which no environment is stepped."""
        return contextlib.nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """The collector's state; call it while `paused`."""
        return self.collector.state_dict()

    def unknown_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """States of collector and buffer to save if the environments' state is unknown."""
        return UNKNOWN_COLLECTOR, {}

    def load_state_dict(self, state: dict[str, Any], buffer: dict[str, Any], same_rollout: bool) -> bool:
        """Restore the state; return False if the environments' state is unknown and they start new episodes.

        Without `same_rollout` the length of a rollout has changed, and the steps of an incomplete one are dropped.
        """
        known = self.collector.load_state_dict(state)
        if known and buffer and not same_rollout:
            log.warning("%d collected steps are dropped: rollout_steps changed", self.pending)
            self.collector.step_counts.clear()
        elif known:
            self.buffer.load_state_dict(buffer)
        return known

    def export(self, run_dir: Path) -> None:
        """Write data that belongs to the results into the run directory; called when training is complete."""

    def close(self) -> None:
        """Stop collecting."""
        self.collector.close()


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
        """Start the thread: rollouts of `rollout_steps`, `total_steps` in all, including those in the buffer."""
        self._rollout_steps, self._total_steps = rollout_steps, total_steps
        # An update that was stopped is published later: the steps in the buffer belong to the next updates.
        self._position, self._published = len(self.buffer), -1 if self.in_update else 0
        self._stopping, self._error, self.collector.stepping_since = False, None, None
        self.collector.policy.load_state_dict(self.learner.state_dict())
        self._thread = threading.Thread(target=self._run, name="deft-collector", daemon=True)
        self._thread.start()

    def gather(self, num_vector_steps: int, stop: Callable[[], bool]) -> bool:
        """Wait for `num_vector_steps`; return False if `stop` became true first. Raise the errors of the collector."""
        with self._condition:
            while len(self.buffer) < num_vector_steps:
                self._check()
                if stop():
                    return False
                self._condition.wait(WATCH_INTERVAL)
        return True

    def batches(self, num_vector_steps: int) -> Iterator[TensorDict]:
        """Yield the batches of an update; the ring has room again as soon as one is read."""
        for batch in self.buffer.batches(num_vector_steps):
            with self._condition:
                self._condition.notify_all()
            yield batch

    def publish(self, version: int) -> None:
        """Copy the learner's weights to the collector, between two of its steps."""
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
        """Stop the thread after the step under way; a thread that hangs ends with the process."""
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
            # The main thread raises it when it next waits; log it now, since an update may take long.
            self._error = error
            log.error("the collector stopped: %s: %s", type(error).__name__, error)
        finally:
            with self._condition:
                self._idle = True
                self._condition.notify_all()

    def _wait_for_turn(self) -> bool:
        """Between two steps: wait until the next may start. Return False when the thread must end."""
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
