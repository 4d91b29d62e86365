"""Held-out episodes by an explorer that no phase trains with: scripted pushes and grasps, and random actions.

They measure what a world model has learned from other episodes. `deft evaluate` of an adversarial
run, `deft train all` and the benchmarks measure world models on them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from deft.config.f1_settings import PhaseConfig
from deft.data.robot_episode import RobotEpisode
from deft.envs.f1 import F1RLEnv
from deft.models.f1.policy import F1Policy
from deft.training.phases.exploration import Exploration, InlineExplorer
from deft.training.phases.teacher import make_exploration

log = logging.getLogger(__name__)
SCRIPTS = ("push", "pick")  # tasks whose experts push and grasp
SCRIPTED_WORLDS = ("tabletop", "deft/Tabletop-v0")
JITTER = 0.2  # of the largest action: no two pushes are the same


@dataclass
class ScriptedExploration(Exploration):
    """The environment's scripted expert, with noise."""

    def choose(self, env: F1RLEnv, generator: np.random.Generator, step: int) -> np.ndarray:
        """What the expert would do, and noise."""
        action = env.expert_action()
        return (action + JITTER * generator.uniform(-1.0, 1.0, len(action)) * env.action_mask).clip(-1.0, 1.0)


def held_out_episodes(config: PhaseConfig, policy: F1Policy, count: int, seed: int = 0) -> list[RobotEpisode]:
    """Half of the episodes scripted, pushes and grasps in turn, half random; in scenes that are never trained on.

    In an environment without such scripts all are random, with a warning.
    """
    world = config.environment.get("world", SCRIPTED_WORLDS[0])
    has_scripts = world in SCRIPTED_WORLDS
    num_scripted = count // 2 if has_scripts else 0
    if not has_scripts:
        log.warning("world %s has no scripted pushes and grasps: all held-out episodes are random", world)
    parts = [(make_exploration(config, policy, held_out=True), count - num_scripted)]
    for place, task in enumerate(SCRIPTS if has_scripts else ()):
        plain = make_exploration(config, policy, held_out=True)
        environment = {**plain.environment, "task_name": task}
        part = ScriptedExploration(environment, plain.seed, plain.colour_augmentation, True, 1)
        parts.append((part, len(range(place, num_scripted, len(SCRIPTS)))))
    found: list[RobotEpisode] = []
    for exploration, number in parts:
        exploration.seed = seed
        explorer = InlineExplorer(exploration)
        found += explorer.take(number)
        explorer.close()
    return found
