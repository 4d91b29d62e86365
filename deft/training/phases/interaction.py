"""Held-out episodes in which a robot touches, pushes, grasps and lifts objects: scripted experts and perturbed ones.

`deft evaluate` measures world models on them, `benchmarks/phases_gpu.py` too. No phase trains on these scenes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from deft.config.f1_settings import PhaseConfig
from deft.envs.f1 import F1RLEnv
from deft.envs.interaction import InteractionEnv
from deft.envs.padded import GRIPPERS
from deft.envs.tabletop.tasks import GOAL_TASKS
from deft.evaluation.interaction import InteractionEpisode
from deft.models.f1.policy import F1Policy
from deft.runs.logging import show_evaluation
from deft.training.phases.exploration import ScriptedExploration, make_exploration

LENGTH = 48  # steps of an episode; the experts need 8 to 44
PERTURBATIONS = ("none", "slow", "displaced", "released")
PERIOD, DURATION = 14, 5  # steps between the beginnings of two disturbances, and of each
DISPLACEMENT = 0.7  # added to every dim of the arm, up or down
SLOWER = 0.5


@dataclass
class InteractionExploration(ScriptedExploration):
    """The scripted expert with noise, and with a perturbation by the episode's number.

    none: the expert. slow: at half its speed. displaced: for 5 of 14 steps the arm is pushed away in a random
    direction, so that objects are hit from other sides, missed and grasped off centre. released: for 5 of 14 steps the
    gripper does the opposite, so that objects are dropped.
    """

    _offset: np.ndarray = field(default_factory=lambda: np.zeros(0))
    _start: int = 0
    _number: int = 0

    def choose(self, env: F1RLEnv, generator: np.random.Generator, step: int) -> np.ndarray:
        """The expert's action, noise and the perturbation."""
        action = super().choose(env, generator, step)
        kind = PERTURBATIONS[self._number // len(GOAL_TASKS) % len(PERTURBATIONS)]
        arm = env.action_mask.astype(bool).copy()
        arm[list(GRIPPERS.values())] = False
        if step == 0:
            self._start = int(generator.integers(PERIOD))
        if (step - self._start) % PERIOD == 0:
            self._offset = DISPLACEMENT * generator.choice([-1.0, 1.0], len(action)) * arm
        is_disturbed = step >= self._start and (step - self._start) % PERIOD < DURATION
        if kind == "slow":
            action = np.where(arm, SLOWER * action, action)
        elif kind == "displaced" and is_disturbed:
            action = (action + self._offset).clip(-1.0, 1.0)
        elif kind == "released" and is_disturbed:
            action = np.where(arm, action, -action)
        return action

    def recorded(self, env: InteractionEnv, number: int) -> InteractionEpisode:
        """Return one episode with its recording."""
        self._number = number
        episode = self.episode(env, number, self.scene_seed(number))
        return InteractionEpisode(episode, **env.recording())


def interaction_episodes(config: PhaseConfig, policy: F1Policy, count: int, seed: int = 0) -> list[InteractionEpisode]:
    """Return held-out episodes of reach, push, pick and place in turn, and each perturbation in turn.

    Every episode has a scene of its own, which is never trained on. Frames have the model's size.
    """
    environment = {**make_exploration(config, policy, held_out=True).environment, "max_steps": LENGTH}
    found: dict[int, InteractionEpisode] = {}
    with show_evaluation(count) as watch:
        for first, task in enumerate(GOAL_TASKS[:count]):
            exploration = InteractionExploration(environment | {"task_name": task}, seed, held_out=True)
            env = InteractionEnv(exploration.environment)
            for number in range(first, count, len(GOAL_TASKS)):
                found[number] = exploration.recorded(env, number)
                watch(1)
            env.close()
    return [found[number] for number in range(count)]
