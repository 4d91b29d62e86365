"""`deft evaluate`: rebuilds a run's policy and environment from its folder and plays episodes with them."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

from deft.config.loading import load_config, replace
from deft.config.settings import EnvConfig, OfflineRunConfig, RunConfig
from deft.data.datasets.dataset import normalized_score
from deft.envs.make import make_env, make_vector_env
from deft.envs.vector import VectorEnv
from deft.errors import InputError
from deft.evaluation.rollouts import evaluate_policy, film_episodes, merge_results
from deft.models.policy import Policy
from deft.training import checkpoint
from deft.training.compute import choose_device
from deft.training.offline import members_of
from deft.training.offline_run import build_offline_policy
from deft.training.random_state import seed_everything
from deft.training.run import EVALUATION_ENVS, build_policy
from deft.training.run_folder import CONFIG_FILE

FILMED_EPISODES = 5  # at most, of those that are evaluated


def evaluate_run(
    path: str | Path,
    episodes: int = 10,
    video: str | Path | None = None,
    seed: int = 0,
    device: str = "auto",
    random_policy: bool = False,
    env: str | None = None,
    env_kwargs: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Episodes of a run's best checkpoint (or of the checkpoint given), each from its own seed; optionally a video.

    With `random_policy` uniformly random actions play instead: the baseline, on the same seeds.
    """
    folder, config = find_run(Path(path))
    seed_everything(seed)
    env_config = _env_config(config, env)
    env_config = dataclasses.replace(env_config, kwargs={**env_config.kwargs, **(env_kwargs or {})})
    count = min(episodes, EVALUATION_ENVS)
    vector_env = make_vector_env(env_config, chunk_length=config.policy.chunk_length, num_envs=count)
    policies: list[Policy | None] = [None]
    try:
        if not random_policy:
            policies = [*members_of(load_policy(folder, config, vector_env, device))]
        all_results = [evaluate_policy(policy, vector_env, episodes, seed) for policy in policies]
    finally:
        vector_env.close()
    references = config.dataset.reference_returns if isinstance(config, OfflineRunConfig) else None
    results = merge_results(all_results, partial(normalized_score, reference_returns=references))
    results["checkpoint"] = str(folder)
    if video is not None:
        filmed = make_env(env_config, render_mode="rgb_array")
        count = min(episodes, FILMED_EPISODES)
        results["video"] = str(film_episodes(policies[0], filmed, Path(video), count, seed))
    return results


def load_policy(folder: Path, config: RunConfig | OfflineRunConfig, env: VectorEnv, device: str = "auto") -> Policy:
    """The policy of a checkpoint, for an environment like the one that it was trained in or for."""
    if isinstance(config, OfflineRunConfig):
        policy = build_offline_policy(config, env.observation_space, env.action_space, weights_follow=True)
    else:
        policy = build_policy(config, env, weights_follow=True)
    weights = checkpoint.load_part(folder, checkpoint.MODEL)
    checkpoint.load_weights(policy, weights, folder / checkpoint.MODEL)
    policy.to(choose_device(device))
    return policy


def _env_config(config: RunConfig | OfflineRunConfig, env: str | None) -> EnvConfig:
    if isinstance(config, RunConfig):
        changed = replace(config, **{"env.vector": "sync"}).env
        return changed if env is None else dataclasses.replace(changed, id=env, kwargs={})
    env_id = env or config.env.id
    if env_id is None:
        raise InputError("env: the run's dataset names no environment; give one with --env")
    kwargs = config.env.kwargs if env is None else {}
    return EnvConfig(id=env_id, kwargs=kwargs, max_episode_steps=config.env.max_episode_steps)


def find_run(path: Path) -> tuple[Path, RunConfig | OfflineRunConfig]:
    """The best or latest checkpoint of a run folder, or the checkpoint given, and the settings of its run."""
    best = path / checkpoint.BEST
    folder = checkpoint.find_checkpoint(best if best.exists() else path)
    config_file = folder.parent / CONFIG_FILE
    if not config_file.is_file() and (folder.parent / "config.json").is_file():
        raise InputError(f"{path}: a run of waypoint-ppo; `deft compare` measures it against the policy it stands on")
    if not config_file.is_file():
        raise InputError(f"{path}: {config_file} is missing, so the policy cannot be rebuilt; evaluate it from Python")
    return folder, load_config(config_file)
