"""Deft trains vision-language-action robot policies with reinforcement learning.

The names below are loaded when first used, so that `import deft` is quick and imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deft.algorithms.cql import CQL
    from deft.algorithms.decision_transformer import DecisionTransformer
    from deft.algorithms.grpo import GRPO
    from deft.algorithms.iql import IQL
    from deft.algorithms.ppo import PPO
    from deft.algorithms.sac import SAC
    from deft.algorithms.sft import SFT
    from deft.algorithms.td3_bc import TD3BC
    from deft.config.f1_settings import TrainingConfig
    from deft.config.rl_yaml import get_environment_config, get_training_config, load_rl_config
    from deft.config.settings import CurriculumConfig
    from deft.config.views import OfflineRLConfig, RLConfig
    from deft.config.waypoint_settings import PPOConfig
    from deft.data.datasets import load_dataset
    from deft.data.offline_buffer import OfflineReplayBuffer
    from deft.data.replay import ReplayBuffer
    from deft.data.rollout import RolloutBuffer, VLABuffer
    from deft.data.writer import DatasetWriter
    from deft.envs import make_env, make_vector_env
    from deft.envs.adapters.sapien_gpu import get_physical_gpu_id, setup_sapien_gpu
    from deft.envs.f1 import F1RLEnv, StudentEnv, TeacherEnv
    from deft.envs.waypoints.toy import ToyWaypointEnv
    from deft.evaluation.loaded_policy import load_policy
    from deft.evaluation.vla_model import VLAModel
    from deft.models.actor_critic import ActorCritic
    from deft.models.f1.batch import BatchBuilder, MemoryStateManager
    from deft.models.f1.loading import load_f1_policy
    from deft.models.f1.optimization import set_policy_requires_grad, setup_optimizer, setup_scheduler
    from deft.models.f1.teacher import TeacherPolicy
    from deft.models.vla.interface import BaseVLAModel, VLAModelInterface
    from deft.models.vla.loading import load_vla_model
    from deft.models.vla.policy import VLAPolicy
    from deft.models.waypoint import DeltaHead, PPOPolicy, ValueHead
    from deft.training.api import (
        CQLTrainer,
        DecisionTransformerTrainer,
        GRPOTrainer,
        IQLTrainer,
        PPOTrainer,
        SACTrainer,
        SFTTrainer,
        TD3BCTrainer,
    )
    from deft.training.offline import OfflineTrainer
    from deft.training.phases.adversarial import AdversarialTrainer
    from deft.training.phases.base import BaseRLTrainer
    from deft.training.phases.student import StudentTrainer
    from deft.training.phases.teacher import TeacherTrainer
    from deft.training.trainer import Trainer

__version__ = "0.1.0"

_MODULES = {
    "CurriculumConfig": "deft.config.settings",
    "BatchBuilder": "deft.models.f1.batch",
    "MemoryStateManager": "deft.models.f1.batch",
    "setup_scheduler": "deft.models.f1.optimization",
    "setup_optimizer": "deft.models.f1.optimization",
    "set_policy_requires_grad": "deft.models.f1.optimization",
    "load_f1_policy": "deft.models.f1.loading",
    "TeacherPolicy": "deft.models.f1.teacher",
    "CQL": "deft.algorithms.cql",
    "DecisionTransformer": "deft.algorithms.decision_transformer",
    "IQL": "deft.algorithms.iql",
    "GRPO": "deft.algorithms.grpo",
    "PPO": "deft.algorithms.ppo",
    "SAC": "deft.algorithms.sac",
    "SFT": "deft.algorithms.sft",
    "TD3BC": "deft.algorithms.td3_bc",
    "OfflineRLConfig": "deft.config.views",
    "RLConfig": "deft.config.views",
    "TrainingConfig": "deft.config.f1_settings",
    "get_environment_config": "deft.config.rl_yaml",
    "get_training_config": "deft.config.rl_yaml",
    "load_rl_config": "deft.config.rl_yaml",
    "BaseRLTrainer": "deft.training.phases.base",
    "AdversarialTrainer": "deft.training.phases.adversarial",
    "StudentTrainer": "deft.training.phases.student",
    "TeacherTrainer": "deft.training.phases.teacher",
    "PPOConfig": "deft.config.waypoint_settings",
    "load_dataset": "deft.data.datasets",
    "OfflineReplayBuffer": "deft.data.offline_buffer",
    "ReplayBuffer": "deft.data.replay",
    "RolloutBuffer": "deft.data.rollout",
    "VLABuffer": "deft.data.rollout",
    "DatasetWriter": "deft.data.writer",
    "make_env": "deft.envs",
    "make_vector_env": "deft.envs",
    "F1RLEnv": "deft.envs.f1",
    "StudentEnv": "deft.envs.f1",
    "TeacherEnv": "deft.envs.f1",
    "ToyWaypointEnv": "deft.envs.waypoints.toy",
    "get_physical_gpu_id": "deft.envs.adapters.sapien_gpu",
    "setup_sapien_gpu": "deft.envs.adapters.sapien_gpu",
    "ActorCritic": "deft.models.actor_critic",
    "load_policy": "deft.evaluation.loaded_policy",
    "VLAModel": "deft.evaluation.vla_model",
    "BaseVLAModel": "deft.models.vla.interface",
    "VLAModelInterface": "deft.models.vla.interface",
    "load_vla_model": "deft.models.vla.loading",
    "VLAPolicy": "deft.models.vla.policy",
    "DeltaHead": "deft.models.waypoint",
    "PPOPolicy": "deft.models.waypoint",
    "ValueHead": "deft.models.waypoint",
    "GRPOTrainer": "deft.training.api",
    "PPOTrainer": "deft.training.api",
    "SACTrainer": "deft.training.api",
    "OfflineTrainer": "deft.training.offline",
    "CQLTrainer": "deft.training.api",
    "DecisionTransformerTrainer": "deft.training.api",
    "IQLTrainer": "deft.training.api",
    "SFTTrainer": "deft.training.api",
    "TD3BCTrainer": "deft.training.api",
    "Trainer": "deft.training.trainer",
}

__all__ = [
    "CQL",
    "GRPO",
    "IQL",
    "PPO",
    "SAC",
    "SFT",
    "TD3BC",
    "ActorCritic",
    "AdversarialTrainer",
    "BaseRLTrainer",
    "BaseVLAModel",
    "BatchBuilder",
    "CQLTrainer",
    "CurriculumConfig",
    "DatasetWriter",
    "DecisionTransformer",
    "DecisionTransformerTrainer",
    "DeltaHead",
    "F1RLEnv",
    "GRPOTrainer",
    "IQLTrainer",
    "MemoryStateManager",
    "OfflineRLConfig",
    "OfflineReplayBuffer",
    "OfflineTrainer",
    "PPOConfig",
    "PPOPolicy",
    "PPOTrainer",
    "RLConfig",
    "ReplayBuffer",
    "RolloutBuffer",
    "SACTrainer",
    "SFTTrainer",
    "StudentEnv",
    "StudentTrainer",
    "TD3BCTrainer",
    "TeacherEnv",
    "TeacherPolicy",
    "TeacherTrainer",
    "ToyWaypointEnv",
    "Trainer",
    "TrainingConfig",
    "VLABuffer",
    "VLAModel",
    "VLAModelInterface",
    "VLAPolicy",
    "ValueHead",
    "__version__",
    "get_environment_config",
    "get_physical_gpu_id",
    "get_training_config",
    "load_dataset",
    "load_f1_policy",
    "load_policy",
    "load_rl_config",
    "load_vla_model",
    "make_env",
    "make_vector_env",
    "set_policy_requires_grad",
    "setup_optimizer",
    "setup_sapien_gpu",
    "setup_scheduler",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'deft' has no attribute '{name}'")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
