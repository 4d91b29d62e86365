"""Flow-matching policies with log-probs: the denoising chain with noise in every step, as pure functions.

x runs from noise (t = 1) to the actions (t = 0) along a learned velocity v ≈ ε − a. Plain Euler steps are deterministic
and have no density; with a little noise each step is a Gaussian, and the chain's log-prob is the sum of theirs:

    x_{k+1} = x_k − v(x_k, t_k) / S + σ_k ε_k,      t_k = 1 − k / S,      log p = Σ_k log N(x_{k+1}; x_k − v / S, σ_k)

The first x is drawn from N(0, 1) whatever the weights: it cancels in every ratio and is left out. A policy
stores the chain under `schema.SAMPLE` when it acts, and scores it again: `pi0`, `vla-tiny` and the F1 explorer do.

Dims outside a `mask` are not executed, yet the velocity of the executed dims may depend on them. They get no noise:
given the weights they are a function of x_0 and of the executed dims before them, and scoring computes them again,

    x_{k+1} = μ_k + mask · σ_k ε_k,    μ_k = x_k − v(x_k, t_k) / S,    log p = Σ_k Σ_{mask} log N(x_{k+1}; μ_k, σ_k),

which is the exact log-prob of the executed dims of the chain. With noise of their own in every step, a sum over the
executed dims alone would be no log-prob of anything: ∇ log p of the omitted dims correlates with the actions that they
led to, and the policy gradient would be biased.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deft.models.distributions import HALF_LOG_2PI

Velocity = Callable[[Tensor, Tensor], Tensor]  # (x [B, K, A], t [B]) → ε − a, [B, K, A]


def draw_chain(
    velocity: Velocity,
    noise: Tensor,
    deviation: Tensor,
    deterministic: bool = False,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """The chain [B, S + 1, K, A] from `noise` [B, K, A], whose last entry is the action, and its log-probs [B, S].

    `deviation` [S], or [S, K, A], is σ of each step, and its length the number of steps. Deterministic: no noise in the
    steps, which is the model's own sampling. `mask` as in `chain_log_prob`, which gives the same log-probs again; there
    is no noise outside of it.
    """
    num_steps = len(deviation)
    chain, log_probs = [noise.float()], []
    for step in range(num_steps):
        mean = moved = _mean(velocity, chain[-1], step, num_steps)
        if not deterministic:
            drawn = torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
            moved = _where(mask, mean + deviation[step] * drawn, mean)
        chain.append(moved)
        log_probs.append(step_log_prob(moved, mean, deviation[step], mask))
    return torch.stack(chain, 1), torch.stack(log_probs, 1)


def integrate(velocity: Velocity, noise: Tensor, num_steps: int) -> Tensor:
    """The actions at the end of plain Euler steps from `noise` [B, K, A]."""
    x = noise
    for step in range(num_steps):
        x = _mean(velocity, x, step, num_steps)
    return x


def chain_log_prob(velocity: Velocity, chain: Tensor, deviation: Tensor, mask: Tensor | None = None) -> Tensor:
    """Log-prob of each step of a chain, [B, S], over the dims where `mask` (bool, broadcast to [B, K, A]) is True.

    Their sum is the chain's. One pass of the model a step.
    """
    x, log_probs = chain[:, 0], []
    for step in range(len(deviation)):
        mean, following = _mean(velocity, x, step, len(deviation)), chain[:, step + 1]
        log_probs.append(step_log_prob(following, mean, deviation[step], mask))
        x = _where(mask, following, mean)
    return torch.stack(log_probs, 1)


def step_log_prob(value: Tensor, mean: Tensor, deviation: Tensor, mask: Tensor | None = None) -> Tensor:
    """log N(x; μ, σ) summed over the real dims: [B, K, A] → [B]."""
    log_prob = -0.5 * ((value - mean) / deviation).square() - deviation.log() - HALF_LOG_2PI
    return _sum_real(log_prob, mask)


def chain_entropy(deviation: Tensor, shape: torch.Size | tuple[int, ...], mask: Tensor | None = None) -> Tensor:
    """Entropy of a chain's noise, [B], for actions of `shape` [B, K, A]: Σ log σ + ½ log 2πe over steps and dims."""
    total = (deviation.log() + 0.5 + HALF_LOG_2PI).sum(0)
    return _sum_real(total.expand(shape), mask)


def hold_last(actions: Tensor, step_mask: Tensor) -> Tensor:
    """Chunks [B, K, A] whose last real step is repeated where `step_mask` [B, K] is False, at the end.

    The velocity of the real steps reads the other ones too, so the padding must be defined.
    """
    last = (step_mask.sum(1, keepdim=True) - 1).clamp(min=0)
    index = torch.minimum(torch.arange(actions.shape[1], device=actions.device), last)
    return actions.gather(1, index.unsqueeze(-1).expand_as(actions))


def flow_matching_error(
    velocity: Velocity, actions: Tensor, noise: Tensor, time: Tensor, mask: Tensor | None = None
) -> Tensor:
    """‖v(x_t, t) − (ε − a)‖² with x_t = t ε + (1 − t) a, the mean over the real dims of a row: [B]."""
    error = (velocity(noised(actions, noise, time), time) - (noise - actions)).float().square()
    if mask is None:
        return error.mean((1, 2))
    return _sum_real(error, mask) / mask.expand(error.shape).sum((1, 2)).clamp(min=1)


def noised(actions: Tensor, noise: Tensor, time: Tensor) -> Tensor:
    """x_t = t ε + (1 − t) a, for t [B]."""
    return time[:, None, None] * noise + (1 - time[:, None, None]) * actions


def _mean(velocity: Velocity, x: Tensor, step: int, num_steps: int) -> Tensor:
    """x_k − v(x_k, t_k) / S, in float32 whatever the model computes in."""
    time = x.new_full((x.shape[0],), 1.0 - step / num_steps)
    return x - velocity(x, time).float() / num_steps


def _where(mask: Tensor | None, inside: Tensor, outside: Tensor) -> Tensor:
    return inside if mask is None else torch.where(mask, inside, outside)


def _sum_real(values: Tensor, mask: Tensor | None) -> Tensor:
    """Sum [B, K, A] over steps and the dims where the mask is True: [B]."""
    return (values if mask is None else values.masked_fill(~mask, 0.0)).sum((1, 2))
