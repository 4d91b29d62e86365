"""From a config to a run: builds environment, policy, algorithm and trainer, and runs them in their folder.

`deft train` calls `train`; `PPOTrainer` and `deft evaluate` use the same builders.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium import spaces

from deft.algorithms.algorithm import Algorithm
from deft.algorithms.ppo import PPO
from deft.config.loading import replace, to_dict, write_config
from deft.config.settings import RunConfig
from deft.envs.make import make_vector_env, wrap
from deft.envs.vector import VectorEnv
from deft.errors import InputError
from deft.evaluation.plots import plot_run
from deft.models.actor_critic import ActorCritic
from deft.models.policy import Policy
from deft.models.vla.loading import load_vla_model
from deft.models.vla.policy import VLAPolicy
from deft.training import checkpoint
from deft.training.compute import choose_device
from deft.training.random_state import seed_everything
from deft.training.trainer import Trainer

log = logging.getLogger(__name__)

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {"ppo": PPO}
CONFIG_FILE = "config.yaml"
EVALUATION_ENVS = 10  # copies that an evaluation plays at once


def train(config: RunConfig) -> dict[str, Any]:
    """Train as configured, evaluate at the end, and return a summary of the run."""
    trainer = build_trainer(config)
    try:
        summary = trainer.train()
        if trainer.settings.eval_freq:
            summary |= {f"final_{name}": value for name, value in trainer.evaluate().items()}
        summary["plots"] = [str(path) for path in plot_run(trainer.run_dir)]
    finally:
        trainer.close()
    return summary


def build_trainer(
    config: RunConfig,
    env: gymnasium.Env | list[gymnasium.Env] | gymnasium.vector.VectorEnv | VectorEnv | None = None,
    policy: Policy | None = None,
    eval_env: Callable[[], VectorEnv] | VectorEnv | gymnasium.Env | None = None,
) -> Trainer:
    """A trainer for a config, in its run folder; environment and policy may be given instead of made."""
    config, resume_from = _place(config)
    assert config.output_dir is not None
    seed_everything(config.seed)
    device = choose_device(config.device)
    chunk_length = config.policy.chunk_length if policy is None else policy.chunk_length
    gamma = config.algorithm.cfg.gamma
    if env is None:
        vector_env = make_vector_env(config.env, chunk_length=chunk_length, gamma=gamma)
        eval_env = eval_env or _evaluation_factory(config, chunk_length)
    else:
        vector_env = wrap(env, chunk_length=chunk_length, gamma=gamma)
    try:
        if policy is None:
            policy = build_policy(config, vector_env)
        policy.to(device)
        if config.model_path is not None:
            load_policy_weights(policy, config.model_path)
        trainer = Trainer(
            policy,
            vector_env,
            ALGORITHMS[config.algorithm.name](policy, config.algorithm.cfg, seed=config.seed),
            eval_env=eval_env if eval_env is not None else _evaluation_source(env),
            output_dir=config.output_dir,
            logging_config=config.logging,
            seed=config.seed,
            threads=config.threads,
            timeout=config.env.timeout,
            run_config=to_dict(config),
            **to_dict(config.trainer),
        )
        if resume_from is not None:
            trainer.load(resume_from)
    except BaseException:
        vector_env.close()
        raise
    _write_config(config)
    return trainer


def build_policy(config: RunConfig, env: VectorEnv) -> Policy:
    """The policy that a config names, for an environment's spaces."""
    settings = config.policy
    _check_action_dim(config, env)
    if settings.name == "actor_critic":
        return ActorCritic(env.observation_space, env.action_space, settings)
    assert settings.vla_config is not None
    if not isinstance(env.action_space, spaces.Box):
        raise InputError(f"policy.name: a VLA policy acts in a Box of actions; {config.env.id} has {env.action_space}")
    model_config = dict(settings.vla_config.model_config)
    if settings.action_dim is not None:
        model_config.setdefault("action_dim", settings.action_dim)
    if settings.chunk_length > 1:
        model_config.setdefault("chunk_length", settings.chunk_length)
    model = load_vla_model(settings.vla_config.model_path, settings.vla_config.model_class, model_config)
    return VLAPolicy(model, action_dim=int(env.action_space.shape[-1]), chunk_length=settings.chunk_length)


def load_policy_weights(policy: Policy, path: str | Path) -> None:
    """Weights from a run folder (its best checkpoint, else its latest), a checkpoint, or a weights file."""
    source = Path(path)
    if source.is_dir():
        best = source / checkpoint.BEST
        source = checkpoint.find_checkpoint(best if best.exists() else source) / checkpoint.MODEL
    elif not source.exists():
        raise InputError(f"model_path: {path} does not exist")
    checkpoint.load_weights(policy, checkpoint.load_tensors(source), source)


def _check_action_dim(config: RunConfig, env: VectorEnv) -> None:
    wanted = config.policy.action_dim
    if wanted is None:
        return
    actual = int(env.action_space.shape[-1]) if env.action_space.shape else 1
    if wanted != actual:
        raise InputError(f"policy.action_dim: {wanted} was given, but {config.env.id} takes actions of {actual} dims")


def _place(config: RunConfig) -> tuple[RunConfig, Path | None]:
    """Settle the run folder and the checkpoint to go on from; never write over a run unasked."""
    resume_from: Path | None = None
    if config.resume is not None:
        resume_from = checkpoint.find_checkpoint(config.resume)
        if config.output_dir is None:
            config = replace(config, output_dir=str(resume_from.parent))
    if config.output_dir is None:
        env_name = re.sub(r"[^A-Za-z0-9.]+", "-", config.env.id).strip("-")
        name = f"{config.algorithm.name}-{env_name}-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
        return replace(config, output_dir=str(Path("outputs") / name)), None
    folder = Path(config.output_dir)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"output_dir: {folder} is a file")
    checkpoint.clean_temporary(folder)
    existing = checkpoint.list_checkpoints(folder)
    if config.auto_resume and resume_from is None:
        resume_from, problems = checkpoint.latest_whole_checkpoint(folder)
        for problem in problems:
            log.warning("passed over: %s", problem)
        if existing and resume_from is None:
            raise InputError(f"auto_resume: no checkpoint in {folder} can be read: {problems[0]}")
    elif existing and resume_from is None:
        if not config.overwrite:
            raise InputError(
                f"output_dir: {folder} already holds a run ({existing[-1].name}): --auto-resume goes on with it, "
                "--overwrite replaces it, or give another --output-dir"
            )
        _remove_run(folder)
    return config, resume_from


def _remove_run(folder: Path) -> None:
    """Delete what a run wrote, and nothing else that may be in the folder."""
    for path in [
        *checkpoint.list_checkpoints(folder),
        *(folder / n for n in ("tensorboard", "plots", "videos", "samples")),
    ]:
        shutil.rmtree(path, ignore_errors=True)
    for name in (checkpoint.BEST, CONFIG_FILE, "episode_metrics.jsonl"):
        (folder / name).unlink(missing_ok=True)


def _write_config(config: RunConfig) -> None:
    """The settings as they repeat the run: not those of how this process came to it."""
    assert config.output_dir is not None
    Path(config.output_dir).mkdir(parents=True, exist_ok=True)
    repeatable = replace(config, resume=None, auto_resume=False, overwrite=False)
    write_config(repeatable, Path(config.output_dir) / CONFIG_FILE)


def _evaluation_factory(config: RunConfig, chunk_length: int) -> Callable[[], VectorEnv]:
    """Serial copies for evaluation, made when the first evaluation is due."""
    env_config = replace(config, **{"env.vector": "sync"}).env
    count = min(config.trainer.eval_episodes, EVALUATION_ENVS)
    return lambda: make_vector_env(env_config, chunk_length=chunk_length, num_envs=count)


def _evaluation_source(env: Any) -> gymnasium.Env | None:
    """Another environment like the user's own, where its spec says how to make it."""
    first = env[0] if isinstance(env, list) else env
    spec = getattr(first, "spec", None)
    return gymnasium.make(spec, disable_env_checker=True) if isinstance(first, gymnasium.Env) and spec else None
