"""Deft trains vision-language-action robot policies with reinforcement learning.

The names below are loaded when first used, so that `import deft` is quick and imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deft.algorithms.ppo import PPO
    from deft.config.rl_config import RLConfig
    from deft.data.rollout import RolloutBuffer
    from deft.data.vla_buffer import VLABuffer
    from deft.envs import make_env, make_vector_env
    from deft.models.actor_critic import ActorCritic
    from deft.models.vla.interface import VLAModelInterface
    from deft.models.vla.loading import load_vla_model
    from deft.models.vla.policy import VLAPolicy
    from deft.training.api import PPOTrainer
    from deft.training.trainer import Trainer

__version__ = "0.1.0"

_MODULES = {
    "PPO": "deft.algorithms.ppo",
    "RLConfig": "deft.config.rl_config",
    "RolloutBuffer": "deft.data.rollout",
    "VLABuffer": "deft.data.vla_buffer",
    "make_env": "deft.envs",
    "make_vector_env": "deft.envs",
    "ActorCritic": "deft.models.actor_critic",
    "VLAModelInterface": "deft.models.vla.interface",
    "VLAPolicy": "deft.models.vla.policy",
    "load_vla_model": "deft.models.vla.loading",
    "PPOTrainer": "deft.training.api",
    "Trainer": "deft.training.trainer",
}

__all__ = [
    "PPO",
    "ActorCritic",
    "PPOTrainer",
    "RLConfig",
    "RolloutBuffer",
    "Trainer",
    "VLABuffer",
    "VLAModelInterface",
    "VLAPolicy",
    "__version__",
    "load_vla_model",
    "make_env",
    "make_vector_env",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'deft' has no attribute '{name}'")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
