"""Steps a vector environment with a policy and writes transitions into a buffer; owns the environment's side of a run.

The synchronous trainer calls `collect`; the background collector of VLA mode calls `step` from its thread. Both run the
same code.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from deft import schema
from deft.data.rollout import RolloutBuffer
from deft.data.tensors import Key, Row, check_log_prob, policy_inputs, to_numpy, zero_rows
from deft.envs.layout import Observation, first_not_finite, take_rows
from deft.envs.vector import Episode, VectorEnv, VectorStep
from deft.errors import InputError, RunError
from deft.models.policy import Policy


class StepBuffer(Protocol):
    """What a collector writes to."""

    def write(self, row: Row) -> None:
        """Take one step of all environments."""


class Collector:
    """One environment step after another: act, step, record.

    Where a segment of a rollout ends without its next row (truncation, the rollout's last step) the transition carries
    V(true final observation). With `next_observation=True` it carries the next observation instead, for algorithms
    that learn from single transitions. With `reward_terms=True` it carries the reward's named terms, where the
    environment has any.
    """

    def __init__(
        self,
        env: VectorEnv,
        policy: Policy,
        seed: int = 0,
        next_observation: bool = False,
        reward_terms: bool = False,
    ) -> None:
        self.env = env
        self.policy = policy
        self.seed = seed
        self.version = 0
        self.episodes: deque[Episode] = deque()
        """Finished since the trainer last took them."""
        self.num_lost_episodes = 0
        """Lost with a worker process that failed; no part of `episodes`."""
        self.stepping_since: float | None = None
        """When the environment step under way began; a watchdog in another thread reads it."""
        self.step_counts: deque[int] = deque()
        """Env steps of each vector step that was written and not yet taken by `take_step_count`."""
        self.steps_left: int | None = None
        """Env steps to the run's end, where it is known; workers may have more than that ready."""
        self.explore: Callable[[], np.ndarray | None] | None = None
        """Asked before the policy: actions [N, …] to take instead of its own, or None."""
        self.before_stepping: Callable[[], None] | None = None
        """Called when the actions are known: a GPU can be given work here that it does while environments step."""
        self.device = next(iter(policy.parameters())).device
        self._next_observation = next_observation
        self._reward_terms = reward_terms and len(env.reward_terms) > 0
        self._versions = np.zeros(env.num_envs, np.int64)
        self._no_values = np.zeros(env.num_envs, np.float32)
        self._mask: Tensor | None = None
        if env.action_mask is not None:
            self._mask = torch.as_tensor(env.action_mask, device=self.device).expand(env.num_envs, -1)
        self._observation: Observation | None = None
        self._memory: Tensor | None = None

    @torch.inference_mode()
    def collect(self, buffer: StepBuffer, num_vector_steps: int, stop: Callable[[], bool] = lambda: False) -> int:
        """Write `num_vector_steps` steps of every environment, the last one as a segment's end; how many were made."""
        for done in range(num_vector_steps):
            if stop():
                return done
            self.step(buffer, ends_segment=done == num_vector_steps - 1)
        return num_vector_steps

    def collect_steps(self, num_steps: int) -> TensorDict:
        """A rollout of `num_steps` transitions in total over all environments, [num_steps / N, N]."""
        rows, rest = divmod(num_steps, self.env.num_envs)
        if rest or not rows:
            raise InputError(
                f"collect_steps({num_steps}): steps are counted over all {self.env.num_envs} environments together "
                "and must be a multiple of their number"
            )
        buffer = RolloutBuffer(rows)
        self.collect(buffer, rows)
        return buffer.get()

    def step(self, buffer: StepBuffer, ends_segment: bool) -> None:
        """One step of every environment; the caller is in inference mode."""
        if self._observation is None:
            self._start()
        row, next_memory = self._act()
        step = self._step_env(row)
        if self._next_observation:
            _flat_observation(row, _with_final(step), schema.NEXT_OBSERVATION)
            if len(step.lost_index):  # steps that failed led nowhere
                row[schema.STEP_MASK] = ~np.isin(np.arange(self.env.num_envs), step.lost_index)
        else:
            row[schema.NEXT_VALUE] = self._bootstrap(step, next_memory, ends_segment)
        # Counted before it is written: a trainer in another thread asks for the count of what it finds in the buffer.
        self.episodes.extend(step.episodes)
        self.num_lost_episodes += len(step.lost_index)
        self.step_counts.append(int(step.num_steps.sum()) if self.env.chunk_length > 1 else self.env.num_envs)
        buffer.write(row)
        self._observation = step.observation
        self._memory = None if next_memory is None else zero_rows(next_memory, step.done_index)

    def take_episodes(self) -> list[Episode]:
        """The episodes that finished since the last call."""
        return [self.episodes.popleft() for _ in range(len(self.episodes))]

    def take_step_count(self, num_vector_steps: int) -> int:
        """Env steps, over all environments, of the oldest `num_vector_steps` vector steps not yet counted."""
        return sum(self.step_counts.popleft() for _ in range(num_vector_steps))

    def close(self) -> None:
        """Nothing to stop."""

    def set_version(self, version: int) -> None:
        """Which weights act from here on."""
        self.version = version
        self._versions = np.full_like(self._versions, version)

    def state_dict(self) -> dict[str, Any]:
        """Where every environment stands; `env` is None where an environment's state cannot be saved."""
        started = self._observation is not None
        return {
            "env": self.env.get_state() if started else None,
            "memory": None if self._memory is None else self._memory.clone().cpu(),
            "started": started,
            "step_counts": list(self.step_counts),
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Go on from there; False where the environments' state is unknown and they start new episodes."""
        self.step_counts.clear()
        if state["env"] is None:
            self._observation = None
            return not state["started"]
        self.step_counts.extend(state["step_counts"])
        self.env.set_state(state["env"])
        self._observation = self.env.observation
        self._memory = None if state["memory"] is None else state["memory"].to(self.device)
        return True

    def _start(self) -> None:
        self._observation = self.env.reset(self.seed)
        self._check_finite(self._observation)
        self._memory = self.policy.initial_memory(self.env.num_envs)

    def _act(self) -> tuple[dict[Key, Any], Tensor | None]:
        """The policy's part of a transition as {key: [N, …]}, and the memory after it."""
        assert self._observation is not None
        row: dict[Key, Any] = {}
        _flat_observation(row, self._observation, schema.OBSERVATION)
        if self.explore is not None and (action := self.explore()) is not None:
            row[schema.ACTION] = action
            return row, None
        if self._mask is None and (acted := self.policy.act_arrays(self._observation)) is not None:
            check_log_prob(acted[schema.LOG_PROB])
            row.update(acted)
            return row, None
        td = self.policy.act(policy_inputs(self._observation, self.device, self._memory, self._mask))
        check_log_prob(td.get(schema.LOG_PROB, None))
        for key in set(td.keys()) - {schema.OBSERVATION, schema.NEXT}:
            if key == schema.SAMPLE:
                row |= {(schema.SAMPLE, *_path(name)): part for name, part in td[key].items(True, True)}
            else:
                row[key] = td[key]
        row[schema.ACTION] = to_numpy(td[schema.ACTION])
        return row, td.get(schema.NEXT_MEMORY, None)

    def _step_env(self, row: dict[Key, Any]) -> VectorStep:
        """Take the row's actions; the environment's part of the transition is added to it."""
        if self.before_stepping is not None:
            self.before_stepping()
        self.stepping_since = time.monotonic()
        step = self.env.step(row[schema.ACTION])
        self.stepping_since = None
        self._check_finite(step.observation, step.reward)
        if step.final_observation is not None:
            self._check_finite(step.final_observation)
        self._add_outcome(row, step)
        return step

    def _add_outcome(self, row: dict[Key, Any], step: VectorStep) -> None:
        """The environment's part of a transition."""
        row[schema.POLICY_VERSION] = self._versions
        row[schema.NEXT_REWARD] = step.reward
        row[schema.NEXT_TERMINATED] = step.terminated
        row[schema.NEXT_TRUNCATED] = step.truncated
        if self.env.chunk_length > 1:
            row[schema.NEXT_NUM_STEPS] = step.num_steps
        if self._reward_terms:
            assert step.reward_terms is not None
            self._check_finite({"reward terms": step.reward_terms})
            row[schema.NEXT_REWARD_TERMS] = step.reward_terms

    def _bootstrap(self, step: VectorStep, next_memory: Tensor | None, ends_segment: bool) -> np.ndarray:
        """V(final observation) where an episode was truncated, V(next observation) at a segment's end, 0 elsewhere."""
        if not ends_segment and not len(step.done_index):
            return self._no_values
        wanted = ~step.terminated if ends_segment else step.truncated & ~step.terminated
        if not wanted.any():
            return self._no_values
        index = np.flatnonzero(wanted)
        memory = None if next_memory is None else next_memory[torch.as_tensor(index, device=self.device)]
        values = np.zeros_like(self._no_values)
        values[index] = self._values(index, take_rows(_with_final(step), index), memory)
        return values

    def _values(self, index: np.ndarray, observation: Observation, memory: Tensor | None) -> np.ndarray:
        """V of these environments' observations, by the policy."""
        return to_numpy(self.policy.get_value(policy_inputs(observation, self.device, memory)).float())

    def _check_finite(self, observation: Observation, reward: np.ndarray | None = None) -> None:
        streams = observation if isinstance(observation, dict) else {"observation": observation}
        for name, stream in (*streams.items(), *(() if reward is None else (("reward", reward),))):
            bad = first_not_finite(stream)
            if bad is not None:
                raise RunError(
                    f"environment {bad} gave, as its {name}, a value that is infinite or not a number: a policy cannot "
                    "learn from it; look at the environment or wrap it"
                )


def _path(name: str | tuple[str, ...]) -> tuple[str, ...]:
    return (name,) if isinstance(name, str) else name


def _flat_observation(row: dict[Key, Any], observation: Observation, key: str | tuple[str, ...]) -> None:
    if isinstance(observation, dict):
        row.update({(*_path(key), name): stream for name, stream in observation.items()})
    else:
        row[key] = observation


def _with_final(step: VectorStep) -> Observation:
    """The true next observation: the final one where an episode ended, never the one after its reset."""
    if step.final_observation is None:
        return step.observation
    if isinstance(step.observation, dict):
        assert isinstance(step.final_observation, dict)
        merged = {name: stream.copy() for name, stream in step.observation.items()}
        for name, stream in merged.items():
            stream[step.done_index] = step.final_observation[name]
        return merged
    rows = step.observation.copy()
    rows[step.done_index] = step.final_observation
    return rows
