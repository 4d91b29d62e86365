"""Does the game pay? Phase 1 + phase 3 against phase 1 alone with the same number of world-model updates.

    python benchmarks/phases_results.py --teacher outputs/teacher_rl --iterations 100 --seeds 0 1 2 [--device cuda]

From one teacher, for each seed: a student is trained on it (phase 2) and plays against its world model (phase 3); a
copy of the teacher goes on with random exploration (phase 1) for exactly as many updates, at the same learning rate and
schedule. Both, and the teacher, are measured on the same held-out episodes of another explorer (scripted pushes and
grasps, and random actions, half each). The game is also played in a world where half of the scenes have a patch of
noise: what do these pay, beside the same scenes without? And did either side collapse? Seeds run side by side in
processes of their own; a run that was stopped goes on.

Results are in RESULTS/results.json, the page of each seed in RESULTS/seed-N/report.html; flags that are not known here
are settings of `deft train all`.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import finish_worker, machine, print_table, start_worker

from deft.config.f1_settings import PhaseConfig
from deft.config.rl_yaml import parse_phase
from deft.errors import RunError
from deft.evaluation.explorer import compare_world_models, evaluate_adversarial, evaluate_student
from deft.evaluation.plots import metric_curve, plot_comparison, read_lines
from deft.evaluation.report import COMPARISON_FILE, write_report
from deft.models.f1.loading import load_f1_policy
from deft.models.f1.policy import F1Policy
from deft.training import checkpoint
from deft.training.compute import choose_device
from deft.training.phases.adversarial import AdversarialTrainer
from deft.training.phases.base import MODEL_FILE, BaseRLTrainer
from deft.training.phases.student import StudentTrainer, load_teacher
from deft.training.phases.teacher import TeacherTrainer

NAMES = {"teacher": "phase 1", "random": "phase 1, as many updates more", "game": "phase 1 + phase 3"}


def main() -> None:
    """All seeds, and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", required=True, help="a run, checkpoint or weights file of phase 1")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--student-episodes", type=int, default=400)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--noise-iterations", type=int, default=30, help="of the game in the world with noise")
    parser.add_argument("--episodes", type=int, default=48, help="held-out episodes")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=1, help="of each seed's process")
    parser.add_argument("--results", type=Path, default=Path("outputs/phases_results"))
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    arguments, flags = parser.parse_known_args()
    if arguments.worker is not None:
        print(json.dumps(run_seed(arguments.worker, arguments, flags), default=float))
        return
    started = time.monotonic()
    given = list(sys.argv[1:])
    workers = [
        start_worker(Path(__file__).name, [*given, "--worker", seed], arguments.threads) for seed in arguments.seeds
    ]
    found = {seed: finish_worker(worker) for seed, worker in zip(arguments.seeds, workers, strict=True)}
    results = {
        "command": " ".join(sys.argv),
        "machine": machine(),
        "seconds": time.monotonic() - started,
        "seeds": found,
    }
    arguments.results.mkdir(parents=True, exist_ok=True)
    (arguments.results / "results.json").write_text(json.dumps(results, indent=1, default=float))
    summarize(found, arguments.results)


def run_seed(seed: int, arguments: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """The three phases of one seed, the teacher that goes on, and all measures."""
    root = arguments.results / f"seed-{seed}"
    config, _ = parse_phase("all", ["--seed", str(seed), "--device", arguments.device, *flags], "rl_config")
    config.run.auto_resume = True
    config.logging.tensorboard, config.logging.console_level = False, "WARNING"
    config.student.teacher_path = config.adversarial.teacher_checkpoint = arguments.teacher
    config.adversarial.student_checkpoint = str(root / "student")
    config.adversarial.total_iterations = arguments.iterations
    config.training.num_episodes = arguments.student_episodes
    collapsed = {}
    _train(StudentTrainer, _phase(config, "student", root / "student"))
    try:
        _train(AdversarialTrainer, _phase(config, "adversarial", root / "adversarial"))
    except RunError as error:  # the guard
        collapsed["reason"] = str(error)
    game = checkpoint.find_checkpoint(root / "adversarial")
    updates = checkpoint.load_training_state(game)["num_updates"]
    _train(TeacherTrainer, longer_teacher(config, root / "random", updates))
    noisy = _phase(config, "adversarial", root / "noise")
    noisy.adversarial.total_iterations = arguments.noise_iterations
    noisy.environment.setdefault("domain_randomization", {})["noise_patch_rate"] = 0.5
    _train(AdversarialTrainer, noisy)
    noise = evaluate_adversarial(root / "noise", arguments.episodes, seed=seed, device=arguments.device)
    device = choose_device(arguments.device)
    policies = {
        "teacher": load_teacher(config, device).eval(),
        "random": _load(root / "random", device),
        "game": _load(root / "adversarial", device),
    }
    measured = compare_world_models(policies, config, arguments.episodes, seed=seed + 1000)
    counted = {
        "teacher": 0,
        "random": checkpoint.load_training_state(checkpoint.find_checkpoint(root / "random"))["num_updates"],
    }
    student = evaluate_student(root / "student", arguments.episodes, seed=seed, device=arguments.device)
    game_found = evaluate_adversarial(
        root / "adversarial",
        arguments.episodes,
        root / "adversarial" / "plots" / "held_out.mp4",
        seed,
        arguments.device,
    )
    found = {
        "world_models": measured,
        "updates": {**counted, "game": updates},
        "collapsed": collapsed,
        "student": {name: student[name] for name in ("explorer", "random", "untrained")},
        "game": {name: game_found[name] for name in ("explorer", "random")},
        "noise": noise["noise"],
    }
    (root / COMPARISON_FILE).write_text(json.dumps(comparison({seed: found}), default=float))
    write_report(root)
    return found


def longer_teacher(config: PhaseConfig, folder: Path, updates: int) -> PhaseConfig:
    """Phase 1 from the same teacher for so many updates, at the game's learning rate."""
    longer = _phase(config, "teacher", folder)
    training = longer.training
    longer.model.checkpoint_path = _weights(config.student.teacher_path or "")
    per_batch = math.ceil(training.steps_per_episode / training.bptt_length)
    training.num_episodes = round(updates / per_batch) * training.batch_size
    training.learning_rate, training.motion_warmup = config.adversarial.wm_lr, 0.0
    training.num_envs = None
    return longer


def _weights(path: str) -> str:
    return path if Path(path).is_file() else str(checkpoint.find_checkpoint(path))


def _phase(config: PhaseConfig, phase: str, folder: Path) -> PhaseConfig:
    own = copy.deepcopy(config)
    own.phase = phase  # type: ignore[assignment]
    getattr(own, phase).output_dir = str(folder)
    own.training.save_every = 10 if phase == "adversarial" else 100
    own.training.keep_checkpoints = 1
    own.training.log_every = 1 if phase == "adversarial" else 8
    own.training.video_save_every = own.training.sample_save_every = 0
    return own


def _train(trainer: type[BaseRLTrainer], config: PhaseConfig) -> dict[str, Any]:
    return trainer(config).train()


def _load(run: Path, device: Any) -> F1Policy:
    return load_f1_policy(run / MODEL_FILE, device, checkpoint_path=checkpoint.find_checkpoint(run)).policy.eval()


def comparison(found: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """The headline, as reports show it."""

    def column(key: str, measure: str, scale: float = 1.0) -> list[float]:
        return [scale * one["world_models"][key][measure] for one in found.values()]

    rows = [
        {
            "name": name,
            "values": {
                "updates": int(np.mean([one["updates"][key] for one in found.values()])),
                "cross-entropy, nats": column(key, "cross_entropy"),
                "codes foreseen, %": column(key, "wm_acc", 100.0),
                "PSNR where it moves, dB": column(key, "psnr"),
            },
        }
        for key, name in NAMES.items()
    ]
    return {
        "title": "Does the game pay?",
        "note": "Held-out episodes of another explorer: scripted pushes and grasps, and random actions, half each. "
        f"{len(found)} seeds, from one teacher; updates since then.",
        "rows": rows,
        "bars": {"Cross-entropy, nats a code": {name: column(key, "cross_entropy") for key, name in NAMES.items()}},
    }


def summarize(found: dict[int, dict[str, Any]], folder: Path) -> None:
    """Print the tables and draw the curves."""
    table = comparison(found)
    (folder / COMPARISON_FILE).write_text(json.dumps(table, default=float))
    header = ["world model", *table["rows"][0]["values"]]
    print_table(header, [[row["name"], *(_cell(value) for value in row["values"].values())] for row in table["rows"]])
    gains = [
        one["world_models"]["random"]["cross_entropy"] - one["world_models"]["game"]["cross_entropy"]
        for one in found.values()
    ]
    print(f"\nlower by {_cell(gains)} nats; in {sum(gain > 0 for gain in gains)} of {len(gains)} seeds\n")
    lines = []
    for seed, one in found.items():
        explorer, random, noise = one["student"]["explorer"], one["student"]["random"], one["noise"]
        untrained = one["student"]["untrained"]
        lines.append(
            [
                seed,
                f"{explorer['cells'] / max(1.0, random['cells']):.2f}",
                f"{explorer['contacts'] / max(1.0, random['contacts']):.2f}",
                f"{explorer['wm_error']:.3f} / {random['wm_error']:.3f}",
                f"{100 * (1 - explorer['memory_divergence'] / untrained['memory_divergence']):.0f} %",
                f"{_paid(noise['noise_patch'])} / {_paid(noise['plain'])}",
                f"{noise['noise_patch']['error']:.3f} / {noise['plain']['error']:.3f}",
                one["collapsed"].get("reason", "no"),
            ]
        )
    print_table(
        [
            "seed",
            "cells ×",
            "contacts ×",
            "error / random's",
            "D lower by",
            "noise / plain pays",
            "… their error",
            "collapsed",
        ],
        lines,
    )
    curves = []
    for seed in found:
        updates = read_lines(folder / f"seed-{seed}" / "adversarial")["update"]
        curves.append(updates)
    for name, title in (("train/held_out_loss", "Held-out loss"), ("train/wm_error", "Error on the explorer's frames")):
        groups = {title: [metric_curve(updates, name) for updates in curves]}
        print(plot_comparison(groups, folder / f"{name.replace('/', '_')}.png", "Phase 3", "Iterations", title))


def _paid(found: dict[str, float]) -> str:
    return f"{found['reward']:+.4f} ± {found['standard_error']:.4f}"


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return f"{np.mean(value):.4f} ± {np.std(value):.4f}"
    return str(value)


if __name__ == "__main__":
    main()
