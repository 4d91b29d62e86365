"""Continue with the policy of another run: read the settings of the run that `model_path` names.

A policy is rebuilt from its own settings, whatever algorithm trained it, and its weights are loaded into it. SAC also
continues with the critics of an off-policy run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from deft.algorithms.off_policy import OffPolicy
from deft.algorithms.registry import ALGORITHMS
from deft.config.loading import replace, to_dict
from deft.config.settings import MODEL_CHUNKS, OfflineRunConfig, PolicyConfig, RunConfig
from deft.envs.make import kind_of
from deft.errors import InputError, shown
from deft.models.policy import Policy
from deft.runs import checkpoint
from deft.runs.policies import check_acts, checkpoint_folder, config_beside

log = logging.getLogger(__name__)
AnyConfig = TypeVar("AnyConfig", RunConfig, OfflineRunConfig)
NOT_COMPARED = (
    *("output_dir", "resume", "auto_resume", "overwrite", "model_path"),
    *("total_timesteps", "iterations", "num_epochs"),
)
FREE_FORM = ("kwargs", "training_kwargs", "model_config")  # arguments, shown as a whole


def use_policy_section(config: AnyConfig, policy: Any = None, resume_from: Path | None = None) -> AnyConfig:
    """The config with the policy section of the policy given, or of the run of `model_path`.

    Settings that the config itself changes from their defaults override those of that run. Changed settings that the
    resulting policy does not use raise an error.
    """
    used = _with_policy_section(config, policy, resume_from)
    for name, section in ALGORITHMS[config.algorithm.name].policy_settings.items():
        if to_dict(used.policy)[name] is None:
            used = replace(used, **{f"policy.{name}": section})
    if policy is None and resume_from is None:
        used.policy.reject_unused(config.policy.changed(), config.algorithm.cfg)
    return used


def _with_policy_section(config: AnyConfig, policy: Any, resume_from: Path | None) -> AnyConfig:
    kind = ALGORITHMS[config.algorithm.name]
    if policy is not None:
        built_from = policy.policy_config if isinstance(policy, Policy) else None
        return config if built_from is None else replace(config, policy=_for_algorithm(config, to_dict(built_from)))
    if config.model_path is None or not kind.exchanges_policies:
        return config
    source = config_beside(resume_from or Path(config.model_path))
    if source is None:
        return config
    _check_source(config, source)
    if isinstance(config, RunConfig):
        config = _with_env_settings(config, source)
    own, theirs = config.policy, source.policy
    models = [None if section.vla_config is None else section.vla_config.model_class for section in (own, theirs)]
    if models[0] not in (None, models[1]):
        return config
    _check_chunk_length(config, theirs)
    default, section = to_dict(type(own)()), to_dict(theirs)
    changed = {name: value for name, value in to_dict(own).items() if value != default[name]}
    if not kind.reads_critic_observation(config.algorithm.cfg):
        section["critic_observation"] = default["critic_observation"]
    if theirs.vla_config is not None:
        changed.pop("chunk_length", None)
        given = changed.pop("vla_config", None) or {"model_config": {}}
        section["vla_config"]["model_config"] |= given["model_config"]
        if given.get("model_path") is not None:
            section["vla_config"]["model_path"] = given["model_path"]
    if section["distribution"] is None:
        section["distribution"] = ALGORITHMS[source.algorithm.name].distribution
    return replace(config, policy=_for_algorithm(config, section | changed))


def _for_algorithm(config: RunConfig | OfflineRunConfig, section: dict[str, Any]) -> dict[str, Any]:
    """The section with what the algorithm requires of a VLA policy."""
    if section["vla_config"] is None:
        return section
    return section | dict(ALGORITHMS[config.algorithm.name].vla_settings)


def _check_source(config: RunConfig | OfflineRunConfig, source: RunConfig | OfflineRunConfig) -> None:
    if not ALGORITHMS[source.algorithm.name].exchanges_policies:
        check_acts(source, f"model_path: {config.model_path}")
    reason = ALGORITHMS[source.algorithm.name].cannot_be_trained
    own = config.algorithm.name
    if reason and source.algorithm.name not in (own, *ALGORITHMS[own].continues):
        raise InputError(
            f"model_path: a {source.algorithm.name} policy {reason} and cannot be trained with "
            f"{config.algorithm.name}; start from a run of iql, cql, td3-bc, rebrac or sft"
        )
    if isinstance(config, RunConfig) and isinstance(source, OfflineRunConfig) and source.trainer.num_seeds > 1:
        raise InputError(
            f"model_path: a run of {source.trainer.num_seeds} seeds holds as many policies; train one with "
            "num_seeds 1, or select one in Python: policy.member(i)"
        )


def _check_chunk_length(config: RunConfig | OfflineRunConfig, theirs: PolicyConfig) -> None:
    """Raise an error if the user sets another chunk length: weights and action scale have one size per step."""
    own, model = config.policy, config.policy.vla_config
    of_model = None if model is None else MODEL_CHUNKS.get(model.model_class)
    is_default = own.chunk_length in (type(own)().chunk_length, of_model)
    if own.chunk_length != theirs.chunk_length and not is_default:
        raise InputError(
            f"chunk_length: {own.chunk_length}, but the policy of {config.model_path} was trained with "
            f"{theirs.chunk_length}; give --chunk_length {theirs.chunk_length}, or leave it out"
        )


def _with_env_settings(config: RunConfig, source: RunConfig | OfflineRunConfig) -> RunConfig:
    """The config with arguments, time limit and stream names of the source run, if the environment is the same."""
    own, theirs = (None if env_id is None else kind_of(env_id) for env_id in (config.env.id, source.env.id))
    if own != theirs:
        return config
    merged = source.env.with_arguments(config.env.kwargs, config.env.max_episode_steps)
    used = {
        "kwargs": merged.kwargs,
        "max_episode_steps": merged.max_episode_steps,
        "rename_streams": {**source.env.rename_streams, **config.env.rename_streams},
    }
    changes = {setting: value for setting, value in used.items() if value != getattr(config.env, setting)}
    for setting, value in changes.items():
        log.info("%s has %s of the run that it starts from: %s", config.env.id, setting, value)
    return replace(config, **{f"env.{setting}": value for setting, value in changes.items()})


def check_fixed_settings(config: RunConfig | OfflineRunConfig, start: str | Path | None) -> None:
    """Raise an error if a setting that the weights depend on is not the one that they were trained with."""
    names = ALGORITHMS[config.algorithm.name].fixed_settings
    source = config_beside(Path(start)) if start is not None and names else None
    if source is None or source.algorithm.name != config.algorithm.name:
        return
    before, after = to_dict(source.algorithm.cfg), to_dict(config.algorithm.cfg)
    for name in names:
        was, now = before[name], after[name]
        if was != now:
            raise InputError(f"{name}: {now}, and the weights of {start} were trained with {was}; give --{name} {was}")


def log_changes(config: RunConfig | OfflineRunConfig, resume_from: Path | None) -> None:
    """Log the settings of a resumed run that are not those that it had, but for where it is and how long it trains."""
    before = None if resume_from is None else config_beside(resume_from)
    if before is None:
        return
    changes = list(_changes(to_dict(before), to_dict(config)))
    if changes:
        log.info("the run that is resumed had other settings: %s", ", ".join(changes))


def _changes(before: dict[str, Any], after: dict[str, Any], section: str = "") -> Iterator[str]:
    for name, now in after.items():
        was = before.get(name)
        if isinstance(was, dict) and isinstance(now, dict) and name not in FREE_FORM:
            yield from _changes(was, now, f"{section}{name}.")
        elif was != now and name not in NOT_COMPARED:
            yield f"{section}{name} {shown(was)}, now {shown(now)}"


def _check_meaning(algorithm: OffPolicy, path: str | Path | None) -> None:
    """Raise an error if the critics of the run judge something else than those of the algorithm."""
    source = config_beside(Path(path)) if path is not None else None
    if source is None:
        return
    before = ALGORITHMS[source.algorithm.name].judged_by_critics(source.algorithm.cfg)
    after = algorithm.judged_by_critics(algorithm.settings)
    if before != after:
        raise InputError(
            f"keep_critics: the critics of {path} judge {before}, and those of {algorithm.name} judge {after}; use "
            "--no-keep-critics (keep_critics=False) for new critics"
        )


def load_critics(algorithm: Any, path: str | Path | None, state: dict[str, Any] | None = None) -> None:
    """Load the critics that a policy was trained with into SAC: from the state given, or from the run at `path`."""
    folder = None if path is None else checkpoint_folder(Path(path))
    if state is None and folder is not None and checkpoint.has_training_state(folder):
        state = checkpoint.load_training_state(folder).get("algorithm", {})
    if not isinstance(algorithm, OffPolicy) or (state is None and path is None):
        return
    _check_meaning(algorithm, path)
    if state is None or "critics" not in state:
        log.info("%s has no critics: new ones are initialised", folder or "the policy's run")
        return
    try:
        algorithm.load_critics(state)
    except InputError as error:
        settings, sizes = algorithm.settings, ", ".join(map(str, algorithm.policy.hidden_sizes))
        raise InputError(
            f"{folder or 'critics'}: its critics are of another shape than num_critics {settings.num_critics}, "
            f"critic_layer_norm {str(settings.critic_layer_norm).lower()} and hidden layers of {sizes}; "
            "use the settings of that run, or --no-keep-critics (keep_critics=False) for new critics"
        ) from error
