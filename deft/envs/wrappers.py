"""Questions about a Gymnasium environment and its wrappers: their order, attributes, reward terms and name."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import gymnasium

from deft.errors import one_line

log = logging.getLogger(__name__)


def layers(env: gymnasium.Env) -> Iterator[gymnasium.Env]:
    """Yield the wrappers of an environment from the outermost inwards, then the environment itself."""
    while isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env
    yield env


def wrapper_attribute(env: gymnasium.Env, name: str, default: Any = None) -> Any:
    """Return an attribute of the environment or of any of its wrappers."""
    return env.get_wrapper_attr(name) if env.has_wrapper_attr(name) else default


def reward_term_names(declared: Any) -> tuple[str, ...]:
    """Return an attribute `reward_terms` as names; () if it is something else of that name."""
    is_declaration = isinstance(declared, list | tuple) and all(isinstance(name, str) for name in declared)
    return tuple(declared) if is_declaration else ()


def env_reward_terms(env: gymnasium.Env) -> tuple[str, ...]:
    """Return the names of the reward terms that an environment declares."""
    return reward_term_names(wrapper_attribute(env, "reward_terms", ()))


def describe_env(env: gymnasium.Env, index: int) -> str:
    """Name an environment in error messages."""
    return f"environment {index} ({env.spec.id if env.spec is not None else type(env.unwrapped).__name__})"


def close_env(env: Any, name: str | None = None) -> None:
    """Close an environment. An exception in close() becomes a warning, so that no results are lost."""
    try:
        env.close()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        name = name or describe_env(env, 0)
        log.warning("%s, close() raised %s; the results so far are kept", name, one_line(error))
