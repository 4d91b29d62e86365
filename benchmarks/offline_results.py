"""The results table of offline RL: every algorithm on every dataset, several seeds, against behaviour cloning.

    python benchmarks/offline_results.py --data FOLDER [--algorithms iql td3-bc cql dt bc] [--datasets NAME …]
        [--updates 100000] [--seeds 3] [--jobs 1] --out results

FOLDER holds the datasets as NAME.hdf5. Each pair is a process of its own; seeds are trained at once. Evaluations of
10 episodes a seed come every tenth of the run (`best` is their best mean over seeds), `last` is over `--episodes`
episodes a seed at the end. One JSON file a pair is written as it finishes, and pairs that have one are skipped, so that
the command can be repeated until the table is whole; then the table is printed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

ALGORITHMS = ("iql", "td3-bc", "cql", "dt", "bc")
DATASETS = (
    "hopper-medium-v2",
    "halfcheetah-medium-v2",
    "walker2d-medium-v2",
    "hopper-medium-expert-v2",
    "halfcheetah-medium-expert-v2",
)
EVALUATIONS = 10  # in the course of a run
TARGETS = {"hopper": 3600.0, "halfcheetah": 6000.0, "walker2d": 5000.0}  # returns that a decision transformer aims at
EXPERT_TARGETS = {"hopper": 3600.0, "halfcheetah": 12000.0}


def run_pair(args: argparse.Namespace, algorithm: str, dataset: str) -> dict:
    """Train one algorithm on one dataset, in this process, and measure it."""
    from deft.config.loading import resolve
    from deft.training.offline_run import build_offline_trainer

    settings: dict = {"alpha": 0.0} if algorithm == "bc" else {}
    if algorithm == "dt":
        name = dataset.split("-")[0]
        settings["target_return"] = [(EXPERT_TARGETS if "expert" in dataset else TARGETS)[name]]
    settings.update(json.loads(args.settings))
    config = resolve(
        {
            "algorithm": {"name": "td3-bc" if algorithm == "bc" else algorithm, "cfg": settings},
            "policy": json.loads(args.policy),
            "dataset": str(Path(args.data) / f"{dataset}.hdf5"),
            "trainer": {
                "num_epochs": EVALUATIONS,
                "updates_per_epoch": args.updates // EVALUATIONS,
                "num_seeds": args.seeds if algorithm != "dt" else 1,
                "eval_freq": 1,
                "eval_episodes": 10,
                "save_freq": 0,
                "keep_checkpoints": 1,
            },
            "logging": {"tensorboard": False},
            "seed": args.seed,
            "device": args.device,
            "threads": args.threads,
            "output_dir": str(Path(args.out) / "runs" / f"{algorithm}-{dataset}-{args.seed}"),
            "overwrite": True,
        }
    )
    trainer = build_offline_trainer(config)
    started = time.monotonic()
    summary = trainer.train()
    trained = time.monotonic() - started
    last = trainer.evaluate(args.episodes)
    trainer.close()
    scores = last.get("normalized_scores", [last["normalized_score"]])
    lines = (Path(summary["run_dir"]) / "episode_metrics.jsonl").read_text().splitlines()
    curve = [line for line in map(json.loads, lines) if line["type"] == "evaluation"]
    return {
        "algorithm": algorithm,
        "dataset": dataset,
        "seed": args.seed,
        "updates": args.updates,
        "last": scores,
        "curve": [[line["step"], line.get("normalized_scores", [line["normalized_score"]])] for line in curve],
        "episodes": args.episodes,
        "settings": settings,
        "policy": json.loads(args.policy),
        "train_seconds": round(trained, 1),
    }


def print_table(out: Path) -> None:
    """Mean and deviation over seeds of the last scores, and the best of the curve, a row for each dataset."""
    results: dict[tuple[str, str], list[dict]] = {}
    for path in sorted(out.glob("*.json")):
        result = json.loads(path.read_text())
        results.setdefault((result["dataset"], result["algorithm"]), []).append(result)
    print("| dataset | " + " | ".join(ALGORITHMS) + " |")
    print("|---|" + "---|" * len(ALGORITHMS))
    for dataset in DATASETS:
        cells = []
        for algorithm in ALGORITHMS:
            found = results.get((dataset, algorithm), [])
            scores = [score for result in found for score in result["last"]]
            if not scores:
                cells.append("–")
                continue
            mean = sum(scores) / len(scores)
            deviation = (sum((score - mean) ** 2 for score in scores) / len(scores)) ** 0.5
            means = zip(*([sum(row) / len(row) for _, row in result["curve"]] for result in found), strict=False)
            best = max(sum(row) / len(row) for row in means)
            cells.append(f"{mean:.1f} ± {deviation:.1f} (best {best:.1f})")
        print(f"| {dataset} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--algorithms", nargs="+", default=ALGORITHMS, choices=ALGORITHMS)
    parser.add_argument("--datasets", nargs="+", default=DATASETS)
    parser.add_argument("--updates", type=int, default=100_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--episodes", type=int, default=50)
    parser.add_argument("--settings", default="{}", help="settings of the algorithm, as JSON")
    parser.add_argument("--policy", default="{}", help="settings of the policy, as JSON")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--one", nargs=2, help="an algorithm and a dataset: train this pair in this process")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.one:
        result = run_pair(args, *args.one)
        path = args.out / f"{args.one[0]}-{args.one[1]}-{args.seed}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        return
    # A decision transformer trains one seed at a time; the others train theirs at once.
    waiting = [
        (algorithm, dataset, seed)
        for algorithm in args.algorithms
        for dataset in args.datasets
        for seed in (range(args.seed, args.seed + args.seeds) if algorithm == "dt" else [args.seed])
    ]
    flags = [arg for arg in sys.argv[1:] if arg]
    running: list[tuple[tuple, subprocess.Popen]] = []
    while waiting or running:
        while waiting and len(running) < args.jobs:
            pair = waiting.pop(0)
            if (args.out / f"{pair[0]}-{pair[1]}-{pair[2]}.json").exists():
                continue
            command = [sys.executable, __file__, *flags, "--one", pair[0], pair[1], "--seed", str(pair[2])]
            log = open(args.out / f"{pair[0]}-{pair[1]}-{pair[2]}.log", "w")  # noqa: SIM115
            running.append((pair, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)))
        time.sleep(0.5)
        for pair, process in list(running):
            if process.poll() is not None:
                running.remove((pair, process))
                print(f"{' '.join(map(str, pair))}: {'done' if process.returncode == 0 else 'FAILED'}", flush=True)
    print_table(args.out)


if __name__ == "__main__":
    main()
