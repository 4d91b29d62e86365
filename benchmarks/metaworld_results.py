"""MetaWorld from pixels and words: demonstrations of the scripted experts, SFT with vla-tiny, DAgger or PPO, a table.

    python benchmarks/metaworld_results.py --cores 1 --device cpu --minutes 120     MT10, one core for each of 3 seeds
    python benchmarks/metaworld_results.py --method ppo --steps 1000000             PPO, with a reward for success
    python benchmarks/metaworld_results.py --group MT50 --num-envs 50 --steps 600000 --minutes 240    the 50 tasks
    python benchmarks/metaworld_results.py --seeds 0 --group reach-v3 --demonstrations 4 --scenes 10 --epochs 1 \\
        --steps 400 --num-envs 2 --episodes 1 --updates_per_round 20                a first look

For each seed: demonstrations, SFT on them, and DAgger or PPO from there, by the recipes of METHODS and the `deft`
command; `deft suite install metaworld` comes first. DAgger also learns from the beginnings of `--scenes` further
episodes of each task, in which the expert acts: a policy learns to see from many scenes. Then both policies play the
same held-out episodes, `--episodes` of each task, by the suite's protocol: from images, text and proprioception alone.
What the training used beyond them is in the table's title. Each run has `--cores` cores of its own, and as many seeds
run side by side as there are cores for; a run is stopped after `--minutes`.

The same command resumes where it was stopped, also within a run; finished steps are not repeated. All files are in
RESULTS, the figures in RESULTS/results.json. The exit status is 1 if a bar is missed. Unknown flags are passed to
DAgger or PPO, `--sft FLAGS` to SFT; both override the settings of the recipes.
"""

from __future__ import annotations

import argparse
import math
import shlex
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import last_checkpoint, over_seeds, print_machine, print_table, share_over_seeds
from headline import Bench, curve, read_arguments

from deft.envs.suites import find_suite

SCENE_STEPS, SCENE_NOISE = 8, 0.3  # of episodes that show many scenes
GAIN, WANTED = 15, 85  # points over SFT, and per cent of success, that MT10 is to reach


class Method(NamedTuple):
    """How a policy is trained after SFT."""

    sft: str
    """Recipe of SFT."""
    recipe: str
    recorded: str
    """Observations of the demonstrations."""
    observation: str
    """Observations of the training."""
    privilege: str
    """What training uses beyond images, text, proprioception, demonstrations and success."""
    num_saves: int
    steps: int
    """Env steps, if not given."""
    uses_demonstrations: bool


METHODS = {
    "dagger": Method(
        "metaworld-mt10-sft-labels",
        "metaworld-mt10-dagger-labels",
        "labelled",
        "labelled",
        "DAgger learns what the scripted expert does; positions of objects and goals are labels of SFT and DAgger",
        1,  # a checkpoint has all labels
        16_000,
        True,
    ),
    "ppo": Method(
        "metaworld-mt10-sft",
        "metaworld-mt10-ppo",
        "images",
        "privileged",
        "the value function reads the state of the scene",
        20,
        1_000_000,
        False,
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
        expert = ["--env", env_id, "--env-kwargs", *images, f"observation={method.recorded}", "--policy", "expert"]
        expert += ["--num_envs", recording_envs(self.width, len(tasks))]
        # Episodes of different seeds are different ones: a seed decides the task, so that its multiple keeps the order.
        shown = ["--noise", given.noise, "--only-success", "--episodes", given.demonstrations * len(tasks)]
        shown += ["--seed", 1_000_000 * seed, "--out", demos]
        taken["demos"] = self.step(seed, "demos", "collect", *expert, *shown)
        learned = demos
        if method.uses_demonstrations and given.scenes:
            learned = folder / "scenes-v0"
            taken["scenes"] = self.scenes(seed, expert, given.scenes * len(tasks), demos, learned)
        sft = ["--recipe", method.sft, "--dataset", demos, "--eval_freq", 0, "--save_freq", 2]
        if given.epochs is not None:
            sft += ["--num_epochs", given.epochs]
        taken["sft"] = self.train(seed, "sft", *sft, *shlex.split(given.sft))
        steps = given.steps or method.steps
        online = ["--recipe", method.recipe, "--env", env_id, "--model_path", folder / "sft"]
        online += ["--env-kwargs", *images, f"observation={method.observation}"]
        online += ["--max_episode_steps", given.training_horizon]  # successes are shorter; failures cost the most time
        online += ["--total_timesteps", steps, "--num_envs", given.num_envs, "--num_workers", self.width]
        online += ["--eval_freq", 0, "--save_freq", max(1, steps // method.num_saves), "--keep_checkpoints", 1]
        if method.uses_demonstrations:
            online += ["--prior_data", learned]
        runs = {"sft": None, given.method: [*online, *given.flags]}
        for name, words in runs.items():
            if words is not None:
                taken[name] = self.train(seed, name, *words)
            shown = [last_checkpoint(folder / name), "--suite", env_id, "--episodes", given.episodes]
            shown += ["--env-kwargs", *images, f"max_episode_steps={given.horizon}", "observation=images"]
            taken[f"{name}-evaluation"] = self.step(
                seed, f"{name}-evaluation", "evaluate", *shown, "--device", given.device
            )
        return {"method": given.method, "taken": taken, "curve": curve(folder / given.method)}

    def scenes(self, seed: int, expert: list[Any], episodes: int, demos: Path, scenes: Path) -> dict[str, Any]:
        """A dataset of the demonstrations and the first steps of further episodes of the expert."""
        if not (self.root / f"seed-{seed}" / "scenes.json").is_file():
            shutil.rmtree(scenes, ignore_errors=True)  # an interrupted recording
            shutil.copytree(demos, scenes)
        words = ["--noise", SCENE_NOISE, "--max_episode_steps", SCENE_STEPS, "--episodes", episodes]
        words += ["--seed", 1_000_000 * seed + 500_000, "--append", "--out", scenes]
        return self.step(seed, "scenes", "collect", *expert, *words)


def recording_envs(cores: int, tasks: int) -> int:
    """Environments that record demonstrations: at most one per core, at least 3, and coprime to the number of tasks.

    Each of them then plays all tasks in turn, so that no core waits for the task with the longest episodes.
    """
    return next(count for count in [*range(cores, 2, -1), 3, 7] if math.gcd(count, tasks) == 1)


def rates(result: dict[str, Any], policy: str) -> dict[str, float]:
    """The success of a policy in each task, and in the mean over tasks (`mean`)."""
    found = {task: row["success_rate"] for task, row in result["taken"][f"{policy}-evaluation"]["tasks"].items()}
    return {**found, "mean": float(np.mean(list(found.values())))}


def bars(results: dict[int, dict[str, Any]], method: str) -> list[tuple[str, str, bool]]:
    """What was asked for, what was found over all seeds (95 % interval), and whether it holds for the mean."""
    sft, after = ([100 * rates(result, policy)["mean"] for result in results.values()] for policy in ("sft", method))
    gain = [two - one for one, two in zip(sft, after, strict=True)]
    return [
        (f"{method} ≥ SFT + {GAIN} points", over_seeds(gain, "+.1f"), float(np.mean(gain)) >= GAIN),
        (f"{method} ≥ {WANTED} %", over_seeds(after), float(np.mean(after)) >= WANTED),
    ]


def table(results: dict[int, dict[str, Any]], method: str, episodes: int) -> list[list[str]]:
    """One row per task, and their mean: success of SFT and after the method over all seeds, with 95 % intervals."""
    by = {policy: [rates(result, policy) for result in results.values()] for policy in ("sft", method)}
    names = list(by["sft"][0])
    played = {name: episodes * (len(names) - 1 if name == "mean" else 1) for name in names}
    return [
        [name, *(share_over_seeds([one[name] for one in found], played[name]) for found in by.values())]
        for name in names
    ]


def main() -> int:
    """All seeds, the tables, and what the bars say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--group", default="MT10", help="MT10, MT50, another group or a task")
    parser.add_argument("--method", choices=list(METHODS), default="dagger")
    parser.add_argument("--demonstrations", type=int, default=25, help="episodes of the expert per task")
    parser.add_argument("--noise", type=float, default=0.1, help="on the expert's actions")
    parser.add_argument("--scenes", type=int, default=300, help="further beginnings of episodes per task, for DAgger")
    parser.add_argument("--epochs", type=int, help="of SFT; by default those of the recipe")
    parser.add_argument("--sft", default="", help="further flags of SFT, in one word")
    parser.add_argument("--steps", type=int, help="env steps after SFT; by default those of the method")
    parser.add_argument("--num-envs", type=int, default=20, help="of training, a multiple of the tasks")
    parser.add_argument("--episodes", type=int, default=20, help="of each task, for the table")
    parser.add_argument("--horizon", type=int, default=400, help="time limit of the episodes of the table")
    parser.add_argument("--training-horizon", type=int, default=150, help="time limit of the episodes of training")
    parser.add_argument("--image-size", type=int, default=128, help="a multiple of 16")
    parser.add_argument("--rendering", default="fast", help="suite, light or fast")
    arguments = read_arguments(parser, Path("outputs/metaworld-results"))
    find_suite("metaworld").check_installed("benchmarks/metaworld_results.py")
    print_machine()
    bench = MetaWorldBench(arguments)
    arguments.results.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(1) as pool, ThreadPoolExecutor(len(arguments.seeds)) as seeds:
        jobs = {seed: seeds.submit(bench.seed, seed, pool) for seed in arguments.seeds}
        results = {seed: job.result() for seed, job in jobs.items()}
    privilege = METHODS[arguments.method].privilege
    rows = table(results, arguments.method, arguments.episodes)
    print(f"privileged in training: {privilege}")
    print_table(["success over seeds (95 % interval)", "SFT", arguments.method], rows)
    return bench.finish(bars(results, arguments.method), privilege=privilege, table=rows, seeds=results)


if __name__ == "__main__":
    sys.exit(main())
