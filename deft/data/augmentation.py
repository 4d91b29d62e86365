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

SHIFT = 1 / 16  # of an image's shorter side: the largest shift of `augment`
COLOR_STRENGTH = 0.2  # of `augment`
BLOCK = 2**22  # pixels that are recoloured at once: their indices take eight times as many bytes


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


# -- batches of observations -----------------------------------------------------------------------------------------


def augment(observation: Any, kinds: Collection[str]) -> Any:
    """A batch of observations with its images changed at random, each row by itself.

    `color`: (v^γ) · gain + offset, alike in all cameras and frames of a row. `shift`: by up to 1/16 of the side, alike
    in all frames of a camera; borders are repeated.
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
        sides = {name: streams[name].shape for name in names}
        streams |= {name: random_shift(streams[name], _largest_shift(shape)) for name, shape in sides.items()}
    return streams if isinstance(observation, Mapping) else streams[""]


def shift_images(observation: Any, pixels: int) -> Any:
    """Each image of a batch moved by up to `pixels`, its border repeated (DrQ, Kostrikov et al., 2020)."""
    if not isinstance(observation, Mapping):
        return random_shift(observation, pixels) if _image_names(observation) else observation
    return {name: shift_images(stream, pixels) for name, stream in observation.items()}


def random_shift(images: Tensor, pixels: int) -> Tensor:
    """uint8 [B, …, H, W] or [B, H, W, 3]: one shift an image (and for all frames of a history)."""
    if _is_channel_last(images.shape):
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
    """uint8 [B, 3, 256]: for each row and channel what every level becomes, as `colour_tables`."""

    def uniform(channels: int) -> Tensor:
        return (2 * torch.rand(batch, channels, 1, device=device) - 1) * strength

    levels = torch.linspace(0, 1, 256, device=device) ** uniform(1).exp()
    levels = levels * (uniform(3) + uniform(1)).exp() + uniform(3) / 4
    return (levels * 255).round().clamp(0, 255).to(torch.uint8)


def recolor(images: Tensor, tables: Tensor) -> Tensor:
    """uint8 images [B, …, 3, H, W] or [B, H, W, 3] with their levels looked up; of other channels, as they are."""
    axis = -1 if _is_channel_last(images.shape) else -3
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
    """Whether an observation space has images that `augment` changes."""
    parts = space.spaces.values() if isinstance(space, spaces.Dict) else [space]
    return any(part.dtype == np.uint8 and len(part.shape or ()) >= 3 for part in parts)


def _image_names(observation: Any) -> list[str]:
    streams = observation if isinstance(observation, Mapping) else {"": observation}
    return [name for name, value in streams.items() if value.dtype == torch.uint8 and value.ndim >= 4]


def _is_channel_last(shape: torch.Size) -> bool:
    return len(shape) == 4 and shape[-1] in (1, 3, 4) and shape[1] not in (1, 3, 4)


def _largest_shift(shape: torch.Size) -> int:
    sides = shape[1:3] if _is_channel_last(shape) else shape[-2:]
    return max(1, round(min(sides) * SHIFT))
