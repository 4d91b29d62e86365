"""`deft info`: versions, platform, GPUs, renderers and extras, to paste into a bug report. `deft.cli` calls `collect`.

It names no host and no user. The parts are those of `deft doctor`, which also measures and advises.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from deft import doctor
from deft.machine import processor
from deft.runs.record import software

VARIABLES = ("MUJOCO_GL", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables that change how Deft runs."""


def collect() -> dict[str, Any]:
    """Return the facts as plain data."""
    import torch

    with ThreadPoolExecutor() as pool:  # the probes run in processes of their own
        rendering = pool.map(lambda name: doctor.probe("renderer", name), doctor.BACKENDS)
        extras = doctor.extras()
        needed = {package for extra, package in doctor.requirements() if extra is None or extra not in ("dev", "bench")}
        found = {name: doctor.version(name) for name in sorted(needed, key=str.lower)}
        machine = doctor.machine_facts()
        return {
            **software(),
            "platform": platform.platform(),
            "processor": processor(),
            **{name: machine[name] for name in ("cores", "memory_gib", "memory_free_gib")},
            "gpus": doctor.gpus(),
            "cuda": torch.version.cuda,
            "rendering": dict(zip(doctor.BACKENDS, rendering, strict=True)),
            "extras": {name: "missing" if extra["missing"] else "installed" for name, extra in extras.items()},
            "packages": {name: version for name, version in found.items() if version is not None},
            "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        }


def describe(facts: Mapping[str, Any]) -> str:
    """Return the facts as text."""
    gpus = "; ".join(f"{gpu['name']}, {gpu['memory_gib']:.0f} GiB" for gpu in facts["gpus"]) or "none"
    commit = "" if facts["commit"] is None else f" ({facts['commit']})"
    extras = [name for name, state in facts["extras"].items() if state == "installed"]
    rows = {
        "deft": f"{facts['deft']}{commit}",
        "python": facts["python"],
        "platform": f"{facts['platform']}, {facts['processor']}",
        "cores": str(facts["cores"]),
        "memory": f"{facts['memory_gib']:.1f} GiB, {facts['memory_free_gib']:.1f} free",
        "GPU": f"{gpus} (torch for CUDA {facts['cuda']})" if facts["cuda"] else f"{gpus} (torch without CUDA)",
        **{
            f"render {name}": found["renderer"] if found["works"] else f"no: {found['reason']}"
            for name, found in facts["rendering"].items()
        },
        "extras": ", ".join(extras) or "none",
        "packages": ", ".join(f"{name} {version}" for name, version in facts["packages"].items()),
        "variables": ", ".join(f"{name}={value}" for name, value in facts["variables"].items()) or "none",
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:{width}}  {text}" for name, text in rows.items())
