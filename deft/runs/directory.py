"""The folder of a run: where it is, what is already there, and the settings that it is opened with.

Called by the builders of online and offline runs before anything is trained, and by evaluations.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Container
from datetime import datetime
from pathlib import Path

from deft.config.loading import AnyRunConfig, Config, replace, write_config
from deft.config.output_base import output_base
from deft.config.validation import shown
from deft.errors import InputError
from deft.ownership import INDEX, delete_files, indexed_files, relative_files, start_index
from deft.runs import checkpoint
from deft.runs.logging import logged_evaluations

log = logging.getLogger(__name__)
CONFIG_FILE = "config.yaml"
MODEL_FILE = "f1_config.json"  # the F1 model's config in a run folder of the three phases
ELAPSED = "seconds"  # of training, among the metrics in a checkpoint of the three phases
OUTPUT_FOLDERS = ("tensorboard", "plots", "videos", "samples")


def place_run(config: Config, subject: str) -> tuple[Config, Path | None, bool]:
    """Settle the run folder, the checkpoint to go on from, and whether a run there is to be replaced.

    `subject` (the environment or the dataset) names a folder that is not given.
    Nothing is deleted yet: whatever else is wrong with the config must not cost an earlier run.
    """
    resume_from: Path | None = None
    if config.resume is not None:
        resume_from = checkpoint.find_checkpoint(config.resume)
        if config.output_dir is None:
            config = replace(config, output_dir=str(resume_from.parent))
    if config.output_dir is None:
        subject = re.sub(r"[^A-Za-z0-9.]+", "-", subject).strip("-")
        name = f"{config.algorithm.name}-{subject}-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
        return replace(config, output_dir=str(output_base() / name)), None, False
    folder = Path(config.output_dir)
    if not config.output_dir.strip():
        raise InputError("output_dir: is empty; name a folder, or leave it out")
    try:
        is_file = folder.exists() and not folder.is_dir()
    except (OSError, ValueError) as error:  # a name that is too long, a folder that may not be entered
        raise InputError(f"output_dir: {shown(config.output_dir)} cannot be used: {error}") from error
    if is_file:
        raise InputError(f"output_dir: {folder} is a file; name a folder")
    if folder.is_dir():
        with checkpoint.folder_lock(folder):  # free, that is: what another process is writing is not cleaned away
            checkpoint.clean_temporary(folder)
    existing = checkpoint.list_checkpoints(folder)
    if config.auto_resume and resume_from is None:
        resume_from, problems = checkpoint.latest_whole_checkpoint(folder)
        if existing and resume_from is None:
            raise InputError(
                f"auto_resume: none of the {len(existing)} checkpoints in {folder} can be read; "
                f"the latest: {problems[0]}"
            )
        for problem in problems:
            log.warning("passed over: %s", problem)
    elif existing and (resume_from is None or resume_from.parent.resolve() != folder.resolve()):
        checkpoint.check_replaceable(existing, config.overwrite, "--auto-resume", "--output-dir")
        return config, resume_from, True
    return config, resume_from, False


def remove_run(folder: Path, keep: Container[str] = ()) -> None:
    """Delete what Deft wrote into a run folder, but for the files in `keep`; other files stay, with a warning.

    Deft's are the files in the manifests of the checkpoints and in the folder's index (see `deft.ownership`).
    """
    start_index(folder)  # of a run by an earlier version
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


def run_folder_opener(config: AnyRunConfig, replaces: bool) -> Callable[[], None]:
    """`open_run_folder` for a trainer, which calls it again if the folder was removed; then it replaces nothing."""
    first = [replaces]
    return lambda: open_run_folder(config, bool(first and first.pop()))


def open_run_folder(config: AnyRunConfig, replaces: bool) -> None:
    """Rid the run folder of the run that it replaces, and write the settings as they repeat the run.

    Not with those of how this process came to it.
    """
    assert config.output_dir is not None
    folder = Path(config.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if replaces:
            remove_run(folder)
        start_index(folder)
        repeatable = replace(config, resume=None, auto_resume=False, overwrite=False)
        write_config(repeatable, folder / CONFIG_FILE)
    except OSError as error:
        raise InputError(f"output_dir: {folder} cannot be written: {error.strerror or error}") from error


def checkpoint_choice(path: str | Path, folder: Path) -> str:
    """Why a path means this checkpoint, for a person to read."""
    run = Path(path)
    if (run / checkpoint.MODEL).is_file():
        return "the checkpoint that was given"
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
