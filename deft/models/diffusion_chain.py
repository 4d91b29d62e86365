"""Diffusion policies with log-probs: the schedule of a diffusion for `deft.models.denoising_chain`.

x_t = √ᾱ_t a + √(1 − ᾱ_t) ε for t = 1 … T, where ᾱ falls from 1 to 0. Of these times, S are used to act: t_{S−1} = 1,
those before it ⌊T / S⌋ apart, and t_S = 0. They start below T, where x is nearly all noise and the error of â would be
large. With the predicted action â = clip((x − √(1 − ᾱ) ε̂) / √ᾱ, ±1) and ε̂ recomputed from it,

    μ_k = √ᾱ' â + √(1 − ᾱ' − s_k²) ε̂,    s_k² = η² (1 − ᾱ') / (1 − ᾱ) · (1 − ᾱ / ᾱ'),    σ_k = max(s_k, noise_min),

where ᾱ' is that of the next step. η = 1 is DDPM, η = 0 is DDIM; both lead to the same distribution of x at every time,
so η may differ between dims. `vla-tiny`, MLP policies and `diffusion-policy` have such chains.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from deft.errors import InputError


@dataclass(frozen=True)
class DiffusionUpdate:
    """One step of the chain: mean and deviation of the next x, from the prediction of the network.

    `clip` None: â is not clipped. `predicts_action`: the network predicts â in place of ε̂. With `recompute` False, ε̂
    stays that of the â before it was clipped, as in the DDIM scheduler of diffusers.
    """

    noise_min: float
    clip: float | None = 1.0
    predicts_action: bool = False
    recompute: bool = True

    def __call__(
        self, x: Tensor, predicted: Tensor, now: Tensor, then: Tensor, is_random: Tensor | bool
    ) -> tuple[Tensor, Tensor]:
        """μ and σ of the step from ᾱ = `now` to ᾱ' = `then`; η is 1 where `is_random` (broadcast to x), else 0."""
        action = predicted if self.predicts_action else (x - (1 - now).sqrt() * predicted) / now.sqrt()
        clipped = action if self.clip is None else action.clamp(-self.clip, self.clip)
        noise = (x - now.sqrt() * (clipped if self.recompute else action)) / (1 - now).sqrt()
        variance = (1 - then) / (1 - now) * (1 - now / then) * is_random
        mean = then.sqrt() * clipped + (1 - then - variance).clamp(min=0.0).sqrt() * noise
        return mean, variance.sqrt().clamp(min=self.noise_min)


def diffused(actions: Tensor, noise: Tensor, signal: Tensor) -> Tensor:
    """x_t = √ᾱ_t a + √(1 − ᾱ_t) ε, for ᾱ_t [B]."""
    signal = signal[:, None, None]
    return signal.sqrt() * actions + (1 - signal).sqrt() * noise


def diffusion_times(total: int, num_steps: int) -> list[int]:
    """t_0 … t_S of a chain of S steps, out of T = `total`."""
    stride = total // num_steps
    return [*range(1 + (num_steps - 1) * stride, 0, -stride), 0]


def cosine_signal(num_steps: int) -> Tensor:
    """ᾱ_0 … ᾱ_T of the cosine schedule (Nichol & Dhariwal, 2021): Π (1 − β_t), β_t at most 0.999."""
    steps = torch.arange(num_steps + 1, dtype=torch.float64)
    wanted = torch.cos((steps / num_steps + 0.008) / 1.008 * math.pi / 2).square()
    return _signal((wanted[1:] / wanted[:-1]).clamp(min=0.001))


def signal_of(schedule: str, num_steps: int, first: float, last: float) -> Tensor:
    """ᾱ_0 … ᾱ_T of a schedule by its name in diffusers; `first` and `last` are β_1 and β_T of the linear ones."""
    if schedule == "squaredcos_cap_v2":
        return cosine_signal(num_steps)
    if schedule == "linear":
        return _signal(1 - torch.linspace(first, last, num_steps, dtype=torch.float64))
    if schedule == "scaled_linear":
        return _signal(1 - torch.linspace(first**0.5, last**0.5, num_steps, dtype=torch.float64).square())
    raise InputError(f"beta_schedule {schedule!r} is none of squaredcos_cap_v2, linear, scaled_linear")


def _signal(kept: Tensor) -> Tensor:
    """1, and the products of 1 − β_1 … 1 − β_T."""
    return torch.cat([kept.new_ones(1), kept.cumprod(0)]).float()
