"""Latencies of a server: the endpoint `/metrics`, its log and the results of `deft serve --json`."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

WINDOW = 4096  # answers over which percentiles are computed


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile: the ⌈share · n⌉-th smallest of n values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


class Latencies:
    """Seconds from the end of a message to its answer, and those of the policy alone, over the last `WINDOW`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.messages = self.errors = self.stalls = 0
        self._answers: deque[tuple[float, float]] = deque(maxlen=WINDOW)  # (end, seconds)
        self._inferences: deque[float] = deque(maxlen=WINDOW)

    def rejected(self) -> None:
        """Count a message that was answered with an error; it has no latency."""
        self.messages += 1
        self.errors += 1

    def answered(self, started: float) -> None:
        """Count a message that arrived at `started` and is answered now."""
        self.messages += 1
        now = self.clock()
        self._answers.append((now, now - started))

    def inferred(self, seconds: float) -> None:
        """Add the seconds of one call of the policy."""
        self._inferences.append(seconds)

    def stalled(self) -> None:
        """Count a step that waited for the next chunk, in asynchronous inference."""
        self.stalls += 1

    def summary(self) -> dict[str, Any]:
        """Return counts since the start, and milliseconds and answers per second of the window."""
        found: dict[str, Any] = {"messages": self.messages, "errors": self.errors, "stalls": self.stalls}
        rows = {"": [seconds for _, seconds in self._answers], "inference_": list(self._inferences)}
        for name, values in rows.items():
            if values:
                found[f"{name}p50_ms"] = round(1e3 * percentile(values, 0.5), 3)
                found[f"{name}p99_ms"] = round(1e3 * percentile(values, 0.99), 3)
        if len(self._answers) > 1:
            span = self._answers[-1][0] - self._answers[0][0]
            found["hz"] = round((len(self._answers) - 1) / max(span, 1e-9), 2)
        return found

    def line(self) -> str:
        """Return the summary for a person."""
        found = self.summary()
        text = f"{found['messages']} messages, {found['errors']} rejected"
        if "p50_ms" in found:
            text += f"; latency p50 {found['p50_ms']:.2f} ms, p99 {found['p99_ms']:.2f} ms"
        if "hz" in found:
            text += f"; {found['hz']:.1f} Hz"
        return f"{text}; {self.stalls} stalls" if self.stalls else text
