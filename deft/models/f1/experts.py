"""A mixture of transformers: experts of their own width that share one attention in every layer.

`F1Model` runs it on the prefix (understanding), the frame tokens (generation) and the action tokens (action),
together or one after the other with a cache of keys and values. Tensor names and arithmetic are Gemma's.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from deft.models.f1.config import ExpertConfig, F1Config

EPSILON = 1e-6
ROTARY_BASE = 10_000.0
Cache: TypeAlias = list[tuple[Tensor, Tensor]]  # by layer: keys and values [B, kv heads, S, head dim], rotated


class RMSNorm(nn.Module):
    """x / rms(x) · (1 + w), in float32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """[…, C], same out."""
        return functional.rms_norm(x.float(), self.weight.shape, 1.0 + self.weight.float(), EPSILON).to(x.dtype)


class Attention(nn.Module):
    """The projections of one expert; the attention itself is joint."""

    def __init__(self, config: F1Config, hidden_size: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(hidden_size, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, hidden_size, bias=False)

    def queries(self, x: Tensor) -> Tensor:
        """[B, S, C] → [B, S, heads, head dim]."""
        return self.q_proj(x).unflatten(-1, (-1, self.head_dim))

    def keys(self, x: Tensor) -> Tensor:
        """[B, S, C] → [B, S, kv heads, head dim]."""
        return self.k_proj(x).unflatten(-1, (-1, self.head_dim))

    def values(self, x: Tensor) -> Tensor:
        """[B, S, C] → [B, S, kv heads, head dim]."""
        return self.v_proj(x).unflatten(-1, (-1, self.head_dim))


class GatedMLP(nn.Module):
    """down(gelu(gate(x)) · up(x))."""

    def __init__(self, expert: ExpertConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(expert.hidden_size, expert.intermediate_size, bias=False)
        self.up_proj = nn.Linear(expert.hidden_size, expert.intermediate_size, bias=False)
        self.down_proj = nn.Linear(expert.intermediate_size, expert.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[…, C], same out."""
        return self.down_proj(functional.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class Layer(nn.Module):
    """One expert's part of a layer, before and after the joint attention."""

    def __init__(self, config: F1Config, expert: ExpertConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(expert.hidden_size)
        self.self_attn = Attention(config, expert.hidden_size)
        self.post_attention_layernorm = RMSNorm(expert.hidden_size)
        self.mlp = GatedMLP(expert)

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The layer's output from its input and what attention gave, [B, S, heads · head dim]."""
        x = x + self.self_attn.o_proj(mixed)
        return x + self.mlp(self.post_attention_layernorm(x))


class Expert(nn.Module):
    """A stack of layers and the norm after them."""

    def __init__(self, config: F1Config, expert: ExpertConfig) -> None:
        super().__init__()
        self.hidden_size = expert.hidden_size
        self.layers = nn.ModuleList(Layer(config, expert) for _ in range(config.num_layers))
        self.norm = RMSNorm(expert.hidden_size)


class Block(NamedTuple):
    """Where tokens stand: which are real, and which of them open a new attention block."""

    is_real: Tensor  # bool [B, S]
    opens: Tensor  # bool [S]

    @classmethod
    def join(cls, blocks: Sequence[Block]) -> Block:
        """Blocks one after the other."""
        return cls(torch.cat([block.is_real for block in blocks], 1), torch.cat([block.opens for block in blocks]))

    def positions(self) -> Tensor:
        """[B, S]: place among the real tokens, from 0."""
        return self.is_real.long().cumsum(1) - 1

    def mask(self, num_queries: int) -> Tensor:
        """bool [B, 1, Q, S]: what each of the last Q tokens attends to: real tokens of its own and of earlier blocks.

        A padding token attends to itself alone, so that its softmax is defined; nothing reads it.
        """
        number = self.opens.long().cumsum(0)
        visible = number[None, :] <= number[-num_queries:, None]  # [Q, S]
        real = self.is_real[:, None, :] & self.is_real[:, -num_queries:, None]
        itself = torch.eye(len(number), dtype=torch.bool, device=number.device)[-num_queries:]
        return (visible & real | itself).unsqueeze(1)


class MixtureOfTransformers(nn.Module):
    """Experts by name, in the order of their tokens in the sequence."""

    def __init__(self, config: F1Config) -> None:
        super().__init__()
        self.num_layers = config.num_layers
        self.head_dim = config.head_dim
        self.activation_checkpointing = config.activation_checkpointing
        self.understanding = Expert(config, config.understanding)
        self.generation = Expert(config, config.generation)
        self.action = Expert(config, config.action)

    def forward(
        self,
        streams: dict[str, Tensor],
        block: Block,
        wanted: Mapping[str, int],
        cache: Cache | None = None,
        keep: bool = False,
    ) -> tuple[dict[str, Tensor], Cache]:
        """Outputs by expert for the tokens in `streams` (expert → [B, S_e, C_e], in sequence order).

        `wanted`: of which experts the last how many tokens' outputs are needed; the last layer makes no others. `block`
        covers the cached tokens and these. With `keep`, the cache returned goes on with these tokens; without it, it is
        empty.
        """
        names = list(streams)
        states = [streams[name].to(getattr(self, name).layers[0].self_attn.q_proj.weight.dtype) for name in names]
        sizes = [state.shape[1] for state in states]
        mask = block.mask(sum(sizes))
        rotation = _rotation(block.positions()[:, -sum(sizes) :], self.head_dim)
        final = [wanted.get(name, 0) for name in names]
        kept: Cache = []
        recompute = self.activation_checkpointing and torch.is_grad_enabled() and not keep
        for index in range(self.num_layers):
            layers = [getattr(self, name).layers[index] for name in names]
            rows = final if index == self.num_layers - 1 else sizes
            arguments = (layers, states, rows, mask, rotation, cache[index] if cache else None)
            found = checkpoint(_joint_layer, *arguments, use_reentrant=False) if recompute else _joint_layer(*arguments)
            *states, keys, values = found
            if keep:
                kept.append((keys, values))
        outputs = {
            name: getattr(self, name).norm(state)
            for name, state, count in zip(names, states, final, strict=True)
            if count
        }
        return outputs, kept


def _joint_layer(
    layers: list[Layer],
    states: list[Tensor],
    rows: list[int],
    mask: Tensor,
    rotation: tuple[Tensor, Tensor],
    past: tuple[Tensor, Tensor] | None,
) -> list[Tensor]:
    """One layer of all experts: new states of the last `rows` tokens of each, then keys and values with the past's."""
    normed = [layer.input_layernorm(state) for layer, state in zip(layers, states, strict=True)]
    keys, values = (
        torch.cat([getattr(layer.self_attn, name)(part) for layer, part in zip(layers, normed, strict=True)], 1)
        for name in ("keys", "values")
    )
    keys, values = _rotate(keys.transpose(1, 2), rotation), values.transpose(1, 2)
    if past is not None:
        keys, values = torch.cat([past[0], keys], 2), torch.cat([past[1], values], 2)
    sizes = [state.shape[1] for state in states]
    if rows != sizes:
        ends = list(itertools.accumulate(sizes))
        asked = [place for end, count in zip(ends, rows, strict=True) for place in range(end - count, end)]
        mask, rotation = mask[:, :, asked], (rotation[0][:, :, asked], rotation[1][:, :, asked])
        states, normed = (
            [part[:, part.shape[1] - n :] for part, n in zip(parts, rows, strict=True)] for parts in (states, normed)
        )
    query = torch.cat([layer.self_attn.queries(part) for layer, part in zip(layers, normed, strict=True)], 1)
    query = _rotate(query.transpose(1, 2), rotation)
    # Few key heads serve many query heads. Spelled out, since not every fused kernel takes both a mask and such groups.
    group = query.shape[1] // keys.shape[1]
    mixed = functional.scaled_dot_product_attention(
        query, _for_each_query(keys, group), _for_each_query(values, group), attn_mask=mask
    )
    parts = mixed.transpose(1, 2).flatten(2).split(rows, 1)
    after = [
        layer.after(state, part) if count else state
        for layer, state, part, count in zip(layers, states, parts, rows, strict=True)
    ]
    return [*after, keys, values]


def _for_each_query(heads: Tensor, group: int) -> Tensor:
    """[B, kv heads, S, d] → [B, heads, S, d]; a view where there is one key head."""
    if heads.shape[1] == 1:
        return heads.expand(-1, group, -1, -1)
    return heads.repeat_interleave(group, 1)


def _rotation(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin of position · base^(−2i/d), [B, 1, S, d/2] in float32."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[:, None, :, None].float() * ROTARY_BASE**-exponents
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (x_i, x_{i + d/2}) of [B, heads, S, d] by its angle."""
    cos, sin = rotation
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
