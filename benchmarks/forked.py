"""`deft` commands in processes that are forked from one that has imported Deft: no command imports it again.

An import takes as long as thousands of updates of a small policy. For the CPU: a process that has used CUDA cannot be
forked.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import threading
from pathlib import Path

from common import waits, worker_environment

IMPORTED = ["deft.cli", "deft.training.run", "deft.evaluation.compare", "deft.training.collect"]
IMPORTED += ["matplotlib.pyplot", "mujoco", "pyarrow", "torch.utils.tensorboard"]


class Forked:
    """Starts `deft` commands from a server process, which is started by the first one.

    Running commands are stopped when `is_interrupted` is set.
    """

    def __init__(self, threads: int, is_interrupted: threading.Event) -> None:
        self._threads = threads
        self._is_interrupted = is_interrupted
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(IMPORTED)

    def command(self, words: list[str], core_set: list[int], limit: float | None) -> tuple[int, str, str]:
        """Run a command on some cores, for at most `limit` seconds; return its exit status, output and errors."""
        os.environ.update(worker_environment(self._threads))  # which the server is started with
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder, name) for name in ("output", "errors")]
            for file in files:
                file.touch()
            process = self._context.Process(target=run, args=(words, core_set, *map(str, files)))
            process.start()
            for seconds in waits(limit, self._is_interrupted):
                process.join(seconds)
                if not process.is_alive():
                    break
            else:
                process.terminate()
                process.join()
            assert process.exitcode is not None
            output, errors = (file.read_text() for file in files)
            return process.exitcode, output, errors


def run(words: list[str], core_set: list[int], output: str, errors: str) -> None:
    """Run a command in this process, with its output and errors in files."""
    os.sched_setaffinity(0, core_set)
    for path, stream in ((output, sys.stdout), (errors, sys.stderr)):
        os.dup2(os.open(path, os.O_WRONLY), stream.fileno())
    from deft.cli import main

    sys.exit(main(words))
