"""Running statistics as a part of the policy: saved with it, applied wherever it acts or is evaluated.

They change only between updates (`Policy.observe`), so that acting and scoring use the same normalisation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn


class RunningNormalizer(nn.Module):
    """x ↦ clip((x − mean) / √(var + ε)), with the mean and variance of all observed data.

    While `frozen`, `observe` has no effect.
    """

    mean: Tensor
    variance: Tensor
    count: Tensor
    scale: Tensor
    shift: Tensor

    def __init__(self, shape: tuple[int, ...], clip: float = 10.0, epsilon: float = 1e-8) -> None:
        super().__init__()
        self.clip, self.epsilon, self.frozen = clip, epsilon, False
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        # The affine map as buffers of its own, so that a forward pass is one multiply-add.
        self.register_buffer("scale", torch.ones(shape))
        self.register_buffer("shift", torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise; the identity before the first observation."""
        return torch.addcmul(self.shift, x, self.scale).clamp(-self.clip, self.clip)

    def inverse(self, x: Tensor) -> Tensor:
        """Invert `forward`, except for clipping."""
        return (x - self.shift) / self.scale

    @torch.no_grad()
    def observe(self, x: Tensor) -> None:
        """Merge a batch [..., *shape] into the statistics (Chan's parallel update), unless they are frozen."""
        if self.frozen:
            return
        rows = x.reshape(-1, *self.mean.shape).to(self.mean)
        batch_count = rows.shape[0]
        total = self.count + batch_count
        delta = rows.mean(0) - self.mean
        # M2 = Σ(x − mean)² of both parts, plus the distance between their means
        m2 = self.variance * self.count + rows.var(0, correction=0) * batch_count
        m2 += delta.square() * self.count * batch_count / total
        self.set_statistics(self.mean + delta * (batch_count / total), m2 / total, total)

    @torch.no_grad()
    def set_statistics(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Replace the statistics."""
        self.mean.copy_(mean)
        self.variance.copy_(variance)
        self.count.copy_(count)
        scale = (self.variance + self.epsilon).rsqrt()
        self.scale.copy_(scale)
        self.shift.copy_(-self.mean * scale)


class RewardNormalizer(nn.Module):
    """r ↦ clip(r / √(var of the discounted return + ε)): rewards of unit scale with unchanged sign."""

    def __init__(self, clip: float = 10.0, epsilon: float = 1e-8) -> None:
        super().__init__()
        self.clip = clip
        self.statistics = RunningNormalizer((), epsilon=epsilon)

    def forward(self, reward: Tensor) -> Tensor:
        """Scale; the identity before the first observation."""
        return (reward * self.statistics.scale).clamp(-self.clip, self.clip)

    def observe(self, discounted_return: Tensor) -> None:
        """Update with discounted returns, as computed by `returns_so_far` in `deft.algorithms.returns`."""
        self.statistics.observe(discounted_return)


def normalizers(module: nn.Module) -> Iterator[tuple[str, RunningNormalizer]]:
    """Yield the running statistics in a module, by name."""
    for name, part in module.named_modules():
        if isinstance(part, RunningNormalizer):
            yield name, part


def has_seen_data(module: nn.Module) -> bool:
    """Whether a policy has normalisation statistics of data."""
    return any(bool(part.count > 0) for _, part in normalizers(module))


def freeze_statistics(policy: nn.Module) -> None:
    """Freeze the observation statistics of a trained policy, if it has any.

    Reward statistics continue to be updated: no action depends on them.
    """
    rewards = {id(part.statistics) for part in policy.modules() if isinstance(part, RewardNormalizer)}
    for _, part in normalizers(policy):
        part.frozen = part.frozen or (id(part) not in rewards and bool(part.count > 0))


def frozen_statistics(policy: nn.Module) -> list[str]:
    """Names of the frozen normalisers, for a checkpoint."""
    return [name for name, part in normalizers(policy) if part.frozen]


def restore_frozen_statistics(policy: nn.Module, names: Iterable[str]) -> None:
    """Freeze the named normalisers, and no others."""
    frozen = set(names)
    for name, part in normalizers(policy):
        part.frozen = name in frozen
