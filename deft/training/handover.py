"""One policy from one algorithm to the next: what a run takes over from the run that `model_path` names.

`deft.training.run` asks here which network the weights belong to, so that a policy trained on a dataset goes on in an
environment as it is: its network, its normalisation, its action scaling and, for SAC, its critics.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any, TypeVar

from deft.algorithms.off_policy import ActorAlgorithm, OffPolicy
from deft.algorithms.registry import OFFLINE_ALGORITHMS
from deft.config.loading import replace, to_dict
from deft.config.settings import (
    MODEL_CHUNKS,
    ActorConfig,
    OfflineRunConfig,
    OnlineActorConfig,
    PolicyConfig,
    ReplayRunConfig,
    RunConfig,
)
from deft.envs.make import full_id
from deft.errors import InputError
from deft.models.actor import Actor
from deft.models.policy import Policy
from deft.runs import checkpoint
from deft.runs.policies import checkpoint_folder, config_beside

log = logging.getLogger(__name__)
AnyConfig = TypeVar("AnyConfig", RunConfig, OfflineRunConfig)
GOES_ON_WITH = "goes on with an actor of unit actions (iql, cql, td3-bc, sft or sac)"
NOT_USED = "policy: its settings are those of the run that it comes from; the ones given are not used"


def take_over(config: RunConfig, policy: Policy | None, resume_from: Path | None = None) -> RunConfig:
    """The config with the policy section of what it starts from: the policy given, or the run of `model_path`.

    A run that is resumed has taken it over already: its own folder says what.
    """
    if policy is not None:
        return _with_actor(config, _section_of(policy)) if isinstance(policy, Actor) else config
    if config.model_path is None:
        return config
    source = config_beside(resume_from or Path(config.model_path))
    if source is None:
        return config
    return _with_actor(_with_model(_in_its_world(config, source), source), _actor_section(source, config))


def take_over_offline(config: OfflineRunConfig, resume_from: Path | None = None) -> OfflineRunConfig:
    """A run on a dataset that goes on with a VLA model of another run: the model is named there.

    What the config itself says of the policy holds over that. Any other policy is named by the config alone, whose
    defaults are those of the run that it starts from. A run that is resumed has taken it over already: its own folder
    says what.
    """
    if config.model_path is None:
        return config
    source = config_beside(resume_from or Path(config.model_path))
    if source is None:
        return config
    if config.policy.vla_config is not None:
        return _with_model(config, source)
    actor = _actor_of(source)
    if actor is None or actor.vla_config is None:
        return config
    default, named = to_dict(ActorConfig()), to_dict(actor)
    said = {name: value for name, value in to_dict(config.policy).items() if value != default[name]}
    return replace(config, policy={**{name: named[name] for name in default if name in named}, **said})


def check_heads(config: OfflineRunConfig, start: str | Path | None) -> None:
    """Refuse a transformer with other heads than its weights were trained with, which no weight's shape shows."""
    source = None if start is None or config.algorithm.name != "dt" else config_beside(Path(start))
    if source is None or source.algorithm.name != "dt":
        return
    was, now = (to_dict(one.algorithm.cfg)["n_head"] for one in (source, config))
    if was != now:
        raise InputError(f"n_head: {now}, and the weights of {start} were trained with {was}; give --n_head {was}")


def adopt_critics(algorithm: Any, path: str | Path | None, state: dict[str, Any] | None = None) -> None:
    """Give SAC the critics that its policy was trained with: of the state given, or of the run at `path`."""
    folder = None if path is None else checkpoint_folder(Path(path))
    if state is None and folder is not None:
        state = checkpoint.load_training_state(folder).get("algorithm", {})
    if not isinstance(algorithm, OffPolicy) or (state is None and path is None):
        return
    if state is None or "critics" not in state:
        log.info("%s has no critics: they start anew", folder or "the policy's run")
        return
    try:
        algorithm.adopt(state)
    except InputError as error:
        settings, sizes = algorithm.settings, ", ".join(map(str, algorithm.policy.hidden_sizes))
        raise InputError(
            f"{folder or 'critics'}: its critics are of another shape than num_critics {settings.num_critics}, "
            f"critic_layer_norm {str(settings.critic_layer_norm).lower()} and hidden layers of {sizes}; "
            "give what that run had, or --no-keep-critics (keep_critics=False) to start them anew"
        ) from error


def _actor_section(source: RunConfig | OfflineRunConfig, config: RunConfig) -> OnlineActorConfig | None:
    """The actor of a run, or None where it has a policy of another kind."""
    if isinstance(source, OfflineRunConfig):
        algorithm = OFFLINE_ALGORITHMS[source.algorithm.name]
        if not issubclass(algorithm, ActorAlgorithm):
            raise InputError(
                f"model_path: a {source.algorithm.name} policy needs the returns it aims at, and cannot go on with "
                f"{config.algorithm.name}; start from a run of iql, cql, td3-bc or sft"
            )
        if source.trainer.num_seeds > 1:
            raise InputError(
                f"model_path: a run of {source.trainer.num_seeds} seeds holds as many policies; train one with "
                "num_seeds 1, or take one out in Python: policy.member(i)"
            )
        return _online(source.policy, algorithm.distribution)
    actor = _actor_of(source)
    assert actor is None or isinstance(actor, OnlineActorConfig)
    return actor


def _actor_of(source: RunConfig | OfflineRunConfig) -> ActorConfig | None:
    """The section of a run's config that describes its actor, or None where it has a policy of another kind."""
    if isinstance(source, RunConfig) and not isinstance(source, ReplayRunConfig):
        return source.policy.actor
    return source.policy


def _section_of(policy: Actor) -> OnlineActorConfig:
    return _online(policy.config, policy.distribution)


def _online(config: ActorConfig, distribution: str) -> OnlineActorConfig:
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(ActorConfig)}
    return OnlineActorConfig(**fields | {"distribution": distribution})


def _in_its_world(config: RunConfig, source: RunConfig | OfflineRunConfig) -> RunConfig:
    """The config whose environment is made as that of the run it starts from, where it is the same one."""
    own, theirs = (None if env_id is None else full_id(env_id) for env_id in (config.env.id, source.env.id))
    if own != theirs:
        return config
    changes: dict[str, Any] = {}
    for setting in ("kwargs", "rename_streams"):
        given, before = getattr(config.env, setting), getattr(source.env, setting)
        if missing := {name: value for name, value in before.items() if name not in given}:
            log.info("%s is made as in the run that it starts from: %s %s", config.env.id, setting, missing)
            changes[f"env.{setting}"] = {**missing, **given}
    return replace(config, **changes)


def _with_model(config: AnyConfig, source: RunConfig | OfflineRunConfig) -> AnyConfig:
    """Return the config whose VLA model is built as in the run it starts from, except for what it sets itself.

    The chunk length is part of the policy: its weights and its action scale have one size for each step of a chunk.
    """
    own, theirs = config.policy, _actor_of(source) or source.policy
    if own.vla_config is None or theirs.vla_config is None:
        return config
    name = own.vla_config.model_class
    if name != theirs.vla_config.model_class:
        return config
    changes: dict[str, Any] = {}
    given = own.vla_config.model_config
    if missing := {key: value for key, value in theirs.vla_config.model_config.items() if key not in given}:
        log.info("%s is built as in the run that it starts from: %s", name, missing)
        changes["policy.vla_config.model_config"] = {**missing, **given}
    if own.chunk_length != theirs.chunk_length:
        if own.chunk_length not in (type(own)().chunk_length, MODEL_CHUNKS.get(name)):  # set by the user
            raise InputError(
                f"chunk_length: {own.chunk_length}, but the policy of {config.model_path} was trained with "
                f"{theirs.chunk_length}; give --chunk_length {theirs.chunk_length}, or leave it out"
            )
        log.info("chunk_length is %d, as in the run that it starts from", theirs.chunk_length)
        changes["policy.chunk_length"] = theirs.chunk_length
    return replace(config, **changes)


def _with_actor(config: RunConfig, actor: OnlineActorConfig | None) -> RunConfig:
    if isinstance(config, ReplayRunConfig):
        if actor is None:
            raise InputError(
                f"model_path: {config.algorithm.name} {GOES_ON_WITH}; the policy of that run is of another kind"
            )
        if config.policy not in (OnlineActorConfig(), actor):
            log.warning(NOT_USED)
        return replace(config, policy=to_dict(actor))
    if actor is None or config.policy.name == "vla":  # a VLA model that the config itself names
        return config
    if config.policy.name == "actor" and config.policy.actor == actor:
        return config
    if config.policy != PolicyConfig():
        log.warning(NOT_USED)
    return replace(config, policy={"name": "actor", "actor": to_dict(actor), "chunk_length": actor.chunk_length})
