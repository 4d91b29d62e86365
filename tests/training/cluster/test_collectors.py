"""Collectors with simulated workers: order, age and number of the steps, and the order for a worker's successor."""

import random
import threading
import time
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

from deft import schema
from deft.errors import RunError
from deft.training.cluster.blocks import Block, Order
from deft.training.cluster.collectors import Feeder, RayCollector, _Exact
from deft.training.cluster.pool import Slot

KNOWN = {"env": ["stands", "here"], "memory": None, "started": True, "step_counts": []}
UNKNOWN = {"env": None, "memory": None, "started": True, "step_counts": []}


class PretendedPool:
    """Answers orders in any sequence; the last worker is slow, and cuts its blocks short where a time is given."""

    def __init__(self, num_workers, envs_each=2):
        self.slots = [
            Slot(index, envs_each * index, envs_each, incarnation=0, is_ready=True) for index in range(num_workers)
        ]
        self.made = [0] * num_workers
        self.sequences = [0] * num_workers
        self.random = random.Random(0)
        self.error = None

    idle = property(lambda self: [slot for slot in self.slots if slot.order is None])
    busy = property(lambda self: [slot for slot in self.slots if slot.order is not None])

    def weights(self, version):
        return [version]

    def give(self, slot, order):
        slot.order = order

    def cancel(self):
        for slot in self.slots:
            slot.order = None

    def wait(self, seconds, renew):
        if self.error is not None:
            raise self.error
        threading.Event().wait(0.0005)
        answered = []
        for slot in self.busy:
            slow = slot is self.slots[-1]
            if self.random.random() < (0.05 if slow else 0.5):
                count = 1 if slow and slot.order.seconds is not None else slot.order.num_steps
                answered.append(self._block(slot, count))
                slot.order = None
        return answered

    def _block(self, slot, count):
        life = self.made[slot.index] + np.arange(count)[:, None] + 100_000 * (slot.first + np.arange(slot.count))
        self.made[slot.index] += count
        self.sequences[slot.index] += 1
        columns = {schema.OBSERVATION: life, schema.POLICY_VERSION: np.full(life.shape, slot.order.version)}
        details = (slot.order.round, self.sequences[slot.index] - 1)
        return Block(slot.order.number, slot.index, 0, columns, count, [], [], 0, [], None, None, 0.01, *details)


def pretended(max_staleness, recurrent=False, num_workers=3):
    pool = PretendedPool(num_workers)
    collector = SimpleNamespace(
        pool=pool, version=0, max_staleness=max_staleness, _states={}, _incarnations={}, explore=None,
        env=SimpleNamespace(num_envs=2 * num_workers), policy=SimpleNamespace(recurrent=recurrent),
    )  # fmt: skip
    collector._order = lambda slot, **details: Order(0, collector.version, [], **details)
    return collector


@pytest.mark.parametrize("max_staleness", [1, 2, 3])
@pytest.mark.parametrize("recurrent", [False, True])
def test_steps_are_never_too_old_and_none_is_lost(max_staleness, recurrent):
    collector = pretended(max_staleness, recurrent)
    feeder = Feeder(collector, rollout_steps=8, block_steps=8 if recurrent else 4)
    seen, oldest = [], 0
    for update in range(25):
        segments = feeder.take_segments(8, lambda: False)
        assert segments is not None
        assert sum(len(segment) for segment in segments) == 48
        for segment in segments:
            part = slice(segment.start, segment.stop), segment.env
            seen.append(segment.block.columns[schema.OBSERVATION][part])
            oldest = max(oldest, update - int(segment.block.columns[schema.POLICY_VERSION].min()))
        collector.version += 1
        feeder.publish()
    feeder.close()
    steps = np.concatenate(seen)
    assert len(np.unique(steps)) == len(steps) == 25 * 48
    assert 1 <= oldest <= max_staleness
    if not recurrent:  # each environment's steps from its first on, without a gap but for what is not taken yet
        left = {
            int(segment.block.columns[schema.OBSERVATION][segment.start, segment.env]) for segment in feeder._segments
        }
        for env in range(6):
            own = np.sort(steps[steps // 100_000 == env]) % 100_000
            gaps = set(range(own[-1] + 1)) - set(own.tolist())
            assert all(any(gap + 100_000 * env >= first for first in left) for gap in gaps)


def test_a_slow_worker_hands_over_less():
    collector = pretended(1)
    feeder = Feeder(collector, rollout_steps=8, block_steps=8)
    for _ in range(30):
        feeder.take_segments(8, lambda: False)
        collector.version += 1
        feeder.publish()
    feeder.close()
    made = collector.pool.made
    assert 0 < made[2] < 0.5 * min(made[0], made[1])


def test_errors_and_stops_surface():
    collector = pretended(1)
    feeder = Feeder(collector, rollout_steps=1000, block_steps=1000)
    assert feeder.take_segments(10**6, lambda: True) is None
    collector.pool.error = RunError("the gripper fell off")
    with pytest.raises(RunError, match="the gripper fell off"):
        feeder.take_segments(10**6, lambda: False)
    feeder.close()


def test_the_last_shorter_rollout_takes_what_is_there():
    """A whole rollout of the round before is held, at staleness 1: a shorter last one may leave the rest unused."""
    collector = pretended(max_staleness=1)
    feeder = Feeder(collector, rollout_steps=8, block_steps=4)
    for update in range(3):
        assert feeder.take_segments(8, lambda: False) is not None
        collector.version = update + 1
        feeder.publish()
    taken = feeder.take_segments(1, never_after(5.0))
    feeder.close()
    assert taken is not None
    assert sum(len(segment) for segment in taken) == 6  # one step of 6 environments


def test_transitions_end_where_the_run_does():
    """Of what the workers have ready for a replay buffer no more is written than the run has steps left."""
    pool = PretendedPool(num_workers=2)
    collector = RayCollector.__new__(RayCollector)
    collector.pool, collector.steps_left, collector.step_counts = pool, 10, deque()
    written = []
    ring = SimpleNamespace(write=lambda row, envs: written.append((int(row[schema.OBSERVATION][0]), envs)))
    for slot in pool.slots:
        slot.order = Order(0, 0, [], num_steps=4)
    blocks = [pool._block(slot, 4) for slot in pool.slots]
    for block in blocks:
        block.step_counts = [2, 2, 2, 2]  # of two environments
    collector._write_apart(ring, blocks, 4)
    # 10 env steps: all 4 of the first worker's environments 0 and 1, and one of those from environment 2 on
    assert written == [(0, [0, 1]), (1, [0, 1]), (2, [0, 1]), (3, [0, 1]), (200_000, [2, 3])]
    assert sum(collector.step_counts) == 10
    assert collector.steps_left == 0


def never_after(seconds):
    """A stop question that says yes after so long: a test must not hang."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


@pytest.mark.parametrize(("state", "lost"), [(KNOWN, 0), (UNKNOWN, 2), (None, 2)], ids=["known", "unknown", "first"])
def test_the_order_of_a_dead_worker_for_its_successor(state, lost):
    collector = object.__new__(_Exact)
    collector.seed, collector.version, collector.num_lost_episodes = 7, 3, 0
    collector.pool = SimpleNamespace(number=iter(range(5, 9)).__next__, weights=lambda version: [version])
    collector._states, collector._incarnations = {1: state}, {1: 0}
    slot = Slot(1, first=2, count=2, incarnation=0)
    given = collector._order(slot, num_steps=4, random={"torch": 1}, keeps_state=True)
    assert given.state is None  # it stands there itself
    assert given.seed == 9  # the run's, and the first of its environments

    slot.incarnation = 1
    renewed = collector._renewed(slot, given)
    assert isinstance(renewed, Order)
    assert renewed.number == 6  # a block that answers the first one is rejected
    assert (renewed.num_steps, renewed.random, renewed.keeps_state) == (4, {"torch": 1}, True)
    assert collector.num_lost_episodes == lost
    if state is KNOWN:
        assert renewed.state is KNOWN
        assert renewed.seed == given.seed
    else:  # new episodes, from other seeds than its predecessor began with
        assert renewed.state is None
        assert renewed.seed != given.seed
        slot.incarnation = 2
        assert collector._renewed(slot, renewed).seed not in (given.seed, renewed.seed)
