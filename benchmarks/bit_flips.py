"""Flip one bit of a file of a checkpoint, 300 times: is each flip detected before anything is loaded?

A run of PPO on CartPole is trained. Then one random bit of one of its files is flipped at a time and the file is put
back after: `model.pt` is read by `deft evaluate` and by `--model-path`, `training_state.pt` by `--resume`. Each command
must end with exit status 2 and one line that names the file. `--auto-resume` must continue from the checkpoint before.
The same is then counted for a checkpoint without a manifest, as earlier versions wrote them, where the CRC-32 of
torch.save alone protects: no flip may load with other values. At the end: what the hashes cost. Exit status 1 if a flip
gets through.

    python benchmarks/bit_flips.py
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from common import print_machine, print_table, run_deft, write_json
from kill_resume import leaves

from deft.cli import main as deft
from deft.errors import InputError
from deft.ownership import MANIFEST, verify_folder
from deft.runs import checkpoint

TRAIN = ["ppo", "--env", "CartPole-v1", "--total-timesteps", 512, "--rollout-steps", 256, "--save-freq", 256]
TRAIN += ["--eval-freq", 0, "--device", "cpu", "--threads", 1, "--no-tensorboard", "--no-enable-file-logging"]


@contextlib.contextmanager
def flipped(path: Path, bit: int) -> Iterator[None]:
    """A file with one bit changed, for a while."""
    whole = path.read_bytes()
    changed = bytearray(whole)
    changed[bit // 8] ^= 1 << bit % 8
    path.write_bytes(changed)
    try:
        yield
    finally:
        path.write_bytes(whole)


def command(words: list[object]) -> tuple[int, list[str]]:
    """Exit status and the lines on standard error of a `deft` command, in this process."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        status = deft([str(word) for word in words])
    return status, errors.getvalue().strip().splitlines()


def is_detected(words: list[object], path: Path) -> bool:
    """Whether a command rejects the file, by name, in one line."""
    status, lines = command(words)
    return status == 2 and len(lines) == 1 and (path.name in lines[0] or MANIFEST in lines[0])


def count_commands(run: Path, flips: int, dice: random.Random) -> list[list[object]]:
    """Rows of (file, command, flips, detected)."""
    folder = run / "checkpoint-512"
    new = run.parent / "new"
    commands: dict[str, tuple[str, list[object]]] = {
        "deft evaluate": (checkpoint.MODEL, ["evaluate", folder, "--episodes", 1, "--device", "cpu"]),
        "--model-path": (checkpoint.MODEL, ["train", *TRAIN, "--model-path", run, "--output-dir", new, "--overwrite"]),
        "--resume": (checkpoint.TRAINING_STATE, ["train", "--resume", run, "--total-timesteps", 768]),
        "deft evaluate (manifest)": (MANIFEST, ["evaluate", folder, "--episodes", 1, "--device", "cpu"]),
    }
    rows: list[list[object]] = []
    shares = {"deft evaluate": 2, "--model-path": 1, "--resume": 2, "deft evaluate (manifest)": 1}
    for name, (file, words) in commands.items():
        path, count = folder / file, flips * shares[name] // sum(shares.values())
        found = 0
        for bit in dice.sample(range(8 * path.stat().st_size), count):
            with flipped(path, bit):
                found += is_detected(words, path)
        rows.append([file, name, count, found])
        print(*rows[-1], sep=" | ", flush=True)
    return rows


def count_without_manifest(run: Path, flips: int, dice: random.Random) -> list[list[object]]:
    """Rows of (file, flips, rejected, loaded with the same values, loaded with other values)."""
    folder = shutil.copytree(run / "checkpoint-512", run.parent / "earlier")
    (folder / MANIFEST).unlink()
    rows: list[list[object]] = []
    for name in (checkpoint.MODEL, checkpoint.TRAINING_STATE):
        path = folder / name
        true, rejected, same, other = dict(leaves(checkpoint.load_part(folder, name))), 0, 0, 0
        for bit in dice.sample(range(8 * path.stat().st_size), flips // 2):
            with flipped(path, bit):
                try:
                    found = dict(leaves(checkpoint.load_part(folder, name)))
                except InputError:
                    rejected += 1
                    continue
            is_same = found.keys() == true.keys() and all(_equal(found[key], true[key]) for key in true)
            same, other = same + is_same, other + (not is_same)
        rows.append([name, flips // 2, rejected, same, other])
    return rows


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other) or (one != one and other != other)


def measure(folder: Path, megabytes: int) -> list[list[object]]:
    """What a checkpoint of this size costs to write, verify and load."""
    weights = {"w": torch.randn(megabytes * 2**20 // 4)}
    path = folder / "checkpoint-1"
    steps: dict[str, Callable[[], object]] = {
        "torch.save alone": lambda: torch.save(weights, folder / "plain.pt"),
        "save_checkpoint (hashes, fsync)": lambda: checkpoint.save_checkpoint(folder, 1, weights, {}, {}),
        "verify": lambda: verify_folder(path),
        "load, verified before": lambda: checkpoint.load_part(path, checkpoint.MODEL),
    }
    rows: list[list[object]] = []
    for name, step in steps.items():
        wall, cpu = time.perf_counter(), time.process_time()
        step()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        rows.append([name, f"{wall:.2f}", f"{megabytes / wall:.0f}", f"{cpu:.2f}", f"{megabytes / cpu:.0f}"])
    return rows


def main() -> int:
    """Flip, count, print; 1 if a flip got through."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--megabytes", type=int, default=1024, help="of the checkpoint that is timed; 0: none")
    parser.add_argument("--json", help="write the results here")
    arguments = parser.parse_args()
    print_machine()
    dice = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary) / "run"
        run_deft(["train", *TRAIN, "--output-dir", run])
        rows = count_commands(run, arguments.flips, dice)
        print_table(["file", "read by", "flips", "detected"], rows)
        with flipped(run / "checkpoint-512" / checkpoint.TRAINING_STATE, 4000):
            status, lines = command(["train", *TRAIN, "--output-dir", run, "--auto-resume"])
        falls_back = status == 0 and any("passed over" in line and "checkpoint-512" in line for line in lines)
        print(f"--auto-resume continues from the checkpoint before, with a warning: {falls_back}")
        earlier = count_without_manifest(run, arguments.flips, dice)
        print_table(["file without a manifest", "flips", "rejected", "same values", "other values"], earlier)
        speed = measure(Path(temporary), arguments.megabytes) if arguments.megabytes else []
        print_table([f"{arguments.megabytes} MB", "seconds", "MB/s", "CPU seconds", "MB per CPU second"], speed)
    flips, found = (sum(row[column] for row in rows) for column in (2, 3))
    print(f"{found} of {flips} bit flips detected")
    write_json(arguments.json, {"flips": rows, "without_manifest": earlier, "speed": speed})
    return 0 if found == flips and falls_back and not any(row[-1] for row in earlier) else 1


if __name__ == "__main__":
    sys.exit(main())
