"""Progress of a run or an evaluation: a bar on a terminal, otherwise log lines. `deft.runs.logging` uses it."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Column

BAR_INTERVAL = 0.25  # seconds between redraws of the progress bar
LINE_INTERVAL = 10.0  # seconds between progress lines without a bar
RATE_PERIOD = 30.0  # seconds over which the displayed rate is measured

logger = logging.getLogger(__name__)


class ProgressDisplay:
    """Display of steps, rate, remaining and elapsed time, mean_reward and further values."""

    bar_in_use = False  # a terminal shows one bar at a time

    def __init__(self, total_timesteps: int, start_step: int, terminal: Console | None, unit: str = "steps") -> None:
        self._unit = unit
        self.latest: tuple[int, dict[str, float]] = (start_step, {})
        self._total = total_timesteps
        self._started = time.monotonic()
        self._samples = deque([(self._started, start_step)])
        self._drawn_step = start_step
        self._bar: Progress | None = None
        if terminal is not None and not ProgressDisplay.bar_in_use:
            ProgressDisplay.bar_in_use = True
            remaining = Column(ratio=1, no_wrap=True, overflow="ellipsis")
            text = TextColumn("{task.description}", markup=False, table_column=remaining)
            columns = (TaskProgressColumn(), BarColumn(10), text)
            self._bar = Progress(*columns, console=terminal, auto_refresh=False, expand=True)
            self._task = self._bar.add_task("", total=total_timesteps)
            self._bar.start()
        self._interval = LINE_INTERVAL if self._bar is None else BAR_INTERVAL
        self.next_draw = self._started + self._interval
        if self._bar is not None:
            self.draw(None)

    def set_total(self, total_timesteps: int) -> None:
        """Change the total number of steps."""
        self._total = total_timesteps
        if self._bar is not None:
            self._bar.update(self._task, total=total_timesteps)

    def draw(self, mean_reward: float | None) -> None:
        """Draw the latest step now."""
        step, shown = self.latest
        now = time.monotonic()
        self.next_draw = now + self._interval
        self._samples.append((now, step))
        while self._samples[0][0] < now - RATE_PERIOD and len(self._samples) > 2:
            self._samples.popleft()
        text = self._describe(step, now, mean_reward, shown)
        self._drawn_step = step
        if self._bar is None:
            done = 100 * min(1.0, step / self._total)  # the last rollout may exceed the total
            logger.info("%.0f%% of %s · %s", done, f"{self._total:,}", text)
        else:
            self._update_bar(self._task, step, text)

    @contextmanager
    def evaluation(self, total: int) -> Iterator[Callable[[int], None]]:
        """Show the progress of an evaluation of `total` episodes; yields a function that counts finished episodes."""
        started = time.monotonic()
        next_draw, done = started + self._interval, 0
        task = None if self._bar is None else self._bar.add_task("evaluating", total=total)

        def count(ended: int) -> None:
            nonlocal next_draw, done
            done += ended
            now = time.monotonic()
            if now < next_draw:
                return
            next_draw = now + self._interval
            left = _clock((total - done) * (now - started) / done) if done else "-:--:--"
            text = f"evaluating: {done} of {total} episodes · {left} left · {_clock(now - started)} elapsed"
            if task is None:
                logger.info("%s", text)
            else:
                self._update_bar(task, done, text)

        try:
            yield count
        finally:
            if self._bar is not None and task is not None:
                self._bar.remove_task(task)

    def _update_bar(self, task: Any, completed: int, text: str) -> None:
        """Redraw the bar. Errors of a closed terminal (SIGHUP) are ignored, so that the run can be saved."""
        if self._bar is not None:
            with suppress(OSError):
                self._bar.update(task, completed=completed, description=text, refresh=True)

    def _describe(self, step: int, now: float, mean_reward: float | None, shown: Mapping[str, float]) -> str:
        (first_time, first_step), (last_time, last_step) = self._samples[0], self._samples[-1]
        rate = (last_step - first_step) / (last_time - first_time) if last_time > first_time else 0.0
        left = _clock((self._total - step) / rate) if rate > 0 else "-:--:--"
        parts = [f"{step:,} {self._unit}", f"{_rate(rate)} {self._unit}/s", f"{left} left"]
        if mean_reward is not None:
            parts.append(f"mean_reward {mean_reward:.4g}")
        parts += [f"{name} {value:.4g}" for name, value in shown.items()]
        return " · ".join([*parts, f"{_clock(now - self._started)} elapsed"])

    def finish(self, mean_reward: float | None) -> None:
        """Draw the last step if it has not been drawn."""
        if self.latest[0] != self._drawn_step:
            self.draw(mean_reward)

    def close(self) -> None:
        """Stop the bar and restore the terminal."""
        if self._bar is not None:
            with suppress(OSError):
                self._bar.stop()
            self._bar = None
            ProgressDisplay.bar_in_use = False


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"  # an episode may take seconds


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=max(0, round(seconds))))
