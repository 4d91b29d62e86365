"""A flow policy of the data's actions, and how it acts by critics: by a distilled network, or by the best of n samples.

Built by `deft.algorithms.fql` around a policy that denoises: an `ActorCritic` with `distribution: flow`, or a VLA model
with a flow head.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from deft import schema
from deft.errors import InputError
from deft.models.critics import Critics
from deft.models.mlp import BatchedMLP
from deft.models.policy import SAMPLED_NOISE, Encoded, Policy
from deft.models.wrapping import WrappingPolicy

log = logging.getLogger(__name__)


class QFlowPolicy(WrappingPolicy):
    """The flow policy is a = f(s, z) with z ~ N(0, 1), which `base` denoises.

    Distilled: a = clip(μ(s, z)), where the network μ maps noise to an action in one step. Best of n: the a_i of n
    samples z_i with the largest Q(s, a_i), by `critics`, which are part of the policy then.
    """

    reward_scale: Tensor
    one_step: BatchedMLP | None
    critics: Critics | None

    def __init__(self, base: Policy, num_candidates: int = 0) -> None:
        super().__init__()
        if base.noise_shape is None:
            raise InputError(
                f"policy: fql trains a policy that denoises, and {type(base).__name__} does not here; use "
                "--distribution flow (the default of fql), or vla-tiny with head=flow"
            )
        self.wrap(base)
        self.num_candidates, self.noise_dims = num_candidates, base.noise_shape
        noise_dim = base.noise_shape[0] * base.noise_shape[1]
        self.one_step = self.critics = None
        if not num_candidates:
            self.one_step = BatchedMLP(1, self.feature_dim + noise_dim, self.hidden_sizes, self.action_dim)
        self.register_buffer("reward_scale", torch.ones(()))

    # -- for collectors ------------------------------------------------------------------------------------------------

    def act(self, td: TensorDictBase, deterministic: bool = False) -> TensorDictBase:
        """Add an action; it has no log-prob. Noise is sampled also when deterministic: a flow has no mode."""
        state = self.base.encode_to_act(td[schema.OBSERVATION])
        if self.num_candidates:
            unit = self.best(state)
        else:
            unit = self.distilled(state, self.sample_noise(state)).clamp(-1.0, 1.0)
        td.set(schema.ACTION, self.from_unit(unit[0]))
        return td

    def action_selection(self, deterministic: bool) -> str:
        """The noise is always sampled."""
        return SAMPLED_NOISE

    def evaluate_actions(self, td: TensorDictBase) -> dict[str, Tensor]:
        """Raise an error: the actions have no density."""
        raise InputError("policy: the actions of an fql policy have no log-prob; continue with fql or fql-online")

    def observe(self, td: TensorDictBase | Mapping[str, Any]) -> None:
        """Update the statistics of the flow policy."""
        self.base.observe(td)

    # -- for the algorithm ---------------------------------------------------------------------------------------------

    def encode(self, observation: Any, object_positions: Tensor | None = None) -> Encoded:
        """Encode observations as the flow policy does, with what critics read beside its features."""
        return self.with_privileged(self.base.encode(observation, object_positions), observation)

    def imitation_loss(self, state: Encoded, unit: Tensor) -> Tensor:
        """The flow-matching loss, [1, B]."""
        return self.base.imitation_loss(state, unit)

    def sample_noise(self, state: Encoded) -> Tensor:
        """Noise z [B, K, A] for each state."""
        return torch.randn(state.features.shape[1], *self.noise_dims, device=state.features.device)

    def distilled(self, state: Encoded, noise: Tensor) -> Tensor:
        """Unit actions μ(s, z) [1, B, A], before clipping, differentiable."""
        assert self.one_step is not None
        return self.one_step(torch.cat([state.features, noise.flatten(1).unsqueeze(0)], -1))

    @torch.no_grad()
    def denoised(self, state: Encoded, noise: Tensor) -> Tensor:
        """Unit actions f(s, z) [1, B, A] of the flow policy, clipped."""
        return self.base.denoise(state, noise).clamp(-1.0, 1.0).unsqueeze(0)

    @torch.no_grad()
    def candidates(self, state: Encoded) -> tuple[Tensor, Tensor]:
        """Features for critics and n actions for each state, [1, n · B, …]; sample i of state b is row i B + b."""
        count = self.num_candidates
        if self.base.acts_on_features:
            shared = None if state.shared_features is None else state.shared_features.repeat(count, 1)
            repeated = Encoded(None, state.features.repeat(1, count, 1), shared)
            actions = self.denoised(repeated, self.sample_noise(repeated))
        else:
            actions = torch.cat([self.denoised(state, self.sample_noise(state)) for _ in range(count)], 1)
        return state.for_critics.repeat(1, count, 1), actions

    @torch.no_grad()
    def best(self, state: Encoded) -> Tensor:
        """The unit actions [1, B, A] with the largest mean Q of the n samples of each state."""
        assert self.critics is not None
        features, actions = self.candidates(state)
        values = self.critics(features, actions).mean(1).view(self.num_candidates, -1)
        choice = values.argmax(0)
        actions = actions.view(self.num_candidates, -1, actions.shape[-1])
        return actions[choice, torch.arange(actions.shape[1], device=choice.device)].unsqueeze(0)

    def actor_parameters(self) -> Iterator[nn.Parameter]:
        """The flow policy and the distilled network."""
        yield from self.base.actor_parameters()
        if self.one_step is not None:
            yield from self.one_step.parameters()

    def encoder_parameters(self) -> Iterator[nn.Parameter]:
        """The encoder, where it learns."""
        yield from self.base.encoder_parameters()

    def value_only_parameters(self) -> Iterator[nn.Parameter]:
        """Those of the flow policy."""
        yield from self.base.value_only_parameters()

    def complete_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights of such a policy, or those of a flow policy with the other networks' own."""
        completed, is_alone = self.with_base_weights(weights)
        if is_alone:
            log.info("the flow policy is loaded; the other networks start from new weights")
        return self._keep_critic(completed)
