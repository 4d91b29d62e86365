"""`make demo` over several seeds: success before and after RL on the same new scenes, each seed on two cores.

    python benchmarks/demo_seeds.py --out outputs/demo-seeds                     seeds 0 to 4
    python benchmarks/demo_seeds.py --seeds 0 --steps 4000 --episodes 10         a first look

As many seeds run side by side as there are pairs of cores. Results are printed as they come, one line of JSON per seed,
and written to OUT/results.json. The exit status is 1 if a seed gains less than 20 points.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from common import machine, over_seeds, print_machine, print_table, read_metrics

WANTED = 0.20  # of the difference in success


def run_seed(seed: int, arguments: argparse.Namespace, pairs: queue.SimpleQueue[list[int]]) -> dict[str, Any]:
    """Run the demo with one seed on a pair of cores."""
    cores = pairs.get()
    folder = arguments.out / f"seed-{seed}"
    words = ["--seed", seed, "--episodes", arguments.episodes, "--output-dir", folder]
    words += [] if arguments.steps is None else ["--steps", arguments.steps]
    started = time.monotonic()
    try:
        with open(arguments.out / f"seed-{seed}.log", "w", encoding="utf-8") as log:
            subprocess.run(
                [sys.executable, "-m", "deft.demo", *map(str, words)],
                stdout=log,
                stderr=subprocess.STDOUT,
                check=True,
                env={**os.environ, "OMP_NUM_THREADS": "2"},
                preexec_fn=lambda: os.sched_setaffinity(0, cores),
            )
    finally:
        pairs.put(cores)
    found = json.loads((folder / "demo.json").read_text(encoding="utf-8"))
    updates = read_metrics(folder / "ppo", "update")
    rates = [[line["step"], line.get("rollout/success_rate")] for line in updates]
    return {
        "seed": seed,
        **{name: found[name]["success_rate"] for name in ("before", "after")},
        "intervals": {name: found[name]["success_interval"] for name in ("before", "after")},
        "difference": found["after"]["difference"],
        "difference_interval": found["after"]["difference_interval"],
        "seconds": found["seconds"],
        "steps_per_second": found["steps_per_second"],
        "total_seconds": round(time.monotonic() - started, 1),
        "training_success": rates[:: max(1, len(rates) // 15)],
    }


def main() -> int:
    """All seeds, and a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--steps", type=int, help="env steps of PPO; by default those of the preset")
    parser.add_argument("--out", type=Path, default=Path("outputs/demo-seeds"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    print_machine()
    cores = sorted(os.sched_getaffinity(0))
    pairs: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    for first in range(0, max(1, len(cores) - 1), 2):
        pairs.put(cores[first : first + 2])
    results = []
    with ThreadPoolExecutor(len(arguments.seeds)) as pool:
        for job in as_completed([pool.submit(run_seed, seed, arguments, pairs) for seed in arguments.seeds]):
            results.append(job.result())
            print(json.dumps(results[-1]), flush=True)
            written = {"command": " ".join(sys.argv), "machine": machine(), "seeds": results}
            (arguments.out / "results.json").write_text(json.dumps(written, indent=1) + "\n")
    results.sort(key=lambda found: found["seed"])
    rows = [
        [
            found["seed"],
            *(f"{100 * found[name]:.0f}" for name in ("before", "after")),
            f"{100 * found['difference']:+.0f}",
        ]
        + [f"{found['seconds']['train']:.0f}", f"{found['total_seconds']:.0f}"]
        for found in results
    ]
    print_table(["seed", "before in %", "after in %", "difference", "training in s", "total in s"], rows)
    print("difference:", over_seeds([100 * found["difference"] for found in results], "+.1f"))
    return 0 if all(found["difference"] >= WANTED for found in results) else 1


if __name__ == "__main__":
    sys.exit(main())
