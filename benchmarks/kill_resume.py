"""`kill -9` at a random moment of 20 runs, then `--auto-resume`: does each go on from its last whole checkpoint?

Half of the runs are in standard mode, half in VLA mode. Moments: before the first checkpoint (`early`), anywhere
between two checkpoints (`random`), and while a checkpoint is being written (`mid-save`). After the kill the checkpoints
on disk are read by this script itself; after the resumed run its metrics must go on from the last whole one, without a
gap and without a line twice, up to the last step. In standard mode the final weights must equal, bit for bit, those of
a run that was never killed. Exit status 1 if any run fails.

    python benchmarks/kill_resume.py --runs 20
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import print_machine, print_table, read_metrics, worker_environment, write_json

ROLLOUT, STEPS = 256, 12_288
SETTINGS = ["--env", "CartPole-v1", "--total-timesteps", STEPS, "--rollout-steps", ROLLOUT, "--save-freq", ROLLOUT]
SETTINGS += ["--log-freq", 1, "--eval-freq", 0, "--seed", 0, "--device", "cpu", "--threads", 1]
MOMENTS = ("random", "mid-save", "early", "random", "mid-save")
LIMIT_SECONDS = 600


def command(mode: str, run_dir: Path, *more: object) -> list[str]:
    """The training command of one run."""
    options = [*SETTINGS, "--buffer-type", mode, "--output-dir", run_dir, *more]
    return [sys.executable, "-m", "deft", "train", "ppo", *map(str, options)]


def run_to_end(mode: str, run_dir: Path, *more: object) -> tuple[int, str]:
    """Exit status and standard error of a whole run."""
    done = subprocess.run(
        command(mode, run_dir, *more), env=worker_environment(1), capture_output=True, text=True, timeout=LIMIT_SECONDS
    )
    return done.returncode, done.stderr


def saved_steps(run_dir: Path) -> list[int]:
    """Steps of the checkpoints that have their final name."""
    return sorted(int(path.name.rpartition("-")[2]) for path in run_dir.glob("checkpoint-*"))


def is_whole(checkpoint: Path) -> bool:
    """Whether every file of a checkpoint loads."""
    try:
        for name in ("model.pt", "training_state.pt", "metrics.pt"):
            torch.load(checkpoint / name, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError):
        return False
    return True


def moment_to_kill(kind: str, run_dir: Path, first_save_seconds: float, dice: random.Random) -> Callable[[float], bool]:
    """A function of the run's age that says when the moment has come."""
    if kind == "early":
        age_to_kill = dice.uniform(0.0, first_save_seconds)
        return lambda age: age >= age_to_kill
    target = dice.randrange(ROLLOUT, STEPS - 4 * ROLLOUT)

    def passed() -> bool:
        steps = saved_steps(run_dir)
        return bool(steps) and steps[-1] >= target

    if kind == "mid-save":
        return lambda age: passed() and any(run_dir.glob(".tmp-checkpoint-*"))
    pause = dice.uniform(0.0, 0.3)  # somewhere between this checkpoint and the next few
    reached: list[float] = []

    def come(age: float) -> bool:
        if not reached and passed():
            reached.append(age)
        return bool(reached) and age - reached[0] >= pause

    return come


def kill_once(mode: str, kind: str, run_dir: Path, first_save_seconds: float, dice: random.Random) -> float | None:
    """Start a run and kill it at its moment; its age then, or None if it had ended before."""
    come = moment_to_kill(kind, run_dir, first_save_seconds, dice)
    start = time.perf_counter()
    process = subprocess.Popen(
        command(mode, run_dir), env=worker_environment(1), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while process.poll() is None:
            age = time.perf_counter() - start
            if come(age) or age > LIMIT_SECONDS:
                process.kill()
                process.wait()
                return age
            time.sleep(0.0003 if kind == "mid-save" else 0.005)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    return None


def check(mode: str, run_dir: Path, reference: dict[str, Any]) -> tuple[int, str]:
    """Resume a killed run: the step of its last whole checkpoint (0: none), and what is wrong, if anything."""
    whole = [step for step in saved_steps(run_dir) if is_whole(run_dir / f"checkpoint-{step}")]
    last = whole[-1] if whole else 0
    if saved_steps(run_dir) != whole:
        return last, f"a checkpoint with its final name is not whole: {saved_steps(run_dir)} / {whole}"
    resumed_at = time.time()
    status, errors = run_to_end(mode, run_dir, "--auto-resume")
    if status != 0:
        return last, f"exit status {status}: {errors.strip().splitlines()[-1] if errors.strip() else ''}"
    updates = read_metrics(run_dir, "update")
    steps = [line["step"] for line in updates]
    if steps != list(range(ROLLOUT, STEPS + 1, ROLLOUT)):
        return last, f"update steps are not each rollout once: {steps[:3]} … {steps[-3:]} ({len(steps)})"
    first_new = min(line["step"] for line in updates if line["time"] >= resumed_at)
    if first_new != last + ROLLOUT:
        return last, f"went on from {first_new - ROLLOUT}, not from {last}"
    if saved_steps(run_dir)[-1] != STEPS:
        return last, f"ended at {saved_steps(run_dir)[-1]}"
    if left := [path.name for path in run_dir.glob(".tmp-*")]:
        return last, f"left behind: {left}"
    if mode == "standard":
        model = torch.load(run_dir / f"checkpoint-{STEPS}" / "model.pt", weights_only=True)
        if model.keys() != reference.keys() or not all(torch.equal(model[name], reference[name]) for name in model):
            return last, "final weights differ from those of a run that was not killed"
    return last, ""


def main() -> int:
    """Kill and resume, print the table; 1 if any run did not go on as it should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--keep", help="leave the run folders here, to look into")
    parser.add_argument("--json", help="write the results here")
    arguments = parser.parse_args()
    print_machine()
    dice = random.Random(arguments.seed)
    rows, failures = [], 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.keep or temporary)
        start = time.time()
        status, errors = run_to_end("standard", folder / "reference")
        if status != 0:
            raise RuntimeError(f"the reference run failed ({status}): {errors[-2000:]}")
        first_save_seconds = read_metrics(folder / "reference", "update")[0]["time"] - start
        reference = torch.load(folder / "reference" / f"checkpoint-{STEPS}" / "model.pt", weights_only=True)
        for index in range(arguments.runs):
            mode = "standard" if index < arguments.runs / 2 else "vla"
            kind = MOMENTS[index % len(MOMENTS)]
            run_dir = folder / f"run-{index}"
            age = kill_once(mode, kind, run_dir, first_save_seconds, dice)
            unfinished = len(list(run_dir.glob(".tmp-checkpoint-*")))
            if age is None:
                last, problem = STEPS, "ended before it was killed: not a trial"
            else:
                last, problem = check(mode, run_dir, reference)
            failures += bool(problem)
            seconds = "" if age is None else f"{age:.2f}"
            rows.append([index, mode, kind, seconds, unfinished, last or "none", problem or "goes on and finishes"])
            print(*rows[-1], flush=True)
    print_table(["run", "mode", "moment", "killed after s", "half-written", "last whole checkpoint", "result"], rows)
    print(f"{len(rows) - failures} of {len(rows)} runs went on from their last whole checkpoint and finished")
    write_json(arguments.json, {"runs": rows, "failures": failures})
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
