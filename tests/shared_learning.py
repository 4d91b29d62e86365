"""What two or more processes do together in tests/training/test_shared_training.py; runnable: `… FOLDER NAME`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from f1_worlds import f1_batch, micro_policy, wake
from gymnasium import spaces
from offline_worlds import two_step_dataset
from panning_camera import panning_config
from tensordict import TensorDict
from torch import Tensor

from deft import PPO, ActorCritic, schema
from deft.algorithms.grpo import GRPO
from deft.algorithms.iql import IQL
from deft.algorithms.optimization import load_optimizer_state, optimizer_state
from deft.algorithms.sac import SAC
from deft.config.algorithm_settings import GRPOSettings, IQLSettings, PPOSettings, SACSettings
from deft.config.loading import resolve
from deft.config.settings import DatasetPolicyConfig, PolicyConfig
from deft.data.datasets.dataset import box
from deft.models.f1.experts import GatedMLP
from deft.models.f1.optimization import setup_optimizer
from deft.models.f1.vision import VisionLayer
from deft.runs import sharding
from deft.runs.processes import Processes
from deft.training.offline_run import build_offline_trainer
from deft.training.phases.teacher import TeacherTrainer
from deft.training.run import build_trainer

ROWS = 16


def one_update(name: str, processes: Processes) -> dict[str, Tensor]:
    """Weights and statistics after two updates, on this process's share of one batch.

    `ppo-critic` and `grpo-critic`: with a critic of actions that reads a stream which the policy does not.
    """
    torch.manual_seed(0)
    name, *critic = name.split("-")
    part = slice(processes.rank * ROWS // processes.count, (processes.rank + 1) * ROWS // processes.count)
    if name in ("ppo", "grpo"):
        space = spaces.Dict({"sensor": box(3), "scene": box(3)}) if critic else box(3)
        config = PolicyConfig(hidden_sizes=(8,), hidden_dim=8, critic_observation=("scene",) if critic else ())
        policy = ActorCritic(space, box(2, -1.0, 1.0), config)
        make = {"ppo": PPO, "grpo": GRPO}[name]
        settings = {"ppo": PPOSettings, "grpo": GRPOSettings}[name](n_epochs=2, batch_size=10_000)
        settings.action_critic_coef = float(len(critic))
        if name == "grpo":
            settings.group_size, settings.kl_coef = 4, 0.0
        algorithm: Any = make(policy, settings)
        batches = [rollout(policy)[:, part] for _ in range(2)]
    else:
        make, settings = {"iql": (IQL, IQLSettings), "sac": (SAC, SACSettings)}[name]
        policy = make.make_policy(box(3), box(2, -1.0, 1.0), DatasetPolicyConfig(hidden_dim=8), settings())
        algorithm = make(policy, settings())
        torch.randn = lambda *size, **_: torch.zeros(size)  # no draws: they would differ between one batch and two
        batches = [{key: value[part] for key, value in transitions().items()} for _ in range(2)]
    if processes.count > 1:
        algorithm.share(processes)
        processes.broadcast_module(policy)
    for batch in batches:
        algorithm.update(iter([batch]))
    state = dict(policy.state_dict())
    if hasattr(algorithm, "critics"):
        state |= {f"critics.{name}": value for name, value in algorithm.critics.state_dict().items()}
    if critic:
        state |= {
            f"action critic.{name}": value for name, value in algorithm.action_critic.networks.state_dict().items()
        }
    return state


def rollout(policy: ActorCritic) -> TensorDict:
    """Made up [8, ROWS], with a few ends; as one process would have it."""
    shape = (8, ROWS)
    td = TensorDict({schema.OBSERVATION: torch.randn(*shape, 3)}, batch_size=shape)
    if policy.critic_streams:
        streams = {"sensor": td[schema.OBSERVATION], "scene": torch.randn(*shape, 3)}
        td[schema.OBSERVATION] = TensorDict(streams, batch_size=shape)
    with torch.no_grad():
        td = policy.act(td.flatten(0, 1)).reshape(*shape)
    td[schema.LOG_PROB] = td[schema.LOG_PROB] + 0.3 * torch.randn(shape)
    td[schema.NEXT_REWARD] = torch.randn(shape)
    td[schema.NEXT_TERMINATED], td[schema.NEXT_TRUNCATED] = torch.rand(shape) < 0.1, torch.rand(shape) < 0.1
    td[schema.NEXT_VALUE] = torch.randn(shape)
    td[schema.POLICY_VERSION] = torch.zeros(shape, dtype=torch.int64)
    td[schema.STEP_MASK] = torch.arange(8)[:, None] < torch.randint(1, 9, (ROWS,))  # processes have unequal numbers
    return td


def transitions() -> dict[Any, Tensor]:
    """Made up [ROWS]."""
    return {
        schema.OBSERVATION: torch.randn(ROWS, 3),
        schema.ACTION: torch.rand(ROWS, 2) - 0.5,
        schema.NEXT_OBSERVATION: torch.randn(ROWS, 3),
        schema.NEXT_REWARD: torch.randn(ROWS),
        schema.NEXT_TERMINATED: (torch.rand(ROWS) < 0.3).float(),
    }


def run(name: str, folder: Path, scale: int = 1, **changes: Any) -> dict[str, Any]:
    """A short run; the weights after every update, and what it learned from."""
    own: dict[str, Any] = {
        "ppo": {"batch_size": 8, "n_epochs": 2, "target_kl": 0.05},
        "grpo": {"group_size": 2, "batch_size": 8},
        "sac": {"batch_size": 8, "learning_starts": 12},
        "iql": {"batch_size": 16},
    }
    config: dict[str, Any] = {
        "algorithm": {"name": name, "cfg": own[name]},
        "output_dir": str(folder / name),
        "device": "cpu",
        "threads": 1,
        "trainer": {"eval_freq": 0, "save_freq": 0},
        "logging": {"console_level": "ERROR", "tensorboard": False, "enable_file_logging": False},
    }
    if name == "iql":
        config["trainer"] |= {"num_epochs": 2 * scale}
    else:
        config["env"] = {"id": "Pendulum-v1" if name == "sac" else "CartPole-v1", "num_envs": 2}
        config["trainer"] |= {"total_timesteps": 96 * scale, "log_freq": 32}
        if name == "sac":
            config["policy"] = {"hidden_dim": 8, "normalize_observation": True}
        else:
            config["trainer"]["buffer_size"] = 8
            config["policy"] = {"hidden_sizes": [8]}
    settings = resolve({**config, **changes})
    if name == "iql":
        trainer: Any = build_offline_trainer(settings, dataset=two_step_dataset(100))
    else:
        trainer = build_trainer(settings)
    after, seen = [], []
    step_name = "step" if name in ("iql", "sac") else "update"
    original = getattr(trainer.algorithm, step_name)

    def watching(batches: Any) -> Any:
        if name == "ppo":
            batches = [next(batches)]
            seen.append(batches[0][schema.OBSERVATION].clone())
            batches = iter(batches)
        elif name == "iql":
            seen.append(batches[schema.ACTION].clone())
        metrics = original(batches)
        after.append(torch.cat([value.flatten().double() for value in trainer.policy.state_dict().values()]))
        return metrics

    setattr(trainer.algorithm, step_name, watching)
    summary = trainer.train()
    trainer.close()
    return {"after": after, "seen": seen, "steps": summary.get("timesteps", summary.get("updates"))}


def shard_f1(processes: Processes, start: Path | None, num_steps: int = 2) -> dict[str, Any]:
    """Train a small F1 policy with sharded weights, from the weights and optimizer state of another run if given."""
    policy = wake(micro_policy())
    share = sharding.local_bytes(policy)
    sharding.shard(policy, processes, torch.device("cpu"), (GatedMLP, VisionLayer))
    optimizer = setup_optimizer(policy, 1e-3, 0.0)
    if start is not None:
        saved = torch.load(start, weights_only=False)
        sharding.load_full_weights(policy, saved["weights"])
        load_optimizer_state(optimizer, saved["optimizer_state_dict"], hyperparameters=True)
    for step in range(num_steps):
        batch = {name: value[:, processes.rank :: processes.count] for name, value in f1_batch(3, 6, seed=step).items()}
        memory = policy.initial_memory(6 // processes.count)
        optimizer.zero_grad()
        policy(batch, memory_state=memory)["loss"].backward()
        optimizer.step()
    share = sharding.local_bytes(policy) / share
    weights, optimizer_state_dict = sharding.full_weights(policy), optimizer_state(optimizer)
    return {"weights": weights, "optimizer_state_dict": optimizer_state_dict, "share": share}


def teach(folder: Path, fsdp: bool, start: Path | None = None, num_episodes: int = 12) -> dict[str, Any]:
    """A short run of phase 1, where given from another one's checkpoint; the share of its weights that a process had.

    A third of it teaches the motion prior alone, by a pass of its own.
    """
    config = panning_config(folder, num_episodes=num_episodes, motion_warmup=0.34)
    config.training.head_dropout = 0.25 if start is not None else 0.0  # what is drawn for all, or by each
    config.training.fsdp, config.training.gradient_accumulation = fsdp, 2
    policy = micro_policy(motion_prior=True)
    everything = sharding.local_bytes(policy)
    trainer = TeacherTrainer(config, policy)
    if start is not None:
        trainer.load(start)
    share = sharding.local_bytes(trainer.policy) / everything
    return {"share": share, "is_sharded": sharding.is_sharded(trainer.policy), "summary": trainer.train()}


def train_vla(name: str, folder: Path, fsdp: bool, start: Path | None = None, scale: int = 1) -> dict[str, Any]:
    """A short run of a VLA model by PPO, or by SFT on `folder/../demos`; the share of its weights that a process had.

    The first process plays evaluation episodes in between, and the others do not.
    """
    model = {"model_class": "vla-tiny", "model_config": {"width": 16}}
    own = {"max_grad_norm": 0.05} if name == "ppo" else {}  # always clipped
    config: dict[str, Any] = {
        "algorithm": {"name": name, "cfg": {"batch_size": 6, "gradient_accumulation": 2, "learning_rate": 1e-3, **own}},
        "policy": {"name": "vla", "chunk_length": 4, "vla_config": model},
        "trainer": {"eval_episodes": 1, "save_freq": 0},
        "logging": {"console_level": "ERROR", "tensorboard": False, "enable_file_logging": False},
        "output_dir": str(folder),
        "device": "cpu",
        "threads": 1,
        "fsdp": fsdp,
        "resume": None if start is None else str(start),
    }
    if name == "sft":
        config["dataset"] = {"path": str(folder.parent / "demos")}
        config["trainer"] |= {"num_epochs": 2 * scale, "updates_per_epoch": 2, "eval_freq": 1}
        trainer: Any = build_offline_trainer(resolve(config))
    else:
        config["env"] = {"id": "reach", "num_envs": 2, "kwargs": {"observation": "vla", "image_size": 16}}
        config["trainer"] |= {"buffer_size": 4, "total_timesteps": 100 * scale, "eval_freq": 50}
        trainer = build_trainer(resolve(config))
    everything = sum(value.numel() for value in trainer.policy.parameters())
    share = sum(part.numel() for part in sharding.local_parts(trainer.policy)) / everything
    summary = trainer.train()
    trainer.close()
    return {"share": share, "steps": summary.get("timesteps", summary.get("updates"))}


def main() -> None:
    folder, what = Path(sys.argv[1]), sys.argv[2]
    processes = Processes()
    processes.open(torch.device("cpu"))
    draw = torch.randn
    if what == "train":
        names = ("ppo", "grpo", "ppo-critic", "grpo-critic", "iql", "sac")
        halves = {name: one_update(name, processes) for name in names}
        torch.randn = draw
        runs = {name: run(name, folder) for name in ("ppo", "grpo", "sac", "iql")}
        sharded = shard_f1(processes, None)
        torch.save({"halves": halves, "runs": runs, "sharded": sharded}, folder / f"rank{processes.rank}.pt")
    elif what == "shard":
        start = Path(sys.argv[3]) if len(sys.argv) > 3 else None
        found = shard_f1(processes, start)
        if start is None:
            teach(folder / "apart", fsdp=False)
            found["teacher"] = teach(folder / "shared", fsdp=True)
            for name in ("ppo", "sft"):
                train_vla(name, folder / f"{name}-apart", fsdp=False)
                found[name] = train_vla(name, folder / f"{name}-shared", fsdp=True)
        else:
            found["teacher"] = teach(folder / "three", fsdp=True, start=start.parent / "shared", num_episodes=24)
            for name in ("ppo", "sft"):
                found[name] = train_vla(name, folder / f"{name}-three", True, folder / f"{name}-one", scale=3)
        torch.save(found, folder / f"shard{processes.count}-{processes.rank}.pt")
    else:
        runs = {name: run(name, folder, scale=2, auto_resume=True) for name in ("ppo", "sac", "iql")}
        torch.save(runs, folder / f"resumed{processes.rank}.pt")


if __name__ == "__main__":
    main()
