"""Returns and advantages over time-major rollouts [T, N]; shared by the on-policy algorithms."""

from __future__ import annotations

import torch
from torch import Tensor


def discounted_sum(x: Tensor, factor: Tensor) -> Tensor:
    """y_t = x_t + factor_t · y_{t+1}, with y_T = 0, along the first dim, in log₂ T vectorised passes.

    Each pass joins spans of doubled length: after k passes y_t sums the next 2^k terms and factor_t is their product.
    """
    total, factor = x.clone(), factor.clone()
    span, length = 1, x.shape[0]
    while span < length:
        total[:-span] += factor[:-span] * total[span:].clone()
        factor[:-span] *= factor[span:].clone()
        span *= 2
    return total


def next_values(value: Tensor, bootstrap: Tensor, done: Tensor) -> Tensor:
    """V(s_{t+1}), [T, N]: the next row's value, and the bootstrap where no row follows (an end, the last step)."""
    return torch.where(done, bootstrap, torch.cat([value[1:], bootstrap[-1:]]))


def generalized_advantage(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    done: Tensor,
    discount: Tensor | float,
    gae_lambda: float,
) -> Tensor:
    """GAE(λ), [T, N].

    δ_t = r_t + γ V(s_{t+1}) (1 − terminated_t) − V(s_t);  A_t = δ_t + γ λ (1 − done_t) A_{t+1}.
    `next_value` at a truncation is V(final observation); `discount` may differ by step (action chunks: γ^steps).
    """
    delta = reward + discount * next_value * (~terminated).to(value.dtype) - value
    return discounted_sum(delta, discount * gae_lambda * (~done).to(value.dtype))


def returns_so_far(reward: Tensor, done: Tensor, discount: Tensor | float, carried: Tensor) -> tuple[Tensor, Tensor]:
    """R_t = γ R_{t−1} (1 − done_{t−1}) + r_t forwards in time from `carried` [N]; also what to carry on.

    The scale of these returns is what reward normalisation divides by.
    """
    keep = discount * (~done).to(reward.dtype)  # what of R_t reaches R_{t+1}
    first = reward.clone()
    first[0] += carried
    factor = torch.zeros_like(reward)
    factor[1:] = keep[:-1]
    returns = discounted_sum(first.flip(0), factor.flip(0)).flip(0)
    return returns, returns[-1] * keep[-1]
