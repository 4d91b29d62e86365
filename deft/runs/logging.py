"""Logging of a run: `RunLogger` writes metrics, episodes and evaluations, shows progress, and sets up logging.

Each run has one logger, used by one thread. It owns `episode_metrics.jsonl`, `tensorboard/` and `logs/` in the run
directory. The lines of `episode_metrics.jsonl` have a `type` (`update`, `episode` or `evaluation`), a `step` (env
steps) and a `time` (seconds since 1970). A number that is not finite is written as null, so that every line is JSON.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from datetime import datetime
from logging.handlers import BufferingHandler
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol, Self, TypeVar, cast

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

from deft.config.settings import LoggingConfig
from deft.errors import RunError, Stopped
from deft.ownership import INDEX, keep_foreign, record, start_index
from deft.runs.checkpoint import folder_lock
from deft.runs.json_files import plain
from deft.runs.live import LiveFiles
from deft.runs.processes import Processes
from deft.runs.progress import ProgressDisplay
from deft.runs.record import METRICS_FILE
from deft.runs.sinks import Sink, TensorBoardSink, open_sinks, write_again

SHOWN = ("approx_kl", "entropy", "value_loss", "q_loss", "policy_loss", "val_loss", "loss")
"""Metrics of updates in the progress display, by importance."""
MOST_SHOWN = 3
WINDOW = 100  # minimum number of episodes for mean_reward, mean_length and success_rate

logger = logging.getLogger(__name__)
deft_logger = logging.getLogger("deft")
Build = TypeVar("Build", bound=Callable[..., Any])


class EpisodeRecord(Protocol):
    """The logged attributes of an episode, such as `deft.envs.vector.Episode`."""

    episode_return: float
    length: int
    success: bool | None
    terms: dict[str, float]
    labels: dict[str, str]


class RunLogger:
    """Log one run to its directory, to the console, and to the trackers in the settings.

    With `start_step` 0 the metrics of an earlier run in the directory are replaced. With a later step, lines after
    that step are removed, since they will be logged again. Means are over the last `window` episodes.
    `write_start` writes the other initial files of a run, such as its config; it is called if the directory was
    removed during training.
    """

    def __init__(
        self,
        run_dir: Path,
        settings: LoggingConfig,
        total_timesteps: int,
        start_step: int = 0,
        run_config: dict[str, Any] | None = None,
        unit: str = "steps",
        window: int = WINDOW,
        write_start: Callable[[], None] | None = None,
    ) -> None:
        self.run_dir = Path(run_dir)
        self._write_start = write_start
        self._window: deque[tuple[float, int, bool | None]] = deque(maxlen=window)
        self._terms: deque[dict[str, float]] = deque(maxlen=window)
        self._metrics: dict[str, float] = {}  # the latest, of those that the progress display shows
        self._evaluation: dict[str, float] = {}
        self._closed = False
        self.live: LiveFiles | None = None
        """The files of the live view, which are written with the progress."""
        with self._writing(), ExitStack() as resources:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            start_index(self.run_dir)
            self._folder_id = _folder_id(self.run_dir)
            console = resources.enter_context(_console(settings.console_level))
            self._log_file: _LogFile | None = None
            if settings.enable_file_logging:
                self._log_file = resources.enter_context(_log_file(self.run_dir / "logs", settings.file_level))
            path = self.run_dir / METRICS_FILE
            keep_foreign(path)
            _drop_lines_after(path, start_step)
            self._lines: BinaryIO = open(record(path), "a+b")  # noqa: SIM115 (closed by `resources`)
            resources.callback(self._lines.close)
            self._sinks: list[Sink] = []
            for sink in open_sinks(self.run_dir, settings, start_step, run_config):
                resources.callback(sink.close)
                self._sinks.append(sink)
            terminal = console if settings.progress_bar else None
            self._progress = ProgressDisplay(total_timesteps, start_step, terminal, unit)
            resources.callback(self._progress.close)
            self._resources = resources.pop_all()

    def log_early(self, records: list[logging.LogRecord]) -> None:
        """Write what was logged while the run was built (`logged_from_start`) to the log file, and empty the list."""
        for early in records:
            if self._log_file is not None and early.levelno >= self._log_file.level:
                self._log_file.handle(early)
        records.clear()

    @property
    def mean_reward(self) -> float | None:
        """Mean undiscounted return of the last episodes; None before the first episode has ended."""
        return _mean([episode_return for episode_return, _, _ in self._window])

    @property
    def mean_length(self) -> float | None:
        """Mean length in env steps of the last episodes; None before the first episode has ended."""
        return _mean([length for _, length, _ in self._window])

    @property
    def success_rate(self) -> float | None:
        """Success rate of the last episodes; None if the environment does not report success."""
        return _mean([success for _, _, success in self._window if success is not None])

    @property
    def mean_terms(self) -> dict[str, float]:
        """Mean sums per episode of the named reward terms, over the last episodes that have terms."""
        names = sorted({name for terms in self._terms for name in terms})
        return {name: sum(terms.get(name, 0.0) for terms in self._terms) / len(self._terms) for name in names}

    @property
    def shown(self) -> dict[str, float]:
        """The values of the progress display: means of the window, metrics of the latest update and evaluation."""
        rollout = {"mean_reward": self.mean_reward, "success_rate": self.success_rate}
        known = {name: value for name, value in rollout.items() if value is not None}
        return known | self._metrics | self._evaluation

    def log_metrics(self, step: int, metrics: Mapping[str, float | Tensor]) -> None:
        """Write the metrics of an update, and the means of the window as `rollout/…`."""
        rollout = {
            "rollout/mean_reward": self.mean_reward,
            "rollout/mean_length": self.mean_length,
            "rollout/success_rate": self.success_rate,
            **{f"rollout/term_{name}": mean for name, mean in self.mean_terms.items()},
        }
        floats = _to_floats(metrics)
        values = {name: value for name, value in rollout.items() if value is not None} | floats
        self._metrics = {name: floats[name] for name in [name for name in SHOWN if name in floats][:MOST_SHOWN]}
        with self._writing():
            self._write_line("update", step, values)
            for sink in self._sinks:
                sink.write(step, values)
            self._lines.flush()

    def log_episode(self, step: int, episode: EpisodeRecord) -> None:
        """Write an episode that ended at `step` and add it to the window."""
        success = None if episode.success is None else bool(episode.success)
        self._window.append((float(episode.episode_return), int(episode.length), success))
        values: dict[str, Any] = {
            "episode_return": episode.episode_return,
            "length": episode.length,
            "success": success,
        }
        if "task" in episode.labels:
            values["task"] = episode.labels["task"]
        if episode.terms:
            values["terms"] = episode.terms
            self._terms.append(dict(episode.terms))
        with self._writing():
            self._write_line("episode", step, values)

    def log_evaluation(self, step: int, results: Mapping[str, Any]) -> None:
        """Write the results of an evaluation; trackers receive the numbers as `evaluation/…`."""
        names = ("mean_reward", "success_rate")
        self._evaluation = {f"evaluation/{name}": results[name] for name in names if results.get(name) is not None}
        with self._writing():
            self._write_line("evaluation", step, results)
            scalars = dict(_scalars(results, "evaluation"))
            for sink in self._sinks:
                sink.write(step, scalars)
            self._lines.flush()

    def progress(self, step: int, **shown: float) -> None:
        """Show the progress of the run with the values in `shown`; calls between redraws are cheap."""
        self._progress.latest = (step, shown)
        if time.monotonic() >= self._progress.next_draw:
            self._progress.draw(self.shown)
        if self.live is not None:
            self.live.update(step, self._progress.total)

    @contextmanager
    def evaluation(self, total: int, stop: Callable[[], bool]) -> Iterator[Callable[[int], None]]:
        """Show the progress of an evaluation of `total` episodes, and interrupt it when `stop` returns True.

        Yields a function that the evaluation calls at every step with the number of episodes that have just ended.
        It raises `Stopped`.
        """
        live, done = self.live, 0
        with self._progress.evaluation(total) as count:

            def watch(ended: int) -> None:
                nonlocal done
                if stop():
                    raise Stopped
                count(ended)
                done += ended
                if live is not None:
                    live.evaluating = done, total
                    live.update(self._progress.latest[0], self._progress.total)

            try:
                yield watch
            finally:
                if live is not None:
                    live.evaluating = None

    def expect(self, total_timesteps: int) -> None:
        """Set the total number of steps, if it becomes known during training."""
        self._progress.set_total(total_timesteps)

    def restore_folder(self) -> None:
        """If the run directory was removed, create it again with the files needed to resume, and warn."""
        if _folder_id(self.run_dir) == self._folder_id or (self.run_dir / INDEX).exists():
            return
        logger.warning("%s was removed: it is written again, without its earlier checkpoints", self.run_dir)
        with self._writing():
            self._resources.enter_context(folder_lock(self.run_dir))
            start_index(self.run_dir)
            self._folder_id = _folder_id(self.run_dir)
            if self._write_start is not None:
                self._write_start()
            self._lines = write_again(self._lines, self.run_dir / METRICS_FILE)
            self._resources.callback(self._lines.close)
            if self._log_file is not None:
                Path(self._log_file.baseFilename).parent.mkdir(exist_ok=True)
                self._log_file.close()  # the next message opens it again
            for sink in self._sinks:
                if isinstance(sink, TensorBoardSink):
                    sink.restore()

    def flush(self) -> None:
        """Write everything logged so far to disk; called with every checkpoint."""
        self.restore_folder()
        with self._writing():
            self._lines.flush()
            for sink in self._sinks:
                sink.flush()

    def close(self) -> None:
        """Show the last progress, flush and close the files, and remove the handlers. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._progress.finish(self.shown)
        with self._writing():
            self._resources.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the window of episodes, for the checkpoint."""
        return {"window": [list(episode) for episode in self._window], "terms": [dict(terms) for terms in self._terms]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the window, so that a resumed run has the same means as an uninterrupted one."""
        self._terms.clear()
        self._terms.extend(state.get("terms", ()))
        self._window.clear()
        self._window.extend((episode_return, length, success) for episode_return, length, success in state["window"])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except RunError as close_error:
            if error is None:
                raise
            logger.error("%s", close_error)  # the error that ended the run is raised

    def _write_line(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        line = {"type": kind, "step": int(step), "time": round(time.time(), 3)}
        if not line.keys().isdisjoint(values):
            raise ValueError(f"{line.keys() & values.keys()} cannot name a metric: every line has its own")
        self._lines.write(json.dumps(plain(line | dict(values)), allow_nan=False).encode() + b"\n")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Convert an OSError to a RunError, including errors of the log file, which logging suppresses."""
        try:
            yield
            error = None
        except OSError as write_error:
            error = write_error
        log_file = getattr(self, "_log_file", None)
        if error is None and log_file is not None:
            error, log_file.error = log_file.error, None
        if error is not None:
            reason = error.strerror or str(error)
            raise RunError(f"cannot write the logs of {error.filename or self.run_dir}: {reason}") from error


def _to_floats(metrics: Mapping[str, float | Tensor]) -> dict[str, float]:
    """Return the metrics as floats; all tensors are copied from their device in one transfer."""
    tensors = {name: value.detach() for name, value in metrics.items() if isinstance(value, Tensor)}
    for name, tensor in tensors.items():
        if tensor.numel() != 1:
            raise ValueError(f"metric {name} has shape {tuple(tensor.shape)}; a metric is one number")
    values: dict[str, Any] = dict(metrics)
    if tensors:
        device = next((tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"), None)
        rows = [tensor.reshape(()).to(device=device, dtype=torch.float64) for tensor in tensors.values()]
        values.update(zip(tensors, torch.stack(rows).tolist(), strict=True))
    return values


def _mean(values: list[Any]) -> float | None:
    return sum(values) / len(values) if values else None


def _scalars(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    """Yield the numbers in nested results, named by their path."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}/{name}")
        elif isinstance(value, Real):
            yield f"{prefix}/{name}", float(value)


def _folder_id(path: Path) -> tuple[int, int] | None:
    """Return the device and inode of a directory, or None if it does not exist."""
    try:
        about = os.stat(path)
    except FileNotFoundError:
        return None
    return about.st_dev, about.st_ino


def _drop_lines_after(path: Path, step: int) -> None:
    """Remove lines after `step`, and incomplete lines that a killed process left."""
    if step == 0:
        path.unlink(missing_ok=True)
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if _step_of(line) <= step]
    if len(kept) == len(lines):
        return
    dropped = len(lines) - len(kept)
    logger.debug("dropped %d of %d lines of %s: after step %d, or not whole", dropped, len(lines), path, step)
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def best_logged(run_dir: Path, step: int) -> float:
    """Return the highest mean return of the evaluations up to a step; −∞ without evaluations."""
    found = (line.get("mean_reward") for line in logged_evaluations(run_dir, step))
    return max((value for value in found if value is not None), default=-math.inf)


def logged_evaluations(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """Return the evaluations in a run's metrics up to a step."""
    path = run_dir / METRICS_FILE
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    kept = (json.loads(line) for line in lines if _step_of(line) <= step)
    return [line for line in kept if line["type"] == "evaluation"]


def _step_of(line: bytes) -> float:
    """Return the step of a line; infinity if the line is incomplete."""
    try:
        return json.loads(line)["step"] if line.endswith(b"\n") else math.inf
    except (ValueError, TypeError, KeyError):
        return math.inf


class _ConsoleHandler(logging.Handler):
    """Console handler on stderr: lines above the progress bar, or plain lines. All runs of a process share it."""

    STYLES = ((logging.ERROR, "red"), (logging.WARNING, "yellow"), (logging.NOTSET, ""))

    def __init__(self, level: str) -> None:
        super().__init__(level)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
        self.level_before = deft_logger.level
        self.open_runs = 0
        console = Console(stderr=True, highlight=False)
        # Rich treats a pipe as a terminal if FORCE_COLOR is set, but files must not contain a bar.
        self.terminal = console if sys.stderr.isatty() and not console.is_dumb_terminal else None

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line."""
        try:
            line = self.format(record)
            if self.terminal is None:
                print(line, file=sys.stderr)
            else:
                style = next(style for level, style in self.STYLES if record.levelno >= level)
                self.terminal.print(Text(line, style), soft_wrap=True)
        except Exception:
            self.handleError(record)


class _LogFile(logging.FileHandler):
    """`logs/rl_training_<time>.log`; stores the first write error, which `RunLogger` raises."""

    error: OSError | None = None

    def handleError(self, record: logging.LogRecord) -> None:
        """Store a write error; logging calls this in the except clause of a failed emit."""
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            self.error = self.error or error
        else:
            super().handleError(record)


def _set_level() -> None:
    """Set the deft logger to the lowest level of its handlers."""
    kinds = _ConsoleHandler | _LogFile | BufferingHandler
    deft_logger.setLevel(min(handler.level for handler in deft_logger.handlers if isinstance(handler, kinds)))


@contextmanager
def _added(handler: logging.Handler) -> Iterator[None]:
    """Add a handler to the deft logger inside the context."""
    deft_logger.addHandler(handler)
    _set_level()
    try:
        yield
    finally:
        deft_logger.removeHandler(handler)
        _set_level()


@contextmanager
def _console(level: str) -> Iterator[Console | None]:
    """Add the shared console handler to the deft logger while a run is open; yields the terminal or None."""
    handler = next((handler for handler in deft_logger.handlers if isinstance(handler, _ConsoleHandler)), None)
    if handler is None:
        handler = _ConsoleHandler(level)
        deft_logger.addHandler(handler)
        _set_level()
    handler.open_runs += 1
    try:
        yield handler.terminal
    finally:
        handler.open_runs -= 1
        if not handler.open_runs:
            deft_logger.removeHandler(handler)
            deft_logger.setLevel(handler.level_before)


def logged_from_start(build: Build) -> Build:
    """Decorate a function that builds a trainer from a config, so that its messages are in the run's log file.

    The messages appear on the console at once, and in the log file when training opens it (`log_early`).
    """

    @functools.wraps(build)
    def building(config: Any, *args: Any, **keywords: Any) -> Any:
        if not Processes().is_first:
            return build(config, *args, **keywords)
        handler = BufferingHandler(sys.maxsize)  # records are kept for the log file that is opened later
        handler.setLevel(config.logging.file_level)
        with _console(config.logging.console_level), _added(handler):
            trainer = build(config, *args, **keywords)
        trainer.run.early_records = handler.buffer
        return trainer

    return cast(Build, building)


@contextmanager
def _log_file(directory: Path, level: str) -> Iterator[_LogFile]:
    """Add a log file to the deft logger while its run is open."""
    directory.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(directory / f"rl_training_{datetime.now():%Y%m%d_%H%M%S}.log", encoding="utf-8")
    handler.setLevel(level)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    with closing(handler), _added(handler):
        yield handler


@contextmanager
def show_progress(total: int, unit: str = "steps", always_ends: bool = True) -> Iterator[Callable[[int], None]]:
    """Show progress of a command without a run directory; yields a function that takes the completed amount.

    A bar on a terminal, otherwise log lines: the one of the end only if it `always_ends` with one.
    """
    with _console("INFO") as terminal:
        display = ProgressDisplay(total, 0, terminal, unit)

        def update(done: int) -> None:
            display.latest = (done, {})
            if time.monotonic() >= display.next_draw:
                display.draw({})

        try:
            yield update
        finally:
            if always_ends or terminal is not None:
                display.finish({})
            display.close()


@contextmanager
def show_evaluation(num_episodes: int) -> Iterator[Callable[[int], None]]:
    """Show the progress of an evaluation outside of training; yields the `watch` of `play_episodes`."""
    done = 0
    with show_progress(num_episodes, "episodes", always_ends=False) as update:

        def watch(ended: int) -> None:
            nonlocal done
            done += ended
            update(done)

        yield watch
