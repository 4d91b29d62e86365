"""The last frames and actions of an episode, and the inputs and targets of a world model.

`F1RLEnv` owns a `History`. Trainers of world models call `prediction_pair` with consecutive observations; policies that
predict the next frame for an action call `prediction_inputs`. Both take numpy arrays and torch tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from deft import schema
from deft.errors import InputError

CAMERAS = (schema.HEAD_RGB, schema.WRIST_RGB)


class History:
    """The last frames and actions of an episode: H of each, every `stride` steps.

    At time t the frames are img_{t-(H-1)s} … img_{t-s}, img_t and the actions a_{t-Hs} … a_{t-s}. With a_t added and
    the oldest dropped they are the actions taken at the times of the frames. Both rings hold H·s entries. At the start
    of an episode all frames are the first one, and all actions are zeros.
    """

    def __init__(self, length: int, stride: int, action_size: int) -> None:
        if length < 1 or stride < 1:
            raise InputError(f"a history of {length} steps with a stride of {stride}: choose at least 1 for both")
        self.length = length
        self.stride = stride
        self._action_size = action_size
        self._frames: dict[str, deque[np.ndarray]] = {}
        self._actions: deque[np.ndarray] = deque(maxlen=length * stride)

    def start(self, frames: Mapping[str, np.ndarray]) -> None:
        """Start an episode with these frames, one per camera."""
        size = self.length * self.stride
        self._frames = {name: deque([frame.copy()] * size, maxlen=size) for name, frame in frames.items()}
        self._actions.extend([np.zeros(self._action_size, np.float32)] * size)

    def add(self, action: np.ndarray, frames: Mapping[str, np.ndarray]) -> None:
        """Add an action and the frames after it."""
        self._actions.append(np.array(action, np.float32))
        for name, ring in self._frames.items():
            ring.append(frames[name].copy())

    def frames(self) -> dict[str, np.ndarray]:
        """Return uint8 [H, 3, h, w] per camera, oldest first."""
        found = {name: np.stack(list(ring)[self.stride - 1 :: self.stride]) for name, ring in self._frames.items()}
        for images in found.values():
            assert len(images) == self.length, "Image history length mismatch"
        return found

    def actions(self) -> np.ndarray:
        """Return float32 [H, A], oldest first."""
        actions = np.stack(list(self._actions)[:: self.stride])
        assert len(actions) == self.length, "Action history length mismatch"
        return actions

    def get_state(self) -> dict[str, Any]:
        """Return both rings as plain data."""
        return {
            "frames": {name: np.stack(list(ring)) for name, ring in self._frames.items()},
            "actions": np.stack(list(self._actions)) if self._actions else None,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        size = self.length * self.stride
        self._frames = {name: deque(images.copy(), maxlen=size) for name, images in state["frames"].items()}
        self._actions = deque(() if state["actions"] is None else state["actions"].copy(), maxlen=size)


def executed_action(action: Any, action_mask: Any) -> Any:
    """Return the executed part of an action [..., 32]: clipped to [-1, 1], zeros in the padding."""
    return action.clip(-1.0, 1.0) * action_mask + 0.0  # no negative zeros


def prediction_inputs(observation: Any, action: Any) -> dict[str, Any]:
    """Return the inputs for predicting img_{t+1}: observation t, with its action history shifted to end with a_t.

    img_{t-3} … img_t are the observation's frames; a_{t-3} … a_t its actions without the oldest, and `action`. Leading
    dims are equal in all ([B], [T, N], none). `action` is the executed one: see `executed_action`.
    """
    history = observation[schema.ACTION_HISTORY]
    if tuple(action.shape) != (*history.shape[:-2], history.shape[-1]):
        raise InputError(f"action {tuple(action.shape)} does not fit the action history {tuple(history.shape)}")
    moved = history.copy() if isinstance(history, np.ndarray) else history.clone()
    moved[..., :-1, :] = history[..., 1:, :]
    moved[..., -1, :] = action
    names = set(observation.keys())  # a TensorDict has no `in`
    inputs = {name: observation[name] for name in (schema.STATE, *CAMERAS) if name in names}
    for name in CAMERAS:
        if name in inputs:
            num_frames, num_actions = inputs[name].shape[-4], moved.shape[-2]
            assert num_frames == num_actions, f"{name} has {num_frames} frames for {num_actions} actions"
    return {**inputs, schema.ACTION_HISTORY: moved}


def prediction_pair(observation: Any, action: Any, next_observation: Any) -> tuple[dict[str, Any], Any]:
    """Return a world model's input and target: ([img_{t-3} … img_t], [a_{t-3} … a_t], s_t) and the wrist's img_{t+1}.

    `next_observation` is the one after `action`: at the end of an episode the final one, not the next episode's first.
    """
    return prediction_inputs(observation, action), next_observation[schema.WRIST_RGB][..., -1, :, :, :]
