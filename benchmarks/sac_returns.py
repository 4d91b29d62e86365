"""SAC's returns over seeds, by the command line: Pendulum within 10,000 steps, the MuJoCo tasks to any number.

The last checkpoint is evaluated, not the best one, over 20 episodes of fresh environments; the learning curve is
printed too, and with `--sb3` that of Stable-Baselines3 SAC for the same steps in the same run.

    python benchmarks/sac_returns.py --env Pendulum-v1 --steps 10000 --learning-starts 1000 --bar -200
    python benchmarks/sac_returns.py --env HalfCheetah-v5 --steps 1000000 --seeds 3 --jobs 3 --bar 9500
    python benchmarks/sac_returns.py --env HalfCheetah-v5 --steps 300000 --seeds 3 --jobs 6 --sb3
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import (
    evaluate_run,
    last_checkpoint,
    print_machine,
    print_table,
    read_metrics,
    run_deft,
    run_worker,
    write_json,
)

EPISODES, EVALUATION_SEED, POINTS = 20, 10_000, 10


def train_deft(arguments: argparse.Namespace, seed: int, folder: Path) -> dict[str, Any]:
    """One seed of Deft: its curve and the return of what it saved last."""
    run_dir = folder / f"deft-{seed}"
    start = time.perf_counter()
    flags = [
        "--env",
        arguments.env,
        "--total_timesteps",
        arguments.steps,
        "--learning_starts",
        arguments.learning_starts,
    ]
    flags += ["--eval_freq", max(1, arguments.steps // POINTS), "--eval_episodes", EPISODES, "--save_freq", 0]
    flags += ["--seed", seed, "--device", arguments.device, "--threads", 1, "--output_dir", run_dir]
    run_deft(["train", "sac", *flags, *arguments.flags])
    seconds = time.perf_counter() - start
    result = evaluate_run(last_checkpoint(run_dir), EPISODES, EVALUATION_SEED + seed)
    curve = [(line["step"], line["mean_reward"]) for line in read_metrics(run_dir, "evaluation")]
    return {"library": "deft", "seed": seed, "seconds": seconds, "mean_reward": result["mean_reward"], "curve": curve}


def train_sb3(arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """In a worker: the same of Stable-Baselines3, with its own defaults but for `learning_starts`."""
    import gymnasium
    from stable_baselines3 import SAC
    from stable_baselines3.common.evaluation import evaluate_policy

    start = time.perf_counter()
    evaluation = gymnasium.make(arguments.env)
    model = SAC(
        "MlpPolicy", arguments.env, seed=seed, learning_starts=arguments.learning_starts, device=arguments.device
    )
    curve = []
    for _ in range(POINTS):
        model.learn(arguments.steps // POINTS, reset_num_timesteps=False)
        evaluation.reset(seed=EVALUATION_SEED + seed)
        mean, _ = evaluate_policy(model, evaluation, n_eval_episodes=EPISODES, warn=False)
        curve.append((model.num_timesteps, float(mean)))
    seconds = time.perf_counter() - start
    return {"library": "sb3", "seed": seed, "seconds": seconds, "mean_reward": curve[-1][1], "curve": curve}


def main() -> int:
    """Train all seeds, print the table; 1 if any is below the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="Pendulum-v1")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--learning-starts", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="single-thread runs at a time")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bar", type=float, help="exit status 1 if a seed ends below this")
    parser.add_argument("--sb3", action="store_true", help="Stable-Baselines3 beside it")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="further flags of deft train sac")
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        print(json.dumps(train_sb3(arguments, arguments.worker)))
        return 0
    print_machine()
    shared = ["--env", arguments.env, "--steps", arguments.steps, "--learning-starts", arguments.learning_starts]
    shared += ["--device", arguments.device]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        work = [pool.submit(train_deft, arguments, seed, Path(folder)) for seed in range(arguments.seeds)]
        if arguments.sb3:
            for seed in range(arguments.seeds):
                work.append(pool.submit(run_worker, "sac_returns.py", [*shared, "--worker", seed]))
        results = [job.result() for job in work]
    rows = [[r["library"], r["seed"], f"{r['mean_reward']:.1f}", f"{r['seconds']:.0f}"] for r in results]
    print_table(["library", "seed", "return", "seconds"], rows)
    for library in sorted({result["library"] for result in results}):
        curves = [result["curve"] for result in results if result["library"] == library]
        points = [(step, statistics.mean(curve[i][1] for curve in curves)) for i, (step, _) in enumerate(curves[0])]
        print(f"{library}, mean of {len(curves)} seeds: " + ", ".join(f"{s // 1000}k {mean:.0f}" for s, mean in points))
    write_json(arguments.json, {"results": results})
    ours = [result["mean_reward"] for result in results if result["library"] == "deft"]
    return int(arguments.bar is not None and min(ours) < arguments.bar)


if __name__ == "__main__":
    sys.exit(main())
