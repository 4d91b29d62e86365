"""How fast the tabletop steps: state alone, both cameras at three sizes, the randomised scene, and many at once.

Each row runs in a fresh process, with random actions and the resets that they lead to. Wall and CPU time are both
shown: on a machine that does nothing else they agree but for the software renderer's threads; on a busy one the CPU
time is the environment's and the rest is the neighbours'. The verdict goes by CPU time. `--parts` says where it goes.

    python benchmarks/tabletop_speed.py
    python benchmarks/tabletop_speed.py --workers
    python benchmarks/tabletop_speed.py --maniskill
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from typing import Any

import numpy as np
from common import print_machine, print_table, run_worker, write_json

from deft.config.settings import EnvConfig
from deft.envs import make_env, make_vector_env
from deft.envs.tabletop.env import TabletopEnv

EPISODE_STEPS = 150
RANDOMIZATION = {"random_background": True, "random_light": True, "cluttered_table": True, "random_appearance": True}
IMAGES: dict[str, Any] = {"observation": "images"}
CASES: dict[str, tuple[dict[str, Any], int, float | None]] = {  # kwargs, steps, steps a second to reach
    "state, delta_qpos": ({}, 4000, 3000),
    "state, delta_ee": ({"control_mode": "delta_ee"}, 3000, None),
    "state, delta_ee_pos": ({"control_mode": "delta_ee_pos"}, 3000, None),
    "state, cluttered table": ({"domain_randomization": RANDOMIZATION}, 4000, None),
    "two cameras, 64 px": ({**IMAGES, "image_size": 64}, 900, 300),
    "two cameras, 128 px": ({**IMAGES, "image_size": 128}, 450, None),
    "two cameras, 224 px": ({**IMAGES, "image_size": 224}, 300, 60),
    "two cameras, 64 px, randomised": ({**IMAGES, "domain_randomization": RANDOMIZATION}, 900, None),
}


def measure(kwargs: dict[str, Any], steps: int, world: str = "tabletop") -> dict[str, float]:
    """Steps a second of one environment, resets included."""
    env = TabletopEnv(**kwargs) if world == "tabletop" else make_env(EnvConfig(id=world, kwargs=kwargs)).unwrapped
    env.reset(seed=0)
    actions = np.random.default_rng(0).uniform(-1, 1, (steps, *env.action_space.shape))
    for action in actions[:20]:
        env.step(action)
    env.reset(seed=0)
    wall, cpu, length = time.perf_counter(), time.process_time(), 0
    for action in actions:
        length += 1
        terminated = env.step(action)[2]
        if terminated or length == EPISODE_STEPS:
            env.reset()
            length = 0
    return {"wall": steps / (time.perf_counter() - wall), "cpu": steps / (time.process_time() - cpu)}


def measure_parts(kwargs: dict[str, Any], steps: int) -> dict[str, float]:
    """CPU milliseconds of physics, pictures and the rest of a step, and of a reset."""
    env = TabletopEnv(**kwargs)
    env.reset(seed=0)
    actions = np.random.default_rng(0).uniform(-1, 1, (steps, *env.action_space.shape))
    spent = {"physics": 0.0, "pictures": 0.0}

    def timed(function: Any, name: str) -> Any:
        def wrapper(*args: Any) -> Any:
            start = time.process_time()
            result = function(*args)
            spent[name] += time.process_time() - start
            return result

        return wrapper

    env.simulation.step = timed(env.simulation.step, "physics")  # type: ignore[method-assign]
    env.simulation.pictures = timed(env.simulation.pictures, "pictures")  # type: ignore[method-assign]
    start = time.process_time()
    for action in actions:
        env.step(action)
    total = time.process_time() - start
    start = time.process_time()
    for _ in range(30):
        env.reset()
    reset = (time.process_time() - start) / 30
    parts = {name: 1000 * value / steps for name, value in spent.items()}
    return {**parts, "rest": 1000 * (total - sum(spent.values())) / steps, "reset": 1000 * reset}


def measure_many(num_envs: int, vector: str, num_workers: int, steps: int) -> dict[str, float]:
    """Steps a second of several environments with two cameras, and the memory that they take in gigabytes."""
    kwargs = {**IMAGES, "image_size": 64}
    config = EnvConfig(id="tabletop", kwargs=kwargs, num_envs=num_envs, vector=vector, num_workers=num_workers)
    env = make_vector_env(config)
    env.reset(seed=0)
    actions = np.random.default_rng(0).uniform(-1, 1, (steps, num_envs, 8)).astype(np.float32)
    env.step(actions[0])
    wall = time.perf_counter()
    for action in actions:
        env.step(action)
    wall = time.perf_counter() - wall
    env.close()
    usage = sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {"wall": steps * num_envs / wall, "gigabytes": usage / 1024**2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", action="store_true", help="CPU milliseconds of each part of a step")
    parser.add_argument("--workers", action="store_true", help="worker processes, and the memory of 64 environments")
    parser.add_argument("--maniskill", action="store_true", help="beside ManiSkill's PickCube with two cameras, 64 px")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # what a worker process measures
    arguments = parser.parse_args()
    if arguments.case is not None:
        kind, *values = json.loads(arguments.case)
        print(json.dumps({"speed": measure, "parts": measure_parts, "many": measure_many}[kind](*values)))
        return
    print_machine()
    result: dict[str, Any] = {}

    def run(*case: Any) -> dict[str, Any]:
        return run_worker("tabletop_speed.py", ["--case", json.dumps(case)])

    if arguments.parts:
        rows = []
        for name, (kwargs, steps, _) in CASES.items():
            found = result[name] = run("parts", kwargs, min(steps, 600))
            rows.append([name, *(f"{found[part]:.2f}" for part in ("physics", "pictures", "rest", "reset"))])
        print_table(["CPU milliseconds", "physics", "pictures", "rest", "a reset"], rows)
    elif arguments.maniskill:
        # Its simulator is an extra (`deft[maniskill]`) and needs Vulkan; without them the worker says what is missing.
        ours = result["tabletop"] = run("speed", {**IMAGES, "image_size": 64}, 900)
        theirs = result["maniskill"] = run("speed", {**IMAGES, "image_size": 64}, 100, "maniskill")
        rows = [[name, f"{found['wall']:.0f}"] for name, found in result.items()]
        print_table(["two cameras, 64 px", "steps/s (wall)"], rows)
        print(f"the tabletop is {ours['wall'] / theirs['wall']:.1f}x as fast (bar: 20x)")
    elif arguments.workers:
        rows = []
        for num_envs, vector, workers in ((4, "sync", 0), (4, "process", 1), (4, "process", 2), (64, "sync", 0)):
            found = run("many", num_envs, vector, max(workers, 1), 2400 // (num_envs * 2))
            result[f"{num_envs} {vector} {workers}"] = found
            rows.append([num_envs, vector, workers, f"{found['wall']:.0f}", f"{found['gigabytes']:.2f}"])
        print_table(["environments", "kind", "workers", "steps/s (wall)", "GB"], rows)
    else:
        rows = []
        for name, (kwargs, steps, bar) in CASES.items():
            found = result[name] = run("speed", kwargs, steps)
            verdict = "" if bar is None else f"{bar:.0f}: {'reached' if found['cpu'] >= bar else 'MISSED'}"
            rows.append([name, f"{found['cpu']:.0f}", f"{found['wall']:.0f}", verdict])
        print_table(["", "steps/s (CPU)", "steps/s (wall)", "bar"], rows)
    write_json(arguments.json, result)


if __name__ == "__main__":
    main()
