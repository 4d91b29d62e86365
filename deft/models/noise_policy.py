"""A frozen policy that denoises, and a small network that selects the noise it starts from; DSRL trains the network.

Built by `deft.algorithms.dsrl` around the policy of another run. The frozen policy is a part of it: one set of weights
is saved, loaded and deployed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from deft import schema
from deft.errors import InputError
from deft.models.distributions import TanhGaussianHead
from deft.models.mlp import BatchedMLP
from deft.models.policy import Encoded, Policy
from deft.models.wrapping import WrappingPolicy

log = logging.getLogger(__name__)


class NoisePolicy(WrappingPolicy):
    """a = f(s, w) with w = b · tanh(x), x ~ N(μ(z), σ(z)²): f denoises w without further random values.

    z are the features that the frozen policy acts on, or those of the critics' encoder where it exposes none; b is
    `noise_bound`. μ is 0 and σ is 1 at the start: w is then distributed like the N(0, 1) that f was trained on, within
    the bound. With `shared_noise` all steps of a chunk start from the same noise. Log-probs are those of w.
    """

    reward_scale: Tensor

    def __init__(self, base: Policy, noise_bound: float = 1.5, shared_noise: bool = False) -> None:
        super().__init__()
        if base.noise_shape is None:
            raise InputError(
                f"policy: dsrl selects the noise of a policy that denoises, and {type(base).__name__} does not here; "
                "give --model_path a run of sft with --distribution flow or diffusion, vla-tiny with head=flow, or "
                "another VLA model that denoises (smolvla, pi0, pi05, groot, diffusion-policy)"
            )
        self.wrap(base.requires_grad_(False).eval())
        length, size = base.noise_shape
        self.steered_shape = (1 if shared_noise else length, size)
        self.noise_dim = self.steered_shape[0] * size
        self.head = TanhGaussianHead(spaces.Box(-noise_bound, noise_bound, (self.noise_dim,), np.float32))
        self.actor = BatchedMLP(1, self.feature_dim, self.hidden_sizes, self.head.num_outputs)
        nn.init.zeros_(self.actor.weights[-1])
        nn.init.zeros_(self.actor.biases[-1])
        self.register_buffer("reward_scale", torch.ones(()))
        for parameter in self.encoder_parameters():
            parameter.requires_grad_(True)

    def train(self, mode: bool = True) -> Self:
        """Set the policy's mode; the frozen policy stays in evaluation mode."""
        super().train(mode)
        self.base.eval()
        return self

    # -- for collectors ------------------------------------------------------------------------------------------------

    def act(self, td: TensorDictBase, deterministic: bool = False) -> TensorDictBase:
        """Select noise (its mode when deterministic) and add the action that it leads to, with the log-prob of it."""
        state = self._encoded(td[schema.OBSERVATION])._replace(action_mask=td.get(schema.ACTION_MASK, None))
        noise, log_prob, sample = self.head.act(self._output(state)[0], None, deterministic)
        td.set(schema.ACTION, self.from_unit(self.denoise_unit(state, self.head.to_unit(noise))))
        td.set(schema.LOG_PROB, log_prob)
        td.set(schema.SAMPLE, TensorDict({schema.NOISE: noise, **(sample or {})}, batch_size=td.batch_size))
        return td

    def evaluate_actions(self, td: TensorDictBase) -> dict[str, Tensor]:
        """Log-prob and entropy (before tanh) of the stored noise; there is no value."""
        stored = td.get(schema.SAMPLE, None)
        if stored is None:
            raise InputError("the noise of an action is needed to score it; no `sample` is stored")
        output = self._output(self._encoded(td[schema.OBSERVATION]))[0]
        log_prob, entropy = self.head.score(output, stored[schema.NOISE], None, stored)
        return {"log_prob": log_prob, "entropy": entropy}

    def observe(self, td: TensorDictBase | Mapping[str, Any]) -> None:
        """Update the statistics of the critics' encoder, if there is one; those of the frozen policy stay."""
        if self._has_own_encoder():
            self.base.observe_value(td)

    # -- for the algorithm ---------------------------------------------------------------------------------------------

    def encode(self, observation: Any, object_positions: Tensor | None = None) -> Encoded:
        """Encode observations as the frozen policy acts on them, with what critics read beside its features."""
        return self.with_privileged(self._encoded(observation), observation)

    def sample_noise(self, state: Encoded) -> tuple[Tensor, Tensor]:
        """Unit noise w / b [1, 1, B, D], differentiable, and its log-density [1, 1, B]."""
        return self.head.rsample(self._output(state), 1)

    def divergence_from_start(self, state: Encoded) -> Tensor:
        """KL from the noise of a new network (μ = 0, σ = 1), [1, B]."""
        output = self._output(state)
        return self.head.divergence(output, self.head, torch.zeros_like(output))

    @torch.no_grad()
    def denoise_unit(self, state: Encoded, unit_noise: Tensor) -> Tensor:
        """Unit actions [B, A], before clipping, that unit noise w / b [B, D] leads to."""
        noise = self.head.from_unit(unit_noise).unflatten(-1, self.steered_shape)
        assert self.base.noise_shape is not None
        return self.base.denoise(state, noise.expand(-1, *self.base.noise_shape), state.action_mask)

    def mean(self, state: Encoded) -> Tensor:
        """The unit action that the most likely noise leads to, [1, B, A]; without a gradient."""
        return self.denoise_unit(state, self.head.mean(self._output(state))[0]).unsqueeze(0)

    def actor_parameters(self) -> Iterator[nn.Parameter]:
        """The network that selects the noise."""
        yield from self.actor.parameters()

    def encoder_parameters(self) -> Iterator[nn.Parameter]:
        """The encoder of the critics, if no action of the frozen policy depends on it."""
        free = {id(parameter) for parameter in self.base.value_only_parameters()}
        yield from (parameter for parameter in self.base.encoder_parameters() if id(parameter) in free)

    def value_only_parameters(self) -> Iterator[nn.Parameter]:
        """None: the noise depends on the encoder of the critics too."""
        yield from ()

    def complete_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights of such a policy, or those of a policy to freeze with the network's own."""
        completed, is_alone = self.with_base_weights(weights)
        if is_alone:
            log.info("the policy is frozen; the network that selects its noise starts from new weights")
        return self._keep_critic(completed)

    def _encoded(self, observation: Any) -> Encoded:
        """The features that the frozen policy acts on; gradients reach the critics' encoder alone."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and self._has_own_encoder()):
            return self.base.encode_to_act(observation)

    def _has_own_encoder(self) -> bool:
        return any(True for _ in self.encoder_parameters())

    def _output(self, state: Encoded) -> Tensor:
        return self.actor(state.features.detach())
