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

from deft import schema
from deft.errors import InputError
from deft.models.flow_chain import (
    Velocity,
    chain_entropy,
    chain_log_prob,
    draw_chain,
    flow_matching_error,
    hold_last,
    integrate,
)
from deft.models.vla.interface import Sample
from deft.models.vla.pretrained import PretrainedVLA
from deft.models.vla.spec import StreamSpec
from deft.models.vla.streams import Statistics


@dataclass(kw_only=True)
class FlowSpec(StreamSpec):
    """The denoising of a flow: its number of steps (None: that of the model) and σ of each step."""

    num_steps: int | None = None
    flow_noise: float = 0.1
    learn_noise: bool = True


@dataclass(frozen=True)
class FlowShape:
    """The chunk that a flow model denoises, and the distribution of times in training: scale · Beta(α, 1) + offset."""

    name: str
    chunk_size: int
    dims: int
    num_steps: int
    alpha: float = 1.5
    scale: float = 0.999
    offset: float = 0.001


class FlowVLA(PretrainedVLA):
    """A flow over the chunk of a pretrained model, of which the first K steps and A dims are executed.

    `flow_noise` is σ of each step when actions are sampled (deterministic actions have none); with `learn_noise` it is
    trained. The chain covers the whole chunk of the model and all of its dims; only the executed dims get this noise
    and have a log-prob. A subclass defines `field`, and calls `add_flow` in its constructor.
    """

    keeps_sample = True
    starts_from_noise = True
    gradient_checkpointing = False
    action_statistics: Statistics
    flow: FlowShape
    log_noise: nn.Parameter

    def add_flow(self, spec: FlowSpec, flow: FlowShape) -> None:
        """Add the deviation of the steps; raise an error if chunks or actions are larger than those of the model."""
        if not spec.flow_noise > 0:
            raise InputError(f"flow_noise {spec.flow_noise} must be above 0: without noise a chain has no log-prob")
        check_at_most(
            flow.name, action_dim=(spec.action_dim, flow.dims), chunk_length=(spec.chunk_length, flow.chunk_size)
        )
        self.flow, self.num_steps = flow, spec.num_steps or flow.num_steps
        self.noise_shape = (flow.chunk_size, flow.dims)
        initial = torch.full((self.num_steps,), math.log(spec.flow_noise))
        self.log_noise = nn.Parameter(initial, requires_grad=spec.learn_noise)

    def field(self, observations: TensorDictBase) -> tuple[Velocity, Tensor]:
        """The velocity field (x, t) → ε − a given an observation, and the features of the value, [B, F]."""
        raise TypeError(f"{type(self).__name__} does not define field")

    @property
    def deviation(self) -> Tensor:
        """σ of each step of the denoising, [S]."""
        return self.log_noise.exp()

    # The interface of a VLA model ------------------------------------------------------------------------------------

    def get_value(self, observations: TensorDictBase) -> Tensor:
        """Value of each observation: [B, 1]."""
        return self.value_head(self.field(observations)[1])

    def act(
        self, observations: TensorDictBase, deterministic: bool = False, action_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Actions, log-prob of the chain [B], value [B, 1], and the chain. Deterministic: only the first noise."""
        velocity, features = self._field(observations)
        noise = torch.randn(len(features), self.flow.chunk_size, self.flow.dims, device=features.device)
        executed = self._executed(action_mask, features.device)
        chain, log_probs = draw_chain(velocity, noise, self.deviation, deterministic, executed)
        value = self.value_head(features)
        return self._actions(chain[:, -1], action_mask), log_probs.sum(1), value, {schema.CHAIN: chain}

    def denoise(
        self,
        observations: TensorDictBase,
        noise: Tensor,
        action_mask: Tensor | None = None,
        features: Tensor | None = None,
    ) -> Tensor:
        """The actions that noise [B, *noise_shape] leads to."""
        velocity, _ = self.field(observations)
        return self._actions(integrate(velocity, noise, self.num_steps), action_mask)

    def evaluate_actions(
        self, observations: TensorDictBase, actions: Tensor, action_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """A flow's action alone has no log-prob: `evaluate` scores the chain that it came from."""
        raise InputError(
            f"{self.flow.name} has no log-prob of an action alone, only of its denoising chain, which ppo and grpo "
            "store: train on a dataset with sft (flow matching)"
        )

    def evaluate_tokens(
        self, observations: TensorDictBase, actions: Tensor, action_mask: Tensor | None = None, sample: Sample = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `evaluate`, with the log-prob of each step of the denoising, [B, S]."""
        if sample is None:
            raise InputError(
                f"{self.flow.name} scores the denoising chain of an action, and no chain is stored with this action"
            )
        velocity, features = self._field(observations)
        chain, mask = sample[schema.CHAIN], self._executed(action_mask, features.device)
        log_probs = chain_log_prob(velocity, chain, self.deviation, mask)
        shape = (len(chain), *chain.shape[2:])
        return log_probs, chain_entropy(self.deviation, shape, mask), self.value_head(features)

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
        mask = self._executed(None, features.device)
        if step_mask is not None:
            mask = mask & functional.pad(step_mask, (0, further)).unsqueeze(-1)
        return flow_matching_error(velocity, padded, torch.randn_like(padded), time, mask)

    # Computation -----------------------------------------------------------------------------------------------------

    def _field(self, observations: TensorDictBase) -> tuple[Velocity, Tensor]:
        velocity, features = self.field(observations)
        if self.gradient_checkpointing and torch.is_grad_enabled():  # recompute each denoising step in backward
            return functools.partial(checkpoint, velocity, use_reentrant=False), features
        return velocity, features

    def _executed(self, action_mask: Tensor | None, device: torch.device) -> Tensor:
        """Mask of the executed steps and dims of the chain, bool, broadcast to [B, chunk, dims]."""
        mask = torch.zeros(1, self.flow.chunk_size, self.flow.dims, dtype=torch.bool, device=device)
        mask[:, : self.chunk_length, : self.action_dim] = True
        if action_mask is None:
            return mask
        return mask & functional.pad(action_mask, (0, self.flow.dims - self.action_dim)).unsqueeze(1)

    def _actions(self, end: Tensor, action_mask: Tensor | None) -> Tensor:
        """The executed part of a chain's end, in the environment's units."""
        executed = end[:, : self.chunk_length, : self.action_dim]
        return self.shaped(self.action_statistics.denormalize(executed), action_mask)


def check_at_most(name: str, **sizes: tuple[int, int]) -> None:
    """Raise an error if a size of the environment is larger than that of the model."""
    for key, (size, most) in sizes.items():
        if size > most:
            raise InputError(f"{key} {size} is more than this {name} has: {most}")
