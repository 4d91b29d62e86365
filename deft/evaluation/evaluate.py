"""`deft evaluate`: rebuilds a run's policy and environment from its folder and plays episodes with them."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium

from deft import trust
from deft.config.loading import load_config
from deft.config.settings import EnvConfig, OfflineRunConfig, RunConfig
from deft.data.datasets.dataset import normalized_score
from deft.envs.make import full_id, kind_of, make_env, make_vector_env, wrap
from deft.envs.suites import suite_of
from deft.envs.vector import Episode, VectorEnv
from deft.envs.wrappers import FrameRecorder
from deft.errors import InputError
from deft.evaluation.rollouts import (
    check_num_episodes,
    evaluate_policy,
    evaluation_envs,
    merge_results,
    num_played,
    play_episodes,
    record_video,
)
from deft.evaluation.success import reward_interval, success_tables
from deft.evaluation.video import write_video
from deft.models.policy import Policy, members_of
from deft.runs import checkpoint, model_files
from deft.runs.compute import choose_device
from deft.runs.directory import CONFIG_FILE, checkpoint_choice
from deft.runs.logging import show_evaluation
from deft.runs.policies import build_policy, check_acts, saved_config
from deft.runs.policy_spaces import PolicySpaces, check_streams, policy_space
from deft.runs.random_state import seed_everything

logger = logging.getLogger(__name__)

VIDEO_EPISODES = 5  # at most, of those that are evaluated
VIDEO_OUTCOMES = 3  # successes, and as many failures
FIRST_HELD_OUT_SEED = 2**30  # of evaluations in environments with splits, and in suites


@trust.takes_remote_code
def evaluate_run(
    path: str | Path,
    episodes: int = 10,
    video: str | Path | None = None,
    seed: int = 0,
    device: str = "auto",
    random_policy: bool = False,
    env: str | None = None,
    env_kwargs: dict[str, Any] | None = None,
    task: str | None = None,
    split: str | None = None,
    shuffle_instructions: bool = False,
    videos: str | Path | None = None,
    deterministic: bool = True,
    rename_streams: Mapping[str, str] | None = None,
    vector: str | None = None,
    suite_path: str | None = None,
    *,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Episodes of a run's best checkpoint (or of the checkpoint given), each from its own seed; optionally videos.

    `deterministic` plays the most likely actions, else sampled ones; `action_selection` in the results names which
    (`Policy.action_selection`). With `random_policy` uniformly random actions play instead: the baseline, on
    the same seeds. If the environment names its tasks and instructions, the results have a table of each; success rates
    have their Wilson interval. `rename_streams` is {name in the policy: name in the environment}.
    `vector` is how the environments run (`EnvConfig.vector`), one after the other by default; `suite_path` is the
    folder of a suite's further files (`EnvConfig.suite_path`).
    `trust_remote_code` allows the modules that the run's files name to be imported.
    """
    check_num_episodes(episodes)
    trust.name(env, env_kwargs)
    folder, config = find_run(Path(path))
    seed_everything(seed)
    kwargs = merge_env_kwargs(env_kwargs, task, split, shuffle_instructions)
    env_config = env_of_run(config, env, kwargs, rename_streams, vector=vector or "sync", suite_path=suite_path)
    seen = config.env.arguments.get("split", "train")
    if split == "held-out" and seen != "train":
        logger.warning("%s was trained with split %s: these combinations are not new to it", path, seen)
    count = evaluation_envs(episodes, env_config.vector)
    length = config.policy.chunk_length
    vector_env = make_vector_env(env_config, chunk_length=length, num_envs=count, device=str(device))
    policies: list[Policy | None] = [None]
    played: list[list[Episode]] = []  # of each seed that was trained at once
    try:
        if not random_policy:
            policies = [*members_of(load_policy(folder, config, vector_env, device))]
        given, seed = seed, first_seed(vector_env, seed, env_config.id)
        all_results = []
        with show_evaluation(sum(num_played(policy, episodes) for policy in policies)) as watch:
            for policy in policies:
                seed_everything(given)  # what is drawn depends on the seed alone, not on what was done before
                played.append([])
                results = evaluate_policy(policy, vector_env, episodes, seed, played[-1], deterministic, watch)
                all_results.append(results)
    finally:
        vector_env.close()
    references = config.dataset.reference_returns if isinstance(config, OfflineRunConfig) else None
    if references is not None and config.env.id is not None and not _is_same_world(env_config, config.env):
        logger.warning("no normalised score: the reference returns are of %s as the run has it", config.env.id)
        references = None
    results = merge_results(all_results, partial(normalized_score, reference_returns=references))
    results |= {**reward_interval(played), **success_tables(played)}
    choice = "none: the actions are random" if random_policy else checkpoint_choice(path, folder)
    results |= {"first_seed": seed, "checkpoint": str(folder), "checkpoint_choice": choice}
    if video is not None:
        rendered = make_env(env_config, render_mode="rgb_array")
        count = min(episodes, VIDEO_EPISODES)
        results["video"] = str(record_video(policies[0], rendered, Path(video), count, seed, deterministic))
    if videos is not None:
        chunk_length = config.policy.chunk_length
        outcomes = record_outcomes(policies[0], env_config, chunk_length, played[0], videos, seed, deterministic)
        results["videos"] = [str(file) for file in outcomes]
    return results


def _is_same_world(env: EnvConfig, own: Any) -> bool:
    """Whether an environment is the run's own, however it is spelled."""
    theirs, ours = (full_id(name) for name in (env.id.rpartition(":")[2], own.id.rpartition(":")[2]))
    return theirs == ours and {"split": "train", **env.arguments} == {"split": "train", **own.arguments}


def merge_env_kwargs(
    env_kwargs: dict[str, Any] | None, task: str | None, split: str | None, shuffle_instructions: bool = False
) -> dict[str, Any]:
    """Arguments of the environment's constructor out of the flags that name some of them."""
    kwargs = dict(env_kwargs or {})
    given = {"task": task, "split": split, "shuffle_instructions": shuffle_instructions or None}
    for name, value in given.items():
        if value is not None and kwargs.setdefault(name, value) != value:
            raise InputError(f"--{name} {value}: --env-kwargs sets {kwargs[name]!r}; give one of them")
    return kwargs


def first_seed(env: VectorEnv, seed: int, env_id: str | None = None) -> int:
    """Return the first episode's seed; with splits and in suites it is one that no training starts from.

    `deft collect` starts environment i from its seed + i. In an environment without splits these seeds are shared: give
    another seed than that of the recording.
    """
    return seed + FIRST_HELD_OUT_SEED if env.has_splits or suite_of(env_id) is not None else seed


def record_outcomes(
    policy: Policy | None,
    env_config: EnvConfig,
    chunk_length: int,
    episodes: Sequence[Episode],
    folder: str | Path,
    seed: int,
    deterministic: bool = True,
    count: int = VIDEO_OUTCOMES,
) -> list[Path]:
    """Videos of single episodes: up to `count` that succeeded and as many that failed, played again from their seeds.

    A file's name contains the outcome of the recorded episode. It may differ from that of the evaluation, since a batch
    of another size rounds differently and draws other noise.
    """
    chosen = [
        index
        for outcome in (True, False)
        for index in [i for i, episode in enumerate(episodes) if episode.success is outcome][:count]
    ]
    if not chosen:
        raise InputError("--videos: this environment does not report success; use --video")
    recorder = FrameRecorder(make_env(env_config, render_mode="rgb_array"))
    fps = recorder.metadata.get("render_fps", 30)
    vector = wrap(recorder, chunk_length=chunk_length)
    written = []
    try:
        for index in chosen:
            episode = play_episodes(policy, vector, 1, seed + index, deterministic)[0]
            words = "-".join(re.findall(r"[\w-]+", episode.labels.get("instruction", "episode")))  # no slashes
            name = f"{'success' if episode.success else 'failure'}_{index}_{words}.mp4"
            written.append(write_video(recorder.last_episode, Path(folder) / name, fps=fps))
    finally:
        vector.close()
    return written


def load_policy(folder: Path, config: RunConfig | OfflineRunConfig, env: VectorEnv, device: str = "auto") -> Policy:
    """The policy of a checkpoint, for an environment like the one that it was trained in or for."""
    recorded = PolicySpaces.read(folder)
    observation = policy_space(recorded, env.observation_space, folder, "the environment")
    try:
        policy = rebuild_policy(folder, config, observation, env.action_space, device)
    except InputError as error:
        if recorded is None or recorded.matches(own := PolicySpaces(env.observation_space, env.env_action_space)):
            raise
        trained_in = "an environment" if config.env.id is None else config.env.id
        raise InputError(
            f"the policy was trained for {trained_in} with {recorded}; this environment has {own}: {error}"
        ) from error
    check_streams(policy, observation, env.observation_space, "the environment")
    policy.check_box(env.action_space)
    return policy


def rebuild_policy(
    folder: Path,
    config: RunConfig | OfflineRunConfig,
    observation: gymnasium.Space,
    action: gymnasium.Space,
    device: str = "auto",
) -> Policy:
    """The policy of a checkpoint, built for these spaces, with its weights."""
    policy = build_policy(config, observation, action, weights_follow=True)
    weights = checkpoint.load_model(folder)
    checkpoint.load_weights(policy, weights, folder / checkpoint.MODEL)
    return policy.to(choose_device(device))


def env_of_run(
    run: RunConfig | OfflineRunConfig | None,
    env: str | None,
    kwargs: Mapping[str, Any],
    rename_streams: Mapping[str, str] | None = None,
    max_episode_steps: int | None = None,
    **settings: Any,
) -> EnvConfig:
    """The environment that a policy acts in: as the flags define it, and otherwise as in the policy's run.

    The run's constructor arguments, stream names, time limit and reward weights apply if it is the run's environment.
    `settings` are further fields of `EnvConfig`.
    """
    own = None if run is None else run.env
    env_id = env or (None if own is None else own.id)
    if env_id is None:
        raise InputError("--env: missing; the policy's run names no environment, give one with --env")
    names = dict(rename_streams or {})
    if own is not None and (own.id is None or kind_of(env_id) == kind_of(own.id)):
        merged, names = own.with_arguments(kwargs, max_episode_steps), {**own.rename_streams, **names}
        kwargs, max_episode_steps = merged.kwargs, merged.max_episode_steps
        settings.setdefault("reward_weights", getattr(own, "reward_weights", {}))
        settings["suite_path"] = settings.get("suite_path") or own.suite_path
    return EnvConfig(
        id=env_id, kwargs=dict(kwargs), rename_streams=names, max_episode_steps=max_episode_steps, **settings
    )


def find_run(path: Path) -> tuple[Path, RunConfig | OfflineRunConfig]:
    """The best or latest checkpoint of a run that acts, or the checkpoint given, and the settings of the run."""
    folder, config = _find_run(path)
    check_acts(config, path)
    return folder, config


def _find_run(path: Path) -> tuple[Path, RunConfig | OfflineRunConfig]:
    files = [path / checkpoint.MODEL_SAFETENSORS, path / CONFIG_FILE]
    if all(map(os.path.isfile, files)):  # of `deft export`; False for a name that is too long
        return path, model_files.find_files(load_config(path / CONFIG_FILE), path)
    folder = checkpoint.find_best(path)
    config_file = folder.parent / CONFIG_FILE
    if config_file.is_file():
        return folder, load_config(config_file)
    if (folder.parent / "config.json").is_file():
        raise InputError(f"{path}: a run of waypoint-ppo; `deft compare` measures it against its supervised policy")
    config = saved_config(folder)
    if config is None:
        raise InputError(f"{path}: {config_file} is missing, so the policy cannot be rebuilt; evaluate it from Python")
    return folder, config
