"""The contract of vector environments: N environments that are stepped together and reset when their episodes end.

Collectors, evaluations and trainers know this class and nothing else of an environment. Its kinds:

    SerialVectorEnv    environments stepped one after another in this process     serial.py
    ProcessVectorEnv   environments in worker processes                           process.py
    BatchedVectorEnv   simulators and libraries that step all environments at once: driving, waypoints, ManiSkill on
                       the GPU, envpool, Gymnasium vector environments
    WarpTabletopEnv    the tabletop on the GPU, with torch tensors as results     tabletop/warp/env.py
    HostVectorEnv      numpy arrays from a vector environment with tensors        host.py
    MixedVectorEnv     several vector environments side by side                   waypoints/make.py
    ClusterEnv         environments that Ray workers step                         deft/training/cluster/pool.py

A new kind derives from `VectorEnv` and implements `reset` and `step`; from `ArrayVectorEnv` if its results are numpy
arrays that are reused from step to step; from `BatchedVectorEnv` if one call steps all environments: it counts the
episodes and resets those that ended.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium import spaces

from deft.envs.layout import (
    ActionLayout,
    EnvArrays,
    Observation,
    ObservationLayout,
    StepArrays,
    copy_rows,
    first_not_finite,
    take_rows,
    with_rows,
)
from deft.errors import NOT_FINITE, InputError, RunError

LABELS = ("task", "instruction")

_NO_ROWS = np.empty(0, np.int64)
_NO_ROWS.flags.writeable = False


@dataclass(slots=True)
class Episode:
    """One finished episode, in the environment's own units."""

    env_index: int
    episode_return: float
    """Sum of the raw rewards, without discount and scaling."""
    length: int
    """Environment steps."""
    success: bool | None
    """`success` or `is_success` in the last step's info; None if the environment reports neither."""
    terms: dict[str, float]
    """Sums of `info["reward_terms"]` over the episode."""
    labels: dict[str, str] = field(default_factory=dict, kw_only=True)
    """`task` and `instruction` in the last step's info, if they are text; evaluations group successes by them."""
    measures: dict[str, float] = field(default_factory=dict, kw_only=True)
    """`measures` in the last step's info: further numbers about the whole episode; evaluations report their means."""


@dataclass(slots=True)
class VectorStep:
    """The result of one step of N environments. Arrays stay valid until the call after next.

    They are numpy arrays, or torch tensors if `VectorEnv.device` is set.
    """

    observation: Observation
    """[N, …], after the automatic reset: the observation for the next action."""
    reward: np.ndarray
    """float32 [N]."""
    terminated: np.ndarray
    """bool [N]."""
    truncated: np.ndarray
    """bool [N]."""
    num_steps: np.ndarray
    """int64 [N]: environment steps in this step; more than 1 with action chunks."""
    done_index: np.ndarray
    """int64 [K]: the environments whose episode ended in this step, ascending."""
    final_observation: Observation | None
    """[K, …] in the order of `done_index`: the last observation of each ended episode; None if K is 0."""
    episodes: list[Episode]
    """One per entry of `done_index`, except for those of `lost_index`."""
    lost_index: np.ndarray
    """int64: the environments whose episode was lost with their worker process, ascending. Such an episode counts as
    truncated at its last known observation, and its last step has reward 0."""
    reward_terms: np.ndarray | None = None
    """float32 [N, K]: the unweighted terms of this step's reward, with columns as in `VectorEnv.reward_terms`; their
    sum over the chunk with action chunks. None if the environment declares no terms."""

    def next_observation(self) -> Observation:
        """[N, …]: the true next observation, final where an episode ended, never the one after its reset."""
        if self.final_observation is None:
            return self.observation
        return with_rows(self.observation, self.done_index, self.final_observation)


class VectorEnv(ABC):
    """N environments of one kind, stepped together, each reset in the step in which its episode ends.

    Only `reset` and `step` are abstract. The other methods have defaults: the state cannot be saved, the environments
    have no methods to call, images are not available, and there is nothing to close.
    """

    device: Any = None
    """The torch device of observations and steps; None: they are numpy arrays."""
    num_workers: int = 0
    """Processes or threads, besides this one, that step the environments."""
    finished: VectorStep | None = None
    """After a `step` that raised: the episodes that had ended in it. Only the rows of `done_index` are valid. None if
    the vector environment does not know."""
    notices_hangs: bool = False
    """Whether the vector environment itself detects environments that hang."""

    def __init__(
        self,
        num_envs: int,
        *,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        env_action_space: spaces.Space | None = None,
        action_mask: np.ndarray | None = None,
        chunk_length: int = 1,
        reward_terms: Sequence[str] = (),
        has_splits: bool = False,
    ) -> None:
        self.num_envs = num_envs
        self.observation_space = observation_space
        """Of one environment: nested Dict flattened, Text as uint8, floats as float32, channels of images first."""
        self.action_space = action_space
        """Of one environment, as the policy uses it."""
        self.env_action_space = action_space if env_action_space is None else env_action_space
        """Of one environment, as declared: Discrete may start at a number other than 0, MultiBinary is unchanged."""
        self.action_mask = None if action_mask is None else np.asarray(action_mask, bool)
        """bool [A]: which of the padded action dims are real; from the environment's attribute of that name."""
        self.chunk_length = chunk_length
        """The maximum number of environment steps per action."""
        self.reward_terms = tuple(reward_terms)
        """Names of the reward terms; from the environment's attribute of that name, () if it has none."""
        self.has_splits = has_splits
        """Whether scenes are held out of training (`split`): evaluations then start from seeds of their own."""

    @property
    def description(self) -> dict[str, Any]:
        """The keyword arguments of `VectorEnv`, for another one of this kind."""
        names = (
            "observation_space", "action_space", "env_action_space", "action_mask", "chunk_length", "reward_terms",
            "has_splits",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    @property
    def observation(self) -> Observation:
        """The latest observation: of the last reset or step, or of the state that was set."""
        raise InputError(f"{type(self).__name__} holds no observations in this process")

    @abstractmethod
    def reset(self, seed: int | Sequence[int] | None = None) -> Observation:
        """Start an episode in every environment; environment i gets `seed + i`, or the i-th of several seeds."""

    @abstractmethod
    def step(self, actions: np.ndarray) -> VectorStep:
        """Step every environment with its row of `actions`."""

    def suspend(self, indices: Sequence[int]) -> None:  # noqa: B027 (a default, not abstract)
        """Do not step these environments until the next `reset` or `set_state`: their results are not used.

        Their rows of a step then have the last observation, reward 0 and no end. This saves time; a vector environment
        without this method steps them as before.
        """

    def get_state(self) -> list[dict[str, Any]] | None:
        """Return plain data for `set_state`, one dict per environment; None if `state_obstacle` gives a reason."""
        return None

    def set_state(self, states: list[dict[str, Any]]) -> None:
        """Continue from saved states; `observation` is then the one for the next action."""
        raise InputError(f"the environments cannot continue from a saved state: {self.state_obstacle()}")

    def state_obstacle(self) -> str | None:
        """Explain in one line why the state cannot be saved; None if it can."""
        return f"{type(self).__name__} cannot save its state"

    def call(self, name: str, *args: Any) -> list[Any]:
        """Call a method of every environment."""
        raise InputError(f"the environments of {type(self).__name__} have no method {name!r}")

    def set_difficulty(self, level: Any) -> None:
        """Set the difficulty of the next episodes in every environment."""
        self.call("set_difficulty", level)

    def render(self, index: int = 0) -> np.ndarray | None:
        """Return an image of one environment; None if it has no render mode."""
        return None

    def close(self) -> None:  # noqa: B027 (a default, not abstract)
        """Release all resources. Further calls do nothing."""

    def _env_seeds(self, seed: int | Sequence[int | None] | None) -> list[int | None]:
        """Return a seed for each environment."""
        if seed is None:
            return [None] * self.num_envs
        if isinstance(seed, int | np.integer):
            return [int(seed) + index for index in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise InputError(f"reset() got {len(seed)} seeds for {self.num_envs} environments; give one to each")
        return [None if one is None else int(one) for one in seed]

    def _check_states(self, states: list[dict[str, Any]]) -> None:
        if len(states) != self.num_envs:
            raise InputError(f"{len(states)} saved environment states do not fit {self.num_envs} environments")


class ArrayVectorEnv(VectorEnv):
    """A vector environment that writes its steps into numpy arrays: two sets in turn, allocated once."""

    def __init__(
        self,
        num_envs: int,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        arrays: EnvArrays | None = None,
        **description: Any,
    ) -> None:
        """Take one environment's own spaces; `description` holds the other arguments of `VectorEnv`."""
        self._observation_layout = ObservationLayout(observation_space)
        self._action_layout = ActionLayout(action_space)
        super().__init__(
            num_envs,
            observation_space=self._observation_layout.space,
            action_space=self._action_layout.space,
            env_action_space=action_space,
            **description,
        )
        self.reward_weights: np.ndarray | None = None
        """[K]: weights of the reward terms; None: the reward is the environments' own."""
        self._current = 0
        self._started = False
        arrays = arrays or EnvArrays.allocate(self._observation_layout, num_envs, len(self.reward_terms))
        self._arrays, self._final = arrays.steps, arrays.final
        for step_arrays in self._arrays:
            step_arrays.num_steps.fill(1)  # only action chunks write it again

    @property
    def observation(self) -> Observation:
        """The latest observation."""
        return self._arrays[self._current].observation

    def _next_arrays(self) -> StepArrays:
        """Return the set of arrays that the caller's latest result does not use."""
        self._current ^= 1
        return self._arrays[self._current]

    def _prepare(self, actions: np.ndarray) -> np.ndarray:
        if not self._started:
            raise InputError("step() was called before reset()")
        actions = np.asarray(actions)
        bad = first_not_finite(actions)
        if bad is not None:
            raise RunError(f"the policy's action for environment {bad} is infinite or not a number, {NOT_FINITE}")
        return self._action_layout.prepare(actions, self.num_envs)

    def _result(self, arrays: StepArrays, episodes: list[Episode], lost_index: np.ndarray = _NO_ROWS) -> VectorStep:
        """Build the result of a step. `episodes` and `lost_index` ascend by environment."""
        done_index, final_observation = _NO_ROWS, None
        if episodes or len(lost_index):
            ended = np.array([episode.env_index for episode in episodes], np.int64)
            done_index = np.sort(np.concatenate([ended, lost_index]))
            final_observation = take_rows(self._final, done_index)
        reward = arrays.reward
        if self.reward_weights is not None:
            assert arrays.reward_terms is not None
            reward = (arrays.reward_terms @ self.reward_weights).astype(np.float32)
            for episode in episodes:  # Σ_t Σ_k w_k r_tk = Σ_k w_k Σ_t r_tk
                sums = (episode.terms.get(name, 0.0) for name in self.reward_terms)
                episode.episode_return = float(sum(w * s for w, s in zip(self.reward_weights, sums, strict=True)))
        return VectorStep(
            arrays.observation,
            reward,
            arrays.terminated,
            arrays.truncated,
            arrays.num_steps,
            done_index,
            final_observation,
            episodes,
            lost_index,
            arrays.reward_terms,
        )


@dataclass(slots=True)
class BatchStep:
    """The result of one step of all environments before any reset, [N] each."""

    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray | None = None
    """None: never, except at `max_episode_steps`."""
    success: Sequence[Any] | np.ndarray | None = None
    """For environments whose episode ended in this step; None, or an entry None, if it is not known."""
    terms: np.ndarray | None = None
    """[N, K]: the terms of the reward, with columns as in `reward_terms`."""


class BatchedVectorEnv(ArrayVectorEnv):
    """A vector environment whose subclass implements `_begin`, `_advance`, `_observe` and `_restart`."""

    def __init__(
        self,
        num_envs: int,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        *,
        max_episode_steps: int | None = None,
        reward_terms: Sequence[str] = (),
    ) -> None:
        super().__init__(num_envs, observation_space, action_space, reward_terms=reward_terms)
        self._max_episode_steps = max_episode_steps
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, np.int64)
        self._term_sums = np.zeros((num_envs, len(self.reward_terms)))

    @abstractmethod
    def _begin(self, seeds: list[int] | None) -> None:
        """Start an episode in every environment, each with its own seed."""

    @abstractmethod
    def _advance(self, actions: np.ndarray) -> BatchStep:
        """Step every environment, without a reset."""

    @abstractmethod
    def _observe(self, rows: np.ndarray | None) -> Any:
        """Return the present observations of the environments `rows`, or of all."""

    @abstractmethod
    def _restart(self, rows: np.ndarray) -> None:
        """Start the next episode in the environments `rows`."""

    def reset(self, seed: int | Sequence[int] | None = None) -> Observation:
        """Start an episode in every environment; environment i gets `seed + i`, or the i-th of several seeds."""
        seeds = [one for one in self._env_seeds(seed) if one is not None]
        self._begin(seeds or None)
        arrays = self._next_arrays()
        self._observation_layout.write_batch(self._observe(None), arrays.observation)
        self._clear(slice(None))
        self._started = True
        return arrays.observation

    def step(self, actions: np.ndarray) -> VectorStep:
        """Step every environment with its row of `actions`."""
        result = self._advance(self._prepare(actions))
        arrays = self._next_arrays()
        arrays.reward[:], arrays.terminated[:] = result.reward, result.terminated
        arrays.truncated[:] = False if result.truncated is None else result.truncated
        self._returns += result.reward
        self._lengths += 1
        if arrays.reward_terms is not None:
            assert result.terms is not None
            arrays.reward_terms[:] = result.terms
            self._term_sums += result.terms
        if self._max_episode_steps is not None:
            arrays.truncated |= self._lengths >= self._max_episode_steps
        self._observation_layout.write_batch(self._observe(None), arrays.observation)
        done = np.flatnonzero(arrays.terminated | arrays.truncated)
        if not len(done):
            return self._result(arrays, [])
        self._write_final(arrays.observation, done)
        episodes = [self._end_episode(index, result) for index in done.tolist()]
        self._clear(done)
        self._restart(done)
        self._observation_layout.write_batch(self._observe(done), arrays.observation, done)
        return self._result(arrays, episodes)

    def _write_final(self, observation: Observation, done: np.ndarray) -> None:
        """Keep the last observations of the ended episodes."""
        copy_rows(observation, self._final, done)

    def _end_episode(self, index: int, result: BatchStep) -> Episode:
        success = None if result.success is None else result.success[index]
        success = None if success is None else bool(success)
        terms = self._episode_terms(index)
        return Episode(index, float(self._returns[index]), int(self._lengths[index]), success, terms)

    def _episode_terms(self, index: int) -> dict[str, float]:
        return dict(zip(self.reward_terms, self._term_sums[index].tolist(), strict=True))

    def _clear(self, rows: Any) -> None:
        """Reset the counters of the environments `rows`."""
        self._returns[rows] = self._lengths[rows] = self._term_sums[rows] = 0
