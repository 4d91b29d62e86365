"""MetaWorld from pixels and words: demonstrations of the scripted experts, SFT with vla-tiny, RL, a table by task.

    python benchmarks/metaworld_results.py --seeds 0 1 2 --cores 5 --device cuda    MT10, three seeds at once, 16 cores
    python benchmarks/metaworld_results.py --group MT50 --minutes 240               the 50 tasks
    python benchmarks/metaworld_results.py --seeds 0 --group reach-v3 --demonstrations 4 --epochs 1 --steps 400 \\
        --num-envs 2 --episodes 1                                                   a first look

For each seed: demonstrations, SFT on them (recipe `metaworld-mt10-sft`), RL with a reward for success (recipe
`metaworld-mt10-ppo`), all of it by the `deft` command; `deft suite install metaworld` comes first. Then both policies
play the same held-out episodes, `--episodes` of each task, by the suite's protocol. Each run has `--cores` cores of its
own, and as many seeds run side by side as there are cores for; a run is stopped after `--minutes`.

The same command resumes where it was stopped, also within a run; finished steps are not repeated. All files are in
RESULTS, the figures in RESULTS/results.json. The exit status is 1 if a bar is missed. Unknown flags are passed to the
RL run, `--sft FLAGS` to SFT; both override the settings of the recipes.
"""

from __future__ import annotations

import argparse
import math
import shlex
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from common import last_checkpoint, over_seeds, print_machine, print_table, share_over_seeds
from headline import Bench, curve

from deft.envs.suites import find_suite

LIGHT = "rendering=light"
POLICIES = ("sft", "rl")
GAIN, WANTED = 15, 85  # points over SFT, and per cent of success, that MT10 is to reach


class MetaWorldBench(Bench):
    """One call of this script: its settings, and a queue of free sets of cores."""

    def seed(self, seed: int, pool: ThreadPoolExecutor) -> dict[str, Any]:
        """Demonstrations, both runs and both evaluations of one seed."""
        given, folder = self.arguments, self.root / f"seed-{seed}"
        env_id, demos = f"metaworld/{given.group}", folder / "demos-v0"
        tasks = find_suite("metaworld").tasks_of(env_id)
        taken: dict[str, Any] = {}
        if not (folder / "demos.json").is_file():
            shutil.rmtree(demos, ignore_errors=True)  # an interrupted recording
        images = [LIGHT, f"image_size={given.image_size}"]
        expert = ["--env", env_id, "--env-kwargs", *images, "--policy", "expert"]
        expert += ["--noise", given.noise, "--only-success", "--episodes", given.demonstrations * len(tasks)]
        # Episodes of different seeds are different ones: a seed decides the task, so that its multiple keeps the order.
        expert += ["--num_envs", recording_envs(self.width, len(tasks)), "--seed", 1_000_000 * seed, "--out", demos]
        taken["demos"] = self.step(seed, "demos", "collect", *expert)
        sft = ["--recipe", "metaworld-mt10-sft", "--dataset", demos, "--num_epochs", given.epochs, "--eval_freq", 0]
        taken["sft"] = self.train(seed, "sft", *sft, "--save_freq", 2, *shlex.split(given.sft))
        online = ["--recipe", "metaworld-mt10-ppo", "--env", env_id, "--model_path", folder / "sft"]
        limit = f"max_episode_steps={given.rl_horizon}"  # successes are shorter, and failures cost most of the time
        online += ["--env-kwargs", *images, "observation=privileged", limit]
        online += ["--total_timesteps", given.steps, "--num_envs", given.num_envs, "--num_workers", self.width]
        online += ["--eval_freq", 0, "--save_freq", max(1, given.steps // 20), "--keep_checkpoints", 1]
        taken["rl"] = self.train(seed, "rl", *online, *given.flags)
        for name in POLICIES:
            words = [last_checkpoint(folder / name), "--suite", env_id, "--episodes", given.episodes]
            words += ["--env-kwargs", *images, f"max_episode_steps={given.horizon}", "observation=images"]
            taken[f"{name}-evaluation"] = self.step(
                seed, f"{name}-evaluation", "evaluate", *words, "--device", given.device
            )
        return {"taken": taken, "curve": curve(folder / "rl")}


def recording_envs(cores: int, tasks: int) -> int:
    """Environments that record demonstrations: at most one per core, at least 3, and coprime to the number of tasks.

    Each of them then plays all tasks in turn, so that no core waits for the task with the longest episodes.
    """
    return next(count for count in [*range(cores, 2, -1), 3, 7] if math.gcd(count, tasks) == 1)


def rates(result: dict[str, Any], policy: str) -> dict[str, float]:
    """The success of a policy in each task, and in the mean over tasks (`mean`)."""
    found = {task: row["success_rate"] for task, row in result["taken"][f"{policy}-evaluation"]["tasks"].items()}
    return {**found, "mean": float(np.mean(list(found.values())))}


def bars(results: dict[int, dict[str, Any]]) -> list[tuple[str, str, bool]]:
    """What was asked for, what was found over all seeds (95 % interval), and whether it holds for the mean."""
    sft, after = ([100 * rates(result, policy)["mean"] for result in results.values()] for policy in POLICIES)
    gain = [two - one for one, two in zip(sft, after, strict=True)]
    return [
        (f"RL ≥ SFT + {GAIN} points", over_seeds(gain, "+.1f"), float(np.mean(gain)) >= GAIN),
        (f"RL ≥ {WANTED} %", over_seeds(after), float(np.mean(after)) >= WANTED),
    ]


def table(results: dict[int, dict[str, Any]], episodes: int) -> list[list[str]]:
    """One row per task, and their mean: success of SFT and after RL over all seeds, with 95 % intervals."""
    by = {policy: [rates(result, policy) for result in results.values()] for policy in POLICIES}
    names = list(by["sft"][0])
    played = {name: episodes * (len(names) - 1 if name == "mean" else 1) for name in names}
    return [
        [name, *(share_over_seeds([found[name] for found in by[policy]], played[name]) for policy in POLICIES)]
        for name in names
    ]


def main() -> int:
    """All seeds, the tables, and what the bars say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--group", default="MT10", help="MT10, MT50, another group or a task")
    parser.add_argument("--demonstrations", type=int, default=50, help="episodes of the expert per task")
    parser.add_argument("--noise", type=float, default=0.1, help="on the expert's actions")
    parser.add_argument("--epochs", type=int, default=30, help="of SFT")
    parser.add_argument("--sft", default="", help="further flags of SFT, in one word")
    parser.add_argument("--steps", type=int, default=1_000_000, help="env steps of RL")
    parser.add_argument("--num-envs", type=int, default=40, help="of RL, a multiple of the tasks")
    parser.add_argument("--episodes", type=int, default=20, help="of each task, for the table")
    parser.add_argument("--horizon", type=int, default=400, help="time limit of the episodes of the table")
    parser.add_argument("--rl-horizon", type=int, default=200, help="time limit of the episodes of RL")
    parser.add_argument("--image-size", type=int, default=64, help="a multiple of 16")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which a run is stopped")
    parser.add_argument("--cores", type=int, default=2, help="that a run may use")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--results", type=Path, default=Path("outputs/metaworld-results"))
    arguments, flags = parser.parse_known_args()
    arguments.flags = flags
    find_suite("metaworld").check_installed("benchmarks/metaworld_results.py")
    print_machine()
    bench = MetaWorldBench(arguments)
    arguments.results.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(1) as pool, ThreadPoolExecutor(len(arguments.seeds)) as seeds:
        jobs = {seed: seeds.submit(bench.seed, seed, pool) for seed in arguments.seeds}
        results = {seed: job.result() for seed, job in jobs.items()}
    rows = table(results, arguments.episodes)
    print_table(["success over seeds (95 % interval)", "SFT", "RL"], rows)
    return bench.finish(bars(results), table=rows, seeds=results)


if __name__ == "__main__":
    sys.exit(main())
