"""Progress of a run or an evaluation: a bar with a table of values on a terminal, otherwise log lines.

`deft.runs.logging` uses it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import MappingProxyType
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Column
from rich.text import Text

BAR_INTERVAL = 0.25  # seconds between redraws of the progress bar
LINE_INTERVAL = 10.0  # seconds between progress lines without a bar
SEPARATOR = " · "
RATE_PERIOD = 30.0  # seconds over which the displayed rate is measured
BAR_WIDTH = 10
BESIDE_TEXT = len("100% ") + BAR_WIDTH + len(" ")  # columns that a bar takes from its text

logger = logging.getLogger(__name__)


class _Bars(Progress):
    """Bars, and below them a table with one column for each value."""

    values: Mapping[str, str] = MappingProxyType({})

    def get_renderables(self) -> Iterator[RenderableType]:
        """Yield the bars and the table, which continues below itself where the terminal is too narrow for it."""
        yield self.make_tasks_table(self.tasks)
        if not self.values:  # also while the bars are constructed, before they have a console
            return
        header, row = "", ""
        for name, value in self.values.items():
            width = max(len(name), len(value))
            if header and len(header) + width > self.console.width:
                yield from _table_lines(header, row)
                header, row = "", ""
            header, row = f"{header}{name:{width}}  ", f"{row}{value:{width}}  "
        yield from _table_lines(header, row)


def _table_lines(header: str, row: str) -> Iterator[Text]:
    yield Text(header.rstrip(), "dim", no_wrap=True)  # lines take a third of the time of a table
    yield Text(row.rstrip(), no_wrap=True)


class ProgressDisplay:
    """Display of steps, rate, remaining and elapsed time, and of values such as mean_reward."""

    bar_in_use = False  # a terminal shows one bar at a time

    def __init__(self, total_timesteps: int, start_step: int, terminal: Console | None, unit: str = "steps") -> None:
        self._unit = unit
        self.latest: tuple[int, dict[str, float]] = (start_step, {})
        self.total = total_timesteps
        self._started = time.monotonic()
        self._samples = deque([(self._started, start_step)])
        self._drawn_step = start_step
        self._bar: _Bars | None = None
        if terminal is not None and not ProgressDisplay.bar_in_use:
            ProgressDisplay.bar_in_use = True
            remaining = Column(ratio=1, no_wrap=True, overflow="ellipsis")
            text = TextColumn("{task.description}", markup=False, table_column=remaining)
            columns = (TaskProgressColumn(), BarColumn(BAR_WIDTH), text)
            self._bar = _Bars(*columns, console=terminal, auto_refresh=False, expand=True)
            self._task = self._bar.add_task("", total=total_timesteps)
            self._bar.start()
        self._interval = LINE_INTERVAL if self._bar is None else BAR_INTERVAL
        self.next_draw = self._started + self._interval
        if self._bar is not None:
            self.draw({})

    def set_total(self, total_timesteps: int) -> None:
        """Change the total number of steps."""
        self.total = total_timesteps
        if self._bar is not None:
            self._bar.update(self._task, total=total_timesteps)

    def draw(self, values: Mapping[str, float]) -> None:
        """Draw the latest step now, with these values and those that it was reported with."""
        step, shown = self.latest
        texts = {name: f"{value:.4g}" for name, value in {**values, **shown}.items()}
        now = time.monotonic()
        self.next_draw = now + self._interval
        self._samples.append((now, step))
        while self._samples[0][0] < now - RATE_PERIOD and len(self._samples) > 2:
            self._samples.popleft()
        parts, elapsed = self._describe(step), f"{_clock(now - self._started)} elapsed"
        self._drawn_step = step
        if self._bar is None:
            done = 100 * min(1.0, step / self.total)  # the last rollout may exceed the total
            named = [f"{name} {text}" for name, text in texts.items()]
            logger.info("%.0f%% of %s · %s", done, f"{self.total:,}", SEPARATOR.join([*parts, *named, elapsed]))
        else:
            self._bar.values = texts
            self._update_bar(self._task, step, [*parts, elapsed])

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
            parts = [f"evaluating: {done} of {total} episodes", f"{left} left", f"{_clock(now - started)} elapsed"]
            if task is None:
                logger.info("%s", SEPARATOR.join(parts))
            else:
                self._update_bar(task, done, parts)

        try:
            yield count
        finally:
            if self._bar is not None and task is not None:
                self._bar.remove_task(task)

    def _update_bar(self, task: Any, completed: int, parts: Sequence[str]) -> None:
        """Redraw the bar. Errors of a closed terminal (SIGHUP) are ignored, so that the run can be saved."""
        if self._bar is not None:
            with suppress(OSError):
                text = fitted(parts, self._bar.console.width - BESIDE_TEXT)
                self._bar.update(task, completed=completed, description=text, refresh=True)

    def _describe(self, step: int) -> list[str]:
        (first_time, first_step), (last_time, last_step) = self._samples[0], self._samples[-1]
        rate = (last_step - first_step) / (last_time - first_time) if last_time > first_time else 0.0
        left = _clock((self.total - step) / rate) if rate > 0 else "-:--:--"
        return [f"{step:,} {self._unit}", f"{_rate(rate)} {self._unit}/s", f"{left} left"]

    def finish(self, values: Mapping[str, float]) -> None:
        """Draw the last step; as a line only if it has not been drawn."""
        if self._bar is not None or self.latest[0] != self._drawn_step:
            self.draw(values)

    def close(self) -> None:
        """Stop the bar and restore the terminal."""
        if self._bar is not None:
            with suppress(OSError):
                self._bar.stop()
            self._bar = None
            ProgressDisplay.bar_in_use = False


def fitted(parts: Sequence[str], width: int) -> str:
    """Return parts in one line: the first, and of the others as many as fit. The time left, the last but one, counts
    most, and the last part least."""
    kept = list(parts[:-1])
    if len(SEPARATOR.join(parts)) <= width:
        return SEPARATOR.join(parts)
    while len(SEPARATOR.join(kept)) > width and len(kept) > 1:
        kept.pop(-2 if len(kept) > 2 else -1)
    return SEPARATOR.join(kept)


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"  # an episode may take seconds


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=max(0, round(seconds))))
