"""Plays whole episodes with a policy and says how well it did; called by the trainer and by `deft evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

from deft import schema
from deft.data.tensors import policy_inputs, zero_rows
from deft.envs.make import wrap
from deft.envs.vector import Episode, VectorEnv
from deft.evaluation.video import write_video
from deft.models.policy import Policy


@torch.inference_mode()
def play_episodes(
    policy: Policy | None,
    env: VectorEnv,
    num_episodes: int,
    seed: int = 0,
    deterministic: bool = True,
    frames: list[np.ndarray] | None = None,
) -> list[Episode]:
    """`num_episodes` episodes, episode i from seed + i, whatever the policy and the number of environments.

    `policy` None acts at random. Pictures of the first environment are appended to `frames`.
    """
    generator = np.random.default_rng(seed)
    device = torch.device("cpu") if policy is None else next(iter(policy.parameters())).device
    mask = None if env.action_mask is None else torch.as_tensor(env.action_mask, device=device).expand(env.num_envs, -1)
    episodes: list[Episode] = []
    while len(episodes) < num_episodes:
        wanted = min(env.num_envs, num_episodes - len(episodes))
        observation = env.reset(seed + len(episodes))
        memory = None if policy is None else policy.initial_memory(env.num_envs)
        finished: dict[int, Episode] = {}
        while len(finished) < wanted:
            if frames is not None and 0 not in finished and (frame := env.render(0)) is not None:
                frames.append(frame)
            if policy is None:
                actions = random_actions(env, generator)
            else:
                td = policy.act(policy_inputs(observation, device, memory, mask), deterministic)
                actions = td[schema.ACTION].numpy(force=True)
                memory = td.get(schema.NEXT_MEMORY, None)
            step = env.step(actions)
            observation = step.observation
            if memory is not None:
                memory = zero_rows(memory, step.done_index)
            for episode in step.episodes:
                if episode.env_index < wanted:
                    finished.setdefault(episode.env_index, episode)
        episodes += [finished[index] for index in range(wanted)]
    return episodes


def film_episodes(policy: Policy | None, env: gymnasium.Env, path: Path, num_episodes: int, seed: int) -> Path:
    """A video of whole episodes, from the same seeds as `play_episodes`; `env` renders, and is closed."""
    frames: list[np.ndarray] = []
    fps = env.metadata.get("render_fps", 30)
    vector = wrap(env) if policy is None else wrap(env, chunk_length=policy.chunk_length)
    try:
        play_episodes(policy, vector, num_episodes, seed, frames=frames)
    finally:
        vector.close()
    return write_video(frames, path, fps=fps)


def random_actions(env: VectorEnv, generator: np.random.Generator) -> np.ndarray:
    """One uniformly random action an environment."""
    env.action_space.seed(int(generator.integers(2**31)))
    return np.stack([env.action_space.sample() for _ in range(env.num_envs)])


def summarize(episodes: list[Episode]) -> dict[str, Any]:
    """Mean and deviation of the return, mean length, and the share of successes where the environment reports them."""
    returns = [episode.episode_return for episode in episodes]
    summary: dict[str, Any] = {
        "episodes": len(episodes),
        "mean_reward": float(np.mean(returns)),
        "std_reward": float(np.std(returns)),
        "mean_length": float(np.mean([episode.length for episode in episodes])),
    }
    successes = [episode.success for episode in episodes if episode.success is not None]
    if successes:
        summary["success_rate"] = float(np.mean(successes))
    for name in sorted({name for episode in episodes for name in episode.terms}):
        summary[f"terms/{name}"] = float(np.mean([episode.terms.get(name, 0.0) for episode in episodes]))
    return summary
