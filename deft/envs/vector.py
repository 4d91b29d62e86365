"""What a vector environment is: the contract between environments and collectors, and the parts its kinds share.

`SerialVectorEnv`, `ProcessVectorEnv` and the two adapters implement `VectorEnv`; the collectors in `deft.training` step
it. Observations become rows of arrays (`ObservationLayout`), actions what one environment takes (`ActionLayout`), and
`EnvSlot` steps one environment: the same code in this process and in workers.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from deft.config.validation import shown
from deft.envs.state import decode, encode, restore_state, save_state, state_obstacle
from deft.errors import NOT_FINITE, InputError, RunError, one_line, user_code
from deft.schema import channels_first, encode_text, has_channels_last

log = logging.getLogger(__name__)
MAX_TEXT = 2**16  # bytes of a text observation
MAX_OBSERVATION = 2**28  # bytes of one observation

Observation = np.ndarray | dict[str, np.ndarray]
Allocate = Callable[[tuple[int, ...], np.dtype], np.ndarray]

LABELS = ("task", "instruction")

_NOTHING_DONE = np.empty(0, np.int64)
_NOTHING_DONE.flags.writeable = False


@dataclass(slots=True)
class Episode:
    """One finished episode, in the environment's own units."""

    env_index: int
    episode_return: float
    """Sum of the raw rewards: no discount, no scaling."""
    length: int
    """Env steps."""
    success: bool | None
    """`success` or `is_success` in the last step's info; None where the environment does not say."""
    terms: dict[str, float]
    """Sums over the episode of what the environment put into info["reward_terms"]."""
    labels: dict[str, str] = field(default_factory=dict, kw_only=True)
    """`task` and `instruction` in the last step's info, where they are text: what evaluations count successes by."""


@dataclass(slots=True)
class VectorStep:
    """What one step of N environments gave. Arrays stay valid until the call after next."""

    observation: Observation
    """[N, …], after auto-reset: what the policy acts on next."""
    reward: np.ndarray
    """float32 [N]."""
    terminated: np.ndarray
    """bool [N]."""
    truncated: np.ndarray
    """bool [N]."""
    num_steps: np.ndarray
    """int64 [N]: env steps that this step took."""
    done_index: np.ndarray
    """int64 [K]: the environments whose episode ended in this step, ascending."""
    final_observation: Observation | None
    """[K, …] in the order of `done_index`: the true last observation of each; None when K is 0."""
    episodes: list[Episode]
    """One for each of `done_index`, but for those of `lost_index`."""
    lost_index: np.ndarray
    """int64: the environments whose episode was lost with their worker process, ascending. It counts as truncated at
    the last observation that was seen: the step that failed earned nothing and led nowhere."""
    reward_terms: np.ndarray | None = None
    """float32 [N, K]: the parts of this step's reward, columns as in `VectorEnv.reward_terms`, without weights; with
    action chunks their sum over the chunk. None where the environment names none."""


@dataclass(slots=True)
class StepArrays:
    """The arrays that one step is written into; a vector environment has two, used in turn."""

    observation: Observation
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    num_steps: np.ndarray
    reward_terms: np.ndarray | None


def _zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return np.zeros(shape, dtype)


def allocate_step_arrays(
    layout: ObservationLayout, num_envs: int, allocate: Allocate = _zeros, num_terms: int = 0
) -> StepArrays:
    """New arrays for one step of `num_envs` environments, from `allocate` (in shared memory, for worker processes)."""
    return StepArrays(
        observation=layout.allocate(num_envs, allocate),
        reward=allocate((num_envs,), np.dtype(np.float32)),
        terminated=allocate((num_envs,), np.dtype(np.bool_)),
        truncated=allocate((num_envs,), np.dtype(np.bool_)),
        num_steps=allocate((num_envs,), np.dtype(np.int64)),
        reward_terms=allocate((num_envs, num_terms), np.dtype(np.float32)) if num_terms else None,
    )


def allocate_arrays(
    layout: ObservationLayout, num_envs: int, allocate: Allocate = _zeros, num_terms: int = 0
) -> tuple[tuple[StepArrays, StepArrays], Observation]:
    """The two sets of step arrays, and rows for final observations."""
    first = allocate_step_arrays(layout, num_envs, allocate, num_terms)
    second = allocate_step_arrays(layout, num_envs, allocate, num_terms)
    return (first, second), layout.allocate(num_envs, allocate)


# ---------------------------------------------------------------------------------------------------- observations


@dataclass(slots=True)
class _Leaf:
    """One array of an observation: where it is found, and how a value becomes a row of it."""

    name: str
    path: tuple[str, ...]
    space: spaces.Space
    shape: tuple[int, ...]
    dtype: np.dtype
    encode: Callable[[Any], Any] | None
    channels_last: bool = False
    """Whether the environment's images have their channels last, and are turned."""

    @property
    def source_shape(self) -> tuple[int, ...]:
        """Of the environment's values."""
        return (*self.shape[:-3], *self.shape[-2:], self.shape[-3]) if self.channels_last else self.shape

    def row(self, value: Any) -> Any:
        """A value of the environment as a row."""
        if self.channels_last:
            return channels_first(np.asarray(value))
        return value if self.encode is None else self.encode(value)


def _called(name: str) -> str:
    return f"observation {name!r}" if name else "the observation"


def _leaf(name: str, path: tuple[str, ...], space: spaces.Space) -> _Leaf:
    """The array form of a space that is no Dict. Floats become float32; counting starts at 0; channels come first."""
    if isinstance(space, spaces.Box) and has_channels_last(space.shape, space.dtype):
        turned = spaces.Box(channels_first(space.low), channels_first(space.high), dtype=np.uint8)
        return _Leaf(name, path, turned, turned.shape, np.dtype(np.uint8), None, channels_last=True)
    if isinstance(space, spaces.Box):
        dtype = np.dtype(np.float32) if space.dtype.kind == "f" else np.dtype(space.dtype)
        if dtype != space.dtype:
            with np.errstate(over="ignore"):  # a bound beyond float32 becomes infinite
                space = spaces.Box(space.low.astype(dtype), space.high.astype(dtype), dtype=dtype.type)
        if not space.shape or 0 in space.shape:
            raise InputError(f"{_called(name)} has the shape {space.shape}; it needs at least one number, as in (1,)")
        return _Leaf(name, path, space, space.shape, dtype, None)
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        shift = (lambda value: value - start) if start else None
        return _Leaf(name, path, spaces.Discrete(int(space.n)), (), np.dtype(np.int64), shift)
    if isinstance(space, spaces.MultiDiscrete):
        starts = np.asarray(space.start)
        shift = (lambda value: value - starts) if starts.any() else None
        return _Leaf(name, path, spaces.MultiDiscrete(space.nvec), space.shape, np.dtype(np.int64), shift)
    if isinstance(space, spaces.MultiBinary):
        return _Leaf(name, path, spaces.Box(0, 1, space.shape, np.float32), space.shape, np.dtype(np.float32), None)
    if isinstance(space, spaces.Text):
        length = space.max_length * max(len(character.encode()) for character in space.character_set)
        if length > MAX_TEXT:
            raise InputError(
                f"{_called(name)} is Text of up to {length:,} bytes; Deft takes at most {MAX_TEXT:,}: give the space a "
                "smaller max_length"
            )
        as_bytes = spaces.Box(0, 255, (length,), np.uint8)
        return _Leaf(name, path, as_bytes, (length,), np.dtype(np.uint8), lambda text: encode_text(text, length))
    raise InputError(
        f"{_called(name)} has a {type(space).__name__} space; Deft takes Box, Discrete, MultiDiscrete, MultiBinary, "
        "Text and Dict of these: wrap the environment in one that gives named streams (a Dict)"
    )


def _leaves(space: spaces.Space, path: tuple[str, ...] = ()) -> Iterator[_Leaf]:
    if isinstance(space, spaces.Dict):
        for name, part in space.spaces.items():
            if not isinstance(name, str) or not all(name.split("/")):
                raise InputError(f"the observation space has a stream named {shown(name)}: give it a name in words")
            yield from _leaves(part, (*path, name))
    else:
        yield _leaf("/".join(path), path, space)


class ObservationLayout:
    """How one environment's observations become rows of arrays; nested names are joined with a slash."""

    def __init__(self, space: spaces.Space) -> None:
        self._leaves = list(_leaves(space))
        self._is_single = not isinstance(space, spaces.Dict)
        self._is_direct = self._is_single and self._leaves[0].encode is None and not self._leaves[0].channels_last
        size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in self._leaves)
        if size > MAX_OBSERVATION:
            raise InputError(
                f"one observation takes {size / 2**20:,.0f} MiB; Deft takes at most {MAX_OBSERVATION // 2**20} MiB: "
                "wrap the environment in one with smaller observations"
            )
        names = [leaf.name for leaf in self._leaves]
        if not names or len(set(names)) < len(names):
            raise InputError(f"the observation space needs at least one stream, and different names for all: {names}")
        self.space: spaces.Space = (
            self._leaves[0].space if self._is_single else spaces.Dict({leaf.name: leaf.space for leaf in self._leaves})
        )

    @property
    def paths(self) -> list[tuple[str, ...]]:
        """Where the streams are found in an observation; none where it is one array."""
        return [] if self._is_single else [leaf.path for leaf in self._leaves]

    def allocate(self, num_rows: int, allocate: Allocate = _zeros) -> Observation:
        """Zeroed arrays for `num_rows` observations."""
        arrays = {leaf.name: allocate((num_rows, *leaf.shape), leaf.dtype) for leaf in self._leaves}
        return arrays[""] if self._is_single else arrays

    def write(self, observation: Any, arrays: Observation, row: int) -> None:
        """Put one environment's observation into its row; a ValueError where it has another shape."""
        if self._is_direct:
            _write_row(arrays, row, observation)  # type: ignore[arg-type]
            return
        for leaf in self._leaves:
            value, target = observation, arrays if isinstance(arrays, np.ndarray) else arrays[leaf.name]
            for name in leaf.path:
                value = value[name]
            _write_row(target, row, leaf.row(value))

    def write_batch(self, observations: Any, arrays: Observation, rows: np.ndarray) -> None:
        """Put a batch of observations, as a vector environment gives them, into the given rows."""
        for leaf in self._leaves:
            values, target = observations, arrays if isinstance(arrays, np.ndarray) else arrays[leaf.name]
            for name in leaf.path:
                values = values[name]
            if leaf.encode is None:
                batch = np.asarray(values).reshape(len(rows), *leaf.source_shape)
                target[rows] = channels_first(batch) if leaf.channels_last else batch
            else:
                for row, value in zip(rows, values, strict=True):
                    target[row] = leaf.encode(value)

    def check(self, observation: Any, owner: str) -> None:
        """Refuse an observation that its space does not describe."""
        difference = self.difference(observation)
        if difference is not None:
            raise InputError(f"{owner}: {difference}")

    def difference(self, observation: Any) -> str | None:
        """How an observation is not what its space describes, in a few words; None where it is."""
        for leaf in self._leaves:
            value = observation
            for name in leaf.path:
                if not isinstance(value, Mapping) or name not in value:
                    return f"the observation has no {leaf.name!r}, its observation_space has"
                value = value[name]
            what = _called(leaf.name)
            try:
                row = np.asarray(value if leaf.encode is None else leaf.encode(value))
            except (TypeError, ValueError, AttributeError):  # a list of unequal lists; no text where text should be
                return f"{what} is {type(value).__name__}, its observation_space says {leaf.space}"
            shape = leaf.source_shape
            if row.shape != shape or not np.can_cast(row.dtype, leaf.dtype, "same_kind"):
                return f"{what} is {row.dtype} {row.shape}, its observation_space says {leaf.dtype} {shape}"
        return None

    def encode_row(self, arrays: Observation, row: int) -> dict[str, Any]:
        """One row as plain data, for a checkpoint."""
        streams = {"": arrays} if isinstance(arrays, np.ndarray) else arrays
        return {name: encode(np.array(stream[row])) for name, stream in streams.items()}

    def decode_row(self, state: dict[str, Any], arrays: Observation, row: int) -> None:
        """The inverse of `encode_row`, written into its row."""
        streams = {"": arrays} if isinstance(arrays, np.ndarray) else arrays
        for leaf in self._leaves:
            saved = decode(state[leaf.name])
            if leaf.channels_last and saved.shape != leaf.shape:  # of an earlier version, as the environment gives it
                saved = channels_first(saved)
            streams[leaf.name][row] = saved


def _write_row(target: np.ndarray, row: int, value: Any) -> None:
    """Assign one row, but not a value of another shape: numpy would repeat a shorter one in silence."""
    shape = getattr(value, "shape", None)
    if (np.shape(value) if shape is None else shape) != target.shape[1:]:
        raise ValueError(f"shape {np.shape(value)} does not fit {target.shape[1:]}")
    target[row] = value


def first_not_finite(values: np.ndarray) -> int | None:
    """The first row of [N, …] with a value that is infinite or not a number; None where all are finite."""
    # One pass where all is well: a sum is finite only if all its terms are. It may overflow though they are finite.
    if values.dtype.kind != "f" or math.isfinite(values.sum(dtype=np.float64)):
        return None
    bad = ~np.isfinite(values.reshape(len(values), -1)).all(1)
    return int(bad.argmax()) if bad.any() else None


def take_rows(observation: Observation, index: np.ndarray) -> Observation:
    """A copy of the chosen rows."""
    if isinstance(observation, np.ndarray):
        return observation[index]
    return {name: stream[index] for name, stream in observation.items()}


# --------------------------------------------------------------------------------------------------------- actions


class ActionLayout:
    """How a batch of actions becomes what each environment takes: offsets added, Box actions clipped to their bounds.

    `space` is what a policy sees: Discrete and MultiDiscrete count from 0, MultiBinary is a MultiDiscrete of twos.
    """

    def __init__(self, space: spaces.Space) -> None:
        self._start: np.ndarray | None = None
        self._low: np.ndarray | None = None
        self._high: np.ndarray | None = None
        self._is_scalar = isinstance(space, spaces.Discrete)
        self.env_space, self.space = space, space
        if isinstance(space, spaces.Box | spaces.MultiDiscrete) and (not space.shape or 0 in space.shape):
            raise InputError(f"actions of {space} hold no number; use a space of shape (1,) or more")
        if isinstance(space, spaces.Box) and space.dtype.kind == "f":
            self.space = space
            self._low = space.low if np.isfinite(space.low).any() else None
            self._high = space.high if np.isfinite(space.high).any() else None
        elif isinstance(space, spaces.Discrete):
            self.space = spaces.Discrete(int(space.n))
            self._start = np.asarray(space.start) if space.start else None
        elif isinstance(space, spaces.MultiDiscrete) and len(space.shape) == 1:
            self.space = spaces.MultiDiscrete(space.nvec)
            self._start = space.start if np.any(space.start) else None
        elif isinstance(space, spaces.MultiBinary) and len(space.shape) == 1:
            self.space = spaces.MultiDiscrete(np.full(space.shape, 2))
        else:
            raise InputError(
                f"the action space {space} is not supported; Deft takes Box of floats, Discrete, MultiDiscrete and "
                "MultiBinary with one dimension: wrap the environment in one that takes such actions"
            )
        self.shape: tuple[int, ...] = () if self._is_scalar else tuple(self.space.shape or ())
        self.dtype = np.dtype(self.space.dtype)

    def prepare(self, actions: np.ndarray, num_envs: int) -> np.ndarray:
        """A policy's actions [N, …] as the environments' own, in a new array."""
        if actions.shape != (num_envs, *self.shape):
            raise InputError(
                f"actions have shape {actions.shape}; {num_envs} environments with {self.space} take "
                f"{(num_envs, *self.shape)}"
            )
        prepared = actions.astype(self.dtype)
        if self._start is not None:
            prepared += self._start
        if self._low is not None:
            np.maximum(prepared, self._low, out=prepared)
        if self._high is not None:
            np.minimum(prepared, self._high, out=prepared)
        return prepared

    def rows(self, prepared: np.ndarray) -> list[Any]:
        """One action for each environment: an int for Discrete, otherwise an array."""
        return prepared.tolist() if self._is_scalar else list(prepared)


# --------------------------------------------------------------------------------------------------- one environment


def wrapper_attribute(env: gymnasium.Env, name: str, default: Any = None) -> Any:
    """An attribute of the environment or of any of its wrappers."""
    return env.get_wrapper_attr(name) if env.has_wrapper_attr(name) else default


def reward_term_names(declared: Any) -> tuple[str, ...]:
    """An attribute `reward_terms` as names; () where it is none, or something else of that name."""
    is_declaration = isinstance(declared, list | tuple) and all(isinstance(name, str) for name in declared)
    return tuple(declared) if is_declaration else ()


def env_reward_terms(env: gymnasium.Env) -> tuple[str, ...]:
    """The names of the reward's terms that an environment declares."""
    return reward_term_names(wrapper_attribute(env, "reward_terms", ()))


def describe_env(env: gymnasium.Env, index: int) -> str:
    """Which environment, for error messages."""
    return f"environment {index} ({env.spec.id if env.spec is not None else type(env.unwrapped).__name__})"


def close_env(env: Any, name: str | None = None) -> None:
    """Close an environment. A close() that raises loses no results: it is a warning."""
    try:
        env.close()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        name = name or describe_env(env, 0)
        log.warning("%s, close() raised %s; the results so far are kept", name, one_line(error))


class EnvSlot:
    """One environment in its row of the arrays: steps it, resets it when an episode ends, and counts the episode."""

    def __init__(self, env: gymnasium.Env, index: int, layout: ObservationLayout) -> None:
        self.env = env
        self.index = index
        self.name = describe_env(env, index)
        self._user_code = user_code(f"{self.name} raised")
        self._layout = layout
        self._is_chunked = wrapper_attribute(env, "chunk_length", 1) > 1
        self._term_names = env_reward_terms(env)
        self._pick_terms = itemgetter(*self._term_names) if self._term_names else None
        self._episode_return = 0.0
        self._length = 0
        self._terms: dict[str, float] = {}
        self.finished: Episode | None = None
        """The episode that had ended when the reset after it failed."""

    def reset(self, seed: int | None, arrays: StepArrays) -> None:
        """Start an episode, and see that the environment keeps to its observation space."""
        self._begin(arrays, seed, is_checked=True)

    def step(self, action: Any, arrays: StepArrays, final: Observation) -> Episode | None:
        """One step into this row; where the episode ends, its last observation goes to `final` before the reset."""
        with self._user_code:
            observation, reward, terminated, truncated, info = self.env.step(action)
        if not isinstance(info, Mapping):
            raise RunError(f"{self.name} gave the info {shown(info)}; it must be a dict")
        row = self.index
        try:
            if isinstance(reward, str | bytes):
                raise TypeError
            arrays.reward[row] = reward = float(reward)
        except (TypeError, ValueError) as error:
            raise RunError(f"{self.name} gave the reward {shown(reward)}; it must be one number") from error
        arrays.terminated[row] = terminated = self._flag("terminated", terminated)
        arrays.truncated[row] = truncated = self._flag("truncated", truncated)
        if self._is_chunked:
            arrays.num_steps[row] = info["num_steps"]
            self._length += info["num_steps"]
            self._episode_return += info["raw_reward"]
        else:
            self._length += 1
            self._episode_return += reward
        if "reward_terms" in info:
            self._take_terms(info["reward_terms"], arrays)
        elif self._term_names:
            raise RunError(f'{self.name} names its reward_terms, but a step\'s info has no "reward_terms"')
        if not (terminated or truncated):
            self._write(observation, arrays.observation)
            return None
        self._write(observation, final)
        success = info.get("success", info.get("is_success"))
        episode = Episode(
            row,
            self._episode_return,
            self._length,
            None if success is None else bool(success),
            self._terms,
            labels={name: info[name] for name in LABELS if isinstance(info.get(name), str)},
        )
        self.finished = episode
        self._begin(arrays)
        self.finished = None
        return episode

    def _flag(self, name: str, value: Any) -> bool:
        if value is True or value is False:
            return value
        if (
            isinstance(value, bool | np.bool_ | np.ndarray | int | np.integer)
            and np.size(value) == 1
            and value in (0, 1)
        ):
            return bool(value)
        raise RunError(f"{self.name} gave {name} as {shown(value)}; it must be True or False")

    def _take_terms(self, terms: Mapping[str, float], arrays: StepArrays) -> None:
        """Add the terms of a step to the episode's, and write those that are declared into this row."""
        sums = self._terms
        for name, value in terms.items():
            sums[name] = sums.get(name, 0.0) + float(value)
        if arrays.reward_terms is None or self._pick_terms is None:
            return
        try:
            arrays.reward_terms[self.index] = self._pick_terms(terms)
        except KeyError as error:
            raise RunError(f"{self.name} names the reward term {error}, but a step's info has none") from error
        if len(terms) != len(self._term_names):
            other = ", ".join(sorted(terms.keys() - set(self._term_names)))
            raise RunError(f"{self.name} reports reward terms that its attribute reward_terms does not name: {other}")

    def get_state(self, arrays: StepArrays) -> dict[str, Any]:
        """All that this environment's future depends on, as plain data."""
        return {
            "env": save_state(self.env),
            "episode_return": self._episode_return,
            "length": self._length,
            "terms": dict(self._terms),
            "observation": self._layout.encode_row(arrays.observation, self.index),
        }

    def set_state(self, state: dict[str, Any], arrays: StepArrays) -> None:
        """Go on from a saved state."""
        restore_state(self.env, state["env"])
        self._episode_return = state["episode_return"]
        self._length = state["length"]
        self._terms = dict(state["terms"])
        self._layout.decode_row(state["observation"], arrays.observation, self.index)

    def state_obstacle(self) -> str | None:
        """Why the state cannot be saved, or None."""
        obstacle = state_obstacle(self.env)
        return None if obstacle is None else f"{self.name}: {obstacle}"

    def call(self, name: str, *args: Any) -> Any:
        """Call a method of the environment or of one of its wrappers."""
        if not self.env.has_wrapper_attr(name):
            raise InputError(f"{self.name} has no method {name!r}")
        return self.env.get_wrapper_attr(name)(*args)

    def render(self) -> np.ndarray | None:
        """A picture; None where the environment was made without a render mode."""
        if self.env.render_mode is None:
            return None
        with user_code(f"{self.name} cannot be rendered:"):
            try:
                frame: Any = self.env.render()
            except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
                raise InputError(f"{self.name} cannot be rendered: {one_line(error)}") from error
        return frame[-1] if isinstance(frame, list) else frame

    def close(self) -> None:
        """Close the environment."""
        close_env(self.env, self.name)

    def _begin(self, arrays: StepArrays, seed: int | None = None, is_checked: bool = False) -> None:
        self._episode_return = 0.0
        self._length = 0
        self._terms = {}
        with user_code(f"{self.name}, reset() raised"):
            observation, _ = self.env.reset(seed=seed)
        if is_checked:
            self._layout.check(observation, self.name)
        self._write(observation, arrays.observation)

    def _write(self, observation: Any, arrays: Observation) -> None:
        try:
            self._layout.write(observation, arrays, self.index)
        except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            difference = self._layout.difference(observation) or f"the observation cannot be used: {one_line(error)}"
            raise RunError(f"{self.name}: {difference}") from error


# ------------------------------------------------------------------------------------------------------ the contract


class VectorEnv(ABC):
    """N environments of one kind, stepped together, each reset within the step in which its episode ends."""

    num_envs: int
    observation_space: spaces.Space
    """Of one environment: nested Dict flattened, Text as uint8, floats as float32, channels of images first."""
    action_space: spaces.Space
    """Of one environment, as a policy sees it."""
    env_action_space: spaces.Space
    """Of one environment, as it has it: Discrete may count from another number than 0, MultiBinary stays that."""
    action_mask: np.ndarray | None
    """bool [A]: which of the padded action dims are real; from the environment's attribute of that name."""
    chunk_length: int
    """Env steps that one action decides at most."""
    reward_terms: tuple[str, ...]
    """Names of the parts of the reward; from the environment's attribute of that name, () where it has none."""
    num_workers: int = 0
    """Processes or threads, beside this one, that step the environments."""
    finished: VectorStep | None = None
    """After a `step` that raised: the episodes that had ended in it, in the environments that did not fail or failed in
    the reset afterwards. Only the rows of `done_index` count. None where the vector environment does not know."""
    notices_hangs: bool = False
    """Whether an environment that hangs is noticed, and dealt with, by the vector environment itself."""

    def __init__(
        self,
        num_envs: int,
        observation_layout: ObservationLayout,
        action_layout: ActionLayout,
        action_mask: np.ndarray | None = None,
        chunk_length: int = 1,
        allocate: Allocate = _zeros,
        reward_terms: Sequence[str] = (),
    ) -> None:
        self.num_envs = num_envs
        self.observation_space = observation_layout.space
        self.action_space, self.env_action_space = action_layout.space, action_layout.env_space
        self.action_mask = None if action_mask is None else np.asarray(action_mask, bool)
        self.chunk_length = chunk_length
        self.reward_terms = tuple(reward_terms)
        self._observation_layout = observation_layout
        self._action_layout = action_layout
        self._current = 0
        self._started = False
        self._arrays, self._final = allocate_arrays(observation_layout, num_envs, allocate, len(self.reward_terms))
        for arrays in self._arrays:
            arrays.num_steps.fill(1)  # only chunks write it again

    def _next_arrays(self) -> StepArrays:
        """The set of arrays that is not in the caller's latest result."""
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

    def _result(
        self, arrays: StepArrays, episodes: list[Episode], lost_index: np.ndarray = _NOTHING_DONE
    ) -> VectorStep:
        """What a step hands out. `episodes` and `lost_index` ascend by environment."""
        done_index, final_observation = _NOTHING_DONE, None
        if episodes or len(lost_index):
            ended = np.array([episode.env_index for episode in episodes], np.int64)
            done_index = np.sort(np.concatenate([ended, lost_index]))
            final_observation = take_rows(self._final, done_index)
        return VectorStep(
            arrays.observation,
            arrays.reward,
            arrays.terminated,
            arrays.truncated,
            arrays.num_steps,
            done_index,
            final_observation,
            episodes,
            lost_index,
            arrays.reward_terms,
        )

    def _env_seeds(self, seed: int | Sequence[int] | None) -> list[int | None]:
        """A seed for each environment."""
        if seed is None:
            return [None] * self.num_envs
        if isinstance(seed, int | np.integer):
            return [int(seed) + index for index in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise InputError(f"reset() got {len(seed)} seeds for {self.num_envs} environments; give one to each")
        return [int(one) for one in seed]

    @property
    def observation(self) -> Observation:
        """The latest observation: of the last reset or step, or of the state that was set."""
        return self._arrays[self._current].observation

    @abstractmethod
    def reset(self, seed: int | Sequence[int] | None = None) -> Observation:
        """Start an episode in every environment; environment i gets `seed + i`, or the i-th of several seeds."""

    @abstractmethod
    def step(self, actions: np.ndarray) -> VectorStep:
        """Step every environment with its row of `actions`."""

    @abstractmethod
    def get_state(self) -> list[dict[str, Any]] | None:
        """Plain data that `set_state` goes on from, one dict an environment; None where `state_obstacle` says why."""

    @abstractmethod
    def set_state(self, states: list[dict[str, Any]]) -> None:
        """Go on from saved states; `observation` is then the one that the next action belongs to."""

    @abstractmethod
    def state_obstacle(self) -> str | None:
        """One line on what keeps the state from being saved; None if nothing does."""

    @abstractmethod
    def call(self, name: str, *args: Any) -> list[Any]:
        """Call a method on every environment."""

    def set_difficulty(self, level: Any) -> None:
        """Set the difficulty of the next episodes in every environment, in whichever process it runs."""
        self.call("set_difficulty", level)

    @abstractmethod
    def render(self, index: int = 0) -> np.ndarray | None:
        """A picture of one environment; None where it was made without a render mode."""

    @abstractmethod
    def close(self) -> None:
        """Free what the environments hold. Calling it again does nothing."""

    def _check_states(self, states: list[dict[str, Any]]) -> None:
        if len(states) != self.num_envs:
            raise InputError(f"{len(states)} saved environment states do not fit {self.num_envs} environments")


def check_same_spaces(first: gymnasium.Env, other: gymnasium.Env, index: int) -> None:
    """Refuse environments that differ in their spaces, or in the terms of their reward: one policy acts in all."""
    for kind in ("observation_space", "action_space"):
        expected, found = getattr(first, kind), getattr(other, kind)
        if expected != found:
            raise InputError(f"environment {index} has {kind} {found}, but environment 0 has {expected}")
    expected, found = env_reward_terms(first), env_reward_terms(other)
    if expected != found:
        raise InputError(f"environment {index} has reward_terms {found}, but environment 0 has {expected}")
