"""A reward that is the weighted sum of its named terms (`env.reward_weights`), for any environment that reports them.

`deft.envs.make` and the trainers call `weigh`. The terms themselves are unchanged, in the steps and in the sums of the
episodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from deft.envs.vector import ArrayVectorEnv
from deft.envs.wrappers import describe_env, env_reward_terms
from deft.errors import InputError, RunError


class RewardWeights(gymnasium.Wrapper, gymnasium.utils.RecordConstructorArgs):
    """reward = Σ weight · term over `info["reward_terms"]`; the default weight is 1."""

    def __init__(self, env: gymnasium.Env, weights: Mapping[str, float]) -> None:
        gymnasium.utils.RecordConstructorArgs.__init__(self, weights=dict(weights))
        gymnasium.Wrapper.__init__(self, env)
        declared = env_reward_terms(env)
        self._is_checked = bool(declared)
        if declared:
            _check_names(weights, declared)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step, and weight the terms of the reward."""
        observation, _, terminated, truncated, info = self.env.step(action)
        weights = self._saved_kwargs["weights"]  # not part of the saved state: a resumed run may use other weights
        if "reward_terms" not in info:
            raise (RunError if self._is_checked else InputError)(
                f"env.reward_weights: {describe_env(self.env, 0)} reports no reward terms in the info of a step "
                '("reward_terms"): remove the weights'
            )
        terms = info["reward_terms"]
        if not self._is_checked:
            _check_names(weights, terms)
            self._is_checked = True
        reward = sum(weights.get(name, 1.0) * float(value) for name, value in terms.items())
        return observation, reward, terminated, truncated, info


def weigh(env: Any, weights: Mapping[str, float]) -> Any:
    """Weight the reward of an environment, of each in a list, or of a vector environment."""
    if isinstance(env, list | tuple):
        return [weigh(item, weights) for item in env]
    if weights and isinstance(env, gymnasium.Env):
        return RewardWeights(env, weights)
    if weights and isinstance(env, gymnasium.vector.VectorEnv):
        from deft.envs.adapters.gymnasium_vector import GymnasiumVectorEnv

        env = GymnasiumVectorEnv(env)
    if isinstance(env, ArrayVectorEnv):
        env.reward_weights = _weight_columns(env, weights) if weights else None
    return env


def _weight_columns(env: ArrayVectorEnv, weights: Mapping[str, float]) -> np.ndarray:
    """Return the weights [K] in the order of the vector environment's reward terms."""
    if not env.reward_terms:
        raise InputError(f"env.reward_weights: {type(env).__name__} declares no reward terms: remove the weights")
    if env.chunk_length > 1:
        raise InputError("env.reward_weights: put deft.envs.reward_weights.RewardWeights inside the action chunks")
    _check_names(weights, env.reward_terms)
    return np.array([weights.get(name, 1.0) for name in env.reward_terms])


def _check_names(weights: Mapping[str, float], known: Sequence[str] | Mapping[str, Any]) -> None:
    unknown = [name for name in weights if name not in known]
    if unknown:
        raise InputError(
            f"env.reward_weights: there is no reward term {', '.join(map(repr, unknown))}; the terms are "
            f"{', '.join(known)}"
        )
