"""What this machine gives a process; asked by environments for their workers and by trainers for torch's threads."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path


def physical_memory() -> int:
    """Bytes of main memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_cores() -> int:
    """Cores this process may use: its affinity, and the CPU quota of its control group if there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([cores, *_quotas()])


def _quotas(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[int]:
    """The CPU quotas in whole cores of this process's control groups (versions 1 and 2) and all above them."""
    groups: list[Path] = []
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            controllers, path = line.split(":", 2)[1:]
            if controllers == "" or "cpu" in controllers.split(","):
                base = root if controllers == "" else root / "cpu"
                group = base / path.strip("/")
                groups += [group, *(above for above in group.parents if above.is_relative_to(base))]
    found = []
    for group in {root, root / "cpu", *groups}:
        with contextlib.suppress(OSError, ValueError):  # "max" and -1 mean no quota
            if (group / "cpu.max").exists():
                quota, period = map(int, (group / "cpu.max").read_text().split())
            else:
                quota, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            if quota > 0:
                found.append(max(1, round(quota / period)))
    return found


def processor() -> str:
    """The model of the CPU, as the system names it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
