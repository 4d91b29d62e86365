"""One environment of a suite, as a Gymnasium environment in this process.

`deft.envs.make.make_env` returns it: for videos, for `deft play`, and for code that asks an environment about itself.
Training and evaluation use `ProcessVectorEnv` directly.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import gymnasium
from gymnasium import spaces

from deft.envs.build import EnvRecipe, build_env
from deft.envs.process import ProcessVectorEnv
from deft.envs.suites import Suite


class Served(gymnasium.Wrapper):
    """Methods that a `RemoteEnv` calls in the worker process."""

    def describe(self) -> dict[str, Any]:
        """Return what does not change."""
        return {name: getattr(self.env, name) for name in ("observation_space", "action_space", "metadata")}

    def reset_remotely(self, seed: int | None, options: dict[str, Any] | None) -> Any:
        """Reset; keyword arguments cannot be sent."""
        return self.env.reset(seed=seed, options=options)

    def step_remotely(self, action: Any) -> Any:
        """Step."""
        return self.env.step(action)

    def kind_of(self, name: str) -> str:
        """Return whether an attribute is a method, a value, or missing."""
        if not self.env.has_wrapper_attr(name):
            return "missing"
        return "method" if callable(self.env.get_wrapper_attr(name)) else "value"

    def value_of(self, name: str) -> Any:
        """Return the value of an attribute."""
        return self.env.get_wrapper_attr(name)


def _serve(recipe: EnvRecipe, render_mode: str | None) -> gymnasium.Env:
    return Served(build_env(recipe, render_mode))


class RemoteEnv(gymnasium.Env):
    """An environment in a worker process of a suite's interpreter; it also has the methods of that environment."""

    def __init__(self, suite: Suite, recipe: EnvRecipe, render_mode: str | None = None, timeout: float = 60.0) -> None:
        # Datasets record it: the id defines the task, and other machines have other folders.
        self.spec = dataclasses.replace(recipe.spec, kwargs=dict(recipe.kwargs))
        self.render_mode = render_mode
        # A restarted worker would continue in another episode.
        self._worker = ProcessVectorEnv(
            [partial(_serve, recipe, render_mode)],
            timeout=timeout,
            restart_workers=0,
            interpreter=suite.interpreter(),
        )
        self._kinds: dict[str, str] = {}
        found = self._call("describe")
        self.observation_space: spaces.Space = found["observation_space"]
        self.action_space: spaces.Space = found["action_space"]
        self.metadata = found["metadata"]

    def _call(self, name: str, *args: Any) -> Any:
        return self._worker.call(name, *args)[0]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        observation, info = self._call("reset_remotely", seed, options)
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment."""
        observation, reward, terminated, truncated, info = self._call("step_remotely", action)
        return observation, reward, terminated, truncated, info

    def render(self) -> Any:
        """Return an image."""
        return self._call("render")

    def close(self) -> None:
        """End the worker."""
        self._worker.close()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the environment in the worker."""
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._kinds:
            self._kinds[name] = self._call("kind_of", name)
        if self._kinds[name] == "missing":
            raise AttributeError(f"{self.spec} has no attribute {name!r}")
        return partial(self._call, name) if self._kinds[name] == "method" else self._call("value_of", name)
