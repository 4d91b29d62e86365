"""Collectors whose steps are made by a pool of workers: the contract of `Collector` and `GroupCollector`.

With `max_staleness` 0 every worker makes its part of each rollout while the learner waits, and the result equals
collecting in the learner's process, bit for bit on the CPU. Above 0 a thread gives orders to the workers while the
learner trains: rollouts are assembled from the blocks that arrive first, a slow worker sends shorter blocks, and a
worker gets no order whose steps could become older than `max_staleness` updates.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from deft import schema
from deft.data.transition_ring import TransitionRing
from deft.envs.layout import Observation
from deft.models.policy import Policy
from deft.runs.random_state import get_random_state, set_random_state, training_seed
from deft.training.cluster import blocks as block_arrays
from deft.training.cluster.blocks import Block, End, Order, Segment, row_of, segments_of, side_by_side, unpack_tensor
from deft.training.cluster.pool import ClusterEnv, Slot, WorkerLost
from deft.training.collection import UNKNOWN_COLLECTOR, Collector, StepBuffer
from deft.training.group_collection import GroupBuffer, GroupCollector

log = logging.getLogger(__name__)
WATCH_INTERVAL = 0.2  # seconds between looks at the stop signal while waiting
DEFAULT_BLOCK = 256  # steps
SLOWEST = 2.0  # a block ends when it has taken so many times the usual one's time


class _Exact(Collector):
    """Orders to all workers at once, and their blocks side by side."""

    env: ClusterEnv

    def __init__(self, env: ClusterEnv, *args: Any, **keywords: Any) -> None:
        super().__init__(env, *args, **keywords)
        self.pool = env.pool
        self._states: dict[int, dict[str, Any] | None] = {}  # by slot, at the end of the latest block
        self._incarnations: dict[int, int] = {}  # by slot, the incarnation that has the state

    def _order(self, slot: Slot, **details: Any) -> Order:
        """A new order."""
        return Order(**details, **self._present(slot))

    def _present(self, slot: Slot) -> dict[str, Any]:
        """What an order has from the present: the weights, and the state for a worker whose environments lack it."""
        state = self._states.get(slot.index) if self._incarnations.get(slot.index) != slot.incarnation else None
        if state is not None and state["env"] is None and state["started"]:
            state = None  # the state of the environments cannot be saved
        seed = self.seed + slot.first
        if state is None and slot.incarnation > 0:  # other episodes than those of its predecessor
            seed = training_seed(self.seed, slot.first, slot.incarnation)
        weights = self.pool.weights(self.version)
        return {
            "number": self.pool.number(), "version": self.version, "weights": weights, "state": state, "seed": seed
        }  # fmt: skip

    def _renewed(self, slot: Slot, order: Order) -> Order:
        """The order of a worker that died, for its successor."""
        self._lose(slot)
        return dataclasses.replace(order, **self._present(slot))

    def _lose(self, slot: Slot) -> None:
        """Count the unfinished episodes of a dead worker as lost, unless their state is known."""
        state = self._states.get(slot.index)
        if state is None or state["env"] is None:
            self.num_lost_episodes += slot.count

    def _answers(self, stop: Callable[[], bool]) -> list[Block] | None:
        """Return the blocks of all orders, by slot; None if `stop` became true first, with the orders cancelled."""
        blocks: dict[int, Block] = {}
        while self.pool.busy:
            if stop():
                self.pool.cancel()
                return None
            for block in self.pool.wait(WATCH_INTERVAL, self._renewed):
                blocks[block.slot] = block
        for block in blocks.values():
            self._incarnations[block.slot] = block.incarnation
            self._states[block.slot] = block.state
        return [blocks[slot.index] for slot in self.pool.slots]

    def _take_events(self, blocks: list[Block]) -> None:
        """Take the episodes in the order in which one process would have finished them."""
        ended = sorted((event for block in blocks for event in block.episodes), key=lambda e: (e[0], e[1].env_index))
        self.episodes.extend(episode for _, episode in ended)
        self.num_lost_episodes += sum(block.num_lost for block in blocks)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all environments in the format of one process, which others can load."""
        states: list[Any] = [self._states.get(slot.index) for slot in self.pool.slots]
        if not self._incarnations and not any(states):
            return {"env": None, "memory": None, "started": False, "step_counts": []}
        if any(state is None for state in states):
            try:
                states = self.pool.ask("get_state")
            except WorkerLost:
                return dict(UNKNOWN_COLLECTOR)
        if len(states) < len(self.pool.slots) or any(state is None or state["env"] is None for state in states):
            return dict(UNKNOWN_COLLECTOR)
        memories = [state["memory"] for state in states]
        return {
            "env": [one for state in states for one in state["env"]],
            "memory": None if memories[0] is None else torch.cat(memories),
            "started": True,
            "step_counts": list(self.step_counts),
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restore the state; return False if the environments' state is unknown and they start new episodes."""
        self.step_counts.clear()
        if state["env"] is None:
            return not state["started"]
        self.step_counts.extend(state["step_counts"])
        memory = state["memory"]
        self._states = {
            slot.index: {
                "env": state["env"][slot.rows],
                "memory": None if memory is None else memory[slot.rows],
                "started": True,
                "step_counts": [],
            }
            for slot in self.pool.slots
        }
        self._incarnations = {}
        return True


class RayCollector(_Exact):
    """Steps by workers: in turns with the learner at staleness 0, in the background above it."""

    def __init__(
        self,
        env: ClusterEnv,
        policy: Policy,
        seed: int = 0,
        next_observation: bool = False,
        reward_terms: bool = False,
        max_staleness: int = 0,
    ) -> None:
        super().__init__(env, policy, seed, next_observation, reward_terms)
        self.max_staleness = max_staleness
        self.feeder: Feeder | None = None

    @torch.inference_mode()
    def collect(self, buffer: StepBuffer, num_vector_steps: int, stop: Callable[[], bool] = lambda: False) -> int:
        """Write `num_vector_steps` steps of every environment; how many were made, all or none."""
        if num_vector_steps <= 0:
            return 0
        if self.max_staleness > 0:
            return self._collect_in_background(buffer, num_vector_steps, stop)
        before = get_random_state()
        explore = self.explore or (lambda: None)
        actions = [action for _ in range(num_vector_steps) if (action := explore()) is not None]
        details = {"num_steps": num_vector_steps, "random": before, "keeps_state": not self._next_observation}
        for slot in self.pool.slots:
            self.pool.give(slot, self._order(slot, actions=[action[slot.rows] for action in actions], **details))
        deaths = self.pool.num_deaths
        blocks = self._answers(stop)
        if blocks is None:
            return 0
        if self.pool.num_deaths > deaths and isinstance(buffer, TransitionRing):
            buffer.cut()
        self._write_side_by_side(buffer, blocks, num_vector_steps)
        last = blocks[0].random
        assert last is not None
        set_random_state(last)
        return num_vector_steps

    def _write_side_by_side(self, buffer: StepBuffer, blocks: list[Block], num_steps: int) -> None:
        columns = side_by_side(blocks, num_steps)
        if schema.NEXT_VALUE in columns:
            self._fill_values(columns[schema.NEXT_VALUE], blocks)
        self._take_events(blocks)
        for step in range(num_steps):
            self.step_counts.append(sum(block.step_counts[step] for block in blocks))
            buffer.write(row_of(columns, step))

    def _fill_values(self, column: np.ndarray, blocks: list[Block]) -> None:
        """Compute V where a segment ends, in the same batches as one process."""
        wanted: dict[int, list[End]] = {}
        for block in blocks:
            for end in block.ends:
                wanted.setdefault(end.step, []).append(end)
        for step, ends in wanted.items():
            rows = np.concatenate([end.rows for end in ends])
            memory = None
            if ends[0].memory is not None:
                memory = torch.cat([unpack_tensor(end.memory) for end in ends]).to(self.device)
            observation = _joined([end.observation for end in ends])
            column[step, rows] = self._values(rows, observation, memory)

    # -- in the background ---------------------------------------------------------------------------------------------

    def set_version(self, version: int) -> None:
        """Which weights act from here on; the workers get them with their next order."""
        super().set_version(version)
        if self.feeder is not None:
            self.feeder.publish()

    def _collect_in_background(self, buffer: StepBuffer, num_steps: int, stop: Callable[[], bool]) -> int:
        if self.feeder is None:
            block_steps = min(self.env.config.block_steps or DEFAULT_BLOCK, num_steps)
            if self.policy.recurrent or self._next_observation:
                block_steps = num_steps  # memory, and the order of an environment's steps, are carried in whole rows
            self.feeder = Feeder(self, num_steps, block_steps)
        if self._next_observation:
            blocks = self.feeder.take_blocks(num_steps * self.env.num_envs, stop)
            if blocks is None:
                return 0
            assert isinstance(buffer, TransitionRing)
            self._write_apart(buffer, blocks, num_steps)
        else:
            segments = self.feeder.take_segments(num_steps, stop)
            if segments is None:
                return 0
            columns = block_arrays.assemble(segments, num_steps, self.env.num_envs)
            chunks = columns.get(schema.NEXT_NUM_STEPS)
            for step in range(num_steps):
                self.step_counts.append(self.env.num_envs if chunks is None else int(chunks[step].sum()))
                buffer.write(row_of(columns, step))
        self._take_events(self.feeder.take_arrived())
        return num_steps

    def _write_apart(self, ring: TransitionRing, blocks: list[Block], num_steps: int) -> None:
        """Blocks one after another, until the run has its steps: the ring keeps each environment's in order."""
        count = 0
        for block in blocks:
            rows = self.pool.slots[block.slot].rows
            envs = list(range(rows.start, rows.stop))
            if block.sequence == 0 and block.incarnation > 0:
                ring.cut(envs)
            for step in range(block.num_steps):
                if self.steps_left is not None and count >= self.steps_left:
                    break
                ring.write(row_of(block.columns, step), envs)
                count += block.step_counts[step]
        if self.steps_left is not None:
            self.steps_left -= count
        # The trainer counts vector steps; how many env steps each was matters only in their sum.
        self.step_counts.extend([count // num_steps] * (num_steps - 1) + [count - count // num_steps * (num_steps - 1)])

    def state_dict(self) -> dict[str, Any]:
        """Return the state; in the background the workers are stepping, and their state is unknown."""
        return dict(UNKNOWN_COLLECTOR) if self.feeder is not None else super().state_dict()

    def close(self) -> None:
        """Stop the thread that gives orders."""
        if self.feeder is not None:
            self.feeder.close()
            self.feeder = None


class Feeder:
    """A thread that gives orders to the workers, and the blocks that they returned.

    With T·N steps an update, at most (max_staleness + 1)·T·N are ordered, unread or in training, and an update waits
    for steps that would be too old for a later one: no step is discarded, and none is used later than `max_staleness`
    updates after the weights that made it.
    """

    def __init__(self, collector: RayCollector, rollout_steps: int, block_steps: int) -> None:
        self.collector, self.pool = collector, collector.pool
        self.rollout_size = rollout_steps * collector.env.num_envs
        self.block_steps = block_steps
        self.round = 0
        self._in_training = 0  # steps that were taken since then
        self._segments: list[Segment] = []
        self._arrived: list[Block] = []
        self._times: deque[float] = deque(maxlen=4 * len(self.pool.slots))
        self._condition = threading.Condition()
        self._error: BaseException | None = None
        self._stopping = False
        self._drawn: list[deque[np.ndarray]] = [deque() for _ in self.pool.slots]
        self.waited = 0.0  # seconds that the learner waited for steps
        self.publishing = 0.0  # seconds that it spent on handing out weights
        self.pool.weights(collector.version)
        self._thread = threading.Thread(target=self._run, name="deft-feeder", daemon=True)
        self._thread.start()

    def publish(self) -> None:
        """Put the learner's new weights into the object store, before the next update changes them."""
        started = time.monotonic()
        with self._condition:
            self.pool.weights(self.collector.version)
            self.round += 1
            self._in_training = 0
            self._condition.notify_all()
        self.publishing += time.monotonic() - started

    def take_segments(self, num_steps: int, stop: Callable[[], bool]) -> list[Segment] | None:
        """Return the oldest steps, enough for a rollout; None if `stop` became true first."""
        count = num_steps * self.collector.env.num_envs
        with self._timed():
            if not self._await(count, stop):
                return None
            self._in_training += count
            if not self.collector.policy.recurrent:
                taken, self._segments = block_arrays.take_steps(self._segments, count)
                return taken
            # Whole rows, of segments as long as a rollout; only a run's last one is shorter, and leaves the rest.
            ordered = sorted(self._segments, key=lambda segment: (segment.round, *segment.order))
            num_envs = self.collector.env.num_envs
            self._segments = ordered[num_envs:]
            return [dataclasses.replace(one, stop=one.start + num_steps) for one in ordered[:num_envs]]

    def take_blocks(self, num_steps: int, stop: Callable[[], bool]) -> list[Block] | None:
        """Return the blocks that arrived, once they hold `num_steps`; None if `stop` became true first."""
        with self._timed():
            if not self._await(num_steps, stop):
                return None
            taken, self._segments = self._segments, []
            self._in_training += sum(len(segment) for segment in taken)
            return list({id(segment.block): segment.block for segment in taken}.values())

    def take_arrived(self) -> list[Block]:
        """Return the blocks that arrived since the last call, for the events in them."""
        with self._condition:
            arrived, self._arrived = self._arrived, []
        return arrived

    def close(self) -> None:
        """Stop giving orders."""
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        self._thread.join(5.0)
        self.pool.cancel()

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """Hold the lock, and measure for how long the learner waited."""
        started = time.monotonic()
        with self._condition:
            yield
        self.waited += time.monotonic() - started

    def _await(self, count: int, stop: Callable[[], bool]) -> bool:
        """Wait until `count` steps may be taken; return False if the run must stop. Raise the errors of the thread."""
        while not self._may_take(count):
            if self._error is not None:
                raise self._error
            if stop():
                return False
            self._condition.wait(WATCH_INTERVAL)
        return True

    def _may_take(self, count: int) -> bool:
        """Whether there are `count` steps, and none that remains would be too old for a later update."""
        if sum(len(segment) for segment in self._segments) < count:
            return False
        if count < self.rollout_size:  # the run's last, shorter one: no later update finds what is left
            return True
        outstanding = [(slot.order.round, self._size(slot)) for slot in self.pool.slots if slot.order is not None]
        held = [(segment.round, len(segment)) for segment in self._segments]
        for round_ in {round_ for round_, _ in (*outstanding, *held)}:
            here = sum(size for other, size in held if other <= round_)
            coming = sum(size for other, size in outstanding if other <= round_)
            left = here - min(here, count) + coming
            updates = round_ + self.collector.max_staleness - self.round  # after this one, that may still use them
            if left > updates * self.rollout_size:
                return False
        return True

    def _size(self, slot: Slot) -> int:
        return slot.count * (slot.order.num_steps if slot.order is not None else self.block_steps)

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                with self._condition:
                    self._give_orders()
                blocks = self.pool.wait(WATCH_INTERVAL, self._renewed)
                with self._condition:
                    for block in blocks:
                        self._take(block)
                    if blocks:
                        self._condition.notify_all()
                    elif not self.pool.busy:
                        self._condition.wait(WATCH_INTERVAL)
        except BaseException as error:
            self._error = error
            if not self._stopping:
                log.error("collection stopped: %s: %s", type(error).__name__, error)
            with self._condition:
                self._condition.notify_all()

    def _give_orders(self) -> None:
        for slot in self.pool.idle:
            if not slot.is_ready:  # an order without a worker would delay the others
                continue
            held = sum(len(segment) for segment in self._segments)
            ordered = sum(self._size(busy) for busy in self.pool.busy)
            limit = (self.collector.max_staleness + 1) * self.rollout_size
            if self._in_training + held + ordered + slot.count * self.block_steps > limit:
                continue
            self.pool.give(slot, self._order(slot))

    def _order(self, slot: Slot) -> Order:
        collector = self.collector
        is_known = len(self._times) >= len(self.pool.slots) and not collector.policy.recurrent  # that needs whole rows
        seconds = SLOWEST * statistics.median(self._times) if is_known else None
        actions = [action for _ in range(self.block_steps) if (action := self._given_action(slot)) is not None]
        return collector._order(slot, num_steps=self.block_steps, seconds=seconds, actions=actions, round=self.round)

    def _given_action(self, slot: Slot) -> np.ndarray | None:
        """Next actions of this worker's environments in place of the policy's; drawn for all environments at once."""
        if not self._drawn[slot.index]:
            drawn = None if self.collector.explore is None else self.collector.explore()
            if drawn is None:
                return None
            for other in self.pool.slots:
                self._drawn[other.index].append(drawn[other.rows])
        return self._drawn[slot.index].popleft()

    def _renewed(self, slot: Slot, order: Order) -> None:
        """A worker died: its successor gets an order with the weights of that time, once it is ready."""
        with self._condition:
            self.collector._lose(slot)
            self.collector._states.pop(slot.index, None)  # of an earlier block: its steps were counted already

    def _take(self, block: Block) -> None:
        collector = self.collector
        collector._incarnations[block.slot] = block.incarnation
        collector._states[block.slot] = None
        slot = self.pool.slots[block.slot]
        self._segments += segments_of(block, slot.count, block.round)
        self._arrived.append(block)
        self._times.append(block.seconds / block.num_steps * self.block_steps)


class RayGroupCollector(GroupCollector, _Exact):
    """Rounds of groups, played by workers that hold whole groups each."""

    env: ClusterEnv

    @torch.inference_mode()
    def play(self, buffer: GroupBuffer, seeds: list[int], max_steps: int, stop: Callable[[], bool]) -> bool:
        """Play one round, with a seed for each group; return False if `stop` became true first."""
        before = get_random_state()
        for slot in self.pool.slots:
            first, count = slot.first // self.group_size, slot.count // self.group_size
            own = seeds[first : first + count]
            self.pool.give(slot, self._order(slot, num_steps=max_steps, random=before, group_seeds=own))
        blocks = self._answers(stop)
        if blocks is None:
            return False
        longest = max(blocks, key=lambda block: block.num_steps)
        assert longest.random is not None
        set_random_state(longest.random)
        columns = side_by_side(blocks, longest.num_steps)
        for step in range(longest.num_steps):
            buffer.write(row_of(columns, step))
        buffer.end_round(np.zeros(self.env.num_envs, bool))  # the workers have masked what was lost
        self._take_events(blocks)
        self.step_counts.append(sum(sum(block.step_counts) for block in blocks))
        return True

    def _lose(self, slot: Slot) -> None:
        """Lose nothing: the round is played again from the same seeds."""


def _joined(observations: list[Observation]) -> Observation:
    first = observations[0]
    if isinstance(first, dict):
        return {name: np.concatenate([one[name] for one in observations]) for name in first}
    return np.concatenate(observations)  # type: ignore[arg-type]
