"""Heads that denoise: a network that turns noise into actions in a few steps, given features of the observation.

`vla-tiny` has them for chunks of actions, `ActorCritic` for single ones (`DenoisingHead`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import gymnasium
import torch
from torch import Tensor, nn
from torch.nn import functional

from deft import schema
from deft.errors import InputError
from deft.models.chunks import LOG_STD_RANGE, Chunks, Drawn
from deft.models.distributions import BoxHead
from deft.models.flow_chain import chain_entropy, chain_log_prob, draw_chain, flow_matching_error, hold_last, integrate

TIME_FREQUENCIES = 8


class FlowChunks(Chunks):
    """A velocity field on chunks, trained by flow matching; sampled and scored as a noised chain (`flow_chain`)."""

    def __init__(self, width: int, chunk_length: int, action_dim: int, num_steps: int, noise: float) -> None:
        super().__init__(chunk_length, action_dim)
        self.num_steps = num_steps
        size = chunk_length * action_dim
        self.condition = nn.Linear(width, width)
        self.noisy = nn.Linear(size + 2 * TIME_FREQUENCIES, width)
        self.hidden = nn.Linear(width, width)
        self.out = nn.Linear(width, size)
        self.log_noise = nn.Parameter(torch.full((num_steps, *self.shape), math.log(noise)))

    def noise_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the deviation of each step of the chain."""
        yield self.log_noise

    @property
    def deviation(self) -> Tensor:
        """σ of each step, [S, K, A]."""
        return self.log_noise.clamp(*LOG_STD_RANGE).exp()

    def _velocity(self, features: Tensor) -> Any:
        condition = self.condition(features)

        def velocity(x: Tensor, time: Tensor) -> Tensor:
            angles = time[:, None] * (math.pi * 2.0 ** torch.arange(TIME_FREQUENCIES, device=x.device) / 4.0)
            inputs = torch.cat([x.flatten(1), angles.sin(), angles.cos()], 1)
            hidden = functional.relu(self.noisy(inputs) + condition)
            return self.out(hidden + functional.relu(self.hidden(hidden))).view(x.shape)

        return velocity

    def draw(self, features: Tensor, deterministic: bool, mask: Tensor | None) -> Drawn:
        """The end of a chain from sampled noise; deterministic: without further noise in its steps.

        A chain from noise 0 ends between the modes of the demonstrated actions.
        """
        start = torch.randn(len(features), *self.shape, dtype=features.dtype, device=features.device)
        velocity, deviation = self._velocity(features), self.deviation
        chain, log_probs = draw_chain(velocity, start, deviation, deterministic, mask)
        return chain[:, -1], log_probs.sum(1), {schema.CHAIN: chain}

    def score(self, features: Tensor, actions: Tensor, mask: Tensor | None, sample: Any) -> tuple[Tensor, Tensor]:
        """Log-probs of each step of the denoising, [B, S]."""
        deviation = self.deviation
        tokens = chain_log_prob(self._velocity(features), sample[schema.CHAIN], deviation, mask)
        return tokens, chain_entropy(deviation, actions.shape, mask)

    def imitation_loss(self, features: Tensor, actions: Tensor, step_mask: Tensor | None) -> Tensor:
        """‖v(x_t, t) − (ε − a)‖², with one t and one ε per row."""
        mask = None
        if step_mask is not None:
            actions, mask = hold_last(actions, step_mask), step_mask.unsqueeze(-1)
        time = torch.rand(len(actions), device=actions.device)
        return flow_matching_error(self._velocity(features), actions, torch.randn_like(actions), time, mask)

    @property
    def noise_shape(self) -> tuple[int, int]:
        """As the actions."""
        return self.shape

    def denoise(self, features: Tensor, noise: Tensor) -> Tensor:
        """Plain Euler steps from `noise`: the deterministic action of `draw`."""
        return integrate(self._velocity(features), noise, self.num_steps)


class DenoisingHead(BoxHead):
    """A head that denoises as the action head of an `ActorCritic`: the actor network gives it features, [B, F].

    Actions have no density of their own, only the chain that leads to one: `act` returns it, and `score` needs it.
    """

    def __init__(self, space: gymnasium.Space, chunks: Chunks, num_outputs: int) -> None:
        super().__init__()
        self.set_box(space)
        self.num_outputs = num_outputs
        self.chunks = chunks

    def noise_parameters(self) -> Iterator[Tensor]:
        """Yield those of the chain."""
        yield from self.chunks.noise_parameters()

    def act(
        self, output: Tensor, mask: Tensor | None, deterministic: bool
    ) -> tuple[Tensor, Tensor, dict[str, Tensor] | None]:
        """The end of a chain in the environment's units, its log-prob, and the chain; padded dims are 0."""
        unit, log_prob, sample = self.chunks.draw(output, deterministic, self._real(mask))
        if mask is not None:
            unit = unit.masked_fill(~mask.unsqueeze(1), 0.0)
        return self.from_unit(unit.flatten(1)), log_prob - self._log_width(mask), sample

    def score(self, output: Tensor, action: Tensor, mask: Tensor | None, sample: Any = None) -> tuple[Tensor, Tensor]:
        """Log-prob of the stored chain, and its entropy."""
        tokens, entropy = self._score(output, action, mask, sample)
        log_width = self._log_width(mask)
        return tokens.sum(1) - log_width, entropy + log_width

    def token_log_prob(self, output: Tensor, action: Tensor, mask: Tensor | None, sample: Any = None) -> Tensor:
        """One token for each step of the chain."""
        return self._score(output, action, mask, sample)[0]

    def imitation_loss(self, output: Tensor, unit: Tensor, step_mask: Tensor | None = None) -> Tensor:
        """The loss of the chunks: [members, B] of [members, B, F] and [members, B, K · A]."""
        actions = unit[0].unflatten(-1, self.chunks.shape)
        return self.chunks.imitation_loss(output[0], actions, step_mask).unsqueeze(0)

    @property
    def noise_shape(self) -> tuple[int, int] | None:
        """Shape [K, A] of the noise; K is 1 without chunks."""
        return self.chunks.noise_shape

    def denoise(self, output: Tensor, noise: Tensor) -> Tensor:
        """Unit actions [B, K · A] that noise [B, K, A] leads to."""
        return self.chunks.denoise(output, noise).flatten(1)

    def mean(self, output: Tensor) -> Tensor:
        """Raise an error: there is no mean action."""
        raise InputError(
            "a policy that denoises has no mean action, which td3-bc and sft with --loss mse train: use iql, or sft "
            "with --loss log_prob"
        )

    def log_prob(self, output: Tensor, unit: Tensor) -> Tensor:
        """Raise an error: only a chain has a density."""
        raise InputError("the actions of a policy that denoises have no log-prob of their own: score its chain")

    def rsample(self, output: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Raise an error: its samples have no density."""
        raise InputError(
            "a policy that denoises has no differentiable samples with a log-density, which sac and cql need; train it "
            "with sft, iql, ppo, grpo or dsrl"
        )

    def _score(self, output: Tensor, action: Tensor, mask: Tensor | None, sample: Any) -> tuple[Tensor, Tensor]:
        if sample is None:
            raise InputError("the actions of a policy that denoises have no log-prob of their own: score its chain")
        unit = self.to_unit(action.flatten(1)).unflatten(-1, self.chunks.shape)
        return self.chunks.score(output, unit, self._real(mask), sample)

    def _log_width(self, mask: Tensor | None) -> Tensor:
        """Σ log(half width) over the real dims of all steps."""
        if mask is None:
            return self.width.log().sum()
        return (self.width.log() * mask.tile(self.chunks.shape[0])).sum(-1)

    def _real(self, mask: Tensor | None) -> Tensor | None:
        return None if mask is None else mask.unsqueeze(1)
