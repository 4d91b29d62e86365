"""Action chunks: one action of the policy is several environment steps, so that a slow policy is called less often.

`deft.envs.make` wraps an environment in it if a policy's `chunk_length` is above 1.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import OrderEnforcing, TimeLimit

from deft.envs.checks import check_whole
from deft.envs.reward_weights import RewardWeights
from deft.envs.wrappers import layers
from deft.errors import InputError

PASSES_OBSERVATIONS = (TimeLimit, OrderEnforcing, RewardWeights)
"""Wrappers that do not change observations."""


class ActionChunk(gymnasium.Wrapper):
    """Takes actions [K, A] (or [K] for Discrete) and executes up to K steps, fewer if the episode ends.

    The reward is Σ_i γ^i r_i over the executed steps, so that a discount of γ^num_steps from one action to the next
    gives the same return as single steps. info holds `num_steps`, `raw_reward` = Σ_i r_i, and the sums of
    `reward_terms`.

    Observations within a chunk are not used. An environment with an attribute `observes` and a method `observe()`
    observes only at the end of the chunk: cameras take most of the time of a step.
    """

    def __init__(self, env: gymnasium.Env, chunk_length: int, gamma: float) -> None:
        super().__init__(env)
        check_whole("chunk_length", chunk_length, 1)
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
        if self._is_lazy:
            self._core.observes = False
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
            if self._is_lazy:
                self._core.observes = True
        if self._is_lazy:
            observation = self._core.observe()
        info = {**info, "num_steps": num_steps, "raw_reward": raw}
        if terms:
            info["reward_terms"] = terms
        return observation, total, terminated, truncated, info

    @property
    def _core(self) -> Any:
        return self.env.unwrapped


def _observes_on_demand(env: gymnasium.Env) -> bool:
    """Return whether the environment can skip observations, and no wrapper reads or changes them."""
    *wrappers, core = layers(env)
    has_switch = hasattr(core, "observes") and callable(getattr(core, "observe", None))
    return has_switch and all(isinstance(wrapper, PASSES_OBSERVATIONS) for wrapper in wrappers)
