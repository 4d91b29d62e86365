"""Random changes of images: of whole episodes, for world models, and of batches, for policies (SFT, SAC)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from deft.data.robot_episode import RobotEpisode
from deft.schema import CHANNELS

SHIFT = 1 / 16  # largest shift of `augment`, as a fraction of an image's shorter side
COLOR_STRENGTH = 0.2  # of `augment`
BLOCK = 2**22  # pixels recolored at once: their indices need eight times as many bytes


def color_tables(generator: np.random.Generator, strength: float) -> np.ndarray:
    """Return uint8 [3, 256]: the new value of every level of each channel, (v^γ) · gain + offset."""
    gamma = np.exp(generator.uniform(-strength, strength))
    gain = np.exp(generator.uniform(-strength, strength, (3, 1)) + generator.uniform(-strength, strength))
    offset = generator.uniform(-strength, strength, (3, 1)) / 4
    levels = (np.arange(256) / 255.0) ** gamma * gain + offset
    return np.clip(np.rint(levels * 255.0), 0, 255).astype(np.uint8)


def recolor_episode(episode: RobotEpisode, generator: np.random.Generator, strength: float) -> RobotEpisode:
    """Return the episode in other colors, the same for all frames of both cameras, and without token codes."""
    if strength == 0:
        return episode
    tables = color_tables(generator, strength)

    def change(frames: Any) -> Any:
        if isinstance(frames, Tensor):
            own = torch.as_tensor(tables, device=frames.device)
            return torch.stack([own[channel][frames[:, channel].long()] for channel in range(3)], 1)
        return np.stack([tables[channel][frames[:, channel]] for channel in range(3)], 1)

    return _change_frames(episode, change)


def shift_episode(episode: RobotEpisode, generator: np.random.Generator, pixels: int) -> RobotEpisode:
    """Return the episode shifted by up to `pixels`, the same for all frames of a camera, and without token codes.

    Border pixels are repeated.
    """
    if pixels == 0:
        return episode

    def change(frames: np.ndarray) -> np.ndarray:
        height, width = frames.shape[-2:]
        down, right = generator.integers(-pixels, pixels + 1, 2)
        rows = np.clip(np.arange(height) + down, 0, height - 1)
        return np.ascontiguousarray(frames[..., rows[:, None], np.clip(np.arange(width) + right, 0, width - 1)])

    return _change_frames(episode, change)


def _change_frames(episode: RobotEpisode, change: Callable[[Any], Any]) -> RobotEpisode:
    """Return the episode with changed frames of each camera; its codes must be computed again."""
    head = None if episode.head is None else change(episode.head)
    return dataclasses.replace(episode, wrist=change(episode.wrist), head=head, codes=None)


# -- batches of observations -----------------------------------------------------------------------------------------


def augment(observation: Any, kinds: Collection[str]) -> Any:
    """Return a batch of observations with random changes of its images, different for each row.

    `color` is (v^γ) · gain + offset, the same for all cameras and frames of a row. `shift` is by up to 1/16 of the
    shorter side, the same for all frames of a camera; border pixels are repeated.
    """
    if not kinds:
        return observation
    names = _image_names(observation)
    streams = dict(observation) if isinstance(observation, Mapping) else {"": observation}
    if "color" in kinds and names:
        first = streams[names[0]]
        tables = random_color_tables(len(first), COLOR_STRENGTH, first.device)
        streams |= {name: recolor(streams[name], tables) for name in names}
    if "shift" in kinds:
        streams |= {name: random_shift(streams[name], _largest_shift(streams[name].shape)) for name in names}
    return streams if isinstance(observation, Mapping) else streams[""]


def shift_images(observation: Any, pixels: int) -> Any:
    """Shift each image of a batch by up to `pixels`, repeating its border (DrQ, Kostrikov et al., 2020)."""
    if not isinstance(observation, Mapping):
        return random_shift(observation, pixels) if _image_names(observation) else observation
    return {name: shift_images(stream, pixels) for name, stream in observation.items()}


def random_shift(images: Tensor, pixels: int) -> Tensor:
    """Shift uint8 images [B, …, H, W] or [B, H, W, 3]: one shift for each row and all frames of its history."""
    if _has_channels_last(images.shape):
        return random_shift(images.movedim(-1, 1), pixels).movedim(1, -1)
    batch, height, width = len(images), *images.shape[-2:]
    flat = images.reshape(batch, -1, height, width)
    offsets = torch.randint(-pixels, pixels + 1, (2, batch, 1), device=images.device)
    rows = (torch.arange(height, device=images.device) + offsets[0]).clamp(0, height - 1)
    columns = (torch.arange(width, device=images.device) + offsets[1]).clamp(0, width - 1)
    index = torch.arange(batch, device=images.device)[:, None, None]
    moved = flat.permute(0, 2, 3, 1)[index, rows[:, :, None], columns[:, None, :]]  # [B, H, W, C]
    return moved.permute(0, 3, 1, 2).reshape(images.shape)


def random_color_tables(batch: int, strength: float, device: torch.device) -> Tensor:
    """Return uint8 [B, 3, 256]: tables as those of `color_tables`, for each row of a batch."""

    def uniform(channels: int) -> Tensor:
        return (2 * torch.rand(batch, channels, 1, device=device) - 1) * strength

    levels = torch.linspace(0, 1, 256, device=device) ** uniform(1).exp()
    levels = levels * (uniform(3) + uniform(1)).exp() + uniform(3) / 4
    return (levels * 255).round().clamp(0, 255).to(torch.uint8)


def recolor(images: Tensor, tables: Tensor) -> Tensor:
    """Apply color tables to uint8 images [B, …, 3, H, W] or [B, H, W, 3]; others are returned unchanged."""
    axis = -1 if _has_channels_last(images.shape) else -3
    if images.shape[axis] != 3:
        return images
    channels = images.movedim(axis, 1).reshape(len(images), 3, -1)  # [B, 3, pixels]
    changed = torch.empty_like(channels)
    step = max(1, BLOCK // (3 * channels.shape[-1]))
    for start in range(0, len(images), step):
        rows = slice(start, start + step)
        changed[rows] = tables[rows].gather(2, channels[rows].long())
    return changed.reshape(images.movedim(axis, 1).shape).movedim(1, axis)


def has_images(space: spaces.Space) -> bool:
    """Return whether an observation space has images that `augment` changes."""
    parts = space.spaces.values() if isinstance(space, spaces.Dict) else [space]
    return any(part.dtype == np.uint8 and len(part.shape or ()) >= 3 for part in parts)


def _image_names(observation: Any) -> list[str]:
    streams = observation if isinstance(observation, Mapping) else {"": observation}
    return [name for name, value in streams.items() if value.dtype == torch.uint8 and value.ndim >= 4]


def _has_channels_last(shape: torch.Size) -> bool:
    return len(shape) == 4 and shape[-1] in CHANNELS and shape[1] not in CHANNELS


def _largest_shift(shape: torch.Size) -> int:
    sides = shape[1:3] if _has_channels_last(shape) else shape[-2:]
    return max(1, round(min(sides) * SHIFT))
