"""`deft evaluate`: rebuilds a run's policy and environment from its folder and plays episodes with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deft.config.loading import load_config, replace
from deft.config.settings import RunConfig
from deft.envs.make import make_env, make_vector_env
from deft.errors import InputError
from deft.evaluation.rollouts import film_episodes, play_episodes, summarize
from deft.training import checkpoint
from deft.training.compute import choose_device
from deft.training.random_state import seed_everything
from deft.training.run import CONFIG_FILE, EVALUATION_ENVS, build_policy

FILMED_EPISODES = 5  # at most, of those that are evaluated


def evaluate_run(
    path: str | Path,
    episodes: int = 10,
    video: str | Path | None = None,
    seed: int = 0,
    device: str = "auto",
    random_policy: bool = False,
) -> dict[str, Any]:
    """Episodes of a run's best checkpoint (or of the checkpoint given), each from its own seed; optionally a video.

    With `random_policy` uniformly random actions play instead: the baseline, on the same seeds.
    """
    folder, config = _find(Path(path))
    seed_everything(seed)
    chunk_length = config.policy.chunk_length
    env_config = replace(config, **{"env.vector": "sync"}).env
    env = make_vector_env(env_config, chunk_length=chunk_length, num_envs=min(episodes, EVALUATION_ENVS))
    policy = None
    try:
        if not random_policy:
            policy = build_policy(config, env, weights_follow=True)
            weights = checkpoint.load_part(folder, checkpoint.MODEL)
            checkpoint.load_weights(policy, weights, folder / checkpoint.MODEL)
            policy.to(choose_device(device))
        results = summarize(play_episodes(policy, env, episodes, seed))
    finally:
        env.close()
    results["checkpoint"] = str(folder)
    if video is not None:
        filmed = make_env(env_config, render_mode="rgb_array")
        count = min(episodes, FILMED_EPISODES)
        results["video"] = str(film_episodes(policy, filmed, Path(video), count, seed))
    return results


def _find(path: Path) -> tuple[Path, RunConfig]:
    best = path / checkpoint.BEST
    folder = checkpoint.find_checkpoint(best if best.exists() else path)
    config_file = folder.parent / CONFIG_FILE
    if not config_file.is_file():
        raise InputError(f"{path}: {config_file} is missing, so the policy cannot be rebuilt; evaluate it from Python")
    return folder, load_config(config_file)
