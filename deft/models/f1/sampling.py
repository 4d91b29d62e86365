"""Samples codes from logits."""

from __future__ import annotations

import torch
from torch import Tensor


def choose(logits: Tensor, top_k: int, top_p: float, generator: torch.Generator | None = None) -> Tensor:
    """Sample a code for each token of [B, n, K] by top-k (0: all codes) and nucleus sampling (`top_p`)."""
    if top_k == 1:
        return logits.argmax(-1)
    if 0 < top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k, -1).values[..., -1:], -torch.inf)
    if top_p < 1.0:
        ordered, order = logits.sort(-1, descending=True)
        probabilities = ordered.softmax(-1)
        # Drop codes after top_p is reached; the most likely code always stays.
        dropped = probabilities.cumsum(-1) - probabilities >= top_p
        logits = logits.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)
    probabilities = logits.softmax(-1)
    return torch.multinomial(probabilities.flatten(0, 1), 1, generator=generator).view(logits.shape[:-1])
