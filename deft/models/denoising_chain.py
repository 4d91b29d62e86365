"""A denoising chain as a sequence of Gaussians: drawn, scored again, or run without noise; as pure functions.

A schedule (`deft.models.denoising`: flow, diffusion) gives the mean and the deviation of each step:

    x_{k+1} = μ_k(x_k) + σ_k(x_k) ε_k,      log p = Σ_k log N(x_{k+1}; μ_k, σ_k),      k = 0 … S − 1

The first x is drawn from N(0, 1) whatever the weights: it cancels in every ratio and is left out. A policy stores the
chain under `schema.SAMPLE` when it acts, and scores it again.

Dims outside a `mask` are not executed, yet μ of the executed dims may depend on them. They get no noise: given the
weights they are a function of x_0 and of the executed dims before them, and scoring computes them again,

    x_{k+1} = μ_k + mask · σ_k ε_k,    log p = Σ_k Σ_{mask} log N(x_{k+1}; μ_k, σ_k),

which is the exact log-prob of the executed dims of the chain. With noise of their own in every step, a sum over the
executed dims alone would be no log-prob of anything: ∇ log p of the omitted dims correlates with the actions that they
led to, and the policy gradient would be biased.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deft.models.distributions import HALF_LOG_2PI

Transition = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""(x_k [B, K, A], k) → μ_k [B, K, A] and σ_k, which broadcasts to it."""


def draw(
    transition: Transition,
    noise: Tensor,
    num_steps: int,
    deterministic: bool = False,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """The chain [B, S + 1, K, A] from `noise` [B, K, A], whose last entry is the action, and its log-probs [B, S].

    Deterministic: every step is its mean. `mask` as in `score`, which gives the same log-probs again; there is no noise
    outside of it.
    """
    chain, log_probs = [noise.float()], []
    for step in range(num_steps):
        mean, deviation = transition(chain[-1], step)
        moved = mean
        if not deterministic:
            drawn = torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
            moved = _where(mask, mean + deviation * drawn, mean)
        chain.append(moved)
        log_probs.append(step_log_prob(moved, mean, deviation, mask))
    return torch.stack(chain, 1), torch.stack(log_probs, 1)


def score(transition: Transition, chain: Tensor, mask: Tensor | None = None, first: int = 0) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of each step of a chain from step `first` on, [B, S − first] each.

    Over the dims where `mask` (bool, broadcast to [B, K, A]) is True. One pass of the model for each step.
    """
    x, log_probs, entropies = chain[:, first], [], []
    for step in range(first, chain.shape[1] - 1):
        (mean, deviation), following = transition(x, step), chain[:, step + 1]
        log_probs.append(step_log_prob(following, mean, deviation, mask))
        # Of a Gaussian: log σ + ½ log 2πe
        entropies.append(sum_real((deviation.log() + (0.5 + HALF_LOG_2PI)).expand_as(mean), mask))
        x = _where(mask, following, mean)
    return torch.stack(log_probs, 1), torch.stack(entropies, 1)


def step_log_prob(value: Tensor, mean: Tensor, deviation: Tensor, mask: Tensor | None = None) -> Tensor:
    """log N(x; μ, σ) summed over the real dims: [B, K, A] → [B]."""
    log_prob = -0.5 * ((value - mean) / deviation).square() - deviation.log() - HALF_LOG_2PI
    return sum_real(log_prob, mask)


def sum_real(values: Tensor, mask: Tensor | None) -> Tensor:
    """Sum [B, K, A] over steps and the dims where the mask is True: [B]."""
    return (values if mask is None else values.masked_fill(~mask, 0.0)).sum((1, 2))


def mean_real(values: Tensor, mask: Tensor | None) -> Tensor:
    """Mean [B, K, A] over steps and the dims where the mask is True: [B]."""
    if mask is None:
        return values.mean((1, 2))
    return sum_real(values, mask) / mask.expand(values.shape).sum((1, 2)).clamp(min=1)


def _where(mask: Tensor | None, inside: Tensor, outside: Tensor) -> Tensor:
    return inside if mask is None else torch.where(mask, inside, outside)
