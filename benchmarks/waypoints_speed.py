"""How long 100 default iterations of waypoint PPO take in the toy, on one core: the command as a user gives it.

The supervised policy is recorded and trained first and not timed; what is timed is the whole command, with its start,
its evaluations and its plots. Exit status 1 if it takes 60 seconds of the processor or more.

    python benchmarks/waypoints_speed.py
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path

from common import print_machine, print_table, run_deft, write_json

BAR = 60.0


def main() -> int:
    """Time the command; wall clock and processor time are the same on a machine that does nothing else."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures here")
    arguments = parser.parse_args()
    print_machine()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        run_deft(["collect", "waypoints", "--env", "toy", "--episodes", 400, "--out", folder / "toy.npz"])
        run_deft(["train", "waypoint-sft", "--dataset", folder / "toy.npz", "--out-dir", folder / "sft"])
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        command: list[object] = ["train", "waypoint-ppo", "--sft-checkpoint", folder / "sft"]
        run_deft([*command, "--out-dir", folder / "ppo", "--device", "cpu", "--threads", 1])
        wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print_table(["iterations", "seconds", "processor seconds"], [[100, f"{wall:.1f}", f"{processor:.1f}"]])
    write_json(arguments.json, {"seconds": wall, "processor_seconds": processor})
    return 0 if processor < BAR else 1


if __name__ == "__main__":
    sys.exit(main())
