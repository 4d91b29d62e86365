"""How a trained policy acts step by step: memory carried along, chunks of actions played to their end.

`deft collect`, evaluations and `deft.load_policy` act with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from deft import schema
from deft.data.spaces import action_stream
from deft.data.tensors import check_log_prob, policy_inputs, zero_rows
from deft.envs.layout import Observation, take_rows
from deft.envs.vector import VectorEnv
from deft.errors import InputError
from deft.models.policy import Policy

RANDOM, EXPERT = "random", "expert"  # policies that are not checkpoints
EXPERT_METHOD = "expert_action"


class Actor(Protocol):
    """Decides one step of every environment."""

    action_selection: str
    """How actions are selected before any noise: `Policy.action_selection`, or the script's name."""

    def act(self, observation: Observation, reward: np.ndarray | None = None) -> np.ndarray:
        """Return actions [N, …], as `VectorEnv.step` takes them; `reward` [N] is that of the last ones."""

    def ended(self, done_index: np.ndarray) -> None:
        """Start a new episode in these environments."""


class ScriptedActor:
    """Actions of a function: they depend on nothing but the environments' present state."""

    def __init__(self, function: Callable[[], np.ndarray], action_selection: str) -> None:
        self._function, self.action_selection = function, action_selection

    def act(self, observation: Observation, reward: np.ndarray | None = None) -> np.ndarray:
        """Return the function's actions."""
        return self._function()

    def ended(self, done_index: np.ndarray) -> None:
        """Do nothing: there is no memory."""


class PolicyActor:
    """A policy for `num_envs` environments.

    A chunk of K actions is played step by step to its end, or the episode's. In environments that play whole chunks
    themselves, `chunk_length` is 1.
    """

    def __init__(
        self,
        policy: Policy,
        num_envs: int,
        action_mask: np.ndarray | None,
        deterministic: bool,
        chunk_length: int | None = None,
    ) -> None:
        self._policy, self._deterministic = policy, deterministic
        self._chunk_length = chunk_length or policy.chunk_length
        self.action_selection = policy.action_selection(deterministic)
        self._device = next(iter(policy.parameters())).device
        self._memory = policy.initial_memory(num_envs)
        self._mask = None
        if action_mask is not None:
            self._mask = torch.as_tensor(action_mask, device=self._device).expand(num_envs, -1)
        self._chunks: np.ndarray | None = None  # [N, K, …]
        self._played = np.full(num_envs, self._chunk_length)  # [N]: how much of its chunk each has played

    @torch.inference_mode()
    def act(self, observation: Observation, reward: np.ndarray | None = None) -> np.ndarray:
        """Return actions [N, …]; policies with `needs_reward` use the reward of the last ones."""
        is_due = self._played >= self._chunk_length
        if is_due.any():
            self._decide(observation, is_due, reward)
        assert self._chunks is not None
        actions = self._chunks[np.arange(len(is_due)), self._played]
        self._played += 1
        return actions

    def ended(self, done_index: np.ndarray) -> None:
        """Start a new episode in these environments."""
        self._played[done_index] = self._chunk_length
        if self._memory is not None:
            self._memory = zero_rows(self._memory, done_index)

    def _decide(self, observation: Observation, is_due: np.ndarray, reward: np.ndarray | None) -> None:
        """New chunks for the environments that are due, from their rows of the observation alone."""
        due = np.flatnonzero(is_due)
        rows = torch.as_tensor(due, device=self._device)
        memory = None if self._memory is None else self._memory[rows]
        mask = None if self._mask is None else self._mask[rows]
        rewards = reward[due] if reward is not None and self._policy.needs_reward else None
        inputs = policy_inputs(take_rows(observation, due), self._device, memory, mask, rewards)
        td = self._policy.act(inputs, self._deterministic)
        check_log_prob(td.get(schema.LOG_PROB, None))
        chunks = td[schema.ACTION].numpy(force=True)
        if self._chunk_length == 1:
            chunks = chunks[:, None]
        if self._chunks is None:
            self._chunks = np.zeros((len(is_due), *chunks.shape[1:]), chunks.dtype)
        self._chunks[due] = chunks
        self._played[due] = 0
        if self._memory is not None:
            self._memory = self._memory.clone()
            self._memory[rows] = td[schema.NEXT_MEMORY]


def expert_actions(env: VectorEnv, action_space: spaces.Space) -> Callable[[], np.ndarray]:
    """Return a function that returns the actions [N, …] of the environments' scripted expert.

    `action_space` is that of a single environment, in which its expert acts.
    """
    stream = action_stream(action_space)
    return lambda: stream.to_rows(np.stack(env.call(EXPERT_METHOD)))


def check_expert(env: gymnasium.Env, name: str) -> None:
    """Raise an error if the environment has no scripted expert."""
    if not env.has_wrapper_attr(EXPERT_METHOD):
        raise InputError(
            f"--policy expert: {name} offers no scripted expert (a method {EXPERT_METHOD}() of the environment); use a "
            "trained policy or random actions"
        )
