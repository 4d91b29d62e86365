"""Kills `deft collect` at random times and fills its disk, and counts whole episodes that are lost: none may be.

    python benchmarks/collect_faults.py --kills 20 --disks 5

The environment numbers its episodes, and with the first step of each writes to a log that those before are recorded.
After each fault the dataset must be readable, have every episode of the log, and each of them as it was played. The
runs of the kills append to one dataset. Full disks need root, for a small file system in memory.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from deft import load_dataset

ENV_ID = "collect_faults:deft-faults/Numbered-v0"
DISK_MEGABYTES = (1, 2, 3, 5, 8)
FULL_SECONDS = 0.5  # the last disk is full for so long, and has room before and after


class Numbered(gymnasium.Env):
    """Episode n has 3 + n % 5 steps, and observes n, the step, and noise that does not compress."""

    observation_space = spaces.Dict(
        {"camera": spaces.Box(0, 255, (48, 64, 3), np.uint8), "state": spaces.Box(-np.inf, np.inf, (2,), np.float32)}
    )
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, first: int = 0, log: str = "") -> None:
        self._number, self._log = first - 1, os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._number += 1
        self._step = 0
        return self._observation(), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._step == 0:  # the episodes before this one are written
            os.write(self._log, f"{self._number}\n".encode())
        self._step += 1
        ends = self._step == length_of(self._number)
        return self._observation(), float(self._step), ends, False, {}

    def _observation(self) -> dict[str, np.ndarray]:
        noise = np.random.default_rng([self._number, self._step]).integers(0, 256, (48, 64, 3), np.uint8)
        return {"camera": noise, "state": np.array([self._number, self._step], np.float32)}


if "deft-faults/Numbered-v0" not in gymnasium.registry:
    gymnasium.register("deft-faults/Numbered-v0", entry_point="collect_faults:Numbered")


def length_of(number: int) -> int:
    return 3 + number % 5


class Faults:
    """One dataset that is recorded through faults."""

    def __init__(self, folder: Path, data_format: str) -> None:
        self.format = data_format
        self.out = folder / "numbered-v0"
        self.log = Path(tempfile.mkdtemp()) / "log"  # not on a disk that is filled
        self.log.touch()
        self.recorded = 0  # episodes that must be there

    def start(self) -> subprocess.Popen[str]:
        command = [
            sys.executable, "-c", "import sys; from deft.cli import main; sys.exit(main())",
            "collect", "--env", ENV_ID, "--policy", "random", "--episodes", "100000", "--append",
            "--format", self.format, "--fps", "10", "--out", str(self.out),
            "--env-kwargs", f"first={self.recorded}", f"log={self.log}",
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def wait_for_episodes(self, process: subprocess.Popen[str], count: int) -> None:
        """Until this process has recorded so many."""
        while self.acknowledged() < self.recorded + count and process.poll() is None:
            time.sleep(0.01)

    def acknowledged(self) -> int:
        lines = self.log.read_text().split("\n")[:-1]
        return int(lines[-1]) if lines else 0

    def check(self) -> str:
        """Read the dataset: whole episodes, and all of them that the log has."""
        acknowledged = max(self.recorded, self.acknowledged())
        dataset = load_dataset(self.out)
        found = dataset.num_episodes
        assert acknowledged <= found <= acknowledged + 1, f"{acknowledged} were recorded, {found} are there"
        for number in range(found):
            episode, length = dataset.episode(number), length_of(number)
            expected = np.stack([np.full(length + 1, number), np.arange(length + 1)], 1)
            assert np.array_equal(episode.observation["state"], expected), f"episode {number} has other observations"
            assert len(episode.observation["camera"]) == length + 1, f"episode {number} has fewer frames"
            assert np.array_equal(episode.reward, np.arange(1, length + 1)), f"episode {number} has other rewards"
            assert episode.terminated.tolist() == [False] * (length - 1) + [True], f"episode {number} does not end"
        dataset.close()
        new, self.recorded = found - self.recorded, found
        return f"{new:4d} new episodes, {found:5d} in all, none lost"


def kill(faults: Faults, generator: random.Random) -> str:
    process = faults.start()
    faults.wait_for_episodes(process, 1)
    time.sleep(generator.uniform(0, 0.5))
    assert process.poll() is None, process.communicate()[1]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return faults.check()


def fill_disk(folder: Path, data_format: str, megabytes: int, briefly: bool) -> str:
    with disk(folder, 64 if briefly else megabytes) as place:
        faults = Faults(place, data_format)
        process = faults.start()
        try:
            if briefly:
                faults.wait_for_episodes(process, 5)
                fill(place / "filler")
                time.sleep(FULL_SECONDS)
                (place / "filler").unlink()
            message = process.communicate(timeout=300)[1].splitlines()
        finally:
            process.kill()
        assert process.returncode == 1, f"exit status {process.returncode}: {message[-3:]}"
        lines = [line for line in message if not line[:2].isdigit()]  # without the progress
        assert len(lines) == 1, f"{len(lines)} lines: {lines[:3]}"
        assert "no space left on the disk" in lines[0], lines
        result = faults.check()
        assert not list(faults.out.rglob("*deft-partial*")), "something unfinished is left"
        # With room again, the recording continues.
        subprocess.run(["mount", "-o", "remount,size=64m", place], check=True)
        return f"{result}; then {kill(faults, random.Random(0)).strip()}"


@contextlib.contextmanager
def disk(folder: Path, megabytes: int) -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(dir=folder))
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def fill(path: Path) -> None:
    """Take all the space that is left."""
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--disks", type=int, default=5, help="the last of them is full for half a second only")
    parser.add_argument("--formats", nargs="+", default=["minari", "lerobot"])
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for data_format in arguments.formats:
        generator = random.Random(arguments.seed)
        with tempfile.TemporaryDirectory() as name:
            faults = Faults(Path(name), data_format)
            for number in range(arguments.kills):
                print(f"{data_format}, kill {number + 1:2d}: {kill(faults, generator)}", flush=True)
            for number in range(arguments.disks):
                briefly = number == arguments.disks - 1
                megabytes = DISK_MEGABYTES[number % len(DISK_MEGABYTES)]
                kind = f"disk full for {FULL_SECONDS} s" if briefly else f"disk of {megabytes} MB"
                print(f"{data_format}, {kind}: {fill_disk(Path(name), data_format, megabytes, briefly)}", flush=True)
    print("no whole episode was lost")


if __name__ == "__main__":
    import collect_faults  # under its own name, for the class that Gymnasium finds

    collect_faults.main()
