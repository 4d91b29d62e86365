"""Does the game pay? Phase 1 + phase 3 against phase 1 alone with the same number of world-model updates.

    python benchmarks/phases_results.py --iterations 100 --seeds 0 1 2 [--device cuda] [--teacher outputs/teacher_rl]
    python benchmarks/phases_results.py --student-minutes 4 --game-minutes 7 --noise-minutes 3 --device cuda

From one teacher, for each seed: a student is trained on it (phase 2) and plays against its world model (phase 3); then
a copy of the teacher goes on with random exploration (phase 1) for exactly as many updates, at the same learning rate
and schedule, while the game is also played in a world where half of the scenes have a patch of noise. The world models
are measured on the same held-out episodes of another explorer (scripted pushes and grasps, and random actions, half
each), the student against random actions and against a student before training, what noise pays beside the same scenes
without. Did either side collapse? Seeds run side by side in processes of their own; a run that was stopped goes on.

What is known of a seed is in RESULTS/seed-N/results.json as soon as it is, with its page report.html; all of it in
RESULTS/results.json. Flags that are not known here are settings of `deft train all`.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import machine, print_table, worker_environment
from student_results import bars

from deft.config.f1_settings import PhaseConfig
from deft.config.rl_yaml import parse_phase
from deft.data.robot_episode import RobotEpisode
from deft.errors import RunError
from deft.evaluation.explorer import compare_world_models, evaluate_adversarial, evaluate_student
from deft.evaluation.plots import metric_curve, plot_comparison, read_lines
from deft.evaluation.report import COMPARISON_FILE, write_report
from deft.evaluation.world_model import coded_batches, mean_loss
from deft.models.f1.loading import default_teacher, load_f1_policy
from deft.models.f1.policy import F1Policy
from deft.training import checkpoint
from deft.training.compute import choose_device
from deft.training.phases.adversarial import AdversarialTrainer
from deft.training.phases.base import MODEL_FILE, BaseRLTrainer
from deft.training.phases.held_out import held_out_episodes
from deft.training.phases.student import StudentTrainer, load_teacher
from deft.training.phases.teacher import TeacherTrainer

NAMES = {"teacher": "phase 1", "random": "phase 1, as many updates more", "game": "phase 1 + phase 3"}


def main() -> None:
    """All seeds, and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", help="a run, checkpoint or weights file of phase 1; by default the one that ships")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--student-episodes", type=int, default=400)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--noise-iterations", type=int, default=30, help="of the game in the world with noise")
    parser.add_argument("--student-minutes", type=float, help="end phase 2 after this long")
    parser.add_argument("--game-minutes", type=float, help="end phase 3 after this long")
    parser.add_argument("--noise-minutes", type=float, help="end the game with noise after this long")
    parser.add_argument(
        "--game-settings", type=Path, help="JSON of the section `adversarial`, read when phase 3 begins"
    )
    parser.add_argument("--random-workers", type=int, help="processes that explore for the teacher that goes on")
    parser.add_argument("--episodes", type=int, default=48, help="held-out episodes")
    parser.add_argument(
        "--evaluation-seed", type=int, default=1000, help="of the held-out scenes, beside the seed of the run"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=1, help="of each seed's process")
    parser.add_argument("--results", type=Path, default=Path("outputs/phases_results"))
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--job", default="seed", choices=("seed", "random", "noise"), help=argparse.SUPPRESS)
    parser.add_argument("--updates", type=int, default=0, help=argparse.SUPPRESS)
    arguments, flags = parser.parse_known_args()
    arguments.teacher = arguments.teacher or str(default_teacher())
    if arguments.worker is not None:
        seed = arguments.worker
        config, root = seed_config(seed, arguments, flags), arguments.results / f"seed-{seed}"
        if arguments.job == "seed":
            result = run_seed(seed, config, root, arguments)
        elif arguments.job == "random":
            result = go_on_at_random(config, root, arguments)
        else:
            result = play_with_noise(seed, config, root, arguments)
        _result_file(root, arguments.job).write_text(json.dumps(result, indent=1, default=float))
        return
    started = time.monotonic()
    roots = {seed: arguments.results / f"seed-{seed}" for seed in arguments.seeds}
    workers = {seed: _start(seed, root, "seed", arguments.threads) for seed, root in roots.items()}
    found, failed = {}, {}
    for seed, worker in workers.items():
        try:
            found[seed] = _finish(worker, roots[seed], "seed")
        except RuntimeError as error:
            failed[seed] = str(error)
            print(f"seed {seed}: {error}", file=sys.stderr, flush=True)
        results = {
            "command": " ".join(sys.argv),
            "machine": machine(),
            "seconds": time.monotonic() - started,
            "seeds": found,
            "failed": failed,
            "bars": bars([one["student"] for one in found.values()]) if found else [],
        }
        arguments.results.mkdir(parents=True, exist_ok=True)
        (arguments.results / "results.json").write_text(json.dumps(results, indent=1, default=float))
    if found:
        summarize(found, arguments.results)
    sys.exit(1 if failed else 0)


def _start(seed: int, root: Path, job: str, threads: int, *more: object) -> subprocess.Popen[bytes]:
    """A job of a seed in a process of its own, with the flags of this one; it writes into ROOT/JOB.log."""
    root.mkdir(parents=True, exist_ok=True)
    _result_file(root, job).unlink(missing_ok=True)
    command = [sys.executable, __file__, *sys.argv[1:], "--worker", seed, "--job", job, *more]
    with open(root / f"{job}.log", "w") as log:
        return subprocess.Popen(list(map(str, command)), env=worker_environment(threads), stdout=log, stderr=log)


def _finish(process: subprocess.Popen[bytes], root: Path, job: str) -> dict[str, Any]:
    """Wait for a job and read its result; a failed one raises."""
    if process.wait() != 0:
        raise RuntimeError(f"{job} failed ({process.returncode}): {(root / f'{job}.log').read_text()[-3000:]}")
    result: dict[str, Any] = json.loads(_result_file(root, job).read_text())
    return result


def _result_file(root: Path, job: str) -> Path:
    return root / f"{job}.json"


def seed_config(seed: int, arguments: argparse.Namespace, flags: list[str]) -> PhaseConfig:
    """The settings that all jobs of a seed share."""
    root = arguments.results / f"seed-{seed}"
    config, _ = parse_phase("all", ["--seed", str(seed), "--device", arguments.device, *flags], "rl_config")
    config.run.auto_resume = True
    config.logging.tensorboard, config.logging.console_level = False, "WARNING"
    config.student.teacher_path = config.adversarial.teacher_checkpoint = arguments.teacher
    config.adversarial.student_checkpoint = str(root / "student")
    config.adversarial.total_iterations = arguments.iterations
    config.training.num_episodes = arguments.student_episodes
    chosen_settings(config, arguments.game_settings)
    return config


def chosen_settings(config: PhaseConfig, path: Path | None) -> dict[str, Any]:
    """Put the settings of a file, where it is there by now, into the section `adversarial`; what they are."""
    chosen: dict[str, Any] = json.loads(path.read_text()) if path is not None and path.is_file() else {}
    for name, value in chosen.items():
        setattr(config.adversarial, name, value)
    return chosen


def run_seed(seed: int, config: PhaseConfig, root: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The phases of one seed, the two jobs beside, and all measures; each is written down when it is known."""
    found: dict[str, Any] = {"collapsed": {}, "updates": {"teacher": 0}}
    scenes, device = arguments.evaluation_seed + seed, arguments.device

    def know(**more: Any) -> None:
        found.update(more)
        (root / "results.json").write_text(json.dumps(found, indent=1, default=float))

    student = _phase(config, "student", root / "student", arguments.student_minutes)
    trained = {"student": _train(StudentTrainer, student)}
    know(training=trained, chosen=chosen_settings(config, arguments.game_settings))
    game = _phase(config, "adversarial", root / "adversarial", arguments.game_minutes)
    try:
        trained["game"] = _train(AdversarialTrainer, game)
    except RunError as error:  # the guard
        found["collapsed"]["reason"] = str(error)
    updates = _updates(root / "adversarial")
    know(training=trained, updates={"teacher": 0, "game": updates})
    noise = _start(seed, root, "noise", arguments.threads)
    random = _start(seed, root, "random", arguments.threads, "--updates", updates)
    where = choose_device(device)
    policies = {"teacher": load_teacher(config, where).eval(), "game": _load(root / "adversarial", where)}
    held_out = held_out_episodes(config, policies["teacher"], arguments.episodes, scenes)
    know(**measure_world_models(policies, config, held_out))  # those that are there
    measured = evaluate_student(root / "student", arguments.episodes, seed=scenes, device=device)
    know(student={name: measured[name] for name in ("explorer", "random", "untrained")})
    found["updates"]["random"] = _finish(random, root, "random")["updates"]
    policies["random"] = _load(root / "random", where)
    know(**measure_world_models(policies, config, held_out))
    measured = evaluate_adversarial(root / "adversarial", arguments.episodes, seed=scenes, device=device)
    know(game={name: measured[name] for name in ("explorer", "random", "noise") if name in measured})
    know(noise=_finish(noise, root, "noise")["noise"])
    (root / COMPARISON_FILE).write_text(json.dumps(comparison({seed: found}), default=float))
    write_report(root)
    return found


def measure_world_models(
    policies: dict[str, F1Policy], config: PhaseConfig, held_out: list[RobotEpisode]
) -> dict[str, Any]:
    """All measures on the held-out episodes, and the cross-entropy on those of each explorer by itself."""
    num_random = len(held_out) - len(held_out) // 2
    parts = {"random": held_out[:num_random], "scripted": held_out[num_random:]}
    return {
        "world_models": compare_world_models(policies, config, len(held_out), found=held_out),
        "cross_entropy": {
            name: {kind: mean_loss(policy, coded_batches(policy, part)) for kind, part in parts.items()}
            for name, policy in policies.items()
        },
    }


def go_on_at_random(config: PhaseConfig, root: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Phase 1 from the same teacher for as many updates as the game had."""
    longer = longer_teacher(config, root / "random", arguments.updates)
    longer.training.num_envs = arguments.random_workers
    _train(TeacherTrainer, longer)
    return {"updates": _updates(root / "random")}


def play_with_noise(seed: int, config: PhaseConfig, root: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The game in a world where half of the scenes have a patch of noise, and what that pays."""
    noisy = _phase(config, "adversarial", root / "noise", arguments.noise_minutes)
    noisy.adversarial.total_iterations = arguments.noise_iterations
    noisy.environment.setdefault("domain_randomization", {})["noise_patch_rate"] = 0.5
    _train(AdversarialTrainer, noisy)
    scenes = arguments.evaluation_seed + seed
    found = evaluate_adversarial(root / "noise", arguments.episodes, seed=scenes, device=arguments.device)
    return {"noise": found["noise"]}


def longer_teacher(config: PhaseConfig, folder: Path, updates: int) -> PhaseConfig:
    """Phase 1 from the same teacher for so many updates, at the game's learning rate."""
    longer = _phase(config, "teacher", folder)
    training = longer.training
    longer.model.checkpoint_path = _weights(config.student.teacher_path or "")
    per_batch = math.ceil(training.steps_per_episode / training.bptt_length)
    training.num_episodes = round(updates / per_batch) * training.batch_size
    training.learning_rate, training.motion_warmup = config.adversarial.wm_lr, 0.0
    training.memory_warmup = training.head_dropout = 0.0  # as in the game
    training.learning_starts = 4 * training.batch_size  # few episodes would be trained on again and again at first
    return longer


def _weights(path: str) -> str:
    return path if Path(path).is_file() else str(checkpoint.find_checkpoint(path))


def _updates(run: Path) -> int:
    return int(checkpoint.load_training_state(checkpoint.find_checkpoint(run))["num_updates"])


def _phase(config: PhaseConfig, phase: str, folder: Path, minutes: float | None = None) -> PhaseConfig:
    own = copy.deepcopy(config)
    own.training.max_minutes = minutes
    own.phase = phase  # type: ignore[assignment]
    getattr(own, phase).output_dir = str(folder)
    own.training.save_every = 50 if phase == "adversarial" else 200  # a game's buffers are large
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
                "… scripted": [one["cross_entropy"][key]["scripted"] for one in found.values()],
                "… random": [one["cross_entropy"][key]["random"] for one in found.values()],
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
    for bar in bars([one["student"] for one in found.values()]):
        state = "" if "reached" not in bar else "reached" if bar["reached"] else "MISSED"
        print(f"{state:8} {bar['what']}: {bar['found']:.3f} (bar {bar['bar']:g})")
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
