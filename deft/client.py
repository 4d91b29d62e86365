"""A client of `deft serve` for a robot: numpy and websockets only, no torch. This file can be copied to the robot.

with PolicyClient("ws://127.0.0.1:6080/act") as policy:
    policy.reset()
    action = policy.get_action({"rgb": image, "proprio": vector, "instruction": "pick up the cube"})
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import numpy as np
from websockets.sync.client import connect


class PolicyError(Exception):
    """The server rejected a message; the connection stays open."""


class PolicyClient:
    """A connection to a policy server, with the methods of `deft.load_policy`."""

    def __init__(self, address: str = "ws://127.0.0.1:6080/act", timeout: float = 10.0) -> None:
        """Connect; `timeout` is the most seconds that an answer may take. `address` may end with `?mode=chunk`."""
        self._timeout = timeout
        self._stack = contextlib.ExitStack()
        self._socket = self._stack.enter_context(
            connect(address, compression=None, max_size=2**26, open_timeout=timeout)
        )
        self.schema: dict[str, Any] = self._receive()["schema"]
        """What observations and actions are."""

    def reset(self) -> None:
        """Begin an episode: the memory is empty, and the rest of a chunk is dropped."""
        self._send({"reset": True})

    def get_action(self, observation: Any, reward: float | None = None) -> np.ndarray:
        """The action for one observation, an array or a dict of streams; in mode `chunk` all actions of the chunk."""
        answer = self._send({"observation": encode(observation), "reward": reward})
        actions = answer["action"] if "action" in answer else answer["actions"]
        return np.asarray(actions, self.schema["action"]["dtype"])

    def close(self) -> None:
        """Close the connection."""
        self._stack.close()

    def __enter__(self) -> PolicyClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, message: Mapping[str, Any]) -> dict[str, Any]:
        self._socket.send(json.dumps(message))
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._socket.recv(self._timeout))
        if "error" in answer:
            raise PolicyError(answer["error"])
        return answer


def encode(value: Any) -> Any:
    """Return a value of an observation as JSON: text as it is, arrays as base64."""
    if isinstance(value, Mapping):
        return {name: encode(part) for name, part in value.items()}
    if isinstance(value, str):
        return value
    array = np.asarray(value)
    data = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": base64.b64encode(data).decode()}
