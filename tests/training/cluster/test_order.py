"""The order for the successor of a dead worker, with a known and with an unknown state of its environments."""

from types import SimpleNamespace

import pytest

from deft.training.cluster.blocks import Order
from deft.training.cluster.collectors import _Exact
from deft.training.cluster.pool import Slot

KNOWN = {"env": ["stands", "here"], "memory": None, "started": True, "step_counts": []}
UNKNOWN = {"env": None, "memory": None, "started": True, "step_counts": []}


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
