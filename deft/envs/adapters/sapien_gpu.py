"""Which GPU SAPIEN (ManiSkill, RoboTwin) renders on; called by their adapters before SAPIEN is imported.

Vulkan does not know CUDA_VISIBLE_DEVICES: it counts the machine's GPUs, so the environment variables below take the
physical number. Where a device is named explicitly (`cuda:0`) CUDA resolves the name: the logical number belongs there.
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
    """This process's GPU as CUDA counts them: Accelerate's local process index, or LOCAL_RANK, or 0."""
    if accelerator is not None:
        return int(accelerator.local_process_index)
    rank = os.environ.get("LOCAL_RANK", "0")
    if not rank.isdigit():
        raise InputError(f"LOCAL_RANK is {rank!r}; it must be a whole number")
    return int(rank)


def get_physical_gpu_id(accelerator: Any = None) -> int:
    """This process's GPU as the machine counts them: entry LOCAL_RANK of CUDA_VISIBLE_DEVICES, where it is set."""
    logical = get_logical_gpu_id(accelerator)
    visible = []
    for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","):
        text = entry.strip()
        if not text or text == "-1":  # CUDA reads no further
            break
        if not text.isdigit():
            raise InputError(
                f"CUDA_VISIBLE_DEVICES names {text!r}; SAPIEN needs GPUs by number, as nvidia-smi counts them"
            )
        visible.append(int(text))
    return visible[logical] if logical < len(visible) else logical


def setup_sapien_gpu(gpu_id: int | None = None) -> int:
    """Have SAPIEN render on this GPU (by default this process's own); works before SAPIEN is imported alone."""
    chosen = get_physical_gpu_id() if gpu_id is None else gpu_id
    wanted = dict.fromkeys(VARIABLES, str(chosen))
    changed = any(os.environ.get(name) != value for name, value in wanted.items())
    if "sapien" in sys.modules and changed:
        log.warning("SAPIEN was imported before its GPU was chosen: it may render on another one than GPU %d", chosen)
    os.environ.update(wanted)
    return chosen
