"""Worlds that a policy acts in: Gymnasium environments, many at a time. Importing this does not import torch."""

import gymnasium

from deft.envs.chunk import ActionChunk
from deft.envs.make import make_env, make_vector_env, wrap
from deft.envs.serial import SerialVectorEnv
from deft.envs.vector import Episode, Observation, VectorEnv, VectorStep

gymnasium.register(id="deft/Reach-v0", entry_point="deft.envs.reach:ReachEnv", max_episode_steps=50)

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
