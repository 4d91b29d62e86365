"""The headline: vla-tiny on the tabletop's four tasks, from noisy demonstrations to better than its demonstrations.

    python benchmarks/headline.py --seeds 0 1 2                                  the whole table
    python benchmarks/headline.py --seeds 0 --demonstrations 50 --epochs 2 --steps 20000 --episodes 20
                                                                                 a first look

For each seed: the expert's demonstrations with noise; SFT on them; from there PPO and GRPO; IQL on the demonstrations
and on episodes of the SFT policy itself; PPO from IQL. All of it by the `deft` command. Then the last checkpoint of
each plays the same held-out episodes: the four tasks, combinations of colour and object that training never sees, and
shuffled words. Each run has `--cores` cores of its own (2), and as many run side by side as there are; a run is stopped
after `--minutes`.

The same command resumes where it was stopped, also within a run; finished steps are not repeated. All files are in
RESULTS, the figures in RESULTS/results.json. The exit status is 1 if a bar is missed. Unknown flags are passed to both
PPO runs and override the settings of this file.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from common import (
    last_checkpoint,
    machine,
    over_seeds,
    print_machine,
    print_table,
    read_metrics,
    share_over_seeds,
    waits,
    worker_environment,
)

MACHINE_FLAGS = {"--threads", "--num_workers", "--num_envs", "--device"}  # may differ when a benchmark continues
# Object positions are recorded as labels: SFT trains the model to predict them, and online training keeps that loss
# while the reward trains the layers after the prediction. The compared policies act without labels.
WORLD = ["--env", "tabletop", "--task", "all", "--env-kwargs", "observation=labelled"]
UNLABELLED = ["--env-kwargs", "observation=images"]
MODEL = ["--model", "vla-tiny", "--vla-model-config", "bottleneck=8", "switch_dims=[-1]"]
SFT = [*MODEL, "--batch_size", 64, "--learning_rate", 1e-3, "--learning_rate_schedule", "cosine"]
SFT += ["--weight_decay", 1e-2, "--eval_freq", 0, "--save_freq", 5]
# The SFT policy aimed at the positions that it predicted, often wrongly: IQL's policy reads the positions as the SFT
# policy predicted them and is weighted by the episode's return. The vision encoder learns from the labels of every row.
IQL = ["--batch_size", 128, "--learning_rate", 3e-4, "--policy_learning_rate", 3e-5, "--auxiliary_learning_rate", 1e-3]
IQL += ["--weight_decay", 1e-2, "--reward_scaling", "none", "--expectile", 0.8, "--advantage", "return"]
IQL += [
    "--temperature",
    3,
    "--max_weight",
    20,
    "--gamma",
    0.99,
    "--position_source",
    "start",
    "--eval_freq",
    0,
    "--save_freq",
    5,
]
ONLINE = ["--env", "tabletop", "--env-kwargs", "observation=labelled", "--vector", "process", "--keep_checkpoints", 1]
ONLINE += ["--model", "vla-tiny", "--vla-model-config", "freeze_vision=true"]
ONLINE += ["--auxiliary_learning_rate", 1e-3, "--auxiliary_epochs", 2, "--max_grad_norm", 1.0]
# Each update begins near a KL of 0.1 over the 16 numbers of a chunk: the standard deviation is small, so
# only small steps keep the policy intact. The learning rate then decays to zero.
ONLINE += ["--batch_size", 512, "--n_epochs", 4, "--learning_rate", 1e-4, "--learning_rate_schedule", "linear"]
# One rollout: 32 environments, 64 decisions each, of 4 env steps: 8,192 env steps.
PPO = ["--num_envs", 32, "--rollout_steps", 64, "--gamma", 0.99, "--gae_lambda", 0.95]
PPO += ["--entropy_coef", 0]
WARM = ["--value_warmup", 10]  # after SFT the value head is untrained
WARM_IQL = ["--value_warmup", 3]  # IQL has trained the value head on the dataset
# The members of a group share a scene, and the vision encoder needs many scenes: many groups of two.
# Advantage: return-to-go minus the group's mean, not divided by the standard deviation, which would make the late steps
# of failures dominate.
GRPO = ["--num_envs", 128, "--group_size", 2, "--max_resamples", 0, "--auxiliary_warmup", 12, "--kl_coef", 0]
GRPO += ["--advantage", "process", "--no-normalize-std", "--gamma", 0.98, "--target_kl", 0.1]
GRPO += ["--clip_range", 0.2, "--clip_range_high", 0.28]
POLICIES = ("sft", "ppo", "grpo", "iql", "ppo_iql")
COLUMNS = ("train", "held-out", "shuffled words")
SAME_SUCCESS = (0.75, 0.8, 0.85, 0.9)  # to which the env steps of PPO from SFT and from IQL are counted
STOPPED = 128 + signal.SIGTERM
LIBC, PARENT_DEATH_SIGNAL = ctypes.CDLL(None), 1  # the first argument of prctl on Linux


def follow(core_set: list[int]) -> None:
    """In a new process: use these cores, and receive SIGTERM if the benchmark ends first, as by SIGKILL.

    A command that continued alone would write into a folder that the next call of the benchmark uses.
    """
    os.sched_setaffinity(0, core_set)
    LIBC.prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)


class Bench:
    """One call of this script: its settings, and a queue of free sets of cores."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.root: Path = arguments.results
        cores = sorted(os.sched_getaffinity(0))
        width = min(arguments.cores, len(cores))
        self.free_cores: queue.Queue[list[int]] = queue.Queue()
        for first in range(0, len(cores) - width + 1, width):
            self.free_cores.put(cores[first : first + width])
        self.width = self.threads = width
        self.started = time.monotonic()
        self.is_interrupted = threading.Event()  # commands are then stopped

    def finish(self, judged: Sequence[tuple[str, Any, bool]], **parts: Any) -> int:
        """Print the bars, write results.json with `parts`, and return the exit status: 1 if a bar is missed."""
        print_table(["bar", "found", "met"], [[name, found, "yes" if met else "no"] for name, found, met in judged])
        written = {
            "command": " ".join(sys.argv),
            "machine": machine(),
            "seconds": time.monotonic() - self.started,
            "bars": [{"bar": name, "found": found, "met": bool(met)} for name, found, met in judged],
            **parts,
        }
        (self.root / "results.json").write_text(json.dumps(written, indent=1, default=float) + "\n")
        print(f"written: {self.root / 'results.json'}", flush=True)
        return 0 if all(met for _, _, met in judged) else 1

    def deft(self, *words: object, minutes: float | None = None) -> dict[str, Any]:
        """One command on cores of its own: return what it prints as JSON, and its duration.

        After `minutes` it receives SIGTERM; a run then saves a checkpoint.
        """
        core_set = self.free_cores.get()
        try:
            started = time.monotonic()
            limit = None if minutes is None else 60 * minutes
            status, output, errors = self.command([*map(str, words), "--json"], core_set, limit)
            seconds = time.monotonic() - started
            if status not in (0, STOPPED):
                raise RuntimeError(f"failed ({status}): deft {' '.join(map(str, words))}\n{errors[-4000:]}")
            lines = output.strip().splitlines()
            found = json.loads(lines[-1]) if status == 0 and lines else {}
            return {**found, "seconds": round(seconds, 1), "status": status}
        finally:
            self.free_cores.put(core_set)

    def command(self, words: list[str], core_set: list[int], limit: float | None) -> tuple[int, str, str]:
        """Run `deft` on some cores, for at most `limit` seconds; return its exit status, output and errors."""
        process = subprocess.Popen(
            [sys.executable, "-m", "deft", *words],
            env=worker_environment(self.threads),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: follow(core_set),
        )
        for seconds in waits(limit, self.is_interrupted):
            with contextlib.suppress(subprocess.TimeoutExpired):
                output, errors = process.communicate(timeout=seconds)
                return process.returncode, output, errors
        process.terminate()
        output, errors = process.communicate()
        return process.returncode, output, errors

    def step(self, seed: int, name: str, *words: object, minutes: float | None = None) -> dict[str, Any]:
        """Run a command once and keep its result in a file."""
        return self.once(self.root / f"seed-{seed}" / f"{name}.json", f"seed {seed}: {name}", *words, minutes=minutes)

    def once(self, kept: Path, label: str, *words: object, minutes: float | None = None) -> dict[str, Any]:
        """Run a command unless its result is in the file `kept`, and keep it there.

        Raises an error for the result of another command: figures of two settings would be mixed.
        """
        asked = self.settings(words)
        if kept.is_file():
            found = json.loads(kept.read_text())
            if found.get("words", asked) != asked:
                raise SystemExit(f"{kept} is of other settings; name another folder with --results, or remove it")
            return found
        found = {**self.deft(*words, minutes=minutes), "words": asked}
        kept.parent.mkdir(parents=True, exist_ok=True)
        unfinished = kept.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(found, indent=1))
        unfinished.replace(kept)
        print(f"{label} in {found['seconds']:.0f} s", flush=True)
        return found

    def settings(self, words: Sequence[object]) -> list[str]:
        """Return the words of a command without what depends on the machine alone, and with paths from RESULTS."""
        root, given = str(self.root.absolute()), str(self.root)
        asked = [str(word).replace(root, "RESULTS").replace(given, "RESULTS") for word in words]
        pairs = zip(["", *asked[:-1]], asked, strict=True)
        return [word for before, word in pairs if not MACHINE_FLAGS & {before, word}]

    def train(self, seed: int, name: str, *words: object) -> dict[str, Any]:
        """Train in the folder of the seed; resume an interrupted run."""
        common = ["--seed", seed, "--device", self.arguments.device, "--console_level", "WARNING", "--auto_resume"]
        common += ["--threads", self.threads]  # workers wait while the model learns: both may use all cores
        folder = self.root / f"seed-{seed}" / name
        return self.step(seed, name, "train", *words, *common, "--output_dir", folder, minutes=self.arguments.minutes)

    # -- one seed ------------------------------------------------------------------------------------------------------

    def seed(self, seed: int, pool: ThreadPoolExecutor) -> dict[str, Any]:
        """Demonstrations, all runs and the comparison of one seed."""
        given, folder = self.arguments, self.root / f"seed-{seed}"
        demos, own = folder / "demos-v0", folder / "mixed-v0"
        taken: dict[str, Any] = {}
        first_seed = 1_000_000 * seed  # episodes of different seeds are different ones
        expert = ["--policy", "expert", "--noise", given.noise, "--episodes", given.demonstrations, "--num_envs", 8]
        taken["demos"] = self.step(seed, "demos", "collect", *WORLD, *expert, "--seed", first_seed, "--out", demos)
        taken["sft"] = self.train(seed, "sft", "sft", "--dataset", demos, *SFT, "--num_epochs", given.epochs)
        start = [
            "--model_path",
            folder / "sft",
            *ONLINE,
            "--eval_freq",
            given.steps // 10,
            "--save_freq",
            given.steps // 10,
        ]
        start += ["--total_timesteps", given.steps, "--eval_episodes", given.curve_episodes]
        tuned = given.flags
        runs: dict[str, Future[dict[str, Any]]] = {
            "ppo": pool.submit(self.train, seed, "ppo", "ppo", *start, *PPO, *WARM, *tuned),
            "grpo": pool.submit(self.train, seed, "grpo", "grpo", *start, *GRPO),
        }
        if not (folder / "own.json").is_file():
            shutil.rmtree(own, ignore_errors=True)
            shutil.copytree(demos, own)
        own_play = ["--policy", folder / "sft", "--episodes", given.own_episodes, "--num_envs", 8, "--append"]
        taken["own"] = self.step(seed, "own", "collect", *own_play, "--seed", first_seed, "--out", own)
        mixed = ["--model_path", folder / "sft", "--dataset", own]
        taken["iql"] = self.train(seed, "iql", "iql", *mixed, *IQL, "--num_epochs", given.offline_epochs)
        from_iql = [folder / "iql" if word == folder / "sft" else word for word in start]
        taken["ppo_iql"] = self.train(seed, "ppo_iql", "ppo", *from_iql, *PPO, *WARM_IQL, *tuned)
        taken |= {name: run.result() for name, run in runs.items()}
        compared = ["--episodes", given.episodes, "--shuffle_instructions", *UNLABELLED, "--device", given.device]
        last = [last_checkpoint(folder / name) for name in POLICIES]
        taken["compare"] = self.step(seed, "compare", "compare", *last, *compared, "--out", folder / "comparison")
        return {"taken": taken, "curves": {name: curve(folder / name) for name in ("ppo", "grpo", "ppo_iql")}}


def curve(folder: Path) -> list[list[float]]:
    """Env steps and success of a run's evaluations, from the one before its first update on."""
    return [[line["step"], line["success_rate"]] for line in read_metrics(folder, "evaluation")]


def steps_to(points: Sequence[Sequence[float]], wanted: float) -> float | None:
    """Env steps at which the line through the evaluations first has that success; None where it never has.

    Between two evaluations it is straight: so runs that were evaluated more or less often can be compared.
    """
    if points and points[0][1] >= wanted:
        return points[0][0]
    for (before, low), (after, high) in itertools.pairwise(points):
        if high >= wanted:
            return before + (after - before) * (wanted - low) / (high - low)
    return None


def successes(result: dict[str, Any], column: str) -> dict[str, float]:
    """Success of every policy in a column of the comparison, in per cent."""
    measured = result["taken"]["compare"]["columns"][column]
    return {name: 100 * found["success_rate"] for name, found in zip(POLICIES, measured.values(), strict=True)}


def bars(results: dict[int, dict[str, Any]], minutes: float) -> list[tuple[str, str, bool]]:
    """What was asked for, what was found over all seeds (95 % interval), and whether it holds for the mean."""
    by = {column: [successes(result, column) for result in results.values()] for column in COLUMNS}

    def of(name: str, column: str = "train") -> list[float]:
        return [found[name] for found in by[column]]

    def more(name: str, other: str, column: str = "train") -> list[float]:
        return [one - two for one, two in zip(of(name, column), of(other, column), strict=True)]

    longest = max(result["taken"][name]["seconds"] / 60 for result in results.values() for name in POLICIES)
    same = []
    for level in SAME_SUCCESS:
        ratios = []
        for result in results.values():
            plain, after = (steps_to(result["curves"][name], level) for name in ("ppo", "ppo_iql"))
            ratios.append(float("inf") if after is None or not plain else after / plain)
        name = f"PPO from IQL: ≤ half of the env steps to {level:.0%}"
        same.append((name, over_seeds(ratios, ".2f", 0.0), float(np.mean(ratios)) <= 0.5))
    sft, ppo, grpo, words = of("sft"), of("ppo"), of("grpo"), of("ppo", "shuffled words")
    gain, held_out = more("iql", "sft"), more("ppo", "sft", "held-out")
    shuffled = mean_success(results, "ppo", "shuffled words")
    return [
        ("SFT on noisy demonstrations ≤ 60 %", mean_success(results, "sft"), np.mean(sft) <= 60),
        ("PPO from SFT ≥ 90 %", mean_success(results, "ppo"), np.mean(ppo) >= 90),
        ("GRPO from SFT ≥ 85 %", mean_success(results, "grpo"), np.mean(grpo) >= 85),
        (f"each run under {minutes:g} minutes", f"{longest:.1f} at most", longest <= minutes + 1),
        ("IQL ≥ SFT + 10 points", over_seeds(gain, "+.1f"), np.mean(gain) >= 10),
        *same,
        ("shuffled words: PPO falls to chance (50 %)", shuffled, np.mean(words) <= 60),
        ("held-out combinations: PPO ≥ SFT + 15 points", over_seeds(held_out, "+.1f"), np.mean(held_out) >= 15),
    ]


def mean_success(results: dict[int, dict[str, Any]], name: str, column: str = "train") -> str:
    """A policy's success in a column of the comparison: the mean over seeds and its 95 % interval."""
    rates = [successes(result, column)[name] / 100 for result in results.values()]
    return share_over_seeds(rates, next(iter(results.values()))["taken"]["compare"]["episodes"])


def read_arguments(parser: argparse.ArgumentParser, results: Path) -> argparse.Namespace:
    """The arguments of a bench, with those that every one has; `flags` are further ones, for all of its runs."""
    parser.add_argument("--minutes", type=float, default=60.0, help="after which a run is stopped")
    parser.add_argument("--cores", type=int, default=2, help="that a run may use")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--results", type=Path, default=results)
    arguments, arguments.flags = parser.parse_known_args()
    return arguments


def main() -> int:
    """All seeds, the tables, and what the bars say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--demonstrations", type=int, default=150, help="episodes of the expert")
    parser.add_argument("--noise", type=float, default=0.3, help="on the expert's actions")
    parser.add_argument("--epochs", type=int, default=25, help="of SFT")
    parser.add_argument("--own-episodes", type=int, default=1000, help="of the SFT policy, for IQL")
    parser.add_argument("--offline-epochs", type=int, default=6, help="of IQL")
    parser.add_argument("--steps", type=int, default=1_000_000, help="env steps of PPO and of GRPO")
    parser.add_argument("--episodes", type=int, default=200, help="of each column of the comparison")
    parser.add_argument("--curve-episodes", type=int, default=100, help="of each evaluation while training")
    arguments = read_arguments(parser, Path("outputs/headline"))
    print_machine()
    bench = Bench(arguments)
    arguments.results.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(64) as pool, ThreadPoolExecutor(len(arguments.seeds)) as seeds:
        jobs = {seed: seeds.submit(bench.seed, seed, pool) for seed in arguments.seeds}
        results = {seed: job.result() for seed, job in jobs.items()}
    print_table(
        ["success in %", *POLICIES],
        [
            [f"{column}, seed {seed}", *(f"{value:.1f}" for value in successes(result, column).values())]
            for column in COLUMNS
            for seed, result in results.items()
        ],
    )
    print_table(
        ["mean over seeds (95 % interval)", *POLICIES],
        [[column, *(mean_success(results, name, column) for name in POLICIES)] for column in COLUMNS],
    )
    return bench.finish(bars(results, arguments.minutes), seeds=results)


if __name__ == "__main__":
    sys.exit(main())
