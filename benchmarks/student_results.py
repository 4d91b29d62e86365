"""Trains the student with several seeds and measures it against random actions: the tables of docs/student.md.

    python benchmarks/student_results.py --minutes 15                               two cores, the shipped teacher
    python benchmarks/student_results.py --minutes 10 --device cuda --seeds 0 1 2
    python benchmarks/student_results.py --teacher outputs/teacher_rl --episodes 64

For each seed a run of `deft train student`, then as many steps of the student, of the student before training and of
uniformly random actions in the same held-out scenes: cells of a grid of the hand's poses that were visited, steps in
contact with an object, the world model's error a step, and the distance of the memories. Everything is printed and
written to `RESULTS/results.json`; the memory's divergence over training is drawn in `RESULTS/memory_divergence.png`.
Other flags are those of `deft train student`.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from deft.config.f1_settings import PhaseConfig
from deft.config.rl_yaml import parse_phase
from deft.evaluation.plots import metric_curve, plot_comparison, read_lines
from deft.machine import available_cores
from deft.runs.compute import choose_device
from deft.training.phases.evaluation import evaluate_student, explorer_table
from deft.training.phases.student import train_student

GPU_FLAGS = ["--num-envs", "32", "--episodes-per-update", "32", "--batch-size", "400"]
CELLS, CONTACTS, DIVERGENCE = 1.5, 2.0, 0.8  # the bars: times random's, times random's, of the untrained student's


def student_config(folder: Path, seed: int, arguments: argparse.Namespace, flags: list[str]) -> PhaseConfig:
    """The shipped settings, for this machine and this long; flags come last."""
    device = choose_device(arguments.device)
    given = ["--output-dir", str(folder), "--seed", str(seed), "--device", str(device), "--auto-resume"]
    given += ["--num-episodes", "1000000000", "--max-minutes", str(arguments.minutes), "--save-every", "0"]
    given += ["--video-save-every", "0", "--sample-save-every", "0", "--log-every", "1"]
    if arguments.teacher is not None:
        given += ["--teacher-path", str(arguments.teacher)]
    if device.type == "cuda":
        given += GPU_FLAGS
    config, _ = parse_phase("student", given, "rl_config")
    if not flags:
        return config
    settings = folder.parent / "settings.json"  # flags over these
    settings.parent.mkdir(parents=True, exist_ok=True)
    from deft.config.loading import to_dict

    settings.write_text(json.dumps(to_dict(config)))
    return parse_phase("student", flags, settings)[0]


def bars(seeds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was asked for, over all seeds, and whether it is there."""

    def over(name: str, of: str, by: str) -> float:
        return mean(found[of][name] for found in seeds) / max(1e-9, mean(found[by][name] for found in seeds))

    cells, contacts = over("cells", "explorer", "random"), over("contacts", "explorer", "random")
    error = mean(found["explorer"]["wm_error"] - found["random"]["wm_error"] for found in seeds)
    divergence = over("memory_divergence", "explorer", "untrained")
    return [
        {"what": "cells visited, times those of random actions", "found": cells, "bar": CELLS},
        {"what": "steps in contact, times those of random actions", "found": contacts, "bar": CONTACTS},
        {
            "what": "cells or contacts",
            "found": max(cells / CELLS, contacts / CONTACTS),
            "bar": 1.0,
            "reached": cells >= CELLS or contacts >= CONTACTS,
        },
        {"what": "world-model error a step above random's, nats", "found": error, "bar": 0.0, "reached": error > 0},
        {
            "what": "memory divergence, of the untrained student's",
            "found": divergence,
            "bar": DIVERGENCE,
            "reached": divergence <= DIVERGENCE,
        },
    ]


def main() -> None:
    """Train, measure, write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0, help="of training, for each seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--teacher", type=Path, help="a run or checkpoint of phase 1; by default the shipped teacher")
    parser.add_argument("--episodes", type=int, default=32, help="held-out scenes, of each who acts")
    parser.add_argument("--evaluation-seed", type=int, default=1000, help="of these scenes, beside the run's seed")
    parser.add_argument("--results", type=Path, default=Path("outputs/student_results"))
    parser.add_argument("--skip-training", action="store_true", help="measure the runs that are there")
    arguments, flags = parser.parse_known_args()
    folder: Path = arguments.results
    device = choose_device(arguments.device)
    found: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "cores": available_cores(),
            "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
            "torch": torch.__version__,
        },
        "seeds": [],
    }
    curves = []
    for seed in arguments.seeds:
        run = folder / f"seed-{seed}"
        trained = {} if arguments.skip_training else train_student(student_config(run, seed, arguments, flags))
        scenes = arguments.evaluation_seed + seed
        results = evaluate_student(run, arguments.episodes, run / "held_out.mp4", scenes, str(device))
        curves.append(metric_curve(read_lines(run)["update"], "train/memory_divergence"))
        found["seeds"].append({"seed": seed, "training": trained, **results})
        found["bars"] = bars(found["seeds"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "results.json").write_text(json.dumps(found, indent=1, default=float))
        print(f"seed {seed}\n{explorer_table(results)}", flush=True)
    plot = folder / "memory_divergence.png"
    plot_comparison({"student": curves}, plot, "Memory divergence", "Episodes", "‖h student − h teacher‖")
    for bar in found["bars"]:
        state = "" if "reached" not in bar else "reached" if bar["reached"] else "MISSED"
        print(f"{state:8} {bar['what']}: {bar['found']:.3f} (bar {bar['bar']:g})")
    print(f"written: {folder / 'results.json'}")


if __name__ == "__main__":
    main()
