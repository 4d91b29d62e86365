"""Checkpoints on disk: one layout, written to a temporary directory and renamed, so that a checkpoint is complete.

    checkpoint-{step}/model.pt            the policy's weights and normalisation
    checkpoint-{step}/training_state.pt   optimizer, schedules, environments, buffer, random state, counters
    checkpoint-{step}/metrics.pt          the latest metrics
    checkpoint-{step}/spaces.json         the observations and actions that the policy was made for
    checkpoint-{step}/process-{rank}.pt   what each further process of the run keeps for itself
    checkpoint-{step}/deft_manifest.json  size and hash of each file, verified on load
    best -> checkpoint-{step}             the best by evaluation

Everything is loaded as plain tensors and data (`weights_only`), onto the CPU first. Only files that Deft wrote are
deleted: those in the manifest, or the known names in a checkpoint of an earlier version.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from deft.errors import InputError, RunError
from deft.models.policy import Policy
from deft.ownership import (
    CHECKPOINT_FORMAT,
    MANIFEST,
    HashingFile,
    check_output_path,
    delete_files,
    free_place,
    has_format,
    read_manifest,
    relative_files,
    verify,
    verify_folder,
    write_manifest,
)
from deft.runs import sharding
from deft.runs.policy_spaces import SPACES_FILE, PolicySpaces

log = logging.getLogger(__name__)
MODEL, TRAINING_STATE, METRICS = "model.pt", "training_state.pt", "metrics.pt"
MODEL_SAFETENSORS = "model.safetensors"  # the weights in a folder of `deft export`
BEST = "best"
_NAME = re.compile(r"checkpoint-(\d+)")
_TEMPORARY = ".tmp-"
# What Deft writes into a checkpoint: for those of earlier versions, and unfinished ones, which have no manifest.
_KNOWN_FILES = re.compile(
    r"(model|training_state|metrics|process-\d+|explorer|buffers)\.pt|explorer/(model|explorer)\.pt|"
    r"peft_adapter/(adapter_config\.json|adapter_model\.safetensors|README\.md)|"
    rf"{re.escape(SPACES_FILE)}|{re.escape(MANIFEST)}"
)


def save_checkpoint(
    run_dir: Path,
    step: int,
    model: dict[str, Tensor],
    training_state: dict[str, Any],
    metrics: dict[str, Any],
    name: str | None = None,
    write_more: Callable[[Path], None] | None = None,
    spaces: PolicySpaces | None = None,
) -> Path:
    """Write `checkpoint-{step}` (or a directory of another name), completely or not at all.

    `write_more` is called with the directory and writes further files.
    """
    final = run_dir / (name or f"checkpoint-{step}")
    is_foreign = os.path.lexists(final) and not _own_files(final)
    if is_foreign and name is not None:
        raise InputError(f"{final}: exists and is not a checkpoint; it is not replaced")
    temporary = run_dir / f"{_TEMPORARY}checkpoint-{step}-{os.getpid()}"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        parts = {MODEL: model, TRAINING_STATE: {"format": CHECKPOINT_FORMAT, **training_state}, METRICS: metrics}
        hashed = {}
        for part, content in parts.items():
            with open(temporary / part, "wb") as file:
                hashing = HashingFile(file)
                torch.save(content, hashing)  # type: ignore[arg-type]
                file.flush()
                os.fsync(file.fileno())
                hashed[part] = hashing.entry
        if spaces is not None:
            spaces.write(temporary)
        if write_more is not None:
            write_more(temporary)
        if spaces is not None or write_more is not None:
            for path in temporary.rglob("*"):  # on the disk before the directory has its name
                _sync(path)
        write_manifest(temporary, hashed)
        if is_foreign:
            _keep_aside(final, final)
        if final.exists():  # saved at this step before: renamed first, so that one of the two always exists
            aside = run_dir / f"{_TEMPORARY}replaced-{final.name}-{os.getpid()}"
            os.replace(final, aside)
            os.replace(temporary, final)
            _delete_own(aside, final)
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
    """Write the state of one of several processes beside the checkpoint; the first process moves it in."""
    with open(run_dir / f"{_TEMPORARY}{_process_file(rank)}-{step}", "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


def move_process_parts(run_dir: Path, step: int, count: int, folder: Path) -> None:
    """Move the files of the processes after the first into the checkpoint."""
    for rank in range(1, count):
        os.replace(run_dir / f"{_TEMPORARY}{_process_file(rank)}-{step}", folder / _process_file(rank))


def load_process_part(checkpoint: Path, rank: int) -> dict[str, Any] | None:
    """Return the state of a process; None if the run had fewer processes."""
    return load_part(checkpoint, _process_file(rank)) if (checkpoint / _process_file(rank)).is_file() else None


def _process_file(rank: int) -> str:
    return f"process-{rank}.pt"


@contextlib.contextmanager
def folder_lock(run_dir: Path) -> Iterator[None]:
    """Lock a run directory for this process; an error if another one holds it. The lock ends with the process."""
    check_output_path(run_dir)
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
    """Point the link `best` at a checkpoint, atomically."""
    link, best = run_dir / f"{_TEMPORARY}best-{os.getpid()}", run_dir / BEST
    try:
        if best.exists() and not best.is_symlink():
            _keep_aside(best, best)
        link.unlink(missing_ok=True)
        link.symlink_to(checkpoint.name, target_is_directory=True)
        os.replace(link, best)
    except OSError as error:
        link.unlink(missing_ok=True)
        raise RunError(f"{run_dir / BEST} cannot be made a link to {checkpoint.name}: {error.strerror}") from error


def prune_checkpoints(run_dir: Path, keep: int, step: int, needed: Iterable[int] = ()) -> None:
    """Delete all but the latest `keep` checkpoints up to `step`, the best, and those of the steps still needed.

    Later ones than `step` are not counted: a run that resumed from an earlier checkpoint passed over them.
    """
    kept = {run_dir.resolve() / f"checkpoint-{number}" for number in needed}
    if (run_dir / BEST).is_symlink():
        kept.add((run_dir / BEST).resolve())
    reached = [path for path in list_checkpoints(run_dir) if int(path.name.rpartition("-")[2]) <= step]
    for path in [path for path in reached if _own_files(path)][:-keep]:
        if path.resolve() not in kept:
            delete_checkpoint(path)


def delete_checkpoint(path: Path) -> None:
    """Delete the files of a checkpoint that Deft wrote; other files in it stay where they are, with a warning."""
    if not _own_files(path):
        return
    # Renamed first: a deletion that is interrupted leaves nothing that looks like a checkpoint.
    doomed = path.with_name(f"{_TEMPORARY}deleted-{path.name}")
    os.replace(path, doomed)
    _delete_own(doomed, path)


def clean_temporary(run_dir: Path) -> None:
    """Remove the unfinished files of a killed process, by the names that this module gives them."""
    for path in run_dir.glob(f"{_TEMPORARY}*"):
        name = path.name.removeprefix(_TEMPORARY)
        if not path.is_dir() or path.is_symlink():
            if re.fullmatch(r"process-\d+\.pt-\d+|best-\d+", name):
                path.unlink(missing_ok=True)
        elif re.fullmatch(r"checkpoint-\d+-\d+", name):
            if all(_KNOWN_FILES.fullmatch(file) for file in relative_files(path)):
                shutil.rmtree(path, ignore_errors=True)
        elif deleted := re.fullmatch(r"deleted-(checkpoint-\d+)", name):
            _delete_own(path, run_dir / deleted[1])
        elif replaced := re.fullmatch(r"replaced-(.+)-\d+", name):
            final = run_dir / replaced[1]
            if final.exists():
                _delete_own(path, final)
            else:
                os.replace(path, final)  # killed between the two renames


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first, with damaged ones; other directories are left out."""
    found = [(int(match[1]), path) for path in run_dir.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))]
    return [
        path for _, path in sorted(found) if any((path / name).is_file() for name in (MODEL, TRAINING_STATE, MANIFEST))
    ]


def check_replaceable(existing: list[Path], overwrite: bool) -> None:
    """Raise an error if a new run cannot replace the checkpoints in its directory."""
    foreign = next((path for path in existing if not _own_files(path)), None)
    if foreign is not None:
        raise InputError(
            f"output_dir: {foreign} is not a checkpoint that Deft wrote (or it is damaged), so it is not replaced: "
            "move it away, or give another --output-dir"
        )
    if existing and not overwrite:
        raise InputError(
            f"output_dir: {existing[-1].parent} already holds a run ({existing[-1].name}): --auto-resume continues it, "
            "--overwrite replaces it, or give another --output-dir"
        )


def _own_files(folder: Path) -> list[str]:
    """Return the files in a checkpoint that Deft wrote, those that mark it as Deft's last; none if it is not Deft's.

    Without a manifest: the known names, in a directory whose training state begins with Deft's format.
    """
    if folder.is_symlink() or not folder.is_dir():
        return []
    try:
        listed = read_manifest(folder)
    except InputError:
        listed = None
    if listed is not None:
        return [*listed, MANIFEST]
    if not has_format(folder / TRAINING_STATE):
        return []
    found = [name for name in relative_files(folder) if _KNOWN_FILES.fullmatch(name)]
    return sorted(found, key=lambda name: name == TRAINING_STATE)


def _delete_own(doomed: Path, place: Path) -> None:
    """Delete what Deft wrote in a directory that was renamed from `place`; with other files it is renamed back."""
    delete_files(doomed, _own_files(doomed))
    others = relative_files(doomed)
    if others:
        kept = _keep_aside(doomed, place)
        log.warning("%s: kept %s, which Deft did not write", kept, ", ".join(others[:3]))
    else:
        shutil.rmtree(doomed, ignore_errors=True)  # empty folders at most


def _keep_aside(path: Path, place: Path) -> Path:
    """Rename what Deft did not write to `place`, or to a similar free name."""
    chosen = place if path != place and not os.path.lexists(place) else free_place(place)
    os.replace(path, chosen)
    if path == place:
        log.warning("%s: Deft did not write it; renamed to %s", path, chosen.name)
    return chosen


def step_of(checkpoint: Path) -> int:
    """Return the step in the name of a checkpoint; −1 if it has another name."""
    match = _NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else -1


def find_checkpoint(path: str | Path) -> Path:
    """Return the checkpoint at a path, or the latest one of a run directory."""
    path = Path(path)
    if not os.path.exists(path):  # also of a name too long for one
        raise InputError(
            f"{path}: there is no such checkpoint or run folder; give the output_dir of a run, or a checkpoint in it"
        )
    if is_checkpoint(path):
        return path.resolve()
    if path.is_file():
        raise InputError(f"{path}: a checkpoint is a folder with {MODEL} in it; give that folder")
    checkpoints = list_checkpoints(path)
    if not checkpoints:
        raise InputError(f"{path}: neither a checkpoint (no {MODEL}) nor a run folder with checkpoints in it")
    return checkpoints[-1]


def is_checkpoint(path: Path) -> bool:
    """Return whether a path is a checkpoint directory."""
    return (path / MODEL).is_file()


def find_best(path: str | Path) -> Path:
    """Return the checkpoint at a path, or of a run directory the best one, if one is marked, else the latest.

    `RUN/best` of a run that was never evaluated is its latest checkpoint, with a warning.
    """
    path = Path(path)
    if path.name == BEST and not os.path.lexists(path) and list_checkpoints(path.parent):
        log.warning("%s: no evaluation has chosen a best checkpoint; the latest one is used", path)
        return find_checkpoint(path.parent)
    best = path / BEST
    return find_checkpoint(best if os.path.exists(best) else path)


def latest_whole_checkpoint(run_dir: Path, parts: Iterable[str] = ()) -> tuple[Path | None, list[str]]:
    """Return the latest complete checkpoint, and the problem of each later one.

    `parts` are the files that a run needs beside weights and training state. Files in a manifest are hashed here and
    not again when they are loaded; those of a checkpoint without a manifest are loaded.
    """
    problems = []
    for path in reversed(list_checkpoints(run_dir)):
        try:
            if not verify_folder(path):
                log.info("%s has no %s (an earlier version wrote it)", path, MANIFEST)
                load_training_state(path)
                for name in (MODEL, *parts):
                    load_part(path, name)
        except InputError as error:
            problems.append(str(error))
        else:
            return path, problems
    return None, problems


def load_part(checkpoint: Path, name: str) -> Any:
    """Load one file of a checkpoint onto the CPU; tensors and plain data only."""
    path = checkpoint / name
    if not path.is_file():
        raise InputError(f"{path}: missing; {checkpoint.name} is not a whole checkpoint")
    return load_tensors(path)


def load_model(checkpoint: Path) -> Any:
    """Load the policy's weights from a checkpoint, or from a folder of `deft export`."""
    path = checkpoint / MODEL_SAFETENSORS
    if not path.is_file() or (checkpoint / MODEL).is_file():
        return load_part(checkpoint, MODEL)
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: damaged or cannot be read: {' '.join(str(error).split())[:200]}") from error


def load_tensors(path: Path) -> Any:
    """Load a file written by torch.save; an error if it is damaged or holds anything but data."""
    verify(path)
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


def has_training_state(checkpoint: Path) -> bool:
    """Return whether a checkpoint is more than weights; those that ship with Deft are published without the rest."""
    if (checkpoint / TRAINING_STATE).exists():
        return True
    listed = read_manifest(checkpoint)
    return listed is None or TRAINING_STATE in listed


def load_training_state(checkpoint: Path) -> dict[str, Any]:
    """Load the training state of a checkpoint."""
    state = load_part(checkpoint, TRAINING_STATE)
    if not isinstance(state, dict) or state.get("format") != CHECKPOINT_FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise InputError(f"{checkpoint}: not a Deft checkpoint (format {found!r}, expected {CHECKPOINT_FORMAT!r})")
    return state


def load_weights(module: nn.Module, weights: dict[str, Tensor], source: str | Path) -> None:
    """Load weights into a module; an error names keys and shapes that do not fit."""
    weights = check_weights(module, weights, source)
    if sharding.is_sharded(module):
        sharding.load_full_weights(module, weights)
    else:
        module.load_state_dict(weights)


def check_weights(module: nn.Module, weights: dict[str, Tensor], source: str | Path) -> dict[str, Tensor]:
    """Return the weights, completed for the module; an error names what does not fit it."""
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
