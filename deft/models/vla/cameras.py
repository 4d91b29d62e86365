"""Camera encoders of `vla-tiny`: cells of an image → positions and appearances of what queries attend to.

`CellEncoder` encodes each cell from its own pixels; two CPU cores can train it. `ConvolutionEncoder` sees what is
around a cell too. It needs fewer samples and more computation: it is for a GPU.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional

TEXT_DIM = 64
QUERIES, WORD_QUERIES = 16, 8  # image queries, and those of them computed from the text
APPEARANCE_DIM = 4  # features of the image at the position of a query
SHARPNESS = 5.0  # inverse temperature of the attention of a query; with 1 it learns several times as slowly
LEAST_CELLS = 4  # on a side of the image: convolutions halve them twice


class CameraEncoder(nn.Module, ABC):
    """Encode an image as positions and appearances of what learned queries and queries of the text attend to.

    The image is divided into cells of `cell` pixels, each with features f. A query q, learned or computed from the
    text, attends to the cells:  p = softmax(5 f q);  out = (Σ p x, Σ p y, max f q, Σ p L f): position, confidence and
    appearance.

    The layers of the cells may compute in bfloat16 (`dtype`): they take most of the time and memory. What is pooled
    over cells is in float32, since a position in bfloat16 has steps of 0.4 % of the image.
    """

    grid: Tensor
    channels: int
    out_dim = (3 + APPEARANCE_DIM) * QUERIES
    reads_text: bool
    """Whether the features of cells depend on the text."""
    dtype: torch.dtype | None = None
    """The type in which cells are computed; None: that of the weights."""

    def __init__(self, image_size: int, cell: int) -> None:
        super().__init__()
        self.cell = cell
        self.make_layers()
        self.look = nn.Linear(self.channels, APPEARANCE_DIM)
        self.queries = nn.Parameter(torch.randn(QUERIES - WORD_QUERIES, self.channels))
        self.words = nn.Linear(TEXT_DIM, WORD_QUERIES * self.channels)
        line = torch.linspace(-1.0, 1.0, image_size // cell)
        y, x = torch.meshgrid(line, line, indexing="ij")
        self.register_buffer("grid", torch.stack([x.flatten(), y.flatten()], 1), persistent=False)

    @abstractmethod
    def make_layers(self) -> None:
        """Make the layers of the cells."""

    @abstractmethod
    def encode_cells(self, image: Tensor, text: Tensor, dtype: torch.dtype) -> Tensor:
        """Features of all cells, computed in `dtype`: [B, cells, channels]."""

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        """uint8 images [B, 3, h, w] and text features [B, TEXT_DIM] → [B, out_dim]."""
        return self._pool(self._cells(image, text), self._text_queries(text))

    def describe(self, image: Tensor, text: Tensor, choices: Tensor) -> tuple[Tensor, Tensor]:
        """As `forward`, and how well each of several texts [B, n, TEXT_DIM] fits the image: [B, out_dim] and [B, n].

        The score of a text is the mean of Σ p f q over its queries. It is high only where the attention is
        concentrated on cells that match. The cells are encoded without a text, so that they do not contain the right
        answer.
        """
        cells = self._cells(image, text)
        features = self._pool(cells, self._text_queries(text))
        if self.reads_text:
            cells = self._cells(image, torch.zeros_like(text))
        queries = self._text_queries(choices.flatten(0, 1)).unflatten(0, choices.shape[:2])
        matches = _matches(cells, queries.flatten(1, 2))  # [B, n WORD_QUERIES, cells]
        scores = ((SHARPNESS * matches).softmax(-1) * matches).sum(-1)
        return features, scores.unflatten(1, (-1, WORD_QUERIES)).mean(-1)

    def _cells(self, image: Tensor, text: Tensor) -> Tensor:
        own = self.queries.dtype
        return self.encode_cells(image, text, own if self.dtype is None else self.dtype).to(own)

    def _text_queries(self, text: Tensor) -> Tensor:
        """The queries of texts: [B, WORD_QUERIES, channels]."""
        return self.words(text).view(len(text), WORD_QUERIES, self.channels)

    def _pool(self, cells: Tensor, text_queries: Tensor) -> Tensor:
        """Positions, confidences and appearances of what all queries attend to: [B, out_dim]."""
        matches = _matches(cells, torch.cat([self.queries.expand(len(cells), -1, -1), text_queries], 1))
        attention = (SHARPNESS * matches).softmax(-1)
        pooled = attention @ torch.cat([self.grid.expand(len(cells), -1, -1), self.look(cells)], 2)
        positions, appearances = pooled.split([2, APPEARANCE_DIM], 2)  # [B, Q, …]
        # amax is several times as fast, but its gradient compares all cells; that of max selects one of them
        confidence = matches.max(-1).values if matches.requires_grad else matches.amax(-1)
        return torch.cat([positions.flatten(1), confidence, appearances.flatten(1)], 1)


def _matches(cells: Tensor, queries: Tensor) -> Tensor:
    """f q of all cells [B, cells, C] and queries [B, Q, C]: [B, Q, cells]."""
    # In this order, and with contiguous queries, many times as fast as queries @ cellsᵀ
    return (cells @ queries.transpose(1, 2).contiguous()).transpose(1, 2).contiguous()


class CellEncoder(CameraEncoder):
    """Encode each cell from a patch twice as wide: f = relu(V relu(W pixels)).

    Neighbouring patches overlap, so that an object between two cells gets a position between them. All layers are
    matrix products: on a CPU the gradient of a convolution costs several times as much.
    """

    channels = 24
    reads_text = False

    def make_layers(self) -> None:
        """Two linear layers."""
        self.pixels = nn.Linear(3 * (2 * self.cell) ** 2, self.channels)
        self.cells = nn.Linear(self.channels, self.channels)

    def encode_cells(self, image: Tensor, text: Tensor, dtype: torch.dtype) -> Tensor:
        """Features of all cells; the same for every text."""
        weights = (self._by_quarter(self.pixels.weight), self.pixels.bias, self.cells.weight, self.cells.bias)
        first, first_bias, second, second_bias = (weight.to(dtype) for weight in weights)
        pixels = functional.linear(self.cut(image, dtype), first, first_bias)
        return functional.relu(functional.linear(functional.relu(pixels), second, second_bias))

    def cut(self, image: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The pixels of the patch of each cell, scaled to [-1, 1]: [B, cells, 3 (2 cell)²]; black beyond the border.

        A patch consists of four squares of cell² pixels, which it shares with its neighbours: the image is divided into
        squares once, and four of them are concatenated. Pixels are ordered by square, then by channel.
        """
        cell, side = self.cell, image.shape[-1] // self.cell + 1
        left = cell // 2
        padded = functional.pad(image, (left, cell - left, left, cell - left)).view(-1, 3, side, cell, side, cell)
        squares = self.pixels.weight.new_empty((len(image), side, side, 3, cell, cell), dtype=dtype)
        for channel, row in itertools.product(range(3), range(cell)):  # three times as fast as one permuted copy
            squares[..., channel, row, :] = padded[:, channel, :, row]
        squares = squares.flatten(3).sub_(127.5).mul_(1 / 127.5)
        upper, lower = squares[:, :-1], squares[:, 1:]
        patches = [upper[:, :, :-1], upper[:, :, 1:], lower[:, :, :-1], lower[:, :, 1:]]
        return torch.cat(patches, -1).flatten(1, 2)

    def _by_quarter(self, weight: Tensor) -> Tensor:
        """Reorder weights of a patch from channel, row and column to the order of `cut`."""
        parts = weight.view(-1, 3, 2, self.cell, 2, self.cell)
        return parts.permute(0, 2, 4, 1, 3, 5).reshape(weight.shape)


class ConvolutionEncoder(CameraEncoder):
    """Encode cells with what is around them: convolutions at three scales, whose features are added up.

    The cells are halved in number twice; at the two coarse scales residual blocks follow, modulated by the text
    (FiLM): h ← h + W₂ relu((1 + γ) ⊙ W₁ relu(h) + β), where γ and β are linear in the text features. The coarse
    features are projected and added to the fine ones, so that a position keeps the accuracy of a cell.
    """

    channels = 32
    reads_text = True
    widths = (32, 64, 96)

    def make_layers(self) -> None:
        """The layers of the three scales."""
        fine, middle, coarse = self.widths
        self.stem = nn.Conv2d(3, fine, self.cell + 2, stride=self.cell, padding=1)
        self.halve = nn.ModuleList([nn.Conv2d(fine, middle, 4, 2, 1), nn.Conv2d(middle, coarse, 4, 2, 1)])
        self.blocks = nn.ModuleList([ModulatedBlock(middle), ModulatedBlock(coarse)])
        self.project = nn.ModuleList([nn.Conv2d(middle, fine, 1), nn.Conv2d(coarse, middle, 1)])
        self.mix = nn.Conv2d(fine, self.channels, 3, padding=1)

    def encode_cells(self, image: Tensor, text: Tensor, dtype: torch.dtype) -> Tensor:
        """Features of all cells, given the text."""
        pixels = image.to(dtype).sub_(127.5).mul_(1 / 127.5)
        with torch.autocast(image.device.type, dtype, enabled=dtype != self.queries.dtype):
            scales = [self.stem(pixels.to(memory_format=torch.channels_last))]  # up to 1.25 times as fast on a CPU
            for halve, block in zip(self.halve, self.blocks, strict=True):
                scales.append(block(halve(functional.relu(scales[-1])), text))
            found = scales.pop()
            for project in reversed(self.project):
                finer = scales.pop()
                found = finer + functional.interpolate(project(functional.relu(found)), size=finer.shape[-2:])
            return functional.relu(self.mix(functional.relu(found))).flatten(2).transpose(1, 2)


class ModulatedBlock(nn.Module):
    """h + W₂ relu((1 + γ) ⊙ W₁ relu(h) + β), with γ and β linear in the text features."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.text = nn.Linear(TEXT_DIM, 2 * channels)

    def forward(self, features: Tensor, text: Tensor) -> Tensor:
        """[B, C, h, w] and text features [B, TEXT_DIM] → [B, C, h, w]."""
        gain, offset = self.text(text)[..., None, None].chunk(2, 1)
        inner = torch.addcmul(offset, 1.0 + gain, self.first(functional.relu(features)))
        return features + self.second(functional.relu(inner))


ENCODERS: dict[str, type[CameraEncoder]] = {"cells": CellEncoder, "convolutions": ConvolutionEncoder}
