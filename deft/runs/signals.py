"""Signals as stop requests: a run stops between two steps and is saved first.

SIGINT (Ctrl-C) and SIGTERM, and what schedulers and closed terminals send: SIGHUP and SIGUSR1.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType, TracebackType
from typing import Any, Self

from deft.errors import CommandExit, Stopped

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def never() -> bool:
    """Return False: the stop request where there is none."""
    return False


_stop_request: ContextVar[Callable[[], bool]] = ContextVar("stop_request", default=never)


@contextmanager
def interruptible(stop: Callable[[], bool]) -> Iterator[None]:
    """Let `raise_if_stopped` end what runs in this context once `stop` returns True."""
    token = _stop_request.set(stop)
    try:
        yield
    finally:
        _stop_request.reset(token)


def raise_if_stopped() -> None:
    """Raise `Stopped` if a stop was requested and the caller's work is `interruptible`.

    Collection and evaluation call it between two steps. Outside `interruptible` it does nothing.
    """
    if _stop_request.get()():
        raise Stopped


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
            raise CommandExit(128 + self.received)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
