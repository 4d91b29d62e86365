"""Mutated configs, dataset metadata and checkpoints: each must load or end in one clear line, quickly, in its folder.

Every case copies a valid input into a fresh folder, damages it (values replaced, keys removed or doubled, deep nesting,
huge numbers, YAML aliases, bytes flipped, files cut), and opens it by the call that a command uses. A case fails where
another exception than Deft's own comes out, or a message that is more than a line or quotes an exception, where it
takes more than 10 seconds of CPU time, where a file outside its folder is opened for writing, or where the process
ends. Cases run one after another in a worker process. The number of a case repeats it alone.

    python benchmarks/fuzz_inputs.py --cases 10000 --json fuzz.json
    python benchmarks/fuzz_inputs.py --only 1234 --kind lerobot
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import json
import logging
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import yaml
from common import print_machine, print_table, write_json

from deft import PPOTrainer, RLConfig, load_dataset
from deft.config.loading import load_config
from deft.errors import DeftError
from deft.evaluation.evaluate import evaluate_run

SECONDS = 10
HANGS_AFTER = 120  # seconds of a case that no signal interrupts, on a machine that may be busy
MEMORY = 8 * 2**30
LONGEST_MESSAGE = 1000  # characters; paths and lists of names are part of it
EXCEPTION_NAME = re.compile(r"\b[A-Z]\w*(?:Error|Exception|Warning)\b(?! \()")
ODD: list[Any] = [None, True, -1, 0, 1e308, 10**18, 10**400, "", "../../x", "/etc/hostname", "\x00", "a\nb", "é" * 50]
ODD += [[], {}, [[[]]], {"a": {}}, float("nan"), float("inf"), "1.0", "False", "{episode_index:2000000000d}", [1, "a"]]


class TooSlow(Exception):
    """A case took longer than it may."""


class WroteOutside(Exception):
    """A case opened a file for writing that is not in its folder."""


# ------------------------------------------------------------------------------------------------------ mutations


def locations(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container and key of a nested value."""
    stack = [value]
    while stack:
        value = stack.pop()
        entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, part in list(entries):
            yield value, key
            stack.append(part)


def mutate(value: Any, chance: random.Random) -> Any:
    """A copy of plain data with one to three changes."""
    value = copy.deepcopy(value)
    for _ in range(chance.randint(1, 3)):
        found = list(locations(value))
        if not found:
            return chance.choice(ODD)
        container, key = chance.choice(found)
        change = chance.randrange(5)
        if change == 0:
            container[key] = copy.deepcopy(chance.choice(ODD))
        elif change == 1 and isinstance(container, dict):
            del container[key]
        elif change == 2:
            other, at = chance.choice(found)
            with contextlib.suppress(KeyError, IndexError, RecursionError):
                container[key] = copy.deepcopy(other[at])
        elif change == 3:
            deep: Any = 0
            for _ in range(chance.choice([10, 2000])):
                deep = [deep] if chance.random() < 0.5 else {"a": deep}
            container[key] = deep
        elif isinstance(container, dict):
            container[chance.choice(["", "x", "a/b", str(key) * 3])] = container[key]
    return value


def dump(value: Any) -> str:
    """JSON of any depth."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        return json.dumps(value)
    except ValueError:
        return "{"
    finally:
        sys.setrecursionlimit(limit)


def damage(path: Path, chance: random.Random) -> None:
    """Flip a bit, cut the file short, or put other bytes into it."""
    content = bytearray(path.read_bytes())
    change = chance.randrange(4)
    if change == 0 or not content:
        path.write_bytes(bytes(content[: chance.randrange(len(content) + 1)]))
        return
    start = chance.randrange(len(content))
    if change == 1:
        content[start] ^= 1 << chance.randrange(8)
    elif change == 2:
        content[start : start + 8] = chance.randbytes(8)
    else:
        content[start:start] = chance.randbytes(chance.randrange(1, 64))
    path.write_bytes(bytes(content))


BOMB = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{chr(98 + level)}: &{chr(98 + level)} [{','.join(['*' + chr(97 + level)] * 9)}]\n" for level in range(9)
)


# ------------------------------------------------------------------------------------------------- kinds of input


def change_config(folder: Path, chance: random.Random) -> None:
    """A run's config.yaml, changed as data or as text."""
    path = folder / "config.yaml"
    text = path.read_text()
    change = chance.randrange(8)
    if change == 0:
        path.write_text(BOMB + text)
    elif change == 1:
        damage(path, chance)
    elif change == 2:
        path.write_text("[" * chance.choice([50, 5000]) + text)
    else:
        path.write_text(dump(mutate(yaml.safe_load(text), chance)))  # JSON is YAML


def change_json(folder: Path, chance: random.Random) -> None:
    """One of the JSON files, or bytes of any file."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    documents = [path for path in files if path.suffix in (".json", ".jsonl")]
    if not documents or chance.random() < 0.2:
        damage(chance.choice(files), chance)
        return
    path = chance.choice(documents)
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    row = chance.randrange(len(lines))
    found = json.loads(lines[row])
    inner = [key for key, value in found.items() if isinstance(value, str) and value.startswith("{")]
    if inner and chance.random() < 0.5:  # Minari keeps spaces and the environment as JSON in a string
        key = chance.choice(inner)
        found[key] = dump(mutate(json.loads(found[key]), chance))
    else:
        found = mutate(found, chance)
    lines[row] = dump(found)
    if chance.random() < 0.1:
        lines.append(lines[row])  # an episode listed twice
    path.write_text("\n".join(lines) + "\n")


def change_checkpoint(folder: Path, chance: random.Random) -> None:
    """The settings of a run, or bytes of one of its files."""
    if chance.random() < 0.3:
        change_config(folder, chance)
        return
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.parent != folder)
    damage(chance.choice(files), chance)


def open_config(folder: Path) -> None:
    load_config(folder / "config.yaml")


def open_dataset(folder: Path) -> None:
    with contextlib.closing(load_dataset(folder)) as dataset:
        for index in range(min(2, dataset.num_episodes)):
            dataset.episode(index)


def open_checkpoint(folder: Path) -> None:
    evaluate_run(folder, episodes=1)


def make_run(folder: Path) -> None:
    """A finished run of a few steps."""
    config = RLConfig(algorithm="ppo", total_timesteps=64, rollout_steps=32, output_dir=str(folder), eval_freq=0)
    trainer = PPOTrainer(env=gymnasium.make("CartPole-v1", max_episode_steps=10), config=config)
    trainer.train()
    trainer.close()
    for name in ("tensorboard", "logs", "plots"):
        shutil.rmtree(folder / name, ignore_errors=True)


def make_config(folder: Path) -> None:
    """The settings of a run."""
    make_run(folder)
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)


def make_dataset(kind: str, folder: Path) -> None:
    """Two short episodes."""
    from deft import DatasetWriter

    generator = np.random.default_rng(0)
    with DatasetWriter(folder, format=kind, fps=10) as writer:
        for length in (6, 4):
            writer.add_episode(
                observations={"state": generator.normal(size=(length + 1, 3)).astype(np.float32)},
                actions=generator.uniform(-1, 1, (length, 2)).astype(np.float32),
                rewards=np.ones(length, np.float32),
                terminations=np.arange(length) == length - 1,
                instruction="reach the target",
            )


def make_minari(folder: Path) -> None:
    """A Minari dataset that names its environment."""
    make_dataset("minari", folder)
    path = folder / "data" / "metadata.json"
    spec = json.dumps({"id": "Pendulum-v1", "kwargs": {"g": 9.81}})
    scores = {"ref_min_score": -1.0, "ref_max_score": 1.0}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"env_spec": spec} | scores))


def make_lerobot_v2(folder: Path) -> None:
    """A LeRobot dataset of version 2.1: a table for each episode, and lists in jsonl files."""
    from pyarrow import compute, parquet

    make_dataset("lerobot", folder)
    table = parquet.read_table(folder / "data" / "chunk-000" / "file-000.parquet")
    info = json.loads((folder / "meta" / "info.json").read_text())
    info |= {"codebase_version": "v2.1", "data_path": "data/episode_{episode_index:06d}.parquet", "chunks_size": 1000}
    action = json.loads((folder / "meta" / "stats.json").read_text())["action"]
    for name in ("data", "meta"):
        shutil.rmtree(folder / name)
        (folder / name).mkdir()
    lines: dict[str, list[Any]] = {"tasks": [{"task_index": 0, "task": "reach the target"}]}
    for index in range(2):
        rows = table.filter(compute.equal(table["episode_index"], index))
        parquet.write_table(rows, folder / "data" / f"episode_{index:06d}.parquet")
        lines.setdefault("episodes", []).append({"episode_index": index, "length": len(rows), "tasks": []})
        lines.setdefault("episodes_stats", []).append({"episode_index": index, "stats": {"action": action}})
    (folder / "meta" / "info.json").write_text(json.dumps(info))
    for name, found in lines.items():
        (folder / "meta" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in found))


Kind = tuple[Callable[[Path], None], Callable[[Path, random.Random], None], Callable[[Path], None]]
KINDS: dict[str, Kind] = {
    "config": (make_config, change_config, open_config),
    "minari": (make_minari, change_json, open_dataset),
    "lerobot": (partial(make_dataset, "lerobot"), change_json, open_dataset),
    "lerobot-v2": (make_lerobot_v2, change_json, open_dataset),
    "checkpoint": (make_run, change_checkpoint, open_checkpoint),
}


# -------------------------------------------------------------------------------------------------------- one case


class Guard:
    """Raises where a file outside the folder of the case is opened for writing."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None or event != "open":
            return
        path, mode, flags = arguments
        writes = (isinstance(mode, str) and any(letter in mode for letter in "wax+")) or bool(
            isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        )
        if writes and isinstance(path, str | bytes) and os.fsdecode(path) != os.devnull:
            place = os.path.realpath(os.fsdecode(path))
            if not place.startswith((str(self.folder), "/proc/", "/dev/")) and "__pycache__" not in place:
                raise WroteOutside(place)


def run_case(kind: str, source: Path, number: int, seed: int, root: Path, guard: Guard) -> tuple[str, str]:
    """Return the outcome of one case: `loaded`, `rejected` or `failed`, and the message."""
    _, change, opens = KINDS[kind]
    folder = Path(os.path.realpath(root)) / f"{kind}-{number}-v0"
    shutil.copytree(source, folder)

    def too_slow(*_: Any) -> None:
        raise TooSlow

    try:
        change(folder, random.Random(f"{kind}-{number}" if seed == 0 else f"{kind}-{number}-{seed}"))
        signal.signal(signal.SIGPROF, too_slow)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # CPU time: other processes of the machine do not count
        guard.folder = folder
        opens(folder)
        return "loaded", ""
    except DeftError as error:
        return _judged(str(error))
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        last = traceback.extract_tb(error.__traceback__)[-1]
        return "failed", f"{type(error).__name__}: {str(error)[:150]} ({Path(last.filename).name}:{last.lineno})"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        guard.folder = None
        shutil.rmtree(folder, ignore_errors=True)


def _judged(message: str) -> tuple[str, str]:
    """A message is clear if it is one line, not too long, and not the name and text of another library's exception."""
    if not message.isprintable():
        return "failed", f"more than one line: {message!r}"
    if len(message) > LONGEST_MESSAGE:
        return "failed", f"{len(message)} characters: {message[:200]}"
    if raw := EXCEPTION_NAME.search(message):
        return "failed", f"the exception of another library ({raw[0]}): {message}"
    return "rejected", message


def run_cases(cases: Sequence[tuple[str, int]], seed: int, root: Path, pipe: Connection) -> None:
    """In a process of its own: run cases and send the outcome of each, with the CPU time it took."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    guard = Guard()
    for kind, number in cases:
        started = time.process_time()
        outcome, message = run_case(kind, root / f"{kind}-v0", number, seed, root, guard)
        pipe.send((outcome, message, time.process_time() - started))
    pipe.close()


def outcomes(cases: Sequence[tuple[str, int]], seed: int, root: Path) -> Iterator[tuple[str, str, float]]:
    """Return the outcome of each case. A worker that dies or hangs in one is replaced, and the case has failed."""
    fork, done = multiprocessing.get_context("fork"), 0
    while done < len(cases):
        reader, writer = fork.Pipe(duplex=False)
        worker = fork.Process(target=run_cases, args=(cases[done:], seed, root, writer))
        worker.start()
        writer.close()
        try:
            while done < len(cases) and reader.poll(HANGS_AFTER):
                yield reader.recv()
                done += 1
            if done < len(cases):
                yield "failed", f"still running after {HANGS_AFTER} s", float(HANGS_AFTER)
                done += 1
        except EOFError:
            worker.join()
            yield "failed", f"ended the process (exit code {worker.exitcode})", 0.0
            done += 1
        finally:
            worker.kill()
            worker.join()


def make_sources(kinds: Sequence[str], root: Path) -> None:
    """Make the valid input of each kind."""
    for kind in kinds:
        KINDS[kind][0](root / f"{kind}-v0")


def fuzz(kinds: Sequence[str], numbers: Sequence[int], seed: int = 0) -> dict[str, Any]:
    """Run the cases of some kinds: counts by kind and outcome, failures with their cases, and the slowest case."""
    cases = [(kind, number) for kind in kinds for number in numbers]
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    failures: dict[str, list[str]] = {}
    messages: list[str] = []
    slowest, slowest_case = 0.0, ""
    with tempfile.TemporaryDirectory() as name:
        # In a process of its own: threads of torch that have run here would hang in workers that are forked later.
        maker = multiprocessing.get_context("fork").Process(target=make_sources, args=(kinds, Path(name)))
        maker.start()
        maker.join()
        if maker.exitcode:
            raise SystemExit("the valid inputs could not be made")
        for (kind, number), (outcome, message, seconds) in zip(cases, outcomes(cases, seed, Path(name)), strict=True):
            counts[kind, outcome] += 1
            if seconds > slowest:
                slowest, slowest_case = seconds, f"{kind} {number}"
            if outcome == "failed":
                failures.setdefault(f"{kind}: {message}", []).append(f"{kind} {number}")
            messages.append(f"{kind} {number}: {outcome} {message}")
    return {"counts": counts, "failures": failures, "slowest": (slowest, slowest_case), "messages": messages}


def main() -> None:
    """Run the cases and print the outcomes; exit status 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000, help="in all, over the kinds in turn")
    parser.add_argument("--kind", choices=list(KINDS), help="this kind alone")
    parser.add_argument("--only", type=int, help="the case of this number alone")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations")
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--messages", help="write the outcome of every case here")
    options = parser.parse_args()
    kinds = [options.kind] if options.kind else list(KINDS)
    numbers = range(options.cases // len(kinds)) if options.only is None else range(options.only, options.only + 1)
    print_machine()
    started = time.monotonic()
    logging.disable(logging.CRITICAL)
    found = fuzz(kinds, numbers, options.seed)
    if options.only is not None:
        print("\n".join(found["messages"]))
    if options.messages:
        Path(options.messages).write_text("\n".join(found["messages"]) + "\n")
    for message, cases in sorted(found["failures"].items(), key=lambda item: -len(item[1])):
        print(f"{len(cases):5} {message} (case {cases[0]})")
    counts, names = found["counts"], ("loaded", "rejected", "failed")
    print_table(["input", *names], [[kind, *(counts[kind, name] for name in names)] for kind in kinds])
    slowest, slowest_case = found["slowest"]
    elapsed = time.monotonic() - started
    print(f"slowest case: {slowest:.1f} s ({slowest_case}); seed {options.seed}; {elapsed:.0f} s in all")
    write_json(
        options.json,
        {"counts": {" ".join(key): value for key, value in counts.items()}, "slowest_s": slowest, "seed": options.seed},
    )
    sys.exit(1 if found["failures"] else 0)


if __name__ == "__main__":
    main()
