"""Environments: Gymnasium environments and vector environments. Importing this package does not import torch.

The names below are loaded when first used: worker processes of a suite's interpreter import single modules, with no
other packages than Gymnasium and NumPy.
"""

import importlib
from typing import TYPE_CHECKING, Any

import gymnasium

from deft.envs.wrappers import DIFFICULTY

if TYPE_CHECKING:
    from deft.envs.layout import Observation
    from deft.envs.make import make_env, make_vector_env, wrap
    from deft.envs.serial import SerialVectorEnv
    from deft.envs.vector import Episode, VectorEnv, VectorStep
    from deft.envs.wrappers import ActionChunk

_PLACES = {
    "ActionChunk": "wrappers",
    "Episode": "vector",
    "Observation": "layout",
    "SerialVectorEnv": "serial",
    "VectorEnv": "vector",
    "VectorStep": "vector",
    "make_env": "make",
    "make_vector_env": "make",
    "wrap": "make",
}

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


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'deft.envs' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"deft.envs.{_PLACES[name]}"), name)
    globals()[name] = value
    return value
