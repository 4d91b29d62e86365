"""Flow-matching policies with log-probs: the schedule of a flow for `deft.models.denoising_chain`, as pure functions.

x runs from noise (t = 1) to the actions (t = 0) along a learned velocity v ≈ ε − a. Plain Euler steps are deterministic
and have no density; with a little noise each step is a Gaussian, and the chain's log-prob is the sum of theirs:

    x_{k+1} = x_k − v(x_k, t_k) / S + σ_k ε_k,      t_k = 1 − k / S,      log p = Σ_k log N(x_{k+1}; x_k − v / S, σ_k)

`pi0`, `vla-tiny`, MLP policies and the F1 explorer have such chains.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deft.models import denoising_chain
from deft.models.denoising_chain import Transition, mean_real, sum_real
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
    steps, which is the model's own sampling. `mask` as in `chain_log_prob`.
    """
    transition = flow_transition(velocity, deviation)
    return denoising_chain.draw(transition, noise, len(deviation), deterministic, mask, generator)


def chain_log_prob(velocity: Velocity, chain: Tensor, deviation: Tensor, mask: Tensor | None = None) -> Tensor:
    """Log-prob of each step of a chain, [B, S], over the dims where `mask` (bool, broadcast to [B, K, A]) is True."""
    return denoising_chain.score(flow_transition(velocity, deviation), chain, mask)[0]


def chain_entropy(deviation: Tensor, shape: torch.Size | tuple[int, ...], mask: Tensor | None = None) -> Tensor:
    """Entropy of a chain's noise, [B], for actions of `shape` [B, K, A]: Σ log σ + ½ log 2πe over steps and dims."""
    total = (deviation.log() + 0.5 + HALF_LOG_2PI).sum(0)
    return sum_real(total.expand(shape), mask)


def integrate(velocity: Velocity, noise: Tensor, num_steps: int) -> Tensor:
    """The actions at the end of plain Euler steps from `noise` [B, K, A]."""
    x = noise
    for step in range(num_steps):
        x = euler(velocity, x, step, num_steps)
    return x


def euler(velocity: Velocity, x: Tensor, step: int, num_steps: int) -> Tensor:
    """x_k − v(x_k, t_k) / S, in float32 whatever the model computes in."""
    return x - velocity(x, flow_time(x, step, num_steps)).float() / num_steps


def flow_time(x: Tensor, step: int, num_steps: int) -> Tensor:
    """t_k = 1 − k / S of each row, [B]."""
    return x.new_full((x.shape[0],), 1.0 - step / num_steps)


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
    return mean_real(error, mask)


def noised(actions: Tensor, noise: Tensor, time: Tensor) -> Tensor:
    """x_t = t ε + (1 − t) a, for t [B]."""
    return time[:, None, None] * noise + (1 - time[:, None, None]) * actions


def flow_transition(velocity: Velocity, deviation: Tensor) -> Transition:
    """Euler steps with σ [S] or [S, K, A]."""
    return lambda x, step: (euler(velocity, x, step, len(deviation)), deviation[step])
