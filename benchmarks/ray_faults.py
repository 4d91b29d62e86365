"""A run on Ray whose workers are killed every few seconds, and that loses a node and gets another.

A cluster of several nodes on one machine (Ray's own test cluster): the learner is on the head, the workers on two more
nodes. Every `--every` seconds one worker is killed; after a third of the time a node is removed, after two thirds one
is added. `--spares` workers wait for the place of one that dies; the clock runs from when they are there. Every
observation carries who made it and the number of the step in its maker's life: no pair may be learned from twice.
Prints what was done when, and at the end whether training continued, and how soon throughput recovered.

    python benchmarks/ray_faults.py --seconds 120 --every 5
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import threading
import time
from typing import Any

import gymnasium
import numpy as np
from common import print_machine, write_json

RECOVERED = 0.8  # of the rate before: throughput counts as recovered
WINDOW = 2.0  # seconds over which a rate is averaged
LONGEST_START = 120.0  # seconds after which it begins, also where no spare worker has come


class Numbered(gymnasium.Env):
    """Observation: who, and the number of the step in this copy's life."""

    observation_space = gymnasium.spaces.Box(0, 2**24, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, seconds: float = 0.02, length: int = 50) -> None:
        self.seconds, self.length, self.steps, self.life = seconds, length, 0, 0
        self.who = np.random.SeedSequence().entropy % 2**40  # from the system: other in every process

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.steps = 0
        return self._see(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        time.sleep(self.seconds)
        self.steps, self.life = self.steps + 1, self.life + 1
        return self._see(), 1.0, False, self.steps >= self.length, {}

    def _see(self) -> np.ndarray:
        return np.array([self.who >> 20, self.who % 2**20, self.life], np.float32)


class Saboteur(threading.Thread):
    """Kills workers, removes a node and adds one, and writes down when."""

    def __init__(self, trainer: Any, cluster: Any, node: Any, cpus: int, seconds: float, every: float) -> None:
        super().__init__(daemon=True)
        self.trainer, self.cluster, self.node, self.cpus = trainer, cluster, node, cpus
        self.seconds, self.every = seconds, every
        self.events: list[tuple[float, str]] = []
        self.started = time.monotonic()
        self.over = False

    def run(self) -> None:
        import ray
        import ray._private.utils

        ray._private.utils.set_sigterm_handler = lambda handler: None  # a new node wants one, in the main thread alone
        removed = added = False
        rng = random.Random(0)
        next_kill = self.every
        while (now := time.monotonic() - self.started) < self.seconds:
            if now >= next_kill:
                next_kill += self.every
                slot = rng.choice(self.trainer.collection.collector.pool.slots)
                if slot.handle is not None:
                    ray.kill(slot.handle)
                    self.note(f"killed worker {slot.index}")
            if not removed and now > self.seconds / 3:
                removed = True
                self.note("removing a node")
                self.cluster.remove_node(self.node)
                self.note("a node is removed")
            if not added and now > 2 * self.seconds / 3:
                added = self.add_node()
            time.sleep(0.1)
        self.over = True

    def add_node(self) -> bool:
        """Whether it could be started; a busy machine may take longer than Ray waits."""
        self.note("adding a node")
        try:
            self.cluster.add_node(num_cpus=self.cpus)
        except Exception as error:
            self.note(f"no node was added: {' '.join(str(error).split())[:80]}")
            return False
        self.note("a node is added")
        return True

    def note(self, what: str) -> None:
        self.events.append((time.monotonic() - self.started, what))
        print(f"{self.events[-1][0]:7.1f} s  {what}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two kills")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--spares", type=int, help="workers that wait for a place; by default as many as there are")
    parser.add_argument("--json", help="write the figures to this file")
    arguments = parser.parse_args()
    if arguments.spares is None:
        arguments.spares = arguments.workers  # half of them are left when a node goes

    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
    from ray.cluster_utils import Cluster

    from deft import schema
    from deft.config.loading import resolve
    from deft.training.cluster import connection
    from deft.training.run import build_trainer

    print_machine()
    gymnasium.register("Numbered-v0", Numbered)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    cpus = arguments.workers + arguments.spares  # one node alone has room for all workers
    cluster.add_node(num_cpus=cpus)
    node = cluster.add_node(num_cpus=cpus)
    connection.connect(cluster.address)
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "algorithm": {"name": "ppo", "cfg": {"n_epochs": 1, "batch_size": 256}},
            "env": {
                "id": "Numbered-v0", "num_envs": 2 * arguments.workers, "num_workers": arguments.workers,
                "restart_workers": 20,
            },
            "policy": {"normalize_observation": False},
            "trainer": {"total_timesteps": 10**9, "buffer_size": 8, "eval_freq": 0, "save_freq": 0},
            "cluster": {
                "collectors": "ray", "ray_address": "auto", "block_steps": 8, "spare_workers": arguments.spares,
            },
            "logging": {"console_level": "WARNING", "tensorboard": False},
            "output_dir": f"{folder}/run", "device": "cpu",
        }  # fmt: skip
        trainer = build_trainer(resolve(config))
        seen: list[np.ndarray] = []
        arrivals: list[tuple[float, int]] = []
        update = trainer.algorithm.update
        saboteur = Saboteur(trainer, cluster, node, cpus, arguments.seconds, arguments.every)

        def watching(batches: Any) -> Any:
            rollout = next(batches)
            pool = trainer.collection.collector.pool
            waits = time.monotonic() - saboteur.started < LONGEST_START
            if saboteur.ident is None and (pool.num_spares == arguments.spares or not waits):
                saboteur.started = time.monotonic()  # the clock runs from when all are there
                saboteur.start()
            seen.append(rollout[schema.OBSERVATION].flatten(0, 1).numpy().copy())
            arrivals.append((time.monotonic(), len(seen[-1])))
            if saboteur.over:
                stop.append(True)
            return update(iter([rollout]))

        stop: list[bool] = []
        trainer.algorithm.update = watching
        original = trainer.run._stops
        trainer.run._stops = lambda: bool(stop) or original()
        summary = trainer.train()
        deaths = trainer.collection.collector.pool.num_deaths
        trainer.close()
    connection.disconnect()
    cluster.shutdown()
    steps = np.concatenate(seen)
    result = {
        "steps": len(steps),
        "twice": int(len(steps) - len(np.unique(steps, axis=0))),
        "timesteps": summary["timesteps"],
        "deaths": deaths,
        "events": saboteur.events,
        **recovery([(when - saboteur.started, size) for when, size in arrivals], saboteur.events),
    }
    print(f"learned from {result['steps']:,} steps, {result['twice']} of them twice; {deaths} workers died")
    for when, what, delay in result["delays"]:
        print(f"{when:7.1f} s  {what}: back at {RECOVERED:.0%} of the throughput after {delay:.1f} s")
    print(f"steps/s, each {WINDOW:g} s: {' '.join(f'{rate:.0f}' for rate in result['rates'])}")
    print(f"throughput: {result['rate']:.0f} steps/s before; recovered after at most {result['slowest']:.1f} s")
    has_node = any(what == "a node is added" for _, what in saboteur.events)
    ok = has_node and result["twice"] == 0 and result["timesteps"] == result["steps"] and result["slowest"] <= 10.0
    print("PASS" if ok else "FAIL", flush=True)
    write_json(arguments.json, result)
    raise SystemExit(not ok)


def recovery(arrivals: list[tuple[float, int]], events: list[tuple[float, str]]) -> dict[str, Any]:
    """The rate before the first event, and for each one how long until a window has 80 % of it."""
    times, sizes = np.array([time_ for time_, _ in arrivals]), np.array([size for _, size in arrivals])

    def rate(start: float) -> float:
        return float(sizes[(times >= start) & (times < start + WINDOW)].sum() / WINDOW)

    begin = events[0][0] if events else times[-1]
    usual = float(sizes[(times >= 0) & (times < begin)].sum() / begin)  # before anything happened
    slowest, found = 0.0 if usual else float("inf"), []
    for when, what in events:
        if when > times[-1] - 2 * WINDOW:
            continue
        delays = [d for d in np.arange(0.0, 60.0, 0.25) if rate(when + d) >= RECOVERED * usual]
        found.append((when, what, float(delays[0]) if delays else float("inf")))
        slowest = max(slowest, found[-1][2])
    rates = [rate(start) for start in np.arange(0.0, times[-1], WINDOW)]
    return {"rate": usual, "slowest": slowest, "delays": found, "rates": rates}


if __name__ == "__main__":
    main()
