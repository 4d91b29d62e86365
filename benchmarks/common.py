"""What the benchmarks share: worker processes with fixed thread counts, tables, and a line about the machine.

Every script in this folder imports it; nothing in `deft` does. Run the scripts from anywhere, in an environment where
`deft` is installed (`pip install -e .`, with `.[bench]` for the other libraries).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]


def worker_environment(threads: int) -> dict[str, str]:
    """The environment of a worker process: `threads` for every numerical library, and this checkout importable."""
    environment = dict(os.environ)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environment[name] = str(threads)
    paths = [str(REPOSITORY), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return environment


def start_worker(script: str, arguments: Sequence[object], threads: int = 1) -> subprocess.Popen[str]:
    """Start `script` of this folder in a fresh Python process."""
    command = [sys.executable, str(Path(__file__).parent / script), *map(str, arguments)]
    return subprocess.Popen(
        command, env=worker_environment(threads), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish_worker(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for a worker and read the JSON object on the last line of its output; a failed worker raises."""
    output, errors = process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"failed ({process.returncode}): {process.args!r}\n{errors[-4000:]}")
    result: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return result


def run_worker(script: str, arguments: Sequence[object], threads: int = 1) -> dict[str, Any]:
    """Start a worker and wait for its result."""
    return finish_worker(start_worker(script, arguments, threads))


def run_deft(arguments: Sequence[object], threads: int = 1) -> str:
    """Run the `deft` command in a fresh process and return its standard output; a failure raises."""
    command = [sys.executable, "-m", "deft", *map(str, arguments)]
    done = subprocess.run(command, env=worker_environment(threads), capture_output=True, text=True)
    if done.returncode != 0:
        output = done.stdout[-2000:] + done.stderr[-2000:]
        raise RuntimeError(f"failed ({done.returncode}): {' '.join(command)}\n{output}")
    return done.stdout


def evaluate_run(path: Path, episodes: int, seed: int, threads: int = 1) -> dict[str, Any]:
    """`deft evaluate` on a run or checkpoint: fresh environments, the policy's most likely actions."""
    output = run_deft(["evaluate", path, "--episodes", episodes, "--seed", seed, "--device", "cpu", "--json"], threads)
    result: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return result


def last_checkpoint(run_dir: Path) -> Path:
    """The checkpoint of the most env steps in a run folder."""
    return max(run_dir.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))


def read_metrics(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of one type (`update`, `episode` or `evaluation`) of a run's `episode_metrics.jsonl`."""
    lines = map(json.loads, (run_dir / "episode_metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["type"] == kind]


def over_seeds(values: Sequence[float], form: str = ".1f", low: float = -math.inf) -> str:
    """`57.6 (48.1 to 67.2)`: the mean over seeds and its 95 % t interval, from `low` on.

    One seed, or a value that is not finite, has no interval.
    """
    from deft.evaluation.success import t_interval

    mean = sum(values) / len(values)
    if len(values) < 2 or not math.isfinite(mean):
        return f"{mean:{form}}"
    first, last = t_interval(values)
    return f"{mean:{form}} ({max(first, low):{form}} to {last:{form}})"


def share_over_seeds(rates: Sequence[float], episodes: int) -> str:
    """`57.6 % (48.1 to 67.2)`: the mean of shares of `episodes` each, with the interval that `deft compare` gives.

    That is the t interval over seeds, widened to contain the Wilson interval of all episodes.
    """
    from deft.evaluation.success import hull, t_interval, wilson_interval

    mean, total = sum(rates) / len(rates), episodes * len(rates)
    by_episode = wilson_interval(round(mean * total), total)
    low, high = hull(t_interval(rates) if len(rates) > 1 else by_episode, by_episode, 0.0)
    return f"{100 * mean:.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table with aligned columns."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in cells]
    lines = [f"| {' | '.join(row)} |" for row in padded]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a Markdown table."""
    print(table(header, rows), flush=True)


def machine() -> dict[str, Any]:
    """The processor, its cores and the versions that a figure depends on."""
    cpu = platform.processor() or platform.machine()
    if shutil.which("lscpu"):
        report = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
        names = [line.split(":", 1)[1].strip() for line in report.splitlines() if line.startswith("Model name")]
        cpu = " ".join([*names[:1], platform.machine()])
    versions = {"python": platform.python_version()}
    for package in ("torch", "tensordict", "gymnasium", "mujoco", "stable-baselines3", "torchrl"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "versions": versions}


def print_machine() -> None:
    """One line to stand above a table of figures."""
    facts = machine()
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    print(f"{facts['cpu']}, {facts['cores']} cores; {versions}", flush=True)


def at_least_one(word: str) -> int:
    """Return the integer of an argument; reject one below 1."""
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of 1 or more, not {word}")
    return int(word)


def waits(limit: float | None, is_over: threading.Event, longest: float = 0.2) -> Iterator[float]:
    """Yield the seconds of short waits, until `limit` seconds have passed or `is_over` is set."""
    end = math.inf if limit is None else time.monotonic() + limit
    while not is_over.is_set() and (left := end - time.monotonic()) > 0:
        yield min(left, longest)


def write_json(path: str | None, result: dict[str, Any]) -> None:
    """Write the figures with the machine they were measured on, where a path was given."""
    if path is not None:
        Path(path).write_text(json.dumps({"machine": machine(), **result}, indent=2) + "\n")
        print(f"written: {path}", flush=True)
