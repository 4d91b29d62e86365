"""Deft trains vision-language-action robot policies with reinforcement learning.

The names below are loaded when first used, so that `import deft` is quick and imports no torch.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deft.algorithms.cal_ql import CalQL
    from deft.algorithms.cql import CQL
    from deft.algorithms.decision_transformer import DecisionTransformer
    from deft.algorithms.fql import FQL, FQLOnline
    from deft.algorithms.grpo import GRPO
    from deft.algorithms.iql import IQL
    from deft.algorithms.ppo import PPO
    from deft.algorithms.rebrac import ReBRAC
    from deft.algorithms.sac import SAC
    from deft.algorithms.sft import SFT
    from deft.algorithms.td3 import TD3
    from deft.algorithms.td3_bc import TD3BC
    from deft.config.f1_settings import TrainingConfig
    from deft.config.rl_yaml import get_environment_config, get_training_config, load_rl_config
    from deft.config.settings import CurriculumConfig
    from deft.config.views import OfflineRLConfig, RLConfig
    from deft.config.waypoint_settings import PPOConfig
    from deft.data.datasets import load_dataset
    from deft.data.replay import ReplayBuffer
    from deft.data.rollout import RolloutBuffer, VLABuffer
    from deft.data.streaming import OfflineReplayBuffer
    from deft.data.writer import DatasetWriter
    from deft.envs import make_env, make_vector_env
    from deft.envs.adapters.sapien_gpu import get_physical_gpu_id, setup_sapien_gpu
    from deft.envs.f1 import F1RLEnv, StudentEnv, TeacherEnv
    from deft.envs.waypoints.toy import ToyWaypointEnv
    from deft.evaluation.loaded_policy import VLAModel, load_policy
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
        CalQLTrainer,
        CQLTrainer,
        DAggerTrainer,
        DecisionTransformerTrainer,
        FQLOnlineTrainer,
        FQLTrainer,
        GRPOTrainer,
        IQLTrainer,
        PPOTrainer,
        ReBRACTrainer,
        RecapTrainer,
        SACTrainer,
        SFTTrainer,
        TD3BCTrainer,
        TD3Trainer,
    )
    from deft.training.offline import OfflineTrainer
    from deft.training.phases.adversarial import AdversarialTrainer
    from deft.training.phases.base import BaseRLTrainer
    from deft.training.phases.student import StudentTrainer
    from deft.training.phases.teacher import TeacherTrainer
    from deft.training.trainer import Trainer

__version__ = "0.1.0"
__all__ = [
    "CQL", "FQL", "GRPO", "IQL", "PPO", "SAC", "SFT", "TD3", "TD3BC", "ActorCritic", "AdversarialTrainer",
    "BaseRLTrainer", "BaseVLAModel", "BatchBuilder", "CQLTrainer", "CalQL", "CalQLTrainer", "CurriculumConfig",
    "DAggerTrainer", "DatasetWriter", "DecisionTransformer", "DecisionTransformerTrainer", "DeltaHead", "F1RLEnv",
    "FQLOnline", "FQLOnlineTrainer", "FQLTrainer", "GRPOTrainer", "IQLTrainer", "MemoryStateManager", "OfflineRLConfig",
    "OfflineReplayBuffer", "OfflineTrainer", "PPOConfig", "PPOPolicy", "PPOTrainer", "RLConfig", "ReBRAC",
    "ReBRACTrainer", "RecapTrainer", "ReplayBuffer", "RolloutBuffer", "SACTrainer", "SFTTrainer", "StudentEnv",
    "StudentTrainer", "TD3BCTrainer", "TD3Trainer", "TeacherEnv", "TeacherPolicy", "TeacherTrainer", "ToyWaypointEnv",
    "Trainer", "TrainingConfig", "VLABuffer", "VLAModel", "VLAModelInterface", "VLAPolicy", "ValueHead", "__version__",
    "get_environment_config", "get_physical_gpu_id", "get_training_config", "load_dataset", "load_f1_policy",
    "load_policy", "load_rl_config", "load_vla_model", "make_env", "make_vector_env", "set_policy_requires_grad",
    "setup_optimizer", "setup_sapien_gpu", "setup_scheduler",
]  # fmt: skip


@functools.cache
def _modules() -> dict[str, str]:
    """Return the module of every public name, from the imports above, which only type checkers execute."""
    import ast
    import inspect
    import sys

    statements = ast.walk(ast.parse(inspect.getsource(sys.modules[__name__])))
    imports = [node for node in statements if isinstance(node, ast.ImportFrom)]
    found = {alias.name: str(node.module) for node in imports for alias in node.names}
    return {name: module for name, module in found.items() if module.startswith("deft.")}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'deft' has no attribute '{name}'")
    value = getattr(importlib.import_module(_modules()[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
