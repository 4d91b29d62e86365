"""What this machine gives a process; asked by environments for their workers and by trainers for torch's threads."""

from __future__ import annotations

import contextlib
import os


def physical_memory() -> int:
    """Bytes of main memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_cores() -> int:
    """Cores this process may use: its affinity, and the CPU quota of its control group if there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/cpu.max") as file:
        quota, period = file.read().split()
        cores = min(cores, max(1, round(int(quota) / int(period))))  # "max" is no number: no quota
    return cores
