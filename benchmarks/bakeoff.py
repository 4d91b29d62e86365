"""The bake-off: methods that improve one SFT policy of the tabletop, on one budget of env steps.

    python benchmarks/bakeoff.py --state --steps 100000 --parallel 14                 3 seeds on 16 cores
    python benchmarks/bakeoff.py --device cuda --vector warp --state --parallel 4     on one GPU
    python benchmarks/bakeoff.py --device cuda --parallel 4                           images, CPU simulator
    python benchmarks/bakeoff.py --state --task reach --steps 30000 --seeds 0         a first look on two cores

For each seed: demonstrations of the scripted expert with noise, SFT on them, and from there every method, by the `deft`
command. The budget counts every env step that a method has used: demonstrations, recorded episodes and its own. The
checkpoints at `--marks` equal parts of the budget play the same held-out episodes. Nine of ten methods start from one
policy with a flow head; SAC needs a Gaussian head, which is trained on the same demonstrations.

`--state` replaces images and text by the vector of the simulator, and vla-tiny by an MLP: minutes instead of hours.
`--scene` gives the critics of the methods that can read it the state of the scene beside the images. `--vector warp`
simulates on MuJoCo Warp; DAgger's expert stays in the CPU simulator.

The plan with estimated times is printed first; `--plan` prints nothing else. `--start-only` makes demonstrations and
SFT policies, on any machine; a call with the same RESULTS continues from them. `--parallel N` runs N commands side by
side, each on its part of the cores. RESULTS has results.json, table.md and bakeoff.png, written again after every
method, and settings.json: a call with other settings is rejected. Settings that only methods depend on, as `--steps`,
can still be changed while there are only demonstrations and SFT policies. After `--stop-after` minutes, or Ctrl-C,
commands are stopped, and save. The same command resumes where it was stopped, also within a run; finished steps are not
repeated. Unknown flags are passed to every training. The exit status is 1 if a method failed or something is left to
do, and 130 after Ctrl-C; the table then has the others.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bakeoff_methods import DISTILLATION, FLOW, METHODS, WORLDS, Method, Scale
from bakeoff_plan import Part, Plan, imitation_seconds, seconds_of
from common import at_least_one, last_checkpoint, machine, over_seeds, print_machine, share_over_seeds, table
from forked import Forked
from headline import steps_to
from timed_bench import Job, TimedBench, keep_settings

from deft.envs.tabletop.tasks import ALL_TASKS, GOAL_TASKS

START = "demonstrations, SFT"  # the part of a seed that all methods need
START_SETTINGS = ("task", "observation", "demonstrations", "noise", "sft_updates", "episode_steps", "flags")
METHOD_SETTINGS = ("vector", "steps", "marks", "offline_updates", "episodes", "num_envs")  # of all that follows
Results = dict[str, dict[int, dict[str, Any]]]  # of each method and seed


class BakeOff(TimedBench):
    """One call of this script: its settings, and a queue of free sets of cores."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        cores = len(os.sched_getaffinity(0))
        arguments.cores = max(1, cores // arguments.parallel)
        super().__init__(arguments)
        self.world = WORLDS[arguments.observation]
        self.forked = Forked(self.width, self.is_interrupted) if arguments.device == "cpu" else None
        self.on_warp = arguments.vector == "warp"
        task = [f"task={arguments.task}", "control_mode=delta_ee_pos", f"observation={self.world.observation}"]
        self.env: list[object] = ["--env", "tabletop", "--env-kwargs", *task]
        self.limit: list[object] = []
        if arguments.episode_steps is not None:
            self.limit = ["--max_episode_steps", arguments.episode_steps]

    def command(self, words: list[str], core_set: list[int], limit: float | None) -> tuple[int, str, str]:
        """Run `deft`; on the CPU in a process that need not import it."""
        run = super().command if self.forked is None else self.forked.command
        return run(words, core_set, limit)

    # -- a seed --------------------------------------------------------------------------------------------------------

    def start(self, seed: int) -> dict[str, Any]:
        """Demonstrations, the SFT policies that the methods start from, and their success."""
        given, folder = self.arguments, self.root / f"seed-{seed}"
        demos = folder / "demos-v0"
        if not (folder / "demos.json").is_file():
            shutil.rmtree(demos, ignore_errors=True)  # of a call that was stopped
        expert = ["--policy", "expert", "--noise", given.noise, "--episodes", given.demonstrations, "--num_envs", 4]
        words = ["collect", *self.env, *self.limit, *expert, "--seed", 1_000_000 * seed, "--out", demos]
        found = {"demos": self.step(seed, "demos", *words)}
        found["env_steps"] = int(found["demos"]["total_steps"])
        if found["env_steps"] >= given.steps and not given.start_only:
            raise SystemExit(f"--steps {given.steps}: the demonstrations alone are {found['env_steps']} env steps")
        starts = dict.fromkeys(METHODS[name].start for name in given.methods)
        for name in starts:
            head = self.world.flow if name == FLOW else self.world.gaussian
            self.imitate(seed, name, "sft", "--dataset", demos, *head, "--val_fraction", 0)
            if given.start_only:
                continue
            last = last_checkpoint(folder / name)
            success = self.successes(seed, name, [last])[0]
            found[name] = {"seconds": seconds_at(folder / name, last), "success": success}
        return found

    def imitate(self, seed: int, name: str, *words: object) -> dict[str, Any]:
        """Train on a dataset for `--sft-updates` updates."""
        updates = self.arguments.sft_updates
        length = ["--num_epochs", 1, "--updates_per_epoch", updates, "--learning_rate_schedule", "cosine"]
        return self.train(seed, name, *words, *length, "--eval_freq", 0, "--save_freq", 0, *self.arguments.flags)

    # -- a method ------------------------------------------------------------------------------------------------------

    def scale(self, method: Method, own: int) -> Scale:
        """How large the training of a method is, of `own` env steps that the demonstrations leave."""
        on_warp = self.on_warp and method.on_warp
        has_images = self.world.observation != "state"
        return Scale(method.budget(own), on_warp, has_images, self.arguments.num_envs)

    def method(self, seed: int, name: str, start: dict[str, Any]) -> dict[str, Any]:
        """Train and evaluate a method once; its checkpoints, which hold its data, are then deleted but for the last."""
        folder = self.root / f"seed-{seed}"
        kept = folder / f"{name}-points.json"
        if not kept.is_file():
            found = self.curve(seed, name, start)
            unfinished = kept.with_suffix(".unfinished")
            unfinished.write_text(json.dumps(found, indent=1))
            unfinished.replace(kept)
        last = last_checkpoint(folder / name)
        for checkpoint in (folder / name).glob("checkpoint-*"):
            if checkpoint != last:
                shutil.rmtree(checkpoint)
        return json.loads(kept.read_text())

    def curve(self, seed: int, name: str, start: dict[str, Any]) -> dict[str, Any]:
        """Train a method with what is left of the budget, and evaluate its checkpoints."""
        given, method, folder = self.arguments, METHODS[name], self.root / f"seed-{seed}"
        scale = self.scale(method, given.steps - start["env_steps"])
        own, sft = scale.budget, last_checkpoint(folder / method.start)
        minutes = (start["demos"]["seconds"] + start[method.start]["seconds"]) / 60
        found: dict[str, Any] = {"points": [[start["env_steps"], minutes, start[method.start]["success"]]]}
        if name == "iql":
            seconds = self.recorded(seed, name, sft, scale)
            minutes, marks = minutes + seconds / 60, [(own, last_checkpoint(folder / name))]
            found["steps_per_second"] = own / seconds
        else:
            if method.before:
                before = f"{name}-{method.before}"
                data = ["--dataset", folder / "demos-v0", "--model_path", sft, "--normalize_q", "--alpha", DISTILLATION]
                self.pretrain(seed, before, method.before, *data, *self.privileges(method))
                sft = last_checkpoint(folder / before)
                minutes += seconds_at(folder / before, sft) / 60
            words = [method.command or name, *self.online(method), "--model_path", sft, *method.flags(scale)]
            words += [*self.privileges(method), *self.world.methods.get(name, []), "--total_timesteps", own]
            words += ["--eval_freq", 0, "--keep_checkpoints", 1_000_000, "--save_freq", -(-own // given.marks)]
            words += [*given.flags, *(["--prior_data", folder / "demos-v0"] if method.needs_data else [])]
            self.train(seed, name, *words)
            marks = checkpoints_at(folder / name, own, given.marks)
            found["steps_per_second"] = marks[-1][0] / seconds_at(folder / name, marks[-1][1])
        rates = self.successes(seed, name, [checkpoint for _, checkpoint in marks])
        for (step, checkpoint), rate in zip(marks, rates, strict=True):
            after = 0.0 if name == "iql" else seconds_at(folder / name, checkpoint) / 60
            found["points"].append([start["env_steps"] + step, minutes + after, rate])
        return found

    def online(self, method: Method) -> list[object]:
        """The environment of a method, and how it is simulated."""
        simulated = self.world.online
        if self.on_warp:
            simulated = ["--vector", "warp" if method.on_warp else "process"]
        return [*self.env, *self.limit, *simulated]

    def privileges(self, method: Method) -> list[object]:
        """What critics read in training and policies never do."""
        return ["--critic_observation", self.world.scene] if self.world.scene and method.reads_scene else []

    def pretrain(self, seed: int, name: str, *words: object) -> dict[str, Any]:
        """Train on the demonstrations from the SFT policy; no env steps."""
        length = ["--num_epochs", 1, "--updates_per_epoch", self.arguments.sft_updates, "--eval_freq", 0]
        return self.train(seed, name, *words, *length, "--save_freq", 0, *self.arguments.flags)

    def recorded(self, seed: int, name: str, sft: Path, scale: Scale) -> float:
        """Record env steps of the SFT policy beside the demonstrations, and train on both; return the seconds."""
        given, folder, method = self.arguments, self.root / f"seed-{seed}", METHODS[name]
        mixed = folder / "mixed-v0"
        if not (folder / "mixed.json").is_file():
            shutil.rmtree(mixed, ignore_errors=True)
            shutil.copytree(folder / "demos-v0", mixed)
        where = ["--vector", "warp", "--device", given.device] if self.on_warp else ["--device", "cpu"]
        play = ["--policy", sft, "--steps", scale.budget, "--num_envs", scale.envs(8, 256), "--append", *where]
        play += ["--seed", 1_000_000 * seed + 500_000]
        played = self.step(seed, "mixed", "collect", *play, *self.limit, "--out", mixed)
        length = ["--num_epochs", 1, "--updates_per_epoch", given.offline_updates, "--eval_freq", 0, "--save_freq", 0]
        words = [name, "--dataset", mixed, "--model_path", sft, *method.flags(scale), *self.privileges(method)]
        words += [*self.world.methods.get(name, []), *length, *given.flags]
        self.train(seed, name, *words)
        return played["seconds"] + seconds_at(folder / name, last_checkpoint(folder / name))

    def successes(self, seed: int, name: str, checkpoints: Sequence[Path]) -> list[float]:
        """Success of checkpoints of a run in the held-out episodes, which are the same for every policy."""
        words = [*checkpoints, "--split", "train", "--env-kwargs", f"observation={self.world.acting}"]
        words += ["--episodes", self.arguments.episodes, "--device", self.arguments.device]
        words += ["--vector", "warp"] if self.on_warp else []
        out = self.root / f"seed-{seed}" / f"{name}-comparison"
        found = self.step(seed, f"{name}-success", "compare", *words, "--out", out)
        return [float(one["success_rate"]) for one in found["columns"]["train"].values()]

    # -- all of it -----------------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """The parts that no earlier call has finished."""
        given, parts = self.arguments, []
        methods = [] if given.start_only else given.methods
        for seed in given.seeds:
            parts.append(Part(START, seed, imitation_seconds(given, self.world.observation != "state")))
            for name in methods:
                scale = self.scale(METHODS[name], given.steps)
                parts.append(Part(name, seed, seconds_of(name, scale, given, self.width)))
        plan = Plan(parts, given.parallel, given.device)
        for seed in given.seeds:
            folder = self.root / f"seed-{seed}"
            if all((folder / f"{METHODS[name].start}-success.json").is_file() for name in given.methods):
                plan.skip(START, seed)
            for name in given.methods:
                if (folder / f"{name}-points.json").is_file():
                    plan.skip(name, seed)
        return plan

    def execute(self, plan: Plan) -> tuple[Results, list[str], bool]:
        """Run all parts; return the results, the failures, and whether something is left to do."""
        given, results = self.arguments, Results()

        def keep(name: str, seed: int, found: Any) -> list[Job]:
            if name != START:
                results.setdefault(name, {})[seed] = found
                write(given, in_order(results, given), time.monotonic() - self.started)
                return []
            methods = [] if given.start_only else given.methods
            return [Job(method, seed, functools.partial(self.method, seed, method, found)) for method in methods]

        starts = [Job(START, seed, functools.partial(self.start, seed)) for seed in given.seeds]
        failures, is_left = self.run_jobs(plan, starts, keep)
        return in_order(results, given), failures, is_left


def in_order(results: Results, arguments: argparse.Namespace) -> Results:
    """The results in the order of `--methods` and `--seeds`."""
    by_method = {name: results.get(name, {}) for name in arguments.methods}
    ordered = {name: {seed: by[seed] for seed in arguments.seeds if seed in by} for name, by in by_method.items()}
    return {name: by_seed for name, by_seed in ordered.items() if by_seed}


def checkpoints_at(run: Path, own: int, marks: int) -> list[tuple[int, Path]]:
    """The first checkpoint at or after each mark, with its env steps."""
    by_step = sorted((int(path.name.rpartition("-")[2]), path) for path in run.glob("checkpoint-*"))
    every = -(-own // marks)
    chosen = [next((one for one in by_step if one[0] >= every * (mark + 1)), by_step[-1]) for mark in range(marks)]
    return list(dict.fromkeys(chosen))


def seconds_at(run: Path, checkpoint: Path) -> float:
    """Seconds that a run had trained when it wrote a checkpoint, without the time between its sessions."""
    written = (checkpoint / "deft_manifest.json").stat().st_mtime
    sessions = json.loads((run / "run.json").read_text())["sessions"]
    # A session that was killed has no end; what it did after its last checkpoint is repeated by the next one.
    spans = [(one["started"], one.get("ended") or one["started"]) for one in sessions]
    before = sum(end - start for start, end in spans if end < written and start < written)
    current = max((start for start, end in spans if start <= written <= end), default=None)
    return before + (0.0 if current is None else written - current)


def rows(results: Results, episodes: int, level: float) -> list[list[str]]:
    """The table: success at the start, halfway and at the end, and the env steps to `level`."""
    lines = []
    for name, by_seed in results.items():
        points = [found["points"] for found in by_seed.values()]
        ends = [share_over_seeds([one[index][2] for one in points], episodes) for index in (0, -1)]
        reached = [steps_to([point[::2] for point in one], level) for one in points]
        steps = ", ".join("never" if step is None else f"{step:,.0f}" for step in reached)
        minutes = over_seeds([one[-1][1] for one in points])
        rate = over_seeds([found["steps_per_second"] for found in by_seed.values()], ".0f")
        used = over_seeds([one[-1][0] for one in points], ",.0f")
        method = METHODS[name]
        lines.append([method.words, method.start, method.uses, *ends, used, steps, minutes, rate, str(len(points))])
    return lines


def write(arguments: argparse.Namespace, results: Results, seconds: float) -> str:
    """Write results.json, table.md and the plot; return the table."""
    from bakeoff_picture import draw

    words = WORLDS[arguments.observation].words
    written = {
        "command": " ".join(sys.argv),
        "machine": machine(),
        "seconds": seconds,
        "task": arguments.task,
        "observation": words,
        "simulator": arguments.vector,
        "parallel": arguments.parallel,
        "steps": arguments.steps,
        "episodes": arguments.episodes,
        "words": {name: METHODS[name].words for name in results},
        "methods": results,
    }
    (arguments.results / "results.json").write_text(json.dumps(written, indent=1) + "\n")
    header = ["method", "from", "uses", "SFT", "at the end", "env steps"]
    header += [f"env steps to {arguments.level:.0%}, by seed", "minutes", "env steps/s", "seeds"]
    shown = table(header, rows(results, arguments.episodes, arguments.level))
    simulator = "MuJoCo Warp" if arguments.vector == "warp" else "the CPU simulator"
    caption = f"Tabletop, task {arguments.task}, in {simulator}; policies read {words}; "
    caption += f"{arguments.episodes} held-out episodes each; every env step counts, demonstrations too; "
    caption += f"{arguments.parallel} commands side by side."
    (arguments.results / "table.md").write_text(f"{caption}\n\n{shown}\n")
    draw(written, arguments.results / "bakeoff.png")
    return shown


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The settings, with unknown flags for every training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--steps", type=at_least_one, default=200_000, help="env steps of each method, demonstrations included"
    )
    parser.add_argument("--vector", choices=("cpu", "warp"), default="cpu", help="simulator")
    parser.add_argument("--num-envs", type=at_least_one, help="environments of every method on Warp, for tests")
    parser.add_argument("--marks", type=at_least_one, default=5, help="checkpoints that are evaluated")
    parser.add_argument("--task", choices=(ALL_TASKS, *GOAL_TASKS), default=ALL_TASKS, help="of the tabletop")
    seen = parser.add_mutually_exclusive_group()
    for name, text in (
        ("labels", "train with position labels"),
        ("scene", "critics that can read it have the state of the scene in training"),
        ("state", "state vectors instead of images and text"),
    ):
        seen.add_argument(f"--{name}", dest="observation", action="store_const", const=name, help=text)
    parser.add_argument("--demonstrations", type=at_least_one, default=100, help="episodes of the expert")
    parser.add_argument("--noise", type=float, default=0.3, help="on the expert's actions")
    parser.add_argument(
        "--sft-updates", type=at_least_one, default=3000, help="of SFT, and of the pretraining of qc-fql"
    )
    parser.add_argument("--offline-updates", type=at_least_one, default=5000, help="of IQL")
    parser.add_argument("--episodes", type=at_least_one, default=100, help="of each evaluation")
    parser.add_argument(
        "--episode-steps", type=at_least_one, help="a time limit instead of the environment's 150 steps"
    )
    parser.add_argument("--level", type=float, default=0.8, help="success to which env steps are counted")
    parser.add_argument("--parallel", type=at_least_one, default=1, help="commands side by side; the cores are divided")
    parser.add_argument("--minutes", type=float, help="after which a training is stopped")
    parser.add_argument("--stop-after", type=float, help="minutes of this call, after which all commands are stopped")
    parser.add_argument("--plan", action="store_true", help="print the plan alone")
    parser.add_argument("--start-only", action="store_true", help="demonstrations and SFT alone, without evaluation")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--results", type=Path, default=Path("outputs/bakeoff"))
    parser.set_defaults(observation="images")
    arguments, arguments.flags = parser.parse_known_args(words)
    return arguments


def same_settings(arguments: argparse.Namespace) -> None:
    """End the program if an earlier call has results of other settings; keep the settings of this call."""
    names = START_SETTINGS if arguments.start_only else START_SETTINGS + METHOD_SETTINGS
    starts = ("demos", "demos-v0", "sft", "sft-gaussian")  # folders and files, by their stems
    has_more = any(path.stem not in starts for path in arguments.results.glob("seed-*/*"))
    settings = {name: vars(arguments)[name] for name in names}
    compared = names if has_more else START_SETTINGS
    keep_settings(arguments.results, settings, compared, only_check=arguments.plan)


def main(words: Sequence[str] | None = None) -> int:
    """All seeds and methods, the table and the plot."""
    arguments = parse(words)
    print_machine()
    arguments.results.mkdir(parents=True, exist_ok=True)
    same_settings(arguments)
    bench = BakeOff(arguments)
    plan = bench.plan()
    print(plan, flush=True)
    if arguments.plan:
        return 0
    results, failures, is_left = bench.execute(plan)
    for failure in failures:
        print(failure, file=sys.stderr, flush=True)
    if results:
        print(write(arguments, results, time.monotonic() - bench.started), flush=True)
        print(f"written: {arguments.results}/results.json, table.md, bakeoff.png", flush=True)
    return bench.exit_status(failures, is_left)


if __name__ == "__main__":
    sys.exit(main())
