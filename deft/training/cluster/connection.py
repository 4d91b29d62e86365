"""The connection to a Ray cluster: a Ray of the run's own on this machine, or the cluster that the machine is part of.

Called by the collectors and by `deft doctor --cluster`. Ray is an extra, imported here alone.
"""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import logging
import math
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from deft import trust
from deft.errors import InputError, RunError
from deft.machine import available_cores

log = logging.getLogger(__name__)
# Read by Ray when it is imported: how soon it notices a lost node, and what it must not print.
_ENVIRONMENT = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_DEDUP_LOGS": "1"}
KNOCK_TIMEOUT = 5.0  # seconds
DELETE_ATTEMPTS = 20
LONGEST_PLACE = 24  # bytes of the temporary directory: the path of a socket may have 107, of which Ray takes about 80
# At 0 Ray uses the loopback interface alone, as by default on macOS and Windows, which gave the variable its name.
LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


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
    connected already; it listens on the loopback interface and asks for a token. `auto` finds the cluster that
    `ray start` made here, or that RAY_ADDRESS names.
    """
    ray = import_ray()
    if ray.is_initialized():
        return False
    options: dict[str, Any] = {"address": address, "logging_level": logging.ERROR, "log_to_driver": False}
    if trust.on_command_line():
        options |= _path_of_workers(ray)
    if address == "local":
        options |= {"include_dashboard": False, "num_cpus": max(math.ceil(num_cpus), available_cores())}
    if address not in ("local", "auto"):  # what a cluster sends back is unpickled
        reason = "Deft does not join a cluster that only a file names"
        trust.check(address, "ray_address", reason, f"--ray-address {address}")
    handler = signal.getsignal(signal.SIGTERM)
    with contextlib.ExitStack() as undo:
        try:
            _knock(address)
            if address == "local":
                undo.callback(_own.close)
                options["_temp_dir"] = _prepare_own(ray)
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
        undo.pop_all()
    if address == "local" and not (found := ipaddress.ip_address(nodes()[0]["address"])).is_loopback:
        log.warning("this Ray listens on %s: other machines may reach it", found)
    return True


def _path_of_workers(ray: Any) -> dict[str, Any]:
    """Options that keep the current directory from the front of the workers' path, where Ray puts it.

    It is put last, as in this process, where the user named a module that is in it.
    """

    class Job(ray.job_config.JobConfig):
        def _runtime_env_has_working_dir(self) -> bool:
            return True  # Ray then leaves the path alone

    options: dict[str, Any] = {"job_config": Job()}
    if sys.path[-1:] == [here := os.getcwd()]:

        def search_here() -> None:
            import sys  # in the worker

            sys.path.append(here)

        options["runtime_env"] = {"worker_process_setup_hook": search_here}
    return options


_own = contextlib.ExitStack()  # what is undone when a Ray that this process started has ended


def _prepare_own(ray: Any) -> str:
    """Make the settings that keep others out of a Ray of this process's own; return the folder for its files.

    Other users cannot open the folder. Settings of Ray that the user has made hold.
    """
    place = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="ray-", dir=place if len(place) <= LONGEST_PLACE else "/tmp")
    _own.callback(_delete, folder)
    _own.callback(_apply, ray, ray._private.ray_constants.ENABLE_RAY_CLUSTER)
    settings = {LOOPBACK_ONLY: "0"}
    if "RAY_AUTH_MODE" not in os.environ:
        settings |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    for name, value in settings.items():
        _own.callback(_set_variable, name, os.environ.get(name))
        _set_variable(name, value)
    _apply(ray, uses_network=False)
    atexit.register(disconnect)
    _own.callback(atexit.unregister, disconnect)
    return os.path.join(folder, "r")


def _set_variable(name: str, value: str | None) -> None:
    os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value


def _apply(ray: Any, uses_network: bool) -> None:
    """Have a Ray that is imported already read these settings again."""
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = uses_network
    with contextlib.suppress(AttributeError):  # a Ray without these reads the token in its new processes alone
        ray._raylet.Config.initialize("")
        ray._raylet.AuthenticationTokenLoader.instance().reset_cache()


def _delete(folder: str) -> None:
    for _ in range(DELETE_ATTEMPTS):  # Ray's processes may write until they are gone
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            break
        time.sleep(0.1)


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
    """Leave the cluster; a Ray of this process's own ends, and its files are deleted."""
    ray = import_ray()
    ray.shutdown()
    _own.close()


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
