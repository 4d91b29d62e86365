"""The directory of a run: where it is, what is already there, and the settings that are written into it.

Every kind of run is placed here before anything is trained; evaluations read from it.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Container, Iterable
from datetime import datetime
from pathlib import Path

from deft.config.loading import AnyRunConfig, Config, replace, write_config
from deft.config.output_base import output_base
from deft.errors import InputError, shown
from deft.ownership import INDEX, delete_files, indexed_files, relative_files, start_index
from deft.runs import checkpoint
from deft.runs.logging import logged_evaluations

log = logging.getLogger(__name__)
CONFIG_FILE = "config.yaml"
MODEL_FILE = "f1_config.json"  # the F1 model's config in a run directory of the three phases
ELAPSED = "seconds"  # of training, among the metrics in a checkpoint of the three phases
OUTPUT_FOLDERS = ("tensorboard", "plots", "videos", "samples")


def place_run(config: Config, subject: str) -> tuple[Config, Path | None, bool]:
    """Return the config with its run directory, the checkpoint to resume from, and whether a run there is replaced.

    `subject` (the environment or the dataset) names a directory that is not given.
    """
    if config.output_dir is None and config.resume is not None:
        config = replace(config, output_dir=str(checkpoint.find_checkpoint(config.resume).parent))
    if config.output_dir is None:
        subject = re.sub(r"[^A-Za-z0-9.]+", "-", subject).strip("-")
        name = f"{config.algorithm.name}-{subject}-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
        config = replace(config, output_dir=str(output_base() / name))
        return config, None, False
    if not config.output_dir.strip():
        raise InputError("output_dir: is empty; name a directory, or leave it out")
    return config, *place_directory(Path(config.output_dir), config.resume, config.auto_resume, config.overwrite)


def place_directory(
    folder: Path, resume: str | None, auto_resume: bool, overwrite: bool, parts: Iterable[str] = ()
) -> tuple[Path | None, bool]:
    """Return the checkpoint to resume from, and whether a run in the directory is to be replaced.

    `resume` is a checkpoint or a run directory. `parts` are the files that a checkpoint needs beside weights and
    training state. Nothing is deleted yet: whatever else is wrong with the config must not cost an earlier run.
    """
    try:
        is_file = folder.exists() and not folder.is_dir()
    except (OSError, ValueError) as error:  # a name that is too long, a directory without permission
        raise InputError(f"output_dir: {shown(str(folder))} cannot be used: {error}") from error
    if is_file:
        raise InputError(f"output_dir: {folder} is a file; name a folder")
    if folder.is_dir():
        with checkpoint.folder_lock(folder):  # what another process is writing is not deleted
            checkpoint.clean_temporary(folder)
    existing = checkpoint.list_checkpoints(folder)
    if auto_resume and resume is None:
        found, problems = checkpoint.latest_whole_checkpoint(folder, parts)
        if existing and found is None:
            raise InputError(
                f"auto_resume: none of the {len(existing)} checkpoints in {folder} can be read; "
                f"the latest: {problems[0]}"
            )
        for problem in problems:
            log.warning("skipped: %s", problem)
        return found, False
    resume_from = None if resume is None else checkpoint.find_checkpoint(resume)
    if not existing or (resume_from is not None and resume_from.parent.resolve() == folder.resolve()):
        return resume_from, False
    checkpoint.check_replaceable(existing, overwrite)
    return resume_from, True


def remove_run(folder: Path, keep: Container[str] = ()) -> None:
    """Delete what Deft wrote into a run directory, except the files in `keep`; other files stay, with a warning.

    Deft's are the files in the manifests of the checkpoints and in the directory's index (see `deft.ownership`).
    """
    start_index(folder)
    for path in checkpoint.list_checkpoints(folder):
        checkpoint.delete_checkpoint(path)
    if (folder / checkpoint.BEST).is_symlink():
        (folder / checkpoint.BEST).unlink()
    delete_files(folder, [name for name in indexed_files(folder) if name not in keep])
    (folder / INDEX).unlink()
    start_index(folder)
    others = [f"{name}/{file}" for name in OUTPUT_FOLDERS for file in relative_files(folder / name)]
    if others:
        log.warning("%s: kept %s, which Deft did not write", folder, ", ".join(others[:3]))


def directory_opener(
    folder: Path, replaces: bool, write_settings: Callable[[], None], keep: Container[str] = ()
) -> Callable[[], None]:
    """Return a function that deletes the run to replace, except the files in `keep`, and writes the settings.

    A run calls it again if its directory was removed; then it replaces nothing.
    """
    first = [replaces]

    def open_directory() -> None:
        try:
            if not folder.exists():
                log.info("run directory: %s", folder)
            folder.mkdir(parents=True, exist_ok=True)
            if first and first.pop():
                remove_run(folder, keep)
            start_index(folder)
            write_settings()
        except OSError as error:
            raise InputError(f"output_dir: {folder} cannot be written: {error.strerror or error}") from error

    return open_directory


def run_opener(config: AnyRunConfig, replaces: bool) -> Callable[[], None]:
    """Return the `directory_opener` of a config, which writes the settings that repeat the run: without `resume`."""
    assert config.output_dir is not None
    folder = Path(config.output_dir)
    repeatable = replace(config, resume=None, auto_resume=False, overwrite=False)
    return directory_opener(folder, replaces, lambda: write_config(repeatable, folder / CONFIG_FILE))


def checkpoint_choice(path: str | Path, folder: Path) -> str:
    """Return why this checkpoint of a path was chosen, for a person to read."""
    run = Path(path)
    if (run / checkpoint.MODEL).is_file():
        return "the checkpoint that was given"
    if folder == run and (run / checkpoint.MODEL_SAFETENSORS).is_file():
        return "the policy that was exported"
    if not (run / checkpoint.BEST).exists():
        return "the latest of the run: no evaluation during training has marked a best one"
    evaluations = logged_evaluations(run, checkpoint.step_of(folder))
    if not evaluations or evaluations[-1]["step"] != checkpoint.step_of(folder):
        return "the best of the run"
    best = evaluations[-1]
    return (
        f"the best of the run by its evaluations during training (mean_reward {best['mean_reward']:.4g} over "
        f"{best['episodes']} episodes of other seeds, at step {best['step']}; on a tie the later checkpoint wins)"
    )
