"""The precision of matrix products: as configured, or what is fast on this machine."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path

import torch
from torch import nn

log = logging.getLogger(__name__)
LARGE_MODEL = 20_000_000  # weights from which a GPU's bfloat16 outweighs the conversions
_CPU_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")  # x86's and ARM's


def set_precision(device: torch.device, precision: str) -> None:
    """Set whether a GPU's float32 products and convolutions round their inputs: only with `precision` tf32.

    Warn if bf16 is used on a CPU without instructions for it.
    """
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = precision == "tf32"  # by default it is on
    elif precision == "bf16" and not cpu_has_bfloat16():
        log.warning("precision: this CPU has no bf16 instructions: bf16 is emulated and many times slower; use fp32")


def choose_precision(name: str, device: torch.device, policy: nn.Module | None = None) -> torch.dtype | None:
    """Return the type for autocast, or None for none; set how a GPU multiplies float32."""
    set_precision(device, "fp32" if name == "fp32" else "tf32")
    if name != "auto":
        return torch.bfloat16 if name == "bf16" else None
    if device.type == "cuda":
        size = sum(parameter.numel() for parameter in policy.parameters()) if policy is not None else 0
        return torch.bfloat16 if size >= LARGE_MODEL and torch.cuda.is_bf16_supported() else None
    return torch.bfloat16 if cpu_has_bfloat16() and bfloat16_is_faster() else None


def autocast(device: torch.device, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[None]:
    """Compute in `dtype` inside the context, if it is given."""
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype)


def cpu_has_bfloat16(info: str | None = None) -> bool:
    """Whether the CPU has bf16 instructions; without them torch emulates bf16, hundreds of times slower."""
    if info is None:
        try:
            info = Path("/proc/cpuinfo").read_text()
        except OSError:
            return False
    lines = [line for line in info.lower().splitlines() if line.startswith(("flags", "features"))]
    return bool(lines) and bool(set(_CPU_FLAGS) & set(lines[0].split()))


def bfloat16_is_faster(size: int = 512, repeats: int = 5) -> bool:
    """Whether a matrix product is faster in bfloat16 than in float32 on this machine."""
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.ones(size, size, dtype=dtype)
        matrix @ matrix  # once to prepare
        started = time.perf_counter()
        for _ in range(repeats):
            matrix @ matrix
        seconds[dtype] = time.perf_counter() - started
    return seconds[torch.bfloat16] < 0.8 * seconds[torch.float32]
