"""The network of LeRobot's Diffusion Policy with its names: images to keypoints, and a conditional 1-D U-Net.

The U-Net predicts the noise of a chunk of actions, or the chunk itself, given the time of the diffusion and the
features of the observation, which scale and shift (FiLM) the channels of each of its blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deft.errors import InputError
from deft.models.vla.resnet import FixedBatchNorm, ResNet, group_norm

PERIOD = 10_000.0
LAST_GROUPS = 8  # groups of the norm of the last block, whatever `n_groups` is


class DiffusionNetwork(nn.Module):
    """The encoder of images and the U-Net; its state is LeRobot's, apart from names in the residual networks."""

    def __init__(self, config: Mapping[str, Any], cameras: int, state_dim: int, action_dim: int) -> None:
        super().__init__()
        self.is_separate = bool(config["use_separate_rgb_encoder_per_camera"])
        self.num_observations = config["n_obs_steps"]
        self.rgb_encoder = (
            nn.ModuleList(ImageEncoder(config) for _ in range(cameras)) if self.is_separate else ImageEncoder(config)
        )
        size = state_dim + cameras * 2 * config["spatial_softmax_num_keypoints"]
        self.feature_dim = size * self.num_observations
        self.unet = UNet(config, self.feature_dim, action_dim)

    def features(self, images: Sequence[Tensor], state: Tensor) -> Tensor:
        """Features [B, F] of the images [B, H, 3, h, w] of each camera and the states [B, H, P].

        H observations; a stream with one of them, [B, 1, …], is repeated.
        """
        parts, batch = [state], len(state)
        encoders: Any = self.rgb_encoder if self.is_separate else [self.rgb_encoder] * len(images)
        for encode, frames in zip(encoders, images, strict=True):
            parts.append(encode(frames.flatten(0, 1)).unflatten(0, frames.shape[:2]))
        repeated = [part.expand(batch, self.num_observations, -1) for part in parts]
        return torch.cat(repeated, -1).flatten(1)

    def forward(self, x: Tensor, time: Tensor, features: Tensor) -> Tensor:
        """The prediction [B, horizon, A] for x [B, horizon, A] at the times [B], 0 … T − 1."""
        return self.unet(x, time, features)


class ImageEncoder(nn.Module):
    """Images to keypoints: a residual network, a spatial softmax, and a linear layer."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        keypoints = config["spatial_softmax_num_keypoints"]
        self.resize, self.crop = _pair(config["resize_shape"]), crop_shape(config)
        norm = group_norm if config["use_group_norm"] else FixedBatchNorm
        self.backbone = ResNet(config["vision_backbone"], norm)
        self.pool = SpatialSoftmax(self.backbone.channels, keypoints)
        self.out = nn.Linear(2 * keypoints, 2 * keypoints)

    def forward(self, images: Tensor) -> Tensor:
        """[N, 3, h, w] → [N, 2 · keypoints]."""
        if self.resize is not None:
            images = functional.interpolate(images, self.resize, mode="bilinear", antialias=True)
        if self.crop is not None:
            images = center_crop(images, self.crop)
        return functional.relu(self.out(self.pool(self.backbone(images)).flatten(1)))


class SpatialSoftmax(nn.Module):
    """The mean position of each of K maps: Σ softmax(map) · (x, y), with x and y from −1 to 1 (Finn et al., 2016)."""

    def __init__(self, channels: int, keypoints: int) -> None:
        super().__init__()
        self.nets = nn.Conv2d(channels, keypoints, 1)

    def forward(self, features: Tensor) -> Tensor:
        """[N, C, h, w] → [N, K, 2]."""
        maps = self.nets(features)
        if maps[0, 0].numel() == 1:
            raise InputError(
                "the images have at most 32 pixels on each side, and their feature map has one cell, in which every "
                "keypoint is the same: use larger images, or set architecture.resize_shape to [64, 64] or more"
            )
        grid = position_grid(*maps.shape[2:]).to(maps)
        return maps.flatten(2).softmax(-1) @ grid


def position_grid(rows: int, columns: int) -> Tensor:
    """Positions (x, y) of the cells of a map, [rows · columns, 2]."""
    y, x = torch.meshgrid(
        *(torch.linspace(-1.0, 1.0, count, dtype=torch.float64) for count in (rows, columns)), indexing="ij"
    )
    return torch.stack([x, y], -1).flatten(0, 1).float()


class UNet(nn.Module):
    """Residual blocks over the steps of a chunk, which is halved and doubled again, with skip connections."""

    def __init__(self, config: Mapping[str, Any], features: int, action_dim: int) -> None:
        super().__init__()
        widths, kernel, groups = list(config["down_dims"]), config["kernel_size"], config["n_groups"]
        self.time_dim = config["diffusion_step_embed_dim"]
        if config["horizon"] % 2 ** len(widths):
            raise InputError(
                f"horizon {config['horizon']} must be a multiple of {2 ** len(widths)}: down_dims has {len(widths)} "
                "stages, and each halves it"
            )
        if any(width % groups for width in widths) or widths[0] % LAST_GROUPS:
            raise InputError(f"down_dims {widths} must be multiples of n_groups {groups}, the first of {LAST_GROUPS}")
        inner = 4 * self.time_dim
        self.diffusion_step_encoder = nn.Sequential(
            nn.Identity(), nn.Linear(self.time_dim, inner), nn.Mish(), nn.Linear(inner, self.time_dim)
        )
        condition = self.time_dim + features
        has_scale = bool(config["use_film_scale_modulation"])

        def block(before: int, after: int) -> ResidualBlock:
            return ResidualBlock(before, after, condition, kernel, groups, has_scale)

        last = len(widths) - 1
        self.down_modules, self.up_modules = nn.ModuleList(), nn.ModuleList()
        for index, (before, after) in enumerate(zip([action_dim, *widths], widths, strict=False)):
            halve = nn.Conv1d(after, after, 3, 2, 1) if index < last else nn.Identity()
            self.down_modules.append(nn.ModuleList([block(before, after), block(after, after), halve]))
        self.mid_modules = nn.ModuleList(block(widths[-1], widths[-1]) for _ in range(2))
        for before, after in zip(widths[:0:-1], widths[-2::-1], strict=True):
            double = nn.ConvTranspose1d(after, after, 4, 2, 1)
            self.up_modules.append(nn.ModuleList([block(2 * before, after), block(after, after), double]))
        out = nn.Conv1d(widths[0], action_dim, 1)
        self.final_conv = nn.Sequential(ConvBlock(widths[0], widths[0], kernel, LAST_GROUPS), out)

    def forward(self, x: Tensor, time: Tensor, features: Tensor) -> Tensor:
        """[B, T, A] → [B, T, A]."""
        condition = torch.cat([self.diffusion_step_encoder(time_sinusoids(time, self.time_dim)), features], -1)
        x, skips = x.transpose(1, 2), []
        for first, second, halve in _stages(self.down_modules):
            x = second(first(x, condition), condition)
            skips.append(x)
            x = halve(x)
        for block in self.mid_modules:
            x = block(x, condition)
        for first, second, double in _stages(self.up_modules):
            x = second(first(torch.cat([x, skips.pop()], 1), condition), condition)
            x = double(x)
        return self.final_conv(x).transpose(1, 2)


class ResidualBlock(nn.Module):
    """skip(x) + F(x), where F is two convolutions; the condition changes the channels between them."""

    def __init__(self, before: int, after: int, condition: int, kernel: int, groups: int, has_scale: bool) -> None:
        super().__init__()
        self.has_scale = has_scale
        self.conv1, self.conv2 = ConvBlock(before, after, kernel, groups), ConvBlock(after, after, kernel, groups)
        self.cond_encoder = nn.Sequential(nn.Mish(), nn.Linear(condition, 2 * after if has_scale else after))
        self.residual_conv = nn.Conv1d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """[B, C, T] → [B, C', T]."""
        hidden, change = self.conv1(x), self.cond_encoder(condition).unsqueeze(-1)
        if self.has_scale:
            scale, shift = change.chunk(2, 1)
            hidden = torch.addcmul(shift, scale, hidden)
        else:
            hidden = hidden + change
        return self.conv2(hidden) + self.residual_conv(x)


class ConvBlock(nn.Module):
    """Convolution, group norm, Mish."""

    def __init__(self, before: int, after: int, kernel: int, groups: int) -> None:
        super().__init__()
        convolution = nn.Conv1d(before, after, kernel, padding=kernel // 2)
        self.block = nn.Sequential(convolution, nn.GroupNorm(groups, after), nn.Mish())

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, T] → [B, C', T]."""
        return self.block(x)


def _stages(modules: nn.ModuleList) -> list[Any]:
    return [list(one.children()) for one in modules]


def time_sinusoids(time: Tensor, width: int) -> Tensor:
    """[B] → [B, width]: the sines, then the cosines of t / 10000^(i / (width / 2 − 1))."""
    exponents = torch.arange(width // 2, device=time.device) / (width // 2 - 1)
    angles = time.unsqueeze(-1) / PERIOD**exponents
    return torch.cat([angles.sin(), angles.cos()], -1)


def crop_shape(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Height and width of the crop: with `resize_shape` the share `crop_ratio` of it, otherwise `crop_shape`."""
    resize, ratio = _pair(config["resize_shape"]), config["crop_ratio"]
    if resize is None:
        return _pair(config["crop_shape"])
    return (int(resize[0] * ratio), int(resize[1] * ratio)) if ratio < 1.0 else None


def center_crop(images: Tensor, size: tuple[int, int]) -> Tensor:
    """The centre of images [N, 3, h, w]."""
    height, width = images.shape[2:]
    if size[0] > height or size[1] > width:
        raise InputError(f"crop_shape {list(size)} is larger than the images, {height} × {width}")
    top, left = round((height - size[0]) / 2), round((width - size[1]) / 2)
    return images[:, :, top : top + size[0], left : left + size[1]]


def map_size(config: Mapping[str, Any], image: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of the feature map of an image of this size, which the residual network halves five times."""
    height, width = crop_shape(config) or _pair(config["resize_shape"]) or image
    return math.ceil(height / 32), math.ceil(width / 32)


def _pair(size: Any) -> tuple[int, int] | None:
    return None if size is None else (int(size[0]), int(size[1]))
