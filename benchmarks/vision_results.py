"""Does a world model of video help imitation? `deft train vision` before `deft train sft`, against SFT alone.

    python benchmarks/vision_results.py --device cuda --seeds 0 1 2 --parallel 6 --stop-after 10
    python benchmarks/vision_results.py --tables

For each seed: demonstrations of the scripted expert with noise, a third as many, and video of random actions in other
scenes; camera encoders trained on the video by both losses and by each of them alone; SFT from each of them and from
new weights, with the same settings. All policies play the same held-out episodes, without labels. Env steps of a
policy are those of its demonstrations; those of the video are given beside them.

The plan with estimated times is printed first; `--plan` prints nothing else. `--parallel N` runs N commands side by
side, each on its part of the cores. RESULTS has results.json and table.md, written again after every policy. After
`--stop-after` minutes commands are stopped, and save. The same command resumes where it was stopped, also within a run;
finished steps are not repeated. The exit status is 1 if a policy failed or something is left to do.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bakeoff_plan import CPU_STEPS, START, Part, Plan
from common import machine, over_seeds, print_machine, share_over_seeds, table
from timed_bench import Job, TimedBench, check_settings, keep_settings

from deft.runs.json_files import read_json, write_json

WORLD = ["--env", "tabletop", "--task", "all", "--env-kwargs", "observation=images"]
MODEL = ["--model", "vla-tiny", "--vla-model-config", "switch_dims=[-1]"]
SFT = ["--batch_size", 128, "--learning_rate", 1e-3, "--learning_rate_schedule", "cosine", "--weight_decay", 0.01]
VIDEO_STEPS = 8  # of an episode: many scenes, few steps in each
VIDEO_SEED = 100_000  # the first seed of the video, beyond those of the demonstrations
METHODS: dict[str, list[object] | None] = {
    "sft": None,
    "vision": [],
    "prediction": ["--text_weight", 0],
    "text": ["--prediction_weight", 0],
}
TITLES = {
    "sft": "SFT alone",
    "vision": "vision, then SFT",
    "prediction": "… of the next image alone",
    "text": "… of the instruction alone",
    "fewer": "vision, then SFT of a third of the demonstrations",
    "sft_fewer": "SFT of a third of the demonstrations alone",
}
FEWER = {"fewer": "vision", "sft_fewer": "sft"}  # methods with a third of the demonstrations, and their encoders
STEPS = ("demonstration_steps", "video_steps")
POINTS = 10.0  # that vision must add
SETTINGS = ("demonstrations", "video_episodes", "vision_epochs", "sft_epochs", "test_episodes", "vision")
RECORDING_ENVS = 4  # whatever the machine: episodes depend on it
# Estimates of the plan, which the first parts correct: env steps of an episode of the expert and of an evaluation,
# seconds of a new scene, and of an update of SFT (128 transitions) or the encoders (64, with their next images).
EXPERT_STEPS, PLAYED_STEPS, SCENE, UPDATE = 45, 110, 0.1, {"cuda": 0.02, "cpu": 0.4}
Seeds = dict[str, dict[str, dict[str, Any]]]  # what is known, by seed and method


def main(words: list[str] | None = None) -> int:
    """All seeds, and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--results", type=Path, default=Path("outputs/vision_results"))
    parser.add_argument("--tables", action="store_true", help="print what is known, and train nothing")
    parser.add_argument("--plan", action="store_true", help="print the plan alone")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--stop-after", type=float, help="minutes of this call, after which all commands are stopped")
    add_settings(parser)
    arguments = parser.parse_args(words)
    if arguments.tables:
        show(known_results(arguments)["seeds"])
        return 0
    print_machine()
    return compare(arguments, only_plan=arguments.plan)


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the flags that the comparison reads besides `--device`, `--seeds`, `--results` and `--stop-after`."""
    parser.add_argument("--demonstrations", type=int, default=300, help="episodes of the expert, with noise 0.3")
    parser.add_argument("--video-episodes", type=int, default=1500, help=f"of {VIDEO_STEPS} random actions")
    parser.add_argument("--vision-epochs", type=int, default=6)
    parser.add_argument("--sft-epochs", type=int, default=30)
    parser.add_argument("--test-episodes", type=int, default=200)
    parser.add_argument("--vision", default="cells", help="camera encoder of vla-tiny: cells or convolutions")
    parser.add_argument("--methods", nargs="+", default=list(TITLES), choices=list(TITLES))
    parser.add_argument("--parallel", type=int, default=1, help="commands side by side; the cores are divided")


def known_results(arguments: argparse.Namespace) -> dict[str, Any]:
    """What earlier calls have found; an error if it was found with other settings."""
    settings = {name: vars(arguments)[name] for name in SETTINGS}
    found = read_json(arguments.results / "results.json") or {"settings": settings, "seeds": {}}
    if not arguments.tables:
        check_settings(arguments.results, found["settings"], settings)
    return found


def compare(arguments: argparse.Namespace, only_plan: bool = False) -> int:
    """Train and evaluate what is not known; write the results after every policy. Return the exit status."""
    results = known_results(arguments)
    seeds: Seeds = results["seeds"]
    keep_settings(arguments.results, results["settings"], SETTINGS, only_check=only_plan)  # results.json comes later
    bench = VisionBench(arguments)
    plan = bench.plan(seeds)
    print(plan, flush=True)
    if only_plan:
        return 0

    def keep(seed: int, method: str, found: dict[str, Any]) -> None:
        seeds.setdefault(str(seed), {})[method] = found
        written = {**results, "machine": machine(), "command": " ".join(sys.argv), "bars": bars(seeds)}
        write_json(written, arguments.results / "results.json")
        (arguments.results / "table.md").write_text(success_table(seeds) + "\n")

    failures, is_left = bench.execute(plan, keep)
    for failure in failures:
        print(failure, file=sys.stderr, flush=True)
    show(seeds)
    return bench.exit_status(failures, is_left)


class VisionBench(TimedBench):
    """One call of this script: its settings, and a queue of free sets of cores."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        arguments.cores, arguments.minutes = max(1, len(os.sched_getaffinity(0)) // arguments.parallel), None
        super().__init__(arguments)
        self._locks: dict[tuple[int, str], threading.Lock] = defaultdict(threading.Lock)

    # -- a seed --------------------------------------------------------------------------------------------------------

    def video(self, seed: int) -> tuple[Path, int]:
        """Video of random actions, and its env steps."""
        short = ["--max-episode-steps", VIDEO_STEPS, "--seed", VIDEO_SEED * (1 + seed)]
        return self.record(seed, "video", "random", self.arguments.video_episodes, short)

    def demonstrations(self, seed: int, part: int = 1) -> tuple[Path, int]:
        """The demonstrations, or one part of so many, and their env steps."""
        count = self.arguments.demonstrations // part
        # The seeds of the demonstrations of two benchmark seeds do not overlap.
        noisy = ["--noise", 0.3, "--seed", self.arguments.demonstrations * seed]
        return self.record(seed, f"demos-{count}", "expert", count, noisy)

    def record(self, seed: int, name: str, policy: str, episodes: int, flags: list[object]) -> tuple[Path, int]:
        """Record a dataset, unless there is one; return its path and its number of env steps."""
        out = self.root / f"seed-{seed}" / f"{name}-v0"
        with self._locks[seed, name]:
            if not (out.parent / f"{name}.json").is_file():
                shutil.rmtree(out, ignore_errors=True)  # of an interrupted recording
            words = [*WORLD, "--policy", policy, "--episodes", episodes, *flags, "--out", out]
            words += ["--num_envs", RECORDING_ENVS, "--vector", "process"]
            found = self.step(seed, name, "collect", *words)
        return out, int(found["total_steps"])

    def encoders(self, seed: int, method: str) -> tuple[list[object], int]:
        """The flags of SFT that load the encoders of a method, or new ones, and the env steps of their video."""
        flags, model = METHODS[method], [*MODEL, f"vision={self.arguments.vision}"]
        if flags is None:
            return model, 0
        video, video_steps = self.video(seed)
        name = f"encoders-{method}"
        with self._locks[seed, name]:
            length = ["--num_epochs", self.arguments.vision_epochs, "--eval_freq", 0]
            self.train(seed, name, "vision", "--dataset", video, *model, *flags, *length)
        return ["--model_path", self.root / f"seed-{seed}" / name], video_steps

    def method(self, seed: int, method: str) -> dict[str, Any]:
        """One policy: its encoders if it has any of its own, SFT, and held-out episodes."""
        given = self.arguments
        start, video_steps = self.encoders(seed, FEWER.get(method, method))
        demos, num_steps = self.demonstrations(seed, 3 if method in FEWER else 1)
        length = ["--num_epochs", given.sft_epochs, "--eval_freq", 0]
        self.train(seed, method, "sft", "--dataset", demos, *start, *SFT, *length)
        play = [self.root / f"seed-{seed}" / method, "--env-kwargs", "observation=images"]
        play += ["--episodes", given.test_episodes, "--device", given.device, "--vector", "process"]
        found = self.step(seed, f"{method}-evaluation", "evaluate", *play)
        return {
            "success": found["success_rate"], "episodes": found["episodes"],
            "tasks": {name: one["success_rate"] for name, one in found["tasks"].items()},
            "demonstration_steps": num_steps, "video_steps": video_steps,
        }  # fmt: skip

    # -- all of it -----------------------------------------------------------------------------------------------------

    def plan(self, known: Seeds) -> Plan:
        """The parts that no earlier call has finished; recordings come first, since methods share them."""
        given, device = self.arguments, "cpu" if self.arguments.device == "cpu" else "cuda"
        rate = CPU_STEPS[True] * min(self.width, RECORDING_ENVS)
        updates = EXPERT_STEPS * given.demonstrations / 128 * given.sft_epochs
        vision = START[device] + VIDEO_STEPS * given.video_episodes / 64 * given.vision_epochs * UPDATE[device]
        left = {seed: [one for one in given.methods if one not in known.get(str(seed), {})] for seed in given.seeds}
        parts = []
        for seed, methods in left.items():
            folder = self.root / f"seed-{seed}"
            counts = {given.demonstrations // (3 if one in FEWER else 1) for one in methods}
            scenes = sum(count for count in counts if not (folder / f"demos-{count}.json").is_file())
            needs_video = any(METHODS[FEWER.get(one, one)] is not None for one in methods)
            if scenes:
                parts.append(Part("demonstrations", seed, scenes * (EXPERT_STEPS / rate + SCENE) + START["cpu"]))
            if needs_video and not (folder / "video.json").is_file():
                parts.append(Part("video", seed, given.video_episodes * (VIDEO_STEPS / rate + SCENE) + START["cpu"]))
        for method in given.methods:  # the seeds of a method side by side: the first rows of the table come first
            for seed in (seed for seed in given.seeds if method in left[seed]):
                share = 1 / 3 if method in FEWER else 1.0
                seconds = 2 * START[device] + share * updates * UPDATE[device]
                seconds += given.test_episodes * (PLAYED_STEPS / rate + SCENE)
                parts.append(Part(method, seed, seconds + (vision if METHODS.get(method) is not None else 0.0)))
        return Plan(parts, given.parallel, given.device)

    def execute(self, plan: Plan, keep: Callable[[int, str, dict[str, Any]], None]) -> tuple[list[str], bool]:
        """Run all parts and `keep` what is found; return the failures, and whether something is left to do."""

        def run(part: Part) -> Any:
            if part.name == "video":
                return self.video(part.seed)
            if part.name != "demonstrations":
                return self.method(part.seed, part.name)
            methods = [one.name for one in plan.parts if one.seed == part.seed]
            found = [self.demonstrations(part.seed, 3) for _ in {*FEWER} & {*methods}][:1]
            return found + ([self.demonstrations(part.seed)] if {*METHODS} & {*methods} else [])

        def keep_methods(name: str, seed: int, found: Any) -> list[Job]:
            if name in TITLES:
                keep(seed, name, found)
            return []

        jobs = [Job(part.name, part.seed, functools.partial(run, part)) for part in plan.parts]
        return self.run_jobs(plan, jobs, keep_methods)


# -- tables ----------------------------------------------------------------------------------------------------------


def bars(seeds: Seeds) -> list[dict[str, Any]]:
    """What was asked for, by seed: the points that vision adds, or as much success with a third of the env steps."""
    found = []
    for seed, known in seeds.items():
        for what, method, target in (
            ("policy: points of success that vision adds", "vision", POINTS),
            ("policy: points that vision adds with a third of the demonstrations", "fewer", 0.0),
        ):
            if {"sft", method} <= known.keys():
                value = 100 * (known[method]["success"] - known["sft"]["success"])
                found.append({"what": what, "seed": seed, "value": value, "target": target, "reached": value >= target})
    return found


def show(seeds: Seeds) -> None:
    """Print success by method, and the bars."""
    print(success_table(seeds), flush=True)
    for bar in bars(seeds):
        state = "reached" if bar["reached"] else "MISSED"
        print(f"{state:8} seed {bar['seed']}: {bar['what']}: {bar['value']:+.1f} (bar {bar['target']:g})")


def success_table(seeds: Seeds) -> str:
    """Success by method, with its mean over seeds, and the env steps of its data."""
    rows = []
    for method, title in TITLES.items():
        found = [known for known in seeds.values() if method in known]
        if not found:
            continue
        rates = [known[method]["success"] for known in found]
        more = [100 * (known[method]["success"] - known["sft"]["success"]) for known in found if "sft" in known]
        steps = [f"{sum(known[method][key] for known in found) // len(found):,}" for key in STEPS]
        shown = [
            share_over_seeds(rates, found[0][method]["episodes"]),
            ", ".join(f"{100 * rate:.1f}" for rate in rates),
        ]
        rows.append([title, *shown, over_seeds(more, "+.1f") if more else "–", *steps])
    return table(["", "success", "each seed", "points more than SFT", "steps of demonstrations", "of video"], rows)


if __name__ == "__main__":
    sys.exit(main())
