"""Before a recipe is trained: check what it needs, and make the dataset and the policy that it starts from.

`deft train --recipe NAME` calls `prepare`. The commands are those of the recipe's header; one whose result exists is
skipped, and an interrupted one is continued.
"""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deft.config.loading import PRESETS
from deft.config.output_base import below_output_base
from deft.config.recipes import Recipe
from deft.config.settings import GPU_VECTORS, OfflineRunConfig, RunConfig
from deft.config.training import Training, parse_training
from deft.data.datasets import lerobot, minari
from deft.envs.suites import find_suite
from deft.errors import InputError
from deft.runs import checkpoint
from deft.runs.json_files import read_json
from deft.runs.record import COMPLETE, RECORD_FILE

USES = ("--policy", "--model-path", "--dataset")  # flags of a command that name what it reads
Run = Callable[[list[str]], Any]
Extras = Mapping[str, Mapping[str, Any]]  # by name, as `deft.doctor.extras` returns them


@dataclass
class Step:
    """A command of a recipe, the dataset or run that it makes, and the paths that it reads."""

    words: list[str]
    path: str
    uses: set[str]


def prepare(recipe: Recipe, training: Training, run: Run, extras: Extras) -> None:
    """Raise an error if this machine lacks something, and `run` the commands whose results are missing.

    Commands of a copy of a recipe, which anyone may have written, are not run but shown; nor are those of several
    processes, which would all run them.
    """
    assert training.source is not None
    name, config = training.source.stem, training.config
    check_machine(name, recipe, config, extras)
    for step, state in unfinished(recipe, config):
        command = f"deft {shlex.join(step.words)}"
        if training.source.parent != PRESETS or int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise InputError(f"{name}: {step.path} {state}; run this first: {command}")
        print(f"{name}: {step.path} {state}; running first: {command}", flush=True)
        run(step.words)


def check_machine(name: str, recipe: Recipe, config: Any, extras: Extras) -> None:
    """Raise an error if an extra, a suite or a GPU that the recipe needs with these settings is missing."""
    on_gpu = isinstance(config, RunConfig) and config.env.vector in GPU_VECTORS
    if on_gpu and config.device != "cpu" and not torch.cuda.is_available():
        raise InputError(
            f"recipe {name}: needs a CUDA GPU (vector: {config.env.vector}), and torch finds none; on the CPU, slowly: "
            "--vector process --num-envs 32"
        )
    for extra in recipe.extras:
        found = extras.get(extra, {"missing": []})
        if not found["missing"] or (extra == "warp" and not on_gpu):
            continue
        if extra != "data" or reads_data(recipe, config):
            raise InputError(f"recipe {name}: needs {', '.join(found['missing'])}: {found['install']}")
    for suite in recipe.suites:
        find_suite(suite).check_installed(f"recipe {name}")


def reads_data(recipe: Recipe, config: Any) -> bool:
    """Whether a dataset is read or recorded; not by RL from a policy that is there."""
    if not isinstance(config, RunConfig) or _prior_data(config) is not None:
        return True
    return next(unfinished(recipe, config), None) is not None


def unfinished(recipe: Recipe, config: Any) -> Iterator[tuple[Step, str]]:
    """Yield the commands to run for these settings, in order, with the state of their results after those before."""
    recorded: dict[str, int] = {}  # episodes that a dataset has after the commands so far
    for step in needed(recipe, config):
        if step.words[0] == "train":
            state = state_of_run(Path(step.path))
            if state:
                resumes = ["--auto-resume"] * bool(checkpoint.list_checkpoints(Path(step.path)))
                yield Step([*step.words, *resumes], step.path, step.uses), state
            continue
        wanted = recorded[step.path] = recorded.get(step.path, 0) + int(flag(step.words, "--episodes"))
        found = lerobot.recorded_episodes(step.path) or minari.recorded_episodes(step.path)
        if found < wanted:
            state = f"has {found} of {wanted} episodes" if found else "is missing"
            yield Step(remaining(step.words, wanted - found, found), step.path, step.uses), state


def needed(recipe: Recipe, config: Any) -> list[Step]:
    """Return the commands that make what these settings read: flags may name another dataset or policy."""
    paths = {config.dataset.path} if isinstance(config, OfflineRunConfig) else set()
    if isinstance(config, OfflineRunConfig | RunConfig) and config.resume is None:
        paths |= {config.model_path, _prior_data(config)}
    steps = []
    for step in reversed([make_step(command) for command in recipe.prepare]):
        if step.path in paths:
            steps.append(step)
            paths |= step.uses
    return steps[::-1]


def _prior_data(config: Any) -> str | None:
    """The dataset that an online algorithm reads beside its own episodes."""
    return getattr(config.algorithm.cfg, "prior_data", None)


def make_step(command: str) -> Step:
    """Return a command of a header as a step."""
    words = words_of(command)
    if words[0] == "train":
        config = parse_training(words[1:]).config
        return Step(words, str(config.output_dir), set())  # a recipe itself, which prepares what it reads
    uses = {value for name, value in itertools.pairwise(words) if name in USES}
    return Step(words, flag(words, "--out"), uses)


def words_of(command: str) -> list[str]:
    """Return the words of a command after `deft`, with paths in `outputs` below `OUTPUT_BASE`."""
    return [below_output_base(word) for word in shlex.split(command)[1:]]


def flag(words: list[str], name: str) -> str:
    """Return the value of a flag of a command."""
    return words[words.index(name) + 1]


def remaining(words: list[str], episodes: int, found: int) -> list[str]:
    """Return a `collect` command that records this many more episodes into a dataset that has `found`."""
    words = list(words)
    words[words.index("--episodes") + 1] = str(episodes)
    return [*words, "--append"] if found and "--append" not in words else words


def state_of_run(folder: Path) -> str:
    """Return what is wrong with a run to start from, for a message; empty if it is complete."""
    if not checkpoint.list_checkpoints(folder):
        return "is missing"
    record = read_json(folder / RECORD_FILE)
    is_complete = not record or record["sessions"][-1]["status"] == COMPLETE  # earlier versions wrote no record
    return "" if is_complete else "is not complete"
