"""Two checkouts of Deft side by side: how fast each trains with PPO, SAC, IQL and the Decision Transformer.

Every workload is one `deft train` command, run with the code of each checkout in turn, `--rounds` times, each in a new
process that first runs a short command, so that imports and first calls do not count. The figure is the ratio of the
medians of the training seconds that the command reports: above 1, this checkout is faster.

    git worktree add ../before v0.1 && python benchmarks/two_versions.py --before ../before
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import REPOSITORY, print_machine, print_table, run_deft, worker_environment, write_json

COMMON = ["--device", "cpu", "--threads", 1, "--seed", 0, "--eval-freq", 0]
OFFLINE = [*COMMON, "--dataset", "{data}", "--num-epochs", 1, "--batch-size", 256]
WORKLOADS: dict[str, list[object]] = {
    "ppo CartPole, 1 env": ["ppo", "--env", "CartPole-v1", "--num-envs", 1, "--total-timesteps", 8_192, *COMMON],
    "ppo CartPole, 8 envs": ["ppo", "--env", "CartPole-v1", "--num-envs", 8, "--total-timesteps", 32_768, *COMMON],
    "ppo Pendulum, 8 envs": ["ppo", "--env", "Pendulum-v1", "--num-envs", 8, "--total-timesteps", 32_768, *COMMON],
    "sac Pendulum": ["sac", "--env", "Pendulum-v1", "--total-timesteps", 700, "--learning-starts", 100, *COMMON],
    "iql": ["iql", "--updates-per-epoch", 400, *OFFLINE],
    "dt": ["dt", "--updates-per-epoch", 12, "--context-length", 20, *OFFLINE],
}


def train(checkout: Path, words: list[str], folder: Path) -> float:
    """Training seconds of one command with the code of one checkout, in a process of its own."""
    environment = worker_environment(1)
    environment["PYTHONPATH"] = os.pathsep.join([str(checkout), environment["PYTHONPATH"]])
    command = [sys.executable, __file__, "--worker", *words, "--output-dir", str(folder)]
    done = subprocess.run(command, env=environment, cwd=checkout, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"failed ({done.returncode}): {' '.join(command)}\n{done.stderr[-2000:]}")
    return float(done.stdout.strip().splitlines()[-1])


def measure(words: list[str]) -> None:
    """Run the command twice, the first time for a few steps only, and print the training seconds of the second."""
    from deft.cli import main as deft

    length = next(flag for flag in ("--total-timesteps", "--updates-per-epoch") if flag in words)
    short = [*words, length, "256" if length == "--total-timesteps" else "4"]  # the last value of a flag counts
    for arguments in (short, words):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            assert deft(["train", *arguments, "--overwrite", "--json"]) == 0
    print(json.loads(output.getvalue().strip().splitlines()[-1])["seconds"])


def main() -> None:
    """Measure all workloads and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="workloads whose name contains this")
    parser.add_argument("--json", help="write the figures to this file")
    arguments = parser.parse_args()
    checkouts = {"before": arguments.before.resolve(), "after": REPOSITORY}
    print_machine()
    results, rows = {}, []
    with tempfile.TemporaryDirectory() as name:
        data = Path(name) / "data-v0"
        run_deft(["collect", "--env", "Pendulum-v1", "--policy", "random", "--steps", 20_000, "--out", data])
        for workload, given in WORKLOADS.items():
            if arguments.only not in workload:
                continue
            words = [str(word).format(data=data) for word in given]
            seconds: dict[str, list[float]] = {label: [] for label in checkouts}
            for _ in range(arguments.rounds):
                for label, checkout in checkouts.items():
                    seconds[label].append(train(checkout, words, Path(name) / label))
            before, after = (statistics.median(seconds[label]) for label in checkouts)
            results[workload] = {"seconds": seconds, "ratio": before / after}
            rows.append([workload, f"{before:.2f}", f"{after:.2f}", f"{before / after:.2f}"])
            print(*rows[-1], sep=" | ", flush=True)
    print_table(["workload", "before, s", "after, s", "ratio"], rows)
    write_json(arguments.json, {"workloads": results})


if __name__ == "__main__":
    measure(sys.argv[2:]) if sys.argv[1:2] == ["--worker"] else main()
