"""GRPO and PPO on `driving`, medium, from one behaviour-cloned start: success before and after, in a table.

The scripted expert drives with noise on its actions, a policy clones it, and both algorithms start from that policy for
the same number of env steps. Success is over fresh episodes of the most likely actions, of the last checkpoint. Exit
status 1 if GRPO gains fewer than 30 points for any seed.

    python benchmarks/grpo_driving.py --seeds 3 --jobs 2
    python benchmarks/grpo_driving.py --seeds 1 --steps 100000 --episodes 100      a first look
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import evaluate_run, last_checkpoint, print_machine, print_table, run_deft, write_json

BAR = 30.0  # points of success
EVALUATION_SEED = 10_000
ENV = ["--env", "driving", "--env_kwargs", "difficulty=medium"]
LOOP = ["--eval_freq", 0, "--save_freq", 0, "--device", "cpu", "--threads", 1]
DATA = ["--policy", "expert", "--noise", 0.1, "--num_envs", 16]
# The cloned deviation starts small: the expert's noise is, and a policy that swerves never arrives.
CLONE = ["--log_std_init", -2, "--eval_freq", 0, "--device", "cpu", "--threads", 1]
# Many scenes an iteration: within a scene the luck of a few episodes is most of what an update sees.
GRPO = ["--num_envs", 1024, "--group_size", 8, "--advantage", "process", "--no-normalize_std", "--max_resamples", 0]
GRPO += ["--gamma", 0.97, "--learning_rate", 5e-4, "--learning_rate_schedule", "linear", "--batch_size", 8192]
GRPO += ["--kl_coef", 0, "--entropy_coef", 0.2]
PPO = ["--num_envs", 128, "--rollout_steps", 64, "--learning_rate", 3e-4, "--batch_size", 1024, "--entropy_coef", 0]
PPO += ["--value_warmup", 5]


def success(run_dir: Path, episodes: int, seed: int) -> dict[str, Any]:
    """Success rate in per cent and mean reward of a run's last checkpoint."""
    result = evaluate_run(last_checkpoint(run_dir), episodes, EVALUATION_SEED + seed)
    return {"success": 100 * result["success_rate"], "mean_reward": result["mean_reward"]}


def timed_training(arguments: list[Any]) -> float:
    """Train by the command line; seconds."""
    start = time.perf_counter()
    run_deft(["train", *arguments])
    return time.perf_counter() - start


def compare(seed: int, steps: int, demonstrations: int, epochs: int, episodes: int, folder: Path) -> dict[str, Any]:
    """One seed: demonstrations, the clone, and both algorithms from there."""
    data = folder / f"driving-{seed}" / "expert-v0"
    run_deft(["collect", *ENV, *DATA, "--episodes", demonstrations, "--seed", seed, "--out", data])
    clone = folder / f"clone-{seed}"
    common = ["--seed", seed, "--output_dir"]
    seconds = timed_training(["sft", "--dataset", data, *ENV, "--num_epochs", epochs, *CLONE, *common, clone])
    results: dict[str, Any] = {"seed": seed, "clone": {**success(clone, episodes, seed), "seconds": seconds}}
    for name, settings in (("grpo", GRPO), ("ppo", PPO)):
        run_dir = folder / f"{name}-{seed}"
        start = ["--model_path", clone, "--total_timesteps", steps]
        seconds = timed_training([name, *ENV, *settings, *LOOP, *start, *common, run_dir])
        results[name] = {**success(run_dir, episodes, seed), "seconds": seconds}
    return results


def main() -> int:
    """Train all seeds, print the table; 1 if GRPO gains less than the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6_000_000, help="env steps of GRPO and of PPO")
    parser.add_argument("--demonstrations", type=int, default=100, help="episodes of the expert")
    parser.add_argument("--epochs", type=int, default=40, help="of cloning")
    parser.add_argument("--episodes", type=int, default=500, help="of an evaluation")
    parser.add_argument("--jobs", type=int, default=1, help="single-thread runs at a time")
    parser.add_argument("--json", help="write the figures here")
    arguments = parser.parse_args()
    print_machine()
    sizes = (arguments.steps, arguments.demonstrations, arguments.epochs, arguments.episodes)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        work = [pool.submit(compare, seed, *sizes, Path(folder)) for seed in range(arguments.seeds)]
        results = [job.result() for job in work]
    print_table(
        ["seed", "policy", "success %", "mean reward", "gain in points", "seconds"],
        [
            [
                result["seed"],
                name,
                f"{result[name]['success']:.1f}",
                f"{result[name]['mean_reward']:.1f}",
                f"{result[name]['success'] - result['clone']['success']:+.1f}",
                f"{result[name]['seconds']:.0f}",
            ]
            for result in results
            for name in ("clone", "grpo", "ppo")
        ],
    )
    gains = [result["grpo"]["success"] - result["clone"]["success"] for result in results]
    print(f"GRPO gains {min(gains):+.1f} to {max(gains):+.1f} points in {arguments.steps:,} env steps")
    write_json(arguments.json, {"results": results})
    return 0 if min(gains) >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
