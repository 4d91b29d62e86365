"""The messages between `deft serve` and its clients: JSON with arrays as base64, without pickles.

A client sends one JSON object per step; `decode` reads it, and every value in it is checked. Arrays are
`{"dtype": "uint8", "shape": [64, 64, 3], "data": BASE64}` (C order, little-endian) or nested lists of numbers.
"""

from __future__ import annotations

import binascii
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from deft.errors import DeftError, InputError, shown
from deft.plain_data import parse_bounded

KEYS = ("observation", "reward", "reset", "id")
ARRAY_KEYS = {"dtype", "shape", "data"}
DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
MAX_DIMS = 8
MAX_ERROR = 400  # characters of an error, which may quote what a client sent


@dataclass(frozen=True)
class Message:
    """What a client sent."""

    observation: Any = None
    reward: float | None = None
    reset: bool = False
    id: str | int | None = None
    """Returned with the answer."""


def decode(text: str | bytes) -> Message:
    """Read a message; raise an InputError that describes the first mistake in it."""
    try:
        content = parse_bounded(text if isinstance(text, str) else text.decode("utf-8"), _parse)
    except (ValueError, MemoryError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"the message is not JSON that can be read: {reason}") from None
    if not isinstance(content, dict):
        raise InputError(f"the message is {shown(content)}; send an object with {', '.join(KEYS)}")
    if unknown := [key for key in content if key not in KEYS]:
        raise InputError(f"the message has the unknown key {shown(unknown[0])}; use {', '.join(KEYS)}")
    name, reset, reward = content.get("id"), content.get("reset", False), content.get("reward")
    if isinstance(name, bool) or not (name is None or isinstance(name, int | str)) or len(str(name)) > 100:
        raise InputError(f"id {shown(name)} is not an integer or a text of at most 100 characters")
    if not isinstance(reset, bool):
        raise InputError(f"reset {shown(reset)} is not true or false")
    if reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float)):
        raise InputError(f"reward {shown(reward)} is not a number")
    if "observation" not in content and not reset:
        raise InputError('the message has no observation; send {"observation": …} or {"reset": true}')
    return Message(_decode_value("observation", content.get("observation")), reward, reset, name)


def _parse(text: str) -> Any:
    return json.loads(text, parse_constant=_reject_constant)


def _reject_constant(word: str) -> Any:
    raise ValueError(f"{word} is not a finite number")


def _decode_value(where: str, value: Any) -> Any:
    """Return a value of an observation as an array, a text, or a dict of them."""
    if value is None and where == "observation":
        return None
    if isinstance(value, dict):
        if set(value) == ARRAY_KEYS:
            return _decode_array(where, value)
        return {name: _decode_value(f"{where}/{shown(name)}", part) for name, part in value.items()}
    if isinstance(value, str):
        if not value.isprintable() and any(0xD800 <= ord(char) <= 0xDFFF for char in value):
            raise InputError(f"{where} is not text that can be encoded as UTF-8")
        return value
    try:
        array = np.asarray(value)
    except ValueError:
        raise InputError(f"{where} is a list of lists of different lengths") from None
    if array.dtype.kind not in "biuf":
        raise InputError(f"{where} holds values that are not numbers: {shown(value)}")
    if array.dtype == np.int64 and array.size and array.min() >= 0 and array.max() <= 255:
        return array.astype(np.uint8)  # which may be an image; it is converted without loss to any other type
    return array


def _decode_array(where: str, value: Mapping[str, Any]) -> np.ndarray:
    name, shape, data = value["dtype"], value["shape"], value["data"]
    if name not in DTYPES:
        raise InputError(f"{where}: dtype {shown(name)} is not one of {', '.join(DTYPES)}")
    is_shape = isinstance(shape, list) and len(shape) <= MAX_DIMS
    if not is_shape or not all(isinstance(size, int) and 0 <= size <= 2**31 for size in shape):
        raise InputError(f"{where}: shape {shown(shape)} is not a list of at most {MAX_DIMS} sizes")
    dtype = np.dtype(name).newbyteorder("<")
    try:
        content = binascii.a2b_base64(data, strict_mode=True)
    except (TypeError, ValueError):
        raise InputError(f"{where}: data {shown(data)} is not base64") from None
    if len(content) != math.prod(shape) * dtype.itemsize:
        raise InputError(
            f"{where}: data has {len(content):,} bytes; {name} of shape {shape} has "
            f"{math.prod(shape) * dtype.itemsize:,}"
        )
    if name == "bool" and any(byte > 1 for byte in set(content)):
        raise InputError(f"{where}: bytes of bool are 0 or 1")
    return np.frombuffer(content, dtype).reshape(shape)


def encode(answer: Mapping[str, Any]) -> str:
    """Return an answer as JSON; arrays become nested lists, from which numpy makes the same bits again."""
    return json.dumps({key: _plain(value) for key, value in answer.items()}, allow_nan=False)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def error_answer(error: DeftError) -> dict[str, Any]:
    """Return the answer to a message that was rejected."""
    text = str(error)
    return {"error": text if len(text) <= MAX_ERROR else f"{text[: MAX_ERROR - 1]}…"}
