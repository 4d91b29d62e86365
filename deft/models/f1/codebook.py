"""How the codebook of an image tokenizer learns: each code is a running mean of the features that it stands for.

`deft train tokenizer` uses it in place of gradients, which move a code by no more than a step size an update.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deft.models.f1.vq import MultiScaleQuantizer

START_DECAY, START_SHARE = 0.8, 0.05


class CodebookAverages:
    """k-means by running means, all scales at once: e_k = Σ decay^age z / Σ decay^age, over what k was nearest to."""

    def __init__(self, quantizer: MultiScaleQuantizer, decay: float = 0.97) -> None:
        """The codes learn by this alone from now on; their gradients are turned off."""
        self.quantizer = quantizer
        self.decay = decay
        codes = quantizer.embedding.weight.requires_grad_(False)
        self.counts = torch.zeros(len(codes), device=codes.device)
        self.sums = torch.zeros_like(codes)

    @torch.no_grad()
    def start(self, features: Tensor, generator: torch.Generator, rounds: int = 12) -> None:
        """Place all codes by k-means on features [B, D, grid, grid]; unused codes are drawn again.

        Damped: what the finer scales are left with moves as the codes do, and whole steps would chase it for ever.
        """
        vectors = features.permute(0, 2, 3, 1).flatten(0, 2)
        self._place(torch.arange(len(self.counts), device=self.counts.device), vectors, generator)
        for number in range(rounds):
            vectors = self._update(features, decay=START_DECAY if number else 0.0)
            if number < rounds - 2:  # the last rounds settle
                self._place((self.counts < START_SHARE * self.counts.mean()).nonzero().flatten(), vectors, generator)

    @torch.no_grad()
    def begin(self, features: Tensor) -> None:
        """Keep the codes where they are, and count what they stand for among features [B, D, grid, grid]."""
        _, codes = self.quantizer.assign(features)
        hits = torch.bincount(torch.cat([part.flatten() for part in codes]), minlength=len(self.counts))
        self.counts.copy_(hits)
        self.sums.copy_(self.quantizer.embedding.weight * self.counts.unsqueeze(1))

    @torch.no_grad()
    def update(self, features: Tensor) -> None:
        """Move the codes to the features [B, D, grid, grid] of a batch."""
        self._update(features, self.decay)

    @torch.no_grad()
    def revive(self, features: Tensor, generator: torch.Generator, share: float = 0.2) -> int:
        """Give codes that are used less than `share` of the mean a new place among features; returns how many."""
        vectors, _ = self.quantizer.assign(features)
        unused = (self.counts < share * self.counts.mean()).nonzero().flatten()
        self._place(unused, torch.cat(vectors), generator)
        return len(unused)

    def rescale(self, factor: float) -> None:
        """Let all that was counted so far count this much of it."""
        self.counts.mul_(factor)
        self.sums.mul_(factor)

    def state_dict(self) -> dict[str, Any]:
        """The running sums."""
        return {"counts": self.counts.clone(), "sums": self.sums.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from saved sums."""
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
        # A code that has not been seen for long keeps its place: its sums are next to nothing.
        weight = self.quantizer.embedding.weight
        weight.copy_(torch.where((self.counts > 1e-2).unsqueeze(1), means, weight))
        return joined

    def _place(self, codes: Tensor, vectors: Tensor, generator: torch.Generator) -> None:
        """Put codes onto vectors drawn at random; they count as used on average, to have time to prove themselves."""
        mean = self.counts.mean()
        chosen = torch.randint(len(vectors), (len(codes),), generator=generator).to(vectors.device)
        self.quantizer.embedding.weight[codes] = vectors[chosen]
        self.counts[codes] = torch.where(mean > 0, mean, 1.0)
        self.sums[codes] = vectors[chosen] * self.counts[codes].unsqueeze(1)
