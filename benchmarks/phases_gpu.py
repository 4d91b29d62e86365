"""Do the phases pay, on thousands of environments? The whole comparison, seed by seed, in one resumable program.

    python benchmarks/phases_gpu.py --device cuda --seeds 0 1 2 [--rewards documents excess disagreement progress]
    python benchmarks/phases_gpu.py --device cuda --seeds 0 --stop-after 10       in calls of limited time
    python benchmarks/phases_gpu.py --tables

For each seed, from one teacher:

    student     a student for each of `--rewards` (phase 2), against itself before training with the same noise, and
                against random actions: contacts with objects per 1,000 steps in held-out scenes
    game        phase 3 from the student with the most contacts, and `random`: the same program with random actions
                instead of the explorer's episodes: as many updates on as many new episodes, at the same learning rate
    measures    the teacher and both world models on held-out interaction and on free motion (cross-entropy, PSNR, open
                loop 1, 5, 10 and 20 steps ahead)
    noise       a student for each of `--rewards` in scenes of which half have a patch of random colours: how often the
                patch is in view, against the student before training
    speed       env steps per second of a student's iteration, on `--vector` and in worker processes
    policy      a world model used for a policy: `vision_results.py`, camera encoders trained on video before imitation
                against imitation alone, on held-out scenes; `--demonstrations 0`: not

The plan with estimated times is printed first; `--plan` prints nothing else. What is known is in RESULTS/results.json
at once, by seed and stage. After `--stop-after` minutes the current run is stopped, and saves; the exit status is then
1. The same command continues with the stage in which it stopped, and a run from its last checkpoint. Other flags are
settings of `deft train all`.
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import vision_results
from bakeoff_plan import CPU_STEPS, START, Part, Plan, warp_rate
from common import machine, print_machine, print_table
from timed_bench import StoppedError, interrupted_after

from deft.config.f1_settings import PhaseConfig
from deft.config.rl_yaml import parse_phase
from deft.evaluation.interaction import free_episodes, measure_interaction
from deft.models.f1.explorer import ExplorerPolicy, load_explorer, new_explorer
from deft.models.f1.loading import default_teacher, load_f1_policy
from deft.models.f1.policy import F1Policy
from deft.runs import checkpoint
from deft.runs.compute import choose_device
from deft.runs.directory import MODEL_FILE
from deft.runs.json_files import read_json, write_json
from deft.runs.random_state import separate_random_state
from deft.training.phases.adversarial import AdversarialTrainer
from deft.training.phases.base import BaseRLTrainer
from deft.training.phases.evaluation import explore
from deft.training.phases.exploration import Exploration, InlineExplorer, make_exploration
from deft.training.phases.explorer_rollouts import ExplorerRollouts, act_randomly, open_envs
from deft.training.phases.interaction import interaction_episodes
from deft.training.phases.rewards import Collapse
from deft.training.phases.student import NUM_ENVS, StudentTrainer, load_teacher

ALONE = {  # only one term
    "memory_divergence_weight": 0.0, "wm_uncertainty_weight": 1.0, "uncertainty_weight": 0.0, "error_weight": 0.0,
    "error_progress_weight": 0.0, "uncertainty_progress_weight": 0.0,
}  # fmt: skip
REWARDS: dict[str, dict[str, float]] = {
    "documents": {},
    "excess": {**ALONE, "excess_error_weight": 1.0},
    "disagreement": {**ALONE, "disagreement_weight": 1.0},
    "progress": {**ALONE, "learning_progress_weight": 1.0},
}
TIMED = 3  # rounds
# Estimates of the plan, which the first stages correct: the part of the simulator's env steps per second that remains
# with an explorer's network and updates, and seconds of an update of the world model.
EXPLORER, WORLD_MODEL_UPDATE = 0.5, {"cuda": 0.1, "cpu": 1.0}
MODELS = {"teacher": "phase 1", "random": "phase 1, as many updates more", "game": "phases 1 to 3"}


def main(words: list[str] | None = None) -> int:
    """All seeds, and the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", help="a run, checkpoint or weights file of phase 1; by default the one that ships")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rewards", nargs="+", default=["documents", "excess"], choices=list(REWARDS))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--student-episodes", type=int, default=100_000, help="of each student")
    parser.add_argument("--noise-episodes", type=int, default=40_000, help="of each student with noise; 0: none")
    parser.add_argument("--iterations", type=int, default=100, help="of phase 3")
    parser.add_argument("--episodes", type=int, default=128, help="held-out episodes of interaction and of free motion")
    parser.add_argument("--evaluation-seed", type=int, default=4000, help="of the held-out scenes")
    parser.add_argument("--results", type=Path, default=Path("outputs/phases_gpu"))
    parser.add_argument("--tables", action="store_true", help="print what is known, and train nothing")
    parser.add_argument("--plan", action="store_true", help="print the plan alone")
    parser.add_argument("--stop-after", type=float, help="minutes of this call, after which the current run is stopped")
    vision_results.add_settings(parser)
    arguments, flags = parser.parse_known_args(words)
    path = arguments.results / "results.json"
    results: dict[str, Any] = read_json(path) or {"machine": machine(), "seeds": {}}
    is_left = False
    if not arguments.tables:
        print_machine()
        session = Session(arguments, flags, results, path)
        print(session.plan, flush=True)
        if arguments.plan:
            return 0
        try:
            for seed in arguments.seeds:
                session.run_seed(seed)
        except StoppedError:
            is_left = True
    show(results["seeds"])
    if is_left:
        print("stopped by --stop-after; the same command continues", flush=True)
    return 1 if is_left else 0


def seed_config(seed: int, arguments: argparse.Namespace, flags: list[str]) -> PhaseConfig:
    """The settings that all runs of a seed share."""
    config, _ = parse_phase("all", ["--seed", str(seed), "--device", arguments.device, *flags], "rl_config")
    config.run.auto_resume = True
    config.logging.tensorboard, config.logging.console_level = False, "WARNING"
    config.student.teacher_checkpoint = config.adversarial.teacher_checkpoint = str(
        arguments.teacher or default_teacher()
    )
    config.adversarial.iterations = arguments.iterations
    return config


class Session:
    """One call of this script: its settings, what is known, and how much time is left."""

    def __init__(self, arguments: argparse.Namespace, flags: list[str], results: dict[str, Any], path: Path) -> None:
        self.arguments, self.results, self.path = arguments, results, path
        self.started = time.monotonic()
        self.configs = {seed: seed_config(seed, arguments, flags) for seed in arguments.seeds}
        known = {seed: results["seeds"].setdefault(str(seed), {}) for seed in arguments.seeds}
        parts = [
            Part(name, seed, seconds)
            for seed in arguments.seeds
            for name, seconds in stage_seconds(self.configs[seed], arguments).items()
            if name not in known[seed]
        ]
        self.plan = Plan(parts, 1, arguments.device)

    @property
    def minutes_left(self) -> float:
        """Minutes until this program stops itself."""
        most = self.arguments.stop_after
        return math.inf if most is None else most - (time.monotonic() - self.started) / 60

    def stage(self, seed: int, name: str, run: Callable[[], Any], has_commands: bool = False) -> None:
        """Run a stage that is not known, and save what it returns; one `has_commands` stops them itself."""
        known = self.results["seeds"][str(seed)]
        if name in known:
            return
        started = time.monotonic()
        if has_commands:
            known[name] = run()
        else:
            with interrupted_after(self.minutes_left):
                known[name] = run()
        seconds = time.monotonic() - started
        known.setdefault("seconds", {})[name] = seconds
        write_json({**self.results, "bars": bars(self.results["seeds"])}, self.path)
        self.plan.finish(name, seed, seconds)
        left = self.plan.minutes_left()
        print(f"seed {seed}: {name} in {seconds:.0f} s; about {left:.0f} minutes left", flush=True)

    def run_seed(self, seed: int) -> None:
        """Run the stages of a seed that are not known."""
        arguments, config, known = self.arguments, self.configs[seed], self.results["seeds"][str(seed)]
        root, rewards = arguments.results / f"seed-{seed}", arguments.rewards
        teacher = load_teacher(config, choose_device(arguments.device)).eval()
        for reward in rewards:
            episodes = arguments.student_episodes
            student = functools.partial(train_student, config, teacher, reward, root, episodes, arguments)
            self.stage(seed, f"student {reward}", student)
        chosen = max(rewards, key=lambda reward: known[f"student {reward}"]["trained"]["contacts_per_1000"])
        known["chosen"] = chosen
        for name in ("game", "random"):
            self.stage(seed, name, functools.partial(train_game, config, root, name, chosen))
        self.stage(seed, "world models", lambda: measure_models(config, teacher, root, arguments))
        for reward in rewards if arguments.noise_episodes else ():
            noisy = functools.partial(train_with_noise, config, teacher, reward, root, arguments)
            self.stage(seed, f"noise {reward}", noisy)
        self.stage(seed, "speed", lambda: speeds(config, root))
        if arguments.demonstrations:
            self.stage(seed, "policy", lambda: self.train_policies(seed, root / "policy"), has_commands=True)

    def train_policies(self, seed: int, root: Path) -> dict[str, Any]:
        """The comparison of `vision_results.py` for one seed."""
        minutes = None if math.isinf(self.minutes_left) else self.minutes_left
        own = argparse.Namespace(**{**vars(self.arguments), "seeds": [seed], "results": root, "stop_after": minutes})
        status = vision_results.compare(own)
        if status and self.minutes_left > 0:
            raise RuntimeError(f"policy, seed {seed}: a policy failed, see above")
        if status:
            raise StoppedError("policy: not complete")
        return vision_results.known_results(own)["seeds"][str(seed)]


def stage_seconds(config: PhaseConfig, arguments: argparse.Namespace) -> dict[str, float]:
    """Estimate the seconds of each stage of a seed."""
    device = "cpu" if arguments.device == "cpu" else "cuda"
    num_envs, steps = config.training.num_envs or NUM_ENVS, config.training.steps_per_episode
    on_cores = CPU_STEPS[True] * len(os.sched_getaffinity(0))
    rate = EXPLORER * (warp_rate(num_envs, True) if config.training.vector == "warp" else on_cores)
    wanted, game = config.student.explorer.episodes_per_update, config.adversarial
    student = START[device] + (arguments.student_episodes + 3 * arguments.episodes) * steps / rate
    noise = START[device] + (arguments.noise_episodes + 2 * arguments.episodes) * steps / rate
    update = game.wm_updates * WORLD_MODEL_UPDATE[device]
    rounds = START[device] + game.iterations * ((wanted + game.random_episodes) * steps / rate + update)
    # both kinds of episodes are recorded in the CPU simulator, and measured by three models, some steps ahead
    measured = START["cpu"] + 2 * arguments.episodes * steps / on_cores + 6 * arguments.episodes * update / 10
    found = {f"student {reward}": student for reward in arguments.rewards}
    found |= {"game": rounds, "random": rounds, "world models": measured}
    found |= {f"noise {reward}": noise for reward in arguments.rewards if arguments.noise_episodes}
    found["speed"] = 2 * START[device] + (TIMED + 1) * wanted * steps * (1 / rate + 1 / on_cores)
    if arguments.demonstrations:
        own = argparse.Namespace(**{**vars(arguments), "seeds": [config.training.seed]})
        found["policy"] = 60 * vision_results.VisionBench(own).plan({}).minutes_left()
    return found


# -- phase 2 ---------------------------------------------------------------------------------------------------------


def student_config(config: PhaseConfig, reward: str, folder: Path, episodes: int) -> PhaseConfig:
    """The settings of a student with one of the rewards."""
    own = _phase(config, "student", folder)
    own.training.num_episodes = episodes
    for name, value in REWARDS[reward].items():
        setattr(own.student.rewards, name, value)
    return own


def train_student(
    config: PhaseConfig, teacher: F1Policy, reward: str, root: Path, episodes: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """A student, and what it touches in held-out scenes, against itself before training and random actions."""
    run = root / f"student-{reward}"
    own = student_config(config, reward, run, episodes)
    summary = _train(StudentTrainer, own)
    folder = checkpoint.find_checkpoint(run)
    explorer = load_explorer(folder, run / MODEL_FILE, teacher.device)
    scenes = arguments.evaluation_seed + config.training.seed
    untrained = untrained_explorer(own, teacher, explorer)
    return {
        "summary": summary,
        "trained": touched(explorer, own, teacher, scenes, arguments.episodes),
        "untrained": touched(untrained, own, teacher, scenes, arguments.episodes),
        "random": touched(explorer, own, teacher, scenes, arguments.episodes, random=True),
    }


def untrained_explorer(config: PhaseConfig, teacher: F1Policy, explorer: ExplorerPolicy) -> ExplorerPolicy:
    """The student before training: the same noise, new weights."""
    with separate_random_state(config.training.seed):
        return new_explorer(teacher, explorer.action_mask, config.student.explorer)


def touched(
    explorer: ExplorerPolicy, config: PhaseConfig, teacher: F1Policy, seed: int, episodes: int, random: bool = False
) -> dict[str, float]:
    """Contacts with objects per 1,000 steps in held-out scenes; the same seed gives the same scenes and noise."""
    exploration = make_exploration(config, teacher, held_out=True)
    exploration.seed = seed
    num_envs = min(episodes, config.training.num_envs or NUM_ENVS)
    env, num_steps = open_envs(exploration, num_envs, vector=config.training.vector, device=teacher.device)
    rollouts = ExplorerRollouts(explorer, env, exploration, num_steps, episodes)
    try:
        with separate_random_state(seed):
            found = rollouts.collect(act_randomly(explorer) if random else None)
    finally:
        rollouts.close()
    return {"steps": float(found.rollout.numel()), **found.observed()}


# -- phase 3 ---------------------------------------------------------------------------------------------------------


def train_game(config: PhaseConfig, root: Path, name: str, reward: str) -> dict[str, Any]:
    """Phase 3 from a student; `random`: the same updates on as many new episodes, all of random actions."""
    own = _phase(config, "adversarial", root / name)
    game = own.adversarial
    game.student_checkpoint = str(root / f"student-{reward}")
    if name == "random":
        width, wanted = own.training.num_envs or NUM_ENVS, own.student.explorer.episodes_per_update
        game.random_episodes += -(-wanted // width) * width
        game.random_share, game.replay_share = 1.0, 0.0
        game.wm_warmup = game.iterations  # its explorer does not learn
        game.replay_capacity = 2 * game.replay_capacity  # one buffer instead of two
    try:
        return {"summary": _train(AdversarialTrainer, own)}
    except Collapse as collapse:
        return {"collapsed": str(collapse)}


def measure_models(
    config: PhaseConfig, teacher: F1Policy, root: Path, arguments: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """The world models on the same held-out interaction and free motion."""
    scenes = arguments.evaluation_seed
    found = interaction_episodes(config, teacher, arguments.episodes, scenes)
    environment = make_exploration(config, teacher, held_out=True).environment
    free = free_episodes(InlineExplorer(Exploration(environment, scenes, held_out=True)).take_all(arguments.episodes))
    policies = {"teacher": teacher}
    policies |= {
        name: load_f1_policy(
            root / name / MODEL_FILE, teacher.device, checkpoint_path=checkpoint.find_checkpoint(root / name)
        ).policy.eval()
        for name in ("random", "game")
    }
    return {
        name: {
            "interaction": measure_interaction(policy, found),
            "free_motion": measure_interaction(policy, free, open_loop=False),
        }
        for name, policy in policies.items()
    }


# -- noise and speed -------------------------------------------------------------------------------------------------


def train_with_noise(
    config: PhaseConfig, teacher: F1Policy, reward: str, root: Path, arguments: argparse.Namespace
) -> dict[str, Any]:
    """A student in scenes of which half have a patch of noise, and how often it then looks at one."""
    noisy = student_config(config, reward, root / f"noise-{reward}", arguments.noise_episodes)
    noisy.environment = copy.deepcopy(noisy.environment)
    noisy.environment.setdefault("domain_randomization", {})["noise_patch_rate"] = 0.5
    _train(StudentTrainer, noisy)
    run = root / f"noise-{reward}"
    explorer = load_explorer(checkpoint.find_checkpoint(run), run / MODEL_FILE, teacher.device)
    noisy.environment["domain_randomization"]["noise_patch_rate"] = 1.0
    scenes, found = arguments.evaluation_seed + config.training.seed, {}
    for name, one in (("trained", explorer), ("untrained", untrained_explorer(noisy, teacher, explorer))):
        found[name], _ = explore(one, teacher, noisy, arguments.episodes, scenes)
    return found


def speeds(config: PhaseConfig, root: Path) -> dict[str, float]:
    """Env steps per second of a student's iterations, after the first: on the GPU and in worker processes."""
    found = {}
    for vector in dict.fromkeys((config.training.vector, "process")):
        own = _phase(config, "student", root / f"speed-{vector}")
        own.run.auto_resume, own.run.overwrite = False, True
        own.training.vector, own.training.num_episodes = vector, 10**9  # type: ignore[assignment]
        if vector == "process" != config.training.vector:
            own.training.num_envs = None
            own.student.explorer = type(own.student.explorer)()
        trainer = StudentTrainer(own)
        try:
            trainer.train_round()
            started, num_steps = time.monotonic(), 0
            for _ in range(TIMED):
                num_steps += trainer.train_round()[0] * trainer.rollouts.num_steps
            if trainer.device.type == "cuda":
                torch.cuda.synchronize()
            found[vector] = num_steps / (time.monotonic() - started)
        finally:
            trainer.close()
    return found


def _phase(config: PhaseConfig, phase: str, folder: Path) -> PhaseConfig:
    own = copy.deepcopy(config)
    own.phase = phase  # type: ignore[assignment]
    getattr(own, phase).output_dir = str(folder)
    own.training.keep_checkpoints = 1
    own.training.video_freq = own.training.sample_freq = 0
    return own


def _train(trainer: type[BaseRLTrainer], config: PhaseConfig) -> dict[str, Any]:
    summary = trainer(config).train()
    return {name: value for name, value in summary.items() if isinstance(value, int | float | str)}


# -- tables ----------------------------------------------------------------------------------------------------------


def bars(seeds: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """What was asked for, by seed: the value, the target, and whether it was reached."""
    found = []

    def add(what: str, seed: str, value: float | None, target: float, at_least: bool = True) -> None:
        reached = value is not None and (value >= target if at_least else value <= target)
        found.append({"what": what, "seed": seed, "value": value, "target": target, "reached": reached})

    for seed, known in seeds.items():
        if "chosen" in known:
            one = known[f"student {known['chosen']}"]
            before = max(one["untrained"]["contacts_per_1000"], 1000.0 / one["untrained"]["steps"])  # one at least
            add("contacts: trained / untrained student", seed, one["trained"]["contacts_per_1000"] / before, 3.0)
        models = known.get("world models")
        if models:
            moved = {name: one["interaction"]["moved"]["cross_entropy"] for name, one in models.items()}
            free = {name: one["free_motion"]["cross_entropy"] for name, one in models.items()}
            ahead = {name: one["interaction"]["open_loop"]["10"]["moved"] for name, one in models.items()}
            if None not in moved.values():
                lower = {name: 100 * (1 - moved["game"] / moved[name]) for name in ("random", "teacher")}
                add("moved objects: cross-entropy lower than with random data, %", seed, lower["random"], 5.0)
                add("moved objects: cross-entropy lower than the teacher's, %", seed, lower["teacher"], 0.0)
            worse = 100 * (free["game"] / free["teacher"] - 1)
            add("free motion: cross-entropy higher than the teacher's, %", seed, worse, 0.5, at_least=False)
            own = ahead["game"]["psnr"]
            if own is not None:
                title = "moved objects, 10 steps ahead: PSNR above"
                add(f"{title} copying, dB", seed, own - ahead["game"]["copy_psnr"], 0.0)
                add(f"{title} the teacher's, dB", seed, own - ahead["teacher"]["psnr"], 0.0)
        for name, one in known.items():
            if name.startswith("noise "):
                views = [one[which]["noise_views_per_1000"] for which in ("trained", "untrained")]
                add(
                    f"{name}: views of the patch, trained / untrained",
                    seed,
                    views[0] / max(views[1], 1e-9),
                    1.25,
                    False,
                )
        speed = known.get("speed", {})
        if len(speed) > 1:
            add("env steps per second, of worker processes'", seed, max(speed.values()) / speed["process"], 20.0)
    return found + vision_results.bars(policies(seeds))


def policies(seeds: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What is known of the stage `policy`, by seed."""
    return {seed: known["policy"] for seed, known in seeds.items() if "policy" in known}


def show(seeds: dict[str, dict[str, Any]]) -> None:
    """Print the tables of what is known."""
    lines = [
        [
            seed,
            name.removeprefix("student "),
            *(f"{one[key]['contacts_per_1000']:.1f}" for key in ("trained", "untrained", "random")),
        ]
        for seed, known in seeds.items()
        for name, one in known.items()
        if name.startswith("student ")
    ]
    if lines:
        print_table(["seed", "reward", "contacts per 1,000 steps", "untrained", "random actions"], lines)
        print()
    rows = []
    for seed, known in seeds.items():
        for name, one in known.get("world models", {}).items():
            inter = one["interaction"]
            ahead = inter["open_loop"]["10"]["moved"]
            values = (
                inter["moved"]["cross_entropy"], inter["moved"]["psnr"], inter["moved"]["copy_psnr"], ahead["psnr"],
                ahead["copy_psnr"], inter["rest"]["cross_entropy"], one["free_motion"]["cross_entropy"],
            )  # fmt: skip
            rows.append([seed, MODELS[name], *("–" if value is None else f"{value:.3f}" for value in values)])
    if rows:
        header = ["seed", "world model", "moved: nats", "PSNR", "last frame", "10 ahead", "last frame", "rest: nats"]
        print_table([*header, "free motion: nats"], rows)
        print()
    if known_policies := policies(seeds):
        print(vision_results.success_table(known_policies))
        print()
    for bar in bars(seeds):
        state = "reached" if bar["reached"] else "MISSED"
        value = "–" if bar["value"] is None else f"{bar['value']:.3f}"
        print(f"{state:8} seed {bar['seed']}: {bar['what']}: {value} (bar {bar['target']:g})")


if __name__ == "__main__":
    sys.exit(main())
