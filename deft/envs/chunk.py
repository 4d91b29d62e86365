"""Action chunks: one action decides several env steps, so that a slow policy is asked less often.

`deft.envs.make` puts this around an environment when a policy's `chunk_length` is above 1.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import OrderEnforcing, TimeLimit

from deft.envs.reward_weights import RewardWeights
from deft.errors import InputError

PASSES_OBSERVATIONS = (TimeLimit, OrderEnforcing, RewardWeights)
"""Wrappers that hand an observation on as it is."""


class ActionChunk(gymnasium.Wrapper):
    """Takes actions [K, A] (or [K] for Discrete) and executes up to K steps, fewer where the episode ends.

    The reward is Σ_i γ^i r_i over the executed steps, so that a discount of γ^num_steps from one action to the next
    gives the same return as single steps would. info holds `num_steps`, `raw_reward` = Σ_i r_i, and the
    sums of `reward_terms`.

    Nobody sees the observations within a chunk. An environment that can leave them out (an attribute `observes` that
    may be False, and a method `observe()`) looks at its world at the chunk's end alone: cameras cost most of a step.
    """

    def __init__(self, env: gymnasium.Env, chunk_length: int, gamma: float) -> None:
        super().__init__(env)
        if chunk_length < 1:
            raise InputError(f"chunk_length {chunk_length}: at least 1 is needed")
        self.chunk_length = chunk_length
        self._gamma = gamma
        space = env.action_space
        if isinstance(space, spaces.Box):
            repeats = (chunk_length, *([1] * len(space.shape)))
            self.action_space = spaces.Box(
                np.tile(space.low, repeats), np.tile(space.high, repeats), dtype=space.dtype.type
            )
        elif isinstance(space, spaces.Discrete):
            self.action_space = spaces.MultiDiscrete(
                np.full(chunk_length, space.n), start=np.full(chunk_length, space.start)
            )
        else:
            raise InputError(f"action chunks need a Box or Discrete action space, not {space}")
        self._is_discrete = isinstance(space, spaces.Discrete)
        self._is_lazy = _observes_on_demand(env)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Execute the chunk until it or the episode ends."""
        total, raw, num_steps = 0.0, 0.0, 0
        terms: dict[str, float] = {}
        self._look(False)
        try:
            for single in action.tolist() if self._is_discrete else action:
                observation, reward, terminated, truncated, info = self.env.step(single)
                total += self._gamma**num_steps * float(reward)
                raw += float(reward)
                num_steps += 1
                for name, value in info.get("reward_terms", {}).items():
                    terms[name] = terms.get(name, 0.0) + float(value)
                if terminated or truncated:
                    break
        finally:
            self._look(True)
        if self._is_lazy:
            observation = self._core.observe()
        info = {**info, "num_steps": num_steps, "raw_reward": raw}
        if terms:
            info["reward_terms"] = terms
        return observation, total, terminated, truncated, info

    def _look(self, observes: bool) -> None:
        if self._is_lazy:
            self._core.observes = observes

    @property
    def _core(self) -> Any:
        return self.env.unwrapped


def _observes_on_demand(env: gymnasium.Env) -> bool:
    """Whether an environment can be told not to observe, and no wrapper around it reads or changes observations."""
    core = env.unwrapped
    if not (hasattr(core, "observes") and callable(getattr(core, "observe", None))):
        return False
    while isinstance(env, gymnasium.Wrapper):
        if not isinstance(env, PASSES_OBSERVATIONS):
            return False
        env = env.env
    return True
