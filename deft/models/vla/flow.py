"""Base class of pretrained models whose actions are a flow: `pi0`, `pi05` and `smolvla`.

They are fine-tuned by flow matching, act by denoising, and PPO and GRPO score the denoising chain (`flow_chain`).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from deft.errors import InputError
from deft.models.denoising_chain import Transition
from deft.models.flow_chain import Velocity, flow_matching_error, flow_transition, hold_last
from deft.models.inpainting import Inpainting, guided_velocity
from deft.models.vla.denoising import ChainShape, DenoisingVLA, Steps
from deft.models.vla.spec import StreamSpec


@dataclass(kw_only=True)
class FlowSpec(StreamSpec):
    """The denoising of a flow: its number of steps (None: that of the model) and σ of each step."""

    num_steps: int | None = None
    flow_noise: float = 0.1
    learn_noise: bool = True


@dataclass(frozen=True)
class FlowShape(ChainShape):
    """The chunk that a flow model denoises, and the distribution of times in training: scale · Beta(α, 1) + offset."""

    alpha: float = 1.5
    scale: float = 0.999
    offset: float = 0.001


class FlowVLA(DenoisingVLA):
    """A flow over the chunk of a pretrained model, of which the first K steps and A dims are executed.

    `flow_noise` is σ of each step when actions are sampled (deterministic actions have none); with `learn_noise` it is
    trained. A subclass defines `field`, and calls `add_flow` in its constructor.
    """

    gradient_checkpointing = False
    flow: FlowShape
    log_noise: nn.Parameter

    def add_flow(self, spec: FlowSpec, flow: FlowShape) -> None:
        """Add the deviation of the steps; raise an error if chunks or actions are larger than those of the model."""
        if not spec.flow_noise > 0:
            raise InputError(f"flow_noise {spec.flow_noise} must be above 0: without noise a chain has no log-prob")
        self.flow = flow
        self.add_chain(flow, spec.num_steps)
        initial = torch.full((self.num_steps,), math.log(spec.flow_noise))
        self.log_noise = nn.Parameter(initial, requires_grad=spec.learn_noise)

    def field(self, observations: TensorDictBase) -> tuple[Velocity, Tensor]:
        """The velocity field (x, t) → ε − a given an observation, and the features of the value, [B, F]."""
        raise TypeError(f"{type(self).__name__} does not define field")

    @property
    def deviation(self) -> Tensor:
        """σ of each step of the denoising, [S]."""
        return self.log_noise.exp()

    def steps(self, observations: TensorDictBase) -> tuple[Steps, Tensor]:
        """Euler steps along the velocity field, and the features of the value."""
        velocity, features = self._field(observations)

        def steps(deterministic: bool, mask: Tensor, inpainting: Inpainting | None) -> Transition:
            return flow_transition(guided_velocity(velocity, inpainting), self.deviation)

        return steps, features

    def imitation_loss(self, observations: TensorDictBase, actions: Tensor, step_mask: Tensor | None = None) -> Tensor:
        """The flow-matching error of demonstrated chunks [B, K, A], [B], over the model's chunk of at least K steps.

        Steps beyond K, and those that `step_mask` [B, K] leaves out, are not counted; nor are dims beyond A.
        """
        velocity, features = self._field(observations)
        chunk, flow = self.chunk(actions), self.flow
        normalised = self.action_statistics.normalize(chunk if step_mask is None else hold_last(chunk, step_mask))
        further = flow.chunk_size - self.chunk_length
        padded = functional.pad(normalised, (0, flow.dims - self.action_dim, 0, further))
        uniform = torch.rand(len(padded), device=padded.device)
        time = flow.scale * uniform ** (1 / flow.alpha) + flow.offset  # Beta(α, 1) has the distribution function t^α
        mask = self.executed(None, features.device)
        if step_mask is not None:
            mask = mask & functional.pad(step_mask, (0, further)).unsqueeze(-1)
        return flow_matching_error(velocity, padded, torch.randn_like(padded), time, mask)

    def _field(self, observations: TensorDictBase) -> tuple[Velocity, Tensor]:
        velocity, features = self.field(observations)
        if self.gradient_checkpointing and torch.is_grad_enabled():  # recompute each denoising step in backward
            return functools.partial(checkpoint, velocity, use_reentrant=False), features
        return velocity, features
