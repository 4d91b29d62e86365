"""The workers of a run: made, given orders, and replaced when they die.

Every order is answered once. If a worker dies, or its block is lost with a node, another one replaces it and gets the
order again; a late answer of the dead worker is rejected by its number.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from deft.config.settings import RunConfig
from deft.envs.layout import Observation
from deft.envs.vector import VectorEnv, VectorStep
from deft.errors import DeftError, InputError, RunError
from deft.models.policy import Policy
from deft.training.cluster import connection
from deft.training.cluster.blocks import Block, Order, pack_weights
from deft.training.cluster.inference import InferenceActor, RemotePolicy
from deft.training.cluster.worker import CollectWorker

log = logging.getLogger(__name__)
SPARE_ANSWERS = 10.0  # seconds in which a spare worker must answer
SPARES_INTERVAL = 2.0  # seconds between two looks whether there is room for one


@dataclass
class Slot:
    """A group of environments, the worker that has it now, and the worker's order."""

    index: int
    first: int
    count: int
    incarnation: int = -1
    handle: Any = None
    is_ready: bool = False
    order: Order | None = None
    reference: Any = None
    """Of what is awaited: the answer to `prepare`, then to the order."""
    failures: int = 0
    """In a row, since its last block."""

    @property
    def rows(self) -> slice:
        """Which of all environments they are."""
        return slice(self.first, self.first + self.count)


class WorkerPool:
    """Gives orders to workers and takes their blocks; the same from one machine to a cluster."""

    def __init__(self, config: RunConfig, num_workers: int, make_env: Callable[[int], VectorEnv]) -> None:
        """`make_env` is called in a worker, with the number of its environments."""
        self.num_envs, self.timeout, self.restarts = config.env.num_envs, config.env.timeout, config.env.restart_workers
        self.config, self.make_env = config.cluster, make_env
        self._ray = connection.import_ray()
        self.policy: Policy | None = None
        self.num_deaths = 0
        self.inference: Any = None
        self._published: tuple[int, Any] | None = None
        self._next_number = 0
        self._answered: set[int] = set()
        self._workers_policy: Any = None
        self._kept = (False, False)
        self._twin: Any = None
        self._calls: dict[str, tuple[Any, ...]] = {}
        self._spares: list[tuple[Any, Any]] = []  # a worker without a slot, and its answer that it is ready
        self._spares_after = 0.0
        unit = config.algorithm.cfg.envs_per_group
        self.group_size = None if unit == 1 else unit
        counts = [len(part) * unit for part in np.array_split(range(self.num_envs // unit), num_workers)]
        firsts = np.cumsum([0, *counts[:-1]])
        self.slots = [
            Slot(index, int(first), count) for index, (first, count) in enumerate(zip(firsts, counts, strict=True))
        ]
        self.description: dict[str, Any] = {}
        for slot in self.slots:
            self._hire(slot)

    # -- making workers ------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """What the environments are like, from the first worker."""
        self.description = self._get(self.slots[0].reference)
        return self.description

    def open(self, policy: Policy, kept: tuple[bool, bool], device: str | None = None, gpus: float = 0.0) -> None:
        """Send the policy to the workers; with `device`, to one actor on it that acts for all of them.

        `kept`: whether transitions carry the next observation, and the reward's terms.
        """
        self.policy, self._kept = policy, kept
        twin = copy.deepcopy(policy).cpu().requires_grad_(False)
        if device is not None:
            actor_class: Any = self._ray.remote(InferenceActor)
            # Ray restarts the actor if it dies and repeats the request, which contains all that it needs.
            options = {"max_restarts": -1, "max_task_retries": -1, "max_concurrency": 1000}
            self._twin = self._ray.put(twin)  # kept: a restart makes the actor of it again
            self.inference = actor_class.options(num_cpus=1, num_gpus=gpus, **options).remote(self._twin, device)
            twin = RemotePolicy(self.inference, twin)
        self._workers_policy = self._ray.put(twin)
        for slot in self.slots:
            self._adopt(slot)

    def _hire(self, slot: Slot) -> None:
        slot.incarnation += 1
        slot.is_ready = False
        slot.handle = self._take_spare() or self._new_worker()
        rows = (slot.first, slot.count, self.num_envs)
        slot.reference = slot.handle.prepare.remote(slot.index, slot.incarnation, rows, self.make_env)
        if self._workers_policy is not None:
            self._adopt(slot)

    def _new_worker(self) -> Any:
        actor_class: Any = self._ray.remote(CollectWorker)
        options = {"max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": "SPREAD"}
        return actor_class.options(num_cpus=self.config.worker_cpus, **options).remote(self.timeout)

    def _take_spare(self) -> Any:
        """Return a spare worker that is ready, else one that is starting, or None; remove dead ones."""
        for spare in list(self._spares):
            handle, ready = spare
            if self._ray.wait([ready], timeout=0)[0]:
                self._spares.remove(spare)
                if self._is_there(handle):
                    return handle
        return self._spares.pop(0)[0] if self._spares else None

    def _is_there(self, handle: Any) -> bool:
        answer = handle.warm_up.remote(None, None)
        try:
            self._ray.get(answer, timeout=SPARE_ANSWERS)
        except self._ray.exceptions.RayError:  # also where the time is up
            self._ray.kill(handle)
            return False
        return True

    @property
    def num_spares(self) -> int:
        """Number of spare workers."""
        return sum(bool(self._ray.wait([ready], timeout=0)[0]) for _, ready in list(self._spares))

    def _keep_spares(self) -> None:
        """Start as many spare workers as are configured and fit, once every slot has a worker."""
        missing = self.config.spare_workers - len(self._spares)
        if missing <= 0 or time.monotonic() < self._spares_after or not all(slot.is_ready for slot in self.slots):
            return
        self._spares_after = time.monotonic() + SPARES_INTERVAL
        room = self._ray.available_resources().get("CPU", 0.0) / self.config.worker_cpus
        for _ in range(min(missing, int(room))):
            handle = self._new_worker()
            self._spares.append((handle, handle.warm_up.remote(self.make_env, self._workers_policy)))

    def _adopt(self, slot: Slot) -> None:
        # An error of the reference, the answer to `prepare`, is raised by this answer.
        slot.reference = slot.handle.adopt.remote(
            slot.reference, self._workers_policy, self._kept, self.group_size, self._calls
        )

    # -- weights -------------------------------------------------------------------------------------------------------

    def weights(self, version: int) -> list[Any]:
        """The reference to the learner's weights, put into the object store once a version."""
        if self._published is None or self._published[0] != version:
            assert self.policy is not None
            self._published = version, self._ray.put(pack_weights(self.policy))
        return [self._published[1]]

    # -- orders --------------------------------------------------------------------------------------------------------

    def number(self) -> int:
        """A new order's number."""
        self._next_number += 1
        return self._next_number

    def give(self, slot: Slot, order: Order) -> None:
        """Order a block; a worker that is not ready yet gets it when it is."""
        slot.order = order
        if slot.handle is None:
            self._hire(slot)
        elif slot.is_ready:
            slot.reference = slot.handle.collect.remote(order)

    @property
    def idle(self) -> list[Slot]:
        """The workers without an order."""
        return [slot for slot in self.slots if slot.order is None]

    @property
    def busy(self) -> list[Slot]:
        """The workers with an order."""
        return [slot for slot in self.slots if slot.order is not None]

    def wait(self, seconds: float, renew: Callable[[Slot, Order], Order | None]) -> list[Block]:
        """Return the blocks that arrive within `seconds`; `renew` makes the order anew if a worker died, or None."""
        awaited = {slot.reference: slot for slot in self.slots if slot.reference is not None}
        if not awaited:
            time.sleep(min(seconds, 0.01))
            return []
        done, _ = self._ray.wait(list(awaited), num_returns=1, timeout=seconds)
        if done and len(awaited) > 1:  # all that have arrived
            done, _ = self._ray.wait(list(awaited), num_returns=len(awaited), timeout=0)
        blocks = []
        for reference in done:
            slot = awaited[reference]
            try:
                answer = self._get(reference)
            except WorkerLost as lost:
                self._replace(slot, str(lost), renew)
                continue
            slot.reference = None
            if not slot.is_ready:
                slot.is_ready = True
                self.description = self.description or answer
                if slot.order is not None:
                    slot.reference = slot.handle.collect.remote(slot.order)
            elif self._is_ordered(slot, answer):
                slot.failures, slot.order = 0, None
                blocks.append(answer)
        if blocks:
            self._keep_spares()
        return blocks

    def _is_ordered(self, slot: Slot, block: Block) -> bool:
        """Whether a block answers the worker's order, for the first time."""
        assert slot.order is not None
        if block.number != slot.order.number or block.number in self._answered:
            log.warning("rejected a block without an order (number %d)", block.number)
            return False
        self._answered.add(block.number)
        return True

    def _replace(self, slot: Slot, reason: str, renew: Callable[[Slot, Order], Order | None]) -> None:
        self.num_deaths += 1
        slot.failures += 1
        if slot.failures > self.restarts:
            raise RunError(
                f"worker {slot.index} failed {slot.failures} times in a row without a block: {reason}; look at its "
                "environment, or raise env.restart_workers"
            )
        log.warning("worker %d died (%s): another one replaces it and collects its block again", slot.index, reason)
        self._kill(slot)
        self._hire(slot)
        if slot.order is not None:
            slot.order = renew(slot, slot.order)

    def _get(self, reference: Any) -> Any:
        """An answer; raises what the worker raised, as one line, and `WorkerLost` where there is none."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except errors.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, DeftError):
                raise type(cause)(str(cause)) from error
            if isinstance(cause, errors.RayError):  # the inference actor's, or the weights were lost with a node
                raise WorkerLost(type(cause).__name__) from error
            raise RunError(f"a worker raised {type(cause).__name__}: {' '.join(str(cause).split())[:300]}") from error
        except errors.RayError as error:
            raise WorkerLost(type(error).__name__) from error

    def cancel(self) -> None:
        """Cancel all orders: workers that execute one are ended, since they cannot be interrupted."""
        for slot in self.busy:
            slot.order = None
            if slot.is_ready:
                self._kill(slot)
                slot.reference = slot.handle = None

    # -- all workers at once -------------------------------------------------------------------------------------------

    def ask(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker, each after its present order. Raise `WorkerLost` if one died."""
        if method == "call":
            self._calls[args[0]] = args[1:]
        references = [getattr(slot.handle, method).remote(*args) for slot in self.slots if slot.handle is not None]
        answers = []
        for reference in references:
            try:
                answers.append(self._get(reference))
            except WorkerLost:
                if method != "call":  # its successor gets the call when it is ready
                    raise
        return answers

    def close(self) -> None:
        """End the workers."""
        for slot in self.slots:
            self._kill(slot)
            slot.reference = slot.order = slot.handle = None
        for handle, _ in self._spares:
            self._ray.kill(handle)
        self._spares.clear()
        if self.inference is not None:
            self._ray.kill(self.inference)
            self.inference = None

    def _kill(self, slot: Slot) -> None:
        if slot.handle is not None:
            self._ray.kill(slot.handle)


class WorkerLost(Exception):
    """A worker died before it answered."""


class ClusterEnv(VectorEnv):
    """The environments of all workers, as the trainer sees them: what they are like. The workers step them."""

    notices_hangs = True

    def __init__(self, pool: WorkerPool, opened_connection: bool) -> None:
        super().__init__(pool.num_envs, **pool.describe()["spaces"])
        self.pool, self.config = pool, pool.config
        self._opened = opened_connection
        self.num_workers = len(pool.slots) if pool.config.ray_address == "local" else 0  # on this machine's cores
        self._closed = False

    def reset(self, seed: Any = None) -> Observation:
        """Raise an error: each worker resets its own environments."""
        raise InputError("the environments of a cluster are reset by their workers")

    def step(self, actions: np.ndarray) -> VectorStep:
        """Raise an error: each worker steps its own environments."""
        raise InputError("the environments of a cluster are stepped by their workers")

    def get_state(self) -> list[dict[str, Any]] | None:
        """The states of all environments, in their order."""
        states = [state["env"] for state in self.pool.ask("get_state")]
        return None if any(state is None for state in states) else [one for state in states for one in state]

    def set_state(self, states: list[dict[str, Any]]) -> None:
        """Raise an error: workers receive a state with an order."""
        raise InputError("the state of a cluster's environments is set through its collector")

    def state_obstacle(self) -> str | None:
        """What keeps the state from being saved."""
        return self.pool.description["state_obstacle"]

    def call(self, name: str, *args: Any) -> list[Any]:
        """Call a method of every environment."""
        return [answer for answers in self.pool.ask("call", name, *args) for answer in answers]

    def close(self) -> None:
        """End the workers, and the connection where it was opened for this run."""
        if not self._closed:
            self._closed = True
            self.pool.close()
            if self._opened:
                connection.disconnect()
