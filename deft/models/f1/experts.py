"""A mixture of transformers: experts of different widths with joint attention in every layer.

`F1Model` runs it on the prefix (understanding), the frame tokens (generation) and the action tokens (action),
together or one after the other with a cache of keys and values. Tensor names and arithmetic are Gemma's.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from deft.models.f1.config import ExpertConfig, F1Config

EPSILON = 1e-6
ROTARY_BASE = 10_000.0
LONG = 1024  # tokens from which attention runs block by block without a mask; below, the extra calls cost more
Cache: TypeAlias = list[tuple[Tensor, Tensor]]  # by layer: keys and values [B, S, kv heads, head dim], rotated


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

    def heads(self, name: str, x: Tensor) -> Tensor:
        """[B, S, C] → [B, S, heads or kv heads, head dim] by one of the projections."""
        return getattr(self, name)(x).unflatten(-1, (-1, self.head_dim))


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
        """Return the layer's output from its input and the attention output [B, S, heads · head dim]."""
        x = x + self.self_attn.o_proj(mixed)
        return x + self.mlp(self.post_attention_layernorm(x))


class Expert(nn.Module):
    """A stack of layers and the norm after them."""

    def __init__(self, config: F1Config, expert: ExpertConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config, expert) for _ in range(config.num_layers))
        self.norm = RMSNorm(expert.hidden_size)


class Block(NamedTuple):
    """The layout of tokens: their number, which of them start a new attention block, and which are not padding."""

    size: int
    opens: tuple[int, ...] = ()  # positions
    is_real: Tensor | None = None  # bool [B, S]; None: all of them

    @classmethod
    def join(cls, blocks: Sequence[Block]) -> Block:
        """Concatenate blocks."""
        starts = itertools.accumulate((block.size for block in blocks), initial=0)
        opens = tuple(start + index for start, block in zip(starts, blocks, strict=False) for index in block.opens)
        known = [block.is_real for block in blocks if block.is_real is not None]
        real = [known[0].new_ones(len(known[0]), size) if own is None else own for size, _, own in blocks if known]
        return cls(sum(block.size for block in blocks), opens, torch.cat(real, 1) if real else None)

    def positions(self, device: torch.device) -> Tensor:
        """Return the index of each token among the real tokens: [B, S], or [1, S] if all are real."""
        if self.is_real is None:
            return torch.arange(self.size, device=device)[None]
        return self.is_real.long().cumsum(1) - 1

    def mask(self, num_queries: int, device: torch.device) -> Tensor:
        """Return the attention mask of the last Q tokens, bool [B or 1, 1, Q, S].

        A token attends to the real tokens of its own block and of earlier blocks.

        A padding token attends only to itself, so that its softmax is defined; its output is not used.
        """
        visible = _visible(tuple(self._ends()), num_queries, device)[None]  # [1, Q, S]
        if self.is_real is not None:
            real = self.is_real[:, None, :] & self.is_real[:, -num_queries:, None]
            itself = torch.eye(self.size, dtype=torch.bool, device=device)[-num_queries:]
            visible = visible & real | itself
        return visible.unsqueeze(1)

    def spans(self, positions: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Group adjacent queries that attend to the same keys: (number of queries, number of keys) of each group."""
        ends = self._ends()
        return tuple(
            (len(list(same)), end) for end, same in itertools.groupby(ends[position] for position in positions)
        )

    def _ends(self) -> list[int]:
        """Return the end of each token's block."""
        bounds = [0, *self.opens, self.size]
        return [after for before, after in itertools.pairwise(bounds) for _ in range(after - before)]


@functools.lru_cache(maxsize=64)
def _visible(ends: tuple[int, ...], num_queries: int, device: torch.device) -> Tensor:
    """Return for each of the last Q tokens which positions come before its block's end, bool [Q, S].

    The result is cached, because copying it to a GPU synchronises.
    """
    with torch.inference_mode(False):  # a cached tensor may be used in training later
        positions = torch.arange(len(ends), device=device)
        return positions < torch.tensor(ends[-num_queries:], device=device)[:, None]


class AttentionPattern(NamedTuple):
    """What the queries of a layer attend to: a mask, or spans of queries that attend to all keys up to a position.

    Spans skip masked keys, and allow fused kernels that accept no mask; but each span is a separate call.
    """

    spans: tuple[tuple[int, int], ...]  # queries, keys
    mask: Tensor | None  # bool [B or 1, 1, Q, S]; None: use the spans


class MixtureOfTransformers(nn.Module):
    """The three experts, in the order of their tokens in the sequence."""

    def __init__(self, config: F1Config) -> None:
        super().__init__()
        self.num_layers = config.num_layers
        self.head_dim = config.head_dim
        self.activation_checkpointing = config.activation_checkpointing
        self.understanding = Expert(config, config.understanding)
        self.generation = Expert(config, config.generation)
        self.action = Expert(config, config.action)
        self._run_layer: Callable[..., list[Tensor]] = _joint_layer

    def compile_layers(self, **settings: Any) -> None:
        """Compile a layer of all experts, with the settings of `torch.compile`; equal shapes share the code."""
        self._run_layer = torch.compile(_joint_layer, **settings)

    def forward(
        self,
        streams: dict[str, Tensor],
        block: Block,
        wanted: Mapping[str, int],
        cache: Cache | None = None,
        keep: bool = False,
    ) -> tuple[dict[str, Tensor], Cache]:
        """Return the outputs by expert for the tokens in `streams` (expert → [B, S_e, C_e], in sequence order).

        `wanted`: the number of last tokens of each expert whose outputs are needed; the last layer computes no others.
        `block` covers the cached tokens and the new ones. With `keep`, the returned cache includes the new tokens;
        without it, it is empty.
        """
        names = list(streams)
        states = [streams[name].to(getattr(self, name).layers[0].self_attn.q_proj.weight.dtype) for name in names]
        sizes, device = [state.shape[1] for state in states], states[0].device
        whole = _rotation(block.positions(device)[:, -sum(sizes) :], self.head_dim)
        final = [wanted.get(name, 0) for name in names]
        kept: Cache = []
        recompute = self.activation_checkpointing and torch.is_grad_enabled() and not keep
        patterns = {id(rows): _attention_pattern(block, sizes, rows, device) for rows in (sizes, final)}
        for index in range(self.num_layers):
            layers = [getattr(self, name).layers[index] for name in names]
            rows = final if index == self.num_layers - 1 else sizes
            arguments = (layers, states, rows, patterns[id(rows)], whole, cache[index] if cache else None)
            run = functools.partial(checkpoint, self._run_layer, use_reentrant=False) if recompute else self._run_layer
            *states, keys, values = run(*arguments)
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
    pattern: AttentionPattern,
    rotation: tuple[Tensor, Tensor],
    past: tuple[Tensor, Tensor] | None,
) -> list[Tensor]:
    """Run one layer of all experts: the new states of each expert's last `rows` tokens, then all keys and values."""
    normed = [layer.input_layernorm(state) for layer, state in zip(layers, states, strict=True)]
    keys, values = _rotate(_joint_heads(layers, "k_proj", normed), rotation), _joint_heads(layers, "v_proj", normed)
    if past is not None:
        keys, values = torch.cat([past[0], keys], 1), torch.cat([past[1], values], 1)
    sizes = [state.shape[1] for state in states]
    if rows != sizes:
        cos, sin = (_last(part, sizes, rows, 1) for part in rotation)
        rotation = cos, sin
        states, normed = (
            [part[:, part.shape[1] - n :] for part, n in zip(parts, rows, strict=True)] for parts in (states, normed)
        )
    query = _rotate(_joint_heads(layers, "q_proj", normed), rotation)
    parts = _attend(query, keys, values, pattern).split(rows, 1)
    after = [
        layer.after(state, part) if count else state
        for layer, state, part, count in zip(layers, states, parts, rows, strict=True)
    ]
    return [*after, keys, values]


def _joint_heads(layers: list[Layer], name: str, states: list[Tensor]) -> Tensor:
    """Project the states of all experts, and join them along the sequence."""
    return torch.cat([layer.self_attn.heads(name, state) for layer, state in zip(layers, states, strict=True)], 1)


def _attention_pattern(block: Block, sizes: list[int], rows: list[int], device: torch.device) -> AttentionPattern:
    """Build the pattern of the last `rows` of each expert's `sizes` tokens; the block may start with cached tokens."""
    ends = itertools.accumulate(sizes, initial=block.size - sum(sizes))
    next(ends)
    spans = block.spans([index for end, n in zip(ends, rows, strict=True) for index in range(end - n, end)])
    if block.is_real is None and (len(spans) == 1 or block.size >= LONG):
        return AttentionPattern(spans, None)
    return AttentionPattern(spans, _last(block.mask(sum(sizes), device), sizes, rows, 2))


def _last(values: Tensor, sizes: list[int], rows: list[int], axis: int) -> Tensor:
    """Select the last `rows` of each part, for parts of these sizes along an axis."""
    if rows == sizes:
        return values
    parts = values.split(sizes, axis)
    return torch.cat([part.narrow(axis, size - n, n) for part, size, n in zip(parts, sizes, rows, strict=True)], axis)


def _attend(query: Tensor, keys: Tensor, values: Tensor, pattern: AttentionPattern) -> Tensor:
    """Attention of queries [B, Q, heads, d] to keys and values [B, S, kv heads, d]: [B, Q, heads · d]."""
    key_heads = keys.shape[2]
    group = query.shape[2] // key_heads
    if pattern.mask is not None:
        # Key heads are repeated here, because not every fused kernel supports both a mask and grouped queries.
        query, keys, values = query.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        if key_heads == 1:  # a view
            keys, values = keys.expand(-1, group, -1, -1), values.expand(-1, group, -1, -1)
        else:
            keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        mixed = functional.scaled_dot_product_attention(query, keys, values, attn_mask=pattern.mask)
        return mixed.transpose(1, 2).flatten(2)
    found = []
    for part, (size, end) in zip(query.split([size for size, _ in pattern.spans], 1), pattern.spans, strict=True):
        # All queries attend to all these keys, so the heads of a group can be queries of one head. [B, kv, n · g, d]
        folded = part.unflatten(2, (key_heads, group)).transpose(1, 2).flatten(2, 3)
        mixed = functional.scaled_dot_product_attention(
            folded, keys[:, :end].transpose(1, 2), values[:, :end].transpose(1, 2)
        )
        found.append(mixed.unflatten(2, (size, group)).transpose(1, 2).flatten(2))
    return torch.cat(found, 1) if len(found) > 1 else found[0]


def _rotation(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin of position · base^(−2i/d), [B, S, 1, d/2] in float32."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[:, :, None, None].float() * ROTARY_BASE**-exponents
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each pair (x_i, x_{i + d/2}) of [B, S, heads, d] by its angle."""
    cos, sin = rotation
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
