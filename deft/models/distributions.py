"""Action heads: the distribution of actions, given the outputs of a network. Gaussians and categoricals.

A head knows how many outputs it needs, samples an action, and scores one. PPO's networks have a `GaussianHead` or a
`CategoricalHead`. Those of SAC and the offline algorithms, for several members at once, have a `BoundedGaussianHead`
(IQL, TD3+BC, SFT), whose mean is in [-1, 1], or a `TanhGaussianHead` (SAC, CQL), which squashes its samples. Written
without torch.distributions, whose checks and broadcasting cost more than the arithmetic in the collection loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional

from deft import schema
from deft.errors import InputError
from deft.models.action_scale import ActionScale, into_box
from deft.models.inpainting import Inpainting

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
LOG_STD_RANGE = (-20.0, 2.0)
LARGEST_UNIT = 1.0 - 1e-6  # nearest to ±1 that a stored action is taken for, where tanh is inverted


class ActionHead(nn.Module):
    """A distribution over the actions of one space, given `num_outputs` numbers of a network."""

    num_outputs: int

    def sample(self, output: Tensor, mask: Tensor | None, deterministic: bool) -> tuple[Tensor, Tensor]:
        """An action and its log-prob."""
        raise TypeError(type(self).__name__)

    def act(
        self, output: Tensor, mask: Tensor | None, deterministic: bool
    ) -> tuple[Tensor, Tensor, dict[str, Tensor] | None]:
        """An action, its log-prob, and what `score` needs beside the action, if anything."""
        return *self.sample(output, mask, deterministic), None

    def score(self, output: Tensor, action: Tensor, mask: Tensor | None, sample: Any = None) -> tuple[Tensor, Tensor]:
        """Log-prob of `action`, and the entropy; `sample` is the third result of `act`."""
        raise TypeError(type(self).__name__)

    def token_log_prob(self, output: Tensor, action: Tensor, mask: Tensor | None, sample: Any = None) -> Tensor | None:
        """The parts [..., tokens] that the log-prob of `action` is the sum of; None for a head without parts."""
        return None

    def noise_parameters(self) -> Iterator[Tensor]:
        """Yield the logarithms of standard deviations that do not depend on the observation."""
        yield from ()

    @property
    def noise_shape(self) -> tuple[int, int] | None:
        """Shape [K, A] of the noise that `denoise` starts from; None for heads that do not start from noise."""
        return None


class BoxHead(ActionHead, ActionScale):
    """A continuous distribution over unit actions of a Box, with the methods of the off-policy algorithms.

    Outputs are [members, B, num_outputs] there.
    """

    log_std: Tensor

    def mean(self, output: Tensor) -> Tensor:
        """The most likely unit action."""
        raise TypeError(type(self).__name__)

    def executed(self, unit: Tensor) -> Tensor:
        """Unit actions as the environment executes them: clipped."""
        return into_box(unit)

    def gaussian(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-deviation of the Gaussian behind the actions, before any squashing."""
        raise TypeError(type(self).__name__)

    def log_prob(self, output: Tensor, unit: Tensor) -> Tensor:
        """Log-density of unit actions."""
        mean, log_std = self.gaussian(output)
        return gaussian_log_prob((unit - mean) * torch.exp(-log_std), log_std)

    def imitation_loss(self, output: Tensor, unit: Tensor, step_mask: Tensor | None = None) -> Tensor:
        """The loss of behaviour cloning, [members, B]; `step_mask` [B, K]: which steps of chunks are real."""
        return -self.log_prob(output, unit)

    def denoise(self, output: Tensor, noise: Tensor, inpainting: Inpainting | None = None) -> Tensor:
        """Unit actions [B, K · A] that noise [B, K, A] leads to, guided by `inpainting`."""
        raise InputError(f"{type(self).__name__} does not start from noise")

    def rsample(self, output: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """`count` differentiable unit actions per row, [count, …, A], clipped, and their log-densities before that."""
        mean, log_std = self.gaussian(output)
        noise = torch.randn(count, *mean.shape, device=mean.device)
        return self.executed(torch.addcmul(mean, noise, log_std.exp())), gaussian_log_prob(noise, log_std)

    def divergence(self, output: Tensor, other: BoxHead, other_output: Tensor) -> Tensor:
        """KL between two heads of one kind: Σ over dims of log(σ'/σ) + (σ² + (μ − μ')²) / 2σ'² − ½.

        Squashing changes nothing: the divergence is that of the Gaussians before tanh.
        """
        mean, log_std = self.gaussian(output)
        other_mean, other_log_std = other.gaussian(other_output)
        ratio = log_std - other_log_std
        shift = (mean - other_mean) * torch.exp(-other_log_std)
        return (0.5 * (torch.exp(2 * ratio) + shift.square() - 1) - ratio).sum(-1)


class GaussianHead(BoxHead):
    """A diagonal Gaussian with one learned deviation a dim, in units of the space's half width.

    log p(a) = Σ_i [ −½ ((u_i − μ_i) / σ_i)² − log σ_i − ½ log 2π − log w_i ],  u = (a − centre) / w. A chunk of K
    actions is K·A dims. Padded dims (mask False) are left out of every sum.
    """

    def __init__(self, space: spaces.Box, log_std_init: float) -> None:
        super().__init__()
        self.action_shape = tuple(space.shape)
        self.num_outputs = self.action_dim = int(np.prod(space.shape))
        low, high = (np.asarray(bound, np.float64).reshape(-1) for bound in (space.low, space.high))
        bounded = np.isfinite(low) & np.isfinite(high) & (high > low)
        self.is_bounded = bool(bounded.all())
        with np.errstate(invalid="ignore", over="ignore"):
            center = np.where(bounded, (low + high) / 2, 0.0)
            width = np.where(bounded, (high - low) / 2, 1.0)
        self.set_scale(*(torch.as_tensor(part, dtype=torch.float32) for part in (center, width)))
        self.log_std = nn.Parameter(torch.full((self.num_outputs,), float(log_std_init)))

    def noise_parameters(self) -> Iterator[Tensor]:
        """One for each dim."""
        yield self.log_std

    def _dims(self, mask: Tensor | None) -> Tensor | None:
        """The mask over all dims of a chunk, as numbers."""
        return None if mask is None else mask.tile(self.num_outputs // mask.shape[-1]).to(self.log_std.dtype)

    def _log_prob_of_noise(self, noise: Tensor, dims: Tensor | None) -> tuple[Tensor, Tensor]:
        """Log-prob of μ + σ·noise, and the entropy Σ (½ + ½ log 2π + log σ + log w); both over the real dims."""
        log_scale = self.log_std if self.is_unit else self.log_std + self.width.log()
        if dims is None:
            total = log_scale.sum() + self.num_outputs * HALF_LOG_2PI
            squares = torch.linalg.vecdot(noise, noise)
            return torch.add(-total, squares, alpha=-0.5), total + 0.5 * self.num_outputs
        total = ((log_scale + HALF_LOG_2PI) * dims).sum(-1)
        return (noise.square() * dims).sum(-1).mul(-0.5) - total, total + 0.5 * dims.sum(-1)

    def sample(self, output: Tensor, mask: Tensor | None, deterministic: bool) -> tuple[Tensor, Tensor]:
        """Mean plus deviation times noise; the mean itself when deterministic."""
        noise = torch.zeros_like(output) if deterministic else torch.randn_like(output)
        dims = self._dims(mask)
        unit = torch.addcmul(output, noise, self.log_std.exp())
        log_prob, _ = self._log_prob_of_noise(noise, dims)
        if dims is not None:
            unit = unit * dims
        return self.from_unit(unit), log_prob

    def score(self, output: Tensor, action: Tensor, mask: Tensor | None, sample: Any = None) -> tuple[Tensor, Tensor]:
        """Log-prob of `action`, and the entropy."""
        noise = (self._flat_unit(action) - output) * torch.exp(-self.log_std)
        log_prob, entropy = self._log_prob_of_noise(noise, self._dims(mask))
        return log_prob, entropy.expand_as(log_prob)

    def _flat_unit(self, action: Tensor) -> Tensor:
        return self.to_unit(action if len(self.action_shape) == 1 else action.flatten(-len(self.action_shape)))

    def token_log_prob(self, output: Tensor, action: Tensor, mask: Tensor | None, sample: Any = None) -> Tensor:
        """One token for each step of a chunk, one in all without chunks."""
        noise, dims = (self._flat_unit(action) - output) * torch.exp(-self.log_std), self._dims(mask)
        log_scale = self.log_std if self.is_unit else self.log_std + self.width.log()
        log_probs = -0.5 * noise.square() - log_scale - HALF_LOG_2PI
        num_tokens = 1 if len(self.action_shape) == 1 else self.action_shape[0]
        return (log_probs if dims is None else log_probs * dims).unflatten(-1, (num_tokens, -1)).sum(-1)

    def gaussian(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs are the mean."""
        return output, self.log_std

    def executed(self, unit: Tensor) -> Tensor:
        """Unit actions as the environment clips them."""
        return into_box(unit) if self.is_bounded else unit

    def mean(self, output: Tensor) -> Tensor:
        """The outputs, clipped as by the environment."""
        return self.executed(output)


class MemberHead(BoxHead):
    """A Gaussian in a bounded Box, for the networks of several members."""

    def __init__(self, space: gymnasium.Space) -> None:
        super().__init__()
        self.set_box(space)
        self.num_outputs = self.action_dim

    def score(self, output: Tensor, action: Tensor, mask: Tensor | None, sample: Any = None) -> tuple[Tensor, Tensor]:
        """Log-density of stored actions, and the entropy of the Gaussian, which is that before any squashing."""
        log_width = self.width.log().sum()
        flat = action.reshape(*output.shape[:-1], self.action_dim)
        log_prob = self._log_prob_of_sample(output, flat, sample) - log_width
        entropy = (self.gaussian(output)[1] + (0.5 + HALF_LOG_2PI)).sum(-1) + log_width
        return log_prob, entropy.expand_as(log_prob)

    def _log_prob_of_sample(self, output: Tensor, action: Tensor, sample: Any) -> Tensor:
        return self.log_prob(output, self.to_unit(action))

    def _draw(self, output: Tensor, deterministic: bool) -> tuple[Tensor, Tensor]:
        """A sample of the Gaussian (its mean if deterministic), and its log-density."""
        mean, log_std = self.gaussian(output)
        noise = torch.zeros_like(mean) if deterministic else torch.randn_like(mean)
        return torch.addcmul(mean, noise, log_std.exp()), gaussian_log_prob(noise, log_std)


class BoundedGaussianHead(MemberHead):
    """Mean tanh(output), one learned deviation per dim; samples are not squashed, the environment clips them."""

    def __init__(self, space: gymnasium.Space, log_std_init: float, num_members: int = 1) -> None:
        super().__init__(space)
        self.log_std = nn.Parameter(torch.full((num_members, 1, self.action_dim), float(log_std_init)))

    def noise_parameters(self) -> Iterator[Tensor]:
        """One for each dim."""
        yield self.log_std

    def gaussian(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """The mean in [-1, 1] and the log-deviation, limited."""
        log_std = self.log_std.clamp(*LOG_STD_RANGE)
        return output.tanh(), log_std if output.ndim == log_std.ndim else log_std[0]

    def mean(self, output: Tensor) -> Tensor:
        """tanh of the outputs."""
        return output.tanh()

    def sample(self, output: Tensor, mask: Tensor | None, deterministic: bool) -> tuple[Tensor, Tensor]:
        """An action in the environment's units and its log-density there."""
        unit, log_prob = self._draw(output, deterministic)
        return self.from_unit(unit), log_prob - self.width.log().sum()


class TanhGaussianHead(MemberHead):
    """tanh of a Gaussian whose mean and log-deviation are the outputs."""

    def __init__(self, space: gymnasium.Space) -> None:
        super().__init__(space)
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
        before = unit.clamp(-LARGEST_UNIT, LARGEST_UNIT).atanh()
        return super().log_prob(output, before) - log_tanh_slope(before)

    def rsample(self, output: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """tanh(mean + deviation · noise), from one pass through the network."""
        noise = torch.randn(count, *output.shape[:-1], self.action_dim, device=output.device)
        return _SquashedSample.apply(output, noise)

    def act(
        self, output: Tensor, mask: Tensor | None, deterministic: bool
    ) -> tuple[Tensor, Tensor, dict[str, Tensor] | None]:
        """An action, its log-density, and the sample before tanh: near ±1 it cannot be recovered exactly."""
        before, log_prob = self._draw(output, deterministic)
        log_prob = log_prob - log_tanh_slope(before) - self.width.log().sum()
        return self.from_unit(before.tanh()), log_prob, {schema.BEFORE_TANH: before}

    def _log_prob_of_sample(self, output: Tensor, action: Tensor, sample: Any) -> Tensor:
        if sample is None:
            return self.log_prob(output, self.to_unit(action))
        before = sample[schema.BEFORE_TANH]
        return super().log_prob(output, before) - log_tanh_slope(before)


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


def log_tanh_slopes(x: Tensor) -> Tensor:
    """log(1 − tanh² x) = 2 (log 2 − x − softplus(−2x)) of each number, which does not overflow."""
    return 2.0 * (math.log(2.0) - x - functional.softplus(-2.0 * x))


def log_tanh_slope(x: Tensor) -> Tensor:
    """Σ log(1 − tanh² x)."""
    return log_tanh_slopes(x).sum(-1)


class CategoricalHead(ActionHead):
    """One or several independent categoricals over concatenated logits (Discrete, MultiDiscrete).

    Choices count from 0; a space's own start is the vector environment's business.
    """

    def __init__(self, space: spaces.Discrete | spaces.MultiDiscrete) -> None:
        super().__init__()
        self.scalar = isinstance(space, spaces.Discrete)
        self.sizes = discrete_sizes(space)
        self.action_shape = () if self.scalar else tuple(space.shape)  # type: ignore[arg-type]
        self.num_outputs = sum(self.sizes)

    def _log_probs(self, output: Tensor) -> list[Tensor]:
        parts = [output] if len(self.sizes) == 1 else output.split(self.sizes, -1)
        return [part.log_softmax(-1) for part in parts]

    def sample(self, output: Tensor, mask: Tensor | None, deterministic: bool) -> tuple[Tensor, Tensor]:
        """Gumbel-max: argmax(log p − log(−log u)); the mode when deterministic."""
        choices, log_probs = [], []
        for log_p in self._log_probs(output):
            scores = log_p if deterministic else log_p - torch.empty_like(log_p).exponential_().log_()
            choices.append(scores.argmax(-1, keepdim=True))
            log_probs.append(log_p.gather(-1, choices[-1]))
        if self.scalar:
            return choices[0].squeeze(-1), log_probs[0].squeeze(-1)
        action = torch.cat(choices, -1).reshape(*output.shape[:-1], *self.action_shape)
        return action, torch.cat(log_probs, -1).sum(-1)

    def score(self, output: Tensor, action: Tensor, mask: Tensor | None, sample: Any = None) -> tuple[Tensor, Tensor]:
        """Σ over the categoricals of log p(choice) and of −Σ p log p."""
        if len(self.action_shape) > 1:
            action = action.flatten(-len(self.action_shape))
        choices = [action] if self.scalar else action.unbind(-1)
        log_probs, entropies = [], []
        for log_p, choice in zip(self._log_probs(output), choices, strict=True):
            log_probs.append(log_p.gather(-1, choice.long().unsqueeze(-1)).squeeze(-1))
            entropies.append(-(log_p.exp() * log_p).sum(-1))
        return sum(log_probs[1:], log_probs[0]), sum(entropies[1:], entropies[0])

    def token_log_prob(self, output: Tensor, action: Tensor, mask: Tensor | None, sample: Any = None) -> Tensor:
        """One token for each categorical."""
        choices = action.long().reshape(*output.shape[:-1], len(self.sizes)).split(1, -1)
        parts = zip(self._log_probs(output), choices, strict=True)
        return torch.cat([log_p.gather(-1, choice) for log_p, choice in parts], -1)


def discrete_sizes(space: spaces.Discrete | spaces.MultiDiscrete) -> list[int]:
    """The number of choices of each number of a discrete space."""
    return [int(space.n)] if isinstance(space, spaces.Discrete) else [int(n) for n in space.nvec.reshape(-1)]


def gaussian_log_prob(noise: Tensor, log_std: Tensor) -> Tensor:
    """Σ over dims of −½ noise² − log σ − ½ log 2π."""
    return (-0.5 * noise.square() - log_std).sum(-1) - noise.shape[-1] * HALF_LOG_2PI


def action_head(space: gymnasium.Space, log_std_init: float) -> ActionHead:
    """The distribution for an action space."""
    if isinstance(space, spaces.Box):
        return GaussianHead(space, log_std_init)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return CategoricalHead(space)
    raise InputError(f"actions of type {type(space).__name__} are not supported; use Box, Discrete or MultiDiscrete")
