"""How fast PPO or GRPO trains vla-tiny from images and words on the tabletop of MuJoCo Warp, and where the time goes.

The whole of `deft train ppo --vector warp`: acting, stepping, rendering, writing the rollout, the update. All four
tasks, both cameras at 64 pixels, randomised scenes; episodes begin at staggered steps, as later in training. The first
row of figures is the speed without timers; the shares are from further updates in which every part is synchronised with
the device. Nothing but ended episodes is copied to the host if environments and policy share the device; with `--host`
steps are copied to numpy arrays, as for algorithms that need them.

    python benchmarks/warp_training.py --device cuda --num-envs 1024 2048 4096 --out warp_training.json
    python benchmarks/warp_training.py --device cuda --num-envs 4096 --algorithm grpo --rollout-steps 38
    python benchmarks/warp_training.py --device cpu --num-envs 2 --rollout-steps 4 --updates 1 --image-size 16
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import print_machine, print_table, write_json

EPISODE_STEPS = 150
LOOKS = {"random_appearance": True, "random_background": True, "random_light": True, "random_table_height": 0.03}
PARTS = ("acting", "stepping", "rendering", "resets", "copying", "update", "rest")


class Clock:
    """Seconds of each part while `is_on`, without those of the parts inside it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_on = False
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]  # of each part under way, the seconds of the parts inside it

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def watch(self, owner: Any, method: str, part: str) -> None:
        """Count the time of a method to a part."""
        function: Callable[..., Any] = getattr(owner, method)

        @functools.wraps(function)
        def timed(*arguments: Any, **keywords: Any) -> Any:
            if not self.is_on:
                return function(*arguments, **keywords)
            begin = self.now()
            self._inner.append(0.0)
            result = function(*arguments, **keywords)
            whole = self.now() - begin
            self.seconds[part] += whole - self._inner.pop()
            self._inner[-1] += whole
            return result

        setattr(owner, method, timed)


def make_config(num_envs: int, arguments: argparse.Namespace, directory: str) -> Any:
    from deft.config.loading import resolve

    kwargs = {
        "task": "all",
        "observation": "images",
        "image_size": arguments.image_size,
        "control_mode": "delta_ee_pos",
        "domain_randomization": LOOKS,
        "num_scenes": arguments.num_scenes,
    }
    model = {"bottleneck": 0, "switch_dims": [-1], "vision": arguments.vision}
    own = {"compile": arguments.compile}
    if arguments.algorithm == "grpo":  # groups begin together: episodes are not staggered
        own = {"group_size": min(8, num_envs), "max_resamples": 0}
    return resolve(
        {
            "algorithm": {
                "name": arguments.algorithm,
                "cfg": {
                    "batch_size": arguments.batch_size,
                    "n_epochs": arguments.n_epochs,
                    **own,
                    "precision": arguments.precision,
                    "learning_rate": 1e-4,
                },
            },
            "env": {
                "id": "tabletop",
                "vector": "warp",
                "num_envs": num_envs,
                "kwargs": kwargs,
                "max_episode_steps": EPISODE_STEPS,
            },
            "policy": {
                "name": "vla",
                "chunk_length": arguments.chunk_length,
                "unit_actions": True,
                "vla_config": {"model_class": "vla-tiny", "model_config": model},
            },
            "trainer": {
                "rollout_steps": arguments.rollout_steps,
                "iterations": arguments.warm_up + 2 * arguments.updates,
                "eval_freq": 0,
                "save_freq": 0,
            },
            "logging": {"progress_bar": False, "console_level": "WARNING"},
            "output_dir": f"{directory}/run-{num_envs}",
            "device": arguments.device,
        }
    )


def measure(num_envs: int, arguments: argparse.Namespace, directory: str) -> dict[str, Any]:
    # Not at the top: the processes that draw scenes import this file.
    from deft.envs.host import HostVectorEnv
    from deft.training.run import build_trainer

    begin = time.perf_counter()
    trainer = build_trainer(make_config(num_envs, arguments, directory))
    env: Any = trainer.env
    collector, clock = trainer.collection.collector, Clock(env.device)
    if arguments.host:
        collector = type(collector)(HostVectorEnv(env), trainer.policy, collector.seed)
        trainer.collection.collector, trainer.collection.buffer.columns.device = collector, None
    reset, marks = env.reset, []

    def staggered(seed: Any = None) -> Any:
        observation = reset(seed)
        if arguments.algorithm == "ppo":
            env._lengths.random_(0, EPISODE_STEPS)
        if not marks:
            marks.append((clock.now(), 0))
        return observation

    env.reset = staggered
    clock.watch(trainer.policy, "act", "acting")
    clock.watch(trainer.policy, "get_value", "acting")
    clock.watch(env, "_draw", "rendering")
    clock.watch(env, "_begin", "resets")
    clock.watch(env, "step", "stepping")
    if arguments.host:
        clock.watch(collector.env, "step", "copying")
    clock.watch(trainer.collection.buffer, "write", "copying")
    clock.watch(trainer.algorithm, "update", "update")
    finish = trainer.finish_step

    def marked(previous: int, metrics: Any) -> None:
        finish(previous, metrics)
        marks.append((clock.now(), trainer.num_timesteps))
        clock.is_on = len(marks) > arguments.warm_up + arguments.updates

    trainer.finish_step = marked  # type: ignore[method-assign]
    trainer.train()
    first, middle, last = (marks[arguments.warm_up + number * arguments.updates] for number in range(3))
    trainer.close()
    timed = last[0] - middle[0]
    clock.seconds["rest"] = timed - sum(clock.seconds.values())
    return {
        "num_envs": num_envs,
        "env steps/s": (middle[1] - first[1]) / (middle[0] - first[0]),
        "env steps/s with timers": (last[1] - middle[1]) / timed,
        **{f"{part} %": 100 * clock.seconds[part] / timed for part in PARTS},
        "seconds an update": (middle[0] - first[0]) / arguments.updates,
        "start s": marks[0][0] - begin,
        "memory GiB": torch.cuda.max_memory_allocated() / 2**30 if env.device.type == "cuda" else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--num-envs", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--algorithm", default="ppo", choices=["ppo", "grpo"])
    parser.add_argument("--rollout-steps", type=int, default=16)
    parser.add_argument("--chunk-length", type=int, default=4, help="that of vla-tiny")
    parser.add_argument("--batch-size", type=int, default=8192)
    parser.add_argument("--n-epochs", type=int, default=2)
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--num-scenes", type=int, default=16_384, help="different scenes, drawn while stepping")
    parser.add_argument("--warm-up", type=int, default=1, help="updates that are not measured")
    parser.add_argument("--updates", type=int, default=4, help="measured without timers, and as many with")
    parser.add_argument("--compile", action="store_true", help="torch.compile of the update's forward pass")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "tf32", "bf16"])
    parser.add_argument("--vision", default="cells", choices=["cells", "convolutions"])
    parser.add_argument("--host", action="store_true", help="copy every step to the host")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    print_machine()
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for num_envs in arguments.num_envs:
            rows.append(measure(num_envs, arguments, directory))
            print({name: round(value, 3) for name, value in rows[-1].items()}, flush=True)
            if arguments.out is not None:
                settings = {name: str(value) for name, value in vars(arguments).items()}
                write_json(str(arguments.out), {"arguments": settings, "rows": rows})
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
    names = list(rows[0])
    print_table(
        names, [[f"{row[name]:,.1f}" if row[name] < 100 else f"{row[name]:,.0f}" for name in names] for row in rows]
    )


if __name__ == "__main__":
    main()
