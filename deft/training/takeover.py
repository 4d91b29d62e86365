"""A person takes over an environment in the live view: their actions replace the policy's, and are marked.

`Collector.takeover` is one, in algorithms whose settings have `takeover`. Nothing changes while nobody watches.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from deft import schema
from deft.data.tensors import to_numpy
from deft.envs.layout import Observation
from deft.envs.vector import VectorEnv, VectorStep
from deft.errors import InputError
from deft.runs.live import camera_images, instructions
from deft.runs.operator import MOST_NUMBERS, Command, Operator

NAMES_METHOD = "action_names"  # of an environment: what its action dims move


def action_names(env: VectorEnv) -> list[str]:
    """Return the names of the action dims, those of the environment or numbers; raise an error for other actions."""
    space = env.action_space
    if not isinstance(space, spaces.Box) or not (np.isfinite(space.low) & np.isfinite(space.high)).all():
        raise InputError(f"takeover: a person moves numbers within bounds, and the environment acts in {space}")
    size = space.shape[-1]
    if size > MOST_NUMBERS:
        raise InputError(f"takeover: {size} action dims are too many for a keyboard; at most {MOST_NUMBERS}")
    try:
        names = list(env.call(NAMES_METHOD)[0])
    except InputError:
        names = []
    return names if len(names) == size else [f"dim {number}" for number in range(size)]


class Takeover:
    """Replaces actions by those of a person, shows what they see, and slows the environments down meanwhile."""

    def __init__(self, env: VectorEnv, operator: Operator) -> None:
        assert isinstance(env.action_space, spaces.Box)
        self._env, self._operator = env, operator
        low, high = env.action_space.low, env.action_space.high
        self._center, self._half = (high + low) / 2, (high - low) / 2
        self._command: Command | None = None
        self._executed: np.ndarray | None = None
        self._num_episodes = 0
        self._success: bool | None = None

    def intervene(self, row: dict[Any, Any]) -> np.ndarray | None:
        """Put the person's action into a step's row, with `schema.INTERVENTION`; return which were replaced, bool [N].

        None if nobody acts. A chunk repeats the action.
        """
        self._command = command = self._operator.poll()
        self._executed = None
        if command is None:
            return None
        if command.action is None:
            self._executed = _row(row[schema.ACTION], command.env)
            return None
        marks = np.zeros(self._env.num_envs, bool)
        marks[command.env] = True
        action = (self._center + np.asarray(command.action) * self._half).astype(np.float32)
        self._executed = action
        actions = row[schema.ACTION]
        if isinstance(actions, Tensor):
            actions = actions.clone()
            actions[command.env] = torch.as_tensor(action, dtype=actions.dtype, device=actions.device)
        else:
            actions = np.array(actions)
            actions[command.env] = action
        row[schema.ACTION] = actions
        row[schema.INTERVENTION] = np.asarray(row.get(schema.INTERVENTION, marks)) | marks
        return marks

    def after(self, step: VectorStep) -> None:
        """Show the watched environment after a step, and keep the pace."""
        command = self._command
        if command is None:
            self._operator.rest()
            return
        for episode in step.episodes:
            if episode.env_index == command.env:
                self._num_episodes, self._success = self._num_episodes + 1, episode.success
        assert self._executed is not None
        unit = (self._executed - self._center) / np.maximum(self._half, 1e-9)
        self._operator.show(
            self._image(step.observation, command.env),
            env=command.env,
            acts="person" if command.action is not None else "policy",
            action=np.round(unit.reshape(-1, unit.shape[-1])[0].astype(float), 3).tolist(),
            text=next(iter(instructions(_stream_rows(step.observation, command.env))), ""),
            episodes=self._num_episodes,
            success=self._success,
        )
        self._operator.pace(int(step.num_steps[command.env]))

    def close(self) -> None:
        """Withdraw the offer to take over."""
        self._operator.close()

    def _image(self, observation: Observation, index: int) -> np.ndarray | None:
        """An image of an environment: rendered, or of its cameras side by side."""
        image = self._env.render(index)
        if image is not None:
            return image
        cameras = camera_images(_stream_rows(observation, index))
        if not cameras:
            return None
        height = min(rows.shape[1] for rows in cameras.values())
        return np.concatenate([rows[0, :height] for rows in cameras.values()], 1)


def _row(values: Any, index: int) -> np.ndarray:
    return np.array(to_numpy(values[index]) if isinstance(values, Tensor) else values[index], dtype=np.float32)


def _stream_rows(observation: Any, index: int) -> Any:
    """The row of one environment of an observation, [1, …]."""
    if isinstance(observation, dict):
        return {name: stream[index : index + 1] for name, stream in observation.items()}
    return observation[index : index + 1]
