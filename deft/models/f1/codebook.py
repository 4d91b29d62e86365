"""Codebook learning of an image tokenizer: each code is a running mean of the features assigned to it.

`deft train tokenizer` uses it instead of gradients, whose steps are limited by the learning rate.
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
