"""Env steps per second of SAC with one update each: Deft beside Stable-Baselines3, in one run.

Each library trains in a fresh process with the same thread count, in interleaved rounds, so that noise on a shared
machine falls on both. Same environment, networks (256-256 ReLU, twin critics), batch (256), Adam (3e-4), temperature
learned. The clock starts 200 updates after learning starts. Deft is measured in each of the precisions given.

    python benchmarks/sac_speed.py --steps 1000 --rounds 3
    python benchmarks/sac_speed.py --precision fp32 bf16     # on a CPU with units for bf16
    python benchmarks/sac_speed.py --device cuda --steps 20000
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time

from common import print_machine, print_table, run_worker, write_json

ENV, LEARNING_STARTS, WARM_UP = "HalfCheetah-v5", 1000, 200


def train_sb3(steps: int, device: str, precision: str) -> float:
    """Seconds for `steps` env steps with an update each, by Stable-Baselines3 as it comes."""
    import torch
    from stable_baselines3 import SAC
    from stable_baselines3.common.callbacks import BaseCallback

    clock: list[float] = []

    class Clock(BaseCallback):
        def _on_step(self) -> bool:
            if self.num_timesteps in (LEARNING_STARTS + WARM_UP, LEARNING_STARTS + WARM_UP + steps):
                if device == "cuda":
                    torch.cuda.synchronize()
                clock.append(time.perf_counter())
            return True

    model = SAC("MlpPolicy", ENV, learning_starts=LEARNING_STARTS, device=device, seed=0)
    model.learn(LEARNING_STARTS + WARM_UP + steps, callback=Clock())
    return clock[1] - clock[0]


def train_deft(steps: int, device: str, precision: str) -> float:
    """The same by Deft, its products in `precision`."""
    import torch

    from deft.config.loading import resolve
    from deft.training.run import build_trainer

    with tempfile.TemporaryDirectory() as folder:
        config = resolve(
            {
                "algorithm": {"name": "sac", "cfg": {"learning_starts": LEARNING_STARTS, "precision": precision}},
                "env": {"id": ENV},
                "trainer": {"total_timesteps": LEARNING_STARTS + WARM_UP + steps, "eval_freq": 0, "save_freq": 0},
                "logging": {"console_level": "ERROR", "tensorboard": False, "progress_bar": False},
                "device": device,
                "threads": torch.get_num_threads(),
                "output_dir": f"{folder}/run",
            }
        )
        trainer = build_trainer(config)
        trainer.train(LEARNING_STARTS + WARM_UP)
        start = time.perf_counter()
        trainer.train()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        trainer.close()
    return seconds


LIBRARIES = {"deft": train_deft, "sb3": train_sb3}


def main() -> None:
    """Run the rounds, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", nargs="+", default=["fp32"], help="of Deft's products: fp32, tf32, bf16")
    parser.add_argument("--json", help="write the figures here, anew after each round")
    parser.add_argument("--worker", choices=LIBRARIES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        seconds = LIBRARIES[arguments.worker](arguments.steps, arguments.device, arguments.precision[0])
        print(json.dumps({"steps_per_second": arguments.steps / seconds}))
        return
    print_machine()
    contenders = {f"deft, {precision}": ("deft", precision) for precision in arguments.precision}
    contenders["sb3"] = ("sb3", "fp32")
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(arguments.rounds):
        for name, (library, precision) in contenders.items():
            work = ["--worker", library, "--steps", arguments.steps, "--device", arguments.device]
            work += ["--precision", precision]
            rates[name].append(run_worker("sac_speed.py", work, arguments.threads)["steps_per_second"])
        write_json(arguments.json, {"rates": rates, "arguments": vars(arguments)})
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratios = {
        name: statistics.median(own / theirs for own, theirs in zip(values, rates["sb3"], strict=True))
        for name, values in rates.items()
    }
    rows = [[name, f"{rate:.1f}", f"{ratios[name]:.2f}"] for name, rate in medians.items()]
    print_table(["library", "steps/s", "against sb3"], rows)


if __name__ == "__main__":
    main()
