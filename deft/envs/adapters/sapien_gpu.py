"""The GPU on which SAPIEN (ManiSkill, RoboTwin) renders; their adapters set it before SAPIEN is imported.

Vulkan ignores CUDA_VISIBLE_DEVICES and numbers all GPUs of the machine, so the environment variables below take the
physical number. An explicit device (`cuda:0`) is resolved by CUDA and takes the logical number.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from deft.errors import InputError

VARIABLES = ("VK_DEVICE_INDEX", "SAPIEN_DEVICE_INDEX", "EGL_DEVICE_ID")

log = logging.getLogger(__name__)


def get_logical_gpu_id(accelerator: Any = None) -> int:
    """Return this process's GPU in CUDA's numbering: Accelerate's local process index, or LOCAL_RANK, or 0."""
    if accelerator is not None:
        return int(accelerator.local_process_index)
    rank = os.environ.get("LOCAL_RANK", "0")
    if not rank.isdigit():
        raise InputError(f"LOCAL_RANK is {rank!r}; it must be a whole number")
    return int(rank)


def get_physical_gpu_id(accelerator: Any = None) -> int:
    """Return this process's GPU in the machine's numbering: entry LOCAL_RANK of CUDA_VISIBLE_DEVICES if it is set."""
    logical = get_logical_gpu_id(accelerator)
    visible = []
    for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","):
        text = entry.strip()
        if not text or text == "-1":  # CUDA ignores the rest
            break
        if not text.isdigit():
            raise InputError(f"CUDA_VISIBLE_DEVICES names {text!r}; SAPIEN needs GPUs by number, as in nvidia-smi")
        visible.append(int(text))
    return visible[logical] if logical < len(visible) else logical


def setup_sapien_gpu(gpu_id: int | None = None) -> int:
    """Let SAPIEN render on this GPU (by default this process's own); call it before SAPIEN is imported."""
    chosen = get_physical_gpu_id() if gpu_id is None else gpu_id
    wanted = dict.fromkeys(VARIABLES, str(chosen))
    changed = any(os.environ.get(name) != value for name, value in wanted.items())
    if "sapien" in sys.modules and changed:
        log.warning("SAPIEN was imported before its GPU was set: it may not render on GPU %d", chosen)
    os.environ.update(wanted)
    return chosen
