"""The image tokenizer: a multi-scale residual VQ-VAE. A frame becomes codes at scales 1×1, 2×2, … to the latent grid.

`F1Policy` uses its codes, and the embeddings from which the next scales are predicted; `decode` returns images.
The tensor names are those of the published checkpoint.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from deft.models.f1.config import TokenizerConfig

EPSILON = 1e-6
START_DECAY, START_SHARE = 0.8, 0.05  # of the first rounds of `CodebookAverages`


class Reconstruction(NamedTuple):
    """The outputs of one pass that training a tokenizer needs."""

    frames: Tensor  # [B, 3, h, w]
    quantization_loss: Tensor  # codes towards features and features towards codes, mean over the scales
    codes: Tensor  # int64 [B, L]
    features: Tensor  # [B, D, grid, grid], before quantisation; detached


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with group norm, around a shortcut."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.norm1 = _norm(channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, padding=1)
        self.norm2 = _norm(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1)
        changes = channels_in != channels_out
        self.nin_shortcut = nn.Conv2d(channels_in, channels_out, 1) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, h, w] → [B, C', h, w]."""
        hidden = self.conv1(functional.silu(self.norm1(x)))
        hidden = self.conv2(functional.silu(self.norm2(hidden)))
        return hidden + self.nin_shortcut(x)


class SpatialAttention(nn.Module):
    """Single-head attention over all positions of a feature map, with a residual connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = _norm(channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.proj_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, h, w], same out."""
        batch, channels, height, width = x.shape
        query, key, value = self.qkv(self.norm(x)).flatten(2).transpose(1, 2).chunk(3, -1)  # [B, h·w, C] each
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return x + self.proj_out(mixed.transpose(1, 2).reshape(batch, channels, height, width))


class Downsample(nn.Module):
    """Half the size: a strided convolution, padded at the right and the bottom alone."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, h, w] → [B, C, h/2, w/2]."""
        return self.conv(functional.pad(x, (0, 1, 0, 1)))


class Upsample(nn.Module):
    """Twice the size: nearest neighbours, then a convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, h, w] → [B, C, 2h, 2w]."""
        return self.conv(functional.interpolate(x, scale_factor=2, mode="nearest"))


class Level(nn.Module):
    """Residual blocks of one resolution, with attention after each at the coarsest, then a change of size."""

    def __init__(self, channels: Sequence[int], attends: bool, resize: nn.Module, resize_name: str) -> None:
        """`channels`: into the first block, and out of each."""
        super().__init__()
        self.block = nn.ModuleList(ResidualBlock(before, after) for before, after in itertools.pairwise(channels))
        self.attn = nn.ModuleList(_attention(after, attends) for after in channels[1:])
        self.add_module(resize_name, resize)
        self._resize_name = resize_name

    def forward(self, x: Tensor) -> Tensor:
        """Through the blocks, then to the next resolution."""
        for block, attention in zip(self.block, self.attn, strict=True):
            x = attention(block(x))
        return getattr(self, self._resize_name)(x)


class Middle(nn.Module):
    """The coarsest features once more: block, attention, block."""

    def __init__(self, channels: int, attends: bool) -> None:
        super().__init__()
        self.block_1 = ResidualBlock(channels, channels)
        self.attn_1 = _attention(channels, attends)
        self.block_2 = ResidualBlock(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, h, w], same out."""
        return self.block_2(self.attn_1(self.block_1(x)))


class Encoder(nn.Module):
    """Frames to a grid of features."""

    def __init__(self, config: TokenizerConfig) -> None:
        super().__init__()
        widths = [config.channels * multiplier for multiplier in config.channel_multipliers]
        stem = config.stem_stride
        # A stem of stride s reads s×s patches: most of the cost of small images is at full resolution.
        self.conv_in = nn.Conv2d(3, widths[0], 3, padding=1) if stem == 1 else nn.Conv2d(3, widths[0], stem, stem)
        self.down = nn.ModuleList()
        before = widths[0]
        for index, width in enumerate(widths):
            is_last = index == len(widths) - 1
            channels = [before] + [width] * config.num_res_blocks
            resize = nn.Identity() if is_last else Downsample(width)
            self.down.append(Level(channels, is_last and config.attention, resize, "downsample"))
            before = width
        self.mid = Middle(before, config.attention)
        self.norm_out = _norm(before)
        self.conv_out = nn.Conv2d(before, config.code_dim, 3, padding=1)
        if config.linear_path:
            self.linear = nn.Conv2d(3, config.code_dim, config.patch_size, config.patch_size)

    def forward(self, frames: Tensor) -> Tensor:
        """[B, 3, h, w] → [B, D, grid, grid]."""
        x = self.conv_in(frames)
        for level in self.down:
            x = level(x)
        found = self.conv_out(functional.silu(self.norm_out(self.mid(x))))
        return found + self.linear(frames) if hasattr(self, "linear") else found


class Decoder(nn.Module):
    """A grid of features to frames."""

    def __init__(self, config: TokenizerConfig) -> None:
        super().__init__()
        widths = [config.channels * multiplier for multiplier in config.channel_multipliers]
        before = widths[-1]
        self.conv_in = nn.Conv2d(config.code_dim, before, 3, padding=1)
        self.mid = Middle(before, config.attention)
        levels: list[nn.Module] = []  # coarsest first; stored finest first, as in the tensor names
        for index, width in reversed(list(enumerate(widths))):
            channels = [before] + [width] * (config.num_res_blocks + 1)
            attends = index == len(widths) - 1 and config.attention
            levels.insert(0, Level(channels, attends, Upsample(width) if index else nn.Identity(), "upsample"))
            before = width
        self.up = nn.ModuleList(levels)
        self.norm_out = _norm(before)
        self.conv_out = nn.Conv2d(before, 3 * config.stem_stride**2, 3, padding=1)
        self._stem_stride, self._patch_size = config.stem_stride, config.patch_size
        if config.linear_path:
            self.linear = nn.Conv2d(config.code_dim, 3 * config.patch_size**2, 1)

    def forward(self, features: Tensor) -> Tensor:
        """[B, D, grid, grid] → [B, 3, h, w]."""
        x = self.mid(self.conv_in(features))
        for level in reversed(self.up):
            x = level(x)
        made = functional.pixel_shuffle(self.conv_out(functional.silu(self.norm_out(x))), self._stem_stride)
        if hasattr(self, "linear"):
            made = made + functional.pixel_shuffle(self.linear(features), self._patch_size)
        return made


class ResidualConvolution(nn.Conv2d):
    """φ(h) = (1 − r) h + r conv(h): smooths an upsampled coarse scale."""

    def __init__(self, channels: int, ratio: float) -> None:
        super().__init__(channels, channels, 3, padding=1)
        self.ratio = ratio
        nn.init.dirac_(self.weight)  # φ(h) = h at the start: a code then adds its own embedding
        nn.init.zeros_(self.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """[B, D, h, w], same out."""
        return x * (1 - self.ratio) + super().forward(x) * self.ratio


class SharedConvolutions(nn.Module):
    """A few φ shared by the scales; each scale uses the φ nearest to its relative position."""

    def __init__(self, config: TokenizerConfig) -> None:
        super().__init__()
        count = config.num_residual_convolutions
        self.qresi_ls = nn.ModuleList(ResidualConvolution(config.code_dim, config.residual_ratio) for _ in range(count))
        margin = (1 / 3 if count == 4 else 1 / 2) / count
        ticks = np.linspace(margin, 1 - margin, count)
        positions = np.arange(len(config.scales)) / max(1, len(config.scales) - 1)
        self._chosen = np.abs(positions[:, None] - ticks).argmin(1).tolist()

    def forward(self, x: Tensor, scale: int) -> Tensor:
        """φ of the scale with this index."""
        return self.qresi_ls[self._chosen[scale]](x)


@functools.lru_cache
def upsampling_matrix(size: int, grid: int, device: torch.device) -> Tensor:
    """Return bicubic interpolation from size² to grid² positions as a matrix [grid², size²].

    For such small grids a matrix product is many times faster than the general operation, above all on GPUs.
    """
    unit = torch.eye(size * size).view(1, size * size, size, size)
    return functional.interpolate(unit, size=(grid, grid), mode="bicubic").flatten(2)[0].T.contiguous().to(device)


class MultiScaleQuantizer(nn.Module):
    """Features as a sum over scales: each scale encodes the residual of the coarser ones."""

    ema_vocab_hit_SV: Tensor

    def __init__(self, config: TokenizerConfig) -> None:
        super().__init__()
        self.scales = tuple(config.scales)
        self.embedding = nn.Embedding(config.codebook_size, config.code_dim)
        self.quant_resi = SharedConvolutions(config)
        # How often each code was used, by scale; updated in training only.
        self.register_buffer("ema_vocab_hit_SV", torch.zeros(len(self.scales), config.codebook_size))
        nn.init.uniform_(self.embedding.weight, -1 / config.codebook_size, 1 / config.codebook_size)

    def contribution(self, codes: Tensor, scale: int) -> Tensor:
        """Return what codes [B, n²] of one scale add to the features, [B, D, grid, grid]."""
        size, grid = self.scales[scale], self.scales[-1]
        vectors = self.embedding(codes)  # [B, n², D]
        if size != grid:
            with torch.autocast(vectors.device.type, enabled=False):
                vectors = upsampling_matrix(size, grid, vectors.device) @ vectors.float()
        return self.quant_resi(vectors.transpose(1, 2).unflatten(2, (grid, grid)), scale)

    def at_scale(self, features: Tensor, scale: int) -> Tensor:
        """Downsample features [B, D, grid, grid] to one scale, as tokens [B, n², D]."""
        size = self.scales[scale]
        if size != self.scales[-1]:
            features = functional.interpolate(features, size=(size, size), mode="area")
        return features.flatten(2).transpose(1, 2)

    def distances(self, vectors: Tensor) -> Tensor:
        """‖z − e_k‖² of vectors [B, n, D] to every code, [B, n, K]."""
        codes = self.embedding.weight
        return vectors.square().sum(-1, keepdim=True) + codes.square().sum(-1) - 2 * vectors @ codes.T

    def assign(self, features: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the residuals of each scale [B · n², D] and their nearest codes, int64 [B, n²], coarse to fine."""
        rest, vectors, codes = features, [], []
        for scale in range(len(self.scales)):
            residual = self.at_scale(rest, scale)
            vectors.append(residual.flatten(0, 1))
            codes.append(self.distances(residual).argmin(-1))
            rest = rest - self.contribution(codes[-1], scale)
        return vectors, codes

    @torch.no_grad()
    def observe(self, codes: Sequence[Tensor], decay: float = 0.99) -> None:
        """Update the running usage frequencies with the codes of each scale."""
        for scale, part in enumerate(codes):
            hits = torch.bincount(part.flatten(), minlength=self.embedding.num_embeddings).to(self.ema_vocab_hit_SV)
            self.ema_vocab_hit_SV[scale].lerp_(hits / hits.sum(), 1 - decay)


class MultiScaleTokenizer(nn.Module):
    """Frames in -1 … 1 to codes [B, L] (all scales, coarse to fine) and back."""

    def __init__(self, config: TokenizerConfig) -> None:
        super().__init__()
        self.config = config
        self.scales = tuple(config.scales)
        self.sizes = [scale * scale for scale in self.scales]  # tokens of each scale
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.quantize = MultiScaleQuantizer(config)
        self.quant_conv = nn.Conv2d(config.code_dim, config.code_dim, 3, padding=1)
        self.post_quant_conv = nn.Conv2d(config.code_dim, config.code_dim, 3, padding=1)

    @torch.no_grad()
    def start_linear_path(self, frames: Tensor) -> None:
        """Initialise with principal components of patches of frames [B, 3, h, w]; the networks output 0.

        z = Vᵀ(p − μ) / s and p ≈ s V z + μ, with V the first D directions and s such that z has variance 1 on average.
        """
        size = self.config.patch_size
        patches = functional.pixel_unshuffle(frames, size).permute(0, 2, 3, 1).flatten(0, 2).double()
        mean = patches.mean(0)
        variances, directions = torch.linalg.eigh((patches - mean).T @ (patches - mean) / len(patches))
        basis = directions[:, -self.config.code_dim :].flip(1)  # [3 · size², D], the widest direction first
        scale = variances[-self.config.code_dim :].mean().clamp(min=1e-8).sqrt()
        into, back = self.encoder.linear, self.decoder.linear
        into.weight.copy_((basis / scale).T.reshape(into.weight.shape))
        into.bias.copy_(-(basis / scale).T @ mean)  # type: ignore[union-attr]
        back.weight.copy_((basis * scale).reshape(back.weight.shape))
        back.bias.copy_(mean)  # type: ignore[union-attr]
        for layer in (self.encoder.conv_out, self.decoder.conv_out, self.quant_conv, self.post_quant_conv):
            for parameter in layer.parameters():
                nn.init.zeros_(parameter)
        for layer in (self.quant_conv, self.post_quant_conv):
            nn.init.dirac_(layer.weight)

    def features(self, frames: Tensor) -> Tensor:
        """[B, 3, h, w] → [B, D, grid, grid], before quantisation."""
        return self.quant_conv(self.encoder(frames))

    def encode(self, frames: Tensor) -> Tensor:
        """Codes of frames […, 3, h, w]: int64 […, L]."""
        batch = frames.shape[:-3]
        _, codes = self.quantize.assign(self.features(frames.flatten(0, -4)))
        return torch.cat(codes, 1).reshape(*batch, -1)

    def embed(self, codes: Tensor) -> Tensor:
        """Return the inputs for predicting the scales after the first, from codes […, L]: […, L − 1, D].

        At each scale: the sum of all coarser contributions, downsampled to that scale.
        """
        sums = self._sums(codes.flatten(0, -2).split(self.sizes, -1)[:-1])
        inputs = [self.quantize.at_scale(total, scale) for scale, total in enumerate(sums, 1)]
        return torch.cat(inputs, 1).reshape(*codes.shape[:-1], -1, self.config.code_dim)

    def residuals(self, features: Tensor, codes: Tensor) -> Tensor:
        """Return features [B, D, grid, grid] less the sum of the coarser codes [B, L], per token: [B, L, D]."""
        rest, tokens = features, []
        for scale, part in enumerate(codes.split(self.sizes, -1)):
            tokens.append(self.quantize.at_scale(rest, scale))
            if scale < len(self.sizes) - 1:
                rest = rest - self.quantize.contribution(part, scale)
        return torch.cat(tokens, 1)

    def _sums(self, parts: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield the features [B, D, grid, grid] of the first scale's codes, of the first two scales', …"""
        return itertools.accumulate(self.quantize.contribution(part, scale) for scale, part in enumerate(parts))

    def quantized(self, codes: Tensor) -> Tensor:
        """Return the features of codes [B, L], [B, D, grid, grid]."""
        *_, total = self._sums(codes.split(self.sizes, -1))
        return total

    def decode_features(self, features: Tensor) -> Tensor:
        """Decode features [B, D, grid, grid] to frames, without clipping, for training."""
        return self.decoder(self.post_quant_conv(features))

    def decode(self, codes: Tensor) -> Tensor:
        """Frames of codes […, L], in -1 … 1."""
        frames = self.decode_features(self.quantized(codes.flatten(0, -2))).clamp(-1, 1)
        return frames.reshape(*codes.shape[:-1], *frames.shape[1:])

    def forward(self, frames: Tensor) -> Reconstruction:
        """Reconstruct frames [B, 3, h, w] with a straight-through gradient."""
        features = self.features(frames).float()
        with torch.autocast(frames.device.type, enabled=False):  # quantise in full precision, as outside of training
            _, codes = self.quantize.assign(features.detach())
            loss = features.new_zeros(())
            for total in self._sums(codes):
                # ‖sg(f̂) − f‖² β + ‖f̂ − sg(f)‖²
                loss = loss + self.config.commitment * functional.mse_loss(features, total.detach())
                loss = loss + functional.mse_loss(total, features.detach())
        straight = features + (total - features).detach()
        return Reconstruction(self.decode_features(straight), loss / len(codes), torch.cat(codes, 1), features.detach())


def _attention(channels: int, attends: bool) -> nn.Module:
    return SpatialAttention(channels) if attends else nn.Identity()


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(math.gcd(32, channels), channels, EPSILON)


class CodebookAverages:
    """k-means by running means, all scales at once: e_k = Σ decay^age z / Σ decay^age, over what k was nearest to.

    `deft train tokenizer` uses it instead of gradients, whose steps are limited by the learning rate.
    """

    def __init__(self, quantizer: MultiScaleQuantizer, decay: float = 0.97) -> None:
        """Disable the gradients of the codes, which are updated here from now on."""
        self.quantizer = quantizer
        self.decay = decay
        codes = quantizer.embedding.weight.requires_grad_(False)
        self.counts = torch.zeros(len(codes), device=codes.device)
        self.sums = torch.zeros_like(codes)

    @torch.no_grad()
    def initialize(self, features: Tensor, generator: torch.Generator, rounds: int = 12) -> None:
        """Initialise all codes by k-means on features [B, D, grid, grid]; unused codes are drawn again.

        Updates are damped: the residuals of the finer scales change with the codes, and full steps would not converge.
        """
        vectors = features.permute(0, 2, 3, 1).flatten(0, 2)
        self._set_codes(torch.arange(len(self.counts), device=self.counts.device), vectors, generator)
        for number in range(rounds):
            vectors = self._update(features, decay=START_DECAY if number else 0.0)
            if number < rounds - 2:  # no resets in the last rounds, so that the codes converge
                self._set_codes(
                    (self.counts < START_SHARE * self.counts.mean()).nonzero().flatten(), vectors, generator
                )

    @torch.no_grad()
    def initialize_counts(self, features: Tensor) -> None:
        """Keep the codes, and count the features [B, D, grid, grid] assigned to each."""
        _, codes = self.quantizer.assign(features)
        hits = torch.bincount(torch.cat([part.flatten() for part in codes]), minlength=len(self.counts))
        self.counts.copy_(hits)
        self.sums.copy_(self.quantizer.embedding.weight * self.counts.unsqueeze(1))

    @torch.no_grad()
    def update(self, features: Tensor) -> None:
        """Move the codes to the features [B, D, grid, grid] of a batch."""
        self._update(features, self.decay)

    @torch.no_grad()
    def reset_unused(self, features: Tensor, generator: torch.Generator, share: float = 0.2) -> int:
        """Reset codes used less than `share` of the mean to random features; return how many were reset."""
        vectors, _ = self.quantizer.assign(features)
        unused = (self.counts < share * self.counts.mean()).nonzero().flatten()
        self._set_codes(unused, torch.cat(vectors), generator)
        return len(unused)

    def rescale(self, factor: float) -> None:
        """Multiply the running counts and sums by a factor."""
        self.counts.mul_(factor)
        self.sums.mul_(factor)

    def state_dict(self) -> dict[str, Any]:
        """Return the running sums."""
        return {"counts": self.counts.clone(), "sums": self.sums.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load saved sums."""
        self.counts.copy_(state["counts"])
        self.sums.copy_(state["sums"])

    def _update(self, features: Tensor, decay: float) -> Tensor:
        vectors, codes = self.quantizer.assign(features)
        self.quantizer.observe(codes)
        joined, chosen = torch.cat(vectors), torch.cat([part.flatten() for part in codes])
        hits = torch.bincount(chosen, minlength=len(self.counts)).to(self.counts)
        self.counts.mul_(decay).add_(hits, alpha=1 - decay)
        self.sums.mul_(decay).add_(torch.zeros_like(self.sums).index_add_(0, chosen, joined), alpha=1 - decay)
        means = self.sums / self.counts.clamp(min=1e-6).unsqueeze(1)
        # A code that was not used for long is kept: its sums are close to 0.
        weight = self.quantizer.embedding.weight
        weight.copy_(torch.where((self.counts > 1e-2).unsqueeze(1), means, weight))
        return joined

    def _set_codes(self, codes: Tensor, vectors: Tensor, generator: torch.Generator) -> None:
        """Set codes to random vectors, with the mean count, so that they are not reset again at once."""
        mean = self.counts.mean()
        chosen = torch.randint(len(vectors), (len(codes),), generator=generator).to(vectors.device)
        self.quantizer.embedding.weight[codes] = vectors[chosen]
        self.counts[codes] = torch.where(mean > 0, mean, 1.0)
        self.sums[codes] = vectors[chosen] * self.counts[codes].unsqueeze(1)
