"""Env steps per second of online training on the CPU, on the GPU, and on the device that `--device auto` chooses.

Each workload trains with default settings on every device in turn, in this process. The clock starts after the first
rollout of PPO, or after 200 updates of SAC. `auto` should be as fast as the better device; without a GPU it is the CPU.

    python benchmarks/device_choice.py --out device_choice.json
    python benchmarks/device_choice.py --devices cpu --seconds 2
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import torch
from common import print_machine, print_table, write_json

from deft.config.loading import resolve
from deft.training.run import build_trainer
from deft.training.trainer import Trainer

ENV, ROLLOUT, LEARNING_STARTS, FIRST_UPDATES = "HalfCheetah-v5", 2048, 500, 200
SAC: dict[str, Any] = {"algorithm": {"name": "sac", "cfg": {"learning_starts": LEARNING_STARTS}}}
# The settings, and the env steps before the clock starts.
WORKLOADS: dict[str, tuple[dict[str, Any], int]] = {
    f"PPO, {count} env": (
        {"algorithm": {"name": "ppo"}, "env": {"num_envs": count}, "trainer": {"rollout_steps": ROLLOUT // count}},
        ROLLOUT,
    )
    for count in (1, 8)
} | {
    "SAC, 256-256": (SAC, LEARNING_STARTS + FIRST_UPDATES),
    "SAC, 64-64": (SAC | {"policy": {"hidden_dim": 64}}, LEARNING_STARTS + FIRST_UPDATES),
}


def build(settings: dict[str, Any], device: str, folder: str) -> Trainer:
    """A trainer that neither evaluates nor saves before its end."""
    quiet = {"console_level": "ERROR", "tensorboard": False, "progress_bar": False}
    parts = {"env": {"id": ENV}, "trainer": {"total_timesteps": 1_000_000, "eval_freq": 0, "save_freq": 0}}
    merged = {name: parts.get(name, {}) | settings.get(name, {}) for name in {*parts, *settings}}
    return build_trainer(resolve({**merged, "logging": quiet, "device": device, "output_dir": f"{folder}/run"}))


def measure(settings: dict[str, Any], warm_up: int, device: str, seconds: float) -> tuple[float, str]:
    """Env steps per second after `warm_up` of them, and the device; stops after the first iteration past `seconds`."""
    marks: list[tuple[int, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(settings, device, folder)
        finish_step = trainer.finish_step

        def finish_and_mark(previous: int, metrics: Any) -> None:
            finish_step(previous, metrics)
            if trainer.num_timesteps >= warm_up:
                marks.append((trainer.num_timesteps, time.perf_counter()))
                if len(marks) > 1 and marks[-1][1] - marks[0][1] >= seconds:
                    trainer.run.stop = lambda: True

        trainer.finish_step = finish_and_mark  # type: ignore[method-assign]
        try:
            trainer.train()
        finally:
            trainer.close()
    (first_step, start), (last_step, end) = marks[0], marks[-1]
    return (last_step - first_step) / (end - start), trainer.device.type


def main() -> None:
    """Measure every workload on every device, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found = ["cpu", "cuda", "auto"] if torch.cuda.is_available() else ["cpu", "auto"]
    parser.add_argument("--devices", nargs="+", default=found, choices=("cpu", "cuda", "auto"))
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement, at least")
    parser.add_argument("--out", help="write the figures here, anew after each workload")
    arguments = parser.parse_args()
    print_machine()
    if torch.cuda.is_available():
        print(torch.cuda.get_device_name())
    started, rows, results = time.perf_counter(), [], {}
    for name in arguments.workloads:
        settings, warm_up = WORKLOADS[name]
        measured = {device: measure(settings, warm_up, device, arguments.seconds) for device in arguments.devices}
        rates = {device: rate for device, (rate, _) in measured.items()}
        best = max((rate for device, rate in rates.items() if device != "auto"), default=max(rates.values()))
        ratios = {device: rate / best for device, rate in rates.items()}
        used = {device: kind for device, (_, kind) in measured.items()}
        results[name] = {"steps_per_second": rates, "ratio_to_best": ratios, "device": used}
        cells = [f"{rates[device]:.0f} ({ratios[device]:.2f})" for device in arguments.devices]
        rows.append([name, *cells, used.get("auto", "")])
        print(" | ".join(map(str, rows[-1])), flush=True)
        write_json(arguments.out, {"results": results, "seconds": time.perf_counter() - started})
    print(f"{ENV}: env steps per second (share of the better fixed device)")
    print_table(["workload", *arguments.devices, "auto chose"], rows)
    print(f"{time.perf_counter() - started:.0f} seconds")


if __name__ == "__main__":
    main()
