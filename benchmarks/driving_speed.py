"""How fast the driving simulator steps: many copies at once, with vector and image observations, and one copy alone.

A vehicle-step is one vehicle of one copy (the ego or another that is on the road) stepped 0.2 s. Each row runs in a
fresh process on one thread, with random actions and the resets that they lead to (a copy every 20 steps); the best of
five stretches counts. Wall and CPU time are both shown: on a machine that does nothing else they agree. The verdict
goes by CPU time.

    python benchmarks/driving_speed.py
    python benchmarks/driving_speed.py --random-episodes 10000
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
from common import print_machine, print_table, run_worker, write_json

from deft.config.settings import EnvConfig
from deft.envs import SerialVectorEnv, make_env, make_vector_env
from deft.envs.driving.env import DrivingVectorEnv
from deft.envs.driving.road import MAP_RADIUS
from deft.envs.driving.simulator import DIFFICULTIES, DrivingSimulator

BAR = 100_000  # vehicle-steps a second, 64 copies, the environment with vector observations
STRETCHES = 5
CASES: dict[str, tuple[str, int, dict[str, Any], int]] = {  # how, copies, kwargs, steps a stretch
    "world alone, medium": ("world", 64, {}, 150),
    "vector": ("vector", 64, {}, 150),
    "vector, easy": ("vector", 64, {"difficulty": "easy"}, 150),
    "vector, hard": ("vector", 64, {"difficulty": "hard"}, 150),
    "image, 64 px": ("vector", 64, {"observation": "image"}, 30),
    "image, 128 px": ("vector", 64, {"observation": "image", "image_size": 128}, 8),
    "vector, 256 copies": ("vector", 256, {}, 60),
    "vector, 1 copy": ("vector", 1, {}, 300),
    "one by one, 64 copies": ("serial", 64, {}, 8),
}


def measure(how: str, num_envs: int, kwargs: dict[str, Any], steps: int) -> dict[str, float]:
    """Env steps and vehicle-steps a second."""
    config = EnvConfig(id="driving", num_envs=num_envs, kwargs=kwargs)
    generator = np.random.default_rng(0)
    env: Any
    if how == "world":
        simulator = DrivingSimulator(num_envs)
        simulator.reset(seeds=range(num_envs))
    else:
        env = make_vector_env(config) if how == "vector" else SerialVectorEnv([lambda: make_env(config)] * num_envs)
        env.reset(0)
    best = {"wall": np.inf, "cpu": np.inf}
    for _ in range(STRETCHES):
        actions = generator.uniform(-1, 1, (steps, num_envs, 2)).astype(np.float32)
        wall, cpu = time.perf_counter(), time.process_time()
        for action in actions:
            if how == "world":
                simulator.step(5.0 * action[:, 0], 0.25 * action[:, 1])
                simulator.reset(np.flatnonzero(simulator.collided | simulator.off_road | simulator.reached))
            else:
                env.step(action)
        best["wall"] = min(best["wall"], time.perf_counter() - wall)
        best["cpu"] = min(best["cpu"], time.process_time() - cpu)
    # Every environment of a difficulty has the same number of vehicles
    if how == "world":
        simulators = [simulator]
    else:
        simulators = [env.simulator] if how == "vector" else [one.unwrapped.simulator for one in env.envs]
    vehicles = sum(one.num_vehicles for one in simulators)
    return {
        "steps_wall": steps * num_envs / best["wall"],
        "steps_cpu": steps * num_envs / best["cpu"],
        "vehicles_wall": steps * vehicles / best["wall"],
        "vehicles_cpu": steps * vehicles / best["cpu"],
    }


def play_random(episodes: int) -> dict[str, Any]:
    """Random actions until so many episodes have ended; counts what must not happen."""
    low, high = -MAP_RADIUS, MAP_RADIUS
    found = {"episodes": 0, "steps": 0, "nan": 0, "outside": 0, "collisions": 0, "off_road": 0}
    for number, difficulty in enumerate(DIFFICULTIES):
        env = DrivingVectorEnv(64, difficulty=difficulty)
        env.reset(0)
        generator = np.random.default_rng(number)
        while found["episodes"] < episodes * (number + 1) / len(DIFFICULTIES):
            step = env.step(generator.uniform(-1, 1, (64, 2)))
            simulator = env.simulator
            found["steps"] += 64
            found["episodes"] += len(step.episodes)
            found["nan"] += int(np.isnan(step.observation).sum() + np.isnan(step.reward).sum())
            for positions in (simulator.position, simulator.other_position[simulator.other_active]):
                found["outside"] += int(((positions < low) | (positions > high)).sum())
            found["collisions"] += sum(episode.terms["collision"] < 0 for episode in step.episodes)
            found["off_road"] += sum(episode.terms["off_road"] < 0 for episode in step.episodes)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--random-episodes", type=int, help="play so many with random actions and count failures")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # what a worker process measures
    arguments = parser.parse_args()
    if arguments.case is not None:
        print(json.dumps(measure(*json.loads(arguments.case))))
        return
    print_machine()
    if arguments.random_episodes is not None:
        result: dict[str, Any] = play_random(arguments.random_episodes)
        print_table(list(result), [list(result.values())])
    else:
        result, rows = {}, []
        for name, case in CASES.items():
            found = result[name] = run_worker("driving_speed.py", ["--case", json.dumps(case)])
            verdict = ""
            if name == "vector":
                verdict = f"{BAR:,}: {'reached' if found['vehicles_cpu'] >= BAR else 'MISSED'}"
            figures = [found[key] for key in ("vehicles_cpu", "vehicles_wall", "steps_cpu", "steps_wall")]
            rows.append([name, *(f"{figure:,.0f}" for figure in figures), verdict])
        header = ["64 copies", "vehicle-steps/s (CPU)", "(wall)", "env steps/s (CPU)", "(wall)", "bar"]
        print_table(header, rows)
    write_json(arguments.json, result)


if __name__ == "__main__":
    main()
