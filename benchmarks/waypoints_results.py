"""Waypoint policies: recording, supervised training, PPO and the comparison, for several seeds of everything.

Each seed records its own driving, trains its own supervised policy and refines it; both are then driven through the
same 200 held-out episodes, which no training or evaluation before has seen. All by the command line, with its defaults
but for what `RUNS` names. Exit status 1 if a seed misses the bar of its environment.

    python benchmarks/waypoints_results.py --env toy --seeds 5
    python benchmarks/waypoints_results.py --env driving --seeds 3
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import over_seeds, print_machine, print_table, run_deft, share_over_seeds, write_json

EPISODES = 200
# What is not a default: of the recording, and of PPO.
RUNS: dict[str, tuple[list[object], list[object]]] = {
    "toy": (["--episodes", 400], []),
    "driving": ([], ["--rollout-steps", 32, "--residual-modes", 2, "--num-iterations", 600, "--eval-interval", 100]),
}


def one_seed(env: str, seed: int, folder: Path) -> dict[str, Any]:
    """The four commands, with what the last one measured and how long each took."""
    recording, training = RUNS[env]
    data, sft, rl = folder / f"{env}-{seed}.npz", folder / f"{env}-sft-{seed}", folder / f"{env}-ppo-{seed}"
    common: list[object] = ["--device", "cpu", "--threads", 1, "--seed", seed]
    commands: dict[str, list[object]] = {
        "record": ["collect", "waypoints", "--env", env, "--out", data, "--seed", 10_000_000 * (1 + seed), *recording],
        "supervised": ["train", "waypoint-sft", "--dataset", data, "--out-dir", sft, *common],
        "PPO": ["train", "waypoint-ppo", "--sft-checkpoint", sft, "--out-dir", rl, "--env", env, *common, *training],
        "compare": ["compare", "--sft-checkpoint", sft, "--rl-checkpoint", rl, "--episodes", EPISODES, "--json"],
    }
    seconds, output = {}, ""
    for name, command in commands.items():
        start = time.perf_counter()
        output = run_deft(command)
        seconds[name] = time.perf_counter() - start
    compared = json.loads(output.strip().splitlines()[-1])
    return {"seed": seed, "seconds": seconds, "before": compared["supervised"], "after": compared["with PPO"]}


def meets_bar(env: str, before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Toy: ADE falls by 80 %. Driving: 25 points more successes, and at most half of the collisions."""
    if env == "toy":
        return after["ade"] <= 0.2 * before["ade"]
    more = after["success_rate"] >= before["success_rate"] + 0.25
    return more and after["collision_rate"] <= 0.5 * before["collision_rate"]


def interval_rows(results: Sequence[dict[str, Any]], measures: Sequence[str]) -> list[list[str]]:
    """Each measure before and after PPO, and the change by seed: means over seeds with their 95 % t intervals."""
    rows = []
    for name in measures:
        before, after = ([result[when][name] for result in results] for when in ("before", "after"))
        change = [one - other for one, other in zip(after, before, strict=True)]
        is_share = name.endswith("_rate")
        sides = [
            share_over_seeds(side, EPISODES) if is_share else over_seeds(side, ".3f", 0.0) for side in (before, after)
        ]
        rows.append([name, *sides, over_seeds(change, "+.3f")])
    return rows


def main() -> int:
    """Run all seeds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", choices=sorted(RUNS), default="toy")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="single-thread runs at a time")
    parser.add_argument("--folder", help="keep the runs here")
    parser.add_argument("--json", help="write the figures here")
    arguments = parser.parse_args()
    print_machine()
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(arguments.jobs) as pool:
        folder = Path(arguments.folder or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        jobs = [pool.submit(one_seed, arguments.env, seed, folder) for seed in range(arguments.seeds)]
        results = [job.result() for job in jobs]
    shown = ("ade", "fde") if arguments.env == "toy" else ("success_rate", "collision_rate", "off_road_rate", "ade")
    rows = []
    for result in results:
        cells = [f"{result['before'][name]:.3f} → {result['after'][name]:.3f}" for name in shown]
        result["meets_bar"] = meets_bar(arguments.env, result["before"], result["after"])
        minutes = sum(result["seconds"].values()) / 60
        rows.append([result["seed"], *cells, f"{minutes:.1f}", "yes" if result["meets_bar"] else "NO"])
    print_table(["seed", *(f"{name}, supervised → PPO" for name in shown), "minutes", "bar met"], rows)
    print_table(["mean over seeds (95 % interval)", "supervised", "PPO", "change"], interval_rows(results, shown))
    write_json(arguments.json, {"env": arguments.env, "results": results})
    return 0 if all(result["meets_bar"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
