"""Does the game pay? Phase 1 + phase 3 against phase 1 alone: as many updates, as many new episodes, the same schedule.

    python benchmarks/phases_results.py --iterations 100 --seeds 0 1 2 [--device cuda] [--teacher outputs/teacher_rl]
    python benchmarks/phases_results.py --student-minutes 2 --game-minutes 10 --noise-minutes 2 --device cuda

From one teacher, for each seed: a student is trained on it (phase 2) and plays against its world model (phase 3). In
step with the game, a copy of the teacher continues training with random exploration alone (phase 1): each batch has as
many new episodes, and every update has the learning rate of the game's. Both world models are evaluated on the same
held-out scenes of another explorer (half scripted pushes and grasps, half random actions; every scene counts the same).
Then the game is played with a patch of noise in half of the scenes, and the reward for noise is compared with that of
the same scenes without it. At last the student is compared with random actions and with an untrained student. Seeds run
side by side in their own processes; a stopped run resumes. `--comparison-only` compares the two world models only.

The results of a seed are in RESULTS/seed-N/results.json as soon as they are known, with a page report.html; all of them
in RESULTS/results.json. `--tables` prints the saved results, `--again` evaluates the world models once more, all in
the same new scenes. Other flags are settings of `deft train all`.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import machine, print_table, worker_environment
from student_results import bars

from deft.config.f1_settings import PhaseConfig
from deft.config.rl_yaml import parse_phase
from deft.data.robot_episode import RobotEpisode
from deft.errors import RunError
from deft.evaluation.plots import metric_curve, plot_bars, plot_comparison, read_lines
from deft.evaluation.report import COMPARISON_FILE, write_report
from deft.evaluation.world_model import coded_batches, episode_losses
from deft.models.f1.loading import default_teacher, load_f1_policy
from deft.models.f1.policy import F1Policy
from deft.runs import checkpoint
from deft.runs.compute import choose_device, set_precision
from deft.runs.directory import MODEL_FILE
from deft.runs.json_files import write_json
from deft.training.phases.adversarial import AdversarialTrainer
from deft.training.phases.base import BaseRLTrainer, Metrics
from deft.training.phases.evaluation import compare_world_models, evaluate_student, noise_rewards_of_run
from deft.training.phases.exploration import Exploration, ProcessExplorer, held_out_episodes
from deft.training.phases.student import NUM_ENVS, StudentTrainer, load_teacher
from deft.training.phases.teacher import TeacherTrainer

NAMES = {"teacher": "phase 1", "random": "phase 1, as many updates more", "game": "phase 1 + phase 3"}
PACE_FILE = "pace.json"  # beside the runs of a seed: how far its game is


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
    parser.add_argument("--comparison-only", action="store_true", help="no noise, and no measures of the student")
    parser.add_argument(
        "--game-settings", type=Path, help="JSON of the section `adversarial`, read when phase 3 begins"
    )
    parser.add_argument("--random-workers", type=int, default=1, help="processes that explore for phase 1 beside")
    parser.add_argument("--episodes", type=int, default=48, help="held-out episodes")
    parser.add_argument(
        "--evaluation-seed", type=int, default=1000, help="of the held-out scenes, beside the seed of the run"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=1, help="of each seed's process")
    parser.add_argument("--results", type=Path, default=Path("outputs/phases_results"))
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--job", default="seed", choices=("seed", "random", "noise"), help=argparse.SUPPRESS)
    parser.add_argument("--tables", action="store_true", help="print what is known, and train nothing")
    parser.add_argument(
        "--again",
        action="store_true",
        help="measure the world models once more, all in the same new scenes",
    )
    arguments, flags = parser.parse_known_args()
    arguments.teacher = arguments.teacher or str(default_teacher())
    if arguments.worker is not None:
        seed = arguments.worker
        config, root = seed_config(seed, arguments, flags), arguments.results / f"seed-{seed}"
        if arguments.job == "seed":
            result = run_seed(seed, config, root, arguments)
        elif arguments.job == "random":
            result = continue_at_random(config, root, arguments.random_workers)
        else:
            result = play_with_noise(seed, config, root, arguments)
        _result_file(root, arguments.job).write_text(json.dumps(result, indent=1, default=float))
        return
    started = time.monotonic()
    roots = {seed: arguments.results / f"seed-{seed}" for seed in arguments.seeds}
    if arguments.tables:
        files = {seed: root / "results.json" for seed, root in roots.items()}
        known = {seed: json.loads(path.read_text()) for seed, path in files.items() if path.is_file()}
        summarize(known, arguments.results)
        return
    if arguments.again:
        measure_again(roots, arguments, flags)
        return
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
            "bars": student_bars(found),
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
    config.student.teacher_checkpoint = config.adversarial.teacher_checkpoint = arguments.teacher
    config.adversarial.student_checkpoint = str(root / "student")
    config.adversarial.iterations = arguments.iterations
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
    """The phases of one seed, phase 1 beside, and all measures; each is saved as soon as it is known."""
    found: dict[str, Any] = {"collapsed": {}, "updates": {"teacher": 0}}
    scenes, device = arguments.evaluation_seed + seed, arguments.device
    where = choose_device(device)

    def know(**more: Any) -> None:
        found.update(more)
        write_json(found, root / "results.json")

    student = _phase(config, "student", root / "student", arguments.student_minutes)
    trained = {"student": _train(StudentTrainer, student)}
    know(training=trained, chosen=chosen_settings(config, arguments.game_settings))
    random = _start(seed, root, "random", arguments.threads)
    game = _phase(config, "adversarial", root / "adversarial", arguments.game_minutes)
    try:
        trained["game"] = PacedGame(game).train()
    except RunError as error:  # the guard
        found["collapsed"]["reason"] = str(error)
    found["updates"]["game"] = _updates(root / "adversarial")
    policies = {"teacher": load_teacher(config, where).eval(), "game": _load(root / "adversarial", where)}
    held_out = held_out_episodes(config, policies["teacher"], arguments.episodes, scenes)
    know(training=trained, held_out=held_out_losses(policies, held_out))
    found["updates"]["random"] = _finish(random, root, "random")["updates"]
    policies["random"] = _load(root / "random", where)
    know(held_out=held_out_losses(policies, held_out))
    know(world_models=compare_world_models(policies, config, len(held_out), found=held_out))
    if arguments.comparison_only:
        return found
    know(noise_after_game=noise_rewards_of_run(root / "adversarial", arguments.episodes, scenes, device))
    know(noise=_finish(_start(seed, root, "noise", arguments.threads), root, "noise"))
    measured = evaluate_student(root / "student", arguments.episodes, seed=scenes, device=device)
    know(student={name: measured[name] for name in ("explorer", "random", "untrained")})
    write_json(comparison({seed: found}), root / COMPARISON_FILE)
    write_report(root)
    return found


def held_out_losses(policies: dict[str, F1Policy], held_out: list[RobotEpisode]) -> dict[str, dict[str, Any]]:
    """The cross-entropy of each held-out episode, and the means: of all, of the random and of the scripted half."""
    found: dict[str, dict[str, Any]] = {}
    half = len(held_out) - len(held_out) // 2
    for name, policy in policies.items():
        sums, lengths = episode_losses(policy, coded_batches(policy, held_out))
        losses = (sums / lengths).tolist()
        parts = {"mean": losses, "random": losses[:half], "scripted": losses[half:]}
        found[name] = {part: float(np.mean(values)) for part, values in parts.items()} | {"episodes": losses}
    return found


def measure_again(roots: dict[int, Path], arguments: argparse.Namespace, flags: list[str]) -> None:
    """The world models of all seeds in the same scenes, more of them or others: RESULTS/again.json, and a table."""
    config, where = seed_config(next(iter(roots)), arguments, flags), choose_device(arguments.device)
    torch.set_num_threads(arguments.threads)
    teacher = load_teacher(config, where).eval()
    held_out = held_out_episodes(config, teacher, arguments.episodes, arguments.evaluation_seed)
    start = held_out_losses({"teacher": teacher}, held_out)
    found: dict[int, dict[str, Any]] = {}
    lines, gains = [], []
    for seed, root in roots.items():
        policies = {"random": _load(root / "random", where), "game": _load(root / "adversarial", where)}
        found[seed] = {"held_out": {**start, **held_out_losses(policies, held_out)}}
        write_json(found, arguments.results / "again.json")
        gains.append(scene_gains(found[seed]))
        lines.append([seed, *(f"{found[seed]['held_out'][key]['mean']:.4f}" for key in NAMES), *_gains(gains[-1])])
    lines.append(["mean", *["–"] * len(NAMES), *_gains(np.mean(gains, 0))])
    print_table(["seed", *NAMES.values(), "lower by", "scripted scenes", "random scenes"], lines)


def _gains(scenes: np.ndarray) -> list[str]:
    """Mean and standard error over all scenes, the scripted and the random ones, which come first."""
    half = len(scenes) - len(scenes) // 2
    return ["{:+.4f} ± {:.4f}".format(*_mean_and_error(part)) for part in (scenes, scenes[half:], scenes[:half])]


# -- phase 1, in step with the game ----------------------------------------------------------------------------------


class PacedGame(AdversarialTrainer):
    """A game that saves, after every iteration, how many updates it has had and how far its schedule was."""

    def train(self) -> dict[str, Any]:
        """Train, and mark the end in the pace file for the phase 1 run, also after an error."""
        self.pace = _read_pace(self.run_dir.parent)["pace"]
        try:
            return super().train()
        finally:
            self._write_pace(over=True)

    def train_round(self) -> tuple[int, Metrics]:
        """An iteration."""
        self.pace = [row for row in self.pace if row[0] <= self.num_updates]  # it may have resumed from a checkpoint
        progress = self.progress
        found = super().train_round()
        self.pace.append((self.num_updates, progress))
        self._write_pace()
        return found

    def _write_pace(self, over: bool = False) -> None:
        write_json({"pace": self.pace, "over": over}, self.run_dir.parent / PACE_FILE)


class TeacherInStep(TeacherTrainer):
    """Phase 1 that makes the game's updates after it: as many, each at the same place of the schedule."""

    _game: dict[str, Any] = {"pace": [], "over": False}  # the last version read  # noqa: RUF012

    def __init__(self, config: PhaseConfig) -> None:
        super().__init__(config)
        if config.training.precision == "auto":
            set_precision(self.device, "fp32")  # as in the game
        self._parent = os.getppid()

    @property
    def progress(self) -> float:
        """That of the game at the same update; 1 when all of them are made."""
        for updates, progress in self._game["pace"]:
            if updates > self.num_updates:
                return float(progress)
        return float(self._game["over"])

    @property
    def is_over(self) -> bool:
        """Wait for the next iteration of phase 3; return whether training ends."""
        while not (
            self.stop_requested()
            or self._game["over"]
            or (self._game["pace"] and self._game["pace"][-1][0] > self.num_updates)
        ):
            if os.getppid() != self._parent:
                raise RunError("the process of phase 3 ended unexpectedly")
            time.sleep(0.2)
            self._game = _read_pace(self.run_dir.parent)
        self._set_learning_rate()  # that of the next update was not known when the last round ended
        return super().is_over


def _read_pace(root: Path) -> dict[str, Any]:
    """Return the progress that the game of a seed has saved."""
    path = root / PACE_FILE
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"pace": [], "over": False}
    return found


class PacedExplorer(ProcessExplorer):
    """Hands out `count` new episodes every so many batches, as the game takes them, and waits for them."""

    def __init__(self, exploration: Exploration, num_workers: int, count: int, every: int) -> None:
        super().__init__(exploration, num_workers)
        self._count, self._every_batches, self._batches = count, every, 0

    def ready(self) -> list[RobotEpisode]:
        """Those of a new iteration; none within one. The first iteration's are taken before the first batch."""
        self._batches += 1
        return self.take(self._count) if self._batches % self._every_batches == 0 else []


def continue_at_random(config: PhaseConfig, root: Path, num_workers: int) -> dict[str, Any]:
    """Phase 1 from the same teacher, in step with the game: as many updates, on as many new episodes."""
    longer = longer_teacher(config, root / "random")
    trainer = TeacherInStep(longer)
    count, every = new_episodes(config), config.adversarial.wm_updates
    trainer.explorer = PacedExplorer(trainer.exploration(), num_workers, count, every)
    trainer.train()
    return {"updates": trainer.num_updates, "new_episodes": trainer.num_taken}


def new_episodes(config: PhaseConfig) -> int:
    """New episodes of an iteration that the game trains on: the explorer's, where it does, and the random ones."""
    width, wanted = config.training.num_envs or NUM_ENVS, config.student.explorer.episodes_per_update
    found = -(-wanted // width) * width if config.adversarial.random_share < 1.0 else 0
    return found + config.adversarial.random_episodes


def longer_teacher(config: PhaseConfig, folder: Path) -> PhaseConfig:
    """Phase 1 from the same teacher as the game has it; the game says when it ends."""
    longer = _phase(config, "teacher", folder)
    training, game = longer.training, config.adversarial
    longer.model.checkpoint_path = _weights(config.student.teacher_checkpoint or "")
    if (sizes := Path(longer.model.checkpoint_path).parent / MODEL_FILE).is_file():  # a run's own, as the game has it
        longer.model.config_file = str(sizes)
    training.num_episodes, training.save_freq = 10**9, 0
    training.learning_rate, training.motion_warmup = game.wm_learning_rate, 0.0
    training.memory_warmup = training.head_dropout = 0.0  # as in the game
    training.learning_starts, training.buffer_capacity = new_episodes(config), game.replay_capacity
    return longer


def play_with_noise(seed: int, config: PhaseConfig, root: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The game in a world where half of the scenes have a patch of noise, and what that pays."""
    noisy = _phase(config, "adversarial", root / "noise", arguments.noise_minutes)
    noisy.adversarial.iterations = arguments.noise_iterations
    noisy.environment.setdefault("domain_randomization", {})["noise_patch_rate"] = 0.5
    _train(AdversarialTrainer, noisy)
    return noise_rewards_of_run(root / "noise", arguments.episodes, arguments.evaluation_seed + seed, arguments.device)


def _weights(path: str) -> str:
    return path if Path(path).is_file() else str(checkpoint.find_checkpoint(path))


def _updates(run: Path) -> int:
    return int(checkpoint.load_training_state(checkpoint.find_checkpoint(run))["num_updates"])


def _phase(config: PhaseConfig, phase: str, folder: Path, minutes: float | None = None) -> PhaseConfig:
    own = copy.deepcopy(config)
    own.training.max_minutes = minutes
    own.phase = phase  # type: ignore[assignment]
    getattr(own, phase).output_dir = str(folder)
    own.training.save_freq = 50 if phase == "adversarial" else 200  # a game's buffers are large
    own.training.keep_checkpoints = 1
    own.training.log_freq = 1 if phase == "adversarial" else 8
    own.training.video_freq = own.training.sample_freq = 0
    return own


def _train(trainer: type[BaseRLTrainer], config: PhaseConfig) -> dict[str, Any]:
    return trainer(config).train()


def _load(run: Path, device: Any) -> F1Policy:
    return load_f1_policy(run / MODEL_FILE, device, checkpoint_path=checkpoint.find_checkpoint(run)).policy.eval()


def comparison(found: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """The headline, as reports show it: of the seeds that are so far."""
    known = [one for one in found.values() if "world_models" in one]

    def losses(key: str, part: str = "mean") -> list[float]:
        return [one["held_out"][key][part] for one in known]

    def column(key: str, measure: str, scale: float = 1.0) -> list[float]:
        return [scale * one["world_models"][key][measure] for one in known]

    rows = [
        {
            "name": name,
            "values": {
                "updates": int(np.mean([one["updates"][key] for one in known])),
                "cross-entropy, nats": losses(key),
                "… scripted": losses(key, "scripted"),
                "… random": losses(key, "random"),
                "… over all frames": column(key, "cross_entropy"),
                "codes predicted, %": column(key, "wm_acc", 100.0),
                "PSNR where it moves, dB": column(key, "psnr"),
            },
        }
        for key, name in NAMES.items()
    ]
    return {
        "title": "Does the game pay?",
        "note": "Held-out scenes of another explorer: scripted pushes and grasps, and random actions, half each; every "
        f"scene counts the same. {len(known)} seeds, from one teacher; updates since then.",
        "rows": rows if known else [],
        "bars": {"Cross-entropy, nats a code": {name: losses(key) for key, name in NAMES.items()}} if known else {},
    }


def scene_gains(one: dict[str, Any]) -> np.ndarray:
    """By how much the game's world model is better than phase 1's, in each scene."""
    return np.subtract(*(one["held_out"][key]["episodes"] for key in ("random", "game")))


def _mean_and_error(values: np.ndarray) -> tuple[float, float]:
    return float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5)


def student_bars(found: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """What was asked of the students, of those that were measured."""
    students = [one["student"] for one in found.values() if "student" in one]
    return bars(students) if students else []


def summarize(found: dict[int, dict[str, Any]], folder: Path) -> None:
    """Print the tables of what is known and draw the figures."""
    table = comparison(found)
    (folder / COMPARISON_FILE).write_text(json.dumps(table, default=float))
    if table["rows"]:
        header = ["world model", *table["rows"][0]["values"]]
        print_table(
            header, [[row["name"], *(_cell(value) for value in row["values"].values())] for row in table["rows"]]
        )
    lines, gains = [], []
    for seed, one in found.items():
        line = [seed, *(f"{one['held_out'][key]['mean']:.4f}" for key in NAMES if key in one.get("held_out", {}))]
        if "random" in one.get("held_out", {}):
            gains.append(_mean_and_error(scene_gains(one)))
            line += ["{:+.4f} ± {:.4f}".format(*gains[-1]), *(str(one["updates"][key]) for key in ("random", "game"))]
        lines.append([*line, *["–"] * (7 - len(line))])
    print()
    print_table(["seed", *NAMES.values(), "lower by", "updates of phase 1", "of the game"], lines)
    print(f"\nlower in {sum(mean > 0 for mean, _ in gains)} of {len(gains)} seeds\n")
    _print_noise(found)
    _print_students(found)
    _draw(found, folder)


def _print_noise(found: dict[int, dict[str, Any]]) -> None:
    """What a step pays in scenes with a patch of noise and in the same without."""
    lines = [
        [
            seed,
            where,
            _paid(one[key]["noise_patch"]),
            _paid(one[key]["plain"]),
            f"{one[key]['noise_patch']['error']:.3f} / {one[key]['plain']['error']:.3f}",
            one["collapsed"].get("reason", "no"),
        ]
        for seed, one in found.items()
        for key, where in (("noise", "with noise"), ("noise_after_game", "without"))
        if key in one
    ]
    if lines:
        print_table(["seed", "played", "a patch of noise pays", "none", "… their error", "collapsed"], lines)


def _print_students(found: dict[int, dict[str, Any]]) -> None:
    """The students against random actions and against those before training."""
    lines = []
    for seed, one in found.items():
        if "student" not in one:
            continue
        explorer, random, untrained = (one["student"][name] for name in ("explorer", "random", "untrained"))
        lines.append(
            [
                seed,
                f"{explorer['cells'] / max(1.0, random['cells']):.2f}",
                f"{explorer['contacts'] / max(1.0, random['contacts']):.2f}",
                f"{explorer['wm_error']:.3f} / {random['wm_error']:.3f}",
                f"{100 * (1 - explorer['memory_divergence'] / untrained['memory_divergence']):.0f} %",
            ]
        )
    if lines:
        print()
        print_table(["seed", "cells ×", "contacts ×", "error / random's", "D lower by"], lines)
    for bar in student_bars(found):
        state = "" if "reached" not in bar else "reached" if bar["reached"] else "MISSED"
        print(f"{state:8} {bar['what']}: {bar['found']:.3f} (bar {bar['bar']:g})")


def _draw(found: dict[int, dict[str, Any]], folder: Path) -> None:
    """The games' curves, and what noise pays."""
    games = [read_lines(folder / f"seed-{seed}" / "adversarial")["update"] for seed in found]
    for name, title in (("train/held_out_loss", "Held-out loss"), ("train/wm_error", "Error on the explorer's frames")):
        curves = [curve for updates in games if len((curve := metric_curve(updates, name))[0])]
        if curves:
            path = folder / f"{name.replace('/', '_')}.png"
            print(plot_comparison({title: curves}, path, "Phase 3", "Iterations", title))
    noise = {seed: one["noise"] for seed, one in found.items() if "noise" in one}
    if noise:
        scenes = {"plain": "the same scenes without", "noise_patch": "scenes with a patch of noise"}
        rows = {label: [noise[seed][key]["reward"] for seed in noise] for key, label in scenes.items()}
        errors = {label: [noise[seed][key]["standard_error"] for seed in noise] for key, label in scenes.items()}
        labels = [f"seed {seed}" for seed in noise]
        print(plot_bars(labels, rows, errors, folder / "noise.png", "What noise pays", "Reward of a step, nats a code"))


def _paid(found: dict[str, float]) -> str:
    return f"{found['reward']:+.4f} ± {found['standard_error']:.4f}"


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return f"{np.mean(value):.4f} ± {np.std(value):.4f}"
    return str(value)


if __name__ == "__main__":
    main()
