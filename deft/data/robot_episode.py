"""One episode of a robot, in numpy or torch: what it saw, where it was, what it did.

Importing this does not import torch: the processes that collect episodes use it too.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from deft.errors import InputError


@dataclass
class RobotEpisode:
    """One episode of T steps, arrays or tensors: action t leads from frame t to frame t + 1."""

    wrist: Any  # uint8 [T + 1, 3, h, w]: the frames that are predicted
    state: Any  # float32 [T + 1, S]
    action: Any  # float32 [T, A], as executed
    head: Any = None  # uint8 [T + 1, 3, h, w], where there is such a camera
    codes: Any = None  # int [T + 1, L]: the wrist's frames as a tokenizer codes them
    number: int = 0  # which episode it is of its source

    def __post_init__(self) -> None:
        length = len(self.action)
        for name in ("wrist", "head", "state", "codes"):
            value = getattr(self, name)
            if value is not None and len(value) != length + 1:
                raise InputError(f"an episode of {length} actions has {len(value)} of {name}; one more is needed")
        if length < 1:
            raise InputError("an episode needs at least one action")

    def __len__(self) -> int:
        """Steps."""
        return len(self.action)

    def streams(self) -> dict[str, Any]:
        """What is there of it by name."""
        named = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "number"}
        return {name: value for name, value in named.items() if value is not None}
