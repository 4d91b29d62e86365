"""One recorded episode of a robot with cameras, in NumPy or torch.

This module does not import torch: the processes that collect episodes use it too.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from deft.errors import InputError


@dataclass
class RobotEpisode:
    """One episode of T steps, as arrays or tensors: action t leads from frame t to frame t + 1."""

    wrist: Any  # uint8 [T + 1, 3, h, w]: the frames that a world model predicts
    state: Any  # float32 [T + 1, S]
    action: Any  # float32 [T, A], as executed
    head: Any = None  # uint8 [T + 1, 3, h, w], if there is a head camera
    codes: Any = None  # int [T + 1, L]: the tokens of the wrist frames
    number: int = 0  # index of the episode in its source

    def __post_init__(self) -> None:
        length = len(self.action)
        for name in ("wrist", "head", "state", "codes"):
            value = getattr(self, name)
            if value is not None and len(value) != length + 1:
                raise InputError(
                    f"{name} has {len(value)} rows in an episode of {length} actions; it needs {length + 1}"
                )
        if length < 1:
            raise InputError("an episode needs at least one action")

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self.action)

    def streams(self) -> dict[str, Any]:
        """Return the arrays that are present, by name."""
        named = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "number"}
        return {name: value for name, value in named.items() if value is not None}
