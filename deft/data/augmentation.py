"""Colours and places changed alike in all pictures of an episode: a world model learns motion, not scenes by heart."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from deft.data.robot_episode import RobotEpisode


def colour_tables(generator: np.random.Generator, strength: float) -> np.ndarray:
    """uint8 [3, 256]: for each channel what every level becomes, (v^γ) · gain + offset."""
    gamma = np.exp(generator.uniform(-strength, strength))
    gain = np.exp(generator.uniform(-strength, strength, (3, 1)) + generator.uniform(-strength, strength))
    offset = generator.uniform(-strength, strength, (3, 1)) / 4
    levels = (np.arange(256) / 255.0) ** gamma * gain + offset
    return np.clip(np.rint(levels * 255.0), 0, 255).astype(np.uint8)


def recoloured(episode: RobotEpisode, generator: np.random.Generator, strength: float) -> RobotEpisode:
    """The episode in other colours, the same in all frames of both cameras; its codes must be made anew."""
    if strength == 0:
        return episode
    tables = colour_tables(generator, strength)

    def change(frames: np.ndarray) -> np.ndarray:
        return np.stack([tables[channel][frames[:, channel]] for channel in range(3)], 1)

    return _with_pictures(episode, change)


def shifted(episode: RobotEpisode, generator: np.random.Generator, pixels: int) -> RobotEpisode:
    """The episode moved by up to `pixels`, alike in all frames of a camera; edges are repeated. Codes are made anew."""
    if pixels == 0:
        return episode

    def change(frames: np.ndarray) -> np.ndarray:
        height, width = frames.shape[-2:]
        down, right = generator.integers(-pixels, pixels + 1, 2)
        rows = np.clip(np.arange(height) + down, 0, height - 1)
        return np.ascontiguousarray(frames[..., rows[:, None], np.clip(np.arange(width) + right, 0, width - 1)])

    return _with_pictures(episode, change)


def _with_pictures(episode: RobotEpisode, change: Callable[[np.ndarray], np.ndarray]) -> RobotEpisode:
    """The episode with the frames of each camera changed, and without codes."""
    head = None if episode.head is None else change(episode.head)
    return dataclasses.replace(episode, wrist=change(episode.wrist), head=head, codes=None)
