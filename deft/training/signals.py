"""Signals as a request to stop between two steps, so that a run can save itself first.

SIGINT (Ctrl-C) and SIGTERM, and what schedulers and closed terminals send: SIGHUP and SIGUSR1.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def never() -> bool:
    """The stop request of whoever has none."""
    return False


class StopSignal:
    """While active, the first signal of `STOPPING` only sets `received`; a second SIGINT interrupts at once.

    A signal that the process was started to ignore stays ignored: `nohup` does so with SIGHUP.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __call__(self) -> bool:
        """Whether to stop."""
        return self.received is not None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in STOPPING:
                if number in (signal.SIGHUP, signal.SIGUSR1) and signal.getsignal(number) == signal.SIG_IGN:
                    continue
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def reraise(self) -> None:
        """After the clean stop, end as the signal would have ended the program."""
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is not None:
            raise SystemExit(128 + self.received)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
