"""PushT from a LeRobot dataset: demonstrations of the scripted expert, SFT, PPO, and a table beside LeRobot's figure.

    python benchmarks/pusht_results.py --seeds 0 1 2                 the whole table
    python benchmarks/pusht_results.py --dataset lerobot/pusht_keypoints    from a dataset that exists
    python benchmarks/pusht_results.py --seeds 0 --demonstrations 4 --epochs 1 --steps 25600 --episodes 4
                                                                     a first look

One dataset for all seeds: `--demonstrations` successful episodes of the scripted expert, recorded in LeRobot's format
with keypoints. For each seed: SFT on it and PPO from there, by the recipes `pusht-sft` and `pusht-ppo` and the `deft`
command; `deft suite install pusht` comes first. Then the last checkpoints of both play the same held-out episodes by
the suite's protocol, with their most likely actions and with sampled ones; so does the expert, once. PPO is judged by
its sampled actions, which it was trained with, against the better of both kinds of SFT in each seed. Each run has
`--cores` cores of its own, and as many seeds run side by side as there are cores for; a run is stopped after
`--minutes`.

The same command resumes where it was stopped, also within a run; finished steps are not repeated. All files are in
RESULTS, the figures in RESULTS/results.json. The exit status is 1 if a bar is missed. Unknown flags are passed to PPO,
`--sft FLAGS` to SFT; both override the settings of the recipes.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import last_checkpoint, over_seeds, print_machine, print_table, share_over_seeds
from headline import Bench, read_arguments

from deft.envs.suites import find_suite
from deft.evaluation.success import t_interval

SUITE = "pusht"
KEYPOINTS = ["--env-kwargs", "observation=keypoints"]
POLICIES = ("sft", "ppo")
KINDS = {"evaluation": "most likely", "sampled": "sampled"}  # the step that plays a kind of actions, and its name
COVERAGE, LARGEST_REWARD = "measures/max_coverage", "measures/max_reward"
PUBLISHED = ["LeRobot's diffusion_pusht, images, a person's demonstrations (model card)", "63.8 %", "", "", "0.959"]
PRIVILEGE = "policies read the keypoints of the block, no images; the reward of PPO is computed from the block's pose"


class PushTBench(Bench):
    """One call of this script: its settings, and a queue of free sets of cores."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments)
        self.threads = 1  # the networks are small
        self.dataset: Path | str = arguments.dataset or self.root / "demos"

    def record(self) -> dict[str, Any]:
        """Record the demonstrations, unless a dataset is given."""
        given, kept = self.arguments, self.root / "demos.json"
        if given.dataset is not None:
            return {}
        if not kept.is_file():
            shutil.rmtree(self.dataset, ignore_errors=True)  # an interrupted recording
        recorded = ["--env", SUITE, *KEYPOINTS, "--policy", "expert", "--only-success", "--format", "lerobot"]
        recorded += ["--episodes", given.demonstrations, "--num_envs", 4, "--seed", given.demonstration_seed]
        return self.once(kept, "demonstrations", "collect", *recorded, "--out", self.dataset)

    def expert(self) -> dict[str, Any]:
        """Play the expert on the held-out episodes."""
        played = ["--suite", SUITE, "--policy", "expert", "--episodes", self.arguments.expert_episodes]
        return self.once(self.root / "expert.json", "expert", "evaluate", *played)

    def seed(self, seed: int, pool: ThreadPoolExecutor) -> dict[str, Any]:
        """Both runs and both evaluations of one seed."""
        given, folder = self.arguments, self.root / f"seed-{seed}"
        sft = ["--recipe", "pusht-sft", "--dataset", self.dataset, "--num_epochs", given.epochs]
        online = ["--recipe", "pusht-ppo", "--model_path", folder / "sft", "--total_timesteps", given.steps]
        online += ["--num_workers", self.width]
        runs = {"sft": [*sft, *shlex.split(given.sft)], "ppo": [*online, *given.flags]}
        taken: dict[str, Any] = {}
        for name, words in runs.items():
            taken[name] = self.train(seed, name, *words)
            shown = [last_checkpoint(folder / name), "--suite", SUITE, *KEYPOINTS, "reward=coverage"]
            shown += ["--episodes", given.episodes, "--device", given.device]
            for kind in KINDS:
                flags = ["--stochastic"] if kind == "sampled" else []
                taken[f"{name}-{kind}"] = self.step(seed, f"{name}-{kind}", "evaluate", *shown, *flags)
        return {"taken": taken}


def figures(results: dict[int, dict[str, Any]], policy: str, kind: str, name: str = "success_rate") -> list[float]:
    """A figure of a policy's evaluation in each seed."""
    return [result["taken"][f"{policy}-{kind}"][name] for result in results.values()]


def gains(results: dict[int, dict[str, Any]], name: str = "success_rate") -> list[float]:
    """How much larger a figure is after PPO, with sampled actions, than the larger one of SFT, in each seed."""
    before = [max(pair) for pair in zip(*(figures(results, "sft", kind, name) for kind in KINDS), strict=True)]
    return [two - one for one, two in zip(before, figures(results, "ppo", "sampled", name), strict=True)]


def bars(results: dict[int, dict[str, Any]]) -> list[tuple[str, str, bool]]:
    """What was asked for, what was found over all seeds (95 % interval), and whether it holds."""
    success, coverage = [100 * gain for gain in gains(results)], gains(results, COVERAGE)
    low = t_interval(success)[0]
    return [
        ("PPO above SFT in every seed, points of success", over_seeds(success, "+.1f"), min(success) > 0),
        ("the interval of the gain excludes 0", f"from {low:+.1f}", low > 0),
        ("PPO above SFT in every seed, largest coverage", over_seeds(coverage, "+.3f"), min(coverage) > 0),
    ]


def table(results: dict[int, dict[str, Any]], expert: dict[str, Any], episodes: int) -> list[list[str]]:
    """The mean of each policy and kind of actions with 95 % intervals, its seeds, the expert, and LeRobot's figure."""
    rows = []
    for policy in POLICIES:
        for kind, name in KINDS.items():
            rates = figures(results, policy, kind)
            means = [over_seeds(figures(results, policy, kind, key), ".3f") for key in (COVERAGE, LARGEST_REWARD)]
            by_seed = ", ".join(f"{100 * rate:.0f}" for rate in rates)
            rows.append([f"{policy}, {name} actions", share_over_seeds(rates, episodes), by_seed, *means])
    means = [f"{expert[key]:.3f}" for key in (COVERAGE, LARGEST_REWARD)]
    rows.append(["scripted expert", share_over_seeds([expert["success_rate"]], expert["episodes"]), "", *means])
    return [*rows, PUBLISHED]


def main() -> int:
    """All seeds, the tables, and what the bars say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--dataset", help="of keypoints, in place of the expert's demonstrations")
    parser.add_argument("--demonstrations", type=int, default=200, help="episodes of the expert")
    parser.add_argument("--demonstration-seed", type=int, default=0, help="of the recording")
    parser.add_argument("--expert-episodes", type=int, default=100, help="of the expert, for the table")
    parser.add_argument("--epochs", type=int, default=60, help="of SFT")
    parser.add_argument("--sft", default="", help="further flags of SFT, in one word")
    parser.add_argument("--steps", type=int, default=300_000, help="env steps of PPO")
    parser.add_argument("--episodes", type=int, default=200, help="of each policy, for the table")
    arguments = read_arguments(parser, Path("outputs/pusht-results"))
    find_suite(SUITE).check_installed("benchmarks/pusht_results.py")
    print_machine()
    bench = PushTBench(arguments)
    arguments.results.mkdir(parents=True, exist_ok=True)
    recorded = bench.record()
    with ThreadPoolExecutor(1) as pool, ThreadPoolExecutor(len(arguments.seeds)) as seeds:
        jobs = {seed: seeds.submit(bench.seed, seed, pool) for seed in arguments.seeds}
        results = {seed: job.result() for seed, job in jobs.items()}
    expert = bench.expert()
    rows = table(results, expert, arguments.episodes)
    print(f"{PRIVILEGE}; {arguments.episodes} episodes of each policy")
    print_table(["policy", "success", "by seed, %", "largest coverage", "largest reward"], rows)
    return bench.finish(bars(results), privilege=PRIVILEGE, table=rows, demos=recorded, expert=expert, seeds=results)


if __name__ == "__main__":
    sys.exit(main())
