"""The beginnings of episodes, drawn on the host by `TabletopEnv` itself, so that a seed gives the scenes of the CPU.

Environment i plays the episodes that a `TabletopEnv` with its seed would play: the first is that of `reset(seed)`, the
following those of `reset()`. They do not depend on actions, so they are drawn ahead of time, in several processes.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from deft.envs.tabletop.env import INSTRUCTION_LENGTH, TabletopEnv
from deft.envs.tabletop.tasks import TASKS
from deft.envs.tabletop.warp.model import batch_model, scene_numbers
from deft.schema import encode_text

MIN_PARALLEL = 256  # episodes for which processes are started
TASK_NUMBERS = {name: number for number, name in enumerate(TASKS)}


def draw_episodes(arguments: dict[str, Any], seeds: Sequence[int], per_env: int) -> dict[str, np.ndarray]:
    """Return the first `per_env` episodes of each seed, [seeds, per_env, …] each; see `scene_numbers`.

    Besides: `task`, `goal`, `base` (int32), `instruction` (uint8 [64]). `arguments` are those of `TabletopEnv`.
    """
    workers = min(os.cpu_count() or 1, 32)
    if len(seeds) * per_env < MIN_PARALLEL or workers < 2:
        return _draw(arguments, per_env, seeds)
    parts = [part.tolist() for part in np.array_split(np.asarray(seeds), min(4 * workers, len(seeds)))]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        drawn = list(pool.map(partial(_draw, arguments, per_env), parts))
    return {name: np.concatenate([part[name] for part in drawn]) for name in drawn[0]}


def _draw(arguments: dict[str, Any], per_env: int, seeds: Sequence[int]) -> dict[str, np.ndarray]:
    env = TabletopEnv(**{**arguments, "observation": "state"})
    batch = batch_model(env)
    rows = []
    for seed in seeds:
        for number in range(per_env):
            env.reset(seed=seed if number == 0 else None)
            simulation = env.simulation
            rows.append(
                {
                    **scene_numbers(batch, simulation.scene, simulation.model, simulation.data),
                    "task": np.int32(TASK_NUMBERS[env.task_name]),
                    "goal": np.int32(env.goal.index),
                    "base": np.int32(env.goal.base),
                    "instruction": encode_text(env.instruction, INSTRUCTION_LENGTH),
                }
            )
    return {
        name: np.stack([row[name] for row in rows]).reshape(len(seeds), per_env, *rows[0][name].shape)
        for name in rows[0]
    }
