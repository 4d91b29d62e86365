"""Parts of vision-language models with an action expert: a prefix is read once, an expert attends to it in each step.

`smolvla` and `pi05` call these. The layers are those of `transformers`; attention between two networks is not part of
it. B is the batch size, T the number of tokens, H the number of heads, D their size.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

ROPE_PERIOD = 10_000.0


class Prefix(NamedTuple):
    """A prefix that was read: rotated keys and values [B, T, H, D] of each layer, real tokens [B, T], features."""

    cached: list[tuple[Tensor, Tensor]]
    real: Tensor
    features: Tensor


def read_prefix(text_model: Any, tokens: Tensor, real: Tensor, mask: Tensor) -> Prefix:
    """Run tokens [B, T, W] through a language model; `mask` [B, T, T] is True where a token may be attended to.

    The features are the mean of the last hidden states of the real tokens, float32 [B, W].
    """
    positions = real.long().cumsum(1) - 1
    cached = []
    for layer in text_model.layers:
        query, key, value = project(layer, layer.input_layernorm(tokens))
        query, key = rotate(query, positions), rotate(key, positions)
        cached.append((key, value))
        tokens = tokens + output(layer, attend(query, key, value, mask))
        tokens = tokens + layer.mlp(layer.post_attention_layernorm(tokens))
    hidden = text_model.norm(tokens).float()
    weight = real.unsqueeze(-1).float()
    return Prefix(cached, real, (hidden * weight).sum(1) / weight.sum(1))


def project(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [B, T, H, D] of a layer."""
    query, key, value = (
        projection(hidden).unflatten(-1, (-1, layer.self_attn.head_dim))
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
    )
    return query, key, value


def output(layer: Any, attended: Tensor) -> Tensor:
    """The output projection of attention, [B, T, H, D] → [B, T, W]."""
    return layer.self_attn.o_proj(attended.flatten(2))


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions [B, T] of queries or keys [B, T, H, D]; the two halves of D are the parts of complex numbers."""
    half = x.shape[-1] // 2
    frequencies = ROPE_PERIOD ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
    angles = (positions.float().unsqueeze(-1) * frequencies).unsqueeze(2)  # [B, T, 1, D / 2]
    first, second = x.float().chunk(2, -1)
    sin, cos = angles.sin(), angles.cos()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention [B, T, H, D] with fewer heads of keys and values; `mask` [B, T, S] is True where a key is read.

    Scores are float32. A query that may read nothing, such as a padded token, reads everything: no NaN.
    """
    groups = query.shape[2] // key.shape[2]
    keys, values = (x.repeat_interleave(groups, 2).transpose(1, 2) for x in (key, value))
    scores = query.transpose(1, 2).float() @ keys.float().transpose(2, 3) * query.shape[-1] ** -0.5
    scores = scores.masked_fill(~mask.unsqueeze(1), torch.finfo(torch.float32).min)
    return (scores.softmax(-1).to(values.dtype) @ values).transpose(1, 2)


def time_embedding(time: Tensor, width: int, min_period: float, max_period: float) -> Tensor:
    """sin and cos of 2π t / p for periods p between the two, [B] → [B, width]."""
    fraction = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device=time.device)
    angles = time.unsqueeze(-1) * (2 * math.pi / (min_period * (max_period / min_period) ** fraction))
    return torch.cat([angles.sin(), angles.cos()], -1).float()


def resize_with_padding(pixels: Tensor, size: tuple[int, int], centered: bool) -> Tensor:
    """Resize [B, 3, h, w] to (height, width) with its aspect ratio; zeros around it, or above and left of it."""
    height, width = pixels.shape[2:]
    if (height, width) == tuple(size):
        return pixels
    ratio = max(height / size[0], width / size[1])
    inner = (int(height / ratio), int(width / ratio))
    scaled = functional.interpolate(pixels, inner, mode="bilinear", align_corners=False)
    above, left = size[0] - inner[0], size[1] - inner[1]
    below, right = (above - above // 2, left - left // 2) if centered else (0, 0)
    return functional.pad(scaled, (left - right, right, above - below, below))


def freeze(*modules: nn.Module) -> None:
    """Do not train these modules."""
    for module in modules:
        module.requires_grad_(False)
