"""The action scale of a policy: actions in [-1, 1] inside ("unit actions"), those of the environment outside.

The scale is part of the policy: its buffers are saved with the weights, and wherever those are loaded they act in the
same units. Action heads, `VLAPolicy` and the Decision Transformer build on it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from deft.errors import InputError

log = logging.getLogger(__name__)
NEGLIGIBLE = 1e-3  # of a half range: an action that is clipped by less is not worth a warning
FIXED_WIDTH = 1e-6  # half width of a dim whose Box has equal bounds: the policy always gives that value


def with_bounds(space: gymnasium.Space) -> gymnasium.Space:
    """A Box with bounds of ±1 where it has none: for a policy whose weights bring a scale of their own."""
    if not isinstance(space, spaces.Box):
        return space
    low, high = (np.where(np.isfinite(bound), bound, one) for bound, one in ((space.low, -1.0), (space.high, 1.0)))
    bad = low >= high
    return spaces.Box(np.where(bad, -1.0, low), np.where(bad, 1.0, high), dtype=np.float32)


def chunk_space(space: gymnasium.Space, length: int) -> gymnasium.Space:
    """The space [K, A] of chunks of K single actions; the space itself for K = 1, and where it is one of chunks."""
    if length == 1 or not isinstance(space, spaces.Box) or len(space.shape) != 1:
        return space
    return spaces.Box(np.tile(space.low, (length, 1)), np.tile(space.high, (length, 1)), dtype=space.dtype.type)


class UnboundedActions(InputError):
    """An action space in which a policy cannot act; `deft.runs.policies.build_policy` names the algorithm."""


class ActionScale(nn.Module):
    """action = center + width · unit, in each dim; `center` and `width` are buffers, [A] or [K · A] for chunks of K.

    `is_unit`: whether the scale leaves actions unchanged; updated when weights are loaded.
    """

    action_shape: tuple[int, ...]
    action_dim: Any
    chunk_length: int = 1
    center: Tensor
    width: Tensor
    is_unit: bool

    def set_scale(self, center: Tensor, width: Tensor) -> None:
        """Set the scale, of as many numbers as an action has."""
        self.register_buffer("center", center)
        self.register_buffer("width", width)
        if "is_unit" not in self.__dict__:
            self.register_load_state_dict_post_hook(_update_is_unit)
        _update_is_unit(self)

    def set_box(self, space: gymnasium.Space, who: str = "the policy acts") -> None:
        """Set the scale to a bounded Box: its centre and half width."""
        if not isinstance(space, spaces.Box) or not np.all(np.isfinite(space.low) & np.isfinite(space.high)):
            raise UnboundedActions(f"{who} in a bounded Box; the actions here are {space}")
        low, high = (np.asarray(bound, np.float64).reshape(-1) for bound in (space.low, space.high))
        self.action_shape, self.action_dim = tuple(space.shape), len(low)
        center, width = (low + high) / 2, np.maximum((high - low) / 2, FIXED_WIDTH)
        self.set_scale(*(torch.as_tensor(part, dtype=torch.float32) for part in (center, width)))

    @property
    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """The actions that -1 and 1 stand for, of all steps of a chunk."""
        return _bounds(self.center, self.width)

    def bounds_of(self, space: gymnasium.Space) -> tuple[np.ndarray, np.ndarray]:
        """Those of another Box, of single actions or of chunks; raises an error for one of other sizes."""
        size = self.center.numel()
        if not isinstance(space, spaces.Box) or space.low.size not in (size, size / self.chunk_length):
            raise InputError(f"policy: made for actions of {size} numbers, the environment takes {space}")
        return np.resize(space.low, size), np.resize(space.high, size)

    def check_box(self, space: gymnasium.Space) -> None:
        """Raise an error where the policy's range and the environment's do not overlap; warn where it is clipped."""
        (low, high), (lowest, highest) = self.bounds, self.bounds_of(space)
        outside = np.maximum(lowest - low, high - highest)
        is_fixed = high == low
        beyond = outside / np.where(is_fixed, 1.0, high - low)  # in ranges of the policy
        # A fixed dim is inside or outside; bounds that differ by a rounding error are equal.
        beyond[is_fixed] = np.where(outside > 1e-5 * np.maximum(1.0, np.abs(low)), np.inf, 0.0)[is_fixed]
        dim = int(beyond.argmax())
        ranges = (
            f"action dim {dim}: the policy acts between {low[dim]:g} and {high[dim]:g}, the environment takes "
            f"{lowest[dim]:g} to {highest[dim]:g}"
        )
        if beyond[dim] > 1:
            raise InputError(
                f"{ranges}: the two ranges do not overlap; rescale the environment's actions "
                "(gymnasium.wrappers.RescaleAction), or train the policy on data of this robot"
            )
        if beyond[dim] > NEGLIGIBLE:
            log.warning("%s: what lies outside is clipped", ranges)
        elif not np.allclose([low, high], [lowest, highest]):
            log.info("the policy keeps its own action range, which lies within the environment's %s", space)

    def misfit(self, space: gymnasium.Space, weights: Mapping[str, Tensor] | None = None) -> tuple[str, float] | None:
        """Where a Box differs most from the policy's own, or from that of weights for it, and how far it reaches.

        The reach is in units of the policy's range: above 1 there are actions that the policy cannot take. None where
        the ranges are equal.
        """
        low, high = self.bounds if weights is None else _bounds(weights["center"], weights["width"])
        lowest, highest = self.bounds_of(space)
        is_same = np.isclose(low, lowest) & np.isclose(high, highest)
        if is_same.all():
            return None
        width = np.maximum((high - low) / 2, FIXED_WIDTH)
        differences = np.maximum(np.abs(low - lowest), np.abs(high - highest)) / width
        reach = np.maximum(np.abs(lowest - low - width), np.abs(highest - low - width)) / width
        differences, reach = np.where(is_same, 0.0, differences), np.where(is_same, 1.0, reach)
        dim = int(reach.argmax() if reach.max() > 1 else differences.argmax())
        words = f"the policy acts between {low[dim]:g} and {high[dim]:g} in action dim {dim}"
        return f"{words}, where actions here go from {lowest[dim]:g} to {highest[dim]:g}", float(reach.max())

    def to_unit(self, action: Tensor) -> Tensor:
        """Actions […, A] in the environment's units as unit actions."""
        return action if self.is_unit else (action - self.center) / self.width

    def from_unit(self, unit: Tensor) -> Tensor:
        """Unit actions […, A] as actions in the environment's units."""
        action = unit if self.is_unit else torch.addcmul(self.center, unit, self.width)
        return action if len(self.action_shape) == 1 else action.reshape(*action.shape[:-1], *self.action_shape)


def _update_is_unit(scale: Any, _: Any = None) -> None:
    scale.is_unit = bool((scale.center == 0).all() and (scale.width == 1).all())


def _bounds(center: Tensor, width: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The smallest and the largest action; equal in a fixed dim, whose half width is only a rounding error."""
    half = torch.where(width > 2 * FIXED_WIDTH, width, 0.0)
    return (center - half).cpu().numpy(), (center + half).cpu().numpy()


class _IntoBox(torch.autograd.Function):
    """clip(x, −1, 1) whose gradient is stopped only where a descent along it would lead further out.

    A plain clip has no gradient at all outside, and an action that is there would never come back.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(-1.0, 1.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        outwards = (x.abs() > 1.0) & (gradients[0] * x < 0)  # a step is −gradient
        return gradients[0].masked_fill(outwards, 0.0)


def into_box(unit: Tensor) -> Tensor:
    """Unit actions as the environment executes them, clipped, differentiable."""
    return _IntoBox.apply(unit)
