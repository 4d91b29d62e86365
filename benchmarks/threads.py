"""Training speed with the default number of threads beside `--threads 1` and `--threads 2`, quiet and with a busy core.

Each workload trains in a fresh process, the three settings in turn, first on a quiet machine and then while another
process keeps one core busy. Run it on two cores (`taskset -c 0,1`); the figure is env steps or updates per second of
the whole run, its measurement of threads included. The default should reach 0.9 of the better fixed count.

    taskset -c 0,1 python benchmarks/threads.py --rounds 2 --json threads.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common import print_machine, print_table, write_json

SETTINGS = ("default", "1", "2")
TABLETOP = ["--env", "tabletop", "--env-kwargs", "task=all", "observation=images", "control_mode=delta_ee_pos"]
VLA = [*TABLETOP, "--model", "vla-tiny", "--num_envs", "8", "--rollout_steps", "32", "--batch_size", "256"]
WORKLOADS = {
    "PPO CartPole-v1": ["ppo", "--env", "CartPole-v1", "--total_timesteps", "60000"],
    "SAC HalfCheetah-v5": ["sac", "--env", "HalfCheetah-v5", "--learning_starts", "500", "--total_timesteps", "3000"],
    "IQL": ["iql", "--dataset", "DATASET", "--num_epochs", "1", "--updates_per_epoch", "4000"],
    "PPO vla-tiny": ["ppo", *VLA, "--n_epochs", "4", "--total_timesteps", "12000"],
}


@contextmanager
def busy_core() -> Iterator[None]:
    """Another process that computes all the time."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing else."""
    yield


def command(*arguments: object) -> dict[str, float]:
    """Run `deft` with no thread variables set, and read the JSON on its last line."""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-m", "deft", *map(str, arguments), "--json"], env=environment, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"{arguments}: {done.stdout[-1000:]}{done.stderr[-2000:]}")
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def rate(workload: str, setting: str, folder: Path, dataset: Path) -> float:
    """Env steps or updates per second."""
    arguments = [str(dataset) if word == "DATASET" else word for word in WORKLOADS[workload]]
    threads = [] if setting == "default" else ["--threads", setting]
    with tempfile.TemporaryDirectory(dir=folder) as run:
        result = command(
            "train", *arguments, "--eval_freq", 0, "--device", "cpu", *threads, "--output_dir", f"{run}/run"
        )
    return (result["updates"] if workload == "IQL" else result["timesteps"]) / result["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--json")
    options = parser.parse_args()
    print_machine()
    rows, results = [], {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dataset = folder / "cheetah" / "random-v0"
        if "IQL" in options.workloads:
            command("collect", "--env", "HalfCheetah-v5", "--policy", "random", "--steps", 5000, "--out", dataset)
        for workload in options.workloads:
            for condition in (quiet, busy_core):
                rates: dict[str, list[float]] = {setting: [] for setting in SETTINGS}
                with condition():
                    for _ in range(options.rounds):
                        for setting in SETTINGS:
                            rates[setting].append(rate(workload, setting, folder, dataset))
                means = {setting: statistics.mean(values) for setting, values in rates.items()}
                share = means["default"] / max(means["1"], means["2"])
                results[f"{workload}, {condition.__name__}"] = {"rates": rates, "share": share}
                figures = [f"{means[setting]:.0f}" for setting in SETTINGS]
                rows.append([workload, condition.__name__.replace("_", " "), *figures, f"{share:.2f}"])
                print(rows[-1], flush=True)
    print_table(["training", "machine", "default", "1 thread", "2 threads", "default / best"], rows)
    write_json(options.json, {"results": results})


if __name__ == "__main__":
    main()
