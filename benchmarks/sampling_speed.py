"""Microseconds to draw a batch of transitions out of a million on one thread: Deft's replay buffer beside NumPy's way.

NumPy's way is an array for each of observation, action, reward, next observation and terminal, indexed with random
integers, each then made a tensor; `tensors` is the same with torch tensors in place of arrays. Deft draws 32 batches at
once and hands them out one by one: `mean` counts all of them, `worst` is the call that draws. Rounds interleave the
ways; figures are medians over rounds, in CPU time. The bar is a mean of 30 µs.

    python benchmarks/sampling_speed.py --rounds 9 --out sampling.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import print_machine, print_table, write_json

from deft.data.replay import BLOCK, ReplayBuffer, TransitionTable

BAR_US = 30.0
EPISODE_LENGTH = 1000


def make_table(transitions: int, observation_dim: int, action_dim: int) -> TransitionTable:
    """Episodes of noise: the values do not change the time."""
    table = TransitionTable([EPISODE_LENGTH] * (transitions // EPISODE_LENGTH), observation_dim, action_dim)
    table.rows.uniform_(-1, 1)
    return table


def make_ways(table: TransitionTable, batch_size: int) -> dict[str, Callable[[], Any]]:
    """What draws a batch, by name."""
    rows = table.transition_rows()
    columns = [table.observation[rows], table.action[rows], table.reward[rows, None]]
    columns += [table.observation[rows + 1], table.terminated[rows, None]]
    arrays = [column.numpy() for column in columns]
    random = np.random.default_rng(0)

    def by_arrays() -> list[torch.Tensor]:
        indices = random.integers(0, len(rows), batch_size)
        return [torch.tensor(array[indices]) for array in arrays]

    def by_tensors() -> list[torch.Tensor]:
        indices = np.random.randint(0, len(rows), batch_size)
        return [column[indices] for column in columns]

    buffer = ReplayBuffer(table)
    return {"deft": lambda: buffer.sample(batch_size), "numpy": by_arrays, "tensors": by_tensors}


def microseconds(draw: Callable[[], Any], batches: int) -> tuple[float, float]:
    """The mean over `batches`, and the worst of a few blocks, each call on its own."""
    start = time.process_time()
    for _ in range(batches):
        draw()
    mean = (time.process_time() - start) / batches
    worst = 0.0
    for _ in range(2 * BLOCK):
        start = time.process_time()
        draw()
        worst = max(worst, time.process_time() - start)
    return 1e6 * mean, 1e6 * worst


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transitions", type=int, default=1_000_000)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--observation-dim", type=int, default=11)
    parser.add_argument("--action-dim", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, default=50 * BLOCK, help="drawn by each way in a round")
    parser.add_argument("--out", help="write the figures here, as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print_machine()
    table = make_table(arguments.transitions, arguments.observation_dim, arguments.action_dim)
    ways = make_ways(table, arguments.batch_size)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for draw in ways.values():
        microseconds(draw, BLOCK)
    for _ in range(arguments.rounds):
        for name, draw in ways.items():
            taken[name].append(microseconds(draw, arguments.batches))
    result = {
        name: {
            "mean_us": statistics.median(mean for mean, _ in pairs),
            "worst_us": statistics.median(w for _, w in pairs),
        }
        for name, pairs in taken.items()
    }
    rows = [
        [
            name,
            f"{figures['mean_us']:.1f}",
            f"{figures['worst_us']:.0f}",
            f"{figures['mean_us'] / result['deft']['mean_us']:.1f}x",
        ]
        for name, figures in result.items()
    ]
    print_table(["way", "mean, µs a batch", "worst, µs", "Deft is faster by"], rows)
    within = result["deft"]["mean_us"] < BAR_US
    print(f"{'within' if within else 'NOT within'} the bar of {BAR_US:g} µs")
    write_json(arguments.out, {"settings": vars(arguments), "ways": result, "bar_us": BAR_US, "within": within})


if __name__ == "__main__":
    main()
