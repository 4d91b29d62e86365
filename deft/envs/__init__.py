"""Environments: Gymnasium environments and vector environments. Importing this package does not import torch."""

import gymnasium

from deft.envs.layout import Observation
from deft.envs.make import make_env, make_vector_env, wrap
from deft.envs.serial import SerialVectorEnv
from deft.envs.vector import Episode, VectorEnv, VectorStep
from deft.envs.wrappers import DIFFICULTY, ActionChunk

for name, entry_point, options in (
    ("Reach", "reach:ReachEnv", {"max_episode_steps": 50}),
    ("Tabletop", "tabletop.env:TabletopEnv", {"max_episode_steps": 150}),
    ("Driving", "driving.env:DrivingEnv", {"max_episode_steps": 150, "additional_wrappers": (DIFFICULTY,)}),
    ("Carla", "adapters.carla:CarlaEnv", {"additional_wrappers": (DIFFICULTY,)}),
    ("F1Teacher", "f1:TeacherEnv", {}),
    ("F1Student", "f1:StudentEnv", {}),
    ("ManiSkill", "adapters.maniskill:ManiSkillEnv", {}),
    ("RoboTwin", "adapters.robotwin:RoboTwinEnv", {"max_episode_steps": 400}),
):
    gymnasium.register(id=f"deft/{name}-v0", entry_point=f"deft.envs.{entry_point}", **options)

__all__ = [
    "ActionChunk",
    "Episode",
    "Observation",
    "SerialVectorEnv",
    "VectorEnv",
    "VectorStep",
    "make_env",
    "make_vector_env",
    "wrap",
]
