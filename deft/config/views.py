"""`RLConfig` and `OfflineRLConfig`: the settings of a run as one flat class, for `PPOTrainer`, `IQLTrainer` and others.

Their fields are generated from the settings of the algorithms: name, type and default of every flag, under the names
that the documents use (`deft.config.aliases`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from pydantic import Field

from deft.config.algorithm_settings import ALGORITHM_SETTINGS, AlgorithmSettings
from deft.config.aliases import CLASS_ALIASES
from deft.config.fields import default_of, sections_of, setting_names
from deft.config.flags import run_flags
from deft.config.loading import resolve, set_path, to_dict
from deft.config.settings import CurriculumConfig, OfflineRunConfig, RunConfig, run_class
from deft.config.validation import settings, suggestion
from deft.errors import InputError, shown

View = TypeVar("View")
OFFLINE = [name for name, cls in ALGORITHM_SETTINGS.items() if cls.LEARNS_FROM == "dataset"]
# What a trainer gets in another way: environment, dataset, policy and model.
ELSEWHERE = ("env.id", "policy.name", "policy.action_dim", "policy.unit_actions", "policy.separate_value", "fsdp")
ELSEWHERE_SECTIONS = ("env.curriculum.", "policy.vla_config.", "policy.residual.", "policy.advantage.", "reward_model.")
NOT_OFFLINE = {  # of the environment, of the dataset's loader, and of policies that learn in an environment
    *("env_kwargs", "max_episode_steps", "dataset", "dataset_options", "download", "reference_returns"),
    *("hidden_sizes", "activation", "distribution", "memory_hidden", "memory_num_layers"),
    "chunk_length",
}


def flat_paths(cls: type | str, algorithm: str) -> dict[str, str]:
    """Return the path in a run of this algorithm of every field of a view."""
    names = CLASS_ALIASES[cls if isinstance(cls, str) else cls.__name__]
    flags = [flag for group in run_flags(algorithm) for flag in group.flags]
    paths = {names.get(flag.name, flag.name): flag.path for flag in flags}
    return {
        name: path
        for name, path in paths.items()
        if path not in ELSEWHERE
        and not path.startswith(ELSEWHERE_SECTIONS)
        and not path.endswith("rename_streams")
        and name != "env_reward_weights"
        and not (name in NOT_OFFLINE and algorithm in OFFLINE)
    }


def view(*algorithms: str, shared: bool = False) -> Callable[[type[View]], type[View]]:
    """Add the settings of these algorithms to a class; with `shared`, of their own only those that several have."""

    def decorate(cls: type[View]) -> type[View]:
        hints: dict[str, Any] = {}
        for algorithm in algorithms:
            algorithm_class = ALGORITHM_SETTINGS[algorithm]
            concrete: dict[type, type] = {AlgorithmSettings: algorithm_class}
            classes = dict(sections_of(run_class(algorithm_class), concrete))
            for name, path in flat_paths(cls.__name__, algorithm).items():
                section, _, field = path.rpartition(".")
                owner = classes[section]
                if shared and section == "algorithm.cfg" and not _is_shared(field, algorithms):
                    continue
                hint = get_type_hints(owner, include_extras=True)[field]
                if name not in hints and not hasattr(cls, name):
                    default = default_of(owner, field)
                    setattr(cls, name, Field(default_factory=dict) if isinstance(default, dict) else default)
                hints[name] = _merged(hints.get(name, hint), hint)
        cls.__annotations__ = {**hints, **cls.__annotations__}
        made: Any = settings(cls)
        construct, assign = made.__init__, made.__setattr__

        @functools.wraps(construct)
        def __init__(self: Any, *args: Any, **values: Any) -> None:
            construct(self, *args, **values)
            given = {*setting_names(made)[: len(args)], *values}
            object.__setattr__(self, "_given", frozenset(CLASS_ALIASES[cls.__name__].get(name, name) for name in given))

        def __setattr__(self: Any, name: str, value: Any) -> None:
            given = self._given
            assign(self, name, value)  # pydantic replaces the attributes by those that it checked
            object.__setattr__(self, "_given", given)

        made.__init__, made.__setattr__ = __init__, __setattr__
        return made

    return decorate


def _is_shared(name: str, algorithms: tuple[str, ...]) -> bool:
    return sum(name in setting_names(ALGORITHM_SETTINGS[algorithm]) for algorithm in algorithms) == len(algorithms)


def _merged(one: Any, other: Any) -> Any:
    """Return the type for values of both: of two choices all of them, else the first type."""
    if get_origin(one) is Literal and get_origin(other) is Literal:
        return Literal[tuple(dict.fromkeys([*get_args(one), *get_args(other)]))]
    return one


def _mapping(config: Any, algorithm: str, advice: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of a view as those of a run; an algorithm's own default holds where nothing was given."""
    mapping: dict[str, Any] = {"algorithm": {"name": algorithm}}
    if algorithm not in ALGORITHM_SETTINGS:
        return mapping  # `resolve` raises the error
    paths = flat_paths(type(config), algorithm)
    for name in setting_names(type(config)):
        value, default = getattr(config, name), default_of(type(config), name)
        is_given = value != default or name in config._given
        if name in ("algorithm", "curriculum"):
            continue
        if name in paths:
            if is_given or not (paths[name].startswith("algorithm.cfg.") or value is None):
                set_path(mapping, paths[name], value)
        elif value != default:
            hint = advice.get(name, "leave it out")
            raise InputError(f"{name}: {shown(value)} is given, but {algorithm} has no such setting; {hint}")
    return mapping


@view("ppo", "sac", "grpo", "td3", "cal-ql", "fql-online")
class RLConfig:
    """Online reinforcement learning: the algorithm, its settings, and the run's."""

    algorithm: Literal["ppo", "sac", "grpo", "td3", "cal-ql", "fql-online"] = "ppo"
    output_dir = "./output/online_rl"
    curriculum: CurriculumConfig | None = None

    if TYPE_CHECKING:

        def __init__(self, **settings: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

    def to_run_config(self, env: str | None = None) -> RunConfig:
        """Return the same settings as a `RunConfig`, for the environment with this id (by default the default one)."""
        mapping = _mapping(self, self.algorithm, {"buffer_size": "a rollout's length is rollout_steps"})
        if self.curriculum is not None:
            set_path(mapping, "env.curriculum", to_dict(self.curriculum))
        if env is not None:
            set_path(mapping, "env.id", env)
        return resolve(mapping)


@view("iql", "cql", "td3-bc", shared=True)
class OfflineRLConfig:
    """Reinforcement learning from a dataset: what all its algorithms share, and the run's settings."""

    output_dir = "./output/offline_rl"

    if TYPE_CHECKING:

        def __init__(self, **settings: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

    def to_run_config(self, algorithm: str, **own: Any) -> OfflineRunConfig:
        """Return the same settings for one algorithm, with those of its own."""
        mapping = _mapping(self, algorithm, {})
        flags = [flag for group in run_flags(algorithm) for flag in group.flags]
        paths = {name: flag.path for flag in flags for name in (flag.name, *flag.aliases)}
        for name, value in own.items():
            path = paths.get(name, "")
            if not path.startswith("algorithm.cfg."):
                if name in setting_names(OfflineRLConfig):
                    raise InputError(f"{name}: is a setting of OfflineRLConfig; give it there")
                names = [known for known, place in paths.items() if place.startswith("algorithm.cfg.")]
                raise InputError(f"{name}: {algorithm} has no such setting; {suggestion(name, names)}")
            set_path(mapping, path, value)
        return resolve(mapping)
