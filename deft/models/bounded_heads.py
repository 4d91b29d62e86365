"""Action heads of SAC and the offline algorithms: Gaussians in a bounded Box, for several members at once.

`BoundedGaussianHead` (IQL, TD3+BC, SFT) has a mean in [-1, 1]; `TanhGaussianHead` (SAC, CQL) squashes its samples.
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import torch
from torch import Tensor, nn
from torch.nn import functional

from deft.models.distributions import HALF_LOG_2PI, BoxHead, gaussian_log_prob

LOG_STD_RANGE = (-20.0, 2.0)
LARGEST_UNIT = 1.0 - 1e-6  # nearest to ±1 that a stored action is taken for, where tanh is inverted


class BoundedGaussianHead(BoxHead):
    """Mean tanh(output), one learned deviation per dim; samples are not squashed, the environment clips them."""

    def __init__(self, space: gymnasium.Space, log_std_init: float, num_members: int = 1) -> None:
        super().__init__()
        self.set_box(space)
        self.num_outputs = self.action_dim
        self.log_std = nn.Parameter(torch.full((num_members, 1, self.action_dim), float(log_std_init)))

    def gaussian(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """The mean in [-1, 1] and the log-deviation, limited."""
        log_std = self.log_std.clamp(*LOG_STD_RANGE)
        return output.tanh(), log_std if output.ndim == log_std.ndim else log_std[0]

    def mean(self, output: Tensor) -> Tensor:
        """tanh of the outputs."""
        return output.tanh()

    def log_prob(self, output: Tensor, unit: Tensor) -> Tensor:
        """Log-density of unit actions."""
        mean, log_std = self.gaussian(output)
        return gaussian_log_prob((unit - mean) * torch.exp(-log_std), log_std)

    def rsample(self, output: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Mean plus deviation times noise."""
        mean, log_std = self.gaussian(output)
        noise = torch.randn(count, *mean.shape, device=mean.device)
        return torch.addcmul(mean, noise, log_std.exp()), gaussian_log_prob(noise, log_std)

    def sample(self, output: Tensor, mask: Tensor | None, deterministic: bool) -> tuple[Tensor, Tensor]:
        """An action in the environment's units and its log-density there."""
        mean, log_std = self.gaussian(output)
        noise = torch.zeros_like(mean) if deterministic else torch.randn_like(mean)
        unit = torch.addcmul(mean, noise, log_std.exp())
        return self.from_unit(unit), gaussian_log_prob(noise, log_std) - self.width.log().sum()

    def score(self, output: Tensor, action: Tensor, mask: Tensor | None, sample: Any = None) -> tuple[Tensor, Tensor]:
        """Log-density of stored actions, and the entropy of the Gaussian."""
        _, log_std = self.gaussian(output)
        flat = action.reshape(*output.shape[:-1], self.action_dim)
        log_prob = self.log_prob(output, self.to_unit(flat)) - self.width.log().sum()
        return log_prob, self._entropy(log_std).expand_as(log_prob)

    def _entropy(self, log_std: Tensor) -> Tensor:
        return (log_std + (0.5 + HALF_LOG_2PI)).sum(-1) + self.width.log().sum()


class TanhGaussianHead(BoxHead):
    """tanh of a Gaussian whose mean and log-deviation are the outputs."""

    def __init__(self, space: gymnasium.Space) -> None:
        super().__init__()
        self.set_box(space)
        self.num_outputs = 2 * self.action_dim

    def gaussian(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-deviation before tanh."""
        mean, log_std = output.chunk(2, -1)
        return mean, log_std.clamp(*LOG_STD_RANGE)

    def mean(self, output: Tensor) -> Tensor:
        """tanh of the mean."""
        return output.chunk(2, -1)[0].tanh()

    def log_prob(self, output: Tensor, unit: Tensor) -> Tensor:
        """Log-density of unit actions."""
        return self._log_prob_before_tanh(output, unit.clamp(-LARGEST_UNIT, LARGEST_UNIT).atanh())

    def rsample(self, output: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """tanh(mean + deviation · noise), from one pass through the network."""
        noise = torch.randn(count, *output.shape[:-1], self.action_dim, device=output.device)
        return _SquashedSample.apply(output, noise)

    def act(
        self, output: Tensor, mask: Tensor | None, deterministic: bool
    ) -> tuple[Tensor, Tensor, dict[str, Tensor] | None]:
        """An action, its log-density, and the sample before tanh: near ±1 it cannot be recovered exactly."""
        mean, log_std = self.gaussian(output)
        noise = torch.zeros_like(mean) if deterministic else torch.randn_like(mean)
        before = torch.addcmul(mean, noise, log_std.exp())
        log_prob = gaussian_log_prob(noise, log_std) - log_tanh_slope(before) - self.width.log().sum()
        return self.from_unit(before.tanh()), log_prob, {"before_tanh": before}

    def sample(self, output: Tensor, mask: Tensor | None, deterministic: bool) -> tuple[Tensor, Tensor]:
        """An action in the environment's units and its log-density there."""
        return self.act(output, mask, deterministic)[:2]

    def score(self, output: Tensor, action: Tensor, mask: Tensor | None, sample: Any = None) -> tuple[Tensor, Tensor]:
        """Log-density of stored actions; the entropy is that of the Gaussian before tanh."""
        if sample is not None:
            log_prob = self._log_prob_before_tanh(output, sample["before_tanh"])
        else:
            log_prob = self.log_prob(output, self.to_unit(action.reshape(*output.shape[:-1], self.action_dim)))
        entropy = (self.gaussian(output)[1] + (0.5 + HALF_LOG_2PI)).sum(-1).expand_as(log_prob)
        return log_prob - self.width.log().sum(), entropy + self.width.log().sum()

    def _log_prob_before_tanh(self, output: Tensor, before: Tensor) -> Tensor:
        mean, log_std = self.gaussian(output)
        return gaussian_log_prob((before - mean) * torch.exp(-log_std), log_std) - log_tanh_slope(before)


class _SquashedSample(torch.autograd.Function):
    """y = tanh x with x = μ + σ n, and log π(y), of [μ, log σ] and the noise n: a third of autograd's operations.

    log π = Σ over dims of −½ n² − log σ − ½ log 2π − log(1 − y²), and −log(1 − y²) = 2 (x + softplus(−2x) − log 2).
    Its slope in x is 2y. With g the gradient of y and h that of log π:  δ = g (1 − y²) + 2 h y,  ∂μ = δ,
    ∂ log σ = δ σ n − h.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = output.chunk(2, -1)
        limited = log_std.clamp(*LOG_STD_RANGE)
        offset = limited.exp() * noise
        before = mean + offset
        unit = before.tanh()
        # softplus with a slope of −2 is −½ softplus(−2x).
        negative = torch.addcmul(limited, noise, noise, value=0.5).sub(
            before.sub(functional.softplus(before, beta=-2.0), alpha=2.0), alpha=2.0
        )
        ctx.save_for_backward(unit, offset, limited == log_std)
        constant = noise.shape[-1] * (HALF_LOG_2PI + 2.0 * math.log(2.0))
        return unit, -constant - negative.sum(-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """As above; summed over the samples of a state, and 0 where log σ is at its bounds."""
        unit, offset, inside = ctx.saved_tensors
        of_unit, of_log_prob = gradients[0], gradients[1].unsqueeze(-1)
        delta = torch.ops.aten.tanh_backward(of_unit, unit)
        delta = torch.addcmul(delta, of_log_prob, unit, value=2.0)
        of_log_std = (delta * offset - of_log_prob) * inside
        both = torch.cat([delta, of_log_std], -1)
        return (both.squeeze(0) if len(both) == 1 else both.sum(0)), None


def log_tanh_slope(x: Tensor) -> Tensor:
    """Σ log(1 − tanh² x) = Σ 2 (log 2 − x − softplus(−2x)), which does not overflow."""
    return (2.0 * (math.log(2.0) - x - functional.softplus(-2.0 * x))).sum(-1)
