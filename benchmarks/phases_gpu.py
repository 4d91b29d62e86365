"""Do the phases pay, on thousands of environments? The whole comparison, seed by seed, in one resumable program.

    python benchmarks/phases_gpu.py --device cuda --seeds 0 1 2 [--rewards documents excess disagreement progress]
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

What is known is in RESULTS/results.json at once, by seed and stage; a stopped program continues with the stage in which
it stopped, and a stopped run from its last checkpoint. Other flags are settings of `deft train all`.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import vision_results
from common import machine, print_table

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
MODELS = {"teacher": "phase 1", "random": "phase 1, as many updates more", "game": "phases 1 to 3"}


def main() -> None:
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
    vision_results.add_settings(parser)
    arguments, flags = parser.parse_known_args()
    path = arguments.results / "results.json"
    results: dict[str, Any] = read_json(path) or {"machine": machine(), "seeds": {}}
    if not arguments.tables:
        for seed in arguments.seeds:
            known = results["seeds"].setdefault(str(seed), {})

            def save() -> None:
                write_json({**results, "bars": bars(results["seeds"])}, path)

            run_seed(seed_config(seed, arguments, flags), known, arguments.results / f"seed-{seed}", arguments, save)
    show(results["seeds"])


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


def run_seed(
    config: PhaseConfig, known: dict[str, Any], root: Path, arguments: argparse.Namespace, save: Callable[[], None]
) -> None:
    """Run the stages of a seed that are not known; save after each."""
    device = choose_device(arguments.device)
    teacher = load_teacher(config, device).eval()

    def stage(name: str, run: Callable[[], Any]) -> None:
        if name not in known:
            started = time.monotonic()
            known[name] = run()
            known.setdefault("seconds", {})[name] = time.monotonic() - started
            save()

    for reward in arguments.rewards:
        stage(
            f"student {reward}",
            lambda reward=reward: train_student(config, teacher, reward, root, arguments.student_episodes, arguments),
        )
    chosen = max(arguments.rewards, key=lambda reward: known[f"student {reward}"]["trained"]["contacts_per_1000"])
    known["chosen"] = chosen
    stage("game", lambda: train_game(config, root, "game", chosen))
    stage("random", lambda: train_game(config, root, "random", chosen))
    stage("world models", lambda: measure_models(config, teacher, root, arguments))
    if arguments.noise_episodes:
        for reward in arguments.rewards:
            stage(f"noise {reward}", lambda reward=reward: train_with_noise(config, teacher, reward, root, arguments))
    stage("speed", lambda: speeds(config, root))
    if arguments.demonstrations:
        stage("policy", lambda: vision_results.train_seed(config.training.seed, root / "policy", arguments))


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
        vision_results.print_success(known_policies)
        print()
    for bar in bars(seeds):
        state = "reached" if bar["reached"] else "MISSED"
        value = "–" if bar["value"] is None else f"{bar['value']:.3f}"
        print(f"{state:8} seed {bar['seed']}: {bar['what']}: {value} (bar {bar['target']:g})")


if __name__ == "__main__":
    main()
