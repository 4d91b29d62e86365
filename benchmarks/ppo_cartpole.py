"""PPO on CartPole-v1: five seeds of 100,000 steps, each evaluated over 100 episodes on a fresh environment.

The settings are those of the documents' command. The last checkpoint is evaluated, not the best one. Exit status 1 if
any seed is below 475.

    python benchmarks/ppo_cartpole.py --seeds 5 --jobs 2
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import evaluate_run, last_checkpoint, print_machine, print_table, read_metrics, run_deft, write_json

BAR = 475.0
STEPS = 100_000
SETTINGS: list[Any] = [
    "--env",
    "CartPole-v1",
    "--total_timesteps",
    STEPS,
    "--rollout_steps",
    2048,
    "--ppo_epochs",
    4,
]
SETTINGS += ["--ppo_clip_range", 0.2, "--learning_rate", 3e-4, "--batch_size", 64]
EVALUATION_SEED = 10_000


def train_and_evaluate(algorithm: str, settings: list[Any], seed: int, episodes: int, folder: Path) -> dict[str, Any]:
    """One seed: train by the command line, then evaluate what it saved last."""
    run_dir = folder / f"seed-{seed}"
    start = time.perf_counter()
    run_deft(
        ["train", algorithm, *settings, "--seed", seed, "--device", "cpu", "--threads", 1, "--output_dir", run_dir]
    )
    seconds = time.perf_counter() - start
    checkpoint = last_checkpoint(run_dir)
    result = evaluate_run(checkpoint, episodes, EVALUATION_SEED + seed)
    returns = [episode["episode_return"] for episode in read_metrics(run_dir, "episode")]
    return {
        "seed": seed,
        "steps": int(checkpoint.name.rpartition("-")[2]),
        "seconds": seconds,
        "mean_reward": result["mean_reward"],
        "std_reward": result["std_reward"],
        "training_last_100": statistics.mean(returns[-100:]),
    }


def main(algorithm: str, settings: list[Any], description: str | None) -> int:
    """Train all seeds, print the table; 1 if any is below the bar."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=1, help="single-thread runs at a time")
    parser.add_argument("--json", help="write the figures here")
    arguments = parser.parse_args()
    print_machine()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        seeds = range(arguments.seeds)
        work = [
            pool.submit(train_and_evaluate, algorithm, settings, seed, arguments.episodes, Path(folder))
            for seed in seeds
        ]
        results = [job.result() for job in work]
    print_table(
        ["seed", "env steps", "seconds", f"mean of {arguments.episodes}", "std", "last 100 in training", "≥ 475"],
        [
            [
                result["seed"],
                f"{result['steps']:,}",
                f"{result['seconds']:.0f}",
                f"{result['mean_reward']:.1f}",
                f"{result['std_reward']:.1f}",
                f"{result['training_last_100']:.1f}",
                "yes" if result["mean_reward"] >= BAR else "NO",
            ]
            for result in results
        ],
    )
    solved = sum(result["mean_reward"] >= BAR for result in results)
    print(f"{solved} of {len(results)} seeds at {BAR:.0f} or more")
    write_json(arguments.json, {"results": results})
    return 0 if solved == len(results) else 1


if __name__ == "__main__":
    sys.exit(main("ppo", SETTINGS, __doc__))
