"""A reward that is the weighted sum of its named terms (`env.reward_weights`), for any environment that reports them.

`deft.envs.make` and the trainers call `weigh`. The terms themselves are unchanged, in the steps and in the sums of the
episodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from deft.envs.layout import Observation
from deft.envs.vector import VectorEnv, VectorStep
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


class WeightedVectorEnv(VectorEnv):
    """The same for a vector environment that declares its terms."""

    def __init__(self, env: VectorEnv, weights: Mapping[str, float]) -> None:
        if not env.reward_terms:
            raise InputError(f"env.reward_weights: {type(env).__name__} declares no reward terms: remove the weights")
        if env.chunk_length > 1:
            raise InputError("env.reward_weights: put deft.envs.reward_weights.RewardWeights inside the action chunks")
        _check_names(weights, env.reward_terms)
        names = ("observation_space", "action_space", "env_action_space", "action_mask", "chunk_length", "reward_terms")
        super().__init__(env.num_envs, **{name: getattr(env, name) for name in names})
        self.env = env
        self.num_workers = env.num_workers
        self.notices_hangs = env.notices_hangs
        self._weights = np.array([weights.get(name, 1.0) for name in env.reward_terms])

    def step(self, actions: np.ndarray) -> VectorStep:
        """Step every environment with its row of `actions`."""
        step = self.env.step(actions)
        assert step.reward_terms is not None
        step.reward = (step.reward_terms @ self._weights).astype(np.float32)
        for episode in step.episodes:  # Σ_t Σ_k w_k r_tk = Σ_k w_k Σ_t r_tk
            sums = (episode.terms.get(name, 0.0) for name in self.reward_terms)
            episode.episode_return = float(sum(w * s for w, s in zip(self._weights, sums, strict=True)))
        return step

    @property
    def observation(self) -> Observation:
        """The latest observation."""
        return self.env.observation

    def reset(self, seed: int | Sequence[int] | None = None) -> Observation:
        """Start an episode in every environment."""
        return self.env.reset(seed)

    def get_state(self) -> list[dict[str, Any]] | None:
        """Return the states of the environments."""
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
        """Return an image of one environment."""
        return self.env.render(index)

    def close(self) -> None:
        """Close the environments."""
        self.env.close()


def weigh(env: Any, weights: Mapping[str, float]) -> Any:
    """Weight the reward of an environment, or of each in a list; return it unchanged without weights."""
    if not weights:
        return env
    if isinstance(env, gymnasium.Env):
        return RewardWeights(env, weights)
    if isinstance(env, list | tuple):
        return [weigh(item, weights) for item in env]
    if isinstance(env, gymnasium.vector.VectorEnv):
        from deft.envs.adapters.gymnasium_vector import GymnasiumVectorEnv

        env = GymnasiumVectorEnv(env)
    return WeightedVectorEnv(env, weights) if isinstance(env, VectorEnv) else env


def _check_names(weights: Mapping[str, float], known: Sequence[str] | Mapping[str, Any]) -> None:
    unknown = [name for name in weights if name not in known]
    if unknown:
        raise InputError(
            f"env.reward_weights: there is no reward term {', '.join(map(repr, unknown))}; the terms are "
            f"{', '.join(known)}"
        )
