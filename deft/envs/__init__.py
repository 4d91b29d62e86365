"""Environments: Gymnasium environments and vector environments. Importing this package does not import torch."""

import gymnasium

from deft.envs.layout import Observation
from deft.envs.make import make_env, make_vector_env, wrap
from deft.envs.serial import SerialVectorEnv
from deft.envs.vector import Episode, VectorEnv, VectorStep
from deft.envs.wrappers import DIFFICULTY, ActionChunk

gymnasium.register(id="deft/Reach-v0", entry_point="deft.envs.reach:ReachEnv", max_episode_steps=50)
gymnasium.register(id="deft/Tabletop-v0", entry_point="deft.envs.tabletop.env:TabletopEnv", max_episode_steps=150)
gymnasium.register(
    id="deft/Driving-v0",
    entry_point="deft.envs.driving.env:DrivingEnv",
    max_episode_steps=150,
    additional_wrappers=(DIFFICULTY,),
)
gymnasium.register(
    id="deft/Carla-v0",
    entry_point="deft.envs.adapters.carla:CarlaEnv",
    additional_wrappers=(DIFFICULTY,),
)
gymnasium.register(id="deft/F1Teacher-v0", entry_point="deft.envs.f1:TeacherEnv")
gymnasium.register(id="deft/F1Student-v0", entry_point="deft.envs.f1:StudentEnv")
gymnasium.register(id="deft/ManiSkill-v0", entry_point="deft.envs.adapters.maniskill:ManiSkillEnv")
gymnasium.register(id="deft/RoboTwin-v0", entry_point="deft.envs.adapters.robotwin:RoboTwinEnv", max_episode_steps=400)

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
