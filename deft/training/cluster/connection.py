"""The connection to a Ray cluster: a Ray of the run's own on this machine, or the cluster that the machine is part of.

Called by the collectors and by `deft doctor --cluster`. Ray is an extra, imported here alone.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import tempfile
import threading
from pathlib import Path
from typing import Any

from deft import trust
from deft.errors import InputError, RunError
from deft.machine import available_cores

log = logging.getLogger(__name__)
# Read by Ray when it is imported: how soon it notices a node that is gone, and what it must not print.
_ENVIRONMENT = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_DEDUP_LOGS": "1"}


KNOCK_TIMEOUT = 5.0  # seconds


def import_ray() -> Any:
    """The package, or one line on how to get it."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise InputError(f'collectors: ray is not installed ({error}): pip install "deft[scale]"') from error
    return ray


def connect(address: str, num_cpus: float = 0.0) -> bool:
    """Join the cluster at `address`; True where this call opened the connection, which the caller then closes.

    `local` starts a Ray on this machine, with room for `num_cpus` however many cores it has, unless the process is
    connected already; `auto` finds the cluster that `ray start` made here, or that RAY_ADDRESS names.
    """
    ray = import_ray()
    if ray.is_initialized():
        return False
    options: dict[str, Any] = {"address": address, "logging_level": logging.ERROR, "log_to_driver": False}
    if address == "local":
        options |= {"include_dashboard": False, "num_cpus": max(math.ceil(num_cpus), available_cores())}
    if address not in ("local", "auto"):  # what a cluster sends back is unpickled
        refusal = "Deft does not join a cluster that only a file names"
        trust.check(address, "ray_address", refusal, f"--ray-address {address}")
    handler = signal.getsignal(signal.SIGTERM)
    try:
        _knock(address)
        ray.init(**options)
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray's own aborts with its stack while workers start
    except InputError:
        raise
    except OSError as error:
        raise InputError(
            f"ray_address: no cluster answers at {address!r}: start one with `ray start --head`, or use local"
        ) from error
    except (ValueError, RuntimeError) as error:
        raise RunError(f"ray_address: {address!r} cannot be used: {' '.join(str(error).split())[:200]}") from error
    return True


def _knock(address: str) -> None:
    """See whether anything listens there: Ray itself waits for minutes, also for a cluster that is long gone."""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "")
        note = Path(tempfile.gettempdir(), "ray", "ray_current_cluster")  # left by `ray start`
        if not address and not note.is_file():
            raise ConnectionError
        address = address or note.read_text().strip()
    host, colon, port = address.rpartition(":")
    if colon and "/" not in host:
        if not port.isdigit():
            raise InputError(f"ray_address: {address!r} is not host:port; or use auto or local")
        socket.create_connection((host, int(port)), KNOCK_TIMEOUT).close()


def disconnect() -> None:
    """Leave the cluster; a Ray of this process's own ends."""
    import_ray().shutdown()


def nodes() -> list[dict[str, Any]]:
    """The living nodes: host name, address, CPUs, GPUs, memory and object store in bytes, and which is this one."""
    ray = import_ray()
    found = []
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        resources = node["Resources"]
        found.append(
            {
                "host": node["NodeManagerHostname"],
                "address": node["NodeManagerAddress"],
                "cpus": resources.get("CPU", 0.0),
                "gpus": resources.get("GPU", 0.0),
                "memory": resources.get("memory", 0.0),
                "object_store": resources.get("object_store_memory", 0.0),
                "here": node["NodeManagerHostname"] == socket.gethostname(),
            }
        )
    return found


def total(resource: str) -> float:
    """How much of a resource (`CPU`, `GPU`) all living nodes have together."""
    return float(import_ray().cluster_resources().get(resource, 0.0))
