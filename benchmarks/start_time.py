"""How long `import deft`, `deft --help` and a call of the progress display take: `python benchmarks/start_time.py`.

Bounds: 0.2 s for the import, 0.5 s for the help and the version, 5 µs for a call between two redraws. The exit status
is 1 if one is exceeded.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time

IMPORT = "import time; start = time.perf_counter(); import deft; print(time.perf_counter() - start)"
COMMAND = (
    "import sys, time; start = time.perf_counter(); from deft.cli import main; main([sys.argv[1]]);"
    "print(time.perf_counter() - start)"
)
REPEATS = 5


def seconds(program: str, *arguments: str) -> float:
    """The shortest of several new processes, by the last word that they print."""
    command = [sys.executable, "-c", program, *arguments]
    ran = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(REPEATS)]
    return min(float(output.split()[-1]) for output in ran)


def progress_seconds() -> float:
    """One call of `RunLogger.progress` between two redraws."""
    from deft.config.settings import LoggingConfig
    from deft.runs.logging import RunLogger

    quiet = LoggingConfig(console_level="CRITICAL", tensorboard=False, enable_file_logging=False)
    with tempfile.TemporaryDirectory() as folder, RunLogger(folder, quiet, total_timesteps=1000) as run:
        calls, found = 500, []
        for _ in range(30):
            start = time.perf_counter()
            for _ in range(calls):
                run.progress(10, entropy=0.5)
            found.append((time.perf_counter() - start) / calls)
    return min(found)


def main() -> int:
    measured = {
        "import deft": (seconds(IMPORT), 0.2),
        "deft --help": (seconds(COMMAND, "--help"), 0.5),
        "deft --version": (seconds(COMMAND, "--version"), 0.5),
        "progress, between redraws": (progress_seconds(), 5e-6),
    }
    for name, (found, bound) in measured.items():
        print(f"{name}: {found:.2g} s (at most {bound:g} s)")
    return int(any(found > bound for found, bound in measured.values()))


if __name__ == "__main__":
    sys.exit(main())
