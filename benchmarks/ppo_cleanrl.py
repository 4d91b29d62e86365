"""PPO on HalfCheetah-v5 with one environment: env steps per second of Deft and of CleanRL's script, in one run.

Both use CleanRL's settings: rollouts of 2,048 steps, 10 epochs of 32 minibatches, two layers of 64, normalised
observations and rewards. CleanRL's `ppo_continuous_action.py` is not part of Deft: give the path of a copy. It runs in
a process of its own, on the GPU if there is one, and its last `SPS` is its speed. For newer versions of gymnasium, its
`TransformObservation` receives the space that these versions require; nothing else is changed.

    python benchmarks/ppo_cleanrl.py --cleanrl ppo_continuous_action.py
    python benchmarks/ppo_cleanrl.py --cleanrl ppo_continuous_action.py --steps 4096 --devices cpu
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import print_machine, print_table, write_json

ENV, ROLLOUT = "HalfCheetah-v5", 2048
LAUNCH = """
import runpy, sys
import gymnasium

transform = gymnasium.wrappers.TransformObservation
if int(gymnasium.__version__.split(".")[0]) >= 1:
    gymnasium.wrappers.TransformObservation = lambda env, function: transform(env, function, env.observation_space)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def cleanrl_speed(script: Path, steps: int, use_gpu: bool) -> float:
    """Env steps per second that CleanRL's script reports at its end."""
    gpu = "--cuda" if use_gpu else "--no-cuda"
    words = [str(script.resolve()), "--env-id", ENV, "--total-timesteps", str(steps), gpu]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", LAUNCH, *words]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    speeds = re.findall(r"SPS: (\d+)", done.stdout)
    if done.returncode or not speeds:
        sys.exit(f"{script} failed: {done.stderr.strip().splitlines()[-1:]}")
    return float(speeds[-1])


def deft_speed(steps: int, device: str) -> tuple[float, str]:
    """Env steps per second from the start of training to the end of the last update, and the device."""
    from deft.config.loading import resolve
    from deft.training.run import build_trainer

    learns = {"batch_size": ROLLOUT // 32, "n_epochs": 10, "learning_rate_schedule": "linear", "clip_range_vf": 0.2}
    settings: dict[str, Any] = {
        "algorithm": {"name": "ppo", "cfg": learns | {"max_grad_norm": 0.5, "entropy_coef": 0.0}},
        "env": {"id": ENV, "num_envs": 1},
        "policy": {"hidden_sizes": [64, 64], "normalize_reward": True},
        "trainer": {"rollout_steps": ROLLOUT, "total_timesteps": steps, "eval_freq": 0, "save_freq": 0},
        "logging": {"console_level": "ERROR", "tensorboard": False, "progress_bar": False},
        "device": device,
    }
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(resolve({**settings, "output_dir": f"{folder}/run"}))
        marks = [time.perf_counter()]
        finish_step = trainer.finish_step

        def finish_and_mark(previous: int, metrics: Any) -> None:
            finish_step(previous, metrics)
            marks.append(time.perf_counter())

        trainer.finish_step = finish_and_mark  # type: ignore[method-assign]
        trainer.train()
        trainer.close()
    return trainer.num_timesteps / (marks[-1] - marks[0]), trainer.device.type


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cleanrl", type=Path, required=True, help="CleanRL's ppo_continuous_action.py")
    parser.add_argument("--steps", type=int, default=5 * ROLLOUT)
    parser.add_argument("--devices", nargs="+", default=["auto", "cpu", "cuda"])
    parser.add_argument("--out", help="write the figures here")
    arguments = parser.parse_args()
    print_machine()
    its_speed = cleanrl_speed(arguments.cleanrl, arguments.steps, "cuda" in arguments.devices)
    rows: list[list[Any]] = [["CleanRL", "cuda" if "cuda" in arguments.devices else "cpu", round(its_speed), 1.0]]
    for device in arguments.devices:
        speed, used = deft_speed(arguments.steps, device)
        rows.append([f"Deft --device {device}", used, round(speed), round(speed / its_speed, 1)])
    header = ["", "device", "env steps/s", "ratio"]
    print_table(header, rows)
    write_json(arguments.out, {"speeds": [dict(zip(header, row, strict=True)) for row in rows]})


if __name__ == "__main__":
    main()
