"""PPO on HalfCheetah-v5 for a million steps, with the recipe `halfcheetah-ppo`: returns over several seeds.

Two figures a seed: the mean return of the last 100 training episodes (stochastic actions, what CleanRL reports), and
the mean of a deterministic evaluation of the last checkpoint on fresh environments (what the Stable-Baselines3 zoo
reports).

Published, after 1M steps: CleanRL 1,442.6 ± 46.0 (HalfCheetah-v4, 3 seeds, settings of its `ppo_continuous_action.py`);
Stable-Baselines3 zoo 5,819.1 ± 663.5 (HalfCheetah-v3, one run, tuned settings; ± over evaluation episodes).

    python benchmarks/ppo_halfcheetah.py --seeds 3 --jobs 2 --out halfcheetah.json
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import evaluate_run, last_checkpoint, print_machine, print_table, read_metrics, run_deft, write_json

PRESET = "halfcheetah-ppo"
EVALUATION_SEED = 10_000
CURVE_POINTS = 200


def train_and_evaluate(seed: int, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """One seed, in processes of one thread."""
    run_dir = folder / f"seed-{seed}"
    options = ["--config", arguments.preset, "--seed", seed, "--device", "cpu", "--threads", 1, "--output_dir", run_dir]
    if arguments.total_timesteps is not None:
        options += ["--total_timesteps", arguments.total_timesteps]
    start = time.perf_counter()
    run_deft(["train", *options])
    seconds = time.perf_counter() - start
    episodes = read_metrics(run_dir, "episode")
    returns = [episode["episode_return"] for episode in episodes]
    result = evaluate_run(last_checkpoint(run_dir), arguments.episodes, EVALUATION_SEED + seed)
    stride = max(1, len(episodes) // CURVE_POINTS)
    points = range(0, len(episodes), stride)
    curve = [[episodes[i]["step"], statistics.mean(returns[max(0, i - 99) : i + 1])] for i in points]
    return {
        "seed": seed,
        "seconds": seconds,
        "training_last_100": statistics.mean(returns[-100:]),
        "evaluation_mean": result["mean_reward"],
        "evaluation_std": result["std_reward"],
        "curve": curve,
    }


def mean_and_std(values: list[float]) -> str:
    """`mean ± std` over the seeds (population deviation, as numpy's default)."""
    return f"{statistics.mean(values):,.1f} ± {statistics.pstdev(values):,.1f}"


def main() -> None:
    """Train all seeds, print the table, write the learning curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="single-thread runs at a time")
    parser.add_argument("--episodes", type=int, default=20, help="of the deterministic evaluation")
    parser.add_argument("--preset", default=PRESET, help="a preset or a config file")
    parser.add_argument("--total_timesteps", type=int, help="in place of the preset's, for a quick look")
    parser.add_argument("--out", help="write the figures and learning curves here, as JSON")
    arguments = parser.parse_args()
    print_machine()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        work = [pool.submit(train_and_evaluate, seed, Path(folder), arguments) for seed in seeds]
        results = [job.result() for job in work]
    rows: list[list[object]] = [
        [
            result["seed"],
            f"{result['seconds']:,.0f}",
            f"{result['training_last_100']:,.1f}",
            f"{result['evaluation_mean']:,.1f} ± {result['evaluation_std']:,.1f}",
        ]
        for result in results
    ]
    training = mean_and_std([result["training_last_100"] for result in results])
    evaluation = mean_and_std([result["evaluation_mean"] for result in results])
    rows.append(["all", "", training, evaluation])
    print_table(["seed", "seconds", "last 100 training episodes", f"evaluation, {arguments.episodes} episodes"], rows)
    write_json(arguments.out, {"preset": arguments.preset, "results": results})


if __name__ == "__main__":
    main()
