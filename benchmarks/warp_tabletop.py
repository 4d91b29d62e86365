"""How fast the tabletop steps on MuJoCo Warp (`env.vector: warp`), for growing numbers of environments.

All four tasks, both cameras at 64 pixels, random actions. A row gives env steps a second with everything (control,
physics, rewards, images, the reset of ended episodes with randomised scenes), of physics alone and images alone, and
the time of the first reset (scenes drawn on the host, kernels compiled). Episodes begin at staggered steps, as in
training, so that resets are spread evenly.

    python benchmarks/warp_tabletop.py --device cuda --out warp_speed.json
    python benchmarks/warp_tabletop.py --device cuda --randomization clutter --num-envs 1024 4096
    python benchmarks/warp_tabletop.py --device cpu --num-envs 2 --steps 4
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import print_machine, print_table, write_json

EPISODE_STEPS = 150
RANDOM_LOOKS: dict[str, Any] = {
    "random_appearance": True,
    "random_background": True,
    "random_light": True,
    "random_head_camera_dis": 0.05,
    "random_table_height": 0.03,
}
RANDOMIZATIONS = {"none": {}, "looks": RANDOM_LOOKS, "clutter": {**RANDOM_LOOKS, "cluttered_table": True}}


def timed(device: torch.device, count: int, work: Callable[[], Any]) -> float:
    """Seconds of `count` calls, after one call that is not measured."""
    work()
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(count):
        work()
    synchronize(device)
    return time.perf_counter() - begin


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(num_envs: int, arguments: argparse.Namespace) -> dict[str, Any]:
    # Not at the top: the processes that draw scenes import this file.
    from deft.envs.tabletop.warp.env import WarpTabletopEnv

    begin = time.perf_counter()
    env = WarpTabletopEnv(
        num_envs,
        device=arguments.device,
        num_scenes=arguments.num_scenes,
        chunk_length=arguments.chunk_length,
        max_episode_steps=EPISODE_STEPS,
        task="all",
        control_mode=arguments.control_mode,
        observation="images",
        image_size=arguments.image_size,
        domain_randomization=RANDOMIZATIONS[arguments.randomization],
    )
    env.reset(seed=0)
    synchronize(env.device)
    first_reset = time.perf_counter() - begin
    env._lengths.random_(0, EPISODE_STEPS)  # staggered
    shape = (num_envs, *env.action_space.shape)
    ended = 0
    transferred = torch.empty(shape, device=env.device)

    def step() -> None:
        nonlocal ended
        ended += len(env.step(transferred.uniform_(-1, 1)).episodes)

    begin = time.perf_counter()
    whole = timed(env.device, arguments.steps, step)
    wall = time.perf_counter() - begin
    physics = timed(env.device, arguments.steps, env.simulation.advance)
    present = env._observations[0]
    images = timed(env.device, arguments.steps, lambda: env._observe(env._rows, present))
    steps = arguments.steps * num_envs
    row = {
        "num_envs": num_envs,
        "env steps/s": steps * env.chunk_length / whole,
        "physics steps/s": steps / physics,
        "frames/s": steps * len(env._template.cameras) / images,
        "physics share": physics * env.chunk_length / whole,
        "image share": images / whole,
        "episodes": ended,
        "first reset s": first_reset,
        "memory GiB": torch.cuda.max_memory_allocated() / 2**30 if env.device.type == "cuda" else 0.0,
        "wall s": wall,
    }
    env.close()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--num-envs", type=int, nargs="+", default=[64, 256, 1024, 2048, 4096, 8192])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--chunk-length", type=int, default=1)
    parser.add_argument("--control-mode", default="delta_ee_pos")
    parser.add_argument("--randomization", choices=sorted(RANDOMIZATIONS), default="looks")
    parser.add_argument("--num-scenes", type=int, default=16_384, help="different scenes, drawn while stepping")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    print_machine()
    rows = []
    for num_envs in arguments.num_envs:
        rows.append(measure(num_envs, arguments))
        print({name: round(value, 3) for name, value in rows[-1].items()}, flush=True)
        if arguments.out is not None:
            write_json(str(arguments.out), {"arguments": {k: str(v) for k, v in vars(arguments).items()}, "rows": rows})
    names = list(rows[0])
    print_table(
        names, [[f"{row[name]:,.2f}" if row[name] < 100 else f"{row[name]:,.0f}" for name in names] for row in rows]
    )


if __name__ == "__main__":
    main()
