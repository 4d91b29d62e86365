"""MetaWorld from pixels and words: demonstrations of the scripted experts, SFT with vla-tiny, DAgger and PPO, a table.

    python benchmarks/metaworld_results.py --cores 1 --device cpu --minutes 120     MT10, one core for each of 3 seeds
    python benchmarks/metaworld_results.py --method distilled                       PPO on reach, then DAgger with it
    python benchmarks/metaworld_results.py --method further                         its control: DAgger without PPO
    python benchmarks/metaworld_results.py --method ppo --steps 1000000             PPO from SFT, without labels
    python benchmarks/metaworld_results.py --group MT50 --num-envs 50 --minutes 240 --results outputs/mt50
    python benchmarks/metaworld_results.py --seeds 0 --group reach-v3 --demonstrations 4 --scenes 10 --epochs 1 \\
        --steps 400 --num-envs 2 --episodes 1 --updates_per_round 20 --results outputs/look     a first look

For each seed: demonstrations, SFT on them, and DAgger or PPO from there, by the recipes of METHODS and the `deft`
command; `deft suite install metaworld` comes first. DAgger also learns from the beginnings of `--scenes` further
episodes of each of `--scene-tasks`, in which the expert acts: a policy learns to see from many scenes. By default they
are the tasks with small things, or all if the group has none of these. With `--method distilled` PPO then trains a
policy of its own for each of `--specialists`, and DAgger continues with their successes in place of the expert there;
with `--method further` it continues for as many updates without them.
All policies play the same held-out episodes, `--episodes` of each task, by the suite's protocol: from images, text and
proprioception alone. What the training used beyond them is in the table's title. Each run has `--cores` cores of its
own, and as many seeds run side by side as there are cores for; a run is stopped after `--minutes`.

The same command resumes where it was stopped, also within a run; finished steps are not repeated, and those of other
settings are an error. All files are in RESULTS, the figures in RESULTS/results.json. The exit status is 1 if a bar is
missed. Unknown flags are passed to the last stage, `--sft`, `--dagger` and `--ppo FLAGS` to those before it; they
override the settings of the recipes.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import last_checkpoint, over_seeds, print_machine, print_table, share_over_seeds
from headline import Bench, curve, read_arguments

from deft.envs.suites import find_suite

SCENE_STEPS, SCENE_NOISE = 4, 0.3  # of episodes that show many scenes
GAIN, WANTED = 15, 85  # points over SFT, and per cent of success, that MT10 is to reach
MT50_WANTED = 50, 70  # per cent of success of SFT, and of the last stage


class Stage(NamedTuple):
    """A training after SFT."""

    name: str
    """Name of the algorithm, of the run directory and of the column."""
    recipe: str
    environment: tuple[str, ...]
    """`--env-kwargs` of the training."""
    reads_data: bool = False
    """Whether it learns from the demonstrations and scenes too."""
    specialists: bool = False
    """Whether it also learns from PPO policies of single tasks (`--specialists`), instead of the expert there."""
    flags: tuple[str, ...] = ()
    """Settings other than those of the recipe."""


class Method(NamedTuple):
    """How a policy is trained."""

    sft: str
    """Recipe of SFT."""
    recorded: str
    """Observations of the demonstrations."""
    stages: tuple[Stage, ...]
    """Each starts from the policy of the one before, the first from SFT."""
    privilege: str
    """What training uses beyond images, text, proprioception, demonstrations and success."""


DAGGER = Stage("dagger", "metaworld-mt10-dagger-labels", ("observation=labelled",), reads_data=True)
SLOWER = ("--learning_rate", "5e-4")
DISTILLED = DAGGER._replace(name="distilled", specialists=True, flags=("--total_timesteps", "5400", *SLOWER))
FURTHER = DAGGER._replace(name="further", flags=("--total_timesteps", "6000", *SLOWER))  # 3 rounds too, of 20 envs
SPECIALIST = "metaworld-reach-ppo"  # recipe
SPECIALIST_STEPS = 120  # of an episode, in training and recording
LABELS = "DAgger learns what the scripted expert does; positions of objects and goals are labels of SFT and DAgger"
METHODS = {
    "dagger": Method("metaworld-mt10-sft-labels", "labelled", (DAGGER,), LABELS),
    "distilled": Method(
        "metaworld-mt10-sft-labels",
        "labelled",
        (DAGGER, DISTILLED),
        f"{LABELS}; PPO of single tasks has MetaWorld's dense reward, and critics that read the state of the scene",
    ),
    "further": Method("metaworld-mt10-sft-labels", "labelled", (DAGGER, FURTHER), LABELS),
    "ppo": Method(
        "metaworld-mt10-sft",
        "images",
        (Stage("ppo", "metaworld-mt10-ppo", ("observation=privileged",)),),
        "the value function reads the state of the scene",
    ),
}


class MetaWorldBench(Bench):
    """One call of this script: its settings, and a queue of free sets of cores."""

    def seed(self, seed: int, pool: ThreadPoolExecutor) -> dict[str, Any]:
        """Demonstrations, both runs and both evaluations of one seed."""
        given, folder = self.arguments, self.root / f"seed-{seed}"
        env_id, demos = f"metaworld/{given.group}", folder / "demos-v0"
        tasks = find_suite("metaworld").tasks_of(env_id)
        method = METHODS[given.method]
        taken: dict[str, Any] = {}
        if not (folder / "demos.json").is_file():
            shutil.rmtree(demos, ignore_errors=True)  # an interrupted recording
        images = [f"rendering={given.rendering}", f"image_size={given.image_size}"]
        expert = ["--env-kwargs", *images, f"observation={method.recorded}", "--policy", "expert"]
        # Episodes of different seeds are different ones: a seed decides the task, so that its multiple keeps the order.
        shown = ["--noise", given.noise, "--only-success", "--episodes", given.demonstrations * len(tasks)]
        shown += ["--seed", 1_000_000 * seed, "--num_envs", recording_envs(self.width, len(tasks)), "--out", demos]
        taken["demos"] = self.step(seed, "demos", "collect", "--env", env_id, *expert, *shown)
        learned = demos
        if given.scenes and any(stage.reads_data for stage in method.stages):
            learned = folder / "scenes-v0"
            seen = given.scene_tasks or [task for task in tasks if needs_scenes(task)] or tasks
            taken |= self.scenes(seed, expert, seen, demos, learned)
        sft = ["--recipe", method.sft, "--dataset", demos, "--eval_freq", 0, "--save_freq", 2]
        if given.epochs is not None:
            sft += ["--num_epochs", given.epochs]
        taken["sft"] = self.train(seed, "sft", *sft, *given.sft)
        before = "sft"
        taken["sft-evaluation"] = self.play(seed, folder, "sft", env_id, images)
        for stage in method.stages:
            online = ["--recipe", stage.recipe, "--env", env_id, "--model_path", folder / before]
            online += ["--env-kwargs", *images, *stage.environment, *stage.flags]
            online += ["--num_workers", self.width, "--eval_freq", 0, "--keep_checkpoints", 1]
            if stage.specialists:
                learned = self.specialists(seed, folder / before, learned, images, taken)
                left_out = json.dumps(dict.fromkeys(given.specialists, 0))
                online += ["--training-env-kwargs", f"task_weights={left_out}"]
                online += ["--num_envs", 2 * (len(tasks) - len(given.specialists))]
            elif given.num_envs is not None:
                online += ["--num_envs", given.num_envs]
            if stage.reads_data:
                online += ["--prior_data", learned]
            is_last = stage is method.stages[-1]
            if is_last and given.steps is not None:
                online += ["--total_timesteps", given.steps]
            taken[stage.name] = self.train(seed, stage.name, *online, *(given.flags if is_last else given.dagger))
            taken[f"{stage.name}-evaluation"] = self.play(seed, folder, stage.name, env_id, images)
            before = stage.name
        return {"method": given.method, "taken": taken, "curve": curve(folder / before)}

    def specialists(self, seed: int, policy: Path, data: Path, images: list[str], taken: dict[str, Any]) -> Path:
        """PPO on single tasks, each from `policy`; returns a dataset of `data` and the successes of all of them."""
        given, folder = self.arguments, self.root / f"seed-{seed}"
        out = folder / "specialists-v0"
        for task in given.specialists:
            ppo = ["--recipe", SPECIALIST, "--env", f"metaworld/{task}", "--model_path", policy, *given.ppo]
            ppo += ["--env-kwargs", *images, "observation=privileged", "reward=progress"]
            ppo += ["--max_episode_steps", SPECIALIST_STEPS, "--num_workers", self.width, "--keep_checkpoints", 1]
            taken[f"ppo-{task}"] = self.train(seed, f"ppo-{task}", *ppo)
        if not all((folder / f"successes-{task}.json").is_file() for task in given.specialists):  # interrupted
            shutil.rmtree(out, ignore_errors=True)
            shutil.copytree(data, out)
            for task in given.specialists:
                (folder / f"successes-{task}.json").unlink(missing_ok=True)
        for number, task in enumerate(given.specialists):
            shown = ["--policy", folder / f"ppo-{task}", "--deterministic", "--only-success", "--append", "--out", out]
            shown += ["--env", f"metaworld/{task}", "--env-kwargs", *images, "observation=labelled", "reward=success"]
            shown += ["--max_episode_steps", SPECIALIST_STEPS, "--episodes", given.successes, "--num_envs", 2]
            shown += ["--seed", 1_000_000 * seed + 900_000 + 10_000 * number]
            taken[f"successes-{task}"] = self.step(seed, f"successes-{task}", "collect", *shown)
        return out

    def play(self, seed: int, folder: Path, name: str, env_id: str, images: list[str]) -> dict[str, Any]:
        """The held-out episodes of one policy."""
        given = self.arguments
        shown = [last_checkpoint(folder / name), "--suite", env_id, "--episodes", given.episodes]
        shown += ["--env-kwargs", *images, f"max_episode_steps={given.horizon}", "observation=images"]
        return self.step(seed, f"{name}-evaluation", "evaluate", *shown, "--device", given.device)

    def scenes(self, seed: int, expert: list[Any], tasks: list[str], demos: Path, scenes: Path) -> dict[str, Any]:
        """A dataset of the demonstrations and the first steps of further episodes of the expert in `tasks`."""
        names = {task: f"scenes-{task}" for task in tasks}
        kept = [self.root / f"seed-{seed}" / f"{name}.json" for name in names.values()]
        if not all(path.is_file() for path in kept):  # an interrupted recording
            shutil.rmtree(scenes, ignore_errors=True)
            shutil.copytree(demos, scenes)
            for path in kept:
                path.unlink(missing_ok=True)
        taken, first = {}, 1_000_000 * seed + 500_000
        for number, (task, name) in enumerate(names.items()):
            words = ["--env", f"metaworld/{task}", *expert, "--num_envs", self.width, "--append", "--out", scenes]
            words += ["--noise", SCENE_NOISE, "--max_episode_steps", SCENE_STEPS]
            words += ["--episodes", self.arguments.scenes, "--seed", first + number * (500_000 // len(tasks))]
            taken[name] = self.step(seed, name, "collect", *words)
        return taken


def needs_scenes(task: str) -> bool:
    """Whether a task depends on where small things are: goals in the air, and what the papers do not call easy."""
    return task.startswith("reach") or task not in find_suite("metaworld").groups["easy"]


def recording_envs(cores: int, tasks: int) -> int:
    """Environments that record demonstrations: at most one per core, at least 3, and coprime to the number of tasks.

    Each of them then plays all tasks in turn, so that no core waits for the task with the longest episodes.
    """
    return next(count for count in [*range(cores, 2, -1), 3, 7] if math.gcd(count, tasks) == 1)


def rates(result: dict[str, Any], policy: str) -> dict[str, float]:
    """The success of a policy in each task, and in the mean over tasks (`mean`)."""
    found = {task: row["success_rate"] for task, row in result["taken"][f"{policy}-evaluation"]["tasks"].items()}
    return {**found, "mean": float(np.mean(list(found.values())))}


def bars(results: dict[int, dict[str, Any]], name: str, group: str) -> list[tuple[str, str, bool]]:
    """What was asked for, what the last stage reached over all seeds (95 % interval), and whether the mean does."""
    sft, after = ([100 * rates(result, policy)["mean"] for result in results.values()] for policy in ("sft", name))
    gain = [two - one for one, two in zip(sft, after, strict=True)]
    if group == "MT50":
        least, wanted = MT50_WANTED
        first = (f"SFT ≥ {least} %", over_seeds(sft), float(np.mean(sft)) >= least)
    else:
        wanted = WANTED
        first = (f"{name} ≥ SFT + {GAIN} points", over_seeds(gain, "+.1f"), float(np.mean(gain)) >= GAIN)
    return [first, (f"{name} ≥ {wanted} %", over_seeds(after), float(np.mean(after)) >= wanted)]


def table(results: dict[int, dict[str, Any]], names: Sequence[str], episodes: int) -> list[list[str]]:
    """One row per task, and their mean: success of each policy over all seeds, with 95 % intervals."""
    by = {name: [rates(result, name) for result in results.values()] for name in names}
    tasks = list(by[names[0]][0])
    played = {task: episodes * (len(tasks) - 1 if task == "mean" else 1) for task in tasks}
    return [
        [task, *(share_over_seeds([one[task] for one in found], played[task]) for found in by.values())]
        for task in tasks
    ]


def main() -> int:
    """All seeds, the tables, and what the bars say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--group", default="MT10", help="MT10, MT50, another group or a task")
    parser.add_argument("--method", choices=list(METHODS), default="dagger")
    parser.add_argument("--demonstrations", type=int, default=25, help="episodes of the expert per task")
    parser.add_argument("--noise", type=float, default=0.1, help="on the expert's actions")
    parser.add_argument("--scenes", type=int, default=800, help="beginnings of episodes of each task, for DAgger")
    parser.add_argument("--scene-tasks", nargs="+", help="of --scenes; by default reach and all that are not easy")
    parser.add_argument("--epochs", type=int, help="of SFT; by default those of the recipe")
    parser.add_argument("--specialists", nargs="+", default=["reach-v3"], help="tasks of PPO, for --method distilled")
    parser.add_argument("--successes", type=int, default=150, help="episodes of each of --specialists")
    for stage in ("sft", "dagger", "ppo"):
        parser.add_argument(f"--{stage}", type=shlex.split, default=[], help="further flags of this stage, in one word")
    parser.add_argument("--steps", type=int, help="env steps of the last stage; by default those of the recipe")
    parser.add_argument("--num-envs", type=int, help="of training, a multiple of the tasks; by default of the recipe")
    parser.add_argument("--episodes", type=int, default=20, help="of each task, for the table")
    parser.add_argument("--horizon", type=int, default=400, help="time limit of the episodes of the table")
    parser.add_argument("--image-size", type=int, default=128, help="a multiple of 16")
    parser.add_argument("--rendering", default="fast", help="suite, light or fast")
    arguments = read_arguments(parser, Path("outputs/metaworld-results"))
    suite = find_suite("metaworld")
    tasks, alone = set(suite.tasks_of(f"metaworld/{arguments.group}")), set(arguments.specialists)
    if arguments.method == "distilled" and not alone < tasks:
        parser.error(f"--specialists {' '.join(alone)}: name some of the tasks of {arguments.group}, and not all")
    suite.check_installed("benchmarks/metaworld_results.py")
    print_machine()
    bench = MetaWorldBench(arguments)
    arguments.results.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(1) as pool, ThreadPoolExecutor(len(arguments.seeds)) as seeds:
        jobs = {seed: seeds.submit(bench.seed, seed, pool) for seed in arguments.seeds}
        results = {seed: job.result() for seed, job in jobs.items()}
    method = METHODS[arguments.method]
    names = ["sft", *(stage.name for stage in method.stages)]
    rows = table(results, names, arguments.episodes)
    print(f"privileged in training: {method.privilege}")
    print_table(["success over seeds (95 % interval)", *names], rows)
    return bench.finish(
        bars(results, names[-1], arguments.group), privilege=method.privilege, table=rows, seeds=results
    )


if __name__ == "__main__":
    sys.exit(main())
