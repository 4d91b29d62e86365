"""One environment from its Gymnasium spec, with the wrappers that the settings ask for.

`deft.envs.make` calls `build_env` in this process, and sends it to worker processes. Those of a suite run in another
interpreter, so this module needs no other packages than Gymnasium and NumPy.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from deft.envs.wrappers import ActionChunk, rename, weigh
from deft.errors import InputError, user_code

# Packages that environments need, by the name of the missing module.
_EXTRAS = {
    "jax": "gymnasium[jax]",
    "pygame": "gymnasium[classic-control]",
    "Box2D": "gymnasium[box2d]",
    "ale_py": "gymnasium[atari]",
    "cv2": "gymnasium[other]",
}


@dataclass(frozen=True)
class EnvRecipe:
    """What one environment is made from, as plain data."""

    spec: EnvSpec
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the constructor, besides those of the spec."""
    max_episode_steps: int | None = None
    """Time limit that replaces the environment's own."""
    rename_streams: dict[str, str] = field(default_factory=dict)
    reward_weights: dict[str, float] = field(default_factory=dict)


def build_env(
    recipe: EnvRecipe, render_mode: str | None = None, chunk_length: int = 1, gamma: float = 1.0
) -> gymnasium.Env:
    """Make one environment; a wrong argument or a missing package raises InputError in one line."""
    spec, kwargs, limit = recipe.spec, dict(recipe.kwargs), recipe.max_episode_steps
    if render_mode is not None:
        kwargs["render_mode"] = render_mode
    with user_code(f"environment {spec.id} with env.kwargs {kwargs} cannot be made:", InputError):
        try:
            with warnings.catch_warnings():
                if render_mode is not None:  # the error below is clearer
                    warnings.filterwarnings("ignore", ".*render_mode.*")
                env = gymnasium.make(spec, max_episode_steps=limit, disable_env_checker=True, **kwargs)
        except (ImportError, gymnasium.error.DependencyNotInstalled) as error:
            raise InputError(f"environment {spec.id} cannot be used: {_missing_package(error, spec)}") from error
        except TypeError as error:
            message = type_error_text(error).partition(" was raised from the environment creator")[0]
            if render_mode is not None and "'render_mode'" in message:
                raise InputError(
                    f"environment {spec.id} cannot be rendered: its constructor takes no render_mode"
                ) from error
            raise InputError(f"env.kwargs {kwargs} do not fit {spec.id}: {message}") from error
    env = rename(env, recipe.rename_streams)
    return chunked(weigh(env, recipe.reward_weights), chunk_length, gamma)


def chunked(env: gymnasium.Env, chunk_length: int, gamma: float) -> gymnasium.Env:
    """Wrap an environment in `ActionChunk` for chunks of more than one step."""
    return ActionChunk(env, chunk_length, gamma) if chunk_length > 1 else env


def without_version(env_id: str) -> str:
    """Return an id without its version."""
    return re.sub(r"-v\d+$", "", env_id)


def registered_versions(env_id: str) -> list[str]:
    """Return the registered ids that differ from this one only in the version, oldest first."""
    name = without_version(env_id)
    found = [spec for spec in gymnasium.registry.values() if without_version(spec.id) == name]
    return [spec.id for spec in sorted(found, key=lambda spec: spec.version or 0)]


def type_error_text(error: TypeError) -> str:
    """Return Python's message on arguments that a constructor does not take, on one line."""
    return " ".join(str(error).split())


def _missing_package(error: Exception, spec: EnvSpec) -> str:
    """Name the package to install for an environment."""
    if isinstance(error, ModuleNotFoundError) and error.name in _EXTRAS:
        return f'{error.name} is not installed: pip install "{_EXTRAS[error.name]}"'
    latest = registered_versions(spec.id)[-1:]
    newer = f"; use {latest[0]}" if latest and latest[0] != spec.id else ""
    return f"{' '.join(str(error).split())}{newer}"
