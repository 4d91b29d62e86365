"""Trackers that a run logs its scalars to, besides `episode_metrics.jsonl`: TensorBoard, Weights & Biases, trackio.

`deft.runs.logging.RunLogger` opens the sinks in the settings and gives each the same named floats. The packages are
imported where they are used; wandb and trackio are extras.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from deft.config.settings import LoggingConfig
from deft.errors import InputError, RunError
from deft.ownership import record

logger = logging.getLogger(__name__)

PROJECT = "deft"  # the wandb and trackio project that runs are filed under


class Sink(Protocol):
    """Records named floats, step by step."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record the scalars of one step."""

    def flush(self) -> None:
        """Write what is buffered."""

    def close(self) -> None:
        """Finish; nothing is written afterwards."""


def open_sinks(
    run_dir: Path, settings: LoggingConfig, start_step: int, run_config: dict[str, Any] | None
) -> Iterator[Sink]:
    """Open the sinks in the settings, one after another; the caller closes each, also if a later one fails."""
    if settings.tensorboard:
        yield TensorBoardSink(run_dir / "tensorboard", start_step)
    if settings.use_wandb:
        yield WandbSink(run_dir, run_config)
    if settings.use_trackio:
        yield TrackioSink(run_dir, start_step, run_config)


def check_extras(settings: LoggingConfig) -> None:
    """Raise an error if a tracker is not installed, before anything of a run is written."""
    for name, is_wanted in (("wandb", settings.use_wandb), ("trackio", settings.use_trackio)):
        if is_wanted:
            _import_extra(name)


class TensorBoardSink:
    """An event file, one event a step with all of its scalars.

    Written in the calling thread: TensorBoard's own writer does it in a background thread, whose failure (a full disk)
    would be seen late or never.
    """

    def __init__(self, directory: Path, start_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event_type: Any = Event
        self._summary_type: Any = Summary
        directory.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names: a resumed run's must sort last.
        self._path = record(directory / f"events.out.tfevents.{time.time_ns():020d}")
        self._file: BinaryIO = open(self._path, "x+b")  # noqa: SIM115 (held open)
        self._writer_type: Any = RecordWriter
        self._records = RecordWriter(self._file)
        # Hides what an earlier process wrote at or after this step: it is about to be written again.
        first_step = start_step + 1 if start_step else 0
        self._add(step=first_step, file_version="brain.Event:2")
        self._add(step=first_step, session_log=SessionLog(status=SessionLog.START))

    def _add(self, **fields: Any) -> None:
        self._records.write(self._event_type(wall_time=time.time(), **fields).SerializeToString())

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add one event."""
        value = self._summary_type.Value
        summary = self._summary_type(value=[value(tag=name, simple_value=scalar) for name, scalar in scalars.items()])
        self._add(step=step, summary=summary)

    def flush(self) -> None:
        """Write what is buffered."""
        self._file.flush()

    def restore(self) -> None:
        """Write the file again after its folder was removed."""
        self._file = write_again(self._file, self._path)
        self._records = self._writer_type(self._file)

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()


class _TrackerSink:
    """A tracker with a process or thread of its own, which writes as it receives."""

    _run: Any

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log the scalars of one step."""
        self._run.log(dict(scalars), step=step)

    def flush(self) -> None:
        """Nothing to do."""


class WandbSink(_TrackerSink):
    """A Weights & Biases run in `<run>/wandb`; offline unless the environment has a key or a mode.

    A resumed run is a new wandb run in the same group (offline runs cannot be continued).
    """

    def __init__(self, run_dir: Path, run_config: dict[str, Any] | None) -> None:
        wandb = _import_extra("wandb")
        offline = not (os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE"))
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                name=run_dir.name,
                group=run_dir.name,
                dir=str(run_dir),
                config=run_config,
                mode="offline" if offline else None,
                reinit="create_new",  # several runs in one process stay apart
                settings=wandb.Settings(console="off", silent=True),  # stdout and stderr belong to Deft
            )
        except wandb.errors.Error as error:
            raise RunError(f"wandb did not start: {_one_line(error)}") from error
        if offline:
            offline_dir = Path(self._run.dir).parent
            logger.info("wandb is offline (no WANDB_API_KEY): send later with `wandb sync %s`", offline_dir)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class TrackioSink(_TrackerSink):
    """A local trackio run, in trackio's own folder (`TRACKIO_DIR`), where `trackio show` finds it.

    A resumed run continues the trackio run of its name; the points that it writes again are there twice.
    """

    def __init__(self, run_dir: Path, start_step: int, run_config: dict[str, Any] | None) -> None:
        self._trackio = _import_extra("trackio")
        with redirect_stdout(sys.stderr):  # trackio greets on stdout, where `--json` promises its one object
            self._run = self._trackio.init(
                project=PROJECT, name=run_dir.name, config=run_config, resume="allow" if start_step else "never"
            )
        logger.info("trackio logs to its project %r: see it with `trackio show --project %s`", PROJECT, PROJECT)

    def close(self) -> None:
        """Finish the run."""
        with redirect_stdout(sys.stderr):
            self._trackio.finish()


def write_again(file: BinaryIO, path: Path) -> BinaryIO:
    """Write an open file whose folder was removed to its path again; the system keeps its content while it is open."""
    file.flush()
    file.seek(0)
    content = file.read()
    file.close()
    path.parent.mkdir(parents=True, exist_ok=True)
    written = open(path, "w+b")  # noqa: SIM115 (held open)
    written.write(content)
    record(path)
    return written


def _import_extra(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:  # installed, yet broken: its own message says more
            raise
        raise InputError(
            f"logging.use_{name} is on and {name} is not installed: turn it off, or in Deft's folder run "
            f'`pip install -e ".[{name}]"`'
        ) from None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
