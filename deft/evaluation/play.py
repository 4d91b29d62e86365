"""`deft play`: watch a policy, an environment's scripted expert or random actions play; a video and the results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from deft import trust
from deft.config.command_settings import PlayConfig
from deft.envs.make import make_env, wrap
from deft.envs.wrappers import Captions
from deft.evaluation.evaluate import env_of_run, find_run, load_policy, merge_env_kwargs
from deft.evaluation.rollouts import (
    EXPERT,
    RANDOM,
    action_selection,
    check_expert,
    expert_actions,
    play_episodes,
    summarize,
)
from deft.evaluation.video import write_video
from deft.models.policy import members_of
from deft.runs.random_state import seed_everything

DEFAULT_ENV = "tabletop"


def play(config: PlayConfig) -> dict[str, Any]:
    """Play as configured; returns the episodes' results, one by one and in the mean, and where the video is."""
    trust.name(config.env, config.env_kwargs)
    run = None if config.policy in (RANDOM, EXPERT) else find_run(Path(config.policy))
    env_id = config.env or (None if run else DEFAULT_ENV)
    kwargs = merge_env_kwargs(config.env_kwargs, config.task, None)
    env_config = env_of_run(
        run[1] if run else None,
        env_id,
        kwargs,
        config.rename_streams,
        config.max_episode_steps,
        suite_path=config.suite_path,
    )
    seed_everything(config.seed)
    records_video = config.video is not None
    env = make_env(env_config, render_mode="rgb_array" if records_video else None)
    if records_video:
        env = Captions(env)
    chunk_length = run[1].policy.chunk_length if run else 1
    frames: list[np.ndarray] | None = [] if records_video else None
    fps = env.metadata.get("render_fps", 30)
    vector = wrap(env, chunk_length=chunk_length)
    try:
        policy = members_of(load_policy(*run, vector, config.device))[0] if run else None
        act = None
        if config.policy == EXPERT:
            check_expert(env, env_config.id)
            act = expert_actions(vector, env.action_space)
        seed_everything(config.seed)  # building a policy draws its weights
        episodes = play_episodes(
            policy, vector, config.episodes, config.seed, config.deterministic, frames=frames, act=act
        )
    finally:
        vector.close()
    results: dict[str, Any] = {
        "env": env_config.id,
        "policy": config.policy,
        "returns": [round(episode.episode_return, 4) for episode in episodes],
        "lengths": [episode.length for episode in episodes],
    }
    if policy is not None:
        results["action_selection"] = action_selection(policy, config.deterministic)
    if any(episode.success is not None for episode in episodes):
        results["successes"] = [episode.success for episode in episodes]
    results |= summarize(episodes)
    if config.video is not None:
        assert frames is not None
        results["video"] = str(write_video(frames, Path(config.video), fps=max(1, round(fps / chunk_length))))
    return results
