"""Benchmarks that end in time: `--stop-after` minutes of a call, after which commands save and the tables are printed.

Ctrl-C ends a benchmark of commands in the same way.
`bakeoff.py` and `vision_results.py` run commands (`TimedBench`); `phases_gpu.py` trains in its own process
(`interrupted_after`).
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from bakeoff_plan import Plan
from headline import STOPPED, Bench

from deft.runs.json_files import read_json, write_json

INTERRUPTED = 128 + signal.SIGINT


class StoppedError(RuntimeError):
    """`--stop-after` is over, or Ctrl-C was pressed: a command was stopped, or not started."""


class Job(NamedTuple):
    """A part of a plan, and the function that runs its commands and returns what was found."""

    name: str
    seed: int
    function: Callable[[], Any]


class TimedBench(Bench):
    """A benchmark whose commands are stopped `--stop-after` minutes after it started, or by Ctrl-C, and save."""

    @property
    def minutes_left(self) -> float:
        """Minutes until commands are stopped; 0 after Ctrl-C."""
        if self.is_interrupted.is_set():
            return 0.0
        most = self.arguments.stop_after
        return math.inf if most is None else most - (time.monotonic() - self.started) / 60

    def deft(self, *words: object, minutes: float | None = None) -> dict[str, Any]:
        """One command, as in `Bench.deft`; raise `StoppedError` if `--stop-after` or Ctrl-C ended it."""
        if self.minutes_left <= 0:
            raise StoppedError(f"not started: deft {words[0]} {words[1]}")
        most = min(self.minutes_left, math.inf if minutes is None else minutes)
        stopped = StoppedError(f"stopped: deft {words[0]} {words[1]}")
        try:
            found = super().deft(*words, minutes=None if math.isinf(most) else most)
        except RuntimeError as error:  # it was stopped before it could save
            if self.minutes_left <= 0:
                raise stopped from error
            raise
        if found["status"] == STOPPED and self.minutes_left <= 0:
            raise stopped
        return found

    def run_jobs(
        self, plan: Plan, jobs: Iterable[Job], keep: Callable[[str, int, Any], Iterable[Job]]
    ) -> tuple[list[str], bool]:
        """Run jobs side by side; return the failures, and whether something is left to do.

        After Ctrl-C, running commands are stopped, no further one starts, and what was finished is kept.
        `keep(name, seed, found)` receives what a job found, in this thread, and returns the jobs that follow from it.
        """
        failures, is_left = list[str](), False

        def timed(job: Job) -> Any:
            began = time.monotonic()
            found = job.function()
            plan.finish(job.name, job.seed, time.monotonic() - began)
            return found

        with self.interruptible(), ThreadPoolExecutor(self.arguments.parallel) as pool:
            running: dict[Future[Any], Job] = {pool.submit(timed, job): job for job in jobs}
            while running:
                wait(running, return_when=FIRST_COMPLETED)
                future = next(one for one in running if one.done())  # of several, the one that was submitted first
                name, seed, _ = running.pop(future)
                try:
                    found = future.result()
                except StoppedError:
                    is_left = True
                    continue
                except RuntimeError as error:  # the others are still worth a table
                    failures.append(f"{name}, seed {seed}: {error}")
                    continue
                running |= {pool.submit(timed, job): job for job in keep(name, seed, found)}
                print(f"seed {seed}: {name} done; about {plan.minutes_left():.0f} minutes left", flush=True)
        return failures, is_left

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Set `is_interrupted` at the first SIGINT; a second one raises `KeyboardInterrupt`."""

        def interrupt(number: int, frame: Any) -> None:
            if self.is_interrupted.is_set():
                raise KeyboardInterrupt
            self.is_interrupted.set()

        handler = signal.getsignal(signal.SIGINT)
        if handler is not signal.SIG_IGN:  # as a shell sets it for commands in the background
            signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, handler)

    def exit_status(self, failures: Sequence[str], is_left: bool) -> int:
        """Print how to continue if something is left; return 130 after Ctrl-C, else 1 if not all has succeeded."""
        if is_left:
            by = "" if self.is_interrupted.is_set() else " by --stop-after"
            print(f"stopped{by}; the same command continues", flush=True)
            if self.is_interrupted.is_set():
                return INTERRUPTED
        return 1 if failures or is_left else 0


def keep_settings(results: Path, settings: dict[str, Any], compared: Iterable[str], only_check: bool = False) -> None:
    """End the program if an earlier call has had other settings in `compared`; keep all in settings.json.

    Settings that the earlier calls have not kept are not compared.
    """
    kept = read_json(results / "settings.json") or {}
    check_settings(results, kept, {name: settings[name] for name in compared})
    if not only_check:
        write_json({**kept, **settings}, results / "settings.json")


def check_settings(results: Path, kept: dict[str, Any], settings: dict[str, Any]) -> None:
    """End the program if settings differ from those that the results in the folder were made with."""
    other = [f"{name}: {kept[name]}, not {value}" for name, value in settings.items() if kept.get(name, value) != value]
    if other:
        raise SystemExit(f"{results} has results of other settings ({'; '.join(other)}); use another --results")


@contextlib.contextmanager
def interrupted_after(minutes: float) -> Iterator[None]:
    """Interrupt this program (SIGINT) after so many minutes: a run saves first; raise `StoppedError` then."""
    if minutes <= 0:
        raise StoppedError("not started: --stop-after is over")
    is_over = threading.Event()

    def interrupt() -> None:
        is_over.set()
        os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.SIG_IGN:  # as a shell sets it for commands in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(min(60 * minutes, threading.TIMEOUT_MAX), interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    except KeyboardInterrupt:
        if not is_over.is_set():
            raise
        raise StoppedError("stopped by --stop-after") from None
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, handler)
