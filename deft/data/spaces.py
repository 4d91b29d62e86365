"""Gymnasium spaces in Minari's JSON form, and the named streams of their observations in Deft.

The Minari reader and the recorder of `deft collect` use it.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from deft.errors import InputError, shown
from deft.plain_data import parse_bounded
from deft.schema import channels_first, channels_last, decode_text, encode_text, has_channels_last

MAX_SIZE = 2**26  # numbers in one observation or action
FIELDS = {  # of each type of space in Minari's JSON
    "Box": ("shape", "dtype", "low", "high"),
    "Discrete": ("n",),
    "MultiDiscrete": ("nvec",),
    "MultiBinary": ("n",),
    "Text": ("max_length", "min_length", "charset"),
    "Dict": ("subspaces",),
    "Tuple": ("subspaces",),
}
READABLE = "Box, Discrete, MultiDiscrete, MultiBinary, Text, and Dict or Tuple of these"


def space_to_json(space: spaces.Space, compact: bool = False) -> str:
    """Return a space in the form of Minari's metadata; `compact` writes constant bounds as one number."""
    return json.dumps(_to_plain(space, compact))


def space_from_json(text: str) -> spaces.Space:
    """Return the space of a text from `space_to_json`; raise ValueError for other texts."""
    if not isinstance(text, str):
        raise ValueError(f"{shown(text)} is not text")
    return _from_plain(parse_bounded(text, max_values=2 * MAX_SIZE))  # both bounds of each number


def _to_plain(space: spaces.Space, compact: bool = False) -> dict[str, Any]:
    if isinstance(space, spaces.Box):
        bounds = {"low": space.low.tolist(), "high": space.high.tolist()}
        if compact:
            both = {"low": space.low, "high": space.high}
            bounds |= {name: bound.flat[0].item() for name, bound in both.items() if (bound == bound.flat[0]).all()}
        return {"type": "Box", "dtype": str(space.dtype), "shape": list(space.shape), **bounds}
    if isinstance(space, spaces.Discrete):
        return {"type": "Discrete", "dtype": "int64", "start": int(space.start), "n": int(space.n)}
    if isinstance(space, spaces.MultiDiscrete):
        counts = {"nvec": space.nvec.tolist(), "start": space.start.tolist()}
        return {"type": "MultiDiscrete", "dtype": str(space.dtype), **counts}
    if isinstance(space, spaces.MultiBinary):
        return {"type": "MultiBinary", "n": space.n if isinstance(space.n, int) else np.asarray(space.n).tolist()}
    if isinstance(space, spaces.Text):
        lengths = {"max_length": space.max_length, "min_length": space.min_length}
        return {"type": "Text", **lengths, "charset": space.characters}
    if isinstance(space, spaces.Dict):
        return {"type": "Dict", "subspaces": {name: _to_plain(part, compact) for name, part in space.spaces.items()}}
    if isinstance(space, spaces.Tuple):
        return {"type": "Tuple", "subspaces": [_to_plain(part, compact) for part in space.spaces]}
    raise _unsupported(type(space).__name__)


def _from_plain(plain: Any) -> spaces.Space:
    kind = plain.get("type") if isinstance(plain, dict) else None
    if not isinstance(kind, str):
        raise ValueError(f"{shown(plain)} is not an object with a type")
    if kind not in FIELDS:
        raise _unsupported(kind)
    if missing := [field for field in FIELDS[kind] if field not in plain]:
        raise ValueError(f"a {kind} needs {missing[0]}, which is missing")
    if kind in ("Dict", "Tuple"):
        parts = plain["subspaces"]
        if not isinstance(parts, dict if kind == "Dict" else list):
            raise ValueError(f"the subspaces of a {kind} are {shown(parts)}")
        if isinstance(parts, dict):
            return spaces.Dict({name: _from_plain(part) for name, part in parts.items()})
        return spaces.Tuple([_from_plain(part) for part in parts])
    try:
        return _leaf_from_plain(kind, plain)
    except InputError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError, AssertionError):
        raise ValueError(f"{shown({key: plain[key] for key in FIELDS[kind]})} is not a valid {kind}") from None


def _leaf_from_plain(kind: str, plain: dict[str, Any]) -> spaces.Space:
    if kind == "Box":
        shape, dtype = tuple(map(operator.index, plain["shape"])), np.dtype(plain["dtype"])
        _check_size(math.prod(shape))
        if dtype.kind not in "fiub":
            raise ValueError(f"{dtype} is not a numeric type")
        low, high = (np.broadcast_to(np.array(plain[bound], dtype), shape) for bound in ("low", "high"))
        return spaces.Box(low, high, shape, dtype.type)
    if kind == "Discrete":
        _check_size(plain["n"])
        return spaces.Discrete(plain["n"], start=plain.get("start", 0))
    if kind == "MultiDiscrete":
        _check_size(int(np.sum(plain["nvec"])))
        return spaces.MultiDiscrete(plain["nvec"], start=plain.get("start"))
    if kind == "MultiBinary":
        _check_size(math.prod(np.atleast_1d(plain["n"]).tolist()))
        return spaces.MultiBinary(plain["n"])
    _check_size(plain["max_length"])
    return spaces.Text(plain["max_length"], min_length=plain["min_length"], charset=plain["charset"])


def _check_size(size: int) -> None:
    if not 0 < size <= MAX_SIZE:
        raise InputError(f"a space of {size:,} numbers is not supported; it must have 1 to {MAX_SIZE:,}")


def _unsupported(kind: str) -> InputError:
    return InputError(f"a {kind} space is not supported; Deft records and reads {READABLE}")


@dataclass(frozen=True)
class Stream:
    """One array of an observation, or the action: its position in the space, and the conversion of its values."""

    name: str  # nested names joined with a slash; empty for an observation that is one array
    path: tuple[str | int, ...]  # keys of Dicts and indices of Tuples, from the outside in
    source: spaces.Space  # of the recorded values
    space: spaces.Space  # of a row in Deft: float32, integers from 0, text as uint8, channels first

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a row."""
        return tuple(self.space.shape or ())

    def to_rows(self, values: Any) -> np.ndarray:
        """Return recorded values as rows [T, …] of `space`."""
        if isinstance(self.source, spaces.Text):
            return np.stack([encode_text(text, self.shape[0]) for text in values])
        rows = np.asarray(values)
        if self._has_channels_last and rows.ndim == 1 + len(self.shape):
            rows = np.ascontiguousarray(channels_first(rows))
        if (start := self._start) is not None:
            rows = rows - start
        return rows.astype(self.space.dtype, copy=False)

    def from_rows(self, rows: np.ndarray) -> np.ndarray | list[str]:
        """Return rows as recorded values: the inverse of `to_rows`."""
        if isinstance(self.source, spaces.Text):
            return [decode_text(row) for row in rows]
        rows = self.as_stored(rows)
        if (start := self._start) is not None:
            rows = rows + start
        return rows.astype(np.int8) if isinstance(self.source, spaces.MultiBinary) else rows

    def as_stored(self, rows: np.ndarray) -> np.ndarray:
        """Return rows with the channels of images in the source's position."""
        return channels_last(rows) if self._has_channels_last else rows

    @property
    def _has_channels_last(self) -> bool:
        return isinstance(self.source, spaces.Box) and has_channels_last(self.source.shape, self.source.dtype)

    @property
    def _start(self) -> np.ndarray | None:
        """The smallest integer of a discrete space; None if it is 0."""
        if isinstance(self.source, spaces.Discrete | spaces.MultiDiscrete) and np.any(self.source.start):
            return np.asarray(self.source.start)
        return None


def streams(space: spaces.Space) -> list[Stream]:
    """Return the arrays of an observation, with the names that the environments use."""
    return [Stream("/".join(map(str, path)), path, leaf, _row_space(leaf)) for path, leaf in _leaves(space)]


def stream_space(parts: Sequence[Stream]) -> spaces.Space:
    """Return the space of named streams, or of a single array."""
    if len(parts) == 1 and not parts[0].path:
        return parts[0].space
    return spaces.Dict({part.name: part.space for part in parts})


def action_stream(space: spaces.Space) -> Stream:
    """Return the action as a stream; it must be one array."""
    if isinstance(space, spaces.MultiBinary):
        return Stream("", (), space, spaces.MultiDiscrete(np.full(space.shape, 2)))
    if not isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete):
        raise InputError(
            f"actions of a {type(space).__name__} space are not supported; Deft supports Box, Discrete, MultiDiscrete "
            "and MultiBinary"
        )
    return Stream("", (), space, _row_space(space))


def union(one: spaces.Space, other: spaces.Space, name: str) -> spaces.Space:
    """Return the smallest space that contains both; raise InputError if they differ in more than their bounds."""
    if isinstance(one, spaces.Dict) and isinstance(other, spaces.Dict) and one.keys() == other.keys():
        return spaces.Dict({key: union(one[key], other[key], f"{name}[{key!r}]") for key in one})
    if isinstance(one, spaces.Text) and isinstance(other, spaces.Text):
        longest, shortest = max(one.max_length, other.max_length), min(one.min_length, other.min_length)
        return spaces.Text(
            longest, min_length=shortest, charset="".join(sorted(one.character_set | other.character_set))
        )
    if isinstance(one, spaces.Box) and isinstance(other, spaces.Box):
        if (one.shape, one.dtype) == (other.shape, other.dtype):
            return spaces.Box(np.minimum(one.low, other.low), np.maximum(one.high, other.high), dtype=one.dtype.type)
    elif one == other:
        return one
    raise InputError(f"{name} is {_summary(other)}, and in earlier episodes {_summary(one)}")


def _summary(space: spaces.Space) -> str:
    if isinstance(space, spaces.Dict):
        return f"a dict of {', '.join(map(str, space))}"
    return f"{space.dtype} of shape {space.shape}" if isinstance(space, spaces.Box) else str(space)


def recorded_space(space: spaces.Space) -> spaces.Space:
    """Return the space in which an environment's values are recorded: floats as float32, images unchanged."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({name: recorded_space(part) for name, part in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([recorded_space(part) for part in space.spaces])
    is_float = isinstance(space, spaces.Box) and space.dtype.kind == "f"
    return _row_space(space) if is_float else space


def _leaves(space: spaces.Space, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        yield path, space
        return
    parts: Any = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
    for name, part in parts:
        yield from _leaves(part, (*path, name))


def _row_space(space: spaces.Space) -> spaces.Space:
    """Return the space of Deft's rows, which is also that of the vector environments."""
    if isinstance(space, spaces.Box):
        if has_channels_last(space.shape, space.dtype):
            return spaces.Box(channels_first(space.low), channels_first(space.high), dtype=np.uint8)
        if space.dtype.kind != "f" or space.dtype == np.float32:
            return space
        with np.errstate(over="ignore"):  # bounds beyond float32 become infinite
            return spaces.Box(space.low.astype(np.float32), space.high.astype(np.float32), dtype=np.float32)
    if isinstance(space, spaces.Discrete):
        return spaces.Discrete(int(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        return spaces.MultiDiscrete(space.nvec)
    if isinstance(space, spaces.MultiBinary):
        return spaces.Box(0, 1, space.shape, np.float32)
    if isinstance(space, spaces.Text):
        length = space.max_length * max(len(character.encode()) for character in space.character_set)
        return spaces.Box(0, 255, (length,), np.uint8)
    raise _unsupported(type(space).__name__)
