"""The server of the live view beside a training: a process of its own, which ends with it."""

from __future__ import annotations

import contextlib
import logging
import subprocess
from collections.abc import Iterator
from pathlib import Path

from deft import trust
from deft.config.groups import ViewSettings
from deft.view.server import LAST_LOOK, address_lines, check_installed, listen, token_of

log = logging.getLogger(__name__)


def check_view(settings: ViewSettings) -> None:
    """Raise an error if the page cannot be served, before anything of a run is written."""
    if settings.view:
        check_installed("; or leave --view out")
        listen(settings.view_port).close()


@contextlib.contextmanager
def serving(settings: ViewSettings, folder: Path) -> Iterator[None]:
    """Serve the page of a run while it trains, if `view` is set."""
    if not settings.view:
        yield
        return
    with listen(settings.view_port) as listener:
        token, number = token_of(folder), listener.fileno()
        code = f"from deft.view.server import serve_beside_training; serve_beside_training({str(folder.resolve())!r}, "
        # A separate process group: Ctrl-C goes to the training, which ends the server after it has saved.
        process = subprocess.Popen(
            trust.child_command(f"{code}{number})"), stdin=subprocess.PIPE, pass_fds=(number,), process_group=0
        )
        assert process.stdin is not None
        for line in address_lines(folder, listener, token, "The page ends with the training.").splitlines():
            log.info("%s", line)
    try:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(f"{token}\n".encode())
            process.stdin.flush()
        yield
    finally:
        if process.poll() is not None:
            log.warning("the server of the live view ended with status %d before the training", process.returncode)
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(LAST_LOOK + 5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
