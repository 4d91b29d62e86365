"""`deft collect`: plays a policy in an environment and records the episodes as a Minari or LeRobot dataset."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from deft import trust
from deft.config.algorithm_settings import DTSettings
from deft.config.command_settings import CollectConfig
from deft.config.loading import AnyRunConfig
from deft.config.settings import EnvConfig
from deft.data.datasets.dataset import Episode
from deft.data.datasets.minari import MinariFiles
from deft.data.recording import Recording, environment_details
from deft.data.recording_lerobot import LeRobotFiles
from deft.data.writer import DatasetSpec, dataset_files
from deft.envs.layout import Observation, take_rows
from deft.envs.make import TASK_KWARGS, full_id, make_env, make_vector_env
from deft.envs.vector import Episode as PlayedEpisode
from deft.envs.vector import VectorEnv, VectorStep
from deft.envs.wrappers import close_env
from deft.errors import DeftError, InputError, RunError
from deft.evaluation.evaluate import env_of_run, find_run, load_policy, merge_env_kwargs
from deft.evaluation.rollouts import (
    EXPERT,
    RANDOM,
    Actor,
    PolicyActor,
    ScriptedActor,
    check_expert,
    expert_actions,
    random_actions,
    summarize,
)
from deft.models.policy import members_of
from deft.runs.logging import show_progress
from deft.runs.random_state import seed_everything
from deft.runs.rollout import rollout
from deft.runs.signals import StopSignal

MAX_DROPPED = 100  # episodes without success for each one with success, until a recording gives up


def collect(config: CollectConfig) -> dict[str, Any]:
    """Record as configured; returns where the dataset is, how much it holds, and how the recorded episodes went.

    Each episode is on disk when it ends. A signal that stops runs ends the recording after the step.
    """
    trust.name(config.env, config.env_kwargs)
    run = None if config.policy in (RANDOM, EXPERT) else find_run(Path(config.policy))
    if run is not None and isinstance(run[1].algorithm.cfg, DTSettings):
        raise InputError(
            f"--policy {config.policy}: a run of a Decision Transformer, which needs its rewards to act; recording "
            "does not provide them: use the run of another algorithm"
        )
    env_config = _env_config(config, run[1] if run else None)
    example = make_env(env_config)
    try:
        if config.policy == EXPERT:
            check_expert(example, env_config.id)
        if config.noise > 1 and not isinstance(example.action_space, spaces.Box):
            raise InputError(f"--noise: {config.noise:g} is no chance of a random action; {env_config.id} needs 0 to 1")
        path, files = _files(config, example, env_config.id)
        with Recording(path, files, append=config.append) as recording, StopSignal() as stop:
            recording.set_spaces(example.observation_space, example.action_space)
            seed = config.seed + recording.num_episodes
            seed_everything(seed)
            env = make_vector_env(env_config, device=str(config.device))
            try:
                actor = _actor(config, run, env, env_config, example.action_space, np.random.default_rng(seed))
                played = _play(config, env, actor, recording, seed, stop)
            except DeftError as error:
                raise type(error)(f"{error}; {recording.kept}") from error
            finally:
                env.close()
    finally:
        close_env(example)
    stop.reraise()
    return {
        "dataset": str(recording.path),
        **_minari_id(files),
        "recorded_episodes": played.num_episodes,
        "recorded_steps": played.num_steps,
        "total_episodes": recording.num_episodes,
        "total_steps": recording.num_steps,
        "action_selection": actor.action_selection,
        **({"dropped_episodes": played.num_dropped} if config.only_success else {}),
        **_summary(played.finished),
    }


def _files(config: CollectConfig, env: gymnasium.Env, env_id: str) -> tuple[Path, MinariFiles | LeRobotFiles]:
    """Where the dataset is written, and in which format."""
    details = {"algorithm_name": config.policy, **environment_details(env.spec, env_id)}
    fps = None
    if config.format == "lerobot":
        fps = config.fps or env.metadata.get("render_fps")
        if fps is None:
            raise InputError(f"--fps: missing; {env_id} has no render_fps, and LeRobot datasets need it")
    return dataset_files(config.out, config.format, DatasetSpec(fps, use_videos=config.use_videos), details)


def _minari_id(files: MinariFiles | LeRobotFiles) -> dict[str, str]:
    """How Minari finds the dataset."""
    if not isinstance(files, MinariFiles):
        return {}
    return {"minari_id": files.dataset_id, "minari_datasets_path": str(files.datasets_path)}


def _summary(finished: list[PlayedEpisode]) -> dict[str, Any]:
    """Summary of the episodes that ended."""
    if not finished:
        return {"ended_episodes": 0}
    results = summarize(finished)
    tasks = Counter(episode.labels["task"] for episode in finished if "task" in episode.labels)
    return {"ended_episodes": results.pop("episodes"), **results, **({"tasks": dict(tasks)} if tasks else {})}


def _env_config(config: CollectConfig, run: AnyRunConfig | None) -> EnvConfig:
    """The environment of the flags, and otherwise that of the policy's run."""
    if run is None and config.env is None:
        raise InputError(f"--env: missing; it must be given for --policy {config.policy}")
    kwargs = merge_env_kwargs(config.env_kwargs, config.task, None)
    own = None if run is None else run.env.id
    if config.task is not None and config.env is not None and (own is None or full_id(config.env) != full_id(own)):
        kwargs = {**TASK_KWARGS.get(full_id(config.env), {}), **kwargs}
    return env_of_run(
        run,
        config.env,
        kwargs,
        config.rename_streams,
        config.max_episode_steps,
        num_envs=min(config.num_envs, config.steps or config.episodes or 1),
        vector=config.vector,
        suite_path=config.suite_path,
    )


# -------------------------------------------------------------------------------------------------------------- acting


class _Noisy:
    """Another actor with noise on its actions, clipped to the bounds of the space.

    Box: a ← a + noise · (high − low)/2 · N(0, 1) (unbounded dims: noise · N(0, 1)); padded dims stay as they are.
    Discrete, MultiDiscrete: with the chance `noise`, each number is drawn uniformly instead.
    """

    def __init__(self, actor: Actor, env: VectorEnv, noise: float, generator: np.random.Generator) -> None:
        self._actor, self._noise, self._generator = actor, noise, generator
        self.action_selection = actor.action_selection
        self._space = env.action_space
        if isinstance(self._space, spaces.Box):
            span = (self._space.high.astype(np.float64) - self._space.low) / 2
            self._scale = np.where(np.isfinite(span), span, 1.0) * noise
            if env.action_mask is not None:
                self._scale = self._scale * env.action_mask

    def act(self, observation: Observation, reward: np.ndarray | None = None) -> np.ndarray:
        actions = self._actor.act(observation, reward)
        if isinstance(self._space, spaces.Box):
            return actions + self._scale * self._generator.standard_normal(actions.shape)
        counts = self._space.n if isinstance(self._space, spaces.Discrete) else self._space.nvec  # type: ignore[attr-defined]
        drawn = self._generator.integers(counts, size=actions.shape)
        return np.where(self._generator.random(actions.shape) < self._noise, drawn, actions)

    def ended(self, done_index: np.ndarray) -> None:
        self._actor.ended(done_index)


def _actor(
    config: CollectConfig,
    run: tuple[Path, AnyRunConfig] | None,
    env: VectorEnv,
    env_config: EnvConfig,
    action_space: spaces.Space,
    generator: np.random.Generator,
) -> Actor:
    """The actor that the settings name. `action_space` is the environment's own, which its expert acts in."""
    actor: Actor
    if run is not None:
        folder, run_config = run
        # The policy is built for spaces with its chunks; they are played here step by step, so that each is recorded.
        single = dataclasses.replace(env_config, vector="sync")
        built_for = make_vector_env(single, chunk_length=run_config.policy.chunk_length, num_envs=1)
        try:
            policy = members_of(load_policy(folder, run_config, built_for, config.device))[0]
        finally:
            built_for.close()
        if policy.needs_reward:
            raise InputError("--policy: needs its rewards to act, which recording does not provide; use another policy")
        actor = PolicyActor(policy, env.num_envs, env.action_mask, config.deterministic)
    elif config.policy == RANDOM:
        actor = ScriptedActor(lambda: random_actions(env, generator), RANDOM)
    else:
        actor = ScriptedActor(expert_actions(env, action_space), EXPERT)
    return _Noisy(actor, env, config.noise, generator) if config.noise else actor


# ----------------------------------------------------------------------------------------------------------- recording


class _OpenEpisode:
    """An episode that one environment is in, row by row."""

    def __init__(self, observation: Observation, row: int, seed: int | None = None) -> None:
        self.seed = seed
        self._observations = [take_rows(observation, np.array([row]))]
        self._steps: list[tuple[np.ndarray, float, bool, bool]] = []

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, action: np.ndarray, step: VectorStep, index: int, observation: Observation, row: int) -> None:
        """Take in environment `index` of a step; `row` of `observation` is what it led to."""
        self._steps.append((action, step.reward[index], step.terminated[index], step.truncated[index]))
        self._observations.append(take_rows(observation, np.array([row])))

    def close(self) -> Episode:
        """The episode as a dataset has it; cut here, where it has not ended."""
        action, reward, terminated, truncated = (np.array(column) for column in zip(*self._steps, strict=True))
        truncated[-1] |= not terminated[-1]
        first = self._observations[0]
        observation: Observation
        if isinstance(first, dict):
            observation = {name: np.concatenate([row[name] for row in self._observations]) for name in first}
        else:
            observation = np.concatenate(self._observations)  # type: ignore[arg-type]
        return Episode(observation, action, reward, terminated, truncated)


class _Played:
    """What was recorded by this call."""

    def __init__(self) -> None:
        self.num_episodes = 0
        self.num_steps = 0
        self.num_dropped = 0
        """Episodes without success, with `only_success`."""
        self.finished: list[PlayedEpisode] = []


@torch.inference_mode()
def _play(
    config: CollectConfig, env: VectorEnv, actor: Actor, recording: Recording, seed: int, stop: Callable[[], bool]
) -> _Played:
    """Step the environments and write each episode as it ends, until enough is recorded or `stop()` is true."""
    played = _Played()
    attributes = {"policy": config.policy, "noise": config.noise}
    # Every environment records a fixed share: taking the first episodes that end would prefer short ones.
    share = [len(range(index, config.episodes or 0, env.num_envs)) for index in range(env.num_envs)]
    num_taken = 0  # steps in recorded and open episodes

    def write(index: int, result: PlayedEpisode | None) -> None:
        recorded = open_episodes[index].close()
        success = None if result is None else result.success
        recording.add(recorded, seed=open_episodes[index].seed, success=success, **attributes)
        played.num_episodes += 1
        played.num_steps += len(recorded)
        if result is not None:
            played.finished.append(result)

    def drop(result: PlayedEpisode) -> None:
        if result.success is None:
            raise InputError(f"--only-success: {config.env or config.policy} does not report success; leave it out")
        played.num_dropped += 1
        if played.num_dropped >= MAX_DROPPED * (1 + played.num_episodes):
            raise RunError(
                f"--only-success: {played.num_episodes} of {played.num_episodes + played.num_dropped} episodes "
                "succeeded; use a better policy or less noise"
            )

    def take(actions: np.ndarray, step: VectorStep, indices: Iterable[int]) -> None:
        """Add a step of these environments to their episodes, and write those that ended."""
        nonlocal num_taken
        finals = {int(index): row for row, index in enumerate(step.done_index)}
        ended = {result.env_index: result for result in step.episodes}
        for index in indices:
            episode = open_episodes[index]
            if num_taken == config.steps:
                break
            if config.episodes is not None and not share[index]:
                continue
            if index in step.lost_index:
                num_taken -= len(episode)
                open_episodes[index] = _OpenEpisode(step.observation, index)
                continue
            num_taken += 1
            if index not in finals:
                episode.add(actions[index], step, index, step.observation, index)
                continue
            assert step.final_observation is not None
            episode.add(actions[index], step, index, step.final_observation, finals[index])
            if config.only_success and not ended[index].success:
                drop(ended[index])
                num_taken -= len(episode)
            else:
                write(index, ended[index])
                share[index] -= 1
                if config.episodes is not None and not share[index]:
                    env.suspend([index])
            open_episodes[index] = _OpenEpisode(step.observation, index)

    def is_enough() -> bool:
        return num_taken == config.steps if config.steps is not None else not any(share)

    observation = env.reset(seed)
    open_episodes = [_OpenEpisode(observation, index, seed + index) for index in range(env.num_envs)]
    total, unit = (config.steps, "steps") if config.steps is not None else (config.episodes, "episodes")
    assert total is not None
    with show_progress(total, unit) as progress:
        actions = np.empty(0)

        def act(observation: Observation) -> np.ndarray:
            nonlocal actions
            actions = _executed(actor.act(observation), env.action_space)
            return actions

        def sink(_: Any, __: Any, step: VectorStep) -> bool:
            take(actions, step, range(env.num_envs))
            actor.ended(step.done_index)
            progress(num_taken if config.steps is not None else played.num_episodes)
            return is_enough()

        try:
            rollout(env, act, sink, observation, stop=stop)
        except DeftError:
            if env.finished is not None:  # environments whose step was complete when another one failed
                take(actions, env.finished, env.finished.done_index.tolist())
            raise
        if not stop():
            for index, episode in enumerate(open_episodes):
                if config.steps is not None and len(episode):
                    write(index, None)
    return played


def _executed(actions: np.ndarray, space: spaces.Space) -> np.ndarray:
    """The actions as the environments carry them out, which is how they are recorded: Box clipped, in float32."""
    if isinstance(space, spaces.Box):
        return np.clip(actions.astype(np.float32), space.low, space.high)
    return actions
