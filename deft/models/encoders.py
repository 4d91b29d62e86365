"""From an observation to features: vectors, images, discrete values, text and dictionaries of them.

Built from the Gymnasium space alone. Images are scaled from uint8 here and nowhere else.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn import functional

from deft.config.settings import PolicyConfig
from deft.errors import InputError
from deft.models.distributions import discrete_sizes
from deft.models.normalization import RunningNormalizer
from deft.schema import has_channels_last

NORMALIZER_EPSILON = 1e-6  # a dim that is constant in the data is not amplified


class VectorEncoder(nn.Module):
    """A float vector (or array), flattened and normalised by its running statistics."""

    def __init__(self, space: spaces.Box, normalize: bool, epsilon: float = 1e-8) -> None:
        super().__init__()
        self.ndim = len(space.shape)
        self.dim = int(np.prod(space.shape))
        self.normalizer = RunningNormalizer((self.dim,), epsilon=epsilon) if normalize else None

    def flatten(self, x: Tensor) -> Tensor:
        """[…, *shape] → […, dim] in float32."""
        if x.dtype != torch.float32:
            x = x.float()
        return x if self.ndim == 1 else x.reshape(*x.shape[: x.ndim - self.ndim], self.dim)

    def forward(self, x: Tensor) -> Tensor:
        """Features […, dim]."""
        x = self.flatten(x)
        return x if self.normalizer is None else self.normalizer(x)

    def observe(self, x: Tensor) -> None:
        """Update the statistics."""
        if self.normalizer is not None:
            self.normalizer.observe(self.flatten(x))


class OneHotEncoder(nn.Module):
    """A Discrete or MultiDiscrete value, counted from 0, as concatenated one-hot vectors."""

    def __init__(self, space: spaces.Discrete | spaces.MultiDiscrete) -> None:
        super().__init__()
        self.scalar = isinstance(space, spaces.Discrete)
        self.sizes = discrete_sizes(space)
        self.dim = sum(self.sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Features […, Σ sizes]."""
        columns = [x] if self.scalar else x.unbind(-1)
        hot = [functional.one_hot(column.long(), size) for column, size in zip(columns, self.sizes, strict=True)]
        return torch.cat(hot, -1).float()


class ImageEncoder(nn.Module):
    """uint8 images, [C, h, w], [h, w], or a history [H, C, h, w], through strided convolutions to `dim` features.

    For a space of images with channels last both layouts are accepted: environments and datasets convert to channels
    first, see `schema.has_channels_last`.
    """

    def __init__(self, space: spaces.Box, dim: int) -> None:
        super().__init__()
        self.shape = space.shape
        self.ndim = len(self.shape)
        self.channels_last = has_channels_last(self.shape, space.dtype)
        height, width = self.shape[-3:-1] if self.channels_last else self.shape[-2:]
        self.channels = int(np.prod(self.shape)) // (height * width)
        if min(height, width) < 8:
            raise InputError(f"an image of {height}×{width} is too small for the image encoder; at least 8×8")
        # Halve until the grid is 4 to 7 wide: 64 px → 4 layers, 224 px → 6.
        layers: list[nn.Module] = []
        channels, side = self.channels, min(height, width)
        for index in range(max(1, int(math.log2(side / 4)))):
            out = min(32 * 2 ** (index // 2), 128)
            layers += [nn.Conv2d(channels, out, 3, stride=2, padding=1), nn.ReLU()]
            channels = out
        self.convolutions = nn.Sequential(*layers)
        with torch.no_grad():
            flat = self.convolutions(torch.zeros(1, self.channels, height, width)).numel()
        self.projection = nn.Sequential(nn.Linear(flat, dim), nn.LayerNorm(dim), nn.Tanh())
        self.dim = dim
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.orthogonal_(module.weight, math.sqrt(2))
                assert module.bias is not None
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Features […, dim]."""
        batch = x.shape[: x.ndim - self.ndim]
        if self.channels_last and tuple(x.shape[-self.ndim :]) == self.shape:
            x = x.movedim(-1, -3)
        x = x.reshape(-1, self.channels, *x.shape[-2:]).float() / 255.0 - 0.5
        return self.projection(self.convolutions(x).flatten(1)).reshape(*batch, self.dim)


class TextEncoder(nn.Module):
    """Instruction bytes (`schema.encode_text`) as the mean of learned byte-trigram features, without padding."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, dim, padding_idx=0)
        self.trigram = nn.Conv1d(dim, dim, 3, padding=1)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """Features […, dim]."""
        batch, length = x.shape[:-1], x.shape[-1]
        rows = x.reshape(-1, length).long()
        present = (rows != 0).unsqueeze(1).float()
        features = torch.relu(self.trigram(self.embedding(rows).transpose(1, 2))) * present
        return (features.sum(-1) / present.sum(-1).clamp(min=1)).reshape(*batch, self.dim)


def is_image(space: gymnasium.Space) -> bool:
    """uint8 with two or more spatial dims."""
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) >= 2


StreamEncoder: TypeAlias = VectorEncoder | OneHotEncoder | ImageEncoder | TextEncoder


def _encoder(name: str, space: gymnasium.Space, image_dim: int, normalize: bool, epsilon: float) -> StreamEncoder:
    if is_image(space):
        assert isinstance(space, spaces.Box)
        return ImageEncoder(space, image_dim)
    if isinstance(space, spaces.Box):
        if space.dtype == np.uint8 and len(space.shape) == 1 and name.split("/")[-1] == "instruction":
            return TextEncoder()
        return VectorEncoder(space, normalize, epsilon)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return OneHotEncoder(space)
    raise InputError(f"observation {name!r}: a space of type {type(space).__name__} is not supported")


class ObservationEncoder(nn.Module):
    """Any supported observation space → features […, dim]: the concatenated features of its streams."""

    def __init__(
        self, space: gymnasium.Space, image_dim: int = 256, normalize: bool = True, epsilon: float = 1e-8
    ) -> None:
        super().__init__()
        self.space = space
        streams = dict(space.spaces) if isinstance(space, spaces.Dict) else {"observation": space}
        encoders = {name: _encoder(name, part, image_dim, normalize, epsilon) for name, part in streams.items()}
        self.names = list(encoders)
        self.streams = nn.ModuleDict({_module_name(name): encoder for name, encoder in encoders.items()})
        self.dim = sum(encoder.dim for encoder in encoders.values())
        self.is_single = not isinstance(space, spaces.Dict)

    def forward(self, observation: Tensor | TensorDictBase) -> Tensor:
        """Features […, dim]."""
        if self.is_single or isinstance(observation, Tensor):
            return self.streams["observation"](observation)
        encoders = zip(self.names, self.streams.values(), strict=True)
        return torch.cat([encoder(observation[name]) for name, encoder in encoders], -1)

    def observe(self, observation: Tensor | TensorDictBase) -> None:
        """Update the running statistics of the vector streams."""
        for name, encoder in zip(self.names, self.streams.values(), strict=True):
            if isinstance(encoder, VectorEncoder):
                encoder.observe(observation if isinstance(observation, Tensor) else observation[name])


def make_encoder(space: gymnasium.Space, config: PolicyConfig) -> ObservationEncoder:
    """The encoder of SAC's and the offline algorithms' networks, and of critics."""
    return ObservationEncoder(space, config.encoder_dim, config.normalize_observation, NORMALIZER_EPSILON)


def _module_name(name: str) -> str:
    """The name of a stream's encoder: torch rejects dots and the names of ModuleDict's own attributes (`type`)."""
    return f"{name.replace('.', '·')}·" if "." in name or hasattr(nn.ModuleDict(), name) else name
