"""Does a world model of video help imitation? `deft train vision` before `deft train sft`, against SFT alone.

    python benchmarks/vision_results.py --device cuda --seeds 0 1 2
    python benchmarks/vision_results.py --tables

For each seed: demonstrations of the scripted expert with noise, a third as many, and video of random actions in other
scenes; camera encoders trained on the video by both losses and by each of them alone; SFT from each of them and from
new weights, with the same settings. All policies play the same held-out episodes, without labels. Env steps of a
policy are those of its demonstrations; those of the video are given beside them.

Finished steps are not repeated, and a stopped run continues from its last checkpoint. All files are in RESULTS, the
figures in RESULTS/results.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from common import machine, over_seeds, print_table, run_deft, share_over_seeds

from deft.runs.json_files import read_json, write_json

WORLD = ["--env", "tabletop", "--task", "all", "--env-kwargs", "observation=images"]
MODEL = ["--model", "vla-tiny", "--vla-model-config", "switch_dims=[-1]"]
SFT = ["--batch_size", 128, "--learning_rate", 1e-3, "--learning_rate_schedule", "cosine", "--weight_decay", 0.01]
VIDEO_STEPS = 8  # of an episode: many scenes, few steps in each
VIDEO_SEED = 100_000  # the first seed of the video, beyond those of the demonstrations
METHODS: dict[str, list[object] | None] = {
    "sft": None,
    "vision": [],
    "prediction": ["--text_weight", 0],
    "text": ["--prediction_weight", 0],
}
TITLES = {
    "sft": "SFT alone",
    "vision": "vision, then SFT",
    "prediction": "… of the next image alone",
    "text": "… of the instruction alone",
    "fewer": "vision, then SFT of a third of the demonstrations",
    "sft_fewer": "SFT of a third of the demonstrations alone",
}
STEPS = ("demonstration_steps", "video_steps")
POINTS = 10.0  # that vision must add


def main() -> None:
    """All seeds, and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--results", type=Path, default=Path("outputs/vision_results"))
    parser.add_argument("--tables", action="store_true", help="print what is known, and train nothing")
    parser.add_argument("--device", default="auto")
    add_settings(parser)
    arguments = parser.parse_args()
    path = arguments.results / "results.json"
    results: dict[str, Any] = read_json(path) or {"machine": machine(), "settings": settings_of(arguments), "seeds": {}}
    if not arguments.tables:
        for seed in arguments.seeds:
            results["seeds"][str(seed)] = train_seed(seed, arguments.results / f"seed-{seed}", arguments)
            write_json({**results, "bars": bars(results["seeds"])}, path)
    show(results["seeds"])


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `train_seed` reads besides `--device`."""
    parser.add_argument("--demonstrations", type=int, default=300, help="episodes of the expert, with noise 0.3")
    parser.add_argument("--video-episodes", type=int, default=1500, help=f"of {VIDEO_STEPS} random actions")
    parser.add_argument("--vision-epochs", type=int, default=6)
    parser.add_argument("--sft-epochs", type=int, default=30)
    parser.add_argument("--test-episodes", type=int, default=200)
    parser.add_argument("--vision", default="cells", help="camera encoder of vla-tiny: cells or convolutions")
    parser.add_argument("--methods", nargs="+", default=list(TITLES), choices=list(TITLES))


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that the figures depend on."""
    names = ("demonstrations", "video_episodes", "vision_epochs", "sft_epochs", "test_episodes", "vision")
    return {name: vars(arguments)[name] for name in names}


def train_seed(seed: int, root: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train and evaluate all methods of a seed that are not known; return success, tasks and env steps of each."""
    known: dict[str, Any] = read_json(root / "results.json") or {}
    for method in arguments.methods:
        if method not in known:
            known[method] = train_method(method, seed, root, arguments)
            write_json(known, root / "results.json")
    return known


def train_method(method: str, seed: int, root: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """One policy: its encoders if it has any of its own, SFT, and held-out episodes."""
    count = arguments.demonstrations // 3 if method in ("fewer", "sft_fewer") else arguments.demonstrations
    encoders = {"fewer": "vision", "sft_fewer": "sft"}.get(method, method)
    model = [*MODEL, f"vision={arguments.vision}"]
    common = ["--seed", seed, "--device", arguments.device, "--eval_freq", 0, "--auto-resume", "--no-progress-bar"]
    flags, start, video_steps = METHODS[encoders], model, 0
    if flags is not None:
        short = ["--max-episode-steps", VIDEO_STEPS, "--seed", VIDEO_SEED * (1 + seed)]
        video, video_steps = record(root / "video-v0", "random", arguments.video_episodes, short)
        run, epochs = root / f"encoders-{encoders}", arguments.vision_epochs
        run_deft(
            [
                "train",
                "vision",
                "--dataset",
                video,
                *model,
                *flags,
                *common,
                "--num_epochs",
                epochs,
                "--output_dir",
                run,
            ]
        )
        start = ["--model_path", run]
    # The seeds of the demonstrations of two benchmark seeds do not overlap.
    noisy = ["--noise", 0.3, "--seed", arguments.demonstrations * seed]
    demos, num_steps = record(root / f"demos-{count}-v0", "expert", count, noisy)
    run = root / method
    sft = ["train", "sft", "--dataset", demos, *start, *SFT, *common]
    run_deft([*sft, "--num_epochs", arguments.sft_epochs, "--output_dir", run])
    play = ["evaluate", run, "--env-kwargs", "observation=images", "--episodes", arguments.test_episodes, "--json"]
    found = json.loads(run_deft([*play, "--device", arguments.device]).strip().splitlines()[-1])
    tasks = {name: one["success_rate"] for name, one in found["tasks"].items()}
    return {
        "success": found["success_rate"], "episodes": found["episodes"], "tasks": tasks,
        "demonstration_steps": num_steps, "video_steps": video_steps,
    }  # fmt: skip


def record(out: Path, policy: str, episodes: int, flags: list[object]) -> tuple[Path, int]:
    """Record a dataset, unless there is one; return its path and its number of env steps."""
    counted = out.with_suffix(".json")
    known = read_json(counted)
    if not known:
        shutil.rmtree(out, ignore_errors=True)  # of an interrupted recording
        collect = ["collect", *WORLD, "--policy", policy, "--episodes", episodes, *flags, "--out", out, "--json"]
        known = json.loads(run_deft(collect).strip().splitlines()[-1])
        write_json(known, counted)
    return out, int(known["total_steps"])


def bars(seeds: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """What was asked for, by seed: the points that vision adds, or as much success with a third of the env steps."""
    found = []
    for seed, known in seeds.items():
        for what, method, target in (
            ("policy: points of success that vision adds", "vision", POINTS),
            ("policy: points that vision adds with a third of the demonstrations", "fewer", 0.0),
        ):
            if {"sft", method} <= known.keys():
                value = 100 * (known[method]["success"] - known["sft"]["success"])
                found.append({"what": what, "seed": seed, "value": value, "target": target, "reached": value >= target})
    return found


def show(seeds: dict[str, dict[str, Any]]) -> None:
    """Print success by method, and the bars."""
    print_success(seeds)
    for bar in bars(seeds):
        state = "reached" if bar["reached"] else "MISSED"
        print(f"{state:8} seed {bar['seed']}: {bar['what']}: {bar['value']:+.1f} (bar {bar['target']:g})")


def print_success(seeds: dict[str, dict[str, Any]]) -> None:
    """Print success by method, with its mean over seeds, and the env steps of its data."""
    rows = []
    for method, title in TITLES.items():
        found = [known for known in seeds.values() if method in known]
        if not found:
            continue
        rates = [known[method]["success"] for known in found]
        more = [100 * (known[method]["success"] - known["sft"]["success"]) for known in found if "sft" in known]
        steps = [f"{sum(known[method][key] for known in found) // len(found):,}" for key in STEPS]
        shown = [
            share_over_seeds(rates, found[0][method]["episodes"]),
            ", ".join(f"{100 * rate:.1f}" for rate in rates),
        ]
        rows.append([title, *shown, over_seeds(more, "+.1f") if more else "–", *steps])
    print_table(["", "success", "each seed", "points more than SFT", "steps of demonstrations", "of video"], rows)


if __name__ == "__main__":
    main()
