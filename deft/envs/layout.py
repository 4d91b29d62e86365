"""How observations and actions of environments become rows of arrays, and back.

Every vector environment has an `ObservationLayout` and an `ActionLayout`; `LoadedPolicy` uses them for single
observations. `StepArrays` holds the arrays that one step of a vector environment is written to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from deft.envs.state import decode, encode
from deft.errors import InputError, shown
from deft.schema import channels_first, encode_text, has_channels_last

MAX_TEXT = 2**16  # bytes of a text observation
MAX_OBSERVATION = 2**28  # bytes of one observation

Observation = np.ndarray | dict[str, np.ndarray]
Allocate = Callable[[tuple[int, ...], np.dtype], np.ndarray]


# ---------------------------------------------------------------------------------------------------- observations


@dataclass(slots=True)
class _Leaf:
    """One array of an observation: its path in the environment's observation, and how a value becomes a row."""

    name: str
    path: tuple[str, ...]
    space: Any
    """The space of a row: Box, Discrete or MultiDiscrete."""
    encode: Callable[[Any], Any] | None = None
    channels_last: bool = False
    """Whether the environment's images have their channels last; rows have them first."""

    @property
    def source_shape(self) -> tuple[int, ...]:
        """The shape of the environment's values."""
        shape = self.space.shape
        return (*shape[:-3], *shape[-2:], shape[-3]) if self.channels_last else shape

    def row(self, value: Any) -> Any:
        """Convert a value of the environment to a row."""
        if self.channels_last:
            return channels_first(np.asarray(value))
        return value if self.encode is None else self.encode(value)


def _describe_stream(name: str) -> str:
    return f"observation {name!r}" if name else "the observation"


def _leaf(name: str, path: tuple[str, ...], space: spaces.Space) -> _Leaf:
    """The array form of a space that is not a Dict: floats as float32, integers from 0, channels first."""
    if isinstance(space, spaces.Box) and has_channels_last(space.shape, space.dtype):
        turned = spaces.Box(channels_first(space.low), channels_first(space.high), dtype=np.uint8)
        return _Leaf(name, path, turned, channels_last=True)
    if isinstance(space, spaces.Box):
        if space.dtype.kind == "f" and space.dtype != np.float32:
            with np.errstate(over="ignore"):  # a bound beyond float32 becomes infinite
                space = spaces.Box(space.low.astype(np.float32), space.high.astype(np.float32))
        if not space.shape or 0 in space.shape:
            raise InputError(
                f"{_describe_stream(name)} has the shape {space.shape}; it needs at least one number, as in (1,)"
            )
        return _Leaf(name, path, space)
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        return _Leaf(name, path, spaces.Discrete(int(space.n)), (lambda value: value - start) if start else None)
    if isinstance(space, spaces.MultiDiscrete):
        starts = np.asarray(space.start)
        shift = (lambda value: value - starts) if starts.any() else None
        return _Leaf(name, path, spaces.MultiDiscrete(space.nvec), shift)
    if isinstance(space, spaces.MultiBinary):
        return _Leaf(name, path, spaces.Box(0, 1, space.shape, np.float32))
    if isinstance(space, spaces.Text):
        length = space.max_length * max(len(character.encode()) for character in space.character_set)
        if length > MAX_TEXT:
            raise InputError(
                f"{_describe_stream(name)} is Text of up to {length:,} bytes; Deft takes at most {MAX_TEXT:,}: reduce "
                "max_length of the space"
            )
        return _Leaf(name, path, spaces.Box(0, 255, (length,), np.uint8), lambda text: encode_text(text, length))
    raise InputError(
        f"{_describe_stream(name)} has a {type(space).__name__} space; Deft takes Box, Discrete, MultiDiscrete, "
        "MultiBinary, Text and Dict of these: wrap the environment in one that returns named streams (a Dict)"
    )


def _leaves(space: spaces.Space, path: tuple[str, ...] = ()) -> Iterator[_Leaf]:
    if isinstance(space, spaces.Dict):
        for name, part in space.spaces.items():
            if not isinstance(name, str) or not all(name.split("/")):
                raise InputError(f"the observation space has a stream named {shown(name)}; use a non-empty name")
            yield from _leaves(part, (*path, name))
    else:
        yield _leaf("/".join(path), path, space)


def value_at(value: Any, path: tuple[str, ...]) -> Any:
    """Return the entry of a nested dict (or Dict space) at a path of names."""
    for name in path:
        value = value[name]
    return value


def streams_of(observation: Observation) -> dict[str, np.ndarray]:
    """Return the arrays of an observation by name; a single array has the name ""."""
    return observation if isinstance(observation, dict) else {"": observation}


class ObservationLayout:
    """How one environment's observations become rows of arrays; nested names are joined with a slash."""

    def __init__(self, space: spaces.Space) -> None:
        self._leaves = list(_leaves(space))
        self._is_single = not isinstance(space, spaces.Dict)
        self._is_direct = self._is_single and self._leaves[0].encode is None and not self._leaves[0].channels_last
        size = sum(math.prod(leaf.space.shape) * leaf.space.dtype.itemsize for leaf in self._leaves)
        if size > MAX_OBSERVATION:
            raise InputError(
                f"one observation takes {size / 2**20:,.0f} MiB; Deft takes at most {MAX_OBSERVATION // 2**20} MiB: "
                "wrap the environment in one with smaller observations"
            )
        names = [leaf.name for leaf in self._leaves]
        if not names or len(set(names)) < len(names):
            raise InputError(f"the observation space needs at least one stream, with unique names; it has {names}")
        self.space: spaces.Space = (
            self._leaves[0].space if self._is_single else spaces.Dict({leaf.name: leaf.space for leaf in self._leaves})
        )

    @property
    def paths(self) -> list[tuple[str, ...]]:
        """Paths of the streams in an observation; empty for a single array."""
        return [] if self._is_single else [leaf.path for leaf in self._leaves]

    def allocate(self, num_rows: int, allocate: Allocate = np.zeros) -> Observation:
        """Allocate zeroed arrays for `num_rows` observations."""
        arrays = {leaf.name: allocate((num_rows, *leaf.space.shape), leaf.space.dtype) for leaf in self._leaves}
        return arrays[""] if self._is_single else arrays

    def write(self, observation: Any, arrays: Observation, row: int) -> None:
        """Write one environment's observation to its row; raise ValueError for another shape."""
        if self._is_direct:
            _write_row(arrays, row, observation)  # type: ignore[arg-type]
            return
        for leaf in self._leaves:
            target = arrays if isinstance(arrays, np.ndarray) else arrays[leaf.name]
            _write_row(target, row, leaf.row(value_at(observation, leaf.path)))

    def write_batch(self, observations: Any, arrays: Observation, rows: np.ndarray | None = None) -> None:
        """Write a batch of observations, as a Gymnasium vector environment returns them, to `rows`, or to all rows."""
        for leaf in self._leaves:
            values, target = value_at(observations, leaf.path), streams_of(arrays)[leaf.name]
            index: Any = slice(None) if rows is None else rows
            if leaf.encode is None:
                batch = np.asarray(values).reshape(-1, *leaf.source_shape)
                target[index] = channels_first(batch) if leaf.channels_last else batch
            else:
                target[index] = [leaf.encode(value) for value in values]

    def difference(self, observation: Any) -> str | None:
        """Describe how an observation differs from the space; None if it does not."""
        for leaf in self._leaves:
            value = observation
            for name in leaf.path:
                if not isinstance(value, Mapping) or name not in value:
                    return f"the observation has no {leaf.name!r}, but the observation_space has"
                value = value[name]
            stream = _describe_stream(leaf.name)
            try:
                row = np.asarray(value if leaf.encode is None else leaf.encode(value))
            except (TypeError, ValueError, AttributeError):  # a ragged list, or another type instead of text
                return f"{stream} is {type(value).__name__}, but the observation_space is {leaf.space}"
            shape, dtype = leaf.source_shape, leaf.space.dtype
            if row.shape != shape or not np.can_cast(row.dtype, dtype, "same_kind"):
                return f"{stream} is {row.dtype} {row.shape}, but the observation_space is {dtype} {shape}"
        return None

    def encode_row(self, arrays: Observation, row: int) -> dict[str, Any]:
        """Return one row as plain data, for a checkpoint."""
        return {name: encode(np.array(stream[row])) for name, stream in streams_of(arrays).items()}

    def decode_row(self, state: dict[str, Any], arrays: Observation, row: int) -> None:
        """Write a row that `encode_row` saved."""
        for name, stream in streams_of(arrays).items():
            stream[row] = decode(state[name])


def _write_row(target: np.ndarray, row: int, value: Any) -> None:
    """Assign one row of the same shape: numpy would broadcast a smaller value."""
    shape = getattr(value, "shape", None)
    if (np.shape(value) if shape is None else shape) != target.shape[1:]:
        raise ValueError(f"shape {np.shape(value)} does not fit {target.shape[1:]}")
    target[row] = value


def first_not_finite(values: np.ndarray) -> int | None:
    """Return the first row of [N, …] with an infinite value or NaN; None if all are finite."""
    # One pass in the usual case: a sum is finite only if all its terms are. It may overflow with finite terms.
    if values.dtype.kind != "f" or math.isfinite(values.sum(dtype=np.float64)):
        return None
    bad = ~np.isfinite(values.reshape(len(values), -1)).all(1)
    return int(bad.argmax()) if bad.any() else None


def take_rows(observation: Observation, index: np.ndarray | slice) -> Observation:
    """Return a copy of the selected rows, or with a slice a view."""
    if isinstance(observation, dict):
        return {name: stream[index] for name, stream in observation.items()}
    return observation[index]


def with_rows(observation: Observation, index: Any, rows: Observation) -> Observation:
    """Return a copy of an observation, of arrays or tensors, with other rows at `index`."""
    if isinstance(observation, dict):
        given = streams_of(rows)
        return {name: _with_rows(stream, index, given[name]) for name, stream in observation.items()}
    return _with_rows(observation, index, rows)


def _with_rows(stream: Any, index: Any, rows: Any) -> Any:
    copied = stream.copy() if isinstance(stream, np.ndarray) else stream.clone()
    copied[index] = rows
    return copied


def copy_rows(source: Observation, target: Observation, rows: Any) -> None:
    """Copy the rows `rows` (an index array or a slice) from one observation array to the same rows of another."""
    for name, stream in streams_of(source).items():
        streams_of(target)[name][rows] = stream[rows]


# --------------------------------------------------------------------------------------------------------- actions


class ActionLayout:
    """How a batch of actions becomes what each environment takes: offsets added, Box actions clipped to their bounds.

    `space` is the policy's view: Discrete and MultiDiscrete start at 0, MultiBinary is a MultiDiscrete of twos.
    """

    def __init__(self, space: spaces.Space) -> None:
        self._start: np.ndarray | None = None
        self._low: np.ndarray | None = None
        self._high: np.ndarray | None = None
        self._is_scalar = isinstance(space, spaces.Discrete)
        self.space = space
        if isinstance(space, spaces.Box | spaces.MultiDiscrete) and (not space.shape or 0 in space.shape):
            raise InputError(f"actions of {space} hold no number; use a space of shape (1,) or more")
        if isinstance(space, spaces.Box) and space.dtype.kind == "f":
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
        """Convert a policy's actions [N, …] to the environments' own, in a new array."""
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
        """Return one action per environment: an int for Discrete, otherwise an array."""
        return prepared.tolist() if self._is_scalar else list(prepared)


# ------------------------------------------------------------------------------------------------------------- steps


@dataclass(slots=True)
class StepArrays:
    """The arrays that one step is written to; a vector environment alternates between two."""

    observation: Observation
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    num_steps: np.ndarray
    reward_terms: np.ndarray | None

    def rows(self, rows: slice) -> StepArrays:
        """Return views of some rows."""
        return StepArrays(
            take_rows(self.observation, rows),
            self.reward[rows],
            self.terminated[rows],
            self.truncated[rows],
            self.num_steps[rows],
            None if self.reward_terms is None else self.reward_terms[rows],
        )


@dataclass(slots=True)
class EnvArrays:
    """All arrays of a vector environment: two sets for steps, used in turn, and rows for final observations."""

    steps: tuple[StepArrays, StepArrays]
    final: Observation

    @classmethod
    def allocate(
        cls, layout: ObservationLayout, num_envs: int, num_terms: int = 0, allocate: Allocate = np.zeros
    ) -> EnvArrays:
        """Allocate arrays for `num_envs` environments with `num_terms` named reward terms, with `allocate`."""

        def one_step() -> StepArrays:
            return StepArrays(
                observation=layout.allocate(num_envs, allocate),
                reward=allocate((num_envs,), np.dtype(np.float32)),
                terminated=allocate((num_envs,), np.dtype(np.bool_)),
                truncated=allocate((num_envs,), np.dtype(np.bool_)),
                num_steps=allocate((num_envs,), np.dtype(np.int64)),
                reward_terms=allocate((num_envs, num_terms), np.dtype(np.float32)) if num_terms else None,
            )

        return cls((one_step(), one_step()), layout.allocate(num_envs, allocate))

    def rows(self, rows: slice) -> EnvArrays:
        """Return views of some rows."""
        return EnvArrays((self.steps[0].rows(rows), self.steps[1].rows(rows)), take_rows(self.final, rows))
