"""An ensemble of small networks that predict the colours of the next frame; their disagreement is a reward.

Unpredictable noise gives no reward: every member learns to predict its mean, so the members agree. The adversarial
phase trains an ensemble beside the world model if `reward` is `disagreement`, the student with a `disagreement_weight`
or a `learning_progress_weight`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from deft import schema
from deft.models.f1.config import F1Config

SIDE = 8  # frames are predicted as SIDE × SIDE colours
FRAMES = 2  # the number of latest frames in each member's input
TRAINING_FRACTION = 0.5  # fraction of the steps that each member is trained on, so that the members differ


class Disagreement(nn.Module):
    """K networks, [FRAMES frames, actions, state] → change of the colours; one batched product per layer."""

    def __init__(self, config: F1Config, members: int = 5, width: int = 128) -> None:
        super().__init__()
        self.history = config.n_obs_img_steps
        inputs = FRAMES * 3 * SIDE**2 + self.history * config.max_action_dim + config.max_state_dim
        sizes = (inputs, width, width, 3 * SIDE**2)
        self.weights = nn.ParameterList(
            [nn.Parameter(torch.randn(members, first, last) / first**0.5) for first, last in itertools.pairwise(sizes)]
        )
        self.biases = nn.ParameterList([nn.Parameter(torch.zeros(members, 1, last)) for last in sizes[1:]])

    def predict(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Predict the change of the colours with each member: [K, N, 3 · SIDE²] for the N steps of a batch."""
        frames, *_ = self._colours(batch)
        observed = frames[:, self.history - FRAMES : self.history].flatten(1)
        actions, state = batch[schema.ACTION_HISTORY].flatten(-2), batch[schema.STATE]
        inputs = torch.cat([observed, actions.flatten(0, -2).to(observed), state.flatten(0, -2).to(observed)], 1)
        hidden = inputs.expand(len(self.weights[0]), -1, -1)
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            hidden = torch.baddbmm(bias, hidden, weight)
            if layer < len(self.weights) - 1:
                hidden = functional.silu(hidden)
        return hidden

    @torch.no_grad()
    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the standard deviation across members, averaged over the colours, one value per step."""
        spread = self.predict(batch).std(0).mean(-1)
        return spread.view(batch[schema.STATE].shape[:-1])

    @torch.no_grad()
    def errors(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the squared error, averaged over members and colours, one value per step."""
        _, target = self._colours(batch)
        return (self.predict(batch) - target).square().mean((0, -1)).view(batch[schema.STATE].shape[:-1])

    def loss(self, batch: Mapping[str, Tensor], generator: torch.Generator | None = None) -> Tensor:
        """Return the mean squared error, each member on its own random half of the steps."""
        _, target = self._colours(batch)
        errors = (self.predict(batch) - target).square().mean(-1)  # [K, N]
        weight = (torch.rand(errors.shape, generator=generator) < TRAINING_FRACTION).to(errors)
        if schema.STEP_MASK in batch:
            weight = weight * batch[schema.STEP_MASK].to(errors).flatten()
        return (errors * weight).sum() / weight.sum().clamp(min=1)

    def _colours(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the frames [N, H + 1, 3 · SIDE²] in 0 … 1, and the last frame minus the previous one."""
        device = self.biases[0].device
        frames = batch[schema.IMAGE0_HISTORY].to(device).flatten(0, -5)
        small = functional.adaptive_avg_pool2d(frames.flatten(0, 1).float() / 255.0, SIDE)
        colours = small.view(*frames.shape[:2], -1)
        return colours, colours[:, -1] - colours[:, -2]
