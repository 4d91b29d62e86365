"""Actions in [-1, 1] inside a policy ("unit actions"), in a bounded Box outside; the Box is saved with the policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from deft.errors import InputError
from deft.models.policy import Policy


def watch_scale(module: nn.Module) -> None:
    """Keep `is_unit`, whether `center` and `width` leave actions as they are, right also after weights were loaded."""
    _see_scale(module)
    module.register_load_state_dict_post_hook(_see_scale)


def _see_scale(module: Any, _: Any = None) -> None:
    module.is_unit = bool((module.center == 0).all() and (module.width == 1).all())


def _bounds(center: Tensor, width: Tensor) -> tuple[np.ndarray, np.ndarray]:
    return (center - width).cpu().numpy(), (center + width).cpu().numpy()


class UnitActions(Policy):
    """A policy that acts in a bounded Box."""

    ACTS: ClassVar[str] = "off-policy algorithms act"
    action_shape: tuple[int, ...]
    action_dim: int
    center: Tensor
    width: Tensor
    is_unit: bool

    def set_box(self, space: gymnasium.Space) -> None:
        """Keep the Box's centre and half width; called once by the constructors."""
        if not isinstance(space, spaces.Box) or not np.all(np.isfinite(space.low) & np.isfinite(space.high)):
            raise InputError(f"{self.ACTS} in a bounded Box; the actions here are {space}")
        low, high = (np.asarray(bound, np.float64).reshape(-1) for bound in (space.low, space.high))
        self.action_shape, self.action_dim = tuple(space.shape), len(low)
        self.register_buffer("center", torch.as_tensor((low + high) / 2, dtype=torch.float32))
        self.register_buffer("width", torch.as_tensor(np.maximum((high - low) / 2, 1e-6), dtype=torch.float32))
        watch_scale(self)

    @property
    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """The smallest and the largest actions of the Box, of all steps of a chunk."""
        return _bounds(self.center, self.width)

    def bounds_of(self, space: gymnasium.Space) -> tuple[np.ndarray, np.ndarray]:
        """Those of another Box, of single actions or of chunks; refuses one of other sizes."""
        size = self.action_dim
        if not isinstance(space, spaces.Box) or space.low.size not in (size, size / self.chunk_length):
            raise InputError(f"policy: made for actions of {size} numbers, the environment takes {space}")
        return np.resize(space.low, size), np.resize(space.high, size)

    def misfit(self, space: gymnasium.Space, weights: Mapping[str, Tensor] | None = None) -> tuple[str, float] | None:
        """Where a Box differs most from the policy's own, or from that of weights for it, and how far it reaches.

        That is in units of the policy's: at more than 1 there are actions that the policy cannot take. None where it
        is the same.
        """
        low, high = self.bounds if weights is None else _bounds(weights["center"], weights["width"])
        lowest, highest = self.bounds_of(space)
        if np.allclose([low, high], [lowest, highest]):
            return None
        width = (high - low) / 2
        differences = np.maximum(np.abs(low - lowest), np.abs(high - highest)) / width
        reach = np.maximum(np.abs(lowest - low - width), np.abs(highest - low - width)) / width
        dim = int(reach.argmax() if reach.max() > 1 else differences.argmax())
        words = f"the policy acts between {low[dim]:g} and {high[dim]:g} in action dim {dim}"
        return f"{words}, where actions here go from {lowest[dim]:g} to {highest[dim]:g}", float(reach.max())

    def check_box(self, space: gymnasium.Space) -> None:
        """Refuse an environment that takes other actions: the policy would act on another scale."""
        if self.misfit(space) is not None:
            low, high = self.bounds
            raise InputError(
                f"the policy acts between {low.min():g} and {high.max():g}, the environment takes {space}: make the "
                "policy for that action_space, or rescale the environment's actions (gymnasium.wrappers.RescaleAction)"
            )

    def to_unit(self, action: Tensor) -> Tensor:
        """Actions of the Box as unit actions […, A]."""
        return action if self.is_unit else (action - self.center) / self.width

    def from_unit(self, unit: Tensor) -> Tensor:
        """Unit actions as actions of the Box."""
        action = unit if self.is_unit else torch.addcmul(self.center, unit, self.width)
        return action if len(self.action_shape) == 1 else action.reshape(*action.shape[:-1], *self.action_shape)
