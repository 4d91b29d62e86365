"""Plays whole episodes with a policy and summarises the results; called by the trainer and by `deft evaluate`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

from deft.envs.layout import Observation
from deft.envs.make import wrap
from deft.envs.vector import Episode, VectorEnv, VectorStep
from deft.errors import InputError
from deft.evaluation.acting import Actor, PolicyActor, ScriptedActor
from deft.evaluation.video import write_video
from deft.models.decision_transformer import DecisionTransformerPolicy
from deft.models.policy import Policy
from deft.runs.rollout import rollout

EVALUATION_ENVS = 10  # environments that an evaluation steps at once


@torch.inference_mode()
def play_episodes(
    policy: Policy | None,
    env: VectorEnv,
    num_episodes: int,
    seed: int = 0,
    deterministic: bool = True,
    frames: list[np.ndarray] | None = None,
    act: Callable[[], np.ndarray] | None = None,
    watch: Callable[[int], None] | None = None,
) -> list[Episode]:
    """Play `num_episodes` episodes, episode i from seed + i, for any policy and number of environments.

    `policy` None acts at random, or as `act` decides, which returns actions [N, …].
    Images of the first environment are appended to `frames`. `watch` is called before every step with the number of
    episodes that ended since its last call; an exception that it raises ends the evaluation.
    """
    check_num_episodes(num_episodes)
    scripted = ScriptedActor(act or partial(random_actions, env, np.random.default_rng(seed)), "random")
    episodes: list[Episode] = []
    while len(episodes) < num_episodes:
        actor: Actor = scripted
        if policy is not None:
            actor = PolicyActor(policy, env.num_envs, env.action_mask, deterministic, chunk_length=1)
        wanted = min(env.num_envs, num_episodes - len(episodes))
        episodes += _play_round(actor, env, wanted, seed + len(episodes), frames, watch or (lambda _: None))
    return episodes


def _play_round(
    actor: Actor,
    env: VectorEnv,
    wanted: int,
    seed: int,
    frames: list[np.ndarray] | None,
    watch: Callable[[int], None],
) -> list[Episode]:
    """Play one episode in each of the first `wanted` environments."""
    finished: dict[int, Episode] = {}
    num_watched = 0
    reward = np.zeros(env.num_envs, np.float32)

    def report() -> None:
        nonlocal num_watched
        num_new, num_watched = len(finished) - num_watched, len(finished)
        watch(num_new)

    def act(observation: Observation) -> np.ndarray:
        report()
        if frames is not None and 0 not in finished and (frame := env.render(0)) is not None:
            frames.append(frame)
        return actor.act(observation, reward)

    def sink(_: Any, __: Any, step: VectorStep) -> bool:
        nonlocal reward
        reward = step.reward.astype(np.float32)
        reward[step.done_index] = 0.0
        actor.ended(step.done_index)
        for episode in step.episodes:
            if episode.env_index < wanted:
                finished.setdefault(episode.env_index, episode)
        return len(finished) >= wanted

    rollout(env, act, sink, env.reset(seed))
    report()
    return [finished[index] for index in range(wanted)]


def num_played(policy: Policy | None, num_episodes: int) -> int:
    """How many episodes `evaluate_policy` plays for `num_episodes`: so many for each target return."""
    return num_episodes * (len(policy.target_returns) if isinstance(policy, DecisionTransformerPolicy) else 1)


def check_num_episodes(count: int) -> None:
    """Raise an error for an evaluation of no episodes, which has no mean."""
    if count < 1:
        raise InputError(f"num_episodes: {count} is out of range; must be at least 1")


def evaluate_policy(
    policy: Policy | None,
    env: VectorEnv,
    num_episodes: int,
    seed: int = 0,
    played: list[Episode] | None = None,
    deterministic: bool = True,
    watch: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """`play_episodes`, summed up, and how actions were selected; the episodes themselves are added to `played`.

    A policy with several target returns plays for each; the first one's results lead, and its episodes are kept.
    """
    targets: list[Any] = policy.target_returns if isinstance(policy, DecisionTransformerPolicy) else [None]
    summaries: list[dict[str, Any]] = []
    try:
        for target in targets:
            if isinstance(policy, DecisionTransformerPolicy):
                policy.target_return.fill_(target)
            episodes = play_episodes(policy, env, num_episodes, seed, deterministic, watch=watch)
            if played is not None and not summaries:
                played += episodes
            summaries.append(summarize(episodes))
    finally:
        if isinstance(policy, DecisionTransformerPolicy):
            policy.target_return.fill_(targets[0])
    results: dict[str, Any] = {} if targets[0] is None else {"target_return": targets[0]}
    results |= {**summaries[0], "action_selection": action_selection(policy, deterministic)}
    for target, summary in zip(targets[1:], summaries[1:], strict=True):
        results[f"target_{target:g}/mean_reward"] = summary["mean_reward"]
    return results


def action_selection(policy: Policy | None, deterministic: bool) -> str:
    """How the actions of an evaluation are selected, as its results name it (`Policy.action_selection`)."""
    return "random" if policy is None else policy.action_selection(deterministic)


def record_video(
    policy: Policy | None,
    env: gymnasium.Env,
    path: Path,
    num_episodes: int,
    seed: int,
    deterministic: bool = True,
    watch: Callable[[int], None] | None = None,
) -> Path:
    """A video of whole episodes, from the same seeds as `play_episodes`; `env` renders, and is closed."""
    frames: list[np.ndarray] = []
    fps = env.metadata.get("render_fps", 30)
    vector = wrap(env) if policy is None else wrap(env, chunk_length=policy.chunk_length)
    try:
        play_episodes(policy, vector, num_episodes, seed, deterministic, frames=frames, watch=watch)
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


def merge_results(results: list[dict[str, Any]], score: Callable[[float], float | None]) -> dict[str, Any]:
    """The results of several seeds as one: means over them and each one's return; with the normalised score."""
    merged = dict(results[0])
    if len(results) > 1:
        returns = [result["mean_reward"] for result in results]
        for name in ("mean_reward", "mean_length", "success_rate"):
            if name in merged:
                merged[name] = float(np.mean([result[name] for result in results]))
        merged["std_reward"] = float(np.std(returns))
        merged["mean_rewards"] = returns
    normalized = score(merged["mean_reward"])
    if normalized is not None:
        merged["normalized_score"] = normalized
        if len(results) > 1:
            merged["normalized_scores"] = [score(value) for value in merged["mean_rewards"]]
    return merged
