"""From a config to environments: any Gymnasium id, one of Deft's short names, or a user's own environment object.

The trainers and `deft evaluate` call `make_vector_env`, `make_env` and `wrap`. A wrong id, wrong arguments or a missing
package raise InputError in one line.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator

from deft import trust
from deft.config.settings import TIME_LIMIT, EnvConfig
from deft.envs.build import EnvRecipe, build_env, chunked, registered_versions, type_error_text, without_version
from deft.envs.checks import import_optional
from deft.envs.host import on_host
from deft.envs.serial import SerialVectorEnv
from deft.envs.suites import Suite, suite_of
from deft.envs.vector import VectorEnv
from deft.envs.wrappers import DIFFICULTY, forward_difficulty, weigh
from deft.errors import InputError, user_code

if TYPE_CHECKING:
    from deft.envs.process import Interpreter

SHORT_NAMES = {
    "reach": "deft/Reach-v0",
    "tabletop": "deft/Tabletop-v0",
    "driving": "deft/Driving-v0",
    "carla": "deft/Carla-v0",
    "f1-teacher": "deft/F1Teacher-v0",
    "f1-student": "deft/F1Student-v0",
    "maniskill": "deft/ManiSkill-v0",
    "robotwin": "deft/RoboTwin-v0",
}

# Classes that step all environments of one kind at once.
NATIVE_VECTORS = {
    "deft/Driving-v0": "deft.envs.driving.env:DrivingVectorEnv",
    "deft/Carla-v0": "deft.envs.adapters.carla:CarlaVectorEnv",
}

# Environments that MuJoCo Warp simulates, and the classes that step many of them at once.
WARP_VECTORS = {
    "deft/Tabletop-v0": "deft.envs.tabletop.warp.env:WarpTabletopEnv",
    "deft/F1Teacher-v0": "deft.envs.tabletop.warp.f1:WarpTeacherEnv",
    "deft/F1Student-v0": "deft.envs.tabletop.warp.f1:WarpStudentEnv",
}

# Arguments that `deft collect --task` adds to the task: the observation and the control mode for a VLA model.
TASK_KWARGS: dict[str, dict[str, Any]] = {
    "deft/Tabletop-v0": {"observation": "images", "control_mode": "delta_ee_pos"},
}

# Packages of a namespace: their ids need `module:` in front.
_NAMESPACES = {"ALE": ("ale_py", "gymnasium[atari]")}
# Packages that register environments when they are imported, by the names of these without version: their ids work
# without `module:`.
_HIGHWAY_NAMES = (
    "exit highway highway-fast intersection intersection-multi-agent lane-keeping merge parking parking-ActionRepeat "
    "parking-parked racetrack racetrack-large racetrack-oval roundabout roundabout-generic two-way u-turn"
)
_ADROIT_NAMES = "AdroitHandDoor AdroitHandHammer AdroitHandPen AdroitHandRelocate"
_PACKAGES = dict.fromkeys(_HIGHWAY_NAMES.split(), ("highway_env", "deft[highway]")) | dict.fromkeys(
    _ADROIT_NAMES.split(), ("gymnasium_robotics", "gymnasium-robotics")
)


def make_env(
    config: EnvConfig, *, render_mode: str | None = None, chunk_length: int = 1, gamma: float = 1.0
) -> gymnasium.Env:
    """Make one environment; with `chunk_length` above 1 its action is a chunk of steps."""
    suite = _suite_of(config)
    if suite is not None:
        from deft.envs.suites.remote import RemoteEnv

        env = RemoteEnv(suite, _suite_recipe(suite, config), render_mode, config.timeout)
        return chunked(env, chunk_length, gamma)
    return forward_difficulty(build_env(_recipe(config), render_mode, chunk_length, gamma))


def check_id(config: EnvConfig) -> None:
    """Raise InputError for an unknown id, without making an environment; envpool and GPU simulations have other ids."""
    suite = _suite_of(config)
    if suite is not None:
        suite.find(config.id)
    elif config.vector not in ("envpool", "gpu"):
        _find_spec(config)


def full_id(env_id: str) -> str:
    """Return the id of a short name of Deft; any other id is unchanged."""
    return SHORT_NAMES.get(env_id, env_id)


def kind_of(env_id: str) -> str:
    """Return what is equal for environments with the same arguments: the suite, or the id."""
    suite = suite_of(env_id)
    return full_id(env_id) if suite is None else suite.name


def make_vector_env(
    config: EnvConfig,
    *,
    chunk_length: int = 1,
    gamma: float = 1.0,
    num_envs: int | None = None,
    device: str = "auto",
    tensors: bool = False,
    renders: bool = False,
) -> VectorEnv:
    """Make the environments of a config, independent of each other: environment i is seeded with `seed + i`.

    With `renders` their method `render` returns images, where they can. `device` is that of a simulation on the GPU
    (`vector: warp`). Observations and steps are numpy arrays; with `tensors` those of such a simulation stay on the
    device, as torch tensors.
    """
    count = config.num_envs if num_envs is None else num_envs
    mode = "rgb_array" if renders else None
    suite = _suite_of(config)
    if suite is not None:
        if config.vector not in ("sync", "process"):
            raise InputError(f"env.vector: {config.vector} does not run {config.id}; use process")
        recipe = _suite_recipe(suite, config, count)
        return _in_processes(partial(build_env, recipe, mode, chunk_length, gamma), config, count, suite.interpreter())
    if config.vector == "warp":
        tensor_env = make_tensor_env(config, chunk_length=chunk_length, gamma=gamma, num_envs=count, device=device)
        return tensor_env if tensors else on_host(tensor_env)
    if config.vector in ("envpool", "gpu"):
        if config.rename_streams:
            raise InputError(f"rename_streams: not with env.vector {config.vector}; use sync or process")
        if chunk_length > 1:
            raise InputError(f"env.vector: {config.vector} cannot run action chunks; use sync or process")
    if config.vector == "envpool":
        from deft.envs.adapters.envpool import EnvPoolVectorEnv

        pool = EnvPoolVectorEnv(
            full_id(config.id),
            count,
            num_threads=config.num_workers,
            max_episode_steps=config.time_limit,
            kwargs=config.arguments,
        )
        return weigh(pool, config.reward_weights)
    if config.vector == "gpu":
        if full_id(config.id) != SHORT_NAMES["maniskill"]:
            raise InputError(f"env.vector: gpu is for env.id maniskill; {config.id} runs with sync or process")
        from deft.envs.adapters.maniskill import ManiSkillVectorEnv

        return _make_native(ManiSkillVectorEnv, config.id, config, count)
    spec = _find_spec(config)
    if config.vector == "sync" and chunk_length == 1 and not config.rename_streams and not renders:
        native = _native_vector_class(spec)
        if native is not None:
            defaults = {"max_episode_steps": spec.max_episode_steps, **spec.kwargs}
            return _make_native(native, spec.id, config, count, defaults)
    function = partial(build_env, _recipe(config, spec), mode, chunk_length, gamma)
    return _in_processes(function, config, count) if config.vector == "process" else SerialVectorEnv([function] * count)


def _in_processes(
    function: Callable[[], gymnasium.Env], config: EnvConfig, count: int, interpreter: Interpreter | None = None
) -> VectorEnv:
    from deft.envs.process import ProcessVectorEnv

    return ProcessVectorEnv(
        [function] * count,
        num_workers=config.num_workers,
        timeout=config.timeout,
        restart_workers=config.restart_workers,
        interpreter=interpreter,
    )


def _recipe(config: EnvConfig, spec: EnvSpec | None = None) -> EnvRecipe:
    """Return what one environment of a config is made from."""
    return EnvRecipe(
        spec or _find_spec(config),
        config.arguments,
        config.time_limit,
        dict(config.rename_streams),
        dict(config.reward_weights),
    )


def _suite_of(config: EnvConfig) -> Suite | None:
    """Return the suite of a config's environment; None for any other environment."""
    suite = suite_of(config.id)
    if suite is None and config.suite_path is not None:
        raise InputError(f"suite_path {config.suite_path}: {config.id} is of no suite; leave it out")
    return suite


def _suite_recipe(suite: Suite, config: EnvConfig, num_envs: int = 1) -> EnvRecipe:
    """Return what one of `num_envs` environments of a suite is made from."""
    suite.check_installed(config.id)
    return _recipe(config, suite.spec(config.id, num_envs, config.suite_path))


def make_tensor_env(
    config: EnvConfig, *, chunk_length: int = 1, gamma: float = 1.0, num_envs: int | None = None, device: str = "auto"
) -> VectorEnv:
    """Make the environments of a config with `vector: warp`; their observations and steps are tensors on `device`."""
    spec = _find_spec(config)
    if spec.id not in WARP_VECTORS:
        names = ", ".join(name for name, env_id in SHORT_NAMES.items() if env_id in WARP_VECTORS)
        raise InputError(f"env.vector: warp simulates {names}; {config.id} runs with sync or process")
    if config.rename_streams:
        raise InputError("rename_streams: not with env.vector warp; use sync or process")
    for module in ("warp", "mujoco_warp"):
        import_optional(module, "env.vector: warp", 'pip install "deft[warp]"')
    count = config.num_envs if num_envs is None else num_envs
    defaults: dict[str, Any] = {"chunk_length": chunk_length, "gamma": gamma, "device": device, **spec.kwargs}
    if spec.max_episode_steps is not None:
        defaults["max_episode_steps"] = spec.max_episode_steps
    return _make_native(load_env_creator(WARP_VECTORS[spec.id]), config.id, config, count, defaults)


def _native_vector_class(spec: EnvSpec) -> type[VectorEnv] | None:
    """Return the class that steps all environments at once: Deft's own, or a `vector_entry_point` of that type."""
    entry = NATIVE_VECTORS.get(spec.id, spec.vector_entry_point)
    if entry is None or spec.additional_wrappers:
        return None
    optional = contextlib.suppress(ImportError, AttributeError)  # of another library, which may not be needed
    with user_code(f"environment {spec.id} cannot be made:", InputError), optional:
        creator: Any = load_env_creator(entry) if isinstance(entry, str) else entry
        if isinstance(creator, type) and issubclass(creator, VectorEnv):
            return creator
    return None


def _make_native(
    creator: Any, env_id: str, config: EnvConfig, num_envs: int, defaults: dict[str, Any] | None = None
) -> VectorEnv:
    kwargs = {**(defaults or {}), **config.arguments}
    if config.time_limit is not None:
        kwargs[TIME_LIMIT] = config.time_limit
    try:
        return weigh(creator(num_envs, **kwargs), config.reward_weights)
    except TypeError as error:
        raise InputError(f"env.kwargs {config.arguments} do not fit {env_id}: {type_error_text(error)}") from error


def wrap(
    env: gymnasium.Env | Sequence[gymnasium.Env] | gymnasium.vector.VectorEnv | VectorEnv,
    *,
    chunk_length: int = 1,
    gamma: float = 1.0,
) -> VectorEnv:
    """Return a vector environment of a user's environment, list of environments, or vector environment."""
    if isinstance(env, gymnasium.Env):
        env = [env]
    if isinstance(env, (list, tuple)):
        for item in env:
            if not isinstance(item, gymnasium.Env):
                raise InputError(f"env: the list must hold gymnasium.Env, not {type(item).__name__}")
        return SerialVectorEnv([chunked(item, chunk_length, gamma) for item in env])
    if isinstance(env, gymnasium.vector.VectorEnv):
        from deft.envs.adapters.gymnasium_vector import GymnasiumVectorEnv

        env = GymnasiumVectorEnv(env)
    if not isinstance(env, VectorEnv):
        raise InputError(
            f"env: {type(env).__name__} is not an environment; pass a gymnasium.Env, a list of them, a "
            "gymnasium.vector.VectorEnv or a deft.envs.VectorEnv"
        )
    if env.chunk_length != chunk_length:
        raise InputError(
            f"the vector environment has chunk_length {env.chunk_length}, but the policy has {chunk_length}; "
            "wrap its environments in deft.envs.ActionChunk, or pass a list of unwrapped ones"
        )
    return env


def make_another(env: Any, render_mode: str | None = None) -> gymnasium.Env:
    """Return a second environment like a user's, for evaluation: made from its spec, or a deep copy."""
    first = env[0] if isinstance(env, (list, tuple)) and env else env
    spec = getattr(first, "spec", None)
    if isinstance(first, gymnasium.vector.VectorEnv) and spec is not None:
        spec = gymnasium.spec(spec.id)
    options: dict[str, Any] = {} if render_mode is None else {"render_mode": render_mode}
    if spec is not None:
        with contextlib.suppress(ValueError):  # a wrapper that does not record its arguments
            return gymnasium.make(spec, disable_env_checker=True, **options)
    if isinstance(first, gymnasium.Env) and (render_mode is None or first.render_mode == render_mode):
        with contextlib.suppress(Exception):
            return copy.deepcopy(first)
    purpose = "evaluation" if render_mode is None else "a video"
    raise InputError(
        f"{purpose} needs a separate environment, and this one ({type(first).__name__}) can neither be made from a "
        "spec nor copied: pass eval_env, or set eval_freq (and video_freq) to 0"
    )


def _find_spec(config: EnvConfig) -> EnvSpec:
    """Return the registered spec of an id, without the wrapper that checks the order of calls."""
    env_id = full_id(config.id)
    module, colon, name = env_id.rpartition(":")
    if colon:
        with user_code(f"env.id {env_id!r}: module {module!r} cannot be imported:", InputError):
            trust.import_module(module, env_id, "env.id", "--env")
    elif name not in gymnasium.registry and without_version(name) in _PACKAGES:  # the package registers it
        module, extra = _PACKAGES[without_version(name)]
        import_optional(module, f"env.id: {name}", f'pip install "{extra}"')
    trust.check_env_kwargs(name, config.kwargs)
    try:
        spec = copy.deepcopy(gymnasium.spec(name))
    except gymnasium.error.Error:
        raise InputError(f"env.id: there is no environment {name!r}; {_suggestion(name)}") from None
    spec.order_enforce = False
    spec.additional_wrappers = tuple(wrapper for wrapper in spec.additional_wrappers if wrapper != DIFFICULTY)
    if isinstance(spec.entry_point, str) and spec.entry_point.startswith("__main__:"):
        spec.entry_point = getattr(importlib.import_module("__main__"), spec.entry_point.partition(":")[2])
    return spec


def _suggestion(env_id: str) -> str:
    versions = registered_versions(env_id)
    if versions:
        return f"use {versions[-1]}"
    namespace = env_id.partition("/")[0]
    if namespace in _NAMESPACES:
        module, extra = _NAMESPACES[namespace]
        return f'use {module}:{env_id} after pip install "{extra}"'
    known = {env_id.lower(): env_id for env_id in [*gymnasium.registry, *SHORT_NAMES]}
    nearest = difflib.get_close_matches(env_id.lower(), known, n=3, cutoff=0.5)
    if nearest:
        return f"the nearest are {', '.join(known[match] for match in nearest)}"
    return "write module:id for an environment that a package registers, such as my_package:MyEnv-v0"
