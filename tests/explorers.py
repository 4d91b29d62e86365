"""Teachers, explorers and their rollouts in the toy world of the panning camera, small enough to test with."""

from __future__ import annotations

from typing import Any

import torch
from f1_worlds import PIXELS, micro_policy, small_policy, wake
from panning_camera import WORLD, panning_config
from tensordict import TensorDict

from deft import schema
from deft.config.f1_settings import ExplorerSettings
from deft.envs.serial import SerialVectorEnv
from deft.models.f1.explorer import ExplorerPolicy, new_explorer
from deft.models.f1.policy import F1Policy
from deft.training.phases.exploration import Exploration
from deft.training.phases.explorer_rollouts import ExplorerRollouts, make_student_env
from deft.training.phases.teacher import TeacherTrainer

REAL = torch.arange(32) < 2  # the dims that the panning camera has


def world_model(**changes: Any) -> F1Policy:
    """A world model all of whose parts have an effect."""
    return wake(micro_policy(condition_init=0.05, **changes))


def teacher_policy(**changes: Any) -> F1Policy:
    """A world model that hears every input."""
    policy = world_model(**changes)
    with torch.no_grad():
        policy.model.world_model.output.weight.normal_(std=0.3)
    return policy


def explorer_policy(teacher: F1Policy | None = None, **settings: Any) -> ExplorerPolicy:
    """An explorer around it, whose memory and value have an effect."""
    torch.manual_seed(1)
    explorer = new_explorer(teacher or teacher_policy(), REAL, ExplorerSettings(**settings))
    with torch.no_grad():
        explorer.f1.model.memory.to_action.gate.normal_(std=0.5)
        explorer.value_head[-1].weight.normal_(std=0.5)
    return explorer


def observation(*leading: int, seed: int = 0) -> TensorDict:
    """What an explorer sees: noise."""
    generator = torch.Generator().manual_seed(seed)
    pictures = torch.randint(0, 256, (*leading, 3, PIXELS, PIXELS), dtype=torch.uint8, generator=generator)
    return TensorDict(
        {
            schema.IMAGE0: pictures,
            schema.FRAME_TOKENS: torch.randint(0, 32, (*leading, 21), generator=generator),
            schema.STATE: torch.randn(*leading, 32, generator=generator),
        },
        batch_size=leading,
    )


def acting_input(explorer: ExplorerPolicy, rows: int, seed: int = 0, memory: torch.Tensor | None = None) -> TensorDict:
    """What `act` takes."""
    memory = explorer.initial_memory(rows) if memory is None else memory
    return TensorDict({schema.OBSERVATION: observation(rows, seed=seed), schema.MEMORY: memory}, batch_size=[rows])


def panning_rollouts(
    explorer: ExplorerPolicy, num_envs: int = 2, num_steps: int = 5, num_episodes: int = 2, **world: Any
) -> ExplorerRollouts:
    """Rollouts in this process."""
    environment = {"world": WORLD, "max_steps": num_steps + 1, "world_kwargs": world}
    env = SerialVectorEnv([make_student_env(environment) for _ in range(num_envs)])
    return ExplorerRollouts(explorer, env, Exploration(environment), num_steps, num_episodes)


def student_config(folder: Any, **training: Any) -> Any:
    """A student run in this world: tiny, repeatable, quiet."""
    explorer = training.pop("explorer", {})
    config = panning_config(folder, **{"num_envs": 1, "num_episodes": 4, **training})
    config.phase = "student"
    config.student.output_dir = str(folder)
    for name, value in {"episodes_per_update": 2, "batch_size": 5, "sequence_length": 5, **explorer}.items():
        setattr(config.student.explorer, name, value)
    return config


def make_teacher(folder: Any, policy: F1Policy | None = None, **training: Any) -> TeacherTrainer:
    """The trainer of phase 1 in this world."""
    return TeacherTrainer(panning_config(folder, **training), policy or small_policy())
