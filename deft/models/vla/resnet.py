"""Residual networks with the names and shapes of torchvision's, without torchvision.

They compute the image features of `act` and `diffusion-policy`.

`ResNet` returns the last feature map. Its weights are those of `torchvision.models.resnet18` and its siblings without
the classifier. A norm layer of any kind can be passed; LeRobot's ACT uses `FrozenBatchNorm`, its
Diffusion Policy `FixedBatchNorm` or `group_norm`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from deft.errors import InputError

# Blocks per stage, and whether a block is a bottleneck.
SHAPES = {
    "resnet18": ((2, 2, 2, 2), False),
    "resnet34": ((3, 4, 6, 3), False),
    "resnet50": ((3, 4, 6, 3), True),
    "resnet101": ((3, 4, 23, 3), True),
    "resnet152": ((3, 8, 36, 3), True),
}
STEM = 64
EXPANSION = 4  # output channels of a bottleneck per inner channel

Norm = Callable[[int], nn.Module]


class FrozenBatchNorm(nn.Module):
    """Batch normalisation whose statistics and affine parameters are buffers: they are loaded and never trained."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((channels,), value))

    def forward(self, x: Tensor) -> Tensor:
        """(x − mean) / sqrt(var + ε) · weight + bias."""
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale.view(-1, 1, 1) + shift.view(-1, 1, 1)


class FixedBatchNorm(nn.BatchNorm2d):
    """Batch normalisation with the loaded statistics in every mode; weight and bias are trained.

    Statistics of a batch would make the output of one row depend on the others.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(x − mean) / sqrt(var + ε) · weight + bias."""
        return functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


def group_norm(channels: int) -> nn.GroupNorm:
    """Group normalisation with groups of 16 channels."""
    return nn.GroupNorm(channels // 16, channels)


class Block(nn.Module):
    """relu(skip(x) + F(x)), where F is two 3×3 convolutions, or 1×1, 3×3, 1×1 in a bottleneck."""

    def __init__(self, channels: int, inner: int, stride: int, dilation: int, bottleneck: bool, norm: Norm) -> None:
        super().__init__()
        out = inner * EXPANSION if bottleneck else inner
        if bottleneck:
            shapes = [(channels, inner, 1, 1, 1), (inner, inner, 3, stride, dilation), (inner, out, 1, 1, 1)]
        else:
            shapes = [(channels, inner, 3, stride, 1), (inner, out, 3, 1, 1)]
        self.count = len(shapes)
        for index, (before, after, kernel, step, spread) in enumerate(shapes, 1):
            self.add_module(f"conv{index}", _convolution(before, after, kernel, step, spread))
            self.add_module(f"bn{index}", norm(after))
        self.downsample: nn.Module | None = None
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(_convolution(channels, out, 1, stride, 1), norm(out))

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, h, w] to [N, C', h / stride, w / stride]."""
        skip = x if self.downsample is None else self.downsample(x)
        for index in range(1, self.count + 1):
            x = self.get_submodule(f"bn{index}")(self.get_submodule(f"conv{index}")(x))
            x = functional.relu(x + skip if index == self.count else x)
        return x


class ResNet(nn.Module):
    """Images [N, 3, h, w] to the last feature map [N, channels, h / 32, w / 32].

    `dilate_last` replaces the stride of the last stage by a dilation, which doubles the size of the feature map.
    """

    def __init__(self, name: str, norm: Norm, dilate_last: bool = False) -> None:
        super().__init__()
        if name not in SHAPES:
            raise InputError(f"vision_backbone {name!r} is none of {', '.join(SHAPES)}")
        depths, bottleneck = SHAPES[name]
        if dilate_last and not bottleneck:
            raise InputError(f"replace_final_stride_with_dilation needs resnet50 or larger; vision_backbone is {name}")
        self.conv1 = nn.Conv2d(3, STEM, 7, 2, 3, bias=False)
        self.bn1 = norm(STEM)
        channels, dilation = STEM, 1
        for stage, depth in enumerate(depths):
            inner, blocks = STEM * 2**stage, []
            dilated = dilate_last and stage == len(depths) - 1
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 and not dilated else 1
                # The first block of a dilated stage keeps the dilation of the stage before.
                spread = 2 if dilated and index > 0 else dilation
                blocks.append(Block(channels, inner, stride, spread, bottleneck, norm))
                channels = inner * EXPANSION if bottleneck else inner
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.num_stages, self.channels = len(depths), channels
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """The last feature map."""
        x = functional.max_pool2d(functional.relu(self.bn1(self.conv1(images))), 3, 2, 1)
        for stage in range(1, self.num_stages + 1):
            x = self.get_submodule(f"layer{stage}")(x)
        return x


def _convolution(before: int, after: int, kernel: int, stride: int, dilation: int) -> nn.Conv2d:
    return nn.Conv2d(before, after, kernel, stride, dilation * (kernel // 2), dilation, bias=False)
