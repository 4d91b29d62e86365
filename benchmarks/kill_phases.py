"""`kill -9` in each of the three phases, then `--auto-resume`: the run must resume and end like an uninterrupted run.

    python benchmarks/kill_phases.py [--results FOLDER] [flags of deft train all]

`deft train all` is killed once in every phase, after a checkpoint of that phase was written, and started again each
time. At the end all phases must be done, no line of their metrics twice, and the report written.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from common import print_table, worker_environment

from deft.config.rl_yaml import PHASES

FLAGS = [
    "--teacher-episodes",
    "16",
    "--student-episodes",
    "16",
    "--total-iterations",
    "4",
    "--steps-per-episode",
    "10",
    "--batch-size",
    "2",
    "--save-every",
    "1",
    "--keep-checkpoints",
    "2",
    "--log-every",
    "1",
    "--video-save-every",
    "0",
    "--sample-save-every",
    "0",
    "--num-envs",
    "2",
    "--episodes-per-update",
    "2",
    "--evaluation-episodes",
    "2",
    "--motion-warmup",
    "0",
    "--wm-updates",
    "1",
    "--wm-warmup",
    "1",
    "--random-episodes",
    "1",
]


def main() -> None:
    """Kill, resume, check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("outputs/kill_phases"))
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for each start")
    arguments, flags = parser.parse_known_args()
    folder: Path = arguments.results
    shutil.rmtree(folder, ignore_errors=True)
    command = [
        sys.executable,
        "-m",
        "deft",
        "train",
        "all",
        "--output-dir",
        str(folder),
        "--auto-resume",
        *FLAGS,
        *flags,
    ]
    rows = []
    for phase in PHASES:
        at = kill_in(command, folder / phase, arguments.timeout)
        rows.append([phase, at.name])
        print(f"killed in {phase} after {at.name}", flush=True)
    subprocess.run(command, env=worker_environment(1), check=True, timeout=arguments.timeout, stdout=subprocess.DEVNULL)
    for row, phase in zip(rows, PHASES, strict=True):
        lines = [json.loads(line) for line in (folder / phase / "episode_metrics.jsonl").read_text().splitlines()]
        steps = [line["step"] for line in lines if line["type"] == "update"]
        assert steps == sorted(set(steps)), f"{phase}: lines of the metrics out of order or twice: {steps}"
        assert steps[-1] > int(row[1].rpartition("-")[2]) - 1, f"{phase} did not resume"
        row += [steps[-1], (folder / phase / "best").resolve().name]
    assert (folder / "report.html").is_file()
    print_table(["phase", "killed after", "ended at", "best"], rows)


def kill_in(command: list[str], run: Path, timeout: float) -> Path:
    """Start, wait for a checkpoint of the phase, and kill the whole group; returns the checkpoint."""
    process = subprocess.Popen(
        command, env=worker_environment(1), start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    started = time.monotonic()
    while not (found := sorted(run.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))):
        if process.poll() is not None or time.monotonic() - started > timeout:
            errors = (
                process.stderr.read().decode()[-2000:]
                if process.stderr is not None and process.poll() is not None
                else ""
            )
            process.kill()
            raise RuntimeError(f"no checkpoint in {run}: {errors}")
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return found[-1]


if __name__ == "__main__":
    main()
