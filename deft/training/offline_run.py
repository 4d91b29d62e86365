"""From a config to an offline run: builds policy, algorithm, sampler and trainer in the run directory.

`deft train iql` and its siblings call `train`; `IQLTrainer` and `deft evaluate` use the same builders.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import gymnasium
import torch

from deft.algorithms.offline import OfflineAlgorithm
from deft.algorithms.registry import OFFLINE_ALGORITHMS
from deft.config.loading import replace, to_dict
from deft.config.settings import DatasetConfig, EnvConfig, OfflineRunConfig
from deft.data.datasets import open_dataset
from deft.data.datasets.dataset import Dataset, RenamedDataset, normalized_score
from deft.data.datasets.keyframes import KeyframeDataset
from deft.envs.make import check_id, make_another, make_env, make_vector_env, wrap
from deft.envs.vector import VectorEnv
from deft.envs.wrappers import rename
from deft.errors import InputError
from deft.evaluation.rollouts import EVALUATION_ENVS
from deft.models.normalization import has_seen_data, normalizers
from deft.models.policy import CRITIC, Policy
from deft.models.privileged import public_space
from deft.models.vla.loading import find_vla_class
from deft.models.vla.spec import model_keywords
from deft.runs import sharding
from deft.runs.compute import log_device
from deft.runs.logging import logged_from_start
from deft.runs.policy_spaces import PolicySpaces, check_streams
from deft.runs.random_state import EVALUATION_SEED
from deft.schema import KEYFRAMES
from deft.training.evaluator import Evaluator, check_space
from deft.training.offline import OfflineSpec, OfflineTrainer
from deft.training.run import open_run, run_trainer
from deft.training.validation import hold_out

log = logging.getLogger(__name__)
ADVICE = "give the --env of this dataset, or the dataset of this environment"
FARTHEST_REACH = 1.5  # of actions, in units of the range of weights that are trained on


def train(config: OfflineRunConfig) -> dict[str, Any]:
    """Train as configured, evaluate at the end, and return a summary of the run."""
    trainer = build_offline_trainer(config)
    return run_trainer(trainer, evaluates=trainer.settings.eval_freq > 0 and trainer.is_evaluated)


@logged_from_start
def build_offline_trainer(
    config: OfflineRunConfig,
    dataset: Dataset | None = None,
    policy: Policy | None = None,
    eval_env: gymnasium.Env | None = None,
    spaces: tuple[gymnasium.Space, gymnasium.Space] | None = None,
) -> OfflineTrainer:
    """Return a trainer for a config, in its run directory; dataset, policy and environment may be given.

    `spaces` are the observation and action space that the given policy was built for.
    """
    if dataset is None and config.dataset.path is None:
        raise InputError("dataset: missing; give a name (hopper-medium-v2) or a path with --dataset")
    subject = dataset.name if dataset is not None else str(config.dataset.path)
    run = open_run(config, subject, OFFLINE_ALGORITHMS[config.algorithm.name], policy)
    config, processes, device = run.config, run.processes, run.device
    log_device(config.device, device, "the updates of offline training do not wait for environments")
    if dataset is None:
        assert config.dataset.path is not None
        source = config.dataset
        own = {"download": source.download, "rename_streams": source.rename_streams}
        dataset = open_dataset(config.dataset.path, {**own, **source.options})
    elif config.dataset.rename_streams:
        dataset = RenamedDataset(dataset, config.dataset.rename_streams)
    _check_key_frames(config, run.algorithm_class)
    if (source := config.dataset).keyframe_stream is not None:
        dataset = KeyframeDataset(dataset, source.keyframe_stream, source.keyframe_dims, source.keyframe_switch)
    env_config = None if eval_env is not None or not run.algorithm_class.acts else evaluation_env(config, dataset)
    if env_config is not None and config.env.id is None and (missing := _missing(env_config)):
        log.warning("no evaluation: the dataset's environment cannot be used: %s", missing)
        env_config = None
    config = _with_metadata(config, dataset, env_config, eval_env)
    evaluator = None
    action_space, played_in, action_mask = dataset.action_space, None, None
    make: Callable[..., VectorEnv] | None = None
    names = config.env.rename_streams
    if config.dataset.rename_streams and not names:
        if eval_env is not None:
            names = _names_to_give(_copies(eval_env, 1), config.dataset.rename_streams)
        elif env_config is not None:
            names = _names_to_give(make_vector_env(env_config, num_envs=1), config.dataset.rename_streams)
            env_config = dataclasses.replace(env_config, rename_streams=names)
        config = replace(config, **{"env.rename_streams": names})
    if eval_env is not None:
        eval_env = rename(eval_env, names)
        make, video_env = partial(_copies, eval_env), partial(make_another, eval_env, "rgb_array")
    elif env_config is not None:
        make, video_env = partial(make_vector_env, env_config), partial(make_env, env_config, render_mode="rgb_array")
    if make is not None:
        count = min(config.trainer.eval_episodes, EVALUATION_ENVS)
        make_all = partial(make, num_envs=count, chunk_length=config.policy.chunk_length)
        evaluator = Evaluator(
            make_all,
            config.seed + EVALUATION_SEED,
            in_background=device.type == "cuda",
            deterministic=config.trainer.eval_deterministic,
            video_env=video_env,
        )
        name = env_config.id if env_config else str(eval_env)
        played_in, action_space, action_mask = _checked_env(partial(make, num_envs=1), dataset, name)
        _warn_of_actions_outside(dataset, action_space, name)
    if spaces is not None:
        _check_policy_spaces(spaces, dataset.observation_space, action_space)
    run.config = config
    where = f"dataset {dataset.name}"
    policy, observation_space = run.build_policy(policy, dataset.observation_space, action_space, where)
    observation_space = getattr(getattr(policy, "encoder", None), "space", observation_space)
    check_streams(policy, observation_space, dataset.observation_space, where)
    if played_in is not None:
        check_streams(policy, observation_space, played_in, f"env {name}", "--env_rename_streams")
    run.place(policy)
    if run.starts_from is not None:
        _check_scale(policy, action_space)
    acts = processes.is_first and evaluator is not None
    acting = sharding.shard_policy(policy, processes, device, acts) if run.shards else None
    algorithm = run.algorithm_class(policy, config.algorithm.cfg, seed=config.seed)
    cache_bytes = int(config.dataset.cache_gb * 2**30)
    learned_from, validation = hold_out(algorithm, dataset, config.seed, device, cache_bytes)
    sampler = algorithm.make_sampler(learned_from, config.seed, device, cache_bytes)
    if config.dataset.intervention_weight != 1.0:
        sampler.weight_interventions(config.dataset.intervention_weight)
    is_trained = run.starts_from is not None and all(name.startswith(CRITIC) for name, _ in normalizers(policy))
    fresh = run.resume_from is None and not is_trained and not has_seen_data(policy)
    algorithm.prepare(learned_from, sampler, fresh)
    if run.resume_from is None:
        algorithm.observe_critic(sampler.observations())
    public = public_space(observation_space, policy.critic_streams)
    spec = OfflineSpec(
        **run.spec_fields(acting, PolicySpaces(public, action_space, action_mask)),
        evaluator=evaluator,
        score=partial(normalized_score, reference_returns=config.dataset.reference_returns),
        fingerprint=dataset.fingerprint(),
        check_weights=partial(_check_scale, policy, action_space),
        validation=validation,
    )
    trainer = OfflineTrainer(policy, algorithm, sampler, spec=spec, **to_dict(config.trainer))
    if run.resume_from is not None:
        trainer.load(run.resume_from)
    return trainer


def _check_key_frames(config: OfflineRunConfig, algorithm_class: type[OfflineAlgorithm]) -> None:
    """Raise an error where the labels of key frames would be read as an input, or not learned."""
    source, vla = config.dataset, config.policy.vla_config
    if source.keyframe_stream is None:
        if source.keyframe_dims or source.keyframe_switch != DatasetConfig().keyframe_switch:
            raise InputError("keyframe_stream: missing; keyframe_dims and keyframe_switch say what its labels are")
        return
    if not algorithm_class.learns_labels:
        able = [name for name, one in OFFLINE_ALGORITHMS.items() if one.learns_labels]
        raise InputError(
            f"keyframe_stream: {config.algorithm.name} does not learn from labels; {', '.join(able)} do; leave it out"
        )
    if vla is None or "places_key" not in model_keywords(find_vla_class(vla.model_class))[0]:
        raise InputError("keyframe_stream: only vla-tiny learns from labels; give --model vla-tiny, or leave it out")
    if vla.model_config.get("places_key", KEYFRAMES) != KEYFRAMES:
        raise InputError(f"keyframe_stream: its labels are {KEYFRAMES}; leave places_key out of the model's config")
    if vla.model_config.get("bottleneck"):
        raise InputError(
            "keyframe_stream: with a bottleneck the actions would be learned from the labels, which are the robot's "
            "future; use bottleneck=0"
        )


def _with_metadata(
    config: OfflineRunConfig, dataset: Dataset, env: EnvConfig | None, eval_env: gymnasium.Env | None = None
) -> OfflineRunConfig:
    """Return the config with the metadata of the dataset, so that the run can be evaluated without the dataset."""
    found: dict[str, Any] = {}
    if env is not None:
        found |= {"env.id": env.id, "env.kwargs": env.kwargs}
    own = evaluation_env(replace(config, **{"env.id": None, "env.kwargs": {}}), dataset)
    references = dataset.reference_returns
    if references is not None and config.dataset.reference_returns in (
        None,
        references,
    ):  # not given, or from the dataset before
        is_own = own is None or (env in (None, own) if eval_env is None else _is_made_as(eval_env, own))
        found["dataset.reference_returns"] = references if is_own else None
        if not is_own:
            log.warning("no normalised score: the reference returns are of %s as the dataset has it", dataset.env_id)
    return replace(config, **found)


def _is_made_as(env: gymnasium.Env, config: EnvConfig) -> bool:
    """Whether an environment that a user created is the one of a config; True if it has no spec."""
    if env.spec is None or config.id not in gymnasium.registry:
        return env.spec is None
    own = {**gymnasium.spec(config.id).kwargs, **config.arguments}
    given = {name: value for name, value in env.spec.kwargs.items() if name != "render_mode"}
    return env.spec.id == config.id and given == own


def evaluation_env(config: OfflineRunConfig, dataset: Dataset) -> EnvConfig | None:
    """Return the evaluation environment: the configured one, else the dataset's own; None if there is none."""
    env_id = config.env.id or dataset.env_id
    if env_id is None:
        return None
    env = EnvConfig(
        id=env_id,
        kwargs=dataset.env_kwargs if config.env.id is None else {},
        rename_streams=config.env.rename_streams,
        suite_path=config.env.suite_path,
    )
    return env.with_arguments(config.env.kwargs, config.env.max_episode_steps)


def _names_to_give(env: VectorEnv, names: dict[str, str]) -> dict[str, str]:
    """Return the part of a dataset's renaming that an environment needs: it lacks the new name, and has the old one."""
    with contextlib.closing(env):
        own = env.observation_space.spaces if isinstance(env.observation_space, gymnasium.spaces.Dict) else {}
    if kept := [new for new, old in names.items() if new in own and old in own]:
        log.warning(
            "rename_streams: the environment has streams named %s already and keeps them; only the dataset's are "
            "renamed. Use --env_rename_streams to rename those of the environment",
            ", ".join(kept),
        )
    return {new: old for new, old in names.items() if new not in own and old in own}


def _missing(config: EnvConfig) -> str | None:
    """Return why an environment cannot be created on this machine; None if it can."""
    try:
        check_id(config)
    except InputError as error:
        return str(error)
    return None


def _warn_of_actions_outside(dataset: Dataset, space: gymnasium.Space, name: str) -> None:
    """Warn if actions were recorded on another scale than the environment's, or before clipping."""
    if dataset.table is None or not isinstance(space, gymnasium.spaces.Box):
        return
    actions = dataset.table.action[dataset.table.transition_rows()]
    low, high = (torch.as_tensor(bound.reshape(-1), dtype=actions.dtype) for bound in (space.low, space.high))
    margin = 1e-3 * (high - low)
    outside = ((actions < low - margin) | (actions > high + margin)).any(-1).float().mean().item()
    if outside:
        log.warning(
            "%.2g %% of the dataset's actions lie outside those of env %s, which no policy reaches: they go from %.3g "
            "to %.3g; are they on its scale?",
            100 * outside, name, actions.min().item(), actions.max().item(),
        )  # fmt: skip


def _checked_env(make: Callable[[], VectorEnv], dataset: Dataset, name: str) -> tuple[Any, Any, Any]:
    """Return spaces and action mask of the evaluation environment; an error if its actions are not the dataset's."""
    env = make()
    try:
        named = (gymnasium.spaces.Dict, gymnasium.spaces.Dict)
        if (type(env.observation_space), type(dataset.observation_space)) != named:  # `check_streams` compares streams
            check_space("observation", env.observation_space, dataset.observation_space, f"env {name}", ADVICE)
        check_space("action", env.action_space, dataset.action_space, f"env {name}", ADVICE)
        return env.observation_space, env.action_space, env.action_mask
    finally:
        env.close()


def _check_scale(policy: Policy, space: gymnasium.Space, weights: Mapping[str, torch.Tensor] | None = None) -> None:
    """Raise an error if weights act on another scale than a new policy would here; warn if they nearly do."""
    found = policy.misfit(space, weights)
    if found is None:
        return
    words, reach = found
    if reach > FARTHEST_REACH:
        raise InputError(f"{words}: it was trained on another scale; start a new policy")
    log.warning("%s: it keeps its own range", words)


def _copies(env: gymnasium.Env, num_envs: int, chunk_length: int = 1) -> VectorEnv:
    """Create environments like the one that a user created."""
    return wrap([make_another(env) for _ in range(num_envs)], chunk_length=chunk_length)


def _check_policy_spaces(
    made_for: tuple[gymnasium.Space, gymnasium.Space], observation: gymnasium.Space, action: gymnasium.Space
) -> None:
    """Raise an error if a policy has other sizes, or other bounds of its actions: it would act on another scale."""
    if made_for[0].shape != observation.shape:
        raise InputError(f"obs_dim: the policy was made for {made_for[0]}, the dataset has {observation}")
    if made_for[1] != action:
        raise InputError(
            f"action_dim: the policy acts in {made_for[1]}, here actions are {action}; give that as action_space"
        )
