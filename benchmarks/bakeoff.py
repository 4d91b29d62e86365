"""The bake-off: methods that improve one SFT policy of the tabletop, on one budget of env steps.

    python benchmarks/bakeoff.py --device cuda --parallel 4                      images and text, all methods, 3 seeds
    python benchmarks/bakeoff.py --labels --device cuda --parallel 4             with position labels
    python benchmarks/bakeoff.py --state --task reach --steps 30000 --seeds 0    a first look on two cores

For each seed: demonstrations of the scripted expert with noise, SFT on them, and from there every method, by the `deft`
command. The budget counts every env step that a method has used: demonstrations, recorded episodes and its own. The
checkpoints at `--marks` equal parts of the budget play the same held-out episodes. Nine of ten methods start from one
policy with a flow head; SAC needs a Gaussian head, which is trained on the same demonstrations.

`--state` replaces images and text by the vector of the simulator, and vla-tiny by an MLP: minutes instead of hours.

`--parallel N` runs N commands side by side, each on its part of the cores. The same command resumes where it was
stopped, also within a run; finished steps are not repeated. RESULTS has results.json, table.md and bakeoff.png.
Unknown flags are passed to every training. The exit status is 1 if a method failed; the table then has the others.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from common import last_checkpoint, machine, over_seeds, print_machine, share_over_seeds, table
from headline import Bench, steps_to

CHUNK = 4  # env steps per decision, of every method
FLOW, GAUSSIAN = "sft", "sft-gaussian"  # the policies that methods start from, by the names of their runs
Point = list[float]  # env steps, minutes and success of a checkpoint


class Method(NamedTuple):
    """A row of the table: what it is, the policy that it starts from, what it uses, and its flags by budget."""

    words: str
    start: str
    uses: str
    flags: Callable[[int], list[object]]
    needs_data: bool = False
    """Whether batches are mixed with the demonstrations (`prior_data`)."""
    command: str = ""
    """The algorithm; by default the method's name."""
    before: str = ""
    """An algorithm that is trained on the demonstrations first, from the SFT policy."""


def rounds(budget: int, num_envs: int, most: int, chunk: int = CHUNK) -> list[object]:
    """Rollouts of `most` env steps, or shorter ones for a small budget: at least 25 of them."""
    steps = min(most, budget // 25) // (num_envs * chunk)
    return ["--num_envs", num_envs, "--rollout_steps", max(steps, 2)]


def replay(budget: int, updates: float = 0.5) -> list[object]:
    """What the methods with a replay buffer share."""
    starts = min(2_000, budget // 10)
    words: list[object] = ["--num_envs", 8, "--learning_starts", starts, "--updates_per_step", updates]
    return [*words, "--gamma", 0.99, "--batch_size", 256, "--learning_rate", 3e-4]


def ppo(budget: int) -> list[object]:
    """PPO on the log-prob of the denoising chain."""
    words = [*rounds(budget, 16, 4096), "--batch_size", 256, "--n_epochs", 5, "--learning_rate", 3e-5]
    return [*words, "--gamma", 0.99, "--gae_lambda", 0.95, "--entropy_coef", 0, "--value_warmup", 2, "--target_kl", 0.1]


def grpo(budget: int) -> list[object]:
    """GRPO with the return-to-go minus the group's mean."""
    num_envs = 32 if budget >= 100_000 else 16
    words: list[object] = ["--num_envs", num_envs, "--group_size", 4, "--max_resamples", 0, "--advantage", "process"]
    words += ["--no-normalize-std", "--gamma", 0.98, "--kl_coef", 0, "--target_kl", 0.1, "--clip_range_high", 0.28]
    return [*words, "--batch_size", 256, "--n_epochs", 4, "--learning_rate", 3e-5]


def rlpd(budget: int) -> list[object]:
    """SAC with half of every batch from the demonstrations, and an anchor on the SFT policy that decays."""
    words = [*replay(budget), "--critic_layer_norm", "--num_critics", 5, "--target_critics", 2]
    words += ["--critic_warmup", budget // 40, "--policy_learning_rate", 1e-4, "--alpha_start", 0.01]
    return [*words, "--anchor_coef", 0.1, "--anchor_half_life", max(budget // 20, 1), "--anchor_floor", 0.001]


def residual(budget: int) -> list[object]:
    """SAC on a bounded correction of the frozen policy."""
    words = [*replay(budget), "--critic_layer_norm", "--critic_warmup", budget // 40]
    return [*words, "--residual_scale", 0.3, "--residual_horizon", budget // 5, "--alpha_start", 0.01]


def dsrl(budget: int) -> list[object]:
    """SAC on the noise of the frozen policy."""
    return [*replay(budget), "--critic_layer_norm", "--noise_bound", 1.5, "--alpha_start", 0.01]


def qc_fql(budget: int) -> list[object]:
    """A one-step policy near the flow, which maximises critics of chunks; its network is distilled beforehand."""
    return [*replay(budget), "--normalize_q", "--alpha", 3]


def qc(budget: int) -> list[object]:
    """The best of several samples of the flow, by critics of chunks."""
    return [*replay(budget), "--policy_extraction", "best_of_n", "--num_candidates", 16]


def recap(budget: int) -> list[object]:
    """Rounds of episodes, labelled by their advantage, and conditioned imitation."""
    words = [*rounds(budget, 16, 4096, chunk=1), "--updates_per_round", 200, "--value_warmup", 200]
    return [*words, "--batch_size", 256, "--learning_rate", 3e-4, "--gamma", 0.99]


def dagger(budget: int) -> list[object]:
    """Rounds of the policy, of which the expert labels every step."""
    words = [*rounds(budget, 16, 4096, chunk=1), "--updates_per_round", 200, "--initial_beta", 0.5, "--beta", 0.5]
    return [*words, "--batch_size", 256, "--learning_rate", 3e-4]


def iql(budget: int) -> list[object]:
    """Offline: the demonstrations and as many env steps of the SFT policy as the budget allows."""
    words: list[object] = ["--expectile", 0.8, "--temperature", 3, "--max_weight", 20, "--advantage", "return"]
    words += ["--reward_scaling", "none", "--gamma", 0.99, "--batch_size", 256, "--learning_rate", 3e-4]
    return [*words, "--policy_learning_rate", 1e-4]


DENSE = "dense reward"
DATA = "demonstrations in every batch"
METHODS = {
    "ppo": Method("PPO", FLOW, DENSE, ppo),
    "grpo": Method("GRPO", FLOW, DENSE, grpo),
    "rlpd": Method("RLPD (SAC)", GAUSSIAN, f"{DENSE}, {DATA}", rlpd, needs_data=True, command="sac"),
    "residual": Method("residual SAC", FLOW, DENSE, residual, command="sac"),
    "dsrl": Method("DSRL", FLOW, DENSE, dsrl),
    "qc-fql": Method("QC-FQL", FLOW, f"{DENSE}, {DATA}", qc_fql, needs_data=True, command="fql-online", before="fql"),
    "qc": Method("QC (best of n)", FLOW, f"{DENSE}, {DATA}", qc, needs_data=True, command="fql-online"),
    "recap": Method("RECAP", FLOW, f"{DENSE}, {DATA}", recap, needs_data=True),
    "iql": Method("IQL (offline)", FLOW, f"{DENSE}, {DATA}", iql, needs_data=True),
    "dagger": Method("DAgger", FLOW, f"scripted expert labels every step, {DATA}", dagger, needs_data=True),
}


class World(NamedTuple):
    """What a policy reads: the observation of the environment, and the flags of each kind of training."""

    words: str
    observation: str
    acting: str
    """The observation in evaluations."""
    flow: list[object]
    gaussian: list[object]
    online: list[object]
    methods: dict[str, list[object]]
    """Further flags of single methods."""


VLA = ["--model", "vla-tiny", "--weight_decay", 1e-2, "--learning_rate", 1e-3, "--batch_size", 64]
MLP = ["--chunk_length", CHUNK, "--learning_rate", 1e-3, "--batch_size", 256]
VISION = ["--vector", "process"]
# The labels of every new scene train the vision encoder, and the reward the layers after it. DAgger, RECAP and QC train
# on labels without a flag; SAC and the methods that freeze the policy do not use them after SFT.
LABELLED = [
    "--model",
    "vla-tiny",
    "--vla-model-config",
    "freeze_vision=true",
    "--auxiliary_learning_rate",
    1e-3,
    "--auxiliary_epochs",
    2,
]
OFFLINE_LABELLED = ["--auxiliary_learning_rate", 1e-3, "--position_source", "start"]
WORLDS = {
    "images": World(
        "images and text",
        "images",
        "images",
        [*VLA, "--vla-model-config", "head=flow"],
        [*VLA, "--vla-model-config", "head=gaussian"],
        VISION,
        {},
    ),
    "labels": World(
        "images and text; position labels in training",
        "labelled",
        "images",
        [*VLA, "--vla-model-config", "head=flow", "bottleneck=8"],
        [*VLA, "--vla-model-config", "head=gaussian", "bottleneck=8"],
        VISION,
        {"ppo": LABELLED, "grpo": LABELLED, "iql": OFFLINE_LABELLED},
    ),
    "state": World(
        "the state vector of the simulator (no images, no text)",
        "state",
        "state",
        [*MLP, "--distribution", "flow"],
        [*MLP, "--distribution", "gaussian"],
        [],
        {},
    ),
}


class BakeOff(Bench):
    """One call of this script: its settings, and a queue of free sets of cores."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        cores = len(os.sched_getaffinity(0))
        arguments.cores = max(1, cores // arguments.parallel)
        super().__init__(arguments)
        self.world = WORLDS[arguments.observation]
        task = [f"task={arguments.task}", "control_mode=delta_ee_pos", f"observation={self.world.observation}"]
        self.env: list[object] = ["--env", "tabletop", "--env-kwargs", *task]
        self.limit: list[object] = []
        if arguments.episode_steps is not None:
            self.limit = ["--max_episode_steps", arguments.episode_steps]

    def start(self, seed: int) -> dict[str, Any]:
        """Demonstrations, the SFT policies that the methods start from, and their success."""
        given, folder = self.arguments, self.root / f"seed-{seed}"
        demos = folder / "demos-v0"
        expert = ["--policy", "expert", "--noise", given.noise, "--episodes", given.demonstrations, "--num_envs", 4]
        words = ["collect", *self.env, *self.limit, *expert, "--seed", 1_000_000 * seed, "--out", demos]
        found = {"demos": self.step(seed, "demos", *words)}
        starts = dict.fromkeys(METHODS[name].start for name in given.methods)
        for name in starts:
            head = self.world.flow if name == FLOW else self.world.gaussian
            found[name] = self.imitate(seed, name, "sft", "--dataset", demos, *head, "--val_fraction", 0)
            found[name]["success"] = self.successes(seed, name, [last_checkpoint(folder / name)])[0]
        found["env_steps"] = int(found["demos"]["total_steps"])
        if found["env_steps"] >= given.steps:
            raise SystemExit(f"--steps {given.steps}: the demonstrations alone are {found['env_steps']} env steps")
        return found

    def imitate(self, seed: int, name: str, *words: object) -> dict[str, Any]:
        """Train on a dataset for `--sft-updates` updates."""
        updates = self.arguments.sft_updates
        length = ["--num_epochs", 1, "--updates_per_epoch", updates, "--learning_rate_schedule", "cosine"]
        return self.train(seed, name, *words, *length, "--eval_freq", 0, "--save_freq", 0, *self.arguments.flags)

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
        own = given.steps - start["env_steps"]
        sft = last_checkpoint(folder / method.start)
        minutes = (start["demos"]["seconds"] + start[method.start]["seconds"]) / 60
        found: dict[str, Any] = {"points": [[start["env_steps"], minutes, start[method.start]["success"]]]}
        if name == "iql":
            taken = self.recorded(seed, name, sft, own)
            minutes, marks = minutes + sum(taken) / 60, [(own, last_checkpoint(folder / name))]
            found["steps_per_second"] = own / sum(taken)
        else:
            if method.before:
                data = ["--dataset", folder / "demos-v0", "--model_path", sft, "--normalize_q", "--alpha", 3]
                before = self.pretrain(seed, f"{name}-{method.before}", method.before, *data)
                minutes += before["seconds"] / 60
                sft = last_checkpoint(folder / f"{name}-{method.before}")
            words = [method.command or name, *self.env, *self.limit, *self.world.online, "--model_path", sft]
            words += [
                *method.flags(own),
                *self.world.methods.get(name, []),
                "--total_timesteps",
                own,
                "--eval_freq",
                0,
                "--keep_checkpoints",
                1_000_000,
            ]
            words += ["--save_freq", -(-own // given.marks), *given.flags]
            if method.needs_data:
                words += ["--prior_data", folder / "demos-v0"]
            self.train(seed, name, *words)
            marks = checkpoints_at(folder / name, own, given.marks)
            found["steps_per_second"] = marks[-1][0] / seconds_at(folder / name, marks[-1][1])
        rates = self.successes(seed, name, [checkpoint for _, checkpoint in marks])
        for (step, checkpoint), rate in zip(marks, rates, strict=True):
            after = 0.0 if name == "iql" else seconds_at(folder / name, checkpoint) / 60
            found["points"].append([start["env_steps"] + step, minutes + after, rate])
        return found

    def pretrain(self, seed: int, name: str, *words: object) -> dict[str, Any]:
        """Train on the demonstrations from the SFT policy; no env steps."""
        length = ["--num_epochs", 1, "--updates_per_epoch", self.arguments.sft_updates, "--eval_freq", 0]
        return self.train(seed, name, *words, *length, "--save_freq", 0, *self.arguments.flags)

    def recorded(self, seed: int, name: str, sft: Path, own: int) -> tuple[float, float]:
        """Record the SFT policy for `own` env steps beside the demonstrations, and train on both; seconds of each."""
        given, folder = self.arguments, self.root / f"seed-{seed}"
        mixed = folder / "mixed-v0"
        if not (folder / "mixed.json").is_file():
            shutil.rmtree(mixed, ignore_errors=True)
            shutil.copytree(folder / "demos-v0", mixed)
        play = ["--policy", sft, "--steps", own, "--num_envs", 8, "--append", "--seed", 1_000_000 * seed + 500_000]
        played = self.step(seed, "mixed", "collect", *play, *self.limit, "--device", "cpu", "--out", mixed)
        length = ["--num_epochs", 1, "--updates_per_epoch", given.offline_updates, "--eval_freq", 0, "--save_freq", 0]
        words = [name, "--dataset", mixed, "--model_path", sft, *METHODS[name].flags(own)]
        words += [*self.world.methods.get(name, []), *length, *given.flags]
        trained = self.train(seed, name, *words)
        return played["seconds"], trained["seconds"]

    def successes(self, seed: int, name: str, checkpoints: Sequence[Path]) -> list[float]:
        """Success of checkpoints of a run in the held-out episodes, which are the same for every policy."""
        words = [*checkpoints, "--split", "train", "--env-kwargs", f"observation={self.world.acting}"]
        words += ["--episodes", self.arguments.episodes, "--device", self.arguments.device]
        out = self.root / f"seed-{seed}" / f"{name}-comparison"
        found = self.step(seed, f"{name}-success", "compare", *words, "--out", out)
        return [float(one["success_rate"]) for one in found["columns"]["train"].values()]


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


def rows(results: dict[str, dict[int, dict[str, Any]]], episodes: int, level: float) -> list[list[str]]:
    """The table: success at the start, halfway and at the end, and the env steps to `level`."""
    lines = []
    for name, by_seed in results.items():
        points = [found["points"] for found in by_seed.values()]
        ends = [share_over_seeds([one[index][2] for one in points], episodes) for index in (0, -1)]
        reached = [steps_to([point[::2] for point in one], level) for one in points]
        steps = ", ".join("never" if step is None else f"{step:,.0f}" for step in reached)
        minutes = over_seeds([one[-1][1] for one in points])
        rate = over_seeds([found["steps_per_second"] for found in by_seed.values()], ".0f")
        method = METHODS[name]
        lines.append([method.words, method.start, method.uses, *ends, steps, minutes, rate])
    return lines


def write(arguments: argparse.Namespace, results: dict[str, dict[int, dict[str, Any]]], seconds: float) -> str:
    """Write results.json, table.md and the plot; return the table."""
    from bakeoff_picture import draw

    words = WORLDS[arguments.observation].words
    written = {
        "command": " ".join(sys.argv),
        "machine": machine(),
        "seconds": seconds,
        "task": arguments.task,
        "observation": words,
        "steps": arguments.steps,
        "episodes": arguments.episodes,
        "words": {name: METHODS[name].words for name in results},
        "methods": results,
    }
    (arguments.results / "results.json").write_text(json.dumps(written, indent=1) + "\n")
    header = ["method", "from", "uses", "SFT", f"after {arguments.steps:,} env steps"]
    header += [f"env steps to {arguments.level:.0%}, by seed", "minutes", "env steps/s"]
    shown = table(header, rows(results, arguments.episodes, arguments.level))
    caption = f"Tabletop, task {arguments.task}; policies read {words}; {len(arguments.seeds)} seeds, "
    caption += f"{arguments.episodes} held-out episodes each; every env step counts, demonstrations too."
    (arguments.results / "table.md").write_text(f"{caption}\n\n{shown}\n")
    draw(written, arguments.results / "bakeoff.png")
    return shown


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The settings, with unknown flags for every training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200_000, help="env steps of each method, demonstrations included")
    parser.add_argument("--marks", type=int, default=5, help="checkpoints that are evaluated")
    parser.add_argument("--task", default="all", help="of the tabletop: all, reach, push, pick or place")
    seen = parser.add_mutually_exclusive_group()
    for name, text in (("labels", "train with position labels"), ("state", "state vectors instead of images and text")):
        seen.add_argument(f"--{name}", dest="observation", action="store_const", const=name, help=text)
    parser.add_argument("--demonstrations", type=int, default=100, help="episodes of the expert")
    parser.add_argument("--noise", type=float, default=0.3, help="on the expert's actions")
    parser.add_argument("--sft-updates", type=int, default=3000, help="of SFT, and of the pretraining of qc-fql")
    parser.add_argument("--offline-updates", type=int, default=5000, help="of IQL")
    parser.add_argument("--episodes", type=int, default=100, help="of each evaluation")
    parser.add_argument("--episode-steps", type=int, help="a time limit instead of the environment's 150 steps")
    parser.add_argument("--level", type=float, default=0.8, help="success to which env steps are counted")
    parser.add_argument("--parallel", type=int, default=1, help="commands side by side; the cores are divided")
    parser.add_argument("--minutes", type=float, help="after which a training is stopped")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--results", type=Path, default=Path("outputs/bakeoff"))
    parser.set_defaults(observation="images")
    arguments, arguments.flags = parser.parse_known_args(words)
    return arguments


def main(words: Sequence[str] | None = None) -> int:
    """All seeds and methods, the table and the plot."""
    arguments = parse(words)
    print_machine()
    arguments.results.mkdir(parents=True, exist_ok=True)
    bench, started = BakeOff(arguments), time.monotonic()
    seeds = arguments.seeds
    results: dict[str, dict[int, dict[str, Any]]] = {}
    failures: list[str] = []
    with ThreadPoolExecutor(arguments.parallel) as pool:
        starts = dict(zip(seeds, pool.map(bench.start, seeds), strict=True))
        pairs = [(name, seed) for name in arguments.methods for seed in seeds]
        jobs = [pool.submit(functools.partial(bench.method, seed, name, starts[seed])) for name, seed in pairs]
        for (name, seed), job in zip(pairs, jobs, strict=True):
            try:
                results.setdefault(name, {})[seed] = job.result()
            except RuntimeError as error:  # the others are still worth a table
                failures.append(f"{name}, seed {seed}: {error}")
    results = {name: by_seed for name, by_seed in results.items() if by_seed}
    for failure in failures:
        print(failure, file=sys.stderr, flush=True)
    if not results:
        return 1
    print(write(arguments, results, time.monotonic() - started), flush=True)
    print(f"written: {arguments.results}/results.json, table.md, bakeoff.png", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
