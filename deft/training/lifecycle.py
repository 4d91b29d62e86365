"""The life of a run, the only one: `Run` drives a `Loop` from the first iteration to the last.

`Run` owns the run directory and its lock, seeds, stop signals, threads, logging and evaluations. It saves, loads, marks
the best checkpoint, deletes old ones, and saves after a failure. What is trained belongs to the loop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import shlex
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from deft.config.settings import LoggingConfig
from deft.errors import InputError, RunError, Stopped, fits_memory, one_line
from deft.runs import checkpoint, sharding
from deft.runs.compute import Threads
from deft.runs.live import LiveFiles
from deft.runs.logging import RunLogger, best_logged, logged_evaluations
from deft.runs.policy_spaces import PolicySpaces
from deft.runs.processes import Processes, SilentLogger
from deft.runs.random_state import get_random_state, process_seed, seed_everything, set_random_state
from deft.runs.record import COMPLETE, FAILED, STOPPED, RunRecord
from deft.runs.signals import StopSignal, never
from deft.training.loop import Intervals, Loop, Metrics, crossed, floats
from deft.view.process import check_view, serving

log = logging.getLogger(__name__)
LINE_FIELDS = ("type", "step", "time")  # of a logged evaluation, beside its results


@dataclasses.dataclass
class RunSpec:
    """What a run has, whatever it trains: where it is written, how it is logged, and who takes part.

    `config` is stored in checkpoints. `on_start` opens the run directory, and is called again if it was removed.
    """

    output_dir: str | Path | None = None
    logging_config: LoggingConfig = dataclasses.field(default_factory=LoggingConfig)
    seed: int = 0
    threads: int | None = None
    config: dict[str, Any] | None = None
    on_start: Callable[[], None] | None = None
    processes: Processes = dataclasses.field(default_factory=Processes)
    acting: sharding.WholeCopy | None = None
    spaces: PolicySpaces | None = None

    @classmethod
    def take(cls, given: Self | None, keywords: dict[str, Any]) -> Self:
        """Return the spec with the fields that are among the keywords, which are removed from them."""
        names = [field.name for field in dataclasses.fields(cls) if field.name in keywords]
        changes = {name: keywords.pop(name) for name in names}
        return dataclasses.replace(given or cls(), **{name: one for name, one in changes.items() if one is not None})


class Run:
    """Drives a loop through its life: start, iterations, evaluations, checkpoints, end."""

    def __init__(self, loop: Loop, spec: RunSpec, directory: Path, threads: Threads) -> None:
        self.loop, self.directory, self.threads = loop, directory, threads
        self.processes, self.seed, self.spec = spec.processes, spec.seed, spec
        if self.processes.is_first:
            check_view(spec.logging_config)
        self.total = 0  # steps that the run has in all
        self.every = Intervals(0, 0, 0, 1)
        self.best_reward = -math.inf
        self.last_evaluation: dict[str, Any] = {}
        self.last_metrics: dict[str, Any] = {}
        self.evaluated_at = -1  # step
        self.owes_evaluation = False  # saved before an evaluation that was not completed
        self.is_loaded = False
        self.is_saved = False  # whether a checkpoint holds the latest complete iteration
        self.log: RunLogger | None = None
        self.early_records: list[logging.LogRecord] = []  # logged while the loop was built, for the run's log file
        self.stop: Callable[[], bool] = never
        self._log_state: dict[str, Any] | None = None
        self._random_state: dict[str, Any] | None = None
        self._started = 0.0
        self._record_file: RunRecord | None = None

    @property
    def seconds(self) -> float:
        """Seconds since training started."""
        return round(time.monotonic() - self._started, 3)

    def execute(self, total: int, evaluates_last: bool = False) -> dict[str, Any]:
        """Train until `total` steps in all, and return the summary.

        A signal (Ctrl-C, SIGTERM, SIGHUP, SIGUSR1) stops inside an iteration or an evaluation; the run is saved, also
        when it fails. `evaluates_last`: evaluate at the end, also between two periodic evaluations.
        """
        loop, self.total, self._started = self.loop, total, time.monotonic()
        self.every = loop.intervals
        self.stop = stop = StopSignal()
        if self.processes.count == 1:  # several processes stop together, between two iterations
            loop.stop_requested = stop
        lock = checkpoint.folder_lock(self.directory) if self.processes.is_first else contextlib.nullcontext()
        threads = self.threads.applied(loop.uses_small_matrices)
        with stop, threads, lock, self._open_log() as self.log, self._serving():
            try:
                self._open_record()
                self._start()
                if loop.is_evaluated and (loop.evaluates_first or self.processes.broadcast(self.owes_evaluation)):
                    self.save_and_evaluate()
                while not self._is_over():
                    self._step()
                loop.end()
                if evaluates_last and self.evaluated_at != loop.global_step and not self._stops():
                    self.save_and_evaluate(self._video())
                elif self.is_unsaved():
                    self.save_and_prune()
                self._record_finished(wait=True)
                self._log_state, summary = self.log.state_dict(), loop.summary()
                if self._record_file is not None:
                    reason = None if stop.received is None else stop.received.name
                    self._record_file.end(loop.global_step, COMPLETE if reason is None else STOPPED, reason)
            except BaseException as error:
                loop.halt()
                self._save_after_failure(error)
                if self._record_file is not None:
                    with contextlib.suppress(RunError):  # the disk may be what failed
                        self._record_file.end(loop.global_step, FAILED, one_line(error))
                raise
            finally:
                loop.halt()
                self.log, self.stop, loop.stop_requested = None, never, never
            if stop.received is not None:
                log.warning(
                    "stopped by %s at %d %s%s", stop.received.name, loop.global_step, loop.unit, self._how_to_resume()
                )
        stop.reraise()
        return summary

    def _how_to_resume(self) -> str:
        """Return the command that resumes a run with a settings file, for the message of a run that stopped."""
        if not any((self.directory / name).is_file() for name in ("config.yaml", "config.json")):
            return ""
        return f"; to resume: deft train --resume {shlex.quote(str(self.directory))}"

    def _start(self) -> None:
        loop = self.loop
        if loop.global_step >= self.total:
            log.warning("nothing to do: the run has %d of %d %s", loop.global_step, self.total, loop.unit)
        loop.prepare()
        if self._random_state is not None:
            set_random_state(self._random_state)
            self._random_state = None
        elif loop.num_updates == 0:
            # Whatever the process drew before does not matter.
            seed_everything(process_seed(self.seed, self.processes.rank))
        for module in loop.modules:
            self.processes.broadcast_module(module)
        loop.begin()

    def _open_log(self) -> RunLogger:
        """Open the run directory and the log; in the first process only."""
        if not self.processes.is_first:
            return SilentLogger()  # type: ignore[return-value]
        loop, spec = self.loop, self.spec
        checkpoint.clean_temporary(self.directory)
        existing = checkpoint.list_checkpoints(self.directory)
        if spec.on_start is not None and (loop.global_step < self.total or not existing):
            spec.on_start()
        if not self.is_loaded and not loop.global_step and checkpoint.list_checkpoints(self.directory):
            raise InputError(
                f"output_dir: {self.directory} already holds a run; load() it to resume, or use another directory"
            )
        run_log = RunLogger(
            self.directory,
            spec.logging_config,
            self.total,
            loop.logged_step,
            loop.saved_config,
            loop.unit,
            loop.window,
            spec.on_start,
        )
        run_log.log_early(self.early_records)
        if self._log_state is not None:
            run_log.load_state_dict(self._log_state)
        run_log.live = LiveFiles(self.directory, loop.latest_observation, loop.unit)
        run_log.live.start(loop.global_step, self.total)
        return run_log

    def _serving(self) -> contextlib.AbstractContextManager[None]:
        """Serve the live view; in the first process only."""
        is_first = self.processes.is_first
        return serving(self.spec.logging_config, self.directory) if is_first else contextlib.nullcontext()

    def _open_record(self) -> None:
        """Write the start of this session to `run.json`; in the first process only."""
        if self.processes.is_first:
            loop = self.loop
            self._record_file = RunRecord(self.directory, resumes=loop.logged_step > 0)
            self._record_file.start(loop.global_step, self.total, loop.unit, loop.device)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        loop, previous = self.loop, self.loop.global_step
        self.threads.begin()
        with fits_memory(loop.memory_advice):
            metrics = loop.step()
        if metrics is None:
            return
        self.is_saved = False
        self.threads.tick(loop.global_step - previous)
        loop.finish_step(previous, metrics)

    def _stops(self) -> bool:
        """Whether a stop was requested, of any process."""
        return bool(self.processes.maximum(float(self.stop()), self.loop.device))

    def _is_over(self) -> bool:
        """Whether the loop ends here, in all processes or in none."""
        loop = self.loop
        if self.processes.count > 1 and loop.global_step % loop.stop_interval:
            return loop.is_over
        return loop.is_over or self._stops()

    def finish_step(self, previous: int, metrics: Metrics) -> None:
        """Log, evaluate and save what is due: an iteration may be many steps, so crossings count, not multiples."""
        loop, step, every = self.loop, self.loop.global_step, self.every
        assert self.log is not None
        logs = loop.is_logged(previous)
        further = loop.further_metrics(previous, logs)
        is_recorded = crossed(previous, step, every.video)
        evaluates = loop.is_evaluated and (is_recorded or crossed(previous, step, every.evaluate))
        saves = crossed(previous, step, every.save)
        if logs or further:
            metrics = {**metrics, **further}
            self.log.log_metrics(step, loop.logged(metrics))
            loop.check_metrics(metrics)
        is_best = bool(further) and loop.is_best_by_validation
        if logs or further or evaluates or saves:
            self.last_metrics = floats(metrics)
        if evaluates:
            self.save_and_evaluate(self._video() if is_recorded or loop.is_over else None)
        elif saves or is_best:
            self.save_and_prune(step if is_best else None)
        self._record_finished()
        self.log.progress(step)

    def evaluation(self, num_episodes: int) -> contextlib.AbstractContextManager[Callable[[int], None] | None]:
        """While training: show the progress of an evaluation, and end it on a stop request."""
        return contextlib.nullcontext() if self.log is None else self.log.evaluation(num_episodes, self.stop)

    def _video(self) -> Path | None:
        """Return the file of a video of this step; None if the run records no videos."""
        return self.directory / "videos" / f"step_{self.loop.global_step}.mp4" if self.every.video else None

    def save_and_evaluate(self, video: Path | None = None) -> None:
        """Save, so that nothing of the evaluation can lose what was learned; then evaluate in the first process."""
        self.owes_evaluation = True  # in the checkpoint too, until the metrics hold the result
        if self.is_unsaved():
            self.loop.save()
        best = None
        with self.loop.evaluation_weights(), contextlib.suppress(Stopped):
            if self.processes.is_first:
                best = self._record(self.loop.start_evaluation(video))
                self.evaluated_at, self.owes_evaluation = self.loop.global_step, False
        self.evaluated_at, self.owes_evaluation = self.processes.broadcast((self.evaluated_at, self.owes_evaluation))
        if not self.processes.broadcast(self._is_on_disk()):  # the directory was removed during the evaluation
            self.loop.save()
        self._mark_and_prune(best)

    def _record_finished(self, wait: bool = False) -> None:
        if self.processes.is_first and (found := self.loop.finished_evaluations(wait)):
            self._mark_and_prune(self._record(found))

    def _record(self, evaluations: list[tuple[int, dict[str, Any]]]) -> int | None:
        """Log evaluations; return the step of one that is the best so far. On a tie it is the later one."""
        best = None
        for step, results in evaluations:
            assert self.log is not None
            self.last_evaluation = results
            self.log.log_evaluation(step, results)
            log.info("evaluation at %d %s: %s", step, self.loop.unit, described(results))
            reward = results.get("mean_reward")
            is_first = best is None and not (self.directory / checkpoint.BEST).exists()
            if reward is not None and (reward >= self.best_reward or is_first):
                self.best_reward, best = reward, step
        return best

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def is_unsaved(self) -> bool:
        """Whether something happened since the latest checkpoint, or it was removed."""
        return bool(self.processes.broadcast(not self.is_saved or self.loop.is_midway or not self._is_on_disk()))

    def _is_on_disk(self) -> bool:
        return (self.directory / f"checkpoint-{self.loop.checkpoint_step}").exists()

    def save_and_prune(self, best: int | None = None) -> None:
        """Save if something changed, mark it as the best if it is, and delete what is not kept."""
        if self.is_unsaved():
            self.loop.save()
        self._mark_and_prune(best)

    def _mark_and_prune(self, best: int | None) -> None:
        if not self.processes.is_first:
            return
        loop, folder = self.loop, self.directory / f"checkpoint-{best}"
        if best is not None and folder.exists():
            checkpoint.mark_best(self.directory, folder)
        keep = loop.intervals.keep
        checkpoint.prune_checkpoints(self.directory, keep, loop.checkpoint_step, loop.pending_evaluations)

    def save(self, path: str | Path | None = None, after_failure: bool = False) -> Path:
        """Write a checkpoint into the run directory, or as the folder `path`; each process writes its part.

        `after_failure`: the other processes may be gone.
        """
        loop, is_first = self.loop, self.processes.is_first
        count = 1 if after_failure else self.processes.count
        folder, name = (self.directory, None) if path is None else (Path(path).parent, Path(path).name)
        with contextlib.nullcontext() if after_failure else loop.paused():
            step, has_parts = loop.checkpoint_step, loop.saves_process_parts and count > 1
            state = loop.state_dict(after_failure)
            loop.check_finite(state)
            weights = loop.weights() if is_first or loop.is_sharded else {}
            written = folder / (name or f"checkpoint-{step}")
            if has_parts:
                folder.mkdir(parents=True, exist_ok=True)
                if not is_first:
                    part = {**loop.process_state(state), "random": get_random_state()}
                    checkpoint.write_process_part(folder, step, self.processes.rank, part)
                self.processes.barrier()
            if is_first:
                if self.log is not None:
                    self.log.flush()

                def write_more(temporary: Path) -> None:
                    if has_parts:
                        checkpoint.move_process_parts(folder, step, count, temporary)
                    loop.write_files(temporary)

                on_cpu = {name: value.detach().cpu() for name, value in weights.items()}
                state |= self._state(count)
                metrics, spaces = loop.checkpoint_metrics, self.spec.spaces
                written = checkpoint.save_checkpoint(folder, step, on_cpu, state, metrics, name, write_more, spaces)
            if count > 1:
                self.processes.barrier()
        if path is None:
            self.is_saved = True
        return written

    def _state(self, count: int) -> dict[str, Any]:
        """Return the state of the run itself."""
        return {
            "best_reward": self.best_reward,
            "owes_evaluation": self.owes_evaluation,
            "log": self.log.state_dict() if self.log is not None else self._log_state or {"window": []},
            "random": get_random_state(),
            "config": self.loop.saved_config,
            "processes": count,
            "threads": self.threads.state_dict(),
        }

    def load(self, path: str | Path) -> None:
        """Resume from a checkpoint, or from the latest one of a run directory."""
        folder = checkpoint.find_checkpoint(path)
        state = checkpoint.load_training_state(folder)
        saved, count, rank = state.get("processes", 1), self.processes.count, self.processes.rank
        if self.loop.saves_process_parts and (rank or saved != count):
            if saved != count and self.processes.is_first:
                log.warning("the run had %d processes, now %d: training continues, not bit for bit", saved, count)
            part = checkpoint.load_process_part(folder, rank % saved) or {}
            state = self.loop.own_state(state, part, saved)
        self.loop.load_state_dict(state, folder)
        self.threads.load_state_dict(state.get("threads"))
        self._load_evaluations(state, folder)
        self._log_state, self._random_state = state.get("log"), state.get("random")
        if self._random_state is None:
            seed_everything(process_seed(self.seed + self.loop.num_updates, rank))
        self.is_loaded = True
        self.is_saved = folder.parent.resolve() == self.directory.resolve()

    def _load_evaluations(self, state: dict[str, Any], folder: Path) -> None:
        """Load the best return and the latest evaluation; another run directory has its own."""
        step = self.loop.global_step
        logged = [line for line in logged_evaluations(folder.parent, step) if line["step"] == step]
        self.owes_evaluation = state.get("owes_evaluation", False) and not logged
        if folder.parent.resolve() != self.directory.resolve():
            return
        # An evaluation in another process may have ended after the checkpoint was written.
        self.best_reward = max(state.get("best_reward", -math.inf), best_logged(folder.parent, step))
        if logged and _evaluation_settings(state.get("config")) == _evaluation_settings(self.loop.saved_config):
            self.evaluated_at = step
            self.last_evaluation = {name: value for name, value in logged[-1].items() if name not in LINE_FIELDS}

    def _save_after_failure(self, error: BaseException) -> None:
        """Keep what was learned since the latest checkpoint."""
        if not self.processes.is_first or not self.loop.num_updates or self.is_saved:
            return
        if self.loop.is_sharded:
            log.warning(sharding.NOT_SAVED)
            return
        run_log, self.log = self.log, None  # it may be what failed
        try:
            if run_log is not None:
                self._log_state = run_log.state_dict()
                run_log.restore_folder()
            folder = self.save(after_failure=True)
        except Exception as second:
            # Two of a kind have one cause: the networks are no longer finite, or the disk is full.
            level = logging.DEBUG if isinstance(error, RunError) and isinstance(second, RunError) else logging.ERROR
            log.log(level, "after %s the run could not be saved either: %s", type(error).__name__, second)
        else:
            log.warning("saved %s after the failure", folder)


def _evaluation_settings(config: Mapping[str, Any] | None) -> str:
    """Return what of a run's settings the results of an evaluation depend on."""
    config = config or {}
    trainer = config.get("trainer", {})
    dataset = config.get("dataset")
    settings = [config.get("env"), dataset.get("reference_returns") if isinstance(dataset, Mapping) else dataset]
    return json.dumps([*settings, trainer.get("eval_episodes"), trainer.get("eval_deterministic")], default=str)


def described(results: Mapping[str, Any]) -> str:
    """Return the results of an evaluation in a line."""
    if "mean_reward" not in results:
        return ", ".join(f"{name} {value:.4g}" for name, value in results.items() if isinstance(value, float))
    line = f"mean_reward {results['mean_reward']:.4g} ± {results['std_reward']:.3g}"
    if results.get("normalized_score") is not None:
        line += f", normalized_score {results['normalized_score']:.1f}"
    return f"{line} (actions: {results['action_selection']})"
