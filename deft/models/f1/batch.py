"""Builds the batches of `F1Policy` from transitions, and keeps the memory between them.

Frames and actions are aligned here: an observation's history ends with img_t and a_{t-1}; a prediction of
img_{t+1} needs [img_{t-3} … img_t] and [a_{t-3} … a_t].
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from deft import schema
from deft.errors import InputError

log = logging.getLogger(__name__)


class BatchBuilder:
    """Builds batches on a device. The observations of teacher and student have different cameras."""

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)

    def build_batch(
        self, transitions: TensorDictBase | Sequence[Mapping[str, Any]], include_memory_states: bool = True
    ) -> dict[str, Tensor]:
        """Build a batch from a TensorDict [B] or [T, B] of transitions, or from a list of mappings, one per row.

        With an `action`, the batch is for prediction: the action is appended to the history, and the next frame, if the
        transition has it, to the frames. Without, it is for acting. `memory` is the memory before the (first) step,
        [B, layers, hidden] in a transition and (layers, B, hidden) in the batch.
        """
        rows = transitions if isinstance(transitions, TensorDictBase) else _stack(transitions)
        observation = rows[schema.OBSERVATION]
        names, streams = set(rows.keys()), set(observation.keys())
        wrist = observation[schema.WRIST_RGB]
        history = observation[schema.ACTION_HISTORY]
        if schema.ACTION in names:
            history = torch.cat([history[..., 1:, :], rows[schema.ACTION].to(history).unsqueeze(-2)], -2)
            following = rows[schema.NEXT] if schema.NEXT in names else {}
            if schema.OBSERVATION in set(following.keys()):
                wrist = torch.cat([wrist, following[schema.OBSERVATION][schema.WRIST_RGB][..., -1:, :, :, :]], -4)
        num_frames = observation[schema.WRIST_RGB].shape[-4]
        if num_frames != history.shape[-2]:
            raise InputError(f"{num_frames} frames and {history.shape[-2]} actions: the histories are out of step")
        cameras = [name for name in (schema.HEAD_RGB, schema.WRIST_RGB) if name in streams]
        images = [observation[name][..., -1, :, :, :] for name in cameras]
        batch = {
            **dict(zip((schema.IMAGE0, schema.IMAGE1), images, strict=False)),
            schema.IMAGE0_HISTORY: wrist,
            schema.ACTION_HISTORY: history,
            schema.STATE: observation[schema.STATE],
        }
        if schema.INSTRUCTION in streams:
            batch[schema.INSTRUCTION] = observation[schema.INSTRUCTION]
        if include_memory_states:
            if schema.MEMORY not in names:
                raise InputError(
                    f"the transitions have no {schema.MEMORY!r}; add it, with zeros at an episode's first step"
                )
            memory = rows[schema.MEMORY]
            first = memory[0] if memory.ndim == 4 else memory  # of a sequence [T, B, layers, hidden]
            batch[schema.MEMORY_STATE] = first.transpose(0, 1).contiguous()
        return {name: value.to(self.device) for name, value in batch.items()}


class MemoryStateManager:
    """Holds the memory (layers, batch, hidden) between steps; detached, so that graphs do not grow."""

    def __init__(self) -> None:
        self._current: Tensor | None = None

    def reset(self, done: Tensor | None = None) -> None:
        """Reset the memory; with `done`, bool [batch], only set rows of ended episodes to zeros."""
        if done is None or self._current is None:
            self._current = None
            log.debug("memory state: reset")
        else:
            log.debug("memory state: rows of ended episodes reset to zeros")
            self._current = self._current.masked_fill(done.to(self._current.device)[None, :, None], 0.0)

    def update(self, memory_state: Tensor) -> None:
        """Store the memory after a step."""
        if memory_state is None:
            raise InputError("memory_state cannot be None: start with zeros (policy.initial_memory)")
        if memory_state.ndim != 3:
            raise InputError(f"memory_state has shape {tuple(memory_state.shape)}; it is (layers, batch, hidden)")
        self._current = memory_state.detach()
        log.debug("memory state: (layers, batch, hidden) = %s", tuple(memory_state.shape))

    def get_current(self) -> Tensor | None:
        """Return the memory before the next step; None before the first `update`."""
        return self._current


def _stack(transitions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Stack rows of nested mappings to one mapping of tensors."""
    if not len(transitions):
        raise InputError("a batch of no transitions")
    first = transitions[0]
    different = next((row for row in transitions if set(row.keys()) != set(first.keys())), None)
    if different is not None:
        raise InputError(f"transitions differ: {', '.join(sorted(first))} and {', '.join(sorted(different))}")
    stacked: dict[str, Any] = {}
    for name, value in first.items():
        column = [row[name] for row in transitions]
        is_nested = isinstance(value, Mapping | TensorDictBase)
        stacked[name] = _stack(column) if is_nested else torch.stack([torch.as_tensor(entry) for entry in column])
    return stacked
