"""The contract of heads that decide chunks of actions: those of `deft.models.vla.heads` and `deft.models.denoising`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeAlias

from torch import Tensor, nn

from deft.errors import InputError
from deft.models.inpainting import Inpainting

LOG_STD_RANGE = (-4.0, 1.0)
Drawn: TypeAlias = tuple[Tensor, Tensor, dict[str, Tensor]]


class Chunks(nn.Module):
    """A distribution over chunks of actions [B, K, A], given features [B, F]."""

    can_reparameterize: bool = False
    """Whether it defines `reparameterize`."""

    def __init__(self, chunk_length: int, action_dim: int) -> None:
        super().__init__()
        self.shape = (chunk_length, action_dim)

    def draw(self, features: Tensor, deterministic: bool, mask: Tensor | None) -> Drawn:
        """Actions [B, K, A], their log-prob [B], and further random values that `score` needs."""
        raise TypeError(type(self).__name__)

    def score(self, features: Tensor, actions: Tensor, mask: Tensor | None, sample: Any) -> tuple[Tensor, Tensor]:
        """Log-probs [B, K] of each step, and the entropy [B]; over the dims where `mask` [B, K, A] is True."""
        raise TypeError(type(self).__name__)

    def reparameterize(self, features: Tensor, actions: Tensor) -> Tensor:
        """The actions [B, K, A] themselves, as functions of the features with the noise of each held fixed."""
        raise TypeError(f"{type(self).__name__} does not define reparameterize")

    def alternatives(self, features: Tensor, actions: Tensor) -> tuple[Tensor, Tensor] | None:
        """The actions with other values in a dim that has a few, [B, n, K, A], and the probabilities of these, [B, n].

        None if there is no such dim.
        """
        return None

    def noise_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the logarithms of standard deviations that do not depend on the observation."""
        yield from ()

    def imitation_loss(self, features: Tensor, actions: Tensor, step_mask: Tensor | None) -> Tensor:
        """−log π of the real steps, as a mean over all numbers of the chunk: [B]."""
        mask = None if step_mask is None else step_mask.unsqueeze(-1).expand_as(actions)
        return -self.score(features, actions, mask, None)[0].sum(1) / math.prod(self.shape)

    @property
    def noise_shape(self) -> tuple[int, int] | None:
        """Shape [K, D] of the noise that `denoise` starts from; None for heads that do not start from noise."""
        return None

    def denoise(self, features: Tensor, noise: Tensor, inpainting: Inpainting | None = None) -> Tensor:
        """Actions [B, K, A] that noise [B, K, D] leads to, without further random values.

        With `inpainting` they are guided towards its target.
        """
        raise InputError(f"{type(self).__name__} does not start from noise")
