"""`deft evaluate`: rebuilds a run's policy and environment from its folder and plays episodes with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from deft.config.loading import load_config, replace
from deft.config.settings import RunConfig
from deft.envs.make import make_env, make_vector_env, wrap
from deft.errors import InputError
from deft.evaluation.rollouts import play_episodes, summarize
from deft.evaluation.video import write_video
from deft.training import checkpoint
from deft.training.compute import choose_device
from deft.training.random_state import seed_everything
from deft.training.run import CONFIG_FILE, EVALUATION_ENVS, build_policy


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
        filmed = wrap(
            make_env(env_config, render_mode="rgb_array", chunk_length=chunk_length), chunk_length=chunk_length
        )
        frames: list[np.ndarray] = []
        try:
            play_episodes(policy, filmed, 1, seed, frames=frames)
        finally:
            filmed.close()
        results["video"] = str(write_video(frames, Path(video)))
    return results


def _find(path: Path) -> tuple[Path, RunConfig]:
    best = path / checkpoint.BEST
    folder = checkpoint.find_checkpoint(best if best.exists() else path)
    config_file = folder.parent / CONFIG_FILE
    if not config_file.is_file():
        raise InputError(f"{path}: {config_file} is missing, so the policy cannot be rebuilt; evaluate it from Python")
    return folder, load_config(config_file)
