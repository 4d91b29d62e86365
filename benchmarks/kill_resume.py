"""`kill -9` at random times of 14 kinds of training, then `--auto-resume`: does each end as if nothing had happened?

For each kind: a run that is never killed, and one that is killed `--kills` times and resumed each time. A kill comes
before the first checkpoint (`early`), between two checkpoints (`between`), or while a checkpoint is written
(`mid-save`), each at a random time. After each kill every checkpoint on disk must match its manifest. The final
checkpoint must equal, bit for bit, that of the run that was never killed: weights, optimizers, targets, buffers,
environments, random state. Every update must be logged once, and no temporary file may be left. Exit status 1 if any
of this fails.

    python benchmarks/kill_resume.py --kills 4
    python benchmarks/kill_resume.py --kinds ppo sac --kills 2
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from common import print_machine, print_table, run_deft, worker_environment, write_json

from deft.errors import InputError
from deft.ownership import read_manifest, verify_folder

KILL_TIMES = ("mid-save", "between", "early", "between")
LIMIT_SECONDS = 1800
QUIET = ["--device", "cpu", "--threads", 1, "--seed", 0]
ONLINE = [*QUIET, "--eval-freq", 0, "--log-freq", 1, "--keep-checkpoints", 2]
ROLLOUTS = ["--env", "CartPole-v1", "--rollout-steps", 128, "--save-freq", 128, "--total-timesteps", 2560, *ONLINE]
OFFLINE = ["--num-epochs", 30, "--updates-per-epoch", 20, "--batch-size", 32, "--save-freq", 1, *QUIET]
OFFLINE += ["--eval-freq", 0, "--log-freq", 1, "--keep-checkpoints", 2]
SMALL = ["--hidden-dim", 32]
F1 = ["--steps-per-episode", 8, "--save-every", 1, "--log-every", 1, "--keep-checkpoints", 2, "--video-save-every", 0]
F1 += ["--sample-save-every", 0, "--num-envs", 1, *QUIET]
KINDS: dict[str, list[object]] = {
    "ppo": ["ppo", *ROLLOUTS],
    "ppo with memory": ["ppo", "--memory-hidden", 16, *ROLLOUTS],
    "ppo in VLA mode": ["ppo", "--buffer-type", "vla", "--max-staleness", 0, *ROLLOUTS],
    "grpo": ["grpo", "--group-size", 2, "--groups-per-iteration", 2, *ROLLOUTS],
    "sac": ["sac", "--env", "Pendulum-v1", "--total-timesteps", 500, "--learning-starts", 50, "--save-freq", 20]
    + ["--batch-size", 32, "--buffer-size", 500, *SMALL, *ONLINE],
    "sft": ["sft", "--dataset", "{data}", *SMALL, *OFFLINE],
    "iql": ["iql", "--dataset", "{data}", *SMALL, *OFFLINE],
    "cql": ["cql", "--dataset", "{data}", "--cql-samples", 2, *SMALL, *OFFLINE],
    "td3-bc": ["td3-bc", "--dataset", "{data}", *SMALL, *OFFLINE],
    "dt": ["dt", "--dataset", "{data}", "--embed-dim", 16, "--n-layer", 1, "--context-length", 5, *OFFLINE],
    # Episodes that are collected beside training (overlap) arrive at other updates in every run.
    "teacher": ["teacher", "--num-episodes", 24, "--batch-size", 2, "--motion-warmup", 0, "--no-overlap", *F1],
    "student": ["student", "--num-episodes", 10, "--episodes-per-update", 1, *F1],
    "adversarial": ["adversarial", "--total-iterations", 6, "--episodes-per-update", 1, "--wm-updates", 1]
    + ["--wm-warmup", 1, "--random-episodes", 1, "--batch-size", 2, *F1],
    "waypoint-ppo": [
        "waypoint-ppo",
        "--sft-checkpoint",
        "{waypoints}/sft",
        "--num-iterations",
        20,
        "--rollout-steps",
        16,
    ]
    + ["--batch-size", 16, "--save-interval", 1, "--eval-interval", 20, "--eval-episodes", 2, *QUIET],
}
# Of a training state: entries that belong to the process, not to the run.
NOT_COMPARED = {"log", "config", "elapsed", "threads"}


def prepare(folder: Path) -> dict[str, Path]:
    """The dataset and the supervised waypoint policy that some kinds start from."""
    data, waypoints = folder / "data-v0", folder / "waypoints"
    run_deft(["collect", "--env", "Pendulum-v1", "--policy", "random", "--episodes", 20, "--out", data])
    recording = waypoints / "recording.npz"
    run_deft(["collect", "waypoints", "--env", "toy", "--episodes", 8, "--out", recording])
    run_deft(["train", "waypoint-sft", "--dataset", recording, "--num-epochs", 1, "--out-dir", waypoints / "sft"])
    return {"data": data, "waypoints": waypoints}


def command(kind: str, run_dir: Path, inputs: dict[str, Path], resumes: bool) -> list[str]:
    """The training command of a run, started or resumed."""
    words = [str(word).format(**inputs) for word in KINDS[kind]]
    if words[0] == "waypoint-ppo":  # it has no --auto-resume, and --resume needs a checkpoint
        more = ["--out-dir", str(run_dir), *(["--resume"] if resumes and saved(run_dir) else [])]
    else:
        more = ["--output-dir", str(run_dir), *(["--auto-resume"] if resumes else [])]
    return [sys.executable, "-m", "deft", "train", *words, *more]


def saved(run_dir: Path) -> list[Path]:
    """The checkpoints that have their final name, oldest first."""
    return sorted(run_dir.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name."""
    return int(checkpoint.name.rpartition("-")[2])


def run_to_end(kind: str, run_dir: Path, inputs: dict[str, Path], resumes: bool) -> str:
    """What went wrong in a whole run; empty if it ended well."""
    done = subprocess.run(
        command(kind, run_dir, inputs, resumes),
        env=worker_environment(1),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    lines = done.stderr.strip().splitlines()
    return "" if done.returncode == 0 else f"exit status {done.returncode}: {lines[-1] if lines else ''}"


def kill_time(kind: str, run_dir: Path, last: int, first_save: float, dice: random.Random) -> Callable[[float], bool]:
    """A function of the process's age that says when to kill it; `last`: the step of the last checkpoint of the run."""
    if kind == "early":
        age_to_kill = dice.uniform(0.3, 1.0) * first_save
        return lambda age: age >= age_to_kill
    begun = step_of(saved(run_dir)[-1]) if saved(run_dir) else 0
    target = begun + (last - begun) * dice.uniform(0.05, 0.4)

    def passed() -> bool:
        found = saved(run_dir)
        return bool(found) and step_of(found[-1]) >= target

    if kind == "mid-save":
        return lambda age: passed() and any(run_dir.glob(".tmp-checkpoint-*"))
    pause, reached = dice.uniform(0.0, 0.3), []

    def come(age: float) -> bool:
        if not reached and passed():
            reached.append(age)
        return bool(reached) and age - reached[0] >= pause

    return come


def kill_once(words: list[str], come: Callable[[float], bool]) -> bool:
    """Start a process and kill it when `come` returns True; False if it had ended before."""
    start = time.perf_counter()
    process = subprocess.Popen(
        words, env=worker_environment(1), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        while process.poll() is None:
            age = time.perf_counter() - start
            if come(age) or age > LIMIT_SECONDS:
                return True
            time.sleep(0.0005)
        return False
    finally:
        process.kill()
        process.wait()


def damaged(run_dir: Path) -> str:
    """The first checkpoint on disk that is not whole."""
    for path in saved(run_dir):
        try:
            if not verify_folder(path):
                return f"{path.name} has no manifest"
        except InputError as error:
            return str(error)
    return ""


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors and plain values of a nested state, by their path."""
    if isinstance(value, dict):
        for key, nested in value.items():
            yield from leaves(nested, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for index, nested in enumerate(value):
            yield from leaves(nested, f"{name}[{index}]")
    else:
        yield name, value


def content(checkpoint: Path) -> dict[str, Any]:
    """Everything in the files of a checkpoint but the metrics, which hold times."""
    found = {}
    for name in read_manifest(checkpoint) or {}:
        if not name.endswith(".pt") or name == "metrics.pt":
            continue
        state = torch.load(checkpoint / name, map_location="cpu", weights_only=True)
        if name == "training_state.pt":
            state = {key: value for key, value in state.items() if key not in NOT_COMPARED}
        found |= {f"{name}{path}": value for path, value in leaves(state)}
    return found


def difference(one: Path, other: Path) -> str:
    """What differs between two checkpoints, bit for bit; empty if nothing does."""
    first, second = content(one), content(other)
    if first.keys() != second.keys():
        return f"different entries: {sorted(first.keys() ^ second.keys())[:3]}"
    for name, value in first.items():
        same = torch.equal(value, second[name]) if isinstance(value, torch.Tensor) else value == second[name]
        is_nan = isinstance(value, float) and value != value and second[name] != second[name]
        if not same and not is_nan:
            return f"{name} differs"
    return ""


def logged_twice(run_dir: Path) -> str:
    """Whether an update is missing its order in the metrics, or is there twice."""
    lines = map(json.loads, (run_dir / "episode_metrics.jsonl").read_text().splitlines())
    steps = [line["step"] for line in lines if line["type"] == "update"]
    return "" if steps == sorted(set(steps)) else "updates are logged out of order or twice"


def trial(kind: str, folder: Path, inputs: dict[str, Path], kills: int, dice: random.Random) -> list[object]:
    """A row of the table: the kind, its kills, and its outcome."""
    began = time.perf_counter()
    reference, run_dir = folder / "reference", folder / "killed"
    first_save: list[float] = []

    def watch(age: float) -> bool:
        if not first_save and saved(reference):
            first_save.append(age)
        return False

    kill_once(command(kind, reference, inputs, resumes=False), watch)
    if not saved(reference) or not first_save:
        problem = run_to_end(kind, folder / "failed", inputs, resumes=False)
        return [kind, 0, "", f"the reference run failed: {problem}", round(time.perf_counter() - began)]
    last = step_of(saved(reference)[-1])
    killed, problem = [], ""
    for number in range(kills):
        when = KILL_TIMES[number % len(KILL_TIMES)]
        come = kill_time(when, run_dir, last, first_save[0], dice)
        if not kill_once(command(kind, run_dir, inputs, resumes=number > 0), come):
            break  # it has finished
        unfinished = any(run_dir.glob(".tmp-checkpoint-*"))
        killed.append(f"{when} {step_of(saved(run_dir)[-1]) if saved(run_dir) else 0}{'*' if unfinished else ''}")
        problem = problem or damaged(run_dir)
    problem = problem or run_to_end(kind, run_dir, inputs, resumes=True)
    problem = problem or logged_twice(run_dir)
    if not problem and any(run_dir.glob(".tmp-*")):
        problem = f"left behind: {[path.name for path in run_dir.glob('.tmp-*')]}"
    if not problem:
        problem = difference(reference / f"checkpoint-{last}", run_dir / f"checkpoint-{last}")
    seconds = round(time.perf_counter() - began)
    return [kind, len(killed), ", ".join(killed), problem or "bit-equal", seconds]


def main() -> int:
    """Kill and resume, print the table; 1 if any kind does not end as it should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS), metavar="KIND")
    parser.add_argument("--kills", type=int, default=4, help="of each kind")
    parser.add_argument("--seed", type=int, default=0, help="of the kill times")
    parser.add_argument("--keep", type=Path, help="leave the run folders here, to look into")
    parser.add_argument("--json", help="write the results here")
    arguments = parser.parse_args()
    print_machine()
    dice = random.Random(arguments.seed)
    rows: list[list[object]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        inputs = prepare(folder)
        for kind in arguments.kinds:
            rows.append(trial(kind, folder / kind.replace(" ", "-"), inputs, arguments.kills, dice))
            print(*rows[-1], sep=" | ", flush=True)
    print_table(
        ["kind", "kills", "time of kill and last checkpoint (*: half-written beside it)", "result", "seconds"], rows
    )
    good = sum(row[3] == "bit-equal" for row in rows)
    print(
        f"{good} of {len(rows)} kinds equal an uninterrupted run bit for bit, after {sum(row[1] for row in rows)} kills"
    )
    write_json(arguments.json, {"rows": rows})
    return 0 if good == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
