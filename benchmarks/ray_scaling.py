"""What collection on Ray gains and costs: workers that wait, the tabletop, images on their way, and weights.

- `waiting`: an env that waits 50 ms a step; env steps per second with 1 worker and with 16.
- `tabletop`: the embedded robot with both its cameras; 1 worker and 2.
- `images`: megabytes per second of image transitions from workers into the learner's rollout buffer.
- `weights`: the share of the learner's time that goes into handing out, and waiting for, 100 M parameters.
- `messages`: an order and its empty block, a put, a get: what a model of larger clusters is made of (`--model`).

    python benchmarks/ray_scaling.py                    # all of it, about ten minutes
    python benchmarks/ray_scaling.py --parts waiting    # one part
    python benchmarks/ray_scaling.py --model FILE       # where 8, 64 and 512 GPUs saturate, from --json FILE
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from common import print_machine, print_table, write_json

PARTS = ("waiting", "tabletop", "images", "weights", "messages")
BARS = {"waiting": 14.0, "tabletop": 1.7, "images": 200.0, "weights": 0.05}


class Waiting(gymnasium.Env):
    """Does nothing but take its time, as a robot or a remote simulator does."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, seconds: float = 0.05, length: int = 50) -> None:
        self.seconds, self.length, self.steps = seconds, length, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.steps = 0
        return self._see(), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict]:
        time.sleep(self.seconds)
        self.steps += 1
        return self._see(), 0.0, False, self.steps >= self.length, {}

    def _see(self) -> Any:
        return np.zeros(4, np.float32)


def build(env_id: str, workers: int, folder: str, *, num_envs: int | None = None, **changes: Any) -> Any:
    """A run of PPO on Ray; changes by dotted path with `__`."""
    from deft.config.loading import resolve
    from deft.training.run import build_trainer

    config: dict[str, Any] = {
        "algorithm": {"name": "ppo", "cfg": {"n_epochs": 1, "batch_size": 256}},
        "env": {"id": env_id, "num_envs": num_envs or workers, "num_workers": workers, "kwargs": {}},
        "policy": {"hidden_sizes": [64, 64]},
        "trainer": {"eval_freq": 0, "save_freq": 0, "buffer_size": 16, "total_timesteps": 1000, "max_staleness": 1},
        "cluster": {"collectors": "ray", "spare_workers": 0},  # what is measured is the work
        "logging": {"console_level": "WARNING", "tensorboard": False, "enable_file_logging": False},
        "output_dir": f"{folder}/{env_id.replace('/', '-')}-{workers}-{time.monotonic_ns()}",
        "device": "auto",
    }
    for path, value in changes.items():
        section, name = path.split("__")
        config[section][name] = value
    return build_trainer(resolve(config))


def measured(trainer: Any, warm_up: int = 3, learns: bool = True) -> dict[str, float]:
    """Train, and what each update after the first few took and learned from; without `learns`, collect alone."""
    times: list[float] = []
    update = trainer.algorithm.update
    sizes: list[int] = []
    learned: list[float] = []

    def timed(batches: Any) -> Any:
        rollout = next(batches)
        times.append(time.monotonic())
        sizes.append(rollout.numel())
        if learns:
            metrics = update(iter([rollout]))
        else:
            metrics, trainer.algorithm.version = {}, trainer.algorithm.version + 1
        learned.append(time.monotonic() - times[-1])
        feeders.append((feeder().publishing, feeder().waited))
        return metrics

    def feeder() -> Any:
        return trainer.collection.collector.feeder

    feeders: list[tuple[float, float]] = []
    trainer.algorithm.update = timed
    trainer.train()
    trainer.close()
    seconds = times[-1] - times[warm_up]
    return {
        "steps_per_second": sum(sizes[warm_up:-1]) / seconds,
        "seconds": seconds,
        "updating": sum(learned[warm_up:-1]) / seconds,
        "publishing": (feeders[-1][0] - feeders[warm_up][0]) / seconds,
        "waiting": (feeders[-1][1] - feeders[warm_up][1]) / seconds,
    }


def waiting(folder: str, steps: int) -> dict[str, Any]:
    rates = {}
    for workers in (1, 16):
        trainer = build("Waiting-v0", workers, folder, trainer__total_timesteps=steps * workers)
        rates[workers] = measured(trainer)["steps_per_second"]
    return {"steps_per_second": rates, "ratio": rates[16] / rates[1]}


def tabletop(folder: str, steps: int) -> dict[str, Any]:
    """Both cameras, 64 px, acting included, learning not; rounds alternate, and the medians count."""
    found: dict[int, list[float]] = {1: [], 2: []}
    for workers in (1, 2) * 3:
        kwargs = {"observation": "both"}
        size = {"trainer__total_timesteps": 8 * workers * steps, "env__kwargs": kwargs}
        trainer = build("deft/Tabletop-v0", workers, folder, num_envs=4 * workers, **size)
        found[workers].append(measured(trainer, learns=False)["steps_per_second"])
    rates = {workers: statistics.median(values) for workers, values in found.items()}
    return {"steps_per_second": rates, "rounds": found, "ratio": rates[2] / rates[1]}


def images(folder: str, steps: int) -> dict[str, Any]:
    """Blocks of images from two workers that have them ready, through the object store, into a rollout buffer."""
    num_envs, size = 4, 128
    import ray

    from deft import schema
    from deft.data.rollout import RolloutBuffer
    from deft.training.cluster.blocks import Block, assemble, row_of, segments_of

    @ray.remote(num_cpus=1)
    class Source:
        def __init__(self, slot: int) -> None:
            rng = np.random.default_rng(slot)
            shape, self.slot, self.sequence = (steps, num_envs // 2), slot, -1
            numbers = {name: np.zeros(shape, np.float32) for name in (schema.VALUE, schema.NEXT_VALUE)}
            ends = {name: np.zeros(shape, bool) for name in (schema.NEXT_TERMINATED, schema.NEXT_TRUNCATED)}
            pictures = rng.integers(256, size=(*shape, 3, size, size), dtype=np.uint8)
            self.columns = {schema.OBSERVATION: pictures, **numbers, **ends}

        def block(self) -> Block:
            self.sequence += 1
            details = (steps, [], [], 0, [], None, None, 0.0, 0, self.sequence)
            return Block(self.sequence, self.slot, 0, self.columns, *details)

    sources = [Source.remote(slot) for slot in range(2)]
    buffer = RolloutBuffer(steps)
    rates = []
    for _ in range(12):
        started = time.monotonic()
        blocks = ray.get([source.block.remote() for source in sources])
        segments = [segment for block in blocks for segment in segments_of(block, num_envs // 2, 0)]
        columns = assemble(segments, steps, num_envs)
        for step in range(steps):
            buffer.write(row_of(columns, step))
        rollout = buffer.get()
        rates.append(rollout.bytes() / 1e6 / (time.monotonic() - started))
    for source in sources:
        ray.kill(source)
    return {"megabytes_per_second": statistics.median(rates[2:]), "megabytes_a_rollout": rollout.bytes() / 1e6}


def weights(folder: str, steps: int) -> dict[str, Any]:
    """Two layers of 7000 units in each tower: 100 M parameters."""
    trainer = build(
        "Waiting-v0", 2, folder, env__kwargs={"seconds": 0.001}, policy__hidden_sizes=[7000, 7000],
        trainer__buffer_size=64, trainer__total_timesteps=64 * 2 * 10, cluster__inference="actor",
    )  # fmt: skip
    count = sum(parameter.numel() for parameter in trainer.policy.parameters())
    result = measured(trainer)
    return {"parameters": count, **result}


def messages(folder: str, steps: int) -> dict[str, Any]:
    """Seconds of an order and its block, and bytes per second into and out of the object store."""
    import ray

    @ray.remote(num_cpus=1)
    class Echo:
        def nothing(self) -> None:
            return None

        def fetch(self, reference: list[Any]) -> float:
            started = time.monotonic()
            np.copy(ray.get(reference[0]))
            return time.monotonic() - started

    echo = Echo.remote()
    ray.get(echo.nothing.remote())
    trips = [_timed(lambda: ray.get(echo.nothing.remote())) for _ in range(300)]
    array = np.zeros(100_000_000, np.float32)  # 400 MB
    puts, gets = [], []
    for _ in range(5):
        started = time.monotonic()
        reference = ray.put(array)
        puts.append(time.monotonic() - started)
        gets.append(ray.get(echo.fetch.remote([reference])))
        del reference
    ray.kill(echo)
    return {
        "round_trip": statistics.median(trips),
        "put_bytes_per_second": array.nbytes / statistics.median(puts),
        "get_bytes_per_second": array.nbytes / statistics.median(gets),
    }


def _timed(call: Any) -> float:
    started = time.monotonic()
    call()
    return time.monotonic() - started


def model(path: str) -> None:
    """Where larger clusters saturate, from the costs that were measured on this machine.

    W workers of n environments make W n / e steps per second, where a step takes e seconds. A learner process takes in
    R / b, where a step has b bytes and R is the path's rate, and gives orders for n c / m, where a block has c steps of
    n environments and an order costs m seconds. The least of these is what a run gets.
    """
    result = json.loads(Path(path).read_text())
    trip = result["messages"]["round_trip"]
    path_rate = result["images"]["megabytes_per_second"] * 1e6
    rows = []
    for gpus in (8, 64, 512):
        workers = 16 * gpus
        collects = workers * 8 / 0.05  # 8 environments of 50 ms each
        orders = 8 * 256 / trip  # blocks of 256 steps of 8 environments, one learner process giving the orders
        for name, size in (("vector, 400 B", 400.0), ("two 64 px cameras, 24 kB", 24e3), ("two 224 px, 300 kB", 3e5)):
            one, all_ = path_rate / size, gpus * path_rate / size
            rows.append([gpus, workers, name, f"{collects:,.0f}", f"{one:,.0f}", f"{all_:,.0f}", f"{orders:,.0f}"])
    header = ["GPUs", "workers", "a step", "workers make /s", "1 learner takes /s", "all take /s", "orders /s"]
    print_table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--steps", type=int, default=400, help="steps of each environment in a measurement")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--model", help="fit the model to the figures of this file, and measure nothing")
    arguments = parser.parse_args()
    if arguments.model:
        model(arguments.model)
        return
    torch.set_num_threads(1)
    from deft.training.cluster import connection

    gymnasium.register("Waiting-v0", Waiting)
    print_machine()
    connection.connect("local", 18)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for part in arguments.parts:
            results[part] = globals()[part](folder, arguments.steps)
            print(part, json.dumps(results[part]), flush=True)
    connection.disconnect()
    rows = []
    for part, key in (("waiting", "ratio"), ("tabletop", "ratio"), ("images", "megabytes_per_second")):
        if part in results:
            rows.append([part, f"{results[part][key]:.3g}", f"at least {BARS[part]:g}"])
    if "weights" in results:
        rows.append(["weights: publishing", f"{results['weights']['publishing']:.1%}", f"below {BARS['weights']:.0%}"])
        rows.append(["weights: waiting for steps", f"{results['weights']['waiting']:.1%}", "-"])
    if rows:
        print_table(["what", "measured", "bar"], rows)
    write_json(arguments.json, results)


if __name__ == "__main__":
    main()
