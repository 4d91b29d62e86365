"""What the live view costs: training with and without `--view` in turns, in one run.

PPO trains on images of the tabletop. Blocks of training with an open page (the server of `--view`, and another process
that asks it as the page does, every two seconds) and blocks without alternate, in the order off on, on off, off on, …,
so that a machine that becomes slower hits both alike. Each pair of blocks gives a ratio of env steps per second; the
result is their geometric mean with its 95 % interval. Iterations are counted whole; starting and ending the server is
not counted. Exit status 1 if the interval says that the view costs more than `--most` of the throughput.

The same ratio of env steps per second of CPU time of the training process is printed too: on a busy machine, where the
neighbours change the wall time by more than 2 %, it shows what training itself pays for the files that it writes.

    python benchmarks/view_cost.py                                       # a CPU
    python benchmarks/view_cost.py --vector warp --num-envs 1024         # a GPU
"""

from __future__ import annotations

import argparse
import contextlib
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import print_machine, print_table, write_json

from deft.config.loading import resolve
from deft.config.settings import LoggingConfig
from deft.runs import live
from deft.training.run import build_trainer
from deft.view.process import serving
from deft.view.server import POLL, listen, token_of

# The page of a browser on another machine: data and tiles, every two seconds.
VIEWER = f"""
import os, sys, time, urllib.request
os.nice(10)
while True:
    for path in ("data?run=.", "tiles.jpg?run=."):
        try:
            urllib.request.urlopen(sys.argv[1] + path, timeout=10).read()
        except OSError:
            pass
    time.sleep({POLL})
"""


class Block(NamedTuple):
    """Iterations with or without the view."""

    viewed: bool
    steps: int
    seconds: float
    cpu_seconds: float  # of the training process


class Alternation:
    """Blocks of iterations with and without the view: off (the warm-up), off on, on off, off on, …"""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.seconds = folder, seconds
        self.blocks: list[Block] = []
        self._open = contextlib.ExitStack()
        self._begin()

    def _begin(self) -> None:
        self._open.close()
        viewed = len(self.blocks) % 4 in (2, 3)
        mark = self.folder / live.FOLDER / live.VIEWER
        mark.unlink(missing_ok=True)  # without it files would be written for ten more seconds
        if viewed:
            with listen(0) as free:
                port = free.getsockname()[1]
            self._open.enter_context(serving(LoggingConfig(view=True, view_port=port), self.folder))
            command = [sys.executable, "-c", VIEWER, f"http://127.0.0.1:{port}/{token_of(self.folder)}/"]
            viewer = subprocess.Popen(command)
            self._open.callback(viewer.wait)
            self._open.callback(viewer.kill)
            while not mark.exists():  # until the page is open
                time.sleep(0.05)
        self._sum = Block(viewed, 0, 0.0, 0.0)
        self._now = time.perf_counter(), time.process_time()

    def count(self, steps: int) -> None:
        """Count an iteration; at the end of a block begin the next."""
        before, self._now = self._now, (time.perf_counter(), time.process_time())
        wall, cpu = (now - then for now, then in zip(self._now, before, strict=True))
        viewed, all_steps, seconds, cpu_seconds = self._sum
        self._sum = Block(viewed, all_steps + steps, seconds + wall, cpu_seconds + cpu)
        if self._sum.seconds >= self.seconds:
            self.blocks.append(self._sum)
            self._begin()

    def close(self) -> None:
        self._open.close()


def measure(arguments: argparse.Namespace, folder: Path) -> list[Block]:
    """Train until there are enough blocks; return them without the warm-up."""
    config = resolve(
        {
            "algorithm": {"name": "ppo", "cfg": {"n_epochs": 1, "batch_size": arguments.num_envs * 8}},
            "env": {
                "id": "tabletop",
                "num_envs": arguments.num_envs,
                "vector": arguments.vector,
                "kwargs": {"task": "reach", "observation": "images", "control_mode": "delta_ee_pos"},
            },
            "trainer": {"rollout_steps": 8, "total_timesteps": 10**9, "eval_freq": 0, "save_freq": 0},
            "logging": {"console_level": "ERROR", "tensorboard": False, "progress_bar": False},
            "output_dir": str(folder),
            "device": arguments.device,
            "threads": 1,
        }
    )
    trainer: Any = build_trainer(config)
    finish_step, alternation = trainer.finish_step, list[Alternation]()

    def finish(previous: int, metrics: Any) -> None:
        finish_step(previous, metrics)
        if not alternation:
            alternation.append(Alternation(folder, arguments.seconds))
            return
        alternation[0].count(trainer.num_timesteps - previous)
        if len(alternation[0].blocks) > 2 * arguments.pairs:
            raise KeyboardInterrupt

    trainer.finish_step = finish
    try:
        with contextlib.suppress(KeyboardInterrupt):
            trainer.train()
    finally:
        for one in alternation:
            one.close()
        trainer.close()
    return alternation[0].blocks[1:]


def ratios(blocks: list[Block], field: str) -> np.ndarray:
    """Env steps per second (a field of a block) with the view over those without, of each pair of blocks."""
    rates = [(block.viewed, block.steps / getattr(block, field)) for block in blocks]
    pairs = [dict(rates[index : index + 2]) for index in range(0, len(rates) - 1, 2)]
    return np.array([pair[True] / pair[False] for pair in pairs])


def interval(values: np.ndarray) -> tuple[float, float, float]:
    """Geometric mean, and its 95 % interval by 10,000 resamples of the pairs."""
    logs = np.log(values)
    means = np.random.default_rng(0).choice(logs, (10_000, len(logs))).mean(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return math.exp(logs.mean()), math.exp(low), math.exp(high)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=10.0, help="of a block")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--vector", default="sync", choices=["sync", "process", "warp"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--most", type=float, default=0.02, help="largest accepted cost, as a fraction")
    parser.add_argument("--out", help="write the figures to this JSON file")
    arguments = parser.parse_args()
    print_machine()
    with tempfile.TemporaryDirectory() as folder:
        blocks = measure(arguments, Path(folder) / "run")
    rows, results = [], {}
    for title, field in (("wall time", "seconds"), ("CPU time of training", "cpu_seconds")):
        rates = {
            viewed: np.median([one.steps / getattr(one, field) for one in blocks if one.viewed == viewed])
            for viewed in (False, True)
        }
        mean, low, high = interval(ratios(blocks, field))
        results[field] = {"ratio": mean, "interval": [low, high]}
        rows.append([title, *(f"{rate:,.1f}" for rate in rates.values()), f"{mean:.4f}", f"{low:.4f} to {high:.4f}"])
    print_table(["env steps per second of", "without", "with the view", "ratio", "95 % interval"], rows)
    high = results["seconds"]["interval"][1]
    write_json(arguments.out, {**results, "blocks": [one._asdict() for one in blocks]})
    return int(high < 1 - arguments.most)


if __name__ == "__main__":
    sys.exit(main())
