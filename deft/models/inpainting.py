"""Real-time chunking: denoise a chunk of actions that continues the chunk which is being executed, as pure functions.

Black, Galliker & Levine (2025), for the flows and diffusions of `deft.models.denoising` and `deft.models.vla.flow`.
While the new chunk is computed, the robot executes the first d actions that the running chunk has left. The new chunk
is guided to agree with these actions, and with those after them by a weight that decreases.

A network on x = α a + σ ε (a flow has α = 1 − t, σ = t) gives an estimate Â(x) of the chunk. The guidance moves it
towards the target Y, by the gradient of ½ ‖√W (Y − Â)‖² with respect to x (ΠGDM, Song et al., 2023):

    g = (∂Â / ∂x)ᵀ W (Y − Â),      Â' = Â + λ g,      λ = (α² + σ²) / α, limited

λ is σ² / α, the factor of a score in Â, over the variance σ² / (α² + σ²) of a, given x, if a ~ N(0, 1). It is infinite
where x is noise alone: a flow limits it to β t as in the paper, a diffusion to β.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Network = Callable[[Tensor, Tensor], Tensor]
"""(x [B, K, A], time [B]) → [B, K, A]."""
MAX_GUIDANCE = 5.0  # β of the paper


@dataclass(frozen=True)
class Inpainting:
    """What a new chunk must agree with, in the units of the network that is guided."""

    target: Tensor
    """Y [B, K, A]: the rest of the running chunk; any finite values where the weight is 0."""
    weights: Tensor
    """W, broadcast to [B, K, A]: 1 in the frozen steps, 0 where there is no target."""
    max_guidance: float = MAX_GUIDANCE
    """β: the largest factor of the guidance in the velocity of a flow, or in Â of a diffusion."""

    @property
    def frozen(self) -> Tensor:
        """Whether a step is frozen, bool; the weights of other steps are below 1."""
        return self.weights == 1

    def masked(self, action_mask: Tensor | None) -> Inpainting:
        """Without the padded dims, where `action_mask` [B, A] is False: their targets are not those of the chain."""
        if action_mask is None:
            return self
        return replace(self, weights=self.weights * action_mask.unsqueeze(1))

    def of_dims(self, dims: list[int]) -> Inpainting:
        """Only these dims of the actions."""
        weights = self.weights if self.weights.shape[-1] == 1 else self.weights[..., dims]
        return replace(self, target=self.target[..., dims], weights=weights)


def soft_mask(length: int, left: Tensor, frozen: Tensor) -> Tensor:
    """W [B, K, 1] of a chunk of K = `length` steps, for `left` L ≤ K steps with a target, of which `frozen` d ≤ L are.

    W_i = 1 for i < d,   c (e^c − 1) / (e − 1) with c = (L − i) / (L − d + 1) for d ≤ i < L,   0 for i ≥ L.
    """
    step = torch.arange(length, device=left.device)
    left, frozen = left[:, None], frozen[:, None]
    c = (left - step) / (left - frozen + 1)
    decreasing = c * torch.expm1(c) / math.expm1(1.0)
    weights = torch.where(step < frozen, torch.ones_like(c), decreasing)
    return torch.where(step < left, weights, torch.zeros_like(c)).unsqueeze(-1)


def guided_velocity(velocity: Network, inpainting: Inpainting | None) -> Network:
    """The velocity of a flow with guidance, v' = v − min(β, ((1 − t)² + t²) / ((1 − t) t)) g, with Â = x − t v."""
    if inpainting is None:
        return velocity

    def guided(x: Tensor, time: Tensor) -> Tensor:
        t = time[:, None, None]
        value, gradient = _gradient(velocity, lambda x, v: x - t * v, x, time, inpainting)
        factor = ((1 - t).square() + t.square()) / ((1 - t) * t)  # infinite at t = 1
        return value - factor.clamp(max=inpainting.max_guidance) * gradient

    return guided


def guided_noise(predict: Network, signal: Tensor, inpainting: Inpainting | None) -> Network:
    """The noise that a diffusion predicts, with guidance: ε̂' = ε̂ − min(α β, 1) / σ g, Â = (x − σ ε̂) / α.

    `signal` is ᾱ = α² at the time of the step, and σ² = 1 − ᾱ: ε̂' is the noise that belongs to Â'.
    """
    if inpainting is None:
        return predict
    alpha, sigma = signal.sqrt(), (1 - signal).sqrt()
    factor = (alpha * inpainting.max_guidance).clamp(max=1.0) / sigma

    def guided(x: Tensor, time: Tensor) -> Tensor:
        value, gradient = _gradient(predict, lambda x, noise: (x - sigma * noise) / alpha, x, time, inpainting)
        return value - factor * gradient

    return guided


def guided_action(predict: Network, signal: Tensor, inpainting: Inpainting | None) -> Network:
    """The action Â that a diffusion predicts in place of its noise, with guidance: Â' = Â + min(β, 1 / α) g."""
    if inpainting is None:
        return predict
    factor = (1 / signal.sqrt()).clamp(max=inpainting.max_guidance)

    def guided(x: Tensor, time: Tensor) -> Tensor:
        value, gradient = _gradient(predict, lambda x, action: action, x, time, inpainting)
        return value + factor * gradient

    return guided


def _gradient(
    predict: Network, estimate: Network, x: Tensor, time: Tensor, inpainting: Inpainting
) -> tuple[Tensor, Tensor]:
    """The output of the network, and g."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        value = predict(x, time).float()
        estimated = estimate(x, value)
        error = inpainting.weights * (inpainting.target - estimated.detach())
        (gradient,) = torch.autograd.grad(estimated, x, error.expand_as(estimated))
    return value.detach(), gradient
