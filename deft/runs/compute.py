"""The device, the threads and the precision that torch computes with: chosen for the run, not left to defaults.

Trainers make one `Threads` and call it in their loop; commands resolve `--device` by `choose_device`, and online
training by `choose_online_device`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from deft.errors import InputError
from deft.machine import available_cores

SMALL_MATRIX = 512 * 512  # parameters of the largest layer for which oneDNN is left out
MAX_THREADS = 1024  # beyond what a machine can start, OpenMP does not raise an error: it crashes
SMALL_PRODUCT = 4_000_000  # multiplications (about 0.1 ms): below, one thread is as good as several
LARGE_PRODUCT = 64_000_000
WORTHWHILE = 1.15
COLLAPSE = 0.6
PROBE_SECONDS, WINDOW_SECONDS, RECHECK_SECONDS = 0.1, 1.0, 10.0
LARGE_MODEL = 20_000_000  # weights from which a GPU's bfloat16 outweighs the conversions
_CPU_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")  # x86's and ARM's

log = logging.getLogger(__name__)


def thread_counts(
    requested: int | None, small: bool = False, reserved: int = 0, cores: int | None = None
) -> tuple[int, ...]:
    """Thread counts to choose from: one where it is given (`--threads`, then OMP_NUM_THREADS) or the network is small.

    Otherwise 1, 2, 4, … up to the cores, less those that are `reserved` for work during the update.
    """
    if requested is not None:
        if not 1 <= requested <= MAX_THREADS:
            raise InputError(f"threads: {requested} is out of range; must be 1 to {MAX_THREADS}")
        return (requested,)
    variable = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # a list has one entry per nesting level
    if variable.isdecimal() and 1 <= int(variable) <= MAX_THREADS:
        return (int(variable),)
    most = 1 if small else max(1, (available_cores() if cores is None else cores) - reserved)
    return (*(2**power for power in range(most.bit_length()) if 2**power < most), most)


class Threads:
    """Torch's threads during a training loop: a fixed count, or the fastest of several by measurement.

    The measurement times matrix products of about the network's size before the first update, so it has no influence
    on what is learned. More threads than free cores make every product wait for a thread that another process keeps
    from running: training can become 15 times slower. So the loop reports its progress, and where throughput collapses
    the measurement is repeated.
    """

    def __init__(
        self,
        counts: Sequence[int],
        products: int = LARGE_PRODUCT,
        seconds: Callable[[int, int], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts, self.count = tuple(counts), counts[0]
        self._size = round((min(max(products, SMALL_PRODUCT), LARGE_PRODUCT)) ** (1 / 3))
        self._seconds, self._clock = seconds or seconds_of_product, clock
        self._is_chosen = len(self.counts) == 1
        self._best_rate = 0.0
        self._window, self._done, self._started = 0.0, 0.0, 0.0
        self._measured_at = -RECHECK_SECONDS

    @contextlib.contextmanager
    def applied(self, small_matrices: bool = False) -> Iterator[None]:
        """Run with these threads, measuring first where there is a choice; see `torch_threads`."""
        with torch_threads(self.count, small_matrices):
            if not self._is_chosen:
                self._choose()
            yield

    def begin(self) -> None:
        """Start the clock of an iteration: time between `tick` and `begin` (an evaluation) does not count."""
        self._started = self._clock()

    def tick(self, work: float) -> None:
        """Count the work of an iteration, in any unit; measure again where the rate fell below 0.6 of its best."""
        if self.count == 1:
            return
        now = self._clock()
        self._window += now - self._started
        self._done += work
        self._started = now
        if self._window < WINDOW_SECONDS:
            return
        rate, self._window, self._done = self._done / self._window, 0.0, 0.0
        self._best_rate = max(self._best_rate, rate)
        if rate < COLLAPSE * self._best_rate and now - self._measured_at > RECHECK_SECONDS and len(self.counts) > 1:
            self._choose()

    def state_dict(self) -> int:
        """The count, for a checkpoint: other counts round sums differently, and a resumed run repeats the bits."""
        return self.count

    def load_state_dict(self, count: int | None) -> None:
        """Continue with the count of a checkpoint, unless one was given."""
        if count is not None and not self._is_chosen and count in self.counts:
            self.count, self._is_chosen = count, True

    def _choose(self) -> None:
        """Take more threads while each step (1 to 2, 2 to 4, …) makes products at least 1.15 times faster."""
        chosen, quickest = self.counts[0], self._seconds(self._size, self.counts[0])
        for count in self.counts[1:]:
            seconds = self._seconds(self._size, count)
            if quickest < WORTHWHILE * seconds:
                break
            chosen, quickest = count, seconds
        if chosen != self.count or not self._is_chosen:
            log.info("torch computes with %d of %d threads (measured; --threads fixes it)", chosen, self.counts[-1])
        self.count, self._is_chosen, self._best_rate = chosen, True, 0.0
        torch.set_num_threads(chosen)
        self._measured_at = self._started = self._clock()


def seconds_of_product(size: int, threads: int) -> float:
    """Seconds of one [size, size] matrix product with that many threads, the mean over a tenth of a second."""
    torch.set_num_threads(threads)
    left = torch.full((size, size), 1e-3)
    left @ left  # starts the threads
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < PROBE_SECONDS:
        left @ left
        count += 1
    return elapsed / count


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
            f"device: {name!r} was asked for, but torch sees {torch.cuda.device_count()} CUDA devices here; "
            "use --device cpu"
        )
    return device


def choose_online_device(name: str, policy: nn.Module, batch_size: int, captured: bool = False) -> torch.device:
    """The device for training a policy that acts in environments on the CPU; `auto` leaves a small one on the CPU.

    Acting and updates of a small network are some hundred small operations; starting one on a GPU takes longer than
    computing it on the CPU. `captured`: updates are replayed as a CUDA graph, which starts all operations at once and
    is faster on a GPU whatever the size.
    """
    device = choose_device(name)
    if name != "auto" or device.type == "cpu":
        return device
    products = _largest_matrix(policy) * batch_size
    if captured:
        reason = "updates are captured as a CUDA graph"
    elif is_small(policy) and products <= LARGE_PRODUCT:
        device, reason = torch.device("cpu"), "the network is small and acts in environments on the CPU"
    elif is_small(policy):
        reason = f"a layer takes {products} multiplications per batch"
    else:
        reason = "the network has convolutions, large layers or bfloat16 weights"
    log_device(name, device, reason)
    return device


def log_device(name: str, device: torch.device, reason: str) -> None:
    """Log which device `auto` chose and why, on a machine that has a choice."""
    if name == "auto" and torch.cuda.is_available():
        other = "cuda" if device.type == "cpu" else "cpu"
        log.info("device: auto chose %s: %s; override with --device %s", device, reason, other)


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
    in_bfloat16 = any(getattr(module, "dtype", None) is torch.bfloat16 for module in policy.modules())
    return not _has_convolution(policy) and not in_bfloat16 and _largest_matrix(policy) <= SMALL_MATRIX


def threads_for(
    requested: int | None, policy: nn.Module, batch_size: int, reserved: int = 0, cores: int | None = None
) -> Threads:
    """The threads to train a policy with, by the size of its largest product on a batch."""
    products = _largest_matrix(policy) * batch_size
    small = products <= SMALL_PRODUCT and not _has_convolution(policy)
    return Threads(thread_counts(requested, small, reserved, cores), products)


def _has_convolution(policy: nn.Module) -> bool:
    return any(isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) for module in policy.modules())


def _largest_matrix(policy: nn.Module) -> int:
    return max((parameter.numel() for parameter in policy.parameters()), default=0)


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
