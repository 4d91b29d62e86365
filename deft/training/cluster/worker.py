"""What runs in a Ray worker: some of the run's environments, and the policy that acts in them.

`deft.training.cluster.pool` makes the workers and gives them orders; each answers with a block of transitions.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deft import schema
from deft.data.rollout import Columns
from deft.data.tensors import Key, Row
from deft.envs.layout import Observation
from deft.envs.vector import Episode, VectorEnv
from deft.models.policy import Policy
from deft.runs.compute import is_small, torch_threads
from deft.runs.random_state import get_random_state, set_random_state
from deft.training.cluster.blocks import Block, End, Order, load_packed, pack_leaves, pack_tensor
from deft.training.collection import Collector
from deft.training.group_collection import GroupBuffer, GroupCollector

_OF_THE_POLICY = (schema.LOG_PROB, schema.VALUE, schema.POLICY_VERSION, schema.ACTION_MASK)
WATCH_INTERVAL = 0.5  # seconds between two looks at the step under way


class Rows:
    """Which of the run's environments a worker holds: `count` from `first` on, of `total`."""

    def __init__(self, first: int, count: int, total: int) -> None:
        self.first, self.count, self.total = first, count, total

    def padded(self, rows: Any) -> Any:
        """These rows among those of all environments, the others zero."""
        if isinstance(rows, dict):
            return {name: self.padded(stream) for name, stream in rows.items()}
        shape = (self.total, *rows.shape[1:])
        whole: Any = rows.new_zeros(shape) if isinstance(rows, Tensor) else np.zeros(shape, rows.dtype)
        whole[self.first : self.first + self.count] = rows
        return whole

    def own(self, rows: Any) -> Any:
        """The inverse of `padded`."""
        return rows[self.first : self.first + self.count]


class WorkerCollector(Collector):
    """A collector of some of the run's environments.

    Where it is `exact`, the policy acts on as many rows as the run has environments, and its random state is the
    learner's: every draw and every product is then that of collecting all in the learner's process. What a batch of
    another size would give, V at the end of a segment, is left to the learner.
    """

    rows: Rows
    exact = False

    def begin(self, exact: bool, actions: list[np.ndarray]) -> None:
        """Before a block."""
        self.exact = exact
        self.ends: list[End] = []
        self.num_made = 0
        self._given = deque(actions)
        self.explore = (lambda: self._given.popleft() if self._given else None) if actions else None

    def _act(self) -> tuple[dict[Key, Any], Tensor | None]:
        if not self.exact or self.rows.count == self.rows.total or (self.explore is not None and self._given):
            return super()._act()
        own = self._observation, self._memory, self._mask
        assert own[0] is not None
        self._observation = self.rows.padded(own[0])
        self._memory = None if own[1] is None else self.rows.padded(own[1])
        self._mask = None if own[2] is None else own[2][:1].expand(self.rows.total, -1)
        try:
            row, next_memory = super()._act()
        finally:
            self._observation, self._memory, self._mask = own
        row = {key: self.rows.own(value) for key, value in row.items()}
        return row, None if next_memory is None else self.rows.own(next_memory)

    def _values(self, index: np.ndarray, observation: Observation, memory: Tensor | None) -> np.ndarray:
        if not self.exact:
            return super()._values(index, observation, memory)
        # For later: at this step, of these of all environments.
        packed = None if memory is None else pack_tensor(memory)
        self.ends.append(End(self.num_made, index + self.rows.first, observation, packed))
        return np.zeros(len(index), np.float32)


class GroupWorkerCollector(WorkerCollector, GroupCollector):
    """Plays rounds of groups."""


class _BlockBuffer:
    """Where a worker's steps are written; the memory is kept from block to block."""

    def __init__(self, num_steps: int, transitions: bool) -> None:
        self.columns = Columns(num_steps)
        self.size = 0
        self._transitions = transitions

    def write(self, row: Row) -> None:
        if self._transitions:  # what a replay buffer stores
            row = {key: value for key, value in row.items() if key not in _OF_THE_POLICY and key[0] != schema.SAMPLE}
            row.setdefault(schema.STEP_MASK, np.ones(len(row[schema.NEXT_REWARD]), bool))
        self.columns.write(self.size, row)
        self.size += 1

    def arrays(self) -> dict[Key, Any]:
        return {key: pack_tensor(tensor[: self.size]) for key, tensor in self.columns.tensors.items()}


class CollectWorker:
    """Holds environments and answers orders. Made cheaply; `prepare` does what may fail."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.version = -1
        self.sequence = 0
        self._buffer: _BlockBuffer | None = None

    def warm_up(self, make_env: Callable[[int], VectorEnv] | None, policy: Policy | None) -> None:
        """Do nothing: receiving the arguments has imported their modules."""

    def prepare(
        self, slot: int, incarnation: int, rows: tuple[int, int, int], make_env: Callable[[int], VectorEnv]
    ) -> dict[str, Any]:
        """Make the environments of a slot; return their description."""
        self.slot, self.incarnation = slot, incarnation
        self.rows = Rows(*rows)
        self.env = make_env(self.rows.count)
        return {"spaces": self.env.description, "state_obstacle": self.env.state_obstacle()}

    def adopt(
        self,
        description: dict[str, Any],
        policy: Policy,
        kept: tuple[bool, bool],
        group_size: int | None,
        calls: dict[str, tuple[Any, ...]],
    ) -> dict[str, Any]:
        """Receive the policy that acts; `calls` are the latest method calls on the environments.

        `kept` as in `WorkerPool.open`.
        """
        self.policy = copy.deepcopy(policy).requires_grad_(False)  # objects of the object store are read-only
        policy = self.policy
        if group_size is None:
            self.collector = WorkerCollector(self.env, policy, 0, *kept)
        else:
            self.collector = GroupWorkerCollector(self.env, policy, 0, group_size)
        self.collector.rows = self.rows
        for name, arguments in calls.items():
            self.env.call(name, *arguments)
        threading.Thread(target=self._watch, name="deft-watch", daemon=True).start()
        return description

    def collect(self, order: Order) -> Block:
        """Execute an order."""
        started = time.monotonic()
        collector = self.collector
        self._take_weights(order)
        if order.state is not None:
            collector.load_state_dict(order.state)
        collector.seed = order.seed
        collector.begin(order.random is not None, order.actions)
        if order.random is not None:
            set_random_state(order.random)
        episodes: list[tuple[int, Episode]] = []
        num_lost = collector.num_lost_episodes
        with torch_threads(1, is_small(self.policy)):
            if order.group_seeds is None:
                columns, num_steps = self._step(order, episodes, started)
            else:
                columns, num_steps = self._play(order, episodes)
        step_counts = list(collector.step_counts)
        collector.step_counts.clear()
        self.sequence += 1
        return Block(
            order.number,
            self.slot,
            self.incarnation,
            columns,
            num_steps,
            step_counts,
            episodes,
            collector.num_lost_episodes - num_lost,
            collector.ends,
            get_random_state() if order.random is not None else None,
            collector.state_dict() if order.keeps_state else None,
            time.monotonic() - started,
            order.round,
            self.sequence - 1,
        )

    def get_state(self) -> dict[str, Any]:
        """Return the state of the environments."""
        return self.collector.state_dict()

    def call(self, name: str, *args: Any) -> list[Any]:
        """Call a method of every environment."""
        return self.env.call(name, *args)

    # -- within an order -----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _step(self, order: Order, episodes: list[tuple[int, Episode]], started: float) -> tuple[dict[Key, Any], int]:
        collector = self.collector
        if self._buffer is None or self._buffer.columns.capacity != order.num_steps:
            self._buffer = _BlockBuffer(order.num_steps, collector._next_observation)
        self._buffer.size = 0
        for step in range(order.num_steps):
            late = order.seconds is not None and time.monotonic() - started > order.seconds
            is_last = step == order.num_steps - 1 or late
            collector.step(self._buffer, ends_segment=is_last)
            collector.num_made += 1
            episodes += [(step, self._placed(episode)) for episode in collector.take_episodes()]
            if is_last:
                break
        return self._buffer.arrays(), self._buffer.size

    def _play(self, order: Order, episodes: list[tuple[int, Episode]]) -> tuple[dict[Key, Any], int]:
        collector = self.collector
        assert isinstance(collector, GroupWorkerCollector)
        assert order.group_seeds is not None
        buffer = GroupBuffer(order.num_steps)
        collector.play(buffer, order.group_seeds, order.num_steps, lambda: False)
        episodes += [(0, self._placed(episode)) for episode in collector.take_episodes()]
        rollout = buffer.rounds[0]
        return pack_leaves(rollout), rollout.batch_size[0]

    def _placed(self, episode: Episode) -> Episode:
        """With the number of its environment among all."""
        episode.env_index += self.collector.rows.first
        return episode

    def _take_weights(self, order: Order) -> None:
        use = getattr(self.policy, "use_weights", None)
        if use is not None:  # an inference actor's: it fetches them
            use(order.version, order.weights, exact=order.random is not None)
        elif order.version != self.version:
            import ray

            load_packed(self.policy, ray.get(order.weights[0]))
        self.version = order.version
        self.collector.set_version(order.version)

    def _watch(self) -> None:
        """End the process if a step takes too long: the pool then replaces it."""
        while True:
            time.sleep(WATCH_INTERVAL)
            since = self.collector.stepping_since
            if since is not None and time.monotonic() - since > self.timeout:
                os._exit(3)
