"""The state of an environment as plain data, so that a resumed run continues bit for bit.

`EnvSlot` calls it for checkpoints. No foreign object is pickled: each layer of an environment (its wrappers, then
itself) is saved by its own `get_state` if it has one, otherwise attribute by attribute: plain data, numpy arrays,
random generators and MuJoCo data. Any other attribute is either known not to be state (specs, functions, renderers)
or an obstacle that the error message names.
"""

from __future__ import annotations

import inspect
import zlib
from collections import deque
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec

from deft.errors import DeftError, InputError, RunError

# Attributes that describe an environment and are equal in a new one: constructor arguments and metadata.
_DESCRIPTIONS = {"metadata", "_metadata", "_saved_kwargs", "_ezpickle_args", "_ezpickle_kwargs"}
# Modules of renderers, windows and cameras, which hold no state.
_DISPLAY_MODULES = ("pygame", "glfw", "gymnasium.envs.mujoco.mujoco_rendering", "mujoco.renderer", "mujoco.rendering")
_DISPLAY_TYPES = {"MjvCamera", "MjvOption", "MjvScene", "MjrContext", "GLContext"}


_COLLECTIONS: dict[str, Any] = {"__list__": list, "__set__": set, "__deque__": deque}


class StateObstacle(DeftError):
    """An environment whose state cannot be saved; the message names the attribute."""


# ------------------------------------------------------------------------------------------------ values as plain data


def encode(value: Any) -> Any:
    """Convert a value to plain data that `torch.load(weights_only=True)` reads; raise StateObstacle if impossible."""
    return _Encoder().encode(value)


def decode(data: Any) -> Any:
    """Convert the result of `encode` back."""
    return _Decoder().decode(data)


def _to_text(data: bytes) -> str:
    """Convert bytes to a string of the same length: `weights_only` accepts all strings, but not all bytes."""
    return data.decode("latin-1")


def _to_bytes(text: str) -> bytes:
    return text.encode("latin-1")


class _Encoder:
    """Encodes values; an object that occurs twice is written once, and is one object again after decoding."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, Any]] = {}  # id -> number, and the object itself so that its id stays unique
        self._memory: list[tuple[int, int]] = []

    def encode(self, value: Any) -> Any:
        """Convert one value."""
        if value is None or type(value) in (bool, float, str):
            return value
        if type(value) is bytes:
            return {"__bytes__": _to_text(value)}
        if type(value) is int:
            return value if -(2**63) <= value < 2**63 else {"__int__": str(value)}
        if isinstance(value, np.generic) and value.dtype.kind != "O":
            return {"__scalar__": _to_text(value.tobytes()), "dtype": value.dtype.str}
        if type(value) is tuple:
            return {"__tuple__": [self.encode(item) for item in value]}
        if id(value) in self._seen:
            return {"__same__": self._seen[id(value)][0]}
        number = len(self._seen)
        self._seen[id(value)] = (number, value)
        return {"__new__": number, "value": self._encode_object(value)}

    def _encode_object(self, value: Any) -> Any:
        if type(value) is np.ndarray and value.dtype.kind not in "OV":
            self._check_memory(value)
            return {"__array__": _to_text(value.tobytes()), "dtype": value.dtype.str, "shape": list(value.shape)}
        for key, kind in _COLLECTIONS.items():
            if type(value) is kind:
                items = sorted(value, key=repr) if kind is set else value
                size = {"maxlen": value.maxlen} if kind is deque else {}
                return {key: [self.encode(item) for item in items], **size}
        if isinstance(value, dict) and type(value).__name__ in ("dict", "OrderedDict"):
            return {"__dict__": [[self.encode(key), self.encode(item)] for key, item in value.items()]}
        if isinstance(value, np.random.Generator):
            return {"__generator__": encode(value.bit_generator.state)}
        raise StateObstacle(f"a {type(value).__module__}.{type(value).__qualname__}")

    def _check_memory(self, array: np.ndarray) -> None:
        """Raise StateObstacle for arrays that share memory: after a restore they would not."""
        owner: Any = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        if owner.base is not None and not isinstance(owner.base, bytes):
            raise StateObstacle(f"a view of memory that a {type(owner.base).__name__} owns")
        low, high = np.lib.array_utils.byte_bounds(array)
        if any(low < other_high and other_low < high for other_low, other_high in self._memory):
            raise StateObstacle("an array that shares its memory with another attribute")
        if array.size:
            self._memory.append((low, high))


class _Decoder:
    """Decodes what one `_Encoder` wrote, in the same order."""

    def __init__(self) -> None:
        self._objects: dict[int, Any] = {}

    def decode(self, data: Any) -> Any:
        """Convert one value."""
        if not isinstance(data, dict):
            return data
        if "__new__" in data:
            value = self._decode_object(data["value"])
            self._objects[data["__new__"]] = value
            return value
        if "__same__" in data:
            return self._objects[data["__same__"]]
        if "__int__" in data:
            return int(data["__int__"])
        if "__scalar__" in data:
            return np.frombuffer(_to_bytes(data["__scalar__"]), np.dtype(data["dtype"]))[0]
        if "__bytes__" in data:
            return _to_bytes(data["__bytes__"])
        return tuple(self.decode(item) for item in data["__tuple__"])

    def _decode_object(self, data: dict[str, Any]) -> Any:
        if "__array__" in data:
            flat = np.frombuffer(_to_bytes(data["__array__"]), np.dtype(data["dtype"]))
            return flat.reshape(data["shape"]).copy()
        for key, kind in _COLLECTIONS.items():
            if key in data:
                items = [self.decode(item) for item in data[key]]
                return deque(items, data["maxlen"]) if kind is deque else kind(items)
        if "__dict__" in data:
            return {self.decode(key): self.decode(item) for key, item in data["__dict__"]}
        state = decode(data["__generator__"])
        bit_generator = getattr(np.random, state["bit_generator"])()
        bit_generator.state = state
        return np.random.Generator(bit_generator)


# --------------------------------------------------------------------------------------------------------- environments


def save_state(env: gymnasium.Env) -> dict[str, Any]:
    """Return the state of an environment and its wrappers as plain data; raise StateObstacle if impossible."""
    encoder = _Encoder()
    return {"layers": [_save_layer(layer, encoder) for layer in _stateful_layers(env)]}


def restore_state(env: gymnasium.Env, state: dict[str, Any]) -> None:
    """Restore a saved state in an environment, new or used."""
    present = _stateful_layers(env)
    saved, found = [layer["type"] for layer in state["layers"]], [type(layer).__name__ for layer in present]
    if saved != found:
        raise InputError(f"the saved state is of {'<'.join(saved)}, the environment is {'<'.join(found)}")
    env.reset(seed=0)  # creates everything that an environment makes in its first reset
    decoder = _Decoder()
    for layer, layer_state in zip(present, state["layers"], strict=True):
        _restore_layer(layer, layer_state, decoder)


def state_obstacle(env: gymnasium.Env) -> str | None:
    """Explain in one line why the state cannot be saved; None if it can."""
    try:
        save_state(env)
    except StateObstacle as obstacle:
        return str(obstacle)
    return None


def layers(env: gymnasium.Env) -> Iterator[gymnasium.Env]:
    """Yield the wrappers of an environment from the outermost inwards, then the environment itself."""
    while isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env
    yield env


def _stateful_layers(env: gymnasium.Env) -> list[gymnasium.Env]:
    return [layer for layer in layers(env) if not getattr(type(layer), "is_stateless", False)]


def _saves_itself(layer: gymnasium.Env) -> bool:
    """Return whether the layer has `get_state()` and `set_state(state)` with these arguments."""

    def num_required(name: str) -> int:
        parameters = list(inspect.signature(getattr(type(layer), name)).parameters.values())[1:]
        return sum(parameter.default is parameter.empty for parameter in parameters)

    has_both = hasattr(type(layer), "get_state") and hasattr(type(layer), "set_state")
    return has_both and num_required("get_state") == 0 and num_required("set_state") == 1


def _save_layer(layer: gymnasium.Env, encoder: _Encoder) -> dict[str, Any]:
    name = type(layer).__name__
    saved: dict[str, Any] = {"type": name, "attributes": {}}
    if _saves_itself(layer):
        try:
            own = layer.get_state()  # type: ignore[attr-defined]
        except StateObstacle as obstacle:
            raise StateObstacle(f"{name} has {obstacle}") from None
        try:
            saved["own"] = encoder.encode(own)
        except StateObstacle as obstacle:
            raise StateObstacle(f"{name}.get_state() returned {obstacle}, which is not plain data") from None
        random = (np.random.Generator, gymnasium.Space)
        attributes = {key: value for key, value in vars(layer).items() if isinstance(value, random)}
    else:
        attributes = vars(layer)
    for key, value in attributes.items():
        if key in _DESCRIPTIONS:
            continue
        try:
            if _is_mujoco(value, "MjData"):
                saved["attributes"][key] = {"__mjdata__": encode(_save_mujoco(value))}
            elif _is_mujoco(value, "MjModel"):
                saved["attributes"][key] = {"__mjmodel__": _model_checksum(value)}
            elif isinstance(value, gymnasium.Space):
                generators = [space._np_random for space in _spaces(value)]
                saved["attributes"][key] = {"__space__": encode(generators)}
            elif not _is_no_state(value):
                saved["attributes"][key] = encoder.encode(value)
        except StateObstacle as obstacle:
            raise StateObstacle(
                f"attribute {key!r} of {name} holds {obstacle}; give {name} get_state() and set_state(state)"
            ) from None
    return saved


def _restore_layer(layer: gymnasium.Env, saved: dict[str, Any], decoder: _Decoder) -> None:
    attributes = vars(layer)
    if "own" in saved:
        layer.set_state(decoder.decode(saved["own"]))  # type: ignore[attr-defined]
    for key, data in saved["attributes"].items():
        present = attributes.get(key)
        if isinstance(data, dict) and "__mjdata__" in data:
            _restore_mujoco(present, decode(data["__mjdata__"]))
        elif isinstance(data, dict) and "__mjmodel__" in data:
            if _model_checksum(present) != data["__mjmodel__"]:
                raise RunError(
                    f"{type(layer).__name__} changes its MuJoCo model while running, so its state cannot be restored; "
                    "give it get_state() and set_state(state)"
                )
        elif isinstance(data, dict) and "__space__" in data:
            for space, generator in zip(_spaces(present), decode(data["__space__"]), strict=True):
                space._np_random = generator
        else:
            value = decoder.decode(data)
            if isinstance(value, np.random.Generator) and isinstance(present, np.random.Generator):
                present.bit_generator.state = value.bit_generator.state  # other objects may refer to this generator
            else:
                attributes[key] = value


def _spaces(space: Any) -> Iterator[gymnasium.Space]:
    """Yield a space and its parts: each has its own random generator."""
    yield space
    parts = getattr(space, "spaces", ())
    for part in parts.values() if isinstance(parts, dict) else parts:
        yield from _spaces(part)


def _is_no_state(value: Any) -> bool:
    """Return whether a value is known not to be state: specs, functions, renderers."""
    if isinstance(value, (gymnasium.Env, EnvSpec, ModuleType, np.dtype)) or callable(value):
        return True
    if isinstance(value, (list, tuple)) and len(value) > 0:
        return all(_is_no_state(item) for item in value)
    module = type(value).__module__
    return module.startswith(_DISPLAY_MODULES) or (
        module.startswith("mujoco") and type(value).__name__ in _DISPLAY_TYPES
    )


# --------------------------------------------------------------------------------------------------------------- MuJoCo


def _is_mujoco(value: Any, name: str) -> bool:
    return type(value).__name__ == name and type(value).__module__.startswith("mujoco")


def _model_checksum(model: Any) -> int:
    import mujoco

    buffer = np.zeros(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, buffer)
    return zlib.crc32(buffer.tobytes())


def _mujoco_arrays(data: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the arrays of fixed size. Those of contacts and constraints vary; every step computes them."""
    import mujoco

    empty = mujoco.MjData(data.model)
    for name in sorted(dir(type(data))):
        if name.startswith("_"):
            continue
        array: Any = getattr(data, name, None)
        is_plain = isinstance(array, np.ndarray) and array.size > 0 and array.flags.writeable
        if is_plain and np.shape(getattr(empty, name)) == array.shape:
            yield name, array


def _save_mujoco(data: Any) -> dict[str, Any]:
    """Return the integration state and the arrays computed from the state before the last integration.

    `mj_step` leaves positions and forces of the state it started from. A reward may read them, and they differ from
    those computed from the saved state.
    """
    import mujoco

    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    state = np.empty(mujoco.mj_stateSize(data.model, kind))
    mujoco.mj_getState(data.model, data, state, kind)
    return {"state": state, "arrays": {name: array.copy() for name, array in _mujoco_arrays(data)}}


def _restore_mujoco(data: Any, saved: dict[str, Any]) -> None:
    import mujoco

    mujoco.mj_resetData(data.model, data)
    mujoco.mj_setState(data.model, data, saved["state"], mujoco.mjtState.mjSTATE_INTEGRATION)
    mujoco.mj_forward(data.model, data)
    for name, array in saved["arrays"].items():
        getattr(data, name)[...] = array
