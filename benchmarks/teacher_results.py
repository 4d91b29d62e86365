"""Trains the `tiny` teacher within a time limit and measures it on held-out scenes: the table of docs/teacher.md.

    python benchmarks/teacher_results.py --minutes 15                      two cores
    python benchmarks/teacher_results.py --minutes 10 --device cuda        a GPU and all cores, to collect
    python benchmarks/teacher_results.py --datasets metaworld_pixels/hammer lerobot_v2/robot_sim_picknplace

One command: training (collection included in its time), evaluation with ablations and the open loop, the memory's
figure, and one run a dataset. Everything is printed and written to `RESULTS/results.json`; the teacher's weights are in
`RESULTS/tiny_teacher.safetensors`. Other flags are those of `deft train teacher`.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from teacher_memory import measure_memory, train_on_sweeps

from deft.config.f1_settings import PhaseConfig
from deft.config.rl_yaml import CONFIG_FILE, parse_phase, read_phase_config
from deft.evaluation.world_model import teacher_table
from deft.machine import available_cores
from deft.models.f1.loading import load_f1_policy
from deft.runs import checkpoint
from deft.runs.compute import choose_device
from deft.runs.directory import MODEL_FILE
from deft.training.phases.evaluation import evaluate_teacher
from deft.training.phases.teacher import TeacherTrainer

BARS = {"cpu": (3.0, 1.0), "cuda": (10.0, 3.0)}  # points and dB above copying
GPU_SETTINGS = {
    "batch_size": 64,
    "steps_per_episode": 48,
    "bptt_length": 16,
    "memory_warmup": 0.15,
    "buffer_capacity": 6000,
    "learning_starts": 64,
    "learning_rate": 1.5e-3,
}


def teacher_config(folder: Path, minutes: float, device: torch.device, flags: list[str]) -> PhaseConfig:
    """The shipped settings, for this machine and this long; flags come last."""
    config, _ = parse_phase("teacher", [], "rl_config")
    training = config.training
    for name, value in (GPU_SETTINGS if device.type == "cuda" else {}).items():
        setattr(training, name, value)
    training.num_episodes, training.max_minutes, training.device = 10**9, minutes, str(device)
    training.save_freq = training.video_freq = training.sample_freq = 0
    training.log_freq = 8 * training.batch_size if device.type == "cuda" else 8
    config.teacher.output_dir, config.run.overwrite = str(folder), True
    if flags:
        settings = folder.parent / "settings.json"
        settings.parent.mkdir(parents=True, exist_ok=True)
        from deft.config.loading import to_dict

        settings.write_text(json.dumps(to_dict(config)))
        config, _ = parse_phase("teacher", flags, settings)
    return config


def train(config: PhaseConfig) -> dict[str, Any]:
    """A run, and how fast it went."""
    started = time.monotonic()
    trainer = TeacherTrainer(config)
    summary = trainer.train()
    seconds = time.monotonic() - started
    steps = config.training.steps_per_episode
    return summary | {
        "wall_seconds": round(seconds, 1),
        "episodes_collected": trainer.num_taken,
        "frames_collected_per_second": round(trainer.num_taken * (steps + 1) / seconds, 1),
        "steps_trained_per_second": round(summary["episodes"] * steps / seconds, 1),
        "precision": str(trainer.autocast_dtype),
    }


def bars(results: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """What was asked for, and whether it is there."""
    points, decibels = BARS[kind]
    lost = {name: values["accuracy_lost"] for name, values in results["ablations"].items()}
    if "without_head" in results:
        alone = results["without_head"]["ablations"]
        lost |= {f"{name}, head camera hidden": values["accuracy_lost"] for name, values in alone.items()}
    return [
        _bar("token accuracy above copying, points", 100 * (results["wm_acc"] - results["copy_acc"]), points),
        _bar("… given the coarser codes", 100 * (results["wm_acc_forced"] - results["copy_acc_forced"]), points),
        _bar("PSNR above the copied frame where it moves, dB", results["psnr"] - results["copy_psnr"], decibels),
        _bar("cross-entropy, of the unigram entropy", results["cross_entropy_ratio"], 0.6, at_most=True),
        *(_bar(f"points lost with {name.replace('_', ' ')}", 100 * value, 0.0) for name, value in lost.items()),
    ]


def _bar(what: str, found: float, bar: float, at_most: bool = False) -> dict[str, Any]:
    return {"what": what, "found": found, "bar": bar, "reached": found <= bar if at_most else found > bar}


def measure_tabletop(
    arguments: argparse.Namespace,
    flags: list[str],
    device: torch.device,
    found: dict[str, Any],
    write: Callable[[], None],
) -> None:
    """The teacher of the tabletop: train it, measure it, and what its memory is worth."""
    folder: Path = arguments.results
    run = folder / "teacher"
    if not arguments.skip_teacher:
        found["training"] = train(teacher_config(run, arguments.minutes, device, flags))
        write()
    results = evaluate_teacher(run, arguments.episodes, device=str(device))
    found["evaluation"], found["bars"] = results, bars(results, device.type)
    write()
    print(teacher_table(results), flush=True)
    for bar in found["bars"]:
        print(f"{'reached' if bar['reached'] else 'MISSED':8} {bar['what']}: {bar['found']:.3f} (bar {bar['bar']:g})")
    latest = checkpoint.find_checkpoint(run)
    weights = checkpoint.load_part(latest, checkpoint.MODEL)
    halved = {name: value.half() if value.is_floating_point() else value for name, value in weights.items()}
    save_file(halved, folder / "tiny_teacher.safetensors")  # read back as float32; the figures are of float32

    def remembers(trained: Path, name: str) -> None:
        source = checkpoint.find_checkpoint(trained)
        policy = load_f1_policy(trained / MODEL_FILE, device, checkpoint_path=source).policy.eval()
        found[name] = measure_memory(policy, read_phase_config(run / CONFIG_FILE), arguments.memory_scenes)
        write()
        print(f"{name}:", json.dumps(found[name]), flush=True)

    remembers(run, "memory")
    if arguments.memory_minutes:
        swept = train_on_sweeps(run, folder / "teacher-sweeps", arguments.memory_minutes, str(device))
        remembers(swept, "memory_after_sweeps")


def main() -> None:
    """Train, measure, write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0, help="of training, collection included")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--episodes", type=int, default=48, help="held-out scenes")
    parser.add_argument(
        "--memory-minutes", type=float, default=0.0, help="of training on sweeps before the memory's figure"
    )
    parser.add_argument("--memory-scenes", type=int, default=32)
    parser.add_argument("--datasets", nargs="*", default=[], help="recorded video to train a teacher on each")
    parser.add_argument("--dataset-minutes", type=float, default=3.0)
    parser.add_argument("--results", type=Path, default=Path("outputs/teacher_results"))
    parser.add_argument("--skip-teacher", action="store_true", help="measure the run that is there")
    parser.add_argument("--only-datasets", action="store_true", help="no teacher of the tabletop")
    arguments, flags = parser.parse_known_args()
    device = choose_device(arguments.device)
    folder: Path = arguments.results
    found: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "cores": available_cores(),
            "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
            "torch": torch.__version__,
        },
    }

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "results.json").write_text(json.dumps(found, indent=1, default=float))

    if not arguments.only_datasets:
        measure_tabletop(arguments, flags, device, found, write)
    found["datasets"] = {}
    for name in arguments.datasets:
        place = folder / f"dataset-{Path(name).name}"
        options = ["--dataset", name, "--max-minutes", str(arguments.dataset_minutes)]
        if "lerobot" in name:
            options += ["--dataset-options", "skip_missing=true"]
        trained = train(teacher_config(place, arguments.dataset_minutes, device, [*flags, *options]))
        measured = evaluate_teacher(place, arguments.episodes, device=str(device))
        found["datasets"][name] = {"training": trained, "evaluation": measured}
        write()
        print(f"{name}\n{teacher_table(measured)}", flush=True)
    print(f"written: {folder / 'results.json'}")


if __name__ == "__main__":
    main()
