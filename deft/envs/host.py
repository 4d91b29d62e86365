"""Numpy arrays from a vector environment whose results are torch tensors, for code that runs on the CPU.

`on_host` wraps such environments in it, for evaluations and for collections that do not keep tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from deft.envs.layout import Observation
from deft.envs.vector import VectorEnv, VectorStep


class HostVectorEnv(VectorEnv):
    """Copies each observation and step to the host."""

    def __init__(self, env: VectorEnv) -> None:
        super().__init__(env.num_envs, **env.description)
        self.env = env

    @property
    def observation(self) -> Observation:
        """The latest observation."""
        return _numpy(self.env.observation)

    def reset(self, seed: int | Sequence[int] | None = None) -> Observation:
        """Start an episode in every environment; environment i gets `seed + i`, or the i-th of several seeds."""
        return _numpy(self.env.reset(seed))

    def step(self, actions: np.ndarray) -> VectorStep:
        """Step every environment with its row of `actions`."""
        step = self.env.step(actions)
        arrays = {field.name: _numpy(getattr(step, field.name)) for field in dataclasses.fields(step)}
        return VectorStep(**arrays)

    def get_state(self) -> list[dict[str, Any]] | None:
        """Return plain data for `set_state`; None if `state_obstacle` gives a reason."""
        return self.env.get_state()

    def set_state(self, states: list[dict[str, Any]]) -> None:
        """Continue from saved states."""
        self.env.set_state(states)

    def state_obstacle(self) -> str | None:
        """Explain in one line why the state cannot be saved; None if it can."""
        return self.env.state_obstacle()

    def call(self, name: str, *args: Any) -> list[Any]:
        """Call a method of every environment."""
        return self.env.call(name, *args)

    def render(self, index: int = 0) -> np.ndarray | None:
        """Return an image of one environment; None if it has no render mode."""
        return self.env.render(index)

    def close(self) -> None:
        """Release all resources."""
        self.env.close()


def on_host(env: VectorEnv) -> VectorEnv:
    """Return the vector environment, wrapped if its results are tensors."""
    return env if env.device is None else HostVectorEnv(env)


def _numpy(value: Any) -> Any:
    """Copy a tensor, or the tensors of a dict, to the host; return anything else as it is."""
    if isinstance(value, dict):
        return {name: _numpy(item) for name, item in value.items()}
    if not hasattr(value, "detach"):
        return value
    array = value.detach().cpu().numpy()
    return array.copy() if value.device.type == "cpu" else array
