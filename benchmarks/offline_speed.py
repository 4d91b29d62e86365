"""Updates per second of offline RL on one thread: Deft beside d3rlpy and beside the plain way of writing each update.

Batch 256 for IQL, TD3+BC and CQL; 64 windows of 20 steps for the Decision Transformer (3 layers, 1 head, width 128).
Each has its own network sizes and defaults; `--layers` gives Deft others. An update is what a training loop does: draw
a batch, step. Rounds interleave the contenders, and a figure is the median over rounds of CPU seconds an update, so
that other work on a shared machine falls on all of them. `plain` is `plain_updates.py` (for dt: that of `dt_speed.py`)
with torch's own settings; Deft's runs as its trainer runs it, in each of the precisions given.

    python benchmarks/offline_speed.py --rounds 7 --out speed.json
    python benchmarks/offline_speed.py --precision fp32 bf16                # on a CPU with units for bf16
    python benchmarks/offline_speed.py --d3rlpy-python OTHER_VENV/bin/python   # where d3rlpy is installed elsewhere
    python benchmarks/offline_speed.py --profile                               # where Deft's update spends its time
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from common import print_machine, print_table, worker_environment, write_json

ALGORITHMS = ("iql", "td3-bc", "cql", "dt")
EPISODE_LENGTH, WINDOWS, CONTEXT = 1000, 64, 20
Update = Callable[[], Any]


def make_columns(transitions: int, observation_dim: int, action_dim: int) -> tuple[np.ndarray, ...]:
    """Episodes of noise: what is learned does not change the time."""
    random = np.random.default_rng(0)
    observation = random.standard_normal((transitions, observation_dim), np.float32)
    action = random.uniform(-0.99, 0.99, (transitions, action_dim)).astype(np.float32)
    reward = random.standard_normal(transitions, np.float32)
    terminal = np.zeros(transitions, np.float32)
    return observation, action, reward, np.roll(observation, -1, 0), terminal


class Deft:
    """Deft's update, as `deft.training.offline.OfflineTrainer` makes and calls it."""

    def __init__(self, name: str, arguments: argparse.Namespace, precision: str = "fp32") -> None:
        import torch

        from deft.config.settings import DatasetPolicyConfig
        from deft.data.datasets.dataset import VectorDataset, box
        from deft.data.replay import TransitionTable

        count = arguments.transitions // EPISODE_LENGTH
        table = TransitionTable([EPISODE_LENGTH] * count, arguments.observation_dim, arguments.action_dim)
        columns = make_columns(count * EPISODE_LENGTH, arguments.observation_dim, arguments.action_dim)
        rows = table.transition_rows()
        for place, column in zip((table.observation, table.action, table.reward), columns, strict=False):
            place[rows] = torch.from_numpy(column)
        dataset = VectorDataset(table, "noise", action_space=box(arguments.action_dim, -1.0, 1.0))
        self.algorithm, self.sampler = self._make(
            name, dataset, DatasetPolicyConfig(num_layers=arguments.layers), precision
        )
        self.batch_size = self.algorithm.settings.batch_size

    @staticmethod
    def _make(name: str, dataset: Any, config: Any, precision: str) -> tuple[Any, Any]:
        import torch

        from deft.algorithms.registry import OFFLINE_ALGORITHMS
        from deft.config.algorithm_settings import ALGORITHM_SETTINGS

        kind, settings = OFFLINE_ALGORITHMS[name], ALGORITHM_SETTINGS[name](precision=precision)  # type: ignore[call-arg]
        policy = kind.make_policy(dataset.observation_space, dataset.action_space, config, settings, 1)
        algorithm = kind(policy, settings, seed=0)  # type: ignore[call-arg]
        sampler = algorithm.make_sampler(dataset, 0, torch.device("cpu"), 2**30)
        algorithm.prepare(dataset, sampler, fresh=True)
        return algorithm, sampler

    def update(self) -> Any:
        """One turn of the trainer's loop, short of its logging."""
        self.algorithm.progress = 0.5
        self.algorithm.schedule()
        return self.algorithm.step(self.sampler.sample(self.batch_size))

    def setting(self) -> AbstractContextManager[None]:
        """What the trainer computes under."""
        from deft.runs.compute import is_small, torch_threads

        return torch_threads(1, is_small(self.algorithm.policy) and self.algorithm.settings.precision != "bf16")


def make_plain(name: str, arguments: argparse.Namespace) -> Update:
    """The update written straight down."""
    if name == "dt":
        import dt_speed
        from torch import nn

        return dt_speed.Plain(dt_speed.make_windows("cpu"), nn.GELU, "cpu").update
    from plain_updates import PLAIN

    columns = make_columns(arguments.transitions, arguments.observation_dim, arguments.action_dim)
    columns = tuple(column[:, None] if column.ndim == 1 else column for column in columns)
    return PLAIN[name](columns).update  # type: ignore[arg-type]


def make_d3rlpy(name: str, arguments: argparse.Namespace) -> Update:
    """d3rlpy's own classes with their defaults, by its public `update`."""
    import d3rlpy

    observation, action, reward, _, terminal = make_columns(
        arguments.transitions, arguments.observation_dim, arguments.action_dim
    )
    timeout = np.zeros_like(terminal)
    timeout[EPISODE_LENGTH - 1 :: EPISODE_LENGTH] = 1
    dataset = d3rlpy.dataset.MDPDataset(observation, action, reward, terminal, timeout)
    configs = {
        "iql": d3rlpy.algos.IQLConfig,
        "td3-bc": d3rlpy.algos.TD3PlusBCConfig,
        "cql": d3rlpy.algos.CQLConfig,
        "dt": d3rlpy.algos.DecisionTransformerConfig,
    }
    algorithm = configs[name]().create(device="cpu:0")
    algorithm.build_with_dataset(dataset)
    if name == "dt":
        return lambda: algorithm.update(dataset.sample_trajectory_batch(WINDOWS, CONTEXT))
    return lambda: algorithm.update(dataset.sample_transition_batch(256))


# -- measuring ---------------------------------------------------------------------------------------------------------


class Here:
    """A contender in this process."""

    def __init__(self, update: Update, setting: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self.update, self.setting = update, setting

    def seconds(self, count: int) -> float:
        """CPU seconds of one update, in the mean of `count`."""
        with self.setting():
            start = time.process_time()
            for _ in range(count):
                self.update()
            return (time.process_time() - start) / count

    def close(self) -> None:
        """Nothing to do."""


class Elsewhere:
    """A contender in a process of another Python, which waits while the others are measured."""

    def __init__(self, python: str, name: str, arguments: argparse.Namespace) -> None:
        options = ["--worker", name, "--transitions", arguments.transitions]
        options += ["--observation-dim", arguments.observation_dim, "--action-dim", arguments.action_dim]
        self.process = subprocess.Popen(
            [python, str(Path(__file__).resolve()), *map(str, options)],
            env=worker_environment(1),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def seconds(self, count: int) -> float:
        """CPU seconds of one update, in the mean of `count`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(f"{count}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        for line in self.process.stdout:
            if line.startswith("seconds "):
                return float(line.split()[1])
        raise RuntimeError(f"d3rlpy failed: {self.process.communicate()[1][-2000:]}")

    def close(self) -> None:
        """End the process."""
        self.process.communicate()


def work(name: str, arguments: argparse.Namespace) -> None:
    """In d3rlpy's process: for each number of updates on standard input, the CPU seconds of one on standard output."""
    import torch

    torch.set_num_threads(1)
    contender = Here(make_d3rlpy(name, arguments))
    for line in sys.stdin:
        print("seconds", contender.seconds(int(line)), flush=True)


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Interleaved rounds of all contenders of one algorithm."""
    contenders: dict[str, Here | Elsewhere] = {}
    for precision in arguments.precision:
        deft = Deft(name, arguments, precision)
        contenders["deft" if not contenders else f"deft, {precision}"] = Here(deft.update, deft.setting)
    contenders["plain"] = Here(make_plain(name, arguments))
    if arguments.d3rlpy_python is not None:
        contenders["d3rlpy"] = Elsewhere(arguments.d3rlpy_python, name, arguments)
    counts = {}
    for label, contender in contenders.items():
        contender.seconds(4)
        # An even number: a policy that is updated every second time is updated equally often in each round.
        counts[label] = 2 * max(1, round(arguments.seconds / contender.seconds(4) / 2))
    taken: dict[str, list[float]] = {label: [] for label in contenders}
    for _ in range(arguments.rounds):
        for label, contender in contenders.items():
            taken[label].append(contender.seconds(counts[label]))
    for contender in contenders.values():
        contender.close()
    result: dict[str, Any] = {}
    for label, times in taken.items():
        ratios = [other / own for other, own in zip(times, taken["deft"], strict=True)]
        result[label] = {
            "updates_per_cpu_s": 1 / statistics.median(times),
            "milliseconds": 1000 * statistics.median(times),
            "deft_is_faster_by": statistics.median(ratios),
            "against_plain": statistics.median(plain / own for plain, own in zip(taken["plain"], times, strict=True)),
            "rounds_ms": [1000 * one for one in times],
        }
    return result


def profile(name: str, arguments: argparse.Namespace, updates: int = 30) -> None:
    """Print the operations of Deft's update by their own CPU time, and how much of it is matrix products."""
    import torch

    deft = Deft(name, arguments)
    contender = Here(deft.update, deft.setting)
    contender.seconds(10)
    alone = contender.seconds(updates)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with deft.setting(), torch.profiler.profile(activities=activities) as profiler:
        for _ in range(updates):
            deft.update()
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    products = sum(event.self_cpu_time_total for event in events if event.key in PRODUCTS)
    operations = sum(event.count for event in events if event.key.startswith("aten::")) / updates
    print(
        f"\n{name}: {1000 * alone:.2f} ms an update; under the profiler {total / updates / 1000:.2f} ms, "
        f"{operations:.0f} operations, {100 * products / total:.0f} % in matrix products"
    )
    rows = []
    for event in events[: arguments.top]:
        own = event.self_cpu_time_total
        rows.append(
            [
                event.key,
                f"{event.count / updates:g}",
                f"{own / updates:.0f}",
                f"{own / event.count:.1f}",
                f"{100 * own / total:.1f}",
            ]
        )
    print_table(["operation", "calls", "µs an update", "µs a call", "%"], rows)


PRODUCTS = (
    "aten::bmm",
    "aten::baddbmm",
    "aten::baddbmm_",
    "aten::mm",
    "aten::addmm",
    "aten::addmm_",
    "aten::mv",
    "aten::addmv_",
)


def report(results: dict[str, dict[str, Any]]) -> None:
    """The table of all algorithms."""
    rows = []
    for name, result in results.items():
        for label, figures in result.items():
            ratio = "" if label == "deft" else f"{figures['deft_is_faster_by']:.2f}x"
            spread = " ".join(f"{one:.2f}" for one in figures["rounds_ms"])
            rows.append(
                [
                    name,
                    label,
                    f"{figures['updates_per_cpu_s']:.1f}",
                    f"{figures['milliseconds']:.2f}",
                    ratio,
                    f"{figures['against_plain']:.2f}x",
                    spread,
                ]
            )
    print_table(
        ["algorithm", "library", "updates/s", "CPU ms", "Deft is faster by", "against plain", "rounds, ms"], rows
    )


def d3rlpy_python(given: str | None) -> tuple[str | None, str]:
    """The Python that has d3rlpy, or None and why it is left out."""
    python = given or sys.executable
    if given is None and find_spec("d3rlpy") is None:
        return None, "d3rlpy is not installed here; name a Python that has it with --d3rlpy-python"
    done = subprocess.run([python, "-c", "import d3rlpy; print(d3rlpy.__version__)"], capture_output=True, text=True)
    if done.returncode != 0:
        return None, f"{python} cannot import d3rlpy: {done.stderr.strip().splitlines()[-1:]}"
    return python, f"d3rlpy {done.stdout.split()[-1]}"


def main(given: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS), help=f"of {', '.join(ALGORITHMS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="CPU seconds of a contender in a round, about")
    parser.add_argument("--observation-dim", type=int, default=11)
    parser.add_argument("--action-dim", type=int, default=3)
    parser.add_argument("--precision", nargs="+", default=["fp32"], help="of Deft's products; the first leads")
    parser.add_argument("--layers", type=int, default=2, help="hidden layers of Deft's networks; 2 is its default")
    parser.add_argument("--transitions", type=int, default=200_000)
    parser.add_argument("--d3rlpy-python", help="a Python that has d3rlpy; by default this one, if it has")
    parser.add_argument("--profile", action="store_true", help="print where Deft's updates spend their time instead")
    parser.add_argument("--top", type=int, default=20, help="operations that --profile prints")
    parser.add_argument("--out", help="write the figures here, as JSON")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if arguments.worker is not None:
        work(arguments.worker, arguments)
        return
    names = arguments.algorithms.split(",")
    if unknown := [name for name in names if name not in ALGORITHMS]:
        parser.error(f"{unknown[0]!r} is not one of {', '.join(ALGORITHMS)}")
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    print_machine()
    if arguments.profile:
        for name in names:
            profile(name, arguments)
        return
    arguments.d3rlpy_python, note = d3rlpy_python(arguments.d3rlpy_python)
    print(note if arguments.d3rlpy_python else f"without d3rlpy: {note}", flush=True)
    results = {}
    settings = {key: getattr(arguments, key) for key in ("rounds", "layers", "transitions", "precision")}
    for name in names:
        results[name] = measure(name, arguments)
        write_json(arguments.out, {"settings": settings, "d3rlpy": note, "algorithms": results})
        print(
            name, {label: f"{figures['milliseconds']:.2f} ms" for label, figures in results[name].items()}, flush=True
        )
    report(results)


if __name__ == "__main__":
    main()
