"""The headline without labels: SFT on images and words, then RL on the tabletop of a GPU, evaluated on the CPU.

    python benchmarks/headline_gpu.py --seeds 30 31 32                            every run of the table
    python benchmarks/headline_gpu.py --seeds 30 --runs dense --steps 5000000     a first look
    python benchmarks/headline_gpu.py --runs keyframes --parallel 3 --cores 5     three runs at once on the device

For each seed: demonstrations of the expert with noise, SFT on them with and without labels, and on others with key
frames for `keyframes`, and from there the runs of `RUNS`, by the `deft` command and the recipes. `--parallel` runs at a
time train on the device (start NVIDIA's MPS first if there are several: `nvidia-cuda-mps-control -d`). Meanwhile the
last checkpoint of a finished run plays 200 held-out episodes in the CPU simulator, beside the SFT policy that it
started from: the four tasks, combinations of colour and object that training never sees, and shuffled words. It plays
the four tasks on Warp too: the same policy, another renderer and solver.

The same command resumes where it was stopped, also within a run; finished steps are not repeated. All files are in
RESULTS, the figures in RESULTS/results.json. Unknown flags are passed to every run.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from common import last_checkpoint, machine, print_machine, print_table, share_over_seeds
from headline import COLUMNS, Bench, curve, over_seeds

PLAIN = ["task_weights=null", "domain_randomization=null", "max_episode_steps=150"]  # the environment by default
IMAGES = ["--env-kwargs", "observation=images", *PLAIN]
SHORT_NAMES = 'domain_randomization={"short_name_rate": 0.5}'
DEMONSTRATED = ['task_weights={"place": 2.5, "push": 1.5}', SHORT_NAMES]
LABELS, KEYFRAMES = "sft-labels", "sft-keyframes"
SPARSE = ["--recipe", "tabletop-ppo", "--env-kwargs", "reward=sparse", "--rollout_steps", 4, "--desired_kl", 0.03]
SPARSE += ["--value_updates", 32, "--exploration_scale", 0.6]
IMITATION = [*SPARSE, "--self_imitation_coef", 10, "--self_imitation_return", 0.5]
IMITATIONS = {  # by the name of the SFT run: its demonstrations, their observation and flags, and its recipe
    "sft": ("images-v0", "images", DEMONSTRATED, "tabletop-sft"),
    KEYFRAMES: ("plain-v0", "images", [], "tabletop-sft-keyframes"),
    LABELS: ("labelled-v0", "labelled", DEMONSTRATED, "tabletop-sft-labels"),
}


class Run(NamedTuple):
    """A row of the table: what it is, the policy that it starts from, and its flags."""

    words: str
    start: str | None
    flags: list[object]


RUNS = {
    "dense": Run("PPO, dense reward", "sft", ["--recipe", "tabletop-ppo"]),
    "sparse": Run("PPO, reward = success only", "sft", SPARSE),
    "imitation": Run(
        "PPO with self-imitation, reward = success only",
        "sft",
        IMITATION,
    ),
    "keyframes": Run(
        "PPO with self-imitation and starts on the expert's way, reward = success only",
        KEYFRAMES,
        ["--recipe", "tabletop-ppo-sparse"],
    ),
    "grpo": Run("GRPO, dense reward", "sft", ["--recipe", "tabletop-grpo"]),
    "labels": Run(
        "PPO, dense reward, with position labels", LABELS, ["--recipe", "tabletop-ppo-labels", "--vector", "warp"]
    ),
    "scratch": Run(
        "PPO, dense reward, from scratch",
        None,
        [
            *("--recipe", "tabletop-ppo", "--model_path", "null", "--model", "vla-tiny", "--chunk_length", 4),
            *("--vla-model-config", "switch_dims=[-1]", "--exploration_scale", 1),
            *("--env-kwargs", "task=all"),
        ],
    ),
}


class GPUBench(Bench):
    """One call of this script: its settings, free sets of cores, and places on the device."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments)
        self.device = threading.Semaphore(arguments.parallel)

    def imitation(self, seed: int) -> dict[str, Any]:
        """Demonstrations and the SFT policies that runs start from."""
        given, folder, taken = self.arguments, self.root / f"seed-{seed}", {}
        starts = {RUNS[name].start or "sft" for name in given.runs}
        for name, (recorded, observation, flags, recipe) in IMITATIONS.items():
            if name not in starts:
                continue
            demos = folder / recorded
            expert = ["--env", "tabletop", "--task", "all", "--env-kwargs", f"observation={observation}", *flags]
            expert += ["--policy", "expert", "--noise", 0.3, "--episodes", given.demonstrations, "--num_envs", 8]
            expert += ["--seed", 1_000_000 * seed, "--out", demos]
            taken[f"demos-{name}"] = self.step(seed, f"demos-{name}", "collect", *expert)
            sft = ["--recipe", recipe, "--dataset", demos]
            if given.epochs is not None:
                sft += ["--num_epochs", given.epochs]
            taken[name] = self.train(seed, name, *sft)
        return taken

    def run(self, seed: int, name: str, imitation: Future[dict[str, Any]]) -> dict[str, Any]:
        """Train one run of a seed when the device has a place for it, and evaluate it."""
        imitation.result()
        given, run, folder = self.arguments, RUNS[name], self.root / f"seed-{seed}"
        flags = [*run.flags, *([] if run.start is None else ["--model_path", folder / run.start])]
        for flag in ("steps", "num_envs"):
            if getattr(given, flag) is not None:
                flags += [f"--{'total_timesteps' if flag == 'steps' else flag}", getattr(given, flag)]
        with self.device:
            taken = self.train(seed, name, *flags, *given.flags)
        return self.evaluate(seed, name, taken)

    def evaluate(self, seed: int, name: str, taken: dict[str, Any]) -> dict[str, Any]:
        """The last checkpoint in the CPU simulator, beside its SFT policy, and on Warp."""
        given, folder = self.arguments, self.root / f"seed-{seed}"
        last, sft = last_checkpoint(folder / name), last_checkpoint(folder / (RUNS[name].start or "sft"))
        words = [sft, last, *IMAGES, "--episodes", given.episodes, "--shuffle_instructions", "--device", "cpu"]
        compared = self.step(seed, f"{name}-cpu", "compare", *words, "--out", folder / f"{name}-comparison")
        words = [last, *IMAGES, "--episodes", given.episodes, "--vector", "warp", "--device", given.device]
        with self.device:
            on_warp = self.step(seed, f"{name}-warp", "evaluate", *words)
        rates = {column: list(found.values()) for column, found in compared["columns"].items()}
        return {
            "seconds": taken["seconds"],
            "curve": curve(folder / name),
            "before": {column: found[0]["success_rate"] for column, found in rates.items()},
            "after": {column: found[1]["success_rate"] for column, found in rates.items()},
            "tasks": {task: found["success_rate"] for task, found in rates[COLUMNS[0]][1]["tasks"].items()},
            "warp": on_warp["success_rate"],
        }


def main() -> int:
    """All seeds and runs, and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[30, 31, 32])
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--demonstrations", type=int, default=300, help="episodes of the expert")
    parser.add_argument("--epochs", type=int, help="of SFT; by default those of the recipes")
    parser.add_argument("--steps", type=int, help="env steps of every run; by default those of the recipes")
    parser.add_argument("--num-envs", type=int, help="environments of every run; by default those of the recipes")
    parser.add_argument("--episodes", type=int, default=200, help="of each column of the comparison")
    parser.add_argument("--minutes", type=float, default=20.0, help="after which a run is stopped")
    parser.add_argument("--cores", type=int, default=2, help="that a command may use")
    parser.add_argument("--parallel", type=int, default=1, help="runs that train on the device at once")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--results", type=Path, default=Path("outputs/headline-gpu"))
    arguments, arguments.flags = parser.parse_known_args()
    print_machine()
    bench, started = GPUBench(arguments), time.monotonic()
    arguments.results.mkdir(parents=True, exist_ok=True)
    seeds, results = arguments.seeds, {}
    with ThreadPoolExecutor(64) as pool:
        imitations = {seed: pool.submit(bench.imitation, seed) for seed in seeds}
        jobs = {
            (name, seed): pool.submit(bench.run, seed, name, imitations[seed])
            for name in arguments.runs
            for seed in seeds
        }
        for (name, seed), job in jobs.items():
            results.setdefault(name, {})[seed] = job.result()
    written = {"command": " ".join(sys.argv), "machine": machine(), "seconds": time.monotonic() - started}
    (arguments.results / "results.json").write_text(json.dumps({**written, "runs": results}, indent=1) + "\n")
    rows = []
    for name, by_seed in results.items():
        found = list(by_seed.values())
        rates = [share_over_seeds([one["after"][column] for one in found], arguments.episodes) for column in COLUMNS]
        gain = over_seeds([100 * (one["after"][COLUMNS[0]] - one["before"][COLUMNS[0]]) for one in found], "+.1f")
        transfer = over_seeds([100 * (one["after"][COLUMNS[0]] - one["warp"]) for one in found], "+.1f")
        minutes = max(one["seconds"] for one in found) / 60
        rows.append([RUNS[name].words, *rates, gain, transfer, f"{minutes:.1f}"])
    print_table(["success", *COLUMNS, "against SFT", "CPU − Warp", "minutes at most"], rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
