"""What a policy reads and returns, as plain data: the schema of `deft serve` and of the folders of `deft export`."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from deft.evaluation.loaded_policy import LoadedPolicy
from deft.models.encoders import is_image

PROTOCOL = 1


def describe(policy: LoadedPolicy) -> dict[str, Any]:
    """Return the streams, shapes and dtypes of observations, the actions with their bounds, and the chunk length."""
    space = policy.observation_space
    if isinstance(space, spaces.Dict):
        streams = {name: _stream(policy, space[name]) for name in policy.streams}
        observation: dict[str, Any] = {"kind": "streams", "streams": streams}
    else:
        observation = _stream(policy, space)
    return {
        "protocol": PROTOCOL,
        "observation": observation,
        "action": _action(policy.action_space),
        "chunk_length": policy.policy.chunk_length,
        "recurrent": policy.policy.recurrent,
        "needs_reward": policy.policy.needs_reward,
        "action_selection": policy.action_selection,
    }


def _stream(policy: LoadedPolicy, space: gymnasium.Space) -> dict[str, Any]:
    shape, dtype = list(space.shape or ()), np.dtype(space.dtype)
    if is_image(space):
        sizes = "any" if policy.scales_images else "fixed"
        return {"kind": "image", "shape": shape, "dtype": str(dtype), "size": sizes}
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        counts = int(space.n) if isinstance(space, spaces.Discrete) else space.nvec.tolist()
        return {"kind": "discrete", "shape": shape, "dtype": str(dtype), "n": counts}
    if dtype == np.uint8 and len(shape) == 1:
        return {"kind": "text", "shape": shape, "dtype": str(dtype), "max_bytes": shape[0]}
    return {"kind": "vector", "shape": shape, "dtype": str(dtype)}


def _action(space: spaces.Space) -> dict[str, Any]:
    shape, dtype = list(space.shape or ()), str(np.dtype(space.dtype))
    if isinstance(space, spaces.Box):
        low, high = (np.where(np.isfinite(bound), bound, np.nan) for bound in (space.low, space.high))
        return {"kind": "box", "shape": shape, "dtype": dtype, "low": _or_none(low), "high": _or_none(high)}
    if isinstance(space, spaces.Discrete):
        return {"kind": "discrete", "shape": shape, "dtype": dtype, "n": int(space.n), "start": int(space.start)}
    counts = space.nvec.tolist() if isinstance(space, spaces.MultiDiscrete) else [2] * int(np.prod(shape))
    return {"kind": "multi-discrete", "shape": shape, "dtype": dtype, "n": counts}


def _or_none(bound: np.ndarray) -> list[Any]:
    """Bounds as nested lists, None where there is none."""
    return np.where(np.isnan(bound), None, bound.astype(object)).tolist()  # type: ignore[call-overload]
