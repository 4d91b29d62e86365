"""Action heads: the distribution of actions, given the outputs of a network. Gaussian and categorical.

A head knows how many outputs it needs, samples an action, and scores one. Written without torch.distributions, whose
checks and broadcasting cost more than the arithmetic in the collection loop. Heads of the off-policy algorithms are in
`deft.models.bounded_heads`.
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from deft.errors import InputError
from deft.models.action_scale import ActionScale, into_box

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


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

    def token_log_prob(self, output: Tensor, action: Tensor, mask: Tensor | None) -> Tensor | None:
        """The parts [..., tokens] that the log-prob of `action` is the sum of; None for a head without parts."""
        return None


class BoxHead(ActionHead, ActionScale):
    """A continuous distribution over unit actions of a Box, with the methods of the off-policy algorithms.

    Outputs are [members, B, num_outputs] there.
    """

    log_std: Tensor

    def mean(self, output: Tensor) -> Tensor:
        """The most likely unit action."""
        raise TypeError(type(self).__name__)

    def log_prob(self, output: Tensor, unit: Tensor) -> Tensor:
        """Log-density of unit actions."""
        raise TypeError(type(self).__name__)

    def rsample(self, output: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """`count` differentiable unit actions per row, [count, …, A], and their log-densities."""
        raise TypeError(type(self).__name__)

    def gaussian(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-deviation of the Gaussian behind the actions, before any squashing."""
        raise TypeError(type(self).__name__)

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

    def token_log_prob(self, output: Tensor, action: Tensor, mask: Tensor | None) -> Tensor:
        """One token for each step of a chunk, one in all without chunks."""
        noise, dims = (self._flat_unit(action) - output) * torch.exp(-self.log_std), self._dims(mask)
        log_scale = self.log_std if self.is_unit else self.log_std + self.width.log()
        log_probs = -0.5 * noise.square() - log_scale - HALF_LOG_2PI
        num_tokens = 1 if len(self.action_shape) == 1 else self.action_shape[0]
        return (log_probs if dims is None else log_probs * dims).unflatten(-1, (num_tokens, -1)).sum(-1)

    def gaussian(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs are the mean."""
        return output, self.log_std

    def mean(self, output: Tensor) -> Tensor:
        """The outputs, clipped as by the environment."""
        return into_box(output) if self.is_bounded else output

    def log_prob(self, output: Tensor, unit: Tensor) -> Tensor:
        """Log-density of unit actions, before clipping."""
        return gaussian_log_prob((unit - output) * torch.exp(-self.log_std), self.log_std)

    def rsample(self, output: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Mean plus deviation times noise, clipped as by the environment, with the density before clipping."""
        noise = torch.randn(count, *output.shape, device=output.device)
        drawn = torch.addcmul(output, noise, self.log_std.exp())
        return into_box(drawn) if self.is_bounded else drawn, gaussian_log_prob(noise, self.log_std)


class CategoricalHead(ActionHead):
    """One or several independent categoricals over concatenated logits (Discrete, MultiDiscrete).

    Choices count from 0; a space's own start is the vector environment's business.
    """

    def __init__(self, space: spaces.Discrete | spaces.MultiDiscrete) -> None:
        super().__init__()
        self.scalar = isinstance(space, spaces.Discrete)
        if isinstance(space, spaces.Discrete):
            self.sizes = [int(space.n)]
        else:
            self.sizes = [int(n) for n in space.nvec.reshape(-1)]
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
            choice = scores.argmax(-1, keepdim=True)
            log_probs.append(log_p.gather(-1, choice))
            choices.append(choice)
        if self.scalar:
            return choices[0].squeeze(-1), log_probs[0].squeeze(-1)
        action, log_prob = torch.cat(choices, -1), torch.cat(log_probs, -1).sum(-1)
        return action if len(self.action_shape) < 2 else action.reshape(
            *output.shape[:-1], *self.action_shape
        ), log_prob

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

    def token_log_prob(self, output: Tensor, action: Tensor, mask: Tensor | None) -> Tensor:
        """One token for each categorical."""
        choices = action.long().reshape(*output.shape[:-1], len(self.sizes)).split(1, -1)
        parts = zip(self._log_probs(output), choices, strict=True)
        return torch.cat([log_p.gather(-1, choice) for log_p, choice in parts], -1)


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
