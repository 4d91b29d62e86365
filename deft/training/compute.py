"""Where and with how many threads torch computes: chosen for the run, not left to defaults."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch import nn

from deft.errors import InputError
from deft.machine import available_cores

SMALL_MATRIX = 512 * 512  # parameters of the largest layer for which oneDNN is left out
MAX_THREADS = 1024  # beyond what a machine can start, OpenMP does not refuse: it crashes


def choose_threads(
    requested: int | None, num_workers: int = 0, background: bool = False, cores: int | None = None
) -> int:
    """Torch's threads: what was asked for, or the cores that environment workers and the background collector leave.

    More threads than free cores make OpenMP's barriers wait for each other: a matmul can become 30 times slower.
    """
    if requested is not None:
        if not 1 <= requested <= MAX_THREADS:
            raise InputError(f"threads: {requested} is out of range; must be 1 to {MAX_THREADS}")
        return requested
    cores = available_cores() if cores is None else cores
    return max(1, cores - num_workers - (1 if background else 0))


def choose_device(name: str) -> torch.device:
    """The device that a setting names."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device: torch.device | None = None
    with contextlib.suppress(RuntimeError):
        device = torch.device(name)
    if device is None or device.type not in ("cpu", "cuda"):
        raise InputError(f"device: {name!r} cannot be used; one of auto, cpu, cuda, cuda:N")
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise InputError(
            f"device: {name!r} was asked for, but torch sees {torch.cuda.device_count()} CUDA devices here"
        )
    return device


@contextlib.contextmanager
def torch_threads(count: int, small_matrices: bool = False) -> Iterator[None]:
    """Run with `count` threads, and put the old number back.

    `small_matrices`: leave oneDNN out. For the layers of a small MLP its set-up costs several times the arithmetic on
    some CPUs (on ARM a 64×64×64 product takes 90 µs with it and 35 µs without); convolutions are quicker with it.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with contextlib.ExitStack() as stack:
            if small_matrices:
                with warnings.catch_warnings():  # torch warns of an Intel GPU setting that it touches on the way
                    warnings.simplefilter("ignore", UserWarning)
                    stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
            yield
    finally:
        torch.set_num_threads(before)


def is_small(policy: nn.Module) -> bool:
    """Whether a policy is made of small matrices alone, and computes in float32: bfloat16 is oneDNN's."""
    modules = list(policy.modules())
    has_convolution = any(isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) for module in modules)
    in_bfloat16 = any(getattr(module, "dtype", None) is torch.bfloat16 for module in modules)
    largest = max((parameter.numel() for parameter in policy.parameters()), default=0)
    return not has_convolution and not in_bfloat16 and largest <= SMALL_MATRIX
