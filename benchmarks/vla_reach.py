"""The VLA path on the embedded world: the recipe `reach-vla-ppo` for several seeds, against random actions.

Each seed trains by the command line; its last checkpoint, not its best, plays episodes on seeds that training never
saw, and random actions play the same ones. Flags that this script does not know go to `deft train`.

    python benchmarks/vla_reach.py --seeds 3
    python benchmarks/vla_reach.py --seeds 3 --steps 1000000 --device cuda --num-envs 64 --vector process
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import last_checkpoint, print_machine, print_table, run_deft, write_json

from deft.evaluation.evaluate import evaluate_run

EVALUATION_SEED = 1_000_000  # environment i of a run starts from its seed + i


def train_and_evaluate(seed: int, settings: argparse.Namespace, further: Sequence[str], folder: Path) -> dict[str, Any]:
    """One seed: train, then play the same episodes with what was learned and at random."""
    run_dir = folder / f"seed-{seed}"
    flags = ["--total-timesteps", settings.steps, "--num-envs", settings.num_envs, "--vector", settings.vector]
    flags += ["--seed", seed, "--device", settings.device, "--eval-freq", 0, "--output-dir", run_dir]
    start = time.perf_counter()
    run_deft(["train", "--recipe", "reach-vla-ppo", *flags, *further], settings.threads)
    seconds = time.perf_counter() - start
    checkpoint = last_checkpoint(run_dir)
    played = {
        name: evaluate_run(checkpoint, settings.episodes, seed=EVALUATION_SEED, device=settings.device, **keywords)
        for name, keywords in {"trained": {}, "random": {"random_policy": True}}.items()
    }
    steps = int(checkpoint.name.rpartition("-")[2])
    return {"seed": seed, "steps": steps, "seconds": seconds, **played}


def main() -> int:
    """Train all seeds and print the table; 1 if any seed does no better than random actions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--vector", choices=("sync", "process"), default="sync")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=1, help="OpenMP threads of the training process")
    parser.add_argument("--keep", help="keep the runs in this folder")
    parser.add_argument("--json", help="write the figures here")
    settings, further = parser.parse_known_args()
    print_machine()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(settings.keep or temporary)
        results = [train_and_evaluate(seed, settings, further, folder) for seed in range(settings.seeds)]
    names = ("trained", "random")
    print_table(
        ["seed", "env steps", "seconds", *(f"{what}, {name}" for what in ("success", "return") for name in names)],
        [
            [
                result["seed"],
                f"{result['steps']:,}",
                f"{result['seconds']:.0f}",
                *(f"{result[name]['success_rate']:.2f}" for name in names),
                *(f"{result[name]['mean_reward']:.2f}" for name in names),
            ]
            for result in results
        ],
    )
    for name in names:
        success = [result[name]["success_rate"] for result in results]
        print(f"success, {name}: {statistics.mean(success):.3f} ± {statistics.pstdev(success):.3f}")
    write_json(settings.json, {"settings": vars(settings), "further_flags": further, "results": results})
    better = [result["trained"]["mean_reward"] > result["random"]["mean_reward"] for result in results]
    return 0 if all(better) else 1


if __name__ == "__main__":
    sys.exit(main())
