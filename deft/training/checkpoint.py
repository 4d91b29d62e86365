"""Checkpoints on disk: one layout, written beside their place and renamed in, so that a whole one is all there ever is.

    checkpoint-{step}/model.pt            the policy's weights and normalisation
    checkpoint-{step}/training_state.pt   optimizer, schedules, environments, buffer, random state, counters
    checkpoint-{step}/metrics.pt          the latest metrics
    checkpoint-{step}/process-{rank}.pt   what each further process of the run keeps for itself
    best -> checkpoint-{step}             the best by evaluation

Everything is loaded as plain tensors and data (`weights_only`), onto the CPU first.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deft.errors import InputError, RunError
from deft.models.policy import Policy
from deft.training import sharding

FORMAT = "deft-checkpoint-1"
MODEL, TRAINING_STATE, METRICS = "model.pt", "training_state.pt", "metrics.pt"
BEST = "best"
_NAME = re.compile(r"checkpoint-(\d+)")
_TEMPORARY = ".tmp-"


def save_checkpoint(
    run_dir: Path,
    step: int,
    model: dict[str, Tensor],
    training_state: dict[str, Any],
    metrics: dict[str, Any],
    name: str | None = None,
    write_more: Callable[[Path], None] | None = None,
) -> Path:
    """Write `checkpoint-{step}` (or a folder of another name), whole or not at all.

    `write_more` is called with the folder, for what a kind of policy keeps beside these files.
    """
    final = run_dir / (name or f"checkpoint-{step}")
    if final.exists() and not (final / MODEL).is_file():
        raise InputError(f"{final}: exists and is not a checkpoint; it is not replaced")
    temporary = run_dir / f"{_TEMPORARY}checkpoint-{step}-{os.getpid()}"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        parts = {MODEL: model, TRAINING_STATE: {"format": FORMAT, **training_state}, METRICS: metrics}
        for name, content in parts.items():
            with open(temporary / name, "wb") as file:
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
        if write_more is not None:
            write_more(temporary)
            for path in temporary.rglob("*"):  # on the disk before the folder has its name
                _sync(path)
        if final.exists():  # saved at this step before: step aside, never a moment without either
            aside = run_dir / f"{_TEMPORARY}replaced-{final.name}-{os.getpid()}"
            os.replace(final, aside)
            os.replace(temporary, final)
            shutil.rmtree(aside, ignore_errors=True)
        else:
            os.replace(temporary, final)
        _sync(run_dir)
    except (OSError, RuntimeError) as error:  # torch reports a failed write as a RuntimeError
        shutil.rmtree(temporary, ignore_errors=True)
        reason = "no space left on the disk" if _is_disk_full(error) else " ".join(str(error).split())[:200]
        raise RunError(
            f"checkpoint-{step} could not be written to {run_dir}: {reason}; earlier ones are kept"
        ) from error
    return final


def write_process_part(run_dir: Path, step: int, rank: int, content: dict[str, Any]) -> None:
    """What one of several processes keeps, beside the checkpoint's place; the first process then moves it in."""
    with open(run_dir / f"{_TEMPORARY}{_process_file(rank)}-{step}", "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


def move_process_parts(run_dir: Path, step: int, count: int, folder: Path) -> None:
    """Move in what the processes after the first have written."""
    for rank in range(1, count):
        os.replace(run_dir / f"{_TEMPORARY}{_process_file(rank)}-{step}", folder / _process_file(rank))


def load_process_part(checkpoint: Path, rank: int) -> dict[str, Any] | None:
    """What this process had kept; None where the run had fewer."""
    return load_part(checkpoint, _process_file(rank)) if (checkpoint / _process_file(rank)).is_file() else None


def _process_file(rank: int) -> str:
    return f"process-{rank}.pt"


@contextlib.contextmanager
def folder_lock(run_dir: Path) -> Iterator[None]:
    """Hold a run folder for this process; a second one is refused. The system frees it however the process ends."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        folder = os.open(run_dir, os.O_RDONLY)
    except OSError as error:
        raise InputError(f"output_dir: {run_dir} cannot be written: {error.strerror or error}") from error
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"output_dir: another process is training in {run_dir}; wait for it, or use another"
            ) from None
        yield
    finally:
        os.close(folder)


def mark_best(run_dir: Path, checkpoint: Path) -> None:
    """Point `best` at a checkpoint, in one step."""
    link = run_dir / f"{_TEMPORARY}best-{os.getpid()}"
    try:
        link.unlink(missing_ok=True)
        link.symlink_to(checkpoint.name, target_is_directory=True)
        os.replace(link, run_dir / BEST)
    except OSError as error:
        link.unlink(missing_ok=True)
        raise RunError(f"{run_dir / BEST} cannot be made a link to {checkpoint.name}: {error.strerror}") from error


def prune_checkpoints(run_dir: Path, keep: int, needed: Iterable[int] = ()) -> None:
    """Delete all but the latest `keep` checkpoints, the best, and those of the steps that are still needed."""
    kept = {run_dir.resolve() / f"checkpoint-{step}" for step in needed}
    if (run_dir / BEST).is_symlink():
        kept.add((run_dir / BEST).resolve())
    for path in list_checkpoints(run_dir)[:-keep]:
        if path.resolve() not in kept:
            # Renamed first: a deletion that is cut short leaves nothing that looks like a checkpoint.
            doomed = run_dir / f"{_TEMPORARY}deleted-{path.name}"
            os.replace(path, doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def clean_temporary(run_dir: Path) -> None:
    """Remove what a killed process left half-written."""
    for path in run_dir.glob(f"{_TEMPORARY}*"):
        if path.is_dir() and not path.is_symlink():
            replaced = re.fullmatch(re.escape(_TEMPORARY) + r"replaced-(.+)-\d+", path.name)
            if replaced and not (run_dir / replaced[1]).exists():
                os.replace(path, run_dir / replaced[1])  # killed between the two renames
            else:
                shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def list_checkpoints(run_dir: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    found = [(int(match[1]), path) for path in run_dir.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint that a path means: itself, or the latest of a run folder."""
    path = Path(path)
    if not os.path.exists(path):  # also of a name too long for one
        raise InputError(f"{path}: there is no such checkpoint or run folder")
    if (path / MODEL).is_file():
        return path.resolve()
    if path.is_file():
        raise InputError(f"{path}: a checkpoint is a folder with {MODEL} in it; give that folder")
    checkpoints = list_checkpoints(path)
    if not checkpoints:
        raise InputError(f"{path}: neither a checkpoint (no {MODEL}) nor a run folder with checkpoints in it")
    return checkpoints[-1]


def find_best(path: str | Path) -> Path:
    """The checkpoint that a path means: itself, or of a run folder the best, where one is marked, else the latest."""
    best = Path(path) / BEST
    return find_checkpoint(best if os.path.exists(best) else path)


def latest_whole_checkpoint(run_dir: Path, parts: Iterable[str] = ()) -> tuple[Path | None, list[str]]:
    """The latest checkpoint that can be read, and a line on each later one that cannot.

    `parts` are the files that a kind of run keeps beside weights and training state, and cannot go on without.
    """
    problems = []
    for path in reversed(list_checkpoints(run_dir)):
        try:
            load_training_state(path)
            for name in (MODEL, *parts):
                load_part(path, name)
        except InputError as error:
            problems.append(str(error))
        else:
            return path, problems
    return None, problems


def load_part(checkpoint: Path, name: str) -> Any:
    """One file of a checkpoint, on the CPU, tensors and plain data only."""
    path = checkpoint / name
    if not path.is_file():
        raise InputError(f"{path}: missing; {checkpoint.name} is not a whole checkpoint")
    return load_tensors(path)


def load_tensors(path: Path) -> Any:
    """A file written by torch.save, refused in one line when it is damaged or holds anything but data."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except Exception as error:  # damaged bytes make torch raise anything
        if isinstance(error, pickle.UnpicklingError) and zipfile.is_zipfile(path):
            raise InputError(
                f"{path}: holds Python objects besides tensors and plain data, and is not loaded"
            ) from error
        raise InputError(f"{path}: damaged, cut short, or not a file written by torch.save") from error


def load_training_state(checkpoint: Path) -> dict[str, Any]:
    """The training state of a checkpoint that Deft wrote."""
    state = load_part(checkpoint, TRAINING_STATE)
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise InputError(f"{checkpoint}: not a Deft checkpoint (format {found!r}, expected {FORMAT!r})")
    return state


def load_weights(module: nn.Module, weights: dict[str, Tensor], source: str | Path) -> None:
    """Load weights into a module, strict about keys and shapes, naming what does not fit."""
    weights = check_weights(module, weights, source)
    if sharding.is_sharded(module):
        sharding.load_whole_weights(module, weights)
    else:
        module.load_state_dict(weights)


def check_weights(module: nn.Module, weights: dict[str, Tensor], source: str | Path) -> dict[str, Tensor]:
    """The weights, with what an earlier version did not save yet; an error names what does not fit the module."""
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise InputError(f"{source}: expected a state dict of tensors, found {type(weights).__name__}")
    if isinstance(module, Policy):
        weights = module.complete_weights(weights)
    own = module.state_dict()
    problems = []
    for label, names in (("missing", own.keys() - weights.keys()), ("unexpected", weights.keys() - own.keys())):
        if names:
            problems.append(f"{label} {_few(sorted(names))}")
    shapes = [
        f"{name} is {tuple(weights[name].shape)}, expected {tuple(own[name].shape)}"
        for name in own.keys() & weights.keys()
        if weights[name].shape != own[name].shape
    ]
    if shapes:
        problems.append(_few(sorted(shapes)))
    if problems:
        advice = (
            "it is of another algorithm, of other observations or actions, or of other sizes (hidden_dim, num_layers, "
            "num_seeds)"
        )
        raise InputError(f"{source}: does not fit this policy; {advice}: {'; '.join(problems)}")
    return weights


def _few(names: list[str], count: int = 3) -> str:
    rest = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + rest


def _is_disk_full(error: BaseException) -> bool:
    causes: list[BaseException | None] = [error, error.__cause__, error.__context__]
    full = (errno.ENOSPC, errno.EDQUOT)
    return any(isinstance(cause, OSError) and cause.errno in full for cause in causes) or "No space" in str(error)


def _sync(path: Path) -> None:
    with contextlib.suppress(OSError):  # some file systems cannot sync a directory
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
