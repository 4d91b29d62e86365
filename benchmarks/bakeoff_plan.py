"""How long the parts of a bake-off take: estimated before it starts, and corrected by what the first parts took."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from bakeoff_methods import METHODS, Scale
from common import table

START = {"cuda": 25.0, "cpu": 10.0}  # seconds: imports, kernels from the cache, the first scenes
EVALUATION = 30.0  # seconds of `deft compare` on the checkpoints of a run
# Seconds of an update, by device and whether it has images. Those of PPO on Warp and SFT follow from
# docs/results/gpu-simulation.md; on one core of an Intel Xeon, updates without images took 4 to 10 ms. The others are
# guesses, which the first parts of a bake-off correct.
UPDATE = {("cuda", False): 0.001, ("cuda", True): 0.008, ("cpu", False): 0.01, ("cpu", True): 0.15}
# On a GPU an update that is not recorded as a CUDA graph takes this many times as long. On the CPU none is recorded;
# with images the factor is a guess.
EAGER = {("cuda", False): 4.0, ("cuda", True): 4.0, ("cpu", False): 1.0, ("cpu", True): 4.0}
CPU_STEPS = {False: 1200.0, True: 150.0}  # env steps per second of one core, by whether it renders images


class Part(NamedTuple):
    """One command or several in turn, of one seed."""

    name: str
    seed: int
    seconds: float


def warp_rate(num_envs: int, has_images: bool) -> float:
    """Env steps per second of training on Warp with an H200, without updates.

    A line through the measured seconds of a step (64 environments: 9 ms, 1,024: 15 ms), and 30 % for acting; images are
    rendered at 600,000 frames per second.
    """
    seconds = 1.3 * (0.0085 + 6.5e-6 * num_envs) + (2 * num_envs / 6e5 if has_images else 0.0)
    return num_envs / seconds


def flag(words: list[object], name: str, default: float = 0.0) -> float:
    """Return the number that a flag has among words."""
    return float(str(words[words.index(name) + 1])) if name in words else default


def num_updates(name: str, scale: Scale, offline_updates: int, pretraining: int, eager: float) -> float:
    """Gradient updates of a method in all; those that are not recorded as a CUDA graph count `eager` times."""
    method = METHODS[name]
    words, budget = method.flags(scale), scale.budget
    if name == "iql":
        return offline_updates
    if "--updates_per_step" in words:
        return flag(words, "--updates_per_step") * budget + (eager * pretraining if method.before else 0.0)
    if "--updates_per_round" in words:
        size = flag(words, "--num_envs") * flag(words, "--rollout_steps")
        return eager * flag(words, "--updates_per_round") * budget / size
    per_update = flag(words, "--batch_size") * 4  # env steps: a decision is 4 of them
    return eager * flag(words, "--n_epochs") * budget / per_update


def seconds_of(name: str, scale: Scale, arguments: Any, cores: int) -> float:
    """Estimate the seconds of a method and the evaluation of its checkpoints, alone on the machine."""
    method, device = METHODS[name], "cpu" if arguments.device == "cpu" else "cuda"
    eager = EAGER[device, scale.has_images]
    updates = num_updates(name, scale, arguments.offline_updates, arguments.sft_updates, eager)
    rate = cores * CPU_STEPS[scale.has_images]
    if scale.on_warp and device == "cuda":
        rate = warp_rate(int(flag(method.flags(scale), "--num_envs", 256)), scale.has_images)
    return START[device] + scale.budget / rate + updates * UPDATE[device, scale.has_images] + EVALUATION


def imitation_seconds(arguments: Any, has_images: bool) -> float:
    """Estimate the seconds of demonstrations, of two SFT policies and of their evaluation, alone on the machine."""
    device = "cpu" if arguments.device == "cpu" else "cuda"
    recording = 50 * arguments.demonstrations / CPU_STEPS[has_images]  # episodes of about 50 steps, on one core
    update = EAGER[device, has_images] * UPDATE[device, has_images]
    update = min(update, 0.02 if device == "cuda" else 1.0)  # batches of 64 images
    evaluation = 0.0 if arguments.start_only else EVALUATION
    return START[device] + recording + 2 * (START[device] + update * arguments.sft_updates + evaluation)


class Plan:
    """The parts of a bake-off, and how long those that are left take."""

    def __init__(self, parts: list[Part], parallel: int, device: str) -> None:
        self.parts, self.parallel, self.device = parts, parallel, device
        self._taken: dict[tuple[str, int], float] = {}
        self._lock = threading.Lock()
        # One GPU: what two commands do at once takes about 1.4 times as long as one of them. Cores are divided, not
        # shared, and `seconds_of` has counted them.
        self.slowdown = 1.0 + 0.4 * (parallel - 1) if device != "cpu" else 1.0

    def minutes_left(self) -> float:
        """Estimate the minutes of the parts that are left, by the ratio of seconds to estimates so far."""
        with self._lock:
            done = [part for part in self.parts if (part.name, part.seed) in self._taken]
            left = sum(part.seconds for part in self.parts if (part.name, part.seed) not in self._taken)
            expected = self.slowdown * sum(part.seconds for part in done)
            ratio = sum(self._taken.values()) / expected if expected else 1.0
        return ratio * self.slowdown * left / self.parallel / 60

    def finish(self, name: str, seed: int, seconds: float) -> None:
        """Take in what a part took."""
        with self._lock:
            self._taken[name, seed] = seconds

    def skip(self, name: str, seed: int) -> None:
        """Leave out a part that an earlier call has finished."""
        self.parts = [part for part in self.parts if (part.name, part.seed) != (name, seed)]

    def __str__(self) -> str:
        names = dict.fromkeys(part.name for part in self.parts)
        rows = []
        for name in names:
            seconds = [part.seconds for part in self.parts if part.name == name]
            rows.append([name, len(seconds), f"{seconds[0]:.0f}", f"{self.slowdown * sum(seconds) / 60:.1f}"])
        shown = table(["part", "left", "seconds alone (estimate)", f"minutes beside {self.parallel - 1} others"], rows)
        return f"{shown}\nabout {self.minutes_left():.0f} minutes in all with {self.parallel} commands side by side"
